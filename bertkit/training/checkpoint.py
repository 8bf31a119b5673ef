"""Checkpoints from which a run resumes exactly where it stopped, without pickle.

    checkpoints/step-00001234/model.safetensors
                              optimizer.safetensors
                              progress.json

`progress.json` holds the caller's progress, the size and SHA-256 of each other file, and a SHA-256
of itself. A checkpoint appears under its name only when it is complete and flushed to disk.

A single process on a CPU writes a checkpoint synchronously, because a thread would only compete for
the same cores. Otherwise the state is copied to memory and written in the background, so training
waits only for the copy. At most one checkpoint is being written at a time.

With DDP the first rank writes the whole state. With FSDP2 every rank writes its shard, in files
`shard-*.safetensors`. Either strategy can resume the other's checkpoints, with any number of
processes.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from bertkit.checkpoints.weights import read_tensors, write_tensors
from bertkit.errors import BertkitError
from bertkit.files import (
    disk_errors,
    new_folder,
    read_json,
    sha256_file,
    temporary_name,
    write_json,
)
from bertkit.training.distributed import Ranks
from bertkit.training.optimizer import AdamW
from bertkit.training.state import (
    model_tensors,
    optimizer_tensors,
    restore_model,
    restore_optimizer,
)

FORMAT_VERSION = 1
PROGRESS = "progress.json"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint read back, on the CPU."""

    path: Path
    step: int
    tensors: dict[str, dict[str, Tensor]]
    """Tensors by file stem ("model", "optimizer") and name; empty if the checkpoint is sharded."""
    progress: dict[str, Any]
    """The progress that was passed to `save_checkpoint`."""
    is_sharded: bool = False
    """Whether each process wrote a shard; `bertkit.training.parallel` reads those."""


def save_checkpoint(
    folder: Path,
    step: int,
    tensors: dict[str, dict[str, Tensor]],
    progress: dict[str, Any],
    keep: int = 2,
) -> Path:
    """Write `folder`/step-NNNNNNNN, then remove the checkpoints that are no longer needed.

    Three things are removed, and only after the new checkpoint is complete: checkpoints older than
    the newest `keep`, checkpoints of a later step (training resumed before them because they were
    damaged) and the remains of killed saves. So `keep` + 1 checkpoints are briefly on the disk.

    The tensors are given by file stem and name, and those on the CPU are written without a copy.
    The progress is any JSON value: its tuples are read back as lists, and its keys as strings.

    Raises:
        BertkitError: the disk is full or not writable; the earlier checkpoints are untouched.
    """
    if keep < 1:
        raise BertkitError(f"{keep} checkpoints cannot be kept; keep at least 1")
    path = folder / f"step-{step:08d}"
    with new_folder(path) as temporary:
        for name, values in tensors.items():
            write_tensors(temporary / f"{name}.safetensors", values)
        seal_checkpoint(temporary, step, progress)
    prune(folder, step, keep)
    return path


def save_shards(
    folder: Path, step: int, shards: Path, progress: dict[str, Any], *, count: int, keep: int = 2
) -> Path:
    """Make a checkpoint of the files that `count` processes have written; see `save_checkpoint`.

    Their folder, `shards`, is on the same disk and is removed.

    Raises:
        BertkitError: a process's file is missing; nothing is removed in that case.
    """
    found = sorted(shards.glob("shard-*.safetensors"))
    if len(found) != count:
        raise BertkitError(
            f"{shards} has the shards of {len(found)} of {count} processes; --out must be a folder "
            "that all hosts share"
        )
    path = folder / f"step-{step:08d}"
    with new_folder(path) as temporary:
        for file in found:
            file.replace(temporary / file.name)
        seal_checkpoint(temporary, step, progress)
    prune(folder, step, keep)
    return path


def seal_checkpoint(checkpoint: Path, step: int, progress: dict[str, Any]) -> None:
    """Write `progress.json`: the progress, and the size and checksum of every other file."""
    files = {
        file.name: {"bytes": file.stat().st_size, "sha256": sha256_file(file)}
        for file in sorted(checkpoint.iterdir())
    }
    content = {"format": FORMAT_VERSION, "step": step, "files": files, "progress": progress}
    write_json(checkpoint / PROGRESS, {**content, "sha256": digest(content)})


def digest(content: dict[str, Any]) -> str:
    """Return the SHA-256 of a value as compact JSON with sorted keys; it survives a round trip."""
    # Numeric keys become strings in the file and are sorted as strings.
    plain = json.loads(json.dumps(content))
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """Return (step, path) of each checkpoint in a folder, newest first; it may be missing."""
    found = [(re.fullmatch(r"step-(\d{8,})", path.name), path) for path in folder.glob("step-*")]
    return sorted([(int(match[1]), path) for match, path in found if match], reverse=True)


