"""Labelled data: from files with rows, or rows in memory, to the examples of a task type.

Each task type has a subclass of `Columns`, which names the columns and makes an example of a row.
Labels are names, never numbers: numbers are assigned once the training file has been read, and the
names are saved with the model. A row that cannot be used is counted, with the reason and the first
location; a file of which no row can be used is an error.
"""

from __future__ import annotations

import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from bertkit.errors import BertkitError, InputTypeError, short_repr
from bertkit.text.documents import (
    Row,
    TextCounts,
    class_names,
    complete_rows,
    json_lines,
    plain_lines,
    require_columns,
    source_rows,
    valid_text,
    with_class_names,
)
from bertkit.text.sources import Source, extension, find_sources, one_source

Fields = Mapping[str, Any]
PYTHON_NOTATION = re.compile(r"\s*(\[\{?'.*\]|\{'.*\})\s*", re.DOTALL)
"""What str() makes of dicts, and of lists of texts or dicts, as in CSV files of pandas."""
Purpose = Literal["train", "dev", "test", "predict"]
"""What data is read for: labels are needed in "train" and "dev", are optional in "test", and are
not read in "predict". Only "train" leaves out answers that cannot be learned."""


@dataclass(frozen=True, kw_only=True)
class Columns(ABC):
    """The column names of a file; each type of example has a subclass."""

    format: str = "auto"
    """csv, tsv, jsonl, parquet, huggingface, text (one input per line, only for predict), or
    auto."""
    header: bool = True
    """Whether the first row names the columns; if it does not, they are called 0, 1, 2, ..."""

    input_options: ClassVar[tuple[str, ...]]
    """The options that name the columns every row must have, except labels."""
    target_option: ClassVar[str] = "label"
    """The option that names the column of the labels, tags or answers."""
    wanted: ClassVar[str]
    """What inputs in memory are, for messages."""
    file_options: ClassVar[tuple[str, ...]] = ("format", "header")
    """The options that depend on the file and are not taken from the model."""

    @property
    def inputs(self) -> tuple[str, ...]:
        """The columns that every row must have, except labels."""
        values = [getattr(self, option) for option in self.input_options]
        lists = (value if isinstance(value, tuple) else (value,) for value in values)
        return tuple(name for names in lists for name in names if name)

    @property
    def targets(self) -> tuple[str, ...]:
        """The column of the labels, tags or answers; or the columns of 0 or 1 for each label."""
        value = getattr(self, self.target_option)
        return value if isinstance(value, tuple) else (value,) if value else ()

    @abstractmethod
    def example(self, row: Fields, location: str, counts: TextCounts, purpose: Purpose) -> Any:
        """Return the example of a row, without ID, or None (and a count) if it is unusable."""

    @abstractmethod
    def from_values(self, values: Sequence[Any], location: str, id: str) -> Any:  # noqa: A002
        """Return the example of the values of an input in memory, in the order of `inputs`."""

    def check(self, examples: Sequence[Any]) -> None:  # noqa: B027
        """Raise if the labels of the training data cannot be meant as they were read."""

    def fitted(self, data: str | MemoryRows) -> Self:
        """Return the columns with the names that the training data shows, if they are left open."""
        return self

    def in_rows(self, path: str | Path) -> bool:
        """Return whether a file consists of rows, not of a format of the task type."""
        return True

    def read_own_format(
        self, path: str | Path, counts: TextCounts, purpose: Purpose
    ) -> Iterator[Any]:
        """Yield the examples of a file in the task type's own format."""
        raise NotImplementedError

    def from_line(self, line: str, location: str, id: str, document: int) -> Any:  # noqa: A002
        """Parse a line of plain text into an example."""
        raise BertkitError(f"{location}: this task needs columns, not plain text; give a table")

    def from_value(self, value: Any, location: str, id: str) -> Any:  # noqa: A002
        """Return the example of an input in memory: a text, a tuple, or a dict with the columns."""
        if isinstance(value, Mapping):
            require_columns(location, self.inputs, list(map(str, value)))
            value = [value[column] for column in self.inputs]
        if not isinstance(value, str | tuple | list):
            raise InputTypeError(f"{location} is {short_repr(value)}; give a list of {self.wanted}")
        return self.from_values([value] if isinstance(value, str) else value, location, id)

    def read(
        self,
        data: str | Path | MemoryRows,
        counts: TextCounts,
        purpose: Purpose = "train",
        rows: dict[str, Fields] | None = None,
    ) -> Iterator[Any]:
        """Yield the examples of data; `rows`, if any, gets the row of each, by its location."""
        if not isinstance(data, MemoryRows) and is_plain(data, self):
            yield from self.read_lines(data, counts)
            return
        if not isinstance(data, MemoryRows) and not self.in_rows(data):
            yield from self.read_own_format(data, counts, purpose)
            return
        read, used = TextCounts(), False
        targets = () if purpose == "predict" else self.targets
        columns = (*self.inputs, *targets)
        optional = targets if purpose == "test" else ()
        for number, location, row in read_rows(
            data, read, self.format, self.header, columns, optional, whole=rows is not None
        ):
            if targets and was_rejected(row):
                read.note("row that was rejected or ignored in Prodigy", location)
                continue
            example = self.example(row, location, read, purpose)
            unlabelled = targets and example is not None and example.gold is None
            if unlabelled:
                read.note("row without label" + ", kept" * (purpose == "test"), location)
            if example is not None and not (unlabelled and purpose != "test"):
                used = True
                if rows is not None:
                    rows[location] = row
                yield example._replace(id=str(number))
        if not used:
            why = first_left_out(read) or ": it has no rows"
            raise BertkitError(f"{getattr(data, 'name', data)} has no row that can be used{why}")
        counts += read

    def read_lines(self, path: str | Path, counts: TextCounts) -> Iterator[Any]:
        """Yield an example for each line of plain text that is not blank; its ID is its number.

        Lines are numbered from 1, as in editors, and rows of tables from 0, as in pandas.
        """
        source, used, document = one_source(path), False, 0
        for number, line in plain_lines(source, counts):
            location = f"{source.path}:{number}"
            if not line.strip():
                counts.note("blank line", location)
                document += 1  # as in a corpus, a blank line ends a document
                continue
            used = True
            yield self.from_line(line, location, str(number), document)
        if not used:
            raise BertkitError(f"{path} holds no text; give one input per line")


