"""The checkpoints of a run: how it resumes from them, and how they are written during training.

A single process on a CPU writes a checkpoint at once: a thread would only take time from the same
cores. Elsewhere the state is copied to memory and written in the background, so training waits only
for the copy. At most one checkpoint is being written at a time.

With DDP the first rank writes the whole state. With FSDP2 every rank writes its shard. Each kind
can be resumed by the other, and by any number of processes. The state of the network and its
optimizer are tensors by name.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bertkit.errors import BertkitError
from bertkit.files import disk_errors
from bertkit.training.checkpoint import (
    Checkpoint,
    load_checkpoint,
    load_latest,
    remove_unfinished,
    save_checkpoint,
    save_shards,
)
from bertkit.training.distributed import Ranks
from bertkit.training.optimizer import (
    PAST_BIAS_CORRECTION,
    OriginalAdam,
    initial_state,
    trainable_parameters,
)


class CheckpointWriter:
    """The checkpoints of one run.

    Args:
        folder: the run's `checkpoints`; all ranks see the same.
        model: its weights are saved and restored, whole or shared out by FSDP2.
        optimizer: of that model.
        ranks: the processes of the run.
        sharded: every rank writes its part.
    """

    def __init__(
        self,
        folder: Path,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        ranks: Ranks,
        *,
        sharded: bool = False,
    ) -> None:
        self.folder, self.model, self.optimizer = folder, model, optimizer
        self.ranks, self.sharded = ranks, sharded
        on_cpu = next(model.parameters()).device.type == "cpu"
        self.background = sharded or ranks.world > 1 or not on_cpu
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self.pending: Future[dict[str, Any]] | None = None
        self.group: Any = None
        if sharded:
            from torch import distributed

            waiting = timedelta(seconds=ranks.timeout)
            self.group = distributed.new_group(backend="gloo", timeout=waiting)

    def resume(self, say: Callable[[str], None]) -> Checkpoint | None:
        """Restore the newest whole checkpoint; None where there is none.

        Raises:
            BertkitError: every checkpoint is damaged, or this rank does not see the one that the
                first rank has found.
        """
        self.ranks.together(lambda: remove_unfinished(self.folder))
        found = self.ranks.together(lambda: load_latest(self.folder, say))
        step = self.ranks.total({"step": found.step + 1 if found else 0})()["step"] - 1
        if step < 0:
            return None
        path = self.folder / f"step-{step:08d}"
        checkpoint = found or load_checkpoint(path, step, verify=False)
        whole = checkpoint.is_sharded or checkpoint.tensors.keys() == {"model", "optimizer"}
        if not whole or "place" not in checkpoint.progress:
            raise BertkitError(f"{path} is no checkpoint of a pre-training run; remove it")
        if checkpoint.is_sharded:
            from bertkit.training.parallel import load_sharded

            tensors = self.tensors()
            load_sharded(path, tensors["model"] | prefixed(tensors["optimizer"]))
        else:
            tensors = checkpoint.tensors
            restore_model(self.model, tensors["model"])
        restore_optimizer(self.model, self.optimizer, tensors["optimizer"])
        return checkpoint

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """The state itself, not a copy."""
        return {
            "model": model_tensors(self.model),
            "optimizer": optimizer_tensors(self.model, self.optimizer),
        }

    def save_async(self, step: int, progress: dict[str, Any]) -> None:
        """Save the current state; on several ranks all have to call this.

        Args:
            step: updates made.
            progress: what JSON can hold.

        Raises:
            BertkitError: the disk is full or not writable: this save, if it is written at once,
                or else the one before.
        """
        assert self.pending is None, "take the save before, first"
        started = time.perf_counter()
        if self.sharded:
            write = self._begin_shards(step, progress)
        else:
            write = self._begin_whole(step, progress)
        stall = time.perf_counter() - started

        def timed() -> dict[str, Any]:
            began = time.perf_counter()
            write()
            took = time.perf_counter() - began
            waited = stall + (0.0 if self.background else took)
            name = f"{self.folder.name}/step-{step:08d}"
            record = {"kind": "checkpoint", "step": step, "path": name, "seconds": waited}
            return record | ({"background_seconds": took} if self.background else {})

        self.pending = self.pool.submit(timed)
        if not self.background:
            self.pending.exception()  # waits

    def poll(self, *, wait: bool) -> dict[str, Any] | None:
        """The journal's record of a save that is finished, once; None where there is none.

        Args:
            wait: for a save that goes on.

        Raises:
            BertkitError: see `begin`.
        """
        if self.pending is None or not (wait or self.pending.done()):
            return None
        done, self.pending = self.pending, None
        return done.result()

    def close(self) -> None:
        """End the thread, after the save that goes on."""
        self.pool.shutdown()

    def _begin_whole(self, step: int, progress: dict[str, Any]) -> Callable[[], object]:
        if not self.ranks.first:
            return lambda: None
        tensors = self.tensors()
        if self.background:
            tensors = {
                file: {name: tensor.to("cpu", copy=True) for name, tensor in content.items()}
                for file, content in tensors.items()
            }
        return lambda: save_checkpoint(self.folder, step, tensors, progress)

    def _begin_shards(self, step: int, progress: dict[str, Any]) -> Callable[[], object]:
        from bertkit.training.parallel import begin_sharded_save, wait_for_shards

        shards = self.folder / f".shards-{step:08d}"
        self.ranks.together(lambda: empty_folder(shards))
        tensors = self.tensors()
        whole = tensors["model"] | prefixed(tensors["optimizer"])
        written = begin_sharded_save(shards, whole, self.group)

        def finish() -> None:
            wait_for_shards(written, shards)
            if self.ranks.first:
                save_shards(self.folder, step, shards, progress, count=self.ranks.world)

        return finish


def prefixed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The optimizer's tensors under names that no weight has."""
    return {f"optimizer.{name}": tensor for name, tensor in tensors.items()}


