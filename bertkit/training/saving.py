"""The checkpoints of a run: resumed from, begun, and finished while the training goes on.

Alone on a CPU a checkpoint is written at once: another thread would only take time from the same
cores. Elsewhere the state is copied to memory and written in the background; the training waits for
nothing but the copy. One checkpoint at a time: the next one waits for the one before.

With DDP the first rank writes what each rank holds whole. With FSDP2 every rank writes its part.
Each kind can be resumed by the other, and by any number of processes.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
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
    save_checkpoint,
    save_shards,
)
from bertkit.training.ranks import Ranks
from bertkit.training.state import (
    model_tensors,
    optimizer_tensors,
    restore_model,
    restore_optimizer,
)


class Checkpoints:
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

    def begin(self, step: int, progress: dict[str, Any]) -> None:
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

    def take(self, *, wait: bool) -> dict[str, Any] | None:
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
