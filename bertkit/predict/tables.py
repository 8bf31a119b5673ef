"""Files of predictions: JSON lines, CSV, TSV or Parquet, by the ending of the file's name.

A file is created whole or not at all. Rows are written in chunks, so it may be larger than memory.
"""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from bertkit.errors import BertkitError
from bertkit.files import disk_errors, escaped, jsonable, new_file, temporary_name
from bertkit.text.documents import optional_library

Rows = Sequence[dict[str, Any]]
SEPARATORS = {".csv": ",", ".tsv": "\t"}
JSON_LINES = ("", ".jsonl")


def require_utf8(path: Path) -> None:
    """Refuse a path that the C++ libraries that write some formats cannot open.

    Raises:
        BertkitError: its name is not UTF-8.
    """
    if escaped(str(path)) != str(path):
        raise BertkitError(f"--out {path} is not UTF-8, which this format needs; choose another")


def check_ending(out: Path) -> None:
    """Raise unless the ending of a file's name is that of a format which can be written."""
    known = (*JSON_LINES, *SEPARATORS, ".parquet")
    if out.suffix.lower() not in known:
        raise BertkitError(
            f"{out}: predictions are written as {', '.join(known[1:])}; choose one of these",
            code="format",
        )


def is_flat(out: Path | None) -> bool:
    """Return whether the format of a file has columns, so that it cannot hold objects."""
    return out is not None and out.suffix.lower() not in JSON_LINES


def is_parquet(out: Path | None) -> bool:
    """Return whether a file is written as Parquet."""
    return out is not None and out.suffix.lower() == ".parquet"


@contextmanager
def new_rows(
    out: Path | None, types: Mapping[str, Any] | None = None
) -> Iterator[Callable[[Rows], None]]:
    """Yield a function that writes a chunk of rows to a file, created if the block succeeds.

    Without a file, rows are written to the standard output as JSON lines and flushed at once. Rows
    of other formats are flat (`is_flat`): they have a column for each label's probability. For the
    types of the columns of a Parquet file see `ParquetRows`.

    Raises:
        BertkitError: the file cannot be written, or a row does not fit the format.
    """
    if out is None:
        stream = sys.stdout  # kept: while a bar is up, sys.stdout prints above it instead

        def write_now(rows: Rows) -> None:
            with depth_errors("the standard output"):
                stream.writelines(json_lines(rows))
            stream.flush()

        yield write_now
        return
    check_ending(out)
    if is_parquet(out):
        require_utf8(out)
        with new_file(out) as temporary:
            parquet = ParquetRows(out, temporary, types or {})
            try:
                yield parquet.write
            finally:
                with disk_errors(out):
                    parquet.close()
        return
    divider = SEPARATORS.get(out.suffix.lower())
    with new_text(out) as write_text:
        if divider is None:
            yield lambda rows: write_text(json_lines(rows))
        else:
            names: list[str] = []
            yield lambda rows: write_text(separated_lines(rows, names, divider, out))


@contextmanager
def new_text(path: Path) -> Iterator[Callable[[Iterable[str]], None]]:
    """Open a new UTF-8 text file and yield a function that writes strings to it; see `new_file`.

    Half of a surrogate pair, which UTF-8 lacks, is written escaped, as JSON does.
    """
    with new_file(path) as temporary:
        with disk_errors(path):
            file = temporary.open("w", encoding="utf-8", errors="backslashreplace", newline="")

        def write(pieces: Iterable[str]) -> None:
            with disk_errors(path), depth_errors(path):
                file.writelines(pieces)

        try:
            yield write
            with disk_errors(path):
                file.close()
        finally:
            with suppress(OSError):  # on a full disk closing fails too
                file.close()


@contextmanager
def depth_errors(out: Path | str) -> Iterator[None]:
    """Turn a RecursionError of the block, which converts values, into a one-line error."""
    try:
        yield
    except RecursionError:
        raise BertkitError(
            f"{out}: a column holds lists or objects nested too deeply; leave it out", code="format"
        ) from None


def json_lines(rows: Rows) -> Iterator[str]:
    """Yield each row as a line of JSON; see `json_text`."""
    return (json_text(row) + "\n" for row in rows)


def json_text(value: Any) -> str:
    """Return a value of any column as JSON: NaN is null, and what JSON lacks is written as text."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError):
        return json.dumps(jsonable(value), ensure_ascii=False)


def encodable(value: Any) -> Any:
    """Return a value with half of a surrogate pair, which UTF-8 lacks, escaped in every string."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode(errors="backslashreplace").decode()
    if isinstance(value, Mapping):
        return {encodable(name): encodable(one) for name, one in value.items()}
    return [encodable(one) for one in value] if isinstance(value, list | tuple) else value


