"""Convert raw text to documents (BERT section 3.1: the corpus must keep documents whole).

BERT's sentence pairs come from running text, so every reader here yields whole documents: blocks
between blank lines (the input format of the BERT release), WikiExtractor's `<doc>` elements, or one
row of JSON lines, CSV, TSV, Parquet or a Hugging Face data set. Files are streamed: memory grows
with the longest document, not with the file. Every change and omission is counted.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from bertkit.errors import BertkitError, nearest, refuse_twice
from bertkit.text.lines import NumberedRow, TextCounts, split_rows, text_lines, valid_text
from bertkit.text.sources import DAMAGE, Source, one_line, open_binary

PARQUET_ROWS = 1024
DOC_TAG = re.compile(r"""<doc (?:[^>"']|"[^"]*"|'[^']*')*>""")
Row = tuple[int, Mapping[str, Any]]
"""The number of a line or row, from 1, and its fields."""


def read_documents(source: Source, counts: TextCounts, *, column: str = "text") -> Iterator[str]:
    """Yield the documents of a source, stripped, not empty, and encodable as UTF-8.

    Args:
        source: a source from `find_sources`.
        counts: the counts to update while reading.
        column: the field that holds the text (JSON lines, CSV, TSV, Parquet, Hugging Face).

    Raises:
        BertkitError: the file is missing, damaged or not UTF-8, no row has the column, or an
            optional library is absent. The message names the file.
    """
    if source.format == "unknown":
        counts.note("file of unknown type", source.path)
        return
    counts.files += 1
    before = counts.documents, counts.skipped.total()
    if source.format == "text":
        numbered = text_documents(source, counts)
    elif source.format == "wikiextractor":
        numbered = wikiextractor_documents(source, counts)
    else:
        numbered = text_column(read_rows(source, counts, [column]), source, counts, column)
    try:
        for number, text in numbered:
            document, location = text.strip(), f"{source.path}:{number}"
            if not document:
                counts.note("empty document", location)
                continue
            document = valid_text(document, location, counts)
            counts.documents += 1
            counts.bytes += len(document.encode())
            yield document
    except DAMAGE as error:
        raise BertkitError(
            f"{source.path} cannot be read after {counts.documents - before[0]} documents "
            f"({one_line(error)}); restore the file or leave it out"
        ) from error
    if (counts.documents, counts.skipped.total()) == before:
        counts.note("empty file", source.path)


def text_documents(source: Source, counts: TextCounts) -> Iterator[NumberedRow]:
    """Yield the blocks of lines between blank lines."""
    lines: list[str] = []
    start = 0
    for number, line in text_lines(source, counts):
        if line and not line.isspace():
            start = start if lines else number
            lines.append(line)
        elif lines:
            yield start, "\n".join(lines)
            lines = []
    if lines:
        yield start, "\n".join(lines)


def wikiextractor_documents(source: Source, counts: TextCounts) -> Iterator[NumberedRow]:
    """Yield the bodies of `<doc id=... url=... title=...>` ... `</doc>`, each title line first."""
    lines: list[str] | None = None  # None outside a document
    start = 0
    for number, text in text_lines(source, counts):
        line = text
        if tag := DOC_TAG.match(line):
            if lines is not None:
                counts.note("unclosed <doc>, kept", f"{source.path}:{start}")
                yield start, "\n".join(lines)
            lines, start, line = [], number, line[tag.end() :]
        if lines is None:
            if line and not line.isspace():
                counts.note("line outside <doc>", f"{source.path}:{number}")
        elif line.rstrip().endswith("</doc>"):
            yield start, "\n".join([*lines, line.rstrip().removesuffix("</doc>")])
            lines = None
        else:
            lines.append(line)
    if lines is not None:
        counts.note("unclosed <doc>, kept", f"{source.path}:{start}")
        yield start, "\n".join(lines)


def read_rows(
    source: Source, counts: TextCounts, columns: Sequence[str] | None = None
) -> Iterator[Row]:
    """Yield the numbered rows of JSON lines, CSV, TSV, Parquet or a Hugging Face data set.

    Args:
        source: a source that has columns.
        counts: collects the rows that cannot be read.
        columns: the only columns that are needed; None for all.
    """
    if source.format == "jsonl":
        return json_rows(source, counts)
    if source.format in ("csv", "tsv"):
        return separated_rows(source, counts, columns or ())
    return (
        parquet_file(source, columns) if source.format == "parquet" else data_set(source, columns)
    )


def json_rows(source: Source, counts: TextCounts) -> Iterator[Row]:
    """Yield the JSON object on each line."""
    objects = first = 0
    for number, line in text_lines(source, counts):
        if not line or line.isspace():
            continue
        first = first or number
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if isinstance(row, dict):
            objects += 1
            yield number, row
        else:
            counts.note("line is not a JSON object", f"{source.path}:{number}")
    if first and not objects:  # such as one array of all rows
        raise BertkitError(
            f"{source.path}:{first}: no line of this file is a JSON object; write one per line"
        )


def separated_rows(source: Source, counts: TextCounts, columns: Sequence[str]) -> Iterator[Row]:
    """Yield the rows of CSV or TSV with a header."""
    rows = split_rows(source, counts)
    header = [name.strip() for name in next(rows, (0, []))[1]]
    for column in columns:
        refuse_twice(source.path, column, header)
    for number, fields in rows:
        if any(map(str.strip, fields[len(header) :])):  # as from a comma that is not quoted
            reason = "row with more fields than the first line"
            counts.note(reason, f"{source.path}:{number}")
        else:
            yield number, dict(zip(header, fields, strict=False))


def parquet_file(source: Source, columns: Sequence[str] | None) -> Iterator[Row]:
    """Yield the rows of a Parquet file."""
    with open_parquet(source) as file:
        names = file.schema_arrow.names
        for column in columns or names:
            if column not in names:
                raise missing_column(source, column, names)
            refuse_twice(source.path, column, names)
        yield from parquet_rows(file, columns)


@contextmanager
def open_parquet(source: Source) -> Iterator[Any]:
    """Open a Parquet file; damage that shows in the block raises an OSError."""
    parquet = optional_library("pyarrow.parquet", "Parquet files")
    arrow_error = optional_library("pyarrow", "Parquet files").ArrowException
    with open_binary(source.path, decompress=False) as stream:
        try:
            yield parquet.ParquetFile(stream)
        except arrow_error as error:
            raise OSError(one_line(error)) from error


def parquet_rows(file: Any, columns: Sequence[str] | None) -> Iterator[Row]:
    """Yield the numbered rows of an open Parquet file, in batches; only some columns, or all."""
    number = 1
    for batch in file.iter_batches(batch_size=PARQUET_ROWS, columns=columns):
        for row in batch.to_pylist():
            yield number, row
            number += 1


def data_set(source: Source, columns: Sequence[str] | None) -> Iterator[Row]:
    """Yield the rows of a streamed Hugging Face data set."""
    with open_data_set(source) as rows:
        known = columns and set(columns).issubset(rows.column_names or ())
        yield from enumerate(rows.select_columns(list(columns or ())) if known else rows, 1)


@contextmanager
def open_data_set(source: Source) -> Iterator[Any]:
    """Open a Hugging Face data set as a stream; every failure in the block is a BertkitError."""
    datasets = optional_library("datasets", "Hugging Face data sets")
    _, name, config, split = source.path.split(":")
    try:
        yield datasets.load_dataset(name, config or None, split=split, streaming=True)
    except BertkitError:
        raise
    except Exception as error:  # the library passes on the errors of a dozen other libraries
        raise BertkitError(
            f"cannot load {source.path} ({one_line(error)}); check name, config, split and network"
        ) from error


def optional_library(name: str, purpose: str, extra: str = "data") -> Any:
    """Import a library of an extra, or raise an error that says how to install it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise BertkitError(
            f"{purpose} need {name}; install bertkit with the extra '{extra}'"
        ) from error


def text_column(
    rows: Iterable[Row], source: Source, counts: TextCounts, column: str
) -> Iterator[NumberedRow]:
    """Yield the text of a column and count the rows without it; it is an error if all lack it."""
    texts = number = 0
    names: dict[str, None] = {}
    for number, row in rows:
        value = row.get(column)
        if isinstance(value, str):
            texts += 1
            yield number, value
            continue
        if column not in row:
            reason = f"row without column '{column}'"
        else:
            reason = "empty document" if value is None else f"column '{column}' is not text"
        counts.note(reason, f"{source.path}:{number}")
        names.update(dict.fromkeys(row))
    if number and not texts:
        raise missing_column(source, column, names)


def missing_column(source: Source, column: str, names: Iterable[str]) -> BertkitError:
    """Return the error for a column that no row has, or that holds text in no row."""
    others = sorted(name for name in names if name != column)
    listed = f" (columns: {', '.join(others)})" if others else ""
    return BertkitError(
        f"no row of {source.path} has text in column '{column}'{listed}{nearest(column, others)}"
    )
