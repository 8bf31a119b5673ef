"""Checkpoints from which a run resumes exactly where it stopped, without pickle.

    checkpoints/step-00001234/model.safetensors
                              optimizer.safetensors
                              progress.json

`progress.json` holds the caller's progress, the SHA-256 of each other file, and that of itself. A
checkpoint appears under its name only when it is complete and flushed to disk. It is the only
record of the step that a run has reached.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from bertkit.checkpoints.save import read_tensors, write_tensors
from bertkit.errors import BertkitError
from bertkit.files import (
    disk_errors,
    new_folder,
    read_object,
    sha256_file,
    temporary_name,
    write_json,
)
from bertkit.training.optimizer import PAST_BIAS_CORRECTION, AdamW, trainable_parameters

FORMAT_VERSION = 1
PROGRESS = "progress.json"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint read back, on the CPU."""

    path: Path
    step: int
    tensors: dict[str, dict[str, Tensor]]
    """Tensors by file stem ("model", "optimizer") and name."""
    progress: dict[str, Any]
    """The progress that was passed to `save_checkpoint`."""


def save_checkpoint(
    folder: Path,
    step: int,
    tensors: Mapping[str, Mapping[str, Tensor]],
    progress: Mapping[str, Any],
    keep: int = 2,
) -> Path:
    """Write `folder`/step-NNNNNNNN, then remove all but the newest `keep` checkpoints.

    Those of a later step, before which training resumed because they were damaged, are removed,
    too. The tensors are those of each file, by its stem; the progress is any JSON value.
    """
    path = folder / f"step-{step:08d}"
    with new_folder(path) as temporary:
        for name, values in tensors.items():
            write_tensors(temporary / f"{name}.safetensors", values)
        written = sorted(temporary.iterdir())
        files = {file.name: {"sha256": sha256_file(file)} for file in written}
        content = {"format": FORMAT_VERSION, "step": step, "files": files, "progress": progress}
        write_json(temporary / PROGRESS, {**content, "sha256": digest(content)})
    prune(folder, step, keep)
    return path


