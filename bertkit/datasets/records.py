"""Labelled data in memory: data frames, data sets and lists, read like files of rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

from bertkit.errors import BertkitError, short_repr
from bertkit.text.lines import TextCounts

NULL_TYPES = {"NAType", "NaTType"}
"""The names of the types of NA and NaT, as pandas itself is not imported here."""


class MissingColumnError(BertkitError):
    """No row of a file or of data in memory has a column that is needed."""

    code = "column"

    def __init__(self, message: str, column: str) -> None:
        super().__init__(message)
        self.column = column


class Records:
    """Rows in memory, which take the place of a file.

    Args:
        rows: mappings from column to value, or tuples of the same length. A Series of pandas and a
            record of NumPy are mappings. So are named tuples, such as those of pandas'
            `itertuples`, unless none has a wanted column: then they are tuples. Arrays and numbers
            of NumPy or torch become lists and numbers of Python, as a file would hold them.
        name: how messages name the data, such as "train"; row 3 is `train[3]`.
    """

    def __init__(self, rows: Iterable[Any], name: str) -> None:
        given = list(rows)
        self.rows, self.name = [plain_value(named_fields(row)) for row in given], name
        self.by_name = not all(isinstance(row, tuple) for row in given)

    def __str__(self) -> str:
        """Describe the data in a line, as `finetune.json` records it."""
        return f"{len(self.rows)} rows in memory"

    def rows_with(self, columns: Iterable[str]) -> list[Any]:
        """Return the rows; if no named tuple has one of these columns, they become plain tuples."""
        known = set(columns)
        if self.by_name or any(isinstance(r, Mapping) and known & r.keys() for r in self.rows):
            return self.rows
        return [tuple(row.values()) if isinstance(row, Mapping) else row for row in self.rows]

    def numbered(
        self, counts: TextCounts, columns: Sequence[str], optional: str = ""
    ) -> Iterator[tuple[int, str, Mapping[str, object]]]:
        """Yield the number (from 0), the place and the fields of every usable row.

        A row needs all of `columns` except the `optional` one, and `counts` is told of every row
        that lacks one. The fields of a tuple are in the order of `columns`.

        Raises:
            BertkitError: a row is neither a mapping nor a tuple that fits, or no row has one of the
                columns.
        """
        needed = [column for column in columns if column != optional]
        lacking = set(needed)
        for number, row in enumerate(self.rows_with(columns)):
            place = f"{self.name}[{number}]"
            if isinstance(row, Mapping):
                fields = row
            elif isinstance(row, tuple | list) and len(row) <= len(columns):
                fields = dict(zip(columns, row, strict=False))
            else:
                raise BertkitError(
                    f"{place} is {short_repr(row)}, neither a dict nor a tuple of "
                    f"({', '.join(columns)})",
                    code="record",
                )
            missing = [column for column in needed if column not in fields]
            lacking &= set(missing)
            if missing:
                counts.note(f"row without column '{missing[0]}'", place)
            else:
                yield number, place, fields
        if self.rows and lacking:
            first, column = self.rows[0], sorted(lacking)[0]
            if not isinstance(first, Mapping):
                said = f"{self.name}[0] has {len(first)} values for ({', '.join(columns)})"
                raise MissingColumnError(f"{said}, so there is none for '{column}'", column)
            known = ", ".join(map(str, first))
            raise MissingColumnError(
                f"{self.name} has no column '{column}' (columns: {known}); name one of these",
                column,
            )

    def has_columns(self, columns: Sequence[str]) -> bool:
        """Return whether every one of these columns is in some row; tuples have all."""
        rows = self.rows_with(columns)
        if not all(isinstance(row, Mapping) for row in rows):
            return True
        return set(columns) <= {column for row in rows for column in row}


def named_fields(row: Any) -> Any:
    """Return a row whose fields have names as a mapping, and any other row as it is."""
    if isinstance(row, Mapping):
        return row
    if hasattr(row, "_asdict"):  # a named tuple, or a row of SQLAlchemy
        return row._asdict()
    if hasattr(row, "iloc"):  # a Series of pandas
        return {str(name): value for name, value in row.to_dict().items()}
    if names := getattr(getattr(row, "dtype", None), "names", None):  # a record of NumPy
        return dict(zip(names, row.tolist(), strict=True))
    return row


def plain_value(value: Any) -> Any:
    """Return a value with NumPy's and torch's numbers and lists, at any depth, as Python's own.

    What data frames have for null (NaN, and pandas' NA and NaT) becomes None. Arrays of more
    dimensions, such as pictures, stay as they are.
    """
    if isinstance(value, str):
        return value
    if is_null(value):
        return None
    if isinstance(value, Mapping):
        return {key: plain_value(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        items = [plain_value(one) for one in value]
        return items if isinstance(value, list) else tuple(items)
    is_list = hasattr(value, "tolist") and getattr(value, "ndim", 2) < 2
    return plain_value(value.tolist()) if is_list else value


def is_null(value: Any) -> bool:
    """Return whether a value is NaN, or pandas' NA or NaT."""
    if isinstance(value, float):
        return math.isnan(value)
    if isinstance(value, Decimal):
        return value.is_nan()
    return type(value).__name__ in NULL_TYPES


def as_source(data: Any, name: str) -> str | Records:
    """Return what can be read like a file: a path as it is, anything else as `Records`.

    Args:
        data: a path, `Records`, a pandas or polars DataFrame, a `datasets.Dataset`, or an iterable
            of dicts or tuples.
        name: how messages name the data.

    Raises:
        BertkitError: the data is something else, or a DataFrame has a column twice.
    """
    if isinstance(data, str | Path):
        return str(data)
    if isinstance(data, Records):
        return data
    if hasattr(data, "iloc") and hasattr(data, "columns"):  # pandas; a Series is an iterable
        names = [str(column) for column in data.columns]
        if len(set(names)) < len(names):
            raise BertkitError(f"{name} has two columns of one name; rename one", code="column")
        values = data.astype(object)  # or None would become NaN again
        rows = values.where(data.notna(), None).set_axis(names, axis=1).to_dict("records")
        return Records(rows, name)
    if hasattr(data, "to_dicts"):  # polars
        return Records(data.to_dicts(), name)
    if getattr(data, "features", None) and hasattr(data, "column_names"):  # datasets
        from bertkit.datasets.tabular import named_columns, names_in

        named = named_columns(data.features.to_dict())
        for column, kind in data.features.items():  # files stay files until they are read
            is_file = type(kind).__name__ in ("Image", "Audio", "Video") and kind.decode
            if is_file and hasattr(data, "num_rows"):  # not of a stream
                data = data.cast_column(column, replace(kind, decode=False))
        data = data.with_format(None)  # in NumPy's or torch's, a class is no plain number
        return Records(
            (row | names_in(row, named, f"{name}[{i}]") for i, row in enumerate(data)), name
        )
    if isinstance(data, Mapping) or not isinstance(data, Iterable):
        raise BertkitError(
            f"{name} is a {type(data).__name__}; give a path, a DataFrame, a datasets.Dataset or a "
            "list of dicts or tuples",
            code="record",
        )
    return Records(data, name)
