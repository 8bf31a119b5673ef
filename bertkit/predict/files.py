"""Prediction for files: reading any file that a fine-tuned model takes, and writing a table.

The order of inputs is kept: a chunk of inputs is read, run and written before the next one is read
completely, so a file may be larger than memory. An output file is created whole or not at all.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from bertkit.errors import BertkitError
from bertkit.files import check_output, disk_errors, from_home, jsonable, new_file
from bertkit.predict.load import TaskPredictor, text_columns_of
from bertkit.progress import Console, console_or_new
from bertkit.tasks.classification import TextColumns
from bertkit.tasks.columns import Fields, column_names, is_plain
from bertkit.tasks.official import SWAG_COLUMNS, read_swag
from bertkit.tasks.task import Items
from bertkit.text.documents import TextCounts, describe_skipped, optional_library

SEPARATORS = {".csv": ",", ".tsv": "\t"}
ENDINGS = (".jsonl", *SEPARATORS, ".parquet")

Rows = Sequence[Mapping[str, Any]]


def predict_file(
    predictor: TaskPredictor,
    file: Path | str,
    *,
    columns: Mapping[str, Any] | None = None,
    out: Path | str | None = None,
    console: Console | None = None,
) -> None:
    """Predict for each input of a file and write one row for each, in order.

    A row has the ID of the input, the columns of the input and the fields of the result. A column
    of the input that has the name of a field of the result is called `input_NAME`. Where columns
    are flat (.csv, .tsv, .parquet), each label's probability is a column `probability_LABEL`; if
    only the most probable labels are shown (`load(..., top=N)`), they are `label_1`,
    `probability_1` and so on.

    Args:
        predictor: a fine-tuned model.
        file: the file of inputs: rows with columns, a format of the task type such as SQuAD-JSON or
            CoNLL's, or plain text with one input per line.
        columns: the column options of the task type, by name; the others are those that the model
            was fine-tuned with.
        out: the file for the predictions (.jsonl, .csv, .tsv or .parquet); None prints JSON lines.
        console: the console for progress and what was skipped; None for a new one.

    Raises:
        BertkitError: the file is missing, damaged or lacks a column, or `out` is the file itself or
            cannot be written.
    """
    file = from_home(str(file))
    if out is not None:
        out = check_output(out, [file])
        check_ending(out)
    counts, rows = TextCounts(), dict[str, Fields]()
    total = Items([], 0, 0, {})
    with console_or_new(console) as shown, new_rows(out) as write:
        visible = out is not None or not sys.stdout.isatty()  # lines would break the bar
        flat = out is not None and out.suffix.lower() != ".jsonl"
        examples = file_examples(predictor, file, dict(columns or {}), counts, rows)
        if visible:
            shown.start(None, title="predicting", unit="inputs")
        for chunk in predictor.chunks(examples):
            results, items = predictor.run(chunk)
            pairs = zip(chunk, results, strict=True)
            labels = len(predictor.task.labels) if flat else 0
            write([result_row(example, rows, result, labels) for example, result in pairs])
            total = total.plus(items)
            if visible:
                shown.update({"done": total.inputs})
        shown.close()
        shown.say(*describe_skipped(counts.skipped, counts.examples))
        shown.say(f"{total.inputs:,} inputs, {total.described()}")


def file_examples(
    predictor: TaskPredictor,
    file: str,
    options: dict[str, Any],
    counts: TextCounts,
    rows: dict[str, Fields],
) -> Iterator[Any]:
    """Return the examples of a file; `rows` gets all fields of each one's row, by its location."""
    columns = predictor.columns_with(options)
    if is_plain(file, columns):
        return columns.read_lines(file, counts)
    if columns.in_rows(file):
        names = column_names(file, columns.format, header=columns.header)
        if predictor.details.get("data") == "swag" and {*SWAG_COLUMNS} <= {*names}:
            return iter(read_swag(file, counts, "predict"))
        if isinstance(columns, TextColumns) and not options.keys() & {"text", "pair"}:
            usual = text_columns_of(columns, names, predictor.pairs)
            columns = usual if {*usual.inputs} <= {*names} else columns
    return columns.read(file, counts, "predict", rows)


