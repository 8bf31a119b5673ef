"""`bertkit export`: write a model for other libraries and compare outputs with bertkit's."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

from bertkit.checkpoints.card import kept_card
from bertkit.cli.options import NO_COLUMNS, ColumnFlags, given
from bertkit.config import FLATTEN
from bertkit.datasets.benchmarks import OFFICIAL, DataFiles, read_split
from bertkit.datasets.columns import TextColumns
from bertkit.errors import BertkitError
from bertkit.export.export import Check, export_model
from bertkit.export.source import ExportSource, read_export_source
from bertkit.export.verify import text_sequences
from bertkit.outputs import REPLACED, TEXT
from bertkit.predict.files import is_swag, model_inputs
from bertkit.predict.text_vectors import read_lines
from bertkit.tasks.data import check_labelled
from bertkit.tasks.spec import SPECS
from bertkit.tasks.task import check_segments
from bertkit.text.lines import TextCounts, describe_skipped
from bertkit.training.journal import Console

MAX_VERIFIED = 200
"""The most inputs of a file on which outputs are compared."""


def export_command(
    model: Path,
    *,
    to: str,
    out: Annotated[Path, REPLACED],
    head: str = "auto",
    pooling: str = "auto",
    normalize: bool | None = None,
    inputs: Annotated[str, TEXT] = "",
    dev: Annotated[str, TEXT] = "",
    max_error: float | None = None,
    bound: float = 1.0,
    columns: Annotated[ColumnFlags, FLATTEN] = NO_COLUMNS,
) -> None:
    """Write a model for other libraries, and check the files.

    The files are run on real inputs and compared with bertkit; export.json, next to them, records
    the differences. If a difference exceeds its bound, nothing is written.

    Parameters
    ----------
    model
        A model directory, a run directory or a Google checkpoint.
    to
        onnx, onnx-int8 (8-bit weights), huggingface (for transformers; embedding models for
        sentence-transformers), tensorflow (Google's checkpoints) or torch-export (.pt2).
    out
        The folder to write.
    head
        auto for the head that the model was trained with; encoder and embedding work for any model.
    pooling
        The pooling of embeddings: cls, mean, pooler, mean-last-four, or auto.
    normalize
        Whether to divide embeddings by their length.
    inputs
        A file of inputs, as for predict, to compare outputs on (the first 200); if not given,
        built-in sentences are used.
    dev
        A labelled file on which to measure the change of the metric; for a model fine-tuned on an
        official set, also the set's folder (as --data in finetune).
    max_error
        The largest allowed difference of an output, relative to its largest value if above 1; by
        default 0.0001, and unlimited for onnx-int8.
    bound
        The largest allowed drop of the task's main metric on --dev, in percentage points.
    """
    for flag, number in (("--bound", bound), ("--max-error", max_error)):
        if number is not None and not math.isfinite(number):
            raise BertkitError(f"{flag} must be a finite number, not {number}", code="number")
    source = read_export_source(model, head=head, pooling=pooling, normalize=normalize)
    counts = TextCounts()
    check = Check(max_error=max_error, bound=bound)
    with Console() as console:
        if inputs:
            parts = verification_inputs(source, inputs, columns, counts)
            check = replace(check, parts=parts, examples=inputs)
        if dev:
            check = replace(check, labelled=labelled_inputs(source, dev, columns, counts), dev=dev)
        for line in describe_skipped(counts.skipped, counts.examples):
            console.say(line)
        manifest = export_model(source, to, out, check)
        for line in describe_export(out, manifest):
            console.say(line)
        if kept := kept_card(out):
            console.say(kept)


def verification_inputs(
    source: ExportSource, file: str, columns: ColumnFlags, counts: TextCounts
) -> list[Any]:
    """Return the sequences of the first `MAX_VERIFIED` inputs of a file."""
    if source.task is None:
        known = source.details.get("columns")
        remembered = known.get("text") if isinstance(known, dict) else None
        text = columns.text or remembered or TextColumns.text
        return text_sequences(source, islice(read_lines(file, text, counts), MAX_VERIFIED))
    spec = SPECS[source.task.task_type]
    _, inputs = model_inputs(spec, source.details, file, given(columns), counts)
    items = source.task.items(list(islice(inputs, MAX_VERIFIED)), source.tokenizer)
    check_segments(items, source.config)
    return [part for item in items.items for part in item.parts]


def labelled_inputs(
    source: ExportSource, file: str, columns: ColumnFlags, counts: TextCounts
) -> list[Any]:
    """Return the labelled inputs of a file, or of the dev split in the folder of the model's set.

    Raises:
        BertkitError: the model has no task, or the file is missing, is damaged or lacks a column.
    """
    if source.task is None:
        raise BertkitError(f"a model with the head '{source.head}' has no metric; remove --dev")
    data, spec = str(source.details.get("data")), SPECS[source.task.task_type]
    named = spec.merged_columns(given(columns), source.details)
    if data in OFFICIAL and Path(file).is_dir():
        inputs = read_split(data, "dev", DataFiles(data=Path(file)), None, counts)
    elif is_swag(source.details, file, named):
        inputs = read_split(data, "dev", DataFiles(dev=file), None, counts)
    else:
        inputs = named.read_labelled(file, counts, scoring=True)
    check_labelled("dev", inputs)
    return list(inputs)


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