def is_plain(path: str | Path, columns: Columns) -> bool:
    """Return whether a file is read as plain text, one input per line."""
    if columns.format != "auto":
        return columns.format == "text"
    return extension(str(path)) == ".txt" and columns.in_rows(path)


def row_texts(
    row: Fields, columns: Sequence[str], location: str, counts: TextCounts
) -> list[str] | None:
    """Return the texts of some columns, or None (and a count) if one is empty or not text."""
    for column in columns:
        value = row[column] or ""
        if not isinstance(value, str) or not value.strip():
            what = "empty" if isinstance(value, str) else "no text in"
            counts.note(f"{what} '{column}'", location)
            return None
    return [valid_text(row[column], location, counts) for column in columns]


def require_texts(location: str, values: Sequence[Any]) -> list[str]:
    """Return values in memory that must all be texts."""
    for value in values:
        if not isinstance(value, str):
            raise InputTypeError(f"{location}: {short_repr(value)} is not a text")
    return list(values)


def from_json(value: Any, where: str = "the data") -> Any:
    """Parse a field that is a JSON list or object; return any other field unchanged."""
    if isinstance(value, str) and value.lstrip().startswith(("[", "{")):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            if PYTHON_NOTATION.fullmatch(value):
                what = "is in Python's notation; write JSON (json.dumps), or give the DataFrame"
                raise BertkitError(f"{where}: {short_repr(value)} {what}") from None
    return value


# Rows in memory -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class MemoryRows:
    """Rows in memory, which take the place of a file: dicts, or tuples of the same length."""

    name: str  # how messages name the data, such as "train"; row 3 is `train[3]`
    rows: Sequence[Any]

    def __str__(self) -> str:
        """Describe the data in a line, for the record of a run."""
        return f"{len(self.rows)} rows in memory"


