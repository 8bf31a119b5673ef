"""Prediction for files: reading any file that a fine-tuned model takes, and writing a table.

The order of inputs is kept: a chunk of inputs (`bertkit.predict.predictors.input_chunks`) is read,
run and written before the next one is read completely. So at most two chunks are in memory, the
one just written and the one being read, and a file may be larger than memory.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from operator import length_hint
from pathlib import Path
from typing import Any

from bertkit.console import Console, console_or_new
from bertkit.datasets.benchmarks import glue_columns
from bertkit.datasets.columns import ChoiceColumns, TextColumns, WordColumns
from bertkit.datasets.examples import ChoiceExample, QuestionExample, TextExample, WordsExample
from bertkit.datasets.glue import GLUE
from bertkit.datasets.readers import Columns
from bertkit.datasets.records import Records
from bertkit.datasets.swag import SWAG_COLUMNS, read_swag
from bertkit.datasets.tabular import Fields, has_columns, parquet_types
from bertkit.errors import BertkitError, InputTypeError, flag, short_repr
from bertkit.files import BLOCK_BYTES, from_home
from bertkit.outputs import refuse_overwriting
from bertkit.predict.predictors import CHUNK_INPUTS, TaskPredictor, input_chunks
from bertkit.predict.tables import check_ending, is_flat, is_parquet, new_rows
from bertkit.predict.word_splitter import words_example
from bertkit.tasks.data import describe_losses
from bertkit.tasks.predictions import flat_row
from bertkit.tasks.spec import SPECS, TaskSpec
from bertkit.tasks.task import NOTHING_UNKNOWN
from bertkit.tasks.token_classification import are_all_unique
from bertkit.text.documents import optional_library
from bertkit.text.lines import TextCounts, describe_skipped, plain_lines
from bertkit.text.sources import DECOMPRESSORS, extension, one_source, source_format

Given = Mapping[str, Any]
"""The column options that a caller gave; the others are those saved with the model."""
LONE_SENTENCES = (
    "every sentence is alone in its document, and the model was fine-tuned with the context of "
    "documents; mark those by a column (--document), in CoNLL's files by -DOCSTART- lines, and in "
    "plain text by blank lines between documents only"
)


def predict_file(
    predictor: TaskPredictor,
    file: Path | str,
    *,
    columns: Given | None = None,
    out: Path | str | None = None,
    console: Console | None = None,
) -> None:
    """Predict for every input of a file and write one row for each, in order.

    Printed rows have the ID of the input, its text and pair or its question, and the fields of its
    prediction. In a file they have every column of the input instead; a field of the prediction
    whose name is taken is called `predicted_NAME` or, if that is taken, `predicted_predicted_NAME`.

    Args:
        predictor: a fine-tuned model, or an ensemble.
        file: the file of inputs; see `model_inputs`.
        columns: the column options of the task type, by name; the others are those that the model
            was fine-tuned with.
        out: the file for the predictions (.jsonl, .csv, .tsv or .parquet), which is created once
            all are made; None prints JSON lines.
        console: the console for progress and what was skipped; None for a new one.

    Raises:
        InputTypeError: the predictor is something else, such as the path of a model.
        BertkitError: the file is missing, damaged or lacks a column, a later input has a column
            that the predictions have taken, or `out` is the file itself or cannot be written.
    """
    if not isinstance(predictor, TaskPredictor):
        raise InputTypeError(f"give what load(MODEL) returns, not {short_repr(predictor)}")
    file, out = from_home(os.fspath(file)), None if out is None else Path(from_home(out))
    rows: dict[str, Fields] | None = None
    if out is not None:
        refuse_overwriting(out, [file])
        check_ending(out)
        rows = {}
    with console_or_new(console) as shown:
        counts = TextCounts()
        named, inputs = model_inputs(
            SPECS[predictor.task.task_type],
            predictor.loaded[0].details,
            file,
            columns or {},
            counts,
            rows,
        )
        types = parquet_types(file, named.format) if is_parquet(out) else {}
        with new_rows(out, types) as write:
            visible = out is not None or not sys.stdout.isatty()  # lines would break the bar
            progress = FileProgress(shown, *file_length(file, named, inputs), visible=visible)
            alone, names = predictor.reads_documents, dict[str, str]()
            windowed, cut, unknown = 0, Counter[str](), NOTHING_UNKNOWN
            for chunk in input_chunks(inputs, whole=predictor.reads_documents):
                progress.begin(chunk)
                alone = alone and are_all_unique(chunk)
                predictions, items = predictor.run(chunk, progress)
                parts = [
                    row_parts(predictor, given, found, rows)
                    for given, found in zip(chunk, predictions, strict=True)
                ]
                write(predicted_rows(parts, names, flat=is_flat(out)))
                windowed += items.windowed
                cut.update(items.cut)
                unknown = unknown.plus(items.unknown)
            progress.finish()
        shown.say(*describe_skipped(counts.skipped, counts.examples))
        if alone and progress.inputs > 1:
            shown.say(f"{file}: {LONE_SENTENCES}")
        shown.say(f"{progress.inputs:,} inputs, {describe_losses(windowed, cut, unknown)}")


def predict_texts(
    predictor: TaskPredictor, texts: Sequence[str], *, out: Path | None = None
) -> None:
    """Predict for the texts of one input and write its row; see `predict_file`.

    Raises:
        BertkitError: the texts are too few or too many for the task type.
    """
    kind = SPECS[predictor.task.task_type].example
    if kind is WordsExample and len(texts) > 1:
        raise BertkitError(
            f"a tagger takes one text, and there are {len(texts)}; put the text in quotes, or give "
            "a file",
            code="texts",
        )
    choices = kind is ChoiceExample
    given = (texts[0], texts[1:]) if choices else texts
    example = predictor.example(given if len(given) > 1 else given[0], "input", "0")
    [found] = predictor.many([example])
    with new_rows(out) as write:
        parts = [row_parts(predictor, example, found, None)]
        write(predicted_rows(parts, {}, flat=is_flat(out)))


def row_parts(
    predictor: TaskPredictor, given: Any, found: Any, rows: dict[str, Fields] | None
) -> tuple[Fields, Fields]:
    """Return what the row of a prediction has of its input, and the fields of the prediction.

    `rows` maps the place of an input to all fields of its row, which is removed; an input that is
    not from a table has none.
    """
    row = predictor.task.row(given, found)
    kept = {"id": row.pop("id")}
    if rows is not None and (fields := rows.pop(given.place, None)) is not None:
        if isinstance(given, WordsExample):
            row.pop("words")  # the input's row has them, under the column's name
        return {**kept, **fields}, row
    if isinstance(given, TextExample):
        pair = {} if given.pair is None else {"pair": given.pair}
        return {**kept, "text": given.text, **pair}, row
    if isinstance(given, QuestionExample):
        return {**kept, "question": given.question}, row
    return kept, row


def predicted_rows(
    parts: Sequence[tuple[Fields, Fields]], names: dict[str, str], *, flat: bool
) -> list[dict[str, Any]]:
    """Return the rows of a chunk of predictions.

    Args:
        parts: for each row what it has of its input, and the fields of its prediction.
        names: field of predictions -> its column, which the first chunk fills. A column has a
            prediction in all rows or in none, also if only some inputs have one of its name.
        flat: whether each label's probability gets a column.

    Raises:
        BertkitError: an input has a column that the predictions of earlier chunks have.
    """
    taken = {name for kept, _ in parts for name in kept}
    if late := sorted(taken.intersection(names.values())):
        place = next(kept["id"] for kept, _ in parts if late[0] in kept)
        raise BertkitError(
            f"input {place} has the column '{late[0]}', which the first {CHUNK_INPUTS:,} inputs "
            "lack and the predictions have taken; rename it, or give it to the first input, too",
            code="column",
        )

    def free(name: str) -> str:
        return free(f"predicted_{name}") if name in taken else name

    def column(name: str) -> str:
        return names.setdefault(name, free(name))

    return [
        {**kept, **{column(name): one for name, one in (flat_row(row) if flat else row).items()}}
        for kept, row in parts
    ]


# Inputs ------------------------------------------------------------------------------------------


def model_inputs(
    spec: TaskSpec,
    details: Mapping[str, Any],
    file: str,
    given: Given,
    counts: TextCounts,
    rows: dict[str, Fields] | None = None,
) -> tuple[Columns, Iterator[Any]]:
    """Return the columns of a file for a model, and an iterator over its inputs.

    The file has rows with columns, a format of the task type, or plain text with one input per
    line, or it is an official file of the model's data set. `details` is the content of the model's
    `bertkit.json`, and `given` has the column options that the caller gave. If `rows` is given, it
    gets all fields of the row of every input, by the place of the input.

    Raises:
        BertkitError: the file is missing, damaged or lacks a column; or its columns are neither
            those of the model's data set nor the default ones.
    """
    named = spec.merged_columns(given, details)
    plain = is_plain(file, named)
    if plain or not named.in_rows(file):
        used = {"format"} if plain else {"format", "word_column", "tag_column"}
        if unused := given.keys() - used:
            flags = ", ".join(map(flag, sorted(unused)))
            raise BertkitError(f"{file} has no named columns; leave out {flags}", code="column")
    if plain:
        return named, plain_inputs(spec, file, named, counts)
    if is_swag(details, file, named):
        if own := given.keys() & {"text", "choices"}:
            flags = " and ".join(map(flag, sorted(own)))
            raise BertkitError(
                f"{file} has SWAG's columns, which the model knows; leave out {flags}"
            )
        return named, iter(read_swag(file, counts, labelled=False, format=named.format, rows=rows))
    named = usual_columns(details, given, named, file)
    return named, named.read(
        file, counts, labelled=False, keep_unlabelled=True, scoring=True, rows=rows
    )


def usual_columns(
    details: Mapping[str, Any], given: Given, columns: Columns, source: str | Records
) -> Columns:
    """Return the columns; for texts that the caller did not name, those of the model's GLUE task.

    A column `pair` of the first usable row is read if nothing tells whether the model was
    fine-tuned on pairs of texts.
    """
    data = str(details.get("data"))
    if not isinstance(columns, TextColumns) or given.keys() & {"text", "pair"}:
        return columns
    if data in GLUE:
        return glue_columns(data, source, columns)
    told = details.get("pairs") is not None or columns.inputs != type(columns)().inputs
    if told or not columns.header or not has_columns(source, ["pair"], columns.format, rows=1):
        return columns
    return replace(columns, pair="pair")


def is_swag(details: Mapping[str, Any], file: str, columns: Columns) -> bool:
    """Return whether the model was fine-tuned on SWAG and the file has SWAG's columns."""
    if details.get("data") != "swag" or not isinstance(columns, ChoiceColumns):
        return False
    return has_columns(file, SWAG_COLUMNS, columns.format)


