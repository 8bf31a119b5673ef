"""Checkpoints from which a run resumes exactly where it was. No pickle.

    checkpoints/step-00001234/model.safetensors
                              optimizer.safetensors
                              progress.json

`progress.json` holds the caller's progress, the size and SHA-256 of each other file, and a SHA-256
of itself. A checkpoint appears under its name only when it is whole and flushed to disk.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from bertkit.checkpoints.weights import read_tensors, write_tensors
from bertkit.errors import BertkitError
from bertkit.files import disk_errors, new_folder, read_json, sha256_file, write_json

FORMAT_VERSION = 1
PROGRESS = "progress.json"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint read back, on the CPU."""

    path: Path
    step: int
    tensors: dict[str, dict[str, Tensor]]
    """By file name without its ending ("model", "optimizer"), then by tensor name; {} of shards."""
    progress: dict[str, Any]
    """What the caller of `save_checkpoint` gave."""
    is_sharded: bool = False
    """Whether each process has written its part (`bertkit.training.parallel` reads those)."""


def save_checkpoint(
    folder: Path,
    step: int,
    tensors: dict[str, dict[str, Tensor]],
    progress: dict[str, Any],
    keep: int = 2,
) -> Path:
    """Write `folder`/step-NNNNNNNN, then remove what is no longer needed.

    Removed, and only after the new checkpoint is whole: checkpoints before the newest `keep`,
    checkpoints of a later step (training went back behind them because they were damaged) and
    what a killed save left behind. So for a moment `keep` + 1 checkpoints are on the disk.

    Args:
        folder: the run's `checkpoints` folder; it is made where it is missing.
        step: updates made so far.
        tensors: one file for each key. Tensors on the CPU are written from where they lie.
        progress: anything JSON can hold; tuples come back as lists, and keys as strings.
        keep: how many checkpoints stay, at least 1.

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
    """Make a checkpoint of files that several processes have written; see `save_checkpoint`.

    Args:
        folder: the run's `checkpoints` folder.
        step: updates made so far.
        shards: a folder on the same disk, with `shard-*.safetensors` of every process; it goes.
        progress: anything JSON can hold.
        count: how many processes have written.
        keep: how many checkpoints stay.

    Raises:
        BertkitError: the file of some process is not there; nothing is removed then.
    """
    found = sorted(shards.glob("shard-*.safetensors"))
    if len(found) != count:
        raise BertkitError(
            f"{shards} has the parts of {len(found)} of {count} processes; --out must be a folder "
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
    """Write size and checksum of every file of a new checkpoint beside the progress."""
    files = {
        file.name: {"bytes": file.stat().st_size, "sha256": sha256_file(file)}
        for file in sorted(checkpoint.iterdir())
    }
    content = {"format": FORMAT_VERSION, "step": step, "files": files, "progress": progress}
    write_json(checkpoint / PROGRESS, {**content, "sha256": digest(content)})


def digest(content: dict[str, Any]) -> str:
    """The SHA-256 of a value as compact JSON with sorted keys, the same before and after a file."""
    # Keys that are numbers become strings in the file, and sort as strings.
    plain = json.loads(json.dumps(content))
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """(step, path) of each checkpoint in a folder, newest first; the folder may be missing."""
    found = [(re.fullmatch(r"step-(\d{8,})", path.name), path) for path in folder.glob("step-*")]
    return sorted([(int(match[1]), path) for match, path in found if match], reverse=True)


def prune(folder: Path, step: int, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints up to `step`, and leftovers of killed saves."""
    known = checkpoints(folder)
    kept = [path for number, path in known if number <= step][:keep]
    with disk_errors(folder):
        for _, path in known:
            if path not in kept:  # renamed first: a kill here must not leave half a checkpoint
                path.rename(path.with_name(f".{path.name}.tmp-removed"))
    remove_unfinished(folder)


def remove_unfinished(folder: Path) -> None:
    """Remove what killed saves and removals have left; nobody else may be saving."""
    for leftover in (*folder.glob(".step-*.tmp-*"), *folder.glob(".shards-*")):
        shutil.rmtree(leftover, ignore_errors=True)


def load_latest(folder: Path, warn: Callable[[str], None]) -> Checkpoint | None:
    """Read the newest whole checkpoint, or None where there is none at all.

    Args:
        folder: the run's `checkpoints` folder; it may be missing.
        warn: is given one line for each damaged checkpoint that was passed over.

    Raises:
        BertkitError: there are checkpoints, but every one is damaged.
    """
    known = checkpoints(folder)
    for step, path in known:
        try:
            return load_checkpoint(path, step)
        except BertkitError as error:
            warn(f"checkpoint {path} is passed over: {error}")
    if known:
        raise BertkitError(
            f"none of the {len(known)} checkpoints in {folder} is whole; "
            "remove that folder to start again from the beginning"
        )
    return None


def load_checkpoint(path: Path, step: int, *, verify: bool = True) -> Checkpoint:
    """Read and verify one checkpoint; the tensors of shards are not read yet.

    Args:
        path: its folder.
        step: updates made, as its name says.
        verify: compare checksums; one of several processes is enough.

    Raises:
        BertkitError: a file is missing, torn or changed, or is no such file; the message names it.
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
    """The records of a checkpoint's files, and its progress; a checksum alone proves no form.

    Raises:
        BertkitError: see `load_checkpoint`.
    """
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
            raise BertkitError(f"{PROGRESS} is damaged ({name} is no object)")
    files: dict[str, Any] = content["files"]
    for name, expected in files.items():
        if not re.fullmatch(r"[\w.-]+\.safetensors", name):
            raise BertkitError(f"{PROGRESS} names {name!r:.60}, which is no file beside it")
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
