"""The reader of rows with columns: CSV, TSV, JSON lines, Parquet and Hugging Face data sets.

Text files may be compressed. `text/lines.py` splits the lines of CSV and TSV into fields. A row
that cannot be used is counted, with the reason and the first location; a file that clearly has
another layout (no row has the column, or most rows are ragged) is an error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

from bertkit.datasets.records import MissingColumnError, Records, is_null
from bertkit.errors import BertkitError, nearest, refuse_twice
from bertkit.text.documents import open_data_set, open_parquet, parquet_rows
from bertkit.text.lines import (
    LONE_SURROGATE,
    RaggedRows,
    TextCounts,
    split_rows,
    text_lines,
    value_name,
)
from bertkit.text.sources import DAMAGE, Source, find_sources, one_line

PYTHON_LIST = re.compile(r"""\[['"].*['"](, .*)?\]|\{['"](text|answer_start)['"]:.*\}""", re.DOTALL)
"""A list or object in Python's notation, as pandas writes it to CSV; it cannot be parsed safely."""

Fields = Mapping[str, object]
FileRow = tuple[int, Fields | None]
"""(line or row number from 1, fields); the fields are None for a row left out and counted."""


def numbered_rows(
    path: str | Path | Records,
    counts: TextCounts,
    format: str = "auto",  # noqa: A002
    *,
    header: bool | Sequence[str] = True,
    columns: Sequence[str] = (),
    optional: str = "",
    whole: bool = False,
) -> Iterator[tuple[int, str, Fields]]:
    """Yield (number, location, fields) of every usable row; rows left out are numbered too.

    Args:
        path: a file, a folder, a glob, a URL or `hf:NAME:CONFIG:SPLIT`, as in `find_sources`.
        counts: collects every row left out: ragged, not JSON, or without one of `columns`.
        format: "csv", "tsv", "jsonl", "parquet", "huggingface", or "auto" to use the extension.
        header: for CSV and TSV: whether the first line names the columns; False names them "0",
            "1", ...; a sequence gives their names.
        columns: the columns that every row must have. Of Parquet files and data sets, only these
            are read.
        optional: one of `columns` that a row of JSON lines, or a whole file, may lack.
        whole: whether to read the other columns of Parquet files and data sets, too.

    Raises:
        BertkitError: there is nothing to read at `path`, a quote is never closed, or the file is
            damaged; or, after the last row, no row has one of `columns`, or over half are ragged.
    """
    if isinstance(path, Records):
        yield from path.numbered(counts, columns, optional)
        return
    number = -1
    for source in find_sources([str(path)], format=format):
        if source.format == "unknown":
            counts.note("file of unknown type", source.path)
            continue
        counts.files += 1
        for line, row in file_rows(source, counts, header, columns, optional, whole=whole):
            number += 1
            if row is not None:
                yield number, f"{source.path}:{line}", row


def file_rows(
    source: Source,
    counts: TextCounts,
    header: bool | Sequence[str],
    columns: Sequence[str],
    optional: str = "",
    *,
    whole: bool = False,
) -> Iterator[FileRow]:
    """Yield the rows of one file; the fields of a row that lacks a column are None."""
    needed = [name for name in columns if name != optional]
    readers: dict[str, Callable[[], Iterator[FileRow]]] = {
        "csv": lambda: separated_rows(source, counts, header, needed, whole=whole),
        "tsv": lambda: separated_rows(source, counts, header, needed, whole=whole),
        "jsonl": lambda: jsonl_records(source, counts),
        "parquet": lambda: parquet_records(source, columns, optional, whole=whole),
        "huggingface": lambda: huggingface_records(source, columns, optional, whole=whole),
    }
    if source.format not in readers:
        raise BertkitError(
            f"{source.path} is {source.format}, which has no columns; give the format: csv or tsv"
        )
    names: dict[str, None] = {}
    found: set[str] = set()
    line = 0
    try:
        for line, row in readers[source.format]():
            if row is None:
                yield line, None
                continue
            if missing := [name for name in needed if name not in row]:
                counts.note(f"row without column '{missing[0]}'", f"{source.path}:{line}")
            names.update(dict.fromkeys(row))
            found.update(set(needed).difference(missing))
            plain = {name: None if is_null(one) else one for name, one in row.items()}
            yield line, None if missing else plain
    except DAMAGE as error:
        raise damaged_file(source.path, line, error) from error
    if names:
        require_columns(source.path, [name for name in needed if name not in found], names)


def damaged_file(path: str, line: int, error: Exception) -> BertkitError:
    """Return the error for a file that cannot be read beyond a row or line."""
    return BertkitError(
        f"{path} cannot be read after row or line {line} ({one_line(error)}); restore the file or "
        f"leave it out"
    )


def require_columns(path: str, columns: Iterable[str], names: Iterable[str]) -> None:
    """Raise unless each of `columns` occurs exactly once among the column names of a file."""
    known = list(names)
    for column in columns:
        if column not in known:
            hint = nearest(column, known)
            hint = hint if "did you mean" in hint else "; name one of these"
            raise MissingColumnError(
                f"{path} has no column '{column}' (columns: {', '.join(known)}){hint}", column
            )
        refuse_twice(path, column, known)


def require_all(counts: TextCounts, advice: str) -> None:
    """Raise if a row was left out, for files that need a prediction for every row."""
    for reason, place in counts.examples.items():
        if not reason.endswith("kept"):
            raise BertkitError(f"{place}: {reason}; {advice}")


def first_left_out(counts: TextCounts) -> str:
    """Return the end of a message: why the first row was left out, or "" if none was."""
    lost = (item for item in counts.examples.items() if not item[0].endswith("kept"))
    return next((f"; the first: {reason} at {place}" for reason, place in lost), "")


def separated_rows(
    source: Source,
    counts: TextCounts,
    header: bool | Sequence[str],
    columns: Sequence[str],
    *,
    whole: bool = False,
) -> Iterator[FileRow]:
    """Yield the rows of CSV or TSV; a row whose number of fields is wrong is left out."""
    rows = split_rows(source, counts, columns if header is True else None, ends=True)
    first = next(rows, None)
    if first is None:
        return
    if header is True:
        names = [name.strip() for name in first[1]]
    else:
        names = list(header) if header else [str(i) for i in range(len(first[1]))]
        rows = chain([first], rows)
    require_columns(source.path, [*columns, *(names if whole else ())], names)
    ragged, total = RaggedRows(source.path, len(names), counts), 0
    for line, fields in rows:
        total += 1
        if len(fields) != len(names):
            ragged.note(line, len(fields))
            yield line, None
        else:
            yield line, dict(zip(names, fields, strict=True))
    ragged.check(total)


def jsonl_records(source: Source, counts: TextCounts) -> Iterator[FileRow]:
    """Yield the rows of a file with one JSON object per line."""
    first_bad = bad = good = 0
    array = False
    for number, line in text_lines(source, counts):
        if not line or line.isspace():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict):
            counts.note("line is not a JSON object", f"{source.path}:{number}")
            array = array or (not bad + good and line.lstrip().startswith("["))
            first_bad, row = first_bad or number, None
        bad += row is None
        good += row is not None
        yield number, row
    if bad > good:
        what = f"{bad} of {bad + good} lines are not" if good else "no line of this file is"
        hint = "this file is a JSON array; " if array else ""
        raise BertkitError(
            f"{source.path}:{first_bad}: {hint}{what} a JSON object; write one per line"
        )


def parquet_records(
    source: Source, columns: Sequence[str], optional: str, *, whole: bool
) -> Iterator[FileRow]:
    """Yield the rows of a Parquet file, with the class names that `datasets` stored."""
    with open_parquet(source) as file:
        names = file.schema_arrow.names
        columns = present_columns(columns, optional, names)
        require_columns(source.path, [*columns, *(names if whole else ())], names)
        named = named_columns(features_in(file.schema_arrow.metadata))
        wanted = None if whole or not columns else columns
        for number, row in parquet_rows(file, wanted, source.path):
            yield number, {**row, **names_in(row, named, f"{source.path}:{number}")}


def parquet_types(path: str, format: str) -> dict[str, Any]:  # noqa: A002
    """Return the Arrow types of the columns of Parquet files, where these files agree about them.

    Columns of class numbers are left out, because `parquet_records` yields their names.
    """
    found: dict[str, set[Any]] = {}
    try:
        sources = find_sources([path], format=format)
    except BertkitError:  # not a file with columns
        return {}
    for source in sources:
        if source.format == "parquet":
            with open_parquet(source) as file:
                schema = file.schema_arrow
            for name in set(schema.names).difference(named_columns(features_in(schema.metadata))):
                found.setdefault(name, set()).add(schema.field(name).type)
    return {name: kinds.pop() for name, kinds in found.items() if len(kinds) == 1}


def present_columns(columns: Sequence[str], optional: str, names: Sequence[str]) -> list[str]:
    """Return the columns without the optional one, if the file does not have it."""
    return [name for name in columns if name != optional or name in names]


def huggingface_records(
    source: Source, columns: Sequence[str], optional: str, *, whole: bool
) -> Iterator[FileRow]:
    """Yield the rows of a data set, with class numbers replaced by its class names."""
    with open_data_set(source) as found:
        if found.column_names:
            columns = present_columns(columns, optional, found.column_names)
            require_columns(source.path, columns, found.column_names)
        only = found.column_names and columns and not whole
        rows = found.select_columns(list(columns)) if only else found
        named = named_columns(rows.features.to_dict() if rows.features else {})
        for number, row in enumerate(rows, 1):
            yield number, row | names_in(row, named, f"{source.path}:{number}")


def features_in(metadata: Mapping[bytes, bytes] | None) -> Mapping[str, Any]:
    """Return the column types that `datasets` stores in the Parquet files that it writes."""
    try:
        features = json.loads((metadata or {})[b"huggingface"])["info"]["features"]
    except (KeyError, TypeError, ValueError, RecursionError):  # another program wrote the file
        return {}
    return features if isinstance(features, dict) else {}


def named_columns(features: Mapping[str, Any]) -> dict[str, Sequence[str]]:
    """Return column -> class names, for columns that hold classes or lists of classes."""
    found = {column: class_names(feature) for column, feature in features.items()}
    return {column: names for column, names in found.items() if names}


def class_names(feature: Any) -> Sequence[str]:
    """Return the class names of a column type given as JSON; () if it does not hold classes."""
    if isinstance(feature, list):  # a list type, as older versions of `datasets` write it
        return class_names(feature[0]) if feature else ()
    if not isinstance(feature, dict) or not isinstance(feature.get("_type"), str):
        return ()  # an object type, which maps its field names to types
    if "feature" in feature:
        return class_names(feature["feature"])
    names = feature.get("names")
    return names if feature["_type"] == "ClassLabel" and isinstance(names, list) else ()


def names_in(row: Fields, named: Mapping[str, Sequence[str]], place: str) -> dict[str, Any]:
    """Return the fields of a row that hold classes, with names instead of numbers."""
    return {
        column: with_names(row[column], names, f"{place}: '{column}'")
        for column, names in named.items()
        if column in row
    }


def with_names(value: Any, names: Sequence[str], place: str) -> Any:
    """Replace class numbers, also in lists, by names; -1 means no class and becomes None."""
    if isinstance(value, list):
        return [with_names(item, names, place) for item in value]
    if not isinstance(value, int):  # null, or a name already
        return value
    if value >= len(names):
        raise BertkitError(
            f"{place} holds the class {value}, and the file names {len(names)} from 0; correct it"
        )
    return None if value < 0 else names[value]


def has_columns(
    path: str | Path | Records,
    columns: Sequence[str],
    format: str = "auto",  # noqa: A002
    *,
    header: bool = True,
    rows: int | None = None,
) -> bool:
    """Return whether each column is in some file, or its first `rows`; read as far as needed.

    Raises:
        BertkitError: see `numbered_rows`.
    """
    if isinstance(path, Records):
        return path.has_columns(columns)
    missing = set(columns)
    for source in find_sources([str(path)], format=format):
        for names in islice(column_names(source, columns, header=header), rows):
            missing.difference_update(names)
            if not missing:
                return True
    return False


def column_names(
    source: Source, columns: Sequence[str], *, header: bool
) -> Iterator[Iterable[str]]:
    """Yield the names of a file's columns, at once if they are stored, else by usable row."""
    try:
        if header and source.format in ("csv", "tsv"):
            first = next(split_rows(source, TextCounts(), columns), (0, []))[1]
            yield [name.strip() for name in first]
            return
        if source.format == "parquet":
            with open_parquet(source) as file:
                yield file.schema_arrow.names
            return
        if source.format == "huggingface":
            with open_data_set(source) as found:
                if found.column_names:
                    yield found.column_names
                    return
    except DAMAGE as error:
        raise damaged_file(source.path, 0, error) from error
    if source.format != "unknown":
        yield from (row for _, row in file_rows(source, TextCounts(), header, ()) if row)


def label_name(value: object, place: str) -> str:
    """Return the label name in a field, or "" if it is empty.

    Raises:
        BertkitError: the field holds a lone surrogate. No file can spell it, so labels that differ
            only in surrogates would be merged.
    """
    if isinstance(value, str) and LONE_SURROGATE.search(value):
        raise BertkitError(
            f"{place}: the label {value[:40]!a} holds half of a surrogate pair, which is not a "
            "character; correct it"
        )
    return value_name(value)


def refuse_python_list(text: str, place: str) -> None:
    """Raise if a field is a list or object in Python's notation."""
    if PYTHON_LIST.fullmatch(text.strip()):
        raise BertkitError(
            f"{place}: {text.strip()[:40]!r} is a list or object in Python's notation; write it as "
            f"JSON, or the data as JSON lines or Parquet"
        )