def is_plain(file: str, columns: Columns) -> bool:
    """Return whether a file is read as plain text; a .txt of tagged words is not."""
    if columns.format != "auto":
        return columns.format == "text"
    return extension(file) == ".txt" and not isinstance(columns, WordColumns)


def plain_inputs(spec: TaskSpec, file: str, columns: Columns, counts: TextCounts) -> Iterator[Any]:
    """Yield an input for each line that is not blank.

    Raises:
        BertkitError: the inputs of the task type have several parts, or there is no text.
    """
    if spec.example not in (TextExample, WordsExample):
        raise BertkitError(f"{file}: a model for {spec.name} needs columns, not plain text")
    if isinstance(columns, TextColumns) and columns.pair:
        raise BertkitError(f"{file}: plain text has no columns; give CSV or JSONL for pairs")
    source = one_source(file)
    used = document = 0
    for number, line in plain_lines(source, counts):
        place = f"{source.path}:{number}"
        if not line.strip():
            counts.note("blank line", place)
            document += 1  # as in a corpus, a blank line ends a document
            continue
        if spec.example is WordsExample:
            yield words_example(str(used), line, document, place)
        else:
            yield TextExample(str(used), line.strip(), None, None, place)
        used += 1
    if not used:
        raise BertkitError(f"{file} holds no text; give one input per line")