def prune(folder: Path, step: int, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints up to `step`, and remains of killed saves."""
    known = checkpoints(folder)
    kept = [path for number, path in known if number <= step][:keep]
    with disk_errors(folder):
        for _, path in known:
            if path not in kept:  # rename first, so that a kill leaves no incomplete checkpoint
                path.rename(temporary_name(path))
    remove_unfinished(folder)


def remove_unfinished(folder: Path) -> None:
    """Remove what killed saves and removals left; no other process may be saving."""
    for leftover in (*folder.glob(".step-*.tmp-*"), *folder.glob(".shards-*")):
        shutil.rmtree(leftover, ignore_errors=True)


def load_latest(folder: Path, warn: Callable[[str], None]) -> Checkpoint | None:
    """Read the newest complete checkpoint, or return None if there is no checkpoint.

    Each damaged checkpoint is skipped, with a line passed to `warn`.

    Raises:
        BertkitError: there are checkpoints, but every one is damaged.
    """
    known = checkpoints(folder)
    for step, path in known:
        try:
            return load_checkpoint(path, step)
        except BertkitError as error:
            warn(f"skipping checkpoint {path}: {error}")
    if known:
        raise BertkitError(
            f"no checkpoint in {folder} is intact ({len(known)} found); remove that folder to "
            "start again from the beginning"
        )
    return None


def load_checkpoint(path: Path, step: int, *, verify: bool = True) -> Checkpoint:
    """Read and verify one checkpoint; the tensors of shards are not read yet.

    Without `verify`, checksums are not compared; of several processes, only one needs to.

    Raises:
        BertkitError: a file is missing, truncated, changed or malformed; the message names it.
    """
    files, progress = read_progress(path, step)
    tensors = {}
    sharded = any(name.startswith("shard-") for name in files)
    for name, expected in files.items():
        if verify:
            verify_file(path / name, expected)
        if not sharded:
            tensors[Path(name).stem] = read_tensors(path / name)
    return Checkpoint(path, step, tensors, progress, sharded)


def read_progress(path: Path, step: int) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Return the records of a checkpoint's files, and its progress, after checking their form."""
    content = read_json(path / PROGRESS)
    if not isinstance(content, dict):
        raise BertkitError(f"{PROGRESS} is damaged (it is not an object)")
    try:
        found = digest({key: value for key, value in content.items() if key != "sha256"})
    except RecursionError:
        raise BertkitError(f"{PROGRESS} is damaged (it is too deep)") from None
    if content.get("sha256") != found or content.get("step") != step:
        raise BertkitError(f"{PROGRESS} is damaged (its checksum or its step is wrong)")
    if (version := content.get("format")) != FORMAT_VERSION:
        raise BertkitError(
            f"{PROGRESS} has format {version!r:.60} and this bertkit reads {FORMAT_VERSION}; "
            "use the version that wrote it"
        )
    for name in ("files", "progress"):
        if not isinstance(content.get(name), dict):
            raise BertkitError(f"{PROGRESS} is damaged ({name} is not an object)")
    files: dict[str, Any] = content["files"]
    for name, expected in files.items():
        if not re.fullmatch(r"[\w.-]+\.safetensors", name):
            raise BertkitError(f"{PROGRESS} names {name!r:.60}, which is not a file next to it")
        if not isinstance(expected, dict) or not {"bytes", "sha256"} <= expected.keys():
            raise BertkitError(f"{PROGRESS} is damaged (size and checksum of {name} are missing)")
    return files, content["progress"]


def verify_file(path: Path, expected: dict[str, Any]) -> None:
    """Compare a file with its recorded size and checksum."""
    try:
        size = path.stat().st_size
        if size != expected["bytes"]:
            wanted = repr(expected["bytes"])
            raise BertkitError(f"{path.name} has {size} bytes instead of {wanted:.60}")
        if sha256_file(path) != expected["sha256"]:
            raise BertkitError(f"{path.name} is damaged (its checksum is wrong)")
    except OSError as error:
        raise BertkitError(f"{path.name} cannot be read ({error.strerror})") from error


@dataclass
class CheckpointWriter:
    """Saves and restores the checkpoints of one run.

    Args:
        folder: the run's `checkpoints` folder, which all ranks must share.
        model: the model to save and restore, replicated or sharded by FSDP2.
        optimizer: the model's optimizer.
        ranks: the processes of the run.
        sharded: whether every rank writes its own shard.
        keep: the number of checkpoints to keep.
    """

    folder: Path
    model: nn.Module
    optimizer: AdamW
    ranks: Ranks
    sharded: bool = False
    keep: int = 2

    def __post_init__(self) -> None:
        on_cpu = next(self.model.parameters()).device.type == "cpu"
        self.background = self.sharded or self.ranks.world > 1 or not on_cpu
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self.pending: Future[dict[str, Any]] | None = None
        self.group: Any = None
        if self.sharded:
            from torch import distributed

            waiting = timedelta(seconds=self.ranks.timeout)
            self.group = distributed.new_group(backend="gloo", timeout=waiting)

    def resume(self, say: Callable[[str], None]) -> Checkpoint | None:
        """Restore the newest complete checkpoint and return it, or None if there is none.

        What a kill after a save has left is removed, also older checkpoints than the newest `keep`.

        Raises:
            BertkitError: every checkpoint is damaged, or this rank cannot read the one that rank 0
                has found.
        """
        found = self.ranks.on_rank0(lambda: load_latest(self.folder, say))
        self.ranks.on_rank0(lambda: self._clean(found))
        step = self.ranks.all_reduce_counts({"step": found.step + 1 if found else 0})()["step"] - 1
        if step < 0:
            return None
        path = self.folder / f"step-{step:08d}"
        checkpoint = found or load_checkpoint(path, step, verify=False)
        whole = checkpoint.is_sharded or checkpoint.tensors.keys() == {"model", "optimizer"}
        if not whole or "position" not in checkpoint.progress:
            raise BertkitError(f"{path} is not a checkpoint of such a run; remove it")
        if checkpoint.is_sharded:
            from bertkit.training.parallel import load_sharded

            tensors = self.tensors()
            load_sharded(path, tensors["model"] | prefixed(tensors["optimizer"]))
        else:
            tensors = checkpoint.tensors
            restore_model(self.model, tensors["model"])
        restore_optimizer(self.model, self.optimizer, tensors["optimizer"])
        return checkpoint

    def _clean(self, found: Checkpoint | None) -> None:
        newest = checkpoints(self.folder)[:1]
        if found and newest == [(found.step, found.path)]:
            prune(self.folder, found.step, self.keep)
        remove_unfinished(self.folder)  # damaged checkpoints stay until the next save

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Return the tensors of the model and the optimizer, without copying them."""
        return {
            "model": model_tensors(self.model),
            "optimizer": optimizer_tensors(self.model, self.optimizer),
        }

    def save_async(self, step: int, progress: dict[str, Any]) -> None:
        """Save the current state and a JSON value, `progress`; all ranks have to call this.

        Raises:
            BertkitError: a folder for shards cannot be created; `poll` raises the errors of the
                save itself.
        """
        assert self.pending is None, "the save before has not been polled"
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
        """Return the journal's record of a finished save, once; None if no save has finished.

        If `wait` is true, a save in progress is waited for.

        Raises:
            BertkitError: the save failed because the disk is full or not writable.
        """
        if self.pending is None or not (wait or self.pending.done()):
            return None
        done, self.pending = self.pending, None
        return done.result()

    def close(self) -> None:
        """Wait for a save in progress, and stop the thread."""
        self.pool.shutdown()

    def _begin_whole(self, step: int, progress: dict[str, Any]) -> Callable[[], object]:
        if not self.ranks.is_first:
            return lambda: None
        tensors = self.tensors()
        if self.background:
            tensors = {
                file: {name: tensor.to("cpu", copy=True) for name, tensor in content.items()}
                for file, content in tensors.items()
            }
        return lambda: save_checkpoint(self.folder, step, tensors, progress, self.keep)

    def _begin_shards(self, step: int, progress: dict[str, Any]) -> Callable[[], object]:
        from bertkit.training.parallel import begin_sharded_save, wait_for_shards

        shards = self.folder / f".shards-{step:08d}"
        self.ranks.on_rank0(lambda: empty_folder(shards))
        tensors = self.tensors()
        whole = tensors["model"] | prefixed(tensors["optimizer"])
        written = begin_sharded_save(shards, whole, self.group)

        def finish() -> None:
            wait_for_shards(written, shards)
            if self.ranks.is_first:
                count = self.ranks.world
                save_shards(self.folder, step, shards, progress, count=count, keep=self.keep)

        return finish


def prefixed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the optimizer's tensors under names that no weight has."""
    return {f"optimizer.{name}": tensor for name, tensor in tensors.items()}


def empty_folder(folder: Path) -> None:
    """Create an empty folder, replacing anything that exists under its name."""
    with disk_errors(folder):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