def as_source(data: Any, name: str) -> str | MemoryRows:
    """Return a path as it is, and anything else as `MemoryRows`, which messages call `name`."""
    if isinstance(data, str | Path):
        return str(data)
    if isinstance(data, MemoryRows):
        return data
    if hasattr(data, "iloc") and hasattr(data, "columns"):  # pandas
        names = [str(column) for column in data.columns]
        if len(set(names)) < len(names):
            raise BertkitError(f"{name} has two columns of one name; rename one", code="column")
        data = data.astype(object).set_axis(names, axis=1).to_dict("records")
    elif getattr(data, "features", None) and hasattr(data, "column_names"):  # datasets
        named = class_names(data.features.to_dict())
        data = [with_class_names(row, named) for row in data.with_format(None)]
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
    if isinstance(value, Mapping):
        return {key: plain_value(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        items = [plain_value(part) for part in value]
        return items if isinstance(value, list) else tuple(items)
    return plain_value(value.tolist()) if hasattr(value, "tolist") else value


def memory_fields(data: MemoryRows, columns: Sequence[str], counts: TextCounts) -> Iterator[Row]:
    """Yield the location and the fields of rows in memory; tuples are in the order of `columns`."""
    for number, row in enumerate(data.rows):
        location = f"{data.name}[{number}]"
        if isinstance(row, tuple | list) and len(row) <= len(columns):
            row = dict(zip(columns, row, strict=False))  # noqa: PLW2901
        if not isinstance(row, Mapping):
            raise BertkitError(
                f"{location} is {short_repr(row)}, neither a dict nor a tuple of "
                f"({', '.join(columns)})",
                code="record",
            )
        yield location, exported_row(row, location, counts)


# Files with rows ----------------------------------------------------------------------------------


def read_rows(
    data: str | Path | MemoryRows,
    counts: TextCounts,
    format: str = "auto",  # noqa: A002
    header: bool | Sequence[str] = True,
    columns: Sequence[str] = (),
    optional: Collection[str] = (),
    *,
    whole: bool = False,
) -> Iterator[tuple[int, str, Fields]]:
    """Yield (number from 0, "file:line", fields) of rows with all but the `optional` columns."""
    needed = [name for name in columns if name not in optional]
    if isinstance(data, MemoryRows):
        rows = complete_rows(memory_fields(data, columns, counts), data.name, needed, counts)
    else:
        wanted = None if whole else [*needed, *optional]
        sources = find_sources([str(data)], format=format)
        rows = chain.from_iterable(
            file_rows(source, counts, needed, wanted, header) for source in sources
        )
    for number, (location, fields) in enumerate(rows):
        if fields is not None:
            yield number, location, fields


def file_rows(
    source: Source,
    counts: TextCounts,
    needed: Sequence[str],
    wanted: Sequence[str] | None,
    header: bool | Sequence[str],
) -> Iterator[Row]:
    """Yield the rows of a file; one of unknown type is counted."""
    if source.format == "unknown":
        counts.note("file of unknown type", source.path)
        return
    if source.format in ("text", "wikiextractor"):
        raise BertkitError(f"{source.path} has no columns; give its format: csv or tsv")
    counts.files += 1
    if source.format == "jsonl":
        exported = (
            (location, row and exported_row(row, location, counts))
            for location, row in json_lines(source, counts)
        )
        rows = complete_rows(exported, source.path, needed, counts)
    else:
        rows = source_rows(source, counts, needed, wanted, header)
    for location, fields in rows:
        yield location, plain_value(fields)


def was_rejected(row: Fields) -> bool:
    """Return whether a row of Prodigy's was rejected or ignored, so that its labels are wrong."""
    return row.get("answer") in ("reject", "ignore") and "_task_hash" in row


def are_objects(values: Any) -> bool:
    """Return whether a value is a list of objects."""
    return isinstance(values, list) and all(isinstance(value, Mapping) for value in values)


def exported_row(row: Fields, location: str, counts: TextCounts) -> Fields:
    """Return a row; of Label Studio's full export, its data with the columns of its annotation.

    They are `spans`, and the choices by control, of a single control also as `label`.
    """
    data, annotations = row.get("data"), row.get("annotations")
    if not (isinstance(data, Mapping) and are_objects(annotations)):
        return row
    used = [item for item in annotations or () if not item.get("was_cancelled")]
    results = (used[0].get("result") or []) if used else []
    if not are_objects(results):
        return row
    if len(used) > 1:
        counts.note("annotation beside the first of its text", location, len(used) - 1)
    spans, named = [], dict[str, list[str]]()
    for result in results:
        value = result.get("value")
        value = value if isinstance(value, Mapping) else {}
        if "start" in value:
            spans.append(value)
        elif isinstance(value.get("choices"), list):
            named.setdefault(result.get("from_name"), []).extend(value["choices"])
    chosen = {name: labels[0] if len(labels) == 1 else labels for name, labels in named.items()}
    label = {"label": next(iter(chosen.values()))} if len(chosen) == 1 else {}
    return {**data, "spans": spans if used else None, **label, **chosen}


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
