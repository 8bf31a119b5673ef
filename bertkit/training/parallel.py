"""A network on several processes, replicated (DDP) or sharded (FSDP2), and compiled layers.

Both *sum* gradients, because every rank has already divided its losses by the counts of the whole
global batch (`bertkit.objectives`); torch's default is the mean over the ranks.

FSDP2 (`fully_shard`) keeps a shard of the weights, gradients and moments on each process and
gathers one layer at a time: for networks that do not fit otherwise. In its checkpoints every
process writes its shard with `torch.distributed.checkpoint`, as safetensors, without pickle.

On CUDA the layers, the token head and the losses may be compiled: dropout, residual, LayerNorm and
GELU become a few fused kernels, forward and backward, and so does the softmax over the vocabulary.
Matrix products and attention still use the library's kernels.
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
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from bertkit.errors import BertkitError
from bertkit.files import disk_errors
from bertkit.model.encoder import Layer
from bertkit.model.heads import LanguageHead
from bertkit.model.native.attention import has_triton
from bertkit.objectives import CrossEntropy, cross_entropy_sums


def apply_fsdp(model: nn.Module, device: torch.device, precision: str) -> None:
    """Shard a model in place with FSDP2; call this before the optimizer is built."""
    mesh = init_device_mesh(device.type, (distributed.get_world_size(),))
    policy = layer_policy(device, precision)
    for layer in [module for module in model.modules() if isinstance(module, Layer)]:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def layer_policy(device: torch.device, precision: str) -> MixedPrecisionPolicy:
    """Return in which precision FSDP2 gathers the weights of layers and adds their gradients.

    On CUDA, in bf16, the weights are gathered in bf16, which halves what is sent and spares
    autocast the conversion. Matrix products are the same as with DDP, where autocast rounds the
    same weights; only LayerNorm's weights and biases, which autocast leaves in fp32, are rounded
    as well. Hidden states keep their dtype, and gradients are added in fp32. Embeddings and heads,
    which are not part of a layer, are gathered in fp32. Elsewhere everything is in fp32.
    """
    if device.type != "cuda" or precision == "fp32":
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
    )


def apply_ddp(model: nn.Module, device: torch.device) -> DistributedDataParallel:
    """Wrap a model in DDP, whose backward pass sums gradients over the ranks.

    All ranks start with the weights of rank 0. The networks have no buffers to keep equal.
    """
    one = [device] if device.type == "cuda" else None
    wrapped = DistributedDataParallel(model, device_ids=one, gradient_as_bucket_view=True)
    wrapped.register_comm_hook(None, lambda state, bucket: add_gradients(bucket))
    # DDP arranges its buckets by its first backward pass, and that decides how sums are rounded:
    # the pass is made here, so that the first update of a resumed run is like any other
    named = sorted(model.named_parameters(), key=lambda pair: not pair[0].startswith("generator."))
    wrapped.reducer.prepare_for_backward([])
    torch.autograd.backward(torch.stack([part.sum() for _, part in named]).sum())  # in reverse
    wrapped.zero_grad()
    return wrapped


def add_gradients(bucket: Any) -> torch.futures.Future[Tensor]:
    """Sum one bucket of gradients over the ranks, as DDP's communication hook."""
    work = distributed.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None
    return work.get_future().then(lambda done: done.value()[0])


@contextmanager
def gradient_sync(model: nn.Module, wanted: bool) -> Iterator[None]:
    """Set whether the backward pass in a block exchanges gradients, as only the last one should.

    The block must also contain the forward pass. Until the last one, the gradients of a sharded
    model are kept whole, in fp32, on every process; the weights are sharded again after each.
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
    """Gather full tensors from all ranks, one at a time, on the CPU; all ranks have to call this.

    Args:
        tensors: tensors by name, sharded (DTensor) or the same on every rank.
        keep: whether this rank keeps the result; otherwise it returns {}.
    """
    found = {}
    for name, tensor in tensors.items():
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if keep:
            found[name] = full.cpu()
    return found


def shard_like(whole_tensor: Tensor, own: Tensor) -> Tensor:
    """Return this process's shard of a full tensor, with the placement of `own`."""
    if not isinstance(own, DTensor):
        return whole_tensor
    here = whole_tensor.to(own.device)
    return distribute_tensor(here, own.device_mesh, own.placements, src_data_rank=None)


def begin_sharded_save(
    folder: Path, tensors: Mapping[str, Tensor], group: distributed.ProcessGroup
) -> Any:
    """Copy this process's shards and start to write them in the background.

    Args:
        folder: the folder for the files `shard-...`, the same on all ranks.
        tensors: tensors by name, sharded (DTensor) or the same on every rank.
        group: a process group that nothing else uses, because training continues during the save.

    Returns:
        A future that is done when the files of all ranks are written.
    """
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    return async_save(dict(tensors), storage_writer=writer, process_group=group)


def load_sharded(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Load a checkpoint, saved by any number of ranks, into tensors with any sharding.

    Args:
        folder: the checkpoint, with files `shard-...`.
        tensors: the tensors to fill in place; every rank has to call this function.
    """
    alone = not distributed.is_initialized()
    try:
        load(tensors, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=alone)
    except (CheckpointException, ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[-1]
        raise BertkitError(
            f"{folder} does not fit this run ({reason}); resume with the recipe that it was made "
            "with, or remove it to resume from the previous checkpoint"
        ) from error


def wait_for_shards(written: Any, folder: Path) -> None:
    """Wait for the save that `begin_sharded_save` started.

    Raises:
        BertkitError: a process failed to write, for example because its disk is full.
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


def check_compiler(device: torch.device) -> None:
    """Check that training can be compiled for a device.

    Raises:
        BertkitError: the device is not CUDA, or what torch generates code with is missing (code
            "no-compiler").
    """
    if device.type != "cuda":
        raise BertkitError(f"compiled training needs a CUDA device; turn it off on {device}")
    if not has_triton():
        raise BertkitError(
            "compiled training needs the package triton, a C compiler and Python's headers "
            "(python3-dev); install what is missing, or turn compiling off",
            code="no-compiler",
        )


def compile_training(model: nn.Module, device: torch.device) -> CrossEntropy:
    """Compile the layers and token heads of a model in place, and the cross entropy.

    Parameters and their names stay the same. Code is generated for any number of tokens, sequences
    and targets (`dynamic=True`), because every packed batch differs in them: one code for all
    layers but the last, which computes selected rows, one for the head and one for each loss. The
    first update waits for the compiler.

    Returns:
        The compiled `cross_entropy_sums`, an argument of the pre-training objectives.

    Raises:
        BertkitError: see `check_compiler`.
    """
    check_compiler(device)
    for module in model.modules():
        if isinstance(module, Layer | LanguageHead):
            compile_in_training(module)
    return torch.compile(cross_entropy_sums, dynamic=True)


def compile_in_training(module: nn.Module, **options: Any) -> None:
    """Make a module run compiled code while it is in training mode.

    It runs uncompiled in evaluation mode, which would need code of its own for a few batches.

    Args:
        module: the module, which is changed in place.
        options: more options for `torch.compile`.
    """
    uncompiled = module.forward
    compiled = torch.compile(uncompiled, dynamic=True, **options)

    def forward(*inputs: Any) -> Any:
        return (compiled if module.training else uncompiled)(*inputs)

    module.forward = forward
