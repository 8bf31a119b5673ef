"""`export_model`: write a model for other libraries, and reject the files if their outputs differ.

The files are read back, run on real sequences and compared with bertkit's packed computation in
fp32. The library that the files are for runs them; bertkit runs Google's checkpoints, and
directories for a library that is not installed. `export.json` records who ran them and the result.
"""

from __future__ import annotations

import importlib.metadata
import math
import platform
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

import bertkit
from bertkit.checkpoints.card import kept_card, write_card
from bertkit.checkpoints.families import choose_class, has_pooler
from bertkit.checkpoints.pretrained import read_details, tokenizer_folder
from bertkit.checkpoints.save import model_details
from bertkit.console import Console, console_or_new
from bertkit.datasets.benchmarks import OFFICIAL
from bertkit.datasets.columns import TextColumns
from bertkit.errors import BertkitError, check_known
from bertkit.export.card import export_card, export_form
from bertkit.export.directories import write_google, write_hugging_face
from bertkit.export.onnx import (
    ONNX_FILE,
    PROGRAM_FILE,
    graph_facts,
    write_onnx,
    write_onnx_int8,
    write_program,
)
from bertkit.export.padded import PADDED_INPUTS
from bertkit.export.source import ExportSource, read_export_source
from bertkit.export.verify import (
    Arrays,
    Opened,
    Runner,
    built_in,
    in_batches,
    run_exported,
    run_packed,
    task_outputs,
    text_sequences,
)
from bertkit.files import from_home, new_folder, sha256_file, write_json
from bertkit.predict.evaluate import scored_inputs
from bertkit.predict.files import Given, model_inputs
from bertkit.predict.tables import require_utf8
from bertkit.predict.text_vectors import read_lines
from bertkit.tasks.data import check_labelled
from bertkit.tasks.spec import SPECS
from bertkit.tasks.task import ItemPart, check_segments
from bertkit.text.lines import TextCounts, describe_skipped
from bertkit.tokenizer.wordpiece import Tokenizer

MANIFEST = "export.json"
MAX_VERIFIED = 200
"""The maximum number of inputs of a file on which outputs are compared."""
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
"""Format → packages that write it. The manifest records their versions and those of `Opened.by`."""
MAX_ERROR = 1e-4
"""The largest allowed difference of an fp32 output, multiplied by the largest value if above 1.

8-bit weights have no such bound: for them the metric is what counts.
"""
GELU_NOTES = {
    "gelu": "trained with the GELU with erf; Google's code since February 2019 computes the tanh "
    "form, so its outputs differ slightly from those checked here",
    "gelu_tanh": "trained with the tanh form of GELU, as Google's code has computed it since "
    "February 2019; bertkit and transformers read these files with the GELU with erf",
}
CASE_NOTE = (
    "vocab.txt does not say how text is normalised, and this tokenizer's rules differ from those "
    "that are inferred from it: keep the source's tokenizer.json, and compare token ids"
)


@dataclass(frozen=True, kw_only=True)
class Check:
    """The inputs for checking an exported model, and how much it may differ."""

    parts: Sequence[ItemPart] | None = None
    """The sequences on which outputs are compared; None for the built-in sentences."""
    examples: str = "built-in sentences"
    """The source of the sequences, for messages and the manifest."""
    labelled: Sequence[Any] | None = None
    """Labelled inputs of the model's task, for measuring the metric; None to skip it."""
    dev: str = ""
    """The file of the labelled inputs."""
    max_error: float | None = None
    """The largest allowed difference of an output; None for `MAX_ERROR`, or no bound for int8."""
    bound: float = 1.0
    """The largest allowed drop of the task's main metric, in percentage points."""


CHECK = Check()


def export_model(
    model: Path | str,
    out: Path | str,
    to: str = "onnx",
    *,
    head: str = "auto",
    pooling: str = "auto",
    normalize: bool | None = None,
    inputs: str = "",
    dev: str = "",
    columns: Given | None = None,
    max_error: float | None = None,
    bound: float = 1.0,
    console: Console | None = None,
) -> dict[str, Any]:
    """Write a model for another library, after comparing its outputs with bertkit's.

    Args:
        model: a model directory, a run, a Google checkpoint or a model of the hub.
        out: the folder to write; an earlier export there is replaced.
        to: "onnx", "onnx-int8", "huggingface", "tensorflow" or "torch-export".
        head: "auto" for the model's own head, "encoder" or "embedding".
        pooling: the pooling of embeddings; see `bertkit.load_embedder`.
        normalize: whether embeddings are divided by their length; None for the model's setting.
        inputs: a file whose first inputs the outputs are compared on; "" for built-in sentences.
        dev: a labelled file, or the folder of the model's official data set, on which the change of
            the metric is measured; "" to skip this.
        columns: the column options of these files, by name; the others are those that the model was
            fine-tuned with.
        max_error: the largest allowed difference of an output; None for `MAX_ERROR`, or no bound
            for onnx-int8.
        bound: the largest allowed drop of the main metric, in percentage points.
        console: the console for messages; None for a new one.

    Returns:
        The manifest, as written to export.json.

    Raises:
        BertkitError: see `write_export`; or a file is missing, is damaged or lacks a column.
    """
    for flag, number in (("--bound", bound), ("--max-error", max_error)):
        if number is not None and not math.isfinite(number):
            raise BertkitError(f"{flag} must be a finite number, not {number}", code="number")
    model, out = Path(from_home(model)), Path(from_home(out))
    source = read_export_source(model, head=head, pooling=pooling, normalize=normalize)
    counts, given = TextCounts(), columns or {}
    require_utf8(out)
    with console_or_new(console) as shown:
        check = Check(
            parts=verification_inputs(source, inputs, given, counts) if inputs else None,
            examples=inputs or CHECK.examples,
            labelled=labelled_inputs(source, dev, given, counts) if dev else None,
            dev=dev,
            max_error=max_error,
            bound=bound,
        )
        shown.say(*describe_skipped(counts.skipped, counts.examples))
        manifest = write_export(source, to, out, check)
        shown.say(*describe_export(out, manifest))
        if kept := kept_card(out):
            shown.say(kept)
    return manifest