def digest(content: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a value as compact JSON with sorted keys; it survives a round trip."""
    plain = json.loads(json.dumps(content))  # numeric keys become strings and are sorted as such
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """Return (step, path) of each checkpoint in a folder, newest first; it may be missing."""
    named = [(re.fullmatch(r"step-(\d{8,})", path.name), path) for path in folder.glob("step-*")]
    return sorted([(int(match[1]), path) for match, path in named if match], reverse=True)


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
    for leftover in folder.glob(".step-*.tmp-*"):
        shutil.rmtree(leftover, ignore_errors=True)


def load_latest(folder: Path, warn: Callable[[str], None], keep: int = 2) -> Checkpoint | None:
    """Read the newest complete checkpoint, or return None if there is no checkpoint.

    A damaged one is skipped, with a line passed to `warn`; if all are damaged, that is an error.
    """
    known = checkpoints(folder)
    remove_unfinished(folder)
    for step, path in known:
        try:
            latest = load_checkpoint(path, step)
        except BertkitError as error:
            warn(f"skipping checkpoint {path}: {error}")
            continue
        if path == known[0][1]:  # damaged ones stay until the next save
            prune(folder, step, keep)
        return latest
    if known:
        raise BertkitError(
            f"no checkpoint in {folder} is intact ({len(known)} were read); remove that folder to "
            "start again from the beginning"
        )
    return None


def load_checkpoint(path: Path, step: int) -> Checkpoint:
    """Read one checkpoint and verify its files; an error names the file that is damaged."""
    content = read_object(path / PROGRESS, file_names=True)
    sealed = digest({key: value for key, value in content.items() if key != "sha256"})
    if content.get("sha256") != sealed or content.get("step") != step:
        raise BertkitError(f"{PROGRESS} is damaged (its checksum or its step is wrong)")
    if (version := content.get("format")) != FORMAT_VERSION:
        raise BertkitError(
            f"{PROGRESS} has format {version!r:.60} and this bertkit reads {FORMAT_VERSION}; "
            "use the version that wrote it"
        )
    tensors = {}
    for name, expected in content["files"].items():
        if not re.fullmatch(r"[\w-]+\.safetensors", name):
            raise BertkitError(f"{PROGRESS} names {name!r:.60}, which is not a file next to it")
        try:
            if sha256_file(path / name) != expected["sha256"]:
                raise BertkitError(f"{name} is damaged (its checksum is wrong)")
        except OSError as error:
            raise BertkitError(f"{name} cannot be read ({error.strerror})") from error
        tensors[Path(name).stem] = read_tensors(path / name)
    return Checkpoint(path, step, tensors, content["progress"])


def save_training(
    folder: Path,
    step: int,
    model: nn.Module,
    optimizer: AdamW,
    progress: Mapping[str, Any],
    keep: int = 2,
) -> dict[str, Any]:
    """Save a model in training and its optimizer; return the journal's record of it."""
    started = time.perf_counter()
    tensors = {"model": model_tensors(model), "optimizer": optimizer_tensors(model, optimizer)}
    path = save_checkpoint(folder, step, tensors, progress, keep)
    return {
        "kind": "checkpoint",
        "step": step,
        "path": f"{folder.name}/{path.name}",
        "seconds": time.perf_counter() - started,
    }


def restore_training(checkpoint: Checkpoint, model: nn.Module, optimizer: AdamW) -> None:
    """Copy a checkpoint into a model and its optimizer; the inverse of `save_training`."""
    if checkpoint.tensors.keys() != {"model", "optimizer"}:
        raise BertkitError(f"{checkpoint.path} is not a checkpoint of such a run; remove it")
    restore_model(model, checkpoint.tensors["model"])
    restore_optimizer(model, optimizer, checkpoint.tensors["optimizer"])


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by name, a tied one once, under its first name.

    The tensors share memory with the model.
    """
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) not in seen:
            seen.add(id(value))
            tensors[name] = value.detach()
    return tensors


def restore_model(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy saved values into a model exactly; the inverse of `model_tensors`."""
    current = model_tensors(model)
    check_tensors("model", current, tensors)
    for name, value in current.items():
        value.copy_(tensors[name])


def optimizer_tensors(model: nn.Module, optimizer: AdamW) -> dict[str, Tensor]:
    """Return an optimizer's state as "exp_avg.NAME", "exp_avg_sq.NAME" and "step.NAME".

    Muon's matrices have "momentum.NAME" instead. A parameter that never had a gradient is saved
    with its initial state, so that a missing tensor is always an error.
    """
    tensors: dict[str, Tensor] = {}
    for name, parameter in trainable_parameters(model):
        state = optimizer.state.get(parameter) or optimizer.initial_state(parameter)
        tensors |= {f"{moment}.{name}": value for moment, value in state.items()}
    return tensors


def restore_optimizer(model: nn.Module, optimizer: AdamW, tensors: Mapping[str, Tensor]) -> None:
    """Restore an optimizer's saved state exactly; the inverse of `optimizer_tensors`."""
    fresh = {
        name: optimizer.initial_state(parameter) for name, parameter in trainable_parameters(model)
    }
    expected = {f"{key}.{n}": value for n, state in fresh.items() for key, value in state.items()}
    check_tensors("optimizer", expected, tensors)
    original = not optimizer.bias_correction
    steps = [name for name in expected if name.startswith("step.")]
    if any((tensors[name] >= PAST_BIAS_CORRECTION) != original for name in steps):
        raise BertkitError(
            f"the optimizer checkpoint was made {'with' if original else 'without'} bias "
            f"correction, but this run is {'without' if original else 'with'} it; "
            "resume with the recipe this checkpoint was made with"
        )
    for name, value in expected.items():
        value.copy_(tensors[name])
    for name, parameter in trainable_parameters(model):
        optimizer.state[parameter] = fresh[name]


def check_tensors(owner: str, expected: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    """Raise a BertkitError unless both have the same names, shapes and types."""
    different = expected.keys() ^ saved.keys() or {
        name
        for name, value in expected.items()
        if (value.shape, value.dtype) != (saved[name].shape, saved[name].dtype)
    }
    if different:
        raise BertkitError(
            f"the {owner} checkpoint does not fit: {min(different)} is missing, unexpected or of "
            "another shape; resume with the recipe this checkpoint was made with"
        )
