"""`export_model`: write a model for others, run what was written, and refuse it where it differs.

The files are read back and run on real sequences, and compared with bertkit's packed computation in
fp32. They are run by the library that they are for; Google's checkpoints, and directories for a
library that is not installed, by bertkit. `export.json` keeps who ran them and the outcome.
"""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import bertkit
from bertkit.errors import BertkitError, nearest
from bertkit.export.directories import config_without_weights, write_google, write_hugging_face
from bertkit.export.onnx import (
    ONNX_FILE,
    PROGRAM_FILE,
    graph_facts,
    write_onnx,
    write_onnx_int8,
    write_program,
)
from bertkit.export.padded import PADDED_INPUTS
from bertkit.export.source import ExportSource
from bertkit.export.verify import (
    Arrays,
    Opened,
    Runner,
    built_in,
    run_exported,
    run_packed,
    task_outputs,
)
from bertkit.files import new_folder, sha256_file, write_json
from bertkit.tasks.task import ItemPart, check_segments
from bertkit.tokenizer.wordpiece import Tokenizer

MANIFEST = "export.json"
WRITERS: dict[str, Callable[[ExportSource, Path], Opened]] = {
    "onnx": write_onnx,
    "onnx-int8": write_onnx_int8,
    "huggingface": write_hugging_face,
    "tensorflow": write_google,
    "torch-export": write_program,
}
LIBRARIES = {
    "onnx": ("torch", "onnx", "onnxscript"),
    "onnx-int8": ("torch", "onnx", "onnxscript"),
    "huggingface": ("torch", "safetensors"),
    "tensorflow": ("torch",),
    "torch-export": ("torch",),
}
"""Format → packages that write it; the manifest keeps their versions, and those of `Opened.by`."""
MAX_ERROR = 1e-4
"""The largest difference of an output in fp32, for outputs of up to 1; as a share of larger ones.

8-bit weights have no such bound: what counts is the metric.
"""
GELU_NOTE = (
    "trained with the GELU with erf; Google's code since February 2019 computes the tanh form, so "
    "its outputs differ slightly from those checked here"
)
CASE_NOTE = (
    "vocab.txt does not say how text is normalised, and this tokenizer's rules are not those that "
    "are inferred from it: keep tokenizer.json of the source, and compare ids"
)


@dataclass(frozen=True, kw_only=True)
class Check:
    """What an exported model is tried on, and how much it may differ."""

    parts: Sequence[ItemPart] | None = None
    """Sequences; None for the built-in sentences."""
    examples: str = "built-in sentences"
    """Where they are from."""
    labelled: Sequence[Any] | None = None
    """Labelled inputs of the model's task."""
    dev: str = ""
    """Their file."""
    max_error: float | None = None
    """The largest difference of an output; None: `MAX_ERROR`, and for int8 none."""
    bound: float = 1.0
    """The most that the deciding metric may fall, in points of 100."""


CHECK = Check()


def export_model(source: ExportSource, to: str, out: Path, check: Check = CHECK) -> dict[str, Any]:
    """Write a model in a format, with a manifest; or, after any error or refusal, nothing.

    Args:
        source: of `bertkit.export.source.read_source`.
        to: a key of `WRITERS`.
        out: the folder; made, or replaced where it is an export already.
        check: what to try the result on.

    Returns:
        The manifest.

    Raises:
        BertkitError: the format has no such network or head, the result differs by more than it
            may, a library is missing, or the folder holds something else, the model itself say, or
            cannot be written.
    """
    if to not in WRITERS:
        raise BertkitError(f"no format is called '{to}'{nearest(to, WRITERS)}")
    if source.path.resolve().is_relative_to(out.resolve()):
        raise BertkitError(f"{out} holds the model that is exported; choose another folder")
    if out.exists() and not (out / MANIFEST).is_file() and not is_empty_folder(out):
        raise BertkitError(f"{out} exists and is no export; choose another folder")
    with new_folder(out) as folder:
        by, run = WRITERS[to](source, folder)
        if to.startswith("onnx"):
            source.tokenizer.save(folder)
            write_json(folder / "config.json", config_without_weights(source))
        manifest = export_facts(source, to, folder, by)
        found = compare_outputs(source, run, check, exact=to != "onnx-int8")
        manifest["check"] = {"by": by[0], **found}
        if check.labelled is not None:
            manifest["metric"] = score(source, run, check, to)
        write_json(folder / MANIFEST, manifest)
    return manifest


def is_empty_folder(folder: Path) -> bool:
    """Whether a path is a folder without anything in it."""
    return folder.is_dir() and not any(folder.iterdir())


