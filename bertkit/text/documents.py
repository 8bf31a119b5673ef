"""Convert raw text to documents (BERT section 3.1: the corpus must keep documents whole).

BERT's sentence pairs come from running text, so every reader here yields whole documents: blocks
between blank lines (the input format of the BERT release), WikiExtractor's `<doc>` elements, or one
row of JSON lines, CSV, TSV, Parquet or a Hugging Face data set. Files are streamed: memory grows
with the longest document, not with the file. Every change and omission is counted.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from bertkit.errors import BertkitError, check_known, nearest, refuse_twice
from bertkit.text.lines import (
    NumberedRow,
    RaggedRows,
    TextCounts,
    check_size,
    split_rows,
    text_lines,
    valid_text,
)
from bertkit.text.sources import DAMAGE, Source, find_sources, one_line, open_binary

__all__ = ["Source", "TextCounts", "find_sources", "read_documents"]

PARQUET_ROWS = 1024


def read_documents(source: Source, counts: TextCounts, *, column: str = "text") -> Iterator[str]:
    """Yield the documents of one source, stripped, not empty, and encodable as UTF-8.

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
    check_known("format", source.format, DOCUMENT_READERS)
    counts.files += 1
    before = counts.documents, counts.skipped.total()
    try:
        for number, text in DOCUMENT_READERS[source.format](source, counts, column):
            document, place = text.strip(), f"{source.path}:{number}"
            if not document:
                counts.note("empty document", place)
                continue
            document = valid_text(document, place, counts)
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


def text_documents(source: Source, counts: TextCounts, column: str) -> Iterator[NumberedRow]:
    """Yield the blocks of lines between blank lines."""
    lines: list[str] = []
    start = size = 0
    for number, line in text_lines(source, counts):
        if line and not line.isspace():
            start, size = (start, size) if lines else (number, 0)
            lines.append(line)
            size += len(line)
            check_size(size, source.path, start, "no blank line, which ends a document,")
        elif lines:
            yield start, "\n".join(lines)
            lines = []
    if lines:
        yield start, "\n".join(lines)


def wikiextractor_documents(
    source: Source, counts: TextCounts, column: str
) -> Iterator[NumberedRow]:
    """Yield the bodies of `<doc id=... url=... title=...>` ... `</doc>`, each title line first."""
    lines: list[str] | None = None  # None outside a document
    start = size = 0
    for number, line in text_lines(source, counts):
        if line.startswith("<doc ") and line.rstrip().endswith(">"):
            if lines is not None:
                counts.note("unclosed <doc>, kept", f"{source.path}:{start}")
                yield start, "\n".join(lines)
            lines, start, size = [], number, 0
            if line.rstrip().endswith("</doc>"):  # a whole document on one line
                yield number, line.rstrip().removesuffix("</doc>").partition('">')[2]
                lines = None
        elif lines is None:
            if line and not line.isspace():
                counts.note("line outside <doc>", f"{source.path}:{number}")
        elif line.rstrip().endswith("</doc>"):
            yield start, "\n".join([*lines, line.rstrip().removesuffix("</doc>")])
            lines = None
        else:
            lines.append(line)
            size += len(line)
            check_size(size, source.path, start, "no </doc>")
    if lines is not None:
        counts.note("unclosed <doc>, kept", f"{source.path}:{start}")
        yield start, "\n".join(lines)


def jsonl_documents(source: Source, counts: TextCounts, column: str) -> Iterator[NumberedRow]:
    """Yield one field of the JSON object on each line; other values are objects without fields."""

    def rows() -> Iterator[tuple[int, Mapping[str, object]]]:
        first = objects = 0
        for number, line in text_lines(source, counts):
            if not line or line.isspace():
                continue
            first = first or number
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                counts.note("line is not JSON", f"{source.path}:{number}")
                continue
            objects += isinstance(row, dict)
            yield number, row if isinstance(row, dict) else {}
        if first and not objects:  # such as one array of all rows
            raise BertkitError(
                f"{source.path}:{first}: no line of this file is a JSON object; write one per line"
            )

    return text_column(rows(), source, counts, column)