def verification_inputs(
    source: ExportSource, file: str, given: Given, counts: TextCounts
) -> list[Any]:
    """Return the sequences of the first `MAX_VERIFIED` inputs of a file."""
    if source.task is None:
        known = read_details(tokenizer_folder(source.path)).get("columns")
        remembered = known.get("text") if isinstance(known, dict) else None
        text = given.get("text") or remembered or TextColumns.text
        return text_sequences(source, islice(read_lines(file, text, counts), MAX_VERIFIED))
    spec = SPECS[source.task.task_type]
    _, inputs = model_inputs(spec, source.details, file, given, counts)
    items = source.task.items(list(islice(inputs, MAX_VERIFIED)), source.tokenizer)
    check_segments(items, source.config)
    return [part for item in items.items for part in item.parts]


def labelled_inputs(
    source: ExportSource, file: str, given: Given, counts: TextCounts
) -> Sequence[Any]:
    """Return the labelled inputs of a file, or of the dev split in the folder of the model's set.

    Raises:
        BertkitError: the model has no task, or the file is missing, is damaged or lacks a column.
    """
    if source.task is None:
        raise BertkitError(f"a model with the head '{source.head}' has no metric; remove --dev")
    folder = str(source.details.get("data")) in OFFICIAL and Path(file).is_dir()
    read, data = (None, file) if folder else (file, None)
    _, inputs = scored_inputs(source.task, source.details, read, "", data, "dev", given, counts)
    check_labelled("dev", inputs)
    return inputs


def describe_export(out: Path, manifest: Mapping[str, Any]) -> list[str]:
    """Summarize a manifest in a few lines."""
    size = sum(file["bytes"] for file in manifest["files"].values())
    lines = [f"{out}: {manifest['format']}, head {manifest['head']}, {size / 1e6:,.1f} MB"]
    if note := manifest.get("note"):
        lines.append(f"note: {note}")
    check = manifest["check"]
    told = f"{check['sequences']:,} sequences ({check['examples']}), run by {check['by']}"
    for name, one in check["outputs"].items():
        lines.append(
            f"{name}: differs by at most {one['max_error']:.1g}, for values up to "
            f"{one['largest']:.2g}, on {told}"
        )
    if metric := manifest.get("metric"):
        name = metric["name"]
        lines.append(
            f"{name} on {metric['dev']}: {100 * metric['bertkit'][name]:.2f} → "
            f"{100 * metric['exported'][name]:.2f}"
        )
    elif manifest["format"] == "onnx-int8":
        lines.append("the effect of 8 bits on the metric is unknown; give a labelled file by --dev")
    return lines


def write_export(source: ExportSource, to: str, out: Path, check: Check = CHECK) -> dict[str, Any]:
    """Write a model in another format, with a manifest; after any error, nothing is written.

    The format is a key of `WRITERS`. An earlier export in the folder is replaced.

    Returns:
        The manifest, as written to export.json.

    Raises:
        BertkitError: the format does not support the network or head, the result differs too much,
            a library is missing, or the folder holds something else (such as the model itself) or
            cannot be written.
    """
    check_known("format", to, WRITERS)
    if source.path.resolve().is_relative_to(out.resolve()):
        raise BertkitError(f"{out} contains the model to export; choose another folder")
    empty = out.is_dir() and not any(out.iterdir())
    if out.exists() and not (out / MANIFEST).is_file() and not empty:
        raise BertkitError(f"{out} exists and is not an export; choose another folder")
    if to == "huggingface" and source.head == "encoder":
        # ELECTRA's class has no pooler, and transformers always pools the first token
        pools = has_pooler(*choose_class(source.config, "encoder"))
        same = pools and source.config.direction == "bidirectional"
        source = replace(source, pooler=source.pooler and same)
    with new_folder(out) as folder:
        by, run = WRITERS[to](source, folder)
        if to.startswith("onnx"):
            source.tokenizer.save(folder, source.max_length)
            pad_id = source.tokenizer.pad_id
            config = model_details(source.model, source.config, source.details, pad_id)
            write_json(folder / "config.json", config)
        manifest = export_facts(source, to, folder, by)
        found = compare_outputs(source, run, check, exact=to != "onnx-int8")
        manifest["check"] = {"by": by[0], **found}
        if check.labelled is not None:
            manifest["metric"] = score(source, run, check, to)
        write_json(folder / MANIFEST, manifest)
        card = export_card(source, to, manifest)
        write_card(folder, card, replaced=out, form=export_form(source, to, folder))
    return manifest