def empty_folder(folder: Path) -> None:
    """Make a folder anew."""
    with disk_errors(folder):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)


MOMENTS = ("exp_avg", "exp_avg_sq", "step")


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name, a tied one once, under its first name.

    The tensors are the model's own, not copies.
    """
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) not in seen:
            seen.add(id(value))
            tensors[name] = value.detach()
    return tensors


def restore_model(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Write saved values into a model, bit by bit; the inverse of `model_tensors`.

    Raises:
        BertkitError: a tensor is missing, unexpected, or of another shape or type. Nothing has
            been changed then.
    """
    own = model_tensors(model)
    check_tensors("model", own, tensors)
    for name, value in own.items():
        copy_tensor(value, tensors[name])


def copy_tensor(own: Tensor, saved: Tensor) -> None:
    """Write a saved tensor into one of this process, which may hold only a part of it (FSDP2)."""
    if hasattr(own, "device_mesh") and not hasattr(saved, "device_mesh"):
        from bertkit.training.parallel import shard_like

        saved = shard_like(saved, own)
    own.copy_(saved)


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """An AdamW's state as "exp_avg.NAME", "exp_avg_sq.NAME" and "step.NAME".

    NAME is the parameter's in the model. A parameter that never had a gradient has no state yet
    and is written with the state it would start from, so that nothing can be missing unseen. The
    hyperparameters are not saved: they come from the recipe and the schedule.
    """
    tensors: dict[str, Tensor] = {}
    for name, parameter in trainable_parameters(model):
        state = optimizer.state.get(parameter) or initial_state(optimizer, parameter)
        tensors |= {f"{moment}.{name}": state[moment] for moment in MOMENTS}
    return tensors


def restore_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]
) -> None:
    """Give an optimizer its saved state, bit by bit; the inverse of `optimizer_tensors`.

    Raises:
        BertkitError: a tensor is missing, unexpected, or of another shape or type. Nothing has
            been changed then.
    """
    fresh = {
        name: initial_state(optimizer, parameter) for name, parameter in trainable_parameters(model)
    }
    expected = {f"{key}.{name}": state[key] for name, state in fresh.items() for key in MOMENTS}
    check_tensors("optimizer", expected, tensors)
    original = isinstance(optimizer, OriginalAdam)
    if any((tensors[f"step.{name}"] >= PAST_BIAS_CORRECTION) != original for name in fresh):
        raise BertkitError(
            f"the optimizer checkpoint was made {'with' if original else 'without'} bias "
            f"correction, but this run is {'without' if original else 'with'} it; "
            "resume with the recipe this checkpoint was made with"
        )
    for name, value in expected.items():
        copy_tensor(value, tensors[name])
    for name, parameter in trainable_parameters(model):
        optimizer.state[parameter] = fresh[name]


def check_tensors(owner: str, expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> None:
    """Raise a BertkitError unless both have the same names, shapes and types."""
    advice = "resume with the recipe this checkpoint was made with"
    for problem, names in (
        ("lacks", expected.keys() - found.keys()),
        ("has the unexpected", found.keys() - expected.keys()),
    ):
        if names:
            raise BertkitError(f"the {owner} checkpoint {problem} {list_names(names)}; {advice}")
    for name, value in expected.items():
        other = found[name]
        if (value.shape, value.dtype) != (other.shape, other.dtype):
            raise BertkitError(
                f"{name} in the {owner} checkpoint is {shape_text(other)}, "
                f"but this {owner} needs {shape_text(value)}; {advice}"
            )


def list_names(names: Iterable[str]) -> str:
    """The first three names in order, and how many more."""
    ordered = sorted(names)
    more = f" and {len(ordered) - 3} more" if len(ordered) > 3 else ""
    return ", ".join(ordered[:3]) + more


def shape_text(value: Tensor) -> str:
    """Type and shape of a tensor, such as `float32 (768, 768)`."""
    shape = ", ".join(str(size) for size in value.shape)
    return f"{str(value.dtype).removeprefix('torch.')} ({shape})"