def separated_documents(source: Source, counts: TextCounts, column: str) -> Iterator[NumberedRow]:
    """Yield one column of a CSV (quoted as in spreadsheets) or TSV (no quotes) with a header."""
    lines = split_rows(source, counts, [column])
    header = [name.strip() for name in next(lines, (0, []))[1]]
    refuse_twice(source.path, column, header)

    def rows() -> Iterator[tuple[int, Mapping[str, object]]]:
        ragged, total = RaggedRows(source.path, len(header), counts), 0
        for number, fields in lines:
            total += 1
            beyond = fields[len(header) :]  # such as the rest of a text with a comma, unquoted
            if any(map(str.strip, beyond)):
                ragged.note(number, len(fields))
            else:
                yield number, dict(zip(header, fields, strict=False))
        ragged.check(total)

    yield from text_column(rows(), source, counts, column)


def parquet_documents(source: Source, counts: TextCounts, column: str) -> Iterator[NumberedRow]:
    """Yield one column of a Parquet file; only that column is read, in batches of rows."""
    with open_parquet(source) as file:
        names = file.schema_arrow.names
        if column not in names:
            raise missing_column(source, column, names)
        refuse_twice(source.path, column, names)
        yield from text_column(parquet_rows(file, [column], source.path), source, counts, column)


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


def parquet_rows(
    file: Any, columns: Sequence[str] | None, path: str
) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield the numbered rows of an open Parquet file; only some columns are read, or all.

    Raises:
        BertkitError: a column has values that Python cannot represent, such as text that is not
            UTF-8; the message names the file, the column and the rows.
    """
    number = 1
    for batch in file.iter_batches(batch_size=PARQUET_ROWS, columns=columns):
        place = f"{path}, rows {number} to {number + batch.num_rows - 1}"
        names = batch.schema.names
        values = [
            python_values(one, f"{place}: the column '{name}'")
            for name, one in zip(names, batch.columns, strict=True)
        ]
        for row in zip(*values, strict=True):
            yield number, dict(zip(names, row, strict=True))
            number += 1


def python_values(column: Any, place: str) -> list[Any]:
    """Return the values of an Arrow column as Python has them, or else as text.

    Times and durations that Python cannot represent, such as those after the year 9999 or with
    nanoseconds, become text with all their digits.
    """
    try:
        if column.type != "time64[ns]":  # its nanoseconds would be cut
            return list(column.to_pylist())
    except (ValueError, OverflowError):
        pass
    try:
        return list(column.cast("string").to_pylist())
    except (ValueError, NotImplementedError) as error:  # Arrow's own errors are of these types
        raise BertkitError(
            f"{place} has values that cannot be read ({one_line(error)}); correct or remove it"
        ) from error


def huggingface_documents(source: Source, counts: TextCounts, column: str) -> Iterator[NumberedRow]:
    """Yield one column of a streamed Hugging Face data set."""
    with open_data_set(source) as whole:
        known = column in (whole.column_names or ())
        rows = whole.select_columns([column]) if known else whole  # decodes no other column
        yield from text_column(enumerate(rows, 1), source, counts, column)


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
    rows: Iterable[tuple[int, Mapping[str, object]]],
    source: Source,
    counts: TextCounts,
    column: str,
) -> Iterator[NumberedRow]:
    """Yield the text of one column and count the rows without it; it is an error if all lack it."""
    found = False
    number = 0
    names: dict[str, None] = {}
    for number, row in rows:
        value = row.get(column)
        if isinstance(value, str):
            found = True
            yield number, value
            continue
        if column not in row:
            reason = f"row without column '{column}'"
        else:
            reason = "empty document" if value is None else f"column '{column}' is not text"
        counts.note(reason, f"{source.path}:{number}")
        names.update(dict.fromkeys(row))
    if number and not found:
        raise missing_column(source, column, names)


def missing_column(source: Source, column: str, names: Iterable[str]) -> BertkitError:
    """Return the error for a column that no row has, or that holds text in no row."""
    others = [name for name in names if name != column]
    hint = nearest(column, others)
    listed = f" (columns: {', '.join(sorted(others))})" if "did you mean" in hint else ""
    return BertkitError(f"no row of {source.path} has text in column '{column}'{listed}{hint}")


DOCUMENT_READERS: dict[str, Callable[[Source, TextCounts, str], Iterator[NumberedRow]]] = {
    "text": text_documents,
    "wikiextractor": wikiextractor_documents,
    "jsonl": jsonl_documents,
    "csv": separated_documents,
    "tsv": separated_documents,
    "parquet": parquet_documents,
    "huggingface": huggingface_documents,
}