def file_length(file: str, columns: Columns, inputs: Iterator[Any]) -> tuple[int | None, str]:
    """Return the length of a file, or None if counting is slow, and the unit of the length."""
    held = length_hint(inputs)  # the number of inputs, if they had to be read at once
    last = None if held else end_position(file, columns)
    return (held or None, "inputs") if last is None else (last, "lines")


def end_position(path: str, columns: Columns) -> int | None:
    """Return the number of lines of a local, uncompressed file, or of rows of a Parquet file.

    This is the maximum of the locations ("file:line") of inputs. Returns None if counting lines is
    slow (compressed files, URLs) or locations are not lines.
    """
    path = from_home(path)
    if "://" in path or path.startswith("hf:") or not Path(path).is_file():
        return None
    if Path(path).suffix.lower() in DECOMPRESSORS:
        return None
    if source_format(path, columns.format) == "parquet":
        parquet = optional_library("pyarrow.parquet", "Parquet files")
        try:
            return int(parquet.read_metadata(path).num_rows)
        except (OSError, ValueError):  # damaged: reading the file will report it
            return None
    with Path(path).open("rb") as file:
        last, lines = b"", 0
        while block := file.read(BLOCK_BYTES):
            lines += block.count(b"\n")
            last = block[-1:]
    return lines + (last != b"\n")


# Progress ----------------------------------------------------------------------------------------


class FileProgress:
    """The progress bar of a file, used as the `progress` of `TaskPredictor.run` for each chunk.

    The share of inputs done in a chunk is estimated by that of its windows.

    Args:
        console: the console that shows the bar; its owner closes it.
        total: the number of units, or None if unknown.
        unit: "inputs", or "lines" if progress is measured by the line numbers of inputs.
        visible: whether to show a bar.
    """

    def __init__(self, console: Console, total: int | None, unit: str, *, visible: bool) -> None:
        self.console, self.whole, self.by_lines = console, total, unit == "lines"
        self.visible = visible
        self.inputs = 0
        """The number of inputs so far, including the current chunk."""
        self.size = self.before = self.after = 0
        if visible:
            console.start(total, title="predicting", unit=unit)

    def begin(self, chunk: list[Any]) -> None:
        """Start the next chunk."""
        self.inputs += len(chunk)
        self.size, self.before = len(chunk), self.after
        line = chunk[-1].place.rpartition(":")[2]
        self.after = int(line) if self.by_lines else self.inputs
        if self.whole is not None:
            self.after = min(self.after, self.whole)

    def finish(self) -> None:
        """Show that all inputs are done, and close the bar."""
        self.size, self.after = 0, self.inputs if self.whole is None else self.whole
        self._show(1.0)
        self.console.close()

    def __call__(self, done: int, total: int) -> None:
        """Show that `done` of `total` windows of the current chunk are done."""
        if done:
            self._show(done / total)

    def _show(self, share: float) -> None:
        if not self.visible:
            return
        record = {"done": self.before + int(share * (self.after - self.before))}
        if self.by_lines:
            record["inputs"] = self.inputs - self.size + int(share * self.size)
        self.console.update(record)
