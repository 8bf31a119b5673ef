"""Prediction for files: reading any file that a fine-tuned model takes, and writing a table.

The order of inputs is kept: a chunk of inputs is read, run and written before the next one is read
completely, so a file may be larger than memory. An output file is created whole or not at all.

The columns of a flat file (CSV, TSV, Parquet) are those of all rows, in the order of their first
appearance. They are known at the end, so the rows wait in a temporary file until then.
"""

from __future__ import annotations

import csv
import json
import pickle
import re
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from os import SEEK_END
from pathlib import Path
from tempfile import TemporaryFile
from types import SimpleNamespace
from typing import IO, Any, TextIO

from bertkit.errors import BertkitError
from bertkit.files import check_output, disk_errors, from_home, json_line, jsonable, new_file
from bertkit.predict.load import TaskPredictor
from bertkit.progress import Console, console_or_new, counted
from bertkit.tasks.columns import Fields, column_names, is_plain
from bertkit.tasks.official import SWAG_COLUMNS, read_swag
from bertkit.tasks.sequences import no_progress
from bertkit.tasks.task import Items
from bertkit.tasks.token_classification import Entity
from bertkit.text.documents import TextCounts, describe_skipped, optional_library

ENDINGS = (".jsonl", ".csv", ".tsv", ".parquet")
INPUT = "input_"
"""The prefix of a column of the input that has the name of a field of the result."""
TSV_ESCAPES = str.maketrans({"\t": r"\t", "\n": r"\n", "\r": r"\r"})

Rows = Sequence[Mapping[str, Any]]


def predict_file(
    predictor: TaskPredictor,
    file: Path | str,
    *,
    columns: Mapping[str, Any] | None = None,
    out: Path | str | None = None,
    rows: str = "inputs",
    console: Console | None = None,
) -> None:
    """Predict for each input of a file and write one row for each, in order.

    A row has the ID of the input, the columns of the input and the fields of the result. A column
    of the input that has the name of a field of the result is called `input_NAME`. Where columns
    are flat (.csv, .tsv, .parquet), each label's probability is a column `probability_LABEL`; if
    only the most probable labels are shown (`load(..., top=N)`), they are `label_1`,
    `probability_1` and so on. TSV has no quotes, so tabs and line breaks in a text are written with
    a backslash.

    Args:
        predictor: a fine-tuned model.
        file: the file of inputs: rows with columns, a format of the task type such as SQuAD-JSON or
            CoNLL's, or plain text with one input per line.
        columns: the column options of the task type, by name; the others are those that the model
            was fine-tuned with.
        out: the file for the predictions (.jsonl, .csv, .tsv or .parquet); None prints JSON lines.
        rows: "inputs", or "entities" for a row an entity, whose column "input" is the input's ID.
        console: the console for progress and what was skipped; None for a new one.

    Raises:
        BertkitError: the file is missing, damaged, a folder or lacks a column, or `out` is the file
            itself or cannot be written.
    """
    file = from_home(str(file))
    if Path(file).is_dir():
        advice = f"give a file, a pattern such as '{file}/*.csv', or a text by --text"
        raise BertkitError(f"{file} is a folder; {advice}", code="folder")
    if out is not None:
        out = check_output(out, [file])
        check_ending(out)
    counts, fields = TextCounts(), dict[str, Fields]()
    names, total = entity_columns(predictor, rows), Items([], 0, 0, {})
    with console_or_new(console) as shown, new_rows(out, shown, names) as write:
        visible = out is not None or not sys.stdout.isatty()  # lines would break the bar
        flat = out is not None and out.suffix.lower() != ".jsonl"
        examples = file_examples(predictor, file, dict(columns or {}), counts, fields)
        if visible:
            shown.start(None, title="predicting", unit="inputs")
        for chunk in predictor.chunks(examples):
            progress = shown.part(len(chunk)) if visible else no_progress
            results, items = predictor.run(chunk, progress)
            pairs = zip(chunk, results, strict=True)
            labels = len(predictor.task.labels) if flat else 0
            made = [result_row(example, fields, result, labels) for example, result in pairs]
            write(entity_rows(made) if names else made)
            total = total.plus(items)
        shown.close()
        shown.say(*describe_skipped(counts.skipped, counts.examples))
        shown.say(f"{counted(total.inputs, 'inputs')}, {total.described()}")


def entity_columns(predictor: TaskPredictor, rows: str) -> tuple[str, ...]:
    """Return the columns of rows that are entities; () for rows that are inputs."""
    if rows != "inputs" and (rows != "entities" or not getattr(predictor.task, "pattern", None)):
        raise BertkitError(
            "rows are inputs, or entities if the model's tags form them", code="rows"
        )
    return ("input", *Entity.__annotations__) if rows == "entities" else ()


def entity_rows(rows: Rows) -> Rows:
    """Return a row for each entity of rows of inputs."""
    return [{"input": row["id"], **entity} for row in rows for entity in row["entities"]]


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
        columns = predictor.columns_among(names, options)
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
    inputs = {input_column(name, values): value for name, value in fields.items()}
    return {"id": example.id, **inputs, **values}


def input_column(name: str, results: Container[str]) -> str:
    """Return the name of a column of the input in the output; different names stay different."""
    bare = re.sub(f"^({INPUT})+", "", name)
    return INPUT + name if bare in results else name


# Writing ------------------------------------------------------------------------------------------