def export_facts(source: ExportSource, to: str, folder: Path, by: Sequence[str]) -> dict[str, Any]:
    """What is known before the first run: versions, names, files."""
    versions = {"bertkit": bertkit.__version__, "python": platform.python_version()}
    for name in (*LIBRARIES[to], *by):
        try:
            versions.setdefault(name, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            continue
    files = {
        str(path.relative_to(folder)): {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    found: dict[str, Any] = {"format": to, "head": source.head, "versions": versions}
    if source.task is not None:
        found |= {"labels": list(source.task.labels), "settings": source.task.settings()}
    if source.pooling is not None:
        found |= {"pooling": source.pooling.pooling, "normalize": source.pooling.normalize}
        found |= {"prompt": source.pooling.prompt, "lowercase": source.pooling.lowercase}
    found["max_length"] = source.max_length
    if to == "tensorflow":
        found["do_lower_case"] = source.tokenizer.lowercase
        notes = [GELU_NOTE] if source.config.hidden_act == "gelu" else []
        read, own = Tokenizer.load(folder), source.tokenizer
        if (read.lowercase, read.strip_accents) != (own.lowercase, own.strip_accents):
            notes.append(CASE_NOTE)
        if notes:
            found["note"] = "; ".join(notes)
    if (folder / ONNX_FILE).is_file():
        found |= graph_facts(folder / ONNX_FILE)
    elif (folder / PROGRAM_FILE).is_file():
        found |= {"inputs": list(PADDED_INPUTS), "outputs": list(source.outputs)}
    return {**found, "files": files}


def compare_outputs(
    source: ExportSource, run: Runner, check: Check, *, exact: bool
) -> dict[str, Any]:
    """How far the outputs are from bertkit's, on sequences of several lengths together.

    Raises:
        BertkitError: they are further than they may be or not finite, or there is nothing to run.
    """
    parts = built_in(source) if check.parts is None else check.parts
    if not parts:
        raise BertkitError(f"{check.examples} holds no inputs to compare outputs on; give some")
    found, wanted = run_exported(run, source, parts), run_packed(source, parts)
    outputs = {name: difference(name, found, wanted) for name in wanted[0]}
    bound = check.max_error if check.max_error is not None else MAX_ERROR if exact else None
    for name, one in outputs.items():
        if bound is not None and not one["max_error"] <= bound * max(1.0, one["largest"]):
            raise BertkitError(
                f"{name} differs from bertkit's by up to {one['max_error']:.2g} (of values up to "
                f"{one['largest']:.2g}), and the bound is {bound:g}; choose another format, or "
                "another --max-error"
            )
    tokens = sum(part.tokens for part in parts)
    about = {"examples": CHECK.examples if check.parts is None else check.examples}
    return {**about, "sequences": len(parts), "tokens": tokens, "bound": bound, "outputs": outputs}


def difference(name: str, found: Sequence[Arrays], wanted: Sequence[Arrays]) -> dict[str, float]:
    """The largest difference of an output, its largest value, and a mean agreement.

    Of vectors the agreement is their smallest cosine, of classes the share of equal best ones.

    Raises:
        BertkitError: the shapes differ, or some number is not finite.
    """
    errors, largest, rows = [], [], []
    for one, other in zip(found, wanted, strict=True):
        a, b = np.asarray(one[name]), other[name]
        if a.shape != b.shape:
            raise BertkitError(f"{name} has shape {a.shape} where bertkit's has {b.shape}")
        if not np.isfinite(b).all():
            raise BertkitError(f"the model's own {name} has NaN or infinity; export another model")
        if not np.isfinite(a).all():
            raise BertkitError(f"the exported {name} has NaN or infinity; choose another format")
        errors.append(float(np.abs(a - b).max()))
        largest.append(float(np.abs(b).max()))
        if name.endswith("logits"):
            flat = (a, b) if a.ndim else (a[None], b[None])
            rows += list(np.ravel(flat[0].argmax(-1) == flat[1].argmax(-1)))
    measured = {"max_error": max(errors), "largest": max(largest)}
    if name.endswith("logits"):
        return {**measured, "same_best": float(np.mean(rows))}
    cosines = [
        (np.vdot(a, b) / max(1e-12, float(np.linalg.norm(a) * np.linalg.norm(b))))
        for a, b in ((one[name], other[name]) for one, other in zip(found, wanted, strict=True))
    ]
    return {**measured, "least_cosine": float(min(cosines))}


def score(source: ExportSource, run: Runner, check: Check, to: str) -> dict[str, Any]:
    """The task's scores of bertkit and of the exported model on labelled inputs.

    Raises:
        BertkitError: the model has no task, there are no inputs, or the metric falls by more than
            it may.
    """
    task, inputs = source.task, check.labelled
    if task is None:
        raise BertkitError(f"a model with the head '{source.head}' has no metric; leave --dev out")
    if not inputs:
        raise BertkitError(f"{check.dev} holds no labelled inputs; give some")
    items = task.items(inputs, source.tokenizer)
    check_segments(items, source.config)
    parts = [part for item in items.items for part in item.parts]

    def scores(found: Sequence[Arrays]) -> Mapping[str, float]:
        return task.score(inputs, task.decode(inputs, items, task_outputs(source, items, found)))

    before = scores(run_packed(source, parts))
    after = scores(run_exported(run, source, parts))
    change = 100 * (after[task.metric] - before[task.metric])
    if not change >= -check.bound:
        raise BertkitError(
            f"{to} lowers {task.metric} on {check.dev or 'the labelled inputs'} from "
            f"{100 * before[task.metric]:.2f} to {100 * after[task.metric]:.2f}, and the bound is "
            f"{check.bound:.2f} points; choose another format, or another --bound"
        )
    shown = {"dev": check.dev, "inputs": len(inputs), "name": task.metric, "bound": check.bound}
    return {**shown, "change": change, "bertkit": dict(before), "exported": dict(after)}