def export_facts(source: ExportSource, to: str, folder: Path, by: Sequence[str]) -> dict[str, Any]:
    """Return the manifest's entries that need no run, such as versions, settings and files."""
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
        notes = [GELU_NOTES[source.config.hidden_act]]
        read, own = Tokenizer.load(folder), source.tokenizer
        if (read.lowercase, read.strip_accents) != (own.lowercase, own.strip_accents):
            notes.append(CASE_NOTE)
        found["note"] = "; ".join(notes)
    if (folder / ONNX_FILE).is_file():
        found |= graph_facts(folder / ONNX_FILE)
    elif (folder / PROGRAM_FILE).is_file():
        found |= {"inputs": list(PADDED_INPUTS), "outputs": list(source.outputs)}
    return {**found, "files": files}


def compare_outputs(
    source: ExportSource, run: Runner, check: Check, *, exact: bool
) -> dict[str, Any]:
    """Compare the exported outputs with bertkit's on batches of sequences of different lengths.

    Raises:
        BertkitError: the outputs differ too much or are not finite, or there are no sequences.
    """
    parts = built_in(source) if check.parts is None else check.parts
    if not parts:
        raise BertkitError(f"{check.examples} has no inputs to compare on; use another file")
    outputs = output_differences(
        (name, np.asarray(found[name]), own)
        for batch in in_batches(parts)  # one at a time, as logits over a vocabulary are large
        for found, wanted in zip(
            run_exported(run, source, batch), run_packed(source, batch), strict=True
        )
        for name, own in wanted.items()
    )
    bound = check.max_error if check.max_error is not None else MAX_ERROR if exact else None
    for name, one in outputs.items():
        if bound is not None and not one["max_error"] <= bound * max(1.0, one["largest"]):
            raise BertkitError(
                f"{name} differs from bertkit's by up to {one['max_error']:.2g} (for values up to "
                f"{one['largest']:.2g}), but the bound is {bound:g}; choose another format or "
                "--max-error"
            )
    tokens = sum(part.tokens for part in parts)
    about = {"examples": CHECK.examples if check.parts is None else check.examples}
    return {**about, "sequences": len(parts), "tokens": tokens, "bound": bound, "outputs": outputs}


def output_differences(outputs: Iterable[tuple[str, np.ndarray, np.ndarray]]) -> dict[str, Any]:
    """Return each output's largest difference, its largest value and a measure of agreement.

    It reads (name, exported output, bertkit's) of every sequence. For logits, the agreement is the
    fraction of equal best classes; for vectors, the least cosine.

    Raises:
        BertkitError: the shapes differ, or a number is not finite.
    """
    errors, largest, agreed = (defaultdict[str, list[float]](list) for _ in range(3))
    for name, a, b in outputs:
        if a.shape != b.shape:
            raise BertkitError(f"{name} has shape {a.shape}, but bertkit's has {b.shape}")
        if not np.isfinite(b).all():
            raise BertkitError(f"the model's own {name} has NaN or infinity; export another model")
        if not np.isfinite(a).all():
            raise BertkitError(f"the exported {name} has NaN or infinity; choose another format")
        errors[name].append(float(np.abs(a - b).max()))
        largest[name].append(float(np.abs(b).max()))
        if name.endswith("logits"):
            one, other = np.atleast_1d(a, b)
            agreed[name].extend(np.ravel(one.argmax(-1) == other.argmax(-1)))
        else:
            cosine = np.vdot(a, b) / max(1e-12, np.linalg.norm(a) * np.linalg.norm(b))
            agreed[name].append(float(cosine))
    found = {}
    for name, each in agreed.items():
        key, summary = ("same_best", np.mean) if name.endswith("logits") else ("least_cosine", min)
        measured = {"max_error": max(errors[name]), "largest": max(largest[name])}
        found[name] = {**measured, key: float(summary(each))}
    return found


def score(source: ExportSource, run: Runner, check: Check, to: str) -> dict[str, Any]:
    """Return the task's scores of bertkit and of the exported model on labelled inputs.

    Raises:
        BertkitError: there are no inputs, or the metric drops by more than `check.bound`.
    """
    task, inputs = source.task, check.labelled
    assert task is not None, "only a model with a task has labelled inputs"
    if not inputs:
        raise BertkitError(f"{check.dev} has no labelled inputs; use another file")
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
            f"{100 * before[task.metric]:.2f} to {100 * after[task.metric]:.2f}, but the bound is "
            f"{check.bound:.2f} points; choose another format or --bound"
        )
    shown = {"dev": check.dev, "inputs": len(inputs), "name": task.metric, "bound": check.bound}
    return {**shown, "change": change, "bertkit": dict(before), "exported": dict(after)}