def check_ending(out: Path) -> None:
    """Raise unless the ending of a file's name is that of a format which can be written."""
    if out.suffix.lower() not in ENDINGS:
        raise BertkitError(
            f"{out}: predictions are written as {', '.join(ENDINGS)}; choose one of these",
            code="format",
        )


@contextmanager
def new_rows(
    out: Path | None, console: Console, columns: Iterable[str] = ()
) -> Iterator[Callable[[Rows], None]]:
    """Yield a function that writes a chunk of rows to a file, or to the standard output as JSON."""
    if out is None:
        stream = sys.stdout  # kept: while a bar is up, sys.stdout prints above it instead

        def write_now(rows: Rows) -> None:
            stream.writelines(map(json_line, rows))
            stream.flush()

        yield write_now
        return
    ending = out.suffix.lower()
    with new_file(out) as temporary, disk_errors(out):
        if ending == ".jsonl":
            with open_text_file(temporary) as file:
                yield lambda rows: file.writelines(map(json_line, rows))
            return
        with TemporaryFile(dir=temporary.parent) as waiting:
            names = dict.fromkeys(columns)

            def wait(rows: Rows) -> None:
                names.update(dict.fromkeys(name for row in rows for name in row))
                pickle.dump(rows, waiting)

            yield wait
            if ending == ".parquet":
                write_parquet(temporary, [*names], waiting)
            elif ending == ".csv":
                write_csv(temporary, [*names], waiting)
            elif escaped := write_tsv(temporary, [*names], waiting):
                lost = "rows whose tabs and line breaks are written with a backslash"
                console.say(f"{lost} (.csv keeps them): {escaped:,}")


def open_text_file(path: Path) -> TextIO:
    """Open a new file; half of a surrogate pair, which UTF-8 lacks, is escaped, as in JSON."""
    return path.open("w", encoding="utf-8", errors="backslashreplace", newline="")


def waiting_rows(file: IO[bytes]) -> Iterator[Rows]:
    """Yield the chunks of rows that were written to a temporary file, from its start."""
    end = file.seek(0, SEEK_END)
    file.seek(0)
    while file.tell() < end:
        yield pickle.load(file)  # noqa: S301 - which this process has written


def cell(value: Any) -> str:
    """Return a value as the text of a field; lists and objects as JSON, null and NaN as ""."""
    value = jsonable(value)
    if value is None:
        return ""
    return str(value) if isinstance(value, str | bool) else json.dumps(value, ensure_ascii=False)


def write_csv(path: Path, names: Sequence[str], waiting: IO[bytes]) -> None:
    """Write CSV; a field with a separator, a quote or a line break is quoted."""
    with open_text_file(path) as file:
        # a lone \r is quoted only if it is in the end of a line
        lines: Any = SimpleNamespace(write=lambda line: file.write(line[:-2] + "\n"))
        csv.writer(lines, lineterminator="\r\n").writerows(field_rows(names, waiting))


def write_tsv(path: Path, names: Sequence[str], waiting: IO[bytes]) -> int:
    """Write TSV, which has no quotes; return the number of rows whose fields had to be escaped."""
    escaped = 0
    with open_text_file(path) as file:
        for fields in field_rows(names, waiting):
            cells = [text.translate(TSV_ESCAPES) for text in fields]
            escaped += cells != fields
            file.write("\t".join(cells) + "\n")
    return escaped


def field_rows(names: Sequence[str], waiting: IO[bytes]) -> Iterator[list[str]]:
    """Yield the names of the columns and the fields of every row."""
    yield [*names]
    for row in chain.from_iterable(waiting_rows(waiting)):
        yield [cell(row.get(name)) for name in names]


def write_parquet(path: Path, names: Sequence[str], waiting: IO[bytes]) -> None:
    """Write Parquet; a column is of text if its values have no common type, or are all null."""
    arrow = optional_library("pyarrow", "Parquet files")
    parquet = optional_library("pyarrow.parquet", "Parquet files")
    text = arrow.string()

    def common_type(known: Any, values: list[Any]) -> Any:
        if known == text:
            return text
        try:
            both = [arrow.schema([("", kind)]) for kind in (known, arrow.array(values).type)]
            kind = arrow.unify_schemas(both, promote_options="permissive").field(0).type
            arrow.array(values, kind)
        except (arrow.ArrowException, OverflowError, UnicodeEncodeError):
            return text
        return text if "struct<>" in str(kind) else kind  # which Parquet lacks

    types = dict.fromkeys(names, arrow.null())
    for _ in range(2):  # the second time, the first rows are compared with the type of all
        for rows in waiting_rows(waiting):
            for name in names:
                types[name] = common_type(types[name], [row.get(name) for row in rows])
    types = {name: text if kind == arrow.null() else kind for name, kind in types.items()}
    schema = arrow.schema([*types.items()])
    with parquet.ParquetWriter(path, schema) as writer:
        for rows in waiting_rows(waiting):
            columns = []
            for name, kind in types.items():
                values = [row.get(name) for row in rows]
                values = [as_text(value) for value in values] if kind == text else values
                columns.append(arrow.array(values, kind))
            writer.write_table(arrow.table(columns, schema=schema))


def as_text(value: Any) -> str | None:
    """Return a value for a column of text: null stays null, and lists and objects are JSON."""
    return None if value is None else cell(value).encode(errors="backslashreplace").decode()