def separated_lines(rows: Rows, names: list[str], divider: str, out: Path) -> Iterator[str]:
    """Yield the lines of a chunk of CSV or TSV, whose divider is a comma or a tab.

    The first chunk begins with the column names and fills `names` with them.
    """
    if not names:
        names += dict.fromkeys(name for row in rows for name in row)
        rows = [dict(zip(names, names, strict=True)), *rows]
    for row in rows:
        check_row(row, names, out)
        cells = [cell(row.get(name)) for name in names]
        if divider == "\t":
            if any(mark in text for text in cells for mark in "\t\r\n"):
                raise BertkitError(
                    f"{out}: a field holds a tab or a line break, which TSV cannot; write .csv",
                    code="format",
                )
            yield "\t".join(cells) + "\n"
        else:
            line = io.StringIO()
            csv.writer(line).writerow(cells)  # it puts a lone \r in quotes only if lines end so
            yield line.getvalue().removesuffix("\r\n") + "\n"


def cell(value: Any) -> str:
    """Return a value as the text of one field; lists and objects as JSON, null and NaN as ""."""
    value = jsonable(value)
    if value is None:
        return ""
    if isinstance(value, str | bool):  # readers name the label True so
        return str(value)
    return json.dumps(value, ensure_ascii=False)


def check_row(row: dict[str, Any], names: Iterable[str], out: Path) -> None:
    """Raise if a row has a column that the first rows of the file did not have."""
    if more := row.keys() - set(names):
        raise BertkitError(
            f"{out}: a later row has the column '{min(more)}', which the first rows lack; write "
            ".jsonl",
            code="column",
        )


class ParquetRows:
    """A Parquet file to which chunks of rows are written.

    The chunks give the column types. Where a chunk needs a wider one (fractions after whole
    numbers, an object with more keys), the rows before it are written again, so new keys in every
    chunk cost time that grows with the square of their number.

    Args:
        out: the file, for messages.
        temporary: the file to write.
        types: column -> the Arrow type of its values, where it is known; values of another type
            are stored as what they are.
    """

    def __init__(self, out: Path, temporary: Path, types: Mapping[str, Any]) -> None:
        self.out, self.temporary, self.types = out, temporary, dict(types)
        self.arrow = optional_library("pyarrow", "Parquet files")
        self.parquet = optional_library("pyarrow.parquet", "Parquet files")
        self.file: Any = None
        self.schema: Any = None
        """The types so far; columns that have only null are null, and stored as text."""

    def write(self, rows: Rows) -> None:
        """Write a chunk."""
        with depth_errors(self.out):
            flat = [encodable(row) for row in rows]
        try:
            names = dict.fromkeys(name for row in flat for name in row)
            columns = {name: self._column(name, [row.get(name) for row in flat]) for name in names}
            table = self.arrow.table(columns)
            schema = table.schema
            if self.file is not None:
                for row in flat:
                    check_row(row, self.schema.names, self.out)
                both = [self.schema, schema]
                schema = self.arrow.unify_schemas(both, promote_options="permissive")
            with disk_errors(self.out):
                self._widen(schema)
                if table.schema == self.file.schema:
                    self.file.write_table(table)
                else:
                    self._write(flat)
        except (self.arrow.ArrowException, OverflowError) as error:  # the latter: large integers
            raise BertkitError(
                f"{self.out}: a column's values are not of one type that Parquet has "
                f"({str(error).splitlines()[0]}); write .jsonl",
                code="format",
            ) from error

    def _column(self, name: str, values: list[Any]) -> Any:
        if name in self.types:
            try:
                return self.arrow.array(values, type=self.types[name])
            except (self.arrow.ArrowException, OverflowError, TypeError, ValueError):
                del self.types[name]
        return self.arrow.array(values)

    def close(self) -> None:
        """Finish the file."""
        if self.file is not None:
            self.file.close()

    def _widen(self, schema: Any) -> None:
        """Begin the file, or write what it has again if the types differ from its own."""
        text = self.arrow.string()
        fields = [one.with_type(text) if one.type == self.arrow.null() else one for one in schema]
        stored, self.schema = self.arrow.schema(fields), schema
        if self.file is None:
            self.file = self.parquet.ParquetWriter(self.temporary, stored)
            return
        if stored == self.file.schema:
            return
        self.close()
        before = temporary_name(self.out)
        self.temporary.rename(before)
        try:
            self.file = self.parquet.ParquetWriter(self.temporary, stored)
            with self.parquet.ParquetFile(before) as rows:
                for group in range(rows.num_row_groups):
                    self._write(rows.read_row_group(group).to_pylist())
        finally:
            before.unlink()

    def _write(self, rows: Rows) -> None:
        self.file.write_table(self.arrow.Table.from_pylist(rows, schema=self.file.schema))
