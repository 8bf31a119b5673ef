"""One network on several processes: whole on each (DDP), or its weights shared out (FSDP2).

Both *add* gradients up, because every rank has divided its losses by the counts of the whole global
batch already (`bertkit.objectives`); torch's own default is the mean over the ranks.

FSDP2 (`fully_shard`) keeps a part of the weights, gradients and moments on each process and
gathers one layer at a time: for networks that do not fit otherwise. Its checkpoints are written by
`torch.distributed.checkpoint`, every process its own part, as safetensors: no pickle.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from bertkit.errors import BertkitError
from bertkit.files import disk_errors
from bertkit.model.encoder import Layer


def apply_fsdp(model: nn.Module, device: torch.device) -> None:
    """FSDP2: leave on this process its part of every weight; before the optimizer is built.

    Args:
        model: whole, on the device.
        device: of this process.
    """
    mesh = init_device_mesh(device.type, (distributed.get_world_size(),))
    for layer in [module for module in model.modules() if isinstance(module, Layer)]:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def apply_ddp(model: nn.Module, device: torch.device) -> DistributedDataParallel:
    """DDP: the same model, whose backward pass adds gradients up over the ranks.

    It begins with the first rank's weights everywhere.
    """
    one = [device] if device.type == "cuda" else None
    wrapped = DistributedDataParallel(
        model, device_ids=one, forward_sync_buffers=False, gradient_as_bucket_view=True
    )
    wrapped.register_comm_hook(None, lambda state, bucket: add_gradients(bucket))
    return wrapped


def add_gradients(bucket: Any) -> torch.futures.Future[Tensor]:
    """DDP's communication of one bucket of gradients: the sum over the ranks."""
    work = distributed.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None
    return work.get_future().then(lambda done: done.value()[0])


@contextmanager
def gradient_sync(model: nn.Module, wanted: bool) -> Iterator[None]:
    """Whether the backward pass of a block exchanges gradients: of micro-batches, the last one's.

    The forward pass belongs into the block, too.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(wanted)
        yield
    elif isinstance(model, DistributedDataParallel) and not wanted:
        with model.no_sync():
            yield
    else:
        yield


def gather_full(tensors: Mapping[str, Tensor], *, keep: bool = True) -> dict[str, Tensor]:
    """Tensors gathered from all ranks, one after the other, on the CPU; all have to call this.

    Args:
        tensors: parts, or what is the same everywhere.
        keep: whether this rank wants them; {} otherwise.
    """
    found = {}
    for name, tensor in tensors.items():
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if keep:
            found[name] = full.cpu()
    return found


def shard_like(whole_tensor: Tensor, own: Tensor) -> Tensor:
    """What of a whole tensor belongs on this process, as `own` is shared out."""
    if not isinstance(own, DTensor):
        return whole_tensor
    here = whole_tensor.to(own.device)
    return distribute_tensor(here, own.device_mesh, own.placements, src_data_rank=None)


def begin_sharded_save(
    folder: Path, tensors: Mapping[str, Tensor], group: distributed.ProcessGroup
) -> Any:
    """Copy this process's parts and begin to write them in the background.

    Args:
        folder: of this checkpoint, the same on all ranks; files named `shard-...` come into it.
        tensors: parts (DTensor) or what is the same everywhere.
        group: used by nothing else, as the work goes on beside the training.

    Returns:
        A future; it is done when the files of all ranks are there.
    """
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    return async_save(dict(tensors), storage_writer=writer, process_group=group)


def load_sharded(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Read a checkpoint of any number of ranks into tensors that are shared out in any way.

    Args:
        folder: with `shard-...` files.
        tensors: written in place; on several ranks all have to call this.
    """
    alone = not distributed.is_initialized()
    try:
        load(tensors, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=alone)
    except (CheckpointException, ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[-1]
        raise BertkitError(
            f"{folder} does not fit this run ({reason}); resume with the recipe that it was made "
            "with, or remove it to go on from the one before"
        ) from error


def wait_for_shards(written: Any, folder: Path) -> None:
    """Wait for what `begin_sharded_save` has begun.

    Raises:
        BertkitError: the disk of some process is full or not writable.
    """
    try:
        written.result()
    except CheckpointException as error:
        failures = [failure for failure, _ in error.failures.values()]
        of_the_disk = [failure for failure in failures if isinstance(failure, OSError)]
        if of_the_disk:
            with disk_errors(folder):
                raise of_the_disk[0] from error
        raise BertkitError(f"cannot write {folder}: {failures[0]}") from error