def result_row(example: Any, rows: dict[str, Fields], result: Any, labels: int) -> dict[str, Any]:
    """Return a result with the columns of its input, which are removed from `rows`.

    `labels` is their number if the probabilities become columns, else 0.
    """
    values = result.to_dict()
    if labels and isinstance(values.get("probabilities"), dict):
        shares = values.pop("probabilities")
        for rank, (label, share) in enumerate(shares.items(), 1):
            ranked = {f"label_{rank}": label, f"probability_{rank}": share}
            values |= {f"probability_{label}": share} if len(shares) == labels else ranked
    fields = rows.pop(example.location, None)
    if fields is None:  # not a table
        named = ("text", "pair", "question")
        fields = {n: getattr(example, n) for n in named if getattr(example, n, None) is not None}
    inputs = {(f"input_{name}" if name in values else name): v for name, v in fields.items()}
    return {"id": example.id, **inputs, **values}


# Writing ------------------------------------------------------------------------------------------


def check_ending(out: Path) -> None:
    """Raise unless the ending of a file's name is that of a format which can be written."""
    if out.suffix.lower() not in ENDINGS:
        raise BertkitError(
            f"{out}: predictions are written as {', '.join(ENDINGS)}; choose one of these",
            code="format",
        )


@contextmanager
def new_rows(out: Path | None) -> Iterator[Callable[[Rows], None]]:
    """Yield a function that writes a chunk of rows to a file, created if the block succeeds.

    Without a file, rows are written to the standard output as JSON lines and flushed at once.
    """
    if out is None:
        stream = sys.stdout  # kept: while a bar is up, sys.stdout prints above it instead

        def write_now(rows: Rows) -> None:
            stream.writelines(json_text(row) + "\n" for row in rows)
            stream.flush()

        yield write_now
        return
    ending = out.suffix.lower()
    with new_file(out) as temporary, disk_errors(out), ExitStack() as stack:
        if ending == ".parquet":
            yield parquet_writer(out, temporary, stack)
            return
        # half of a surrogate pair, which UTF-8 lacks, is written escaped, as JSON does
        how: Any = {"encoding": "utf-8", "errors": "backslashreplace", "newline": ""}
        file = stack.enter_context(temporary.open("w", **how))
        if ending in SEPARATORS:
            yield separated_writer(out, file, SEPARATORS[ending])
        else:
            yield lambda rows: file.writelines(json_text(row) + "\n" for row in rows)


def json_text(value: Any) -> str:
    """Return a value of any column as JSON: NaN is null, and what JSON lacks is written as text."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError):
        return json.dumps(jsonable(value), ensure_ascii=False)


def separated_writer(out: Path, file: Any, separator: str) -> Callable[[Rows], None]:
    """Return a writer of CSV or TSV; the first rows decide the columns."""
    names: list[str] = []
    writer = csv.writer(file, delimiter=separator, lineterminator="\n")

    def write(rows: Rows) -> None:
        if not names:
            names.extend(dict.fromkeys(name for row in rows for name in row))
            writer.writerow(names)
        check_names(out, rows, names)
        writer.writerows([cell(row.get(name)) for name in names] for row in rows)

    return write


def cell(value: Any) -> str:
    """Return a value as the text of a field; lists and objects as JSON, null and NaN as ""."""
    value = jsonable(value)
    if value is None:
        return ""
    return str(value) if isinstance(value, str | bool) else json.dumps(value, ensure_ascii=False)


def check_names(out: Path, rows: Rows, names: Iterable[str]) -> None:
    """Raise if a row has a column that the first rows of the file did not have."""
    known = set(names)
    if more := {name for row in rows for name in row} - known:
        raise BertkitError(
            f"{out}: a later row has the column '{min(more)}', which the first rows lack; write "
            ".jsonl",
            code="column",
        )


def parquet_writer(out: Path, temporary: Path, stack: ExitStack) -> Callable[[Rows], None]:
    """Return a writer of Parquet; the first rows decide the types of columns, null becomes text."""
    arrow = optional_library("pyarrow", "Parquet files")
    parquet = optional_library("pyarrow.parquet", "Parquet files")
    file: Any = None

    def write(rows: Rows) -> None:
        nonlocal file
        if file is not None:
            check_names(out, rows, file.schema.names)
        try:
            table = arrow.Table.from_pylist(list(rows), schema=file and file.schema)
        except (arrow.ArrowException, OverflowError, UnicodeEncodeError) as error:
            raise BertkitError(
                f"{out}: a column's values are not of one type that Parquet has "
                f"({str(error).splitlines()[0]}); write .jsonl",
                code="format",
            ) from error
        if file is None:
            text, null = arrow.string(), arrow.null()
            fields = [f.with_type(text) if f.type == null else f for f in table.schema]
            table = table.cast(arrow.schema(fields))
            file = stack.enter_context(parquet.ParquetWriter(temporary, table.schema))
        file.write_table(table)

    return write
