"""Rows with named fields: CSV, TSV, JSON lines, Parquet, Hugging Face data sets and data in memory.

A row that cannot be used is counted, with the reason and the first location; a file that clearly
has another layout (no row has the column, or most rows are ragged) is an error.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import chain
from pathlib import Path
from typing import Any

from bertkit.errors import BertkitError, nearest, refuse_twice, short_repr
from bertkit.text.documents import (
    TextCounts,
    open_data_set,
    open_parquet,
    parquet_rows,
    plain_lines,
    split_rows,
)
from bertkit.text.sources import DAMAGE, Source, find_sources, one_line

Fields = Mapping[str, Any]
Row = tuple[int, str, Fields]
"""The number of a row from 0, its location "file:line", and its fields."""


class MissingColumnError(BertkitError):
    """No row has a column that is needed."""

    code = "column"

    def __init__(self, message: str, column: str) -> None:
        super().__init__(message)
        self.column = column


@dataclass(frozen=True)
class MemoryRows:
    """Rows in memory, which take the place of a file: dicts, or tuples of the same length."""

    name: str
    """How messages name the data, such as "train"; row 3 is `train[3]`."""
    rows: Sequence[Any]

    def __str__(self) -> str:
        """Describe the data in a line, for the record of a run."""
        return f"{len(self.rows)} rows in memory"


def as_source(data: Any, name: str) -> str | MemoryRows:
    """Return what can be read like a file: a path as it is, anything else as `MemoryRows`.

    Args:
        data: a path, a pandas or polars DataFrame, a `datasets.Dataset`, or an iterable of dicts or
            tuples.
        name: how messages name the data.
    """
    if isinstance(data, str | Path):
        return str(data)
    if isinstance(data, MemoryRows):
        return data
    if hasattr(data, "iloc") and hasattr(data, "columns"):  # pandas
        names = [str(column) for column in data.columns]
        if len(set(names)) < len(names):
            raise BertkitError(f"{name} has two columns of one name; rename one", code="column")
        data = data.astype(object).set_axis(names, axis=1).to_dict("records")
    elif hasattr(data, "to_dicts"):  # polars
        data = data.to_dicts()
    elif getattr(data, "features", None) and hasattr(data, "column_names"):  # datasets
        named = class_names(data.features.to_dict())
        data = [with_class_names(row, named, name) for row in data.with_format(None)]
    if isinstance(data, str | bytes | Mapping) or not isinstance(data, Iterable):
        raise BertkitError(
            f"{name} is a {type(data).__name__}; give a path, a DataFrame, a datasets.Dataset or a "
            "list of dicts or tuples",
            code="record",
        )
    return MemoryRows(name, [plain_value(row) for row in data])


def plain_value(value: Any) -> Any:
    """Return a value with NumPy's and torch's numbers and lists as Python's, and NaN as None."""
    if isinstance(value, str):
        return value
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return None
    if isinstance(value, float | Decimal) and math.isnan(value):
        return None
    if hasattr(value, "_asdict"):  # a named tuple
        value = value._asdict()
    elif hasattr(value, "iloc"):  # a Series of pandas
        value = value.to_dict()
    if isinstance(value, Mapping):
        return {key: plain_value(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        items = [plain_value(part) for part in value]
        return items if isinstance(value, list) else tuple(items)
    return plain_value(value.tolist()) if hasattr(value, "tolist") else value


def read_rows(
    data: str | Path | MemoryRows,
    counts: TextCounts,
    format: str = "auto",  # noqa: A002
    *,
    header: bool | Sequence[str] = True,
    columns: Sequence[str] = (),
    optional: str = "",
    whole: bool = False,
) -> Iterator[Row]:
    """Yield every usable row; rows left out are numbered too.

    Args:
        data: a file, a folder, a glob, a URL, `hf:NAME:CONFIG:SPLIT`, or rows in memory.
        counts: collects every row left out: ragged, not JSON, or without one of `columns`.
        format: "csv", "tsv", "jsonl", "parquet", "huggingface", or "auto" to use the extension.
        header: for CSV and TSV: whether the first line names the columns; False names them "0",
            "1", ...; a sequence gives their names.
        columns: the columns that every row must have, in the order of the values of tuples.
        optional: one of `columns` that a row, or a whole file, may lack.
        whole: whether to read the other columns of Parquet files and data sets, too.

    Raises:
        BertkitError: there is nothing to read, or the file is damaged; or, after the last row, no
            row has one of `columns`, or over half are ragged.
    """
    needed = [name for name in columns if name != optional]
    if isinstance(data, MemoryRows):
        yield from checked_rows(memory_fields(data, columns), data.name, needed, counts)
        return
    first = 0
    for source in find_sources([str(data)], format=format):
        if source.format == "unknown":
            counts.note("file of unknown type", source.path)
            continue
        counts.files += 1
        rows = file_fields(source, counts, header, needed, optional, whole=whole)
        for number, location, fields in checked_rows(rows, source.path, needed, counts, first):
            yield number, location, fields
            first = number + 1


def checked_rows(
    rows: Iterable[tuple[str, Fields | None]],
    path: str,
    needed: Sequence[str],
    counts: TextCounts,
    first: int = 0,
) -> Iterator[Row]:
    """Number the rows of a file, and leave out those without a needed column."""
    lacking, names, location = set(needed), dict[str, None](), path
    try:
        for number, (location, fields) in enumerate(rows, first):
            if fields is None:
                continue
            missing = [name for name in needed if name not in fields]
            lacking &= set(missing)
            names.update(dict.fromkeys(map(str, fields)))
            if missing:
                counts.note(f"row without column '{missing[0]}'", location)
            else:
                yield number, location, fields
    except DAMAGE as error:
        raise BertkitError(
            f"{path} cannot be read after {location} ({one_line(error)}); restore the file or "
            "leave it out"
        ) from error
    if names and lacking:
        require_columns(path, sorted(lacking), names)


def memory_fields(data: MemoryRows, columns: Sequence[str]) -> Iterator[tuple[str, Fields]]:
    """Yield the location and the fields of rows in memory; tuples are in the order of `columns`."""
    for number, row in enumerate(data.rows):
        location = f"{data.name}[{number}]"
        if isinstance(row, Mapping):
            yield location, row
        elif isinstance(row, tuple | list) and len(row) <= len(columns):
            yield location, dict(zip(columns, row, strict=False))
        else:
            raise BertkitError(
                f"{location} is {short_repr(row)}, neither a dict nor a tuple of "
                f"({', '.join(columns)})",
                code="record",
            )


def file_fields(
    source: Source,
    counts: TextCounts,
    header: bool | Sequence[str],
    needed: Sequence[str],
    optional: str,
    *,
    whole: bool,
) -> Iterator[tuple[str, Fields | None]]:
    """Yield the location and the fields of the rows of a file; None for a row left out."""
    if source.format in ("csv", "tsv"):
        rows = separated_rows(source, counts, header, needed)
    elif source.format == "jsonl":
        rows = json_rows(source, counts)
    elif source.format == "parquet":
        rows = typed_rows(source, needed, optional, whole=whole)
    elif source.format == "huggingface":
        rows = dataset_rows(source, needed, optional, whole=whole)
    else:
        raise BertkitError(
            f"{source.path} is {source.format}, which has no columns; give the format: csv or tsv"
        )
    for line, fields in rows:
        plain = None if fields is None else {name: plain_value(v) for name, v in fields.items()}
        yield f"{source.path}:{line}", plain


def separated_rows(
    source: Source, counts: TextCounts, header: bool | Sequence[str], needed: Sequence[str]
) -> Iterator[tuple[int, Fields | None]]:
    """Yield the rows of CSV or TSV; a row whose number of fields is wrong is left out."""
    rows = split_rows(source, counts)
    first = next(rows, None)
    if first is None:
        return
    if header is True:
        names = [name.strip() for name in first[1]]
    else:
        names = list(header) if header else [str(i) for i in range(len(first[1]))]
        rows = chain([first], rows)
    require_columns(source.path, needed, names)
    ragged, total, first_ragged = 0, 0, 0
    for line, fields in rows:
        total += 1
        if len(fields) == len(names):
            yield line, dict(zip(names, fields, strict=True))
        else:
            more = "more" if len(fields) > len(names) else "fewer"
            counts.note(f"row with {more} fields than the first line", f"{source.path}:{line}")
            ragged, first_ragged = ragged + 1, first_ragged or line
            yield line, None
    if 2 * ragged > total:
        raise BertkitError(
            f"{source.path}:{first_ragged}: {ragged} of {total} rows do not have {len(names)} "
            "fields; check the separator, the quotes and whether the first line names the columns"
        )


def json_rows(source: Source, counts: TextCounts) -> Iterator[tuple[int, Fields | None]]:
    """Yield the rows of a file with one JSON object per line."""
    first_bad = bad = good = 0
    for number, line in plain_lines(source, counts):
        if not line or line.isspace():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict):
            counts.note("line is not a JSON object", f"{source.path}:{number}")
            bad, first_bad, row = bad + 1, first_bad or number, None
        good += row is not None
        yield number, row
    if bad > good:
        raise BertkitError(
            f"{source.path}:{first_bad}: {bad} of {bad + good} lines are not a JSON object; write "
            "one per line"
        )


def typed_rows(
    source: Source, needed: Sequence[str], optional: str, *, whole: bool
) -> Iterator[tuple[int, Fields]]:
    """Yield the rows of a Parquet file, with the class names that `datasets` stored."""
    with open_parquet(source) as file:
        names = file.schema_arrow.names
        require_columns(source.path, needed, names)
        metadata = (file.schema_arrow.metadata or {}).get(b"huggingface", b"{}")
        named = class_names(json.loads(metadata).get("info", {}).get("features") or {})
        wanted = [*needed, *([optional] if optional in names else [])]
        rows = parquet_rows(file, None if whole or not wanted else wanted)
        for number, row in rows:
            yield number, with_class_names(row, named, f"{source.path}:{number}")


def dataset_rows(
    source: Source, needed: Sequence[str], optional: str, *, whole: bool
) -> Iterator[tuple[int, Fields]]:
    """Yield the rows of a data set, with class numbers replaced by its class names."""
    with open_data_set(source) as dataset:
        rows = dataset
        if names := dataset.column_names:
            require_columns(source.path, needed, names)
            wanted = [*needed, *([optional] if optional in names else [])]
            rows = dataset if whole or not wanted else dataset.select_columns(wanted)
        named = class_names(rows.features.to_dict() if rows.features else {})
        for number, row in enumerate(rows, 1):
            yield number, with_class_names(row, named, f"{source.path}:{number}")


def class_names(features: Mapping[str, Any]) -> dict[str, Sequence[str]]:
    """Return column -> class names, for columns of `datasets` that hold (lists of) classes."""

    def names(feature: Any) -> Sequence[str]:
        if isinstance(feature, list):  # a list type, as older versions of `datasets` write it
            return names(feature[0]) if feature else ()
        if not isinstance(feature, dict):
            return ()
        if "feature" in feature:
            return names(feature["feature"])
        return feature.get("names") or () if feature.get("_type") == "ClassLabel" else ()

    return {column: found for column, feature in features.items() if (found := names(feature))}


def with_class_names(
    row: Fields, named: Mapping[str, Sequence[str]], location: str
) -> dict[str, Any]:
    """Return the fields of a row with class names in place of numbers; -1 becomes None."""

    def replaced(value: Any, names: Sequence[str]) -> Any:
        if isinstance(value, list):
            return [replaced(item, names) for item in value]
        if not isinstance(value, int):
            return value
        if value >= len(names):
            raise BertkitError(
                f"{location} holds the class {value}, and the file names {len(names)} from 0; "
                "correct it"
            )
        return None if value < 0 else names[value]

    return {
        column: replaced(value, named[column]) if column in named else value
        for column, value in row.items()
    }


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


def column_names(data: str | MemoryRows, format: str = "auto", *, header: bool = True) -> list[str]:  # noqa: A002
    """Return the column names of the first row; [] for tuples in memory and files without rows."""
    if isinstance(data, MemoryRows):
        first = data.rows[0] if data.rows else ()
        return list(map(str, first)) if isinstance(first, Mapping) else []
    rows = read_rows(data, TextCounts(), format, header=header, whole=True)
    return next((list(fields) for _, _, fields in rows), [])


def first_left_out(counts: TextCounts) -> str:
    """Return the end of a message: why the first row was left out, or "" if none was."""
    lost = (item for item in counts.examples.items() if not item[0].endswith("kept"))
    return next((f"; the first: {reason} at {location}" for reason, location in lost), "")


def require_all(counts: TextCounts, advice: str) -> None:
    """Raise if a row was left out, for files that need a prediction for every row."""
    if lost := first_left_out(counts):
        raise BertkitError(f"a row is left out{lost}; {advice}")
