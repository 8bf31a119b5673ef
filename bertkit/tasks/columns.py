"""The reader of labelled files: column names, and how a row becomes an example.

Each task type has a subclass of `Columns` in its module. Labels are names, never numbers: numbers
are assigned once the training file has been read, and the names are saved with the model.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from bertkit.errors import BertkitError, InputTypeError, flag, short_repr
from bertkit.tasks.rows import (
    Fields,
    MemoryRows,
    MissingColumnError,
    column_names,
    first_left_out,
    read_rows,
)
from bertkit.text.documents import TextCounts, plain_lines, valid_text, value_name
from bertkit.text.sources import extension, one_source

Source = str | Path | MemoryRows


@dataclass(frozen=True, kw_only=True)
class Columns(ABC):
    """The column names of a file; each type of example has a subclass."""

    id: str = ""
    """The column of the IDs; without one, rows are numbered from 0."""
    format: str = "auto"
    """csv, tsv, jsonl, parquet, huggingface, text (one input per line, only for predict), or
    auto."""
    header: bool = True
    """Whether the first row names the columns; if it does not, they are called 0, 1, 2, ..."""

    input_options: ClassVar[tuple[str, ...]]
    """The options that name the columns every row must have, except labels and IDs."""
    target_option: ClassVar[str] = "label"
    """The option that names the column of the labels, tags or answers."""
    wanted: ClassVar[str]
    """What inputs in memory are, for messages."""
    file_options: ClassVar[tuple[str, ...]] = ("format", "id", "header")
    """The options that depend on the file and are not taken from the model."""

    def __post_init__(self) -> None:
        """Check the names of columns; one name where several may stand becomes a tuple."""
        for option in (*self.input_options, self.target_option, "id"):
            value, default = getattr(self, option), getattr(type(self), option)
            if isinstance(default, tuple) and isinstance(value, str):
                object.__setattr__(self, option, value := (value,))
            for name in value if isinstance(default, tuple) else [value]:
                if not isinstance(name, str) or (default and not name):
                    raise BertkitError(
                        f"{flag(option)} is {name!r}, not the name of a column; give its name as "
                        "text",
                        code="column",
                    )

    @property
    def inputs(self) -> tuple[str, ...]:
        """The columns that every row must have, except labels and IDs."""
        names: list[str] = []
        for option in self.input_options:
            value = getattr(self, option)
            names += value if isinstance(value, tuple) else [value]
        return tuple(name for name in names if name)

    @property
    def target(self) -> str:
        """The column of the labels, tags or answers."""
        return str(getattr(self, self.target_option))

    def needed(self, *, labelled: bool) -> list[str]:
        """Return the columns that are read, each once, in the order of the values of a tuple."""
        names = (*self.inputs, self.target if labelled else "", self.id)
        return list(dict.fromkeys(name for name in names if name))

    @abstractmethod
    def example(
        self, row: Fields, location: str, counts: TextCounts, *, labelled: bool, scoring: bool
    ) -> Any:
        """Return the example of a row, without ID, or None (and a count) if it is unusable.

        With `scoring`, gold answers that are not in their context are kept.
        """

    @abstractmethod
    def from_values(self, values: Sequence[Any], location: str, id: str) -> Any:  # noqa: A002
        """Return the example of the values of an input in memory, in the order of `inputs`."""

    def in_rows(self, path: str | Path) -> bool:
        """Return whether a file consists of rows, not of a format of the task type."""
        return True

    def read_own_format(
        self, path: str | Path, counts: TextCounts, *, labelled: bool, scoring: bool
    ) -> Iterator[Any]:
        """Yield the examples of a file in the task type's own format."""
        raise NotImplementedError

    def from_line(self, line: str, location: str, id: str, document: int) -> Any:  # noqa: A002
        """Return the example of a line of plain text."""
        raise BertkitError(f"{location}: this task needs columns, not plain text; give a table")

    def from_value(self, value: Any, location: str, id: str) -> Any:  # noqa: A002
        """Return the example of an input in memory: a text, a tuple, or a dict with the columns."""
        if isinstance(value, Mapping):
            missing = [column for column in self.inputs if column not in value]
            if missing:
                raise MissingColumnError(
                    f"{location} has no column '{missing[0]}' (columns: "
                    f"{', '.join(map(str, value))}); the model was fine-tuned with that name",
                    missing[0],
                )
            return self.from_values([value[column] for column in self.inputs], location, id)
        if isinstance(value, str | tuple | list):
            return self.from_values([value] if isinstance(value, str) else value, location, id)
        raise InputTypeError(f"{location} is {short_repr(value)}; give a list of {self.wanted}")

    def read(
        self,
        data: Source,
        counts: TextCounts,
        *,
        labelled: bool = True,
        keep_unlabelled: bool = False,
        scoring: bool = False,
        rows: dict[str, Fields] | None = None,
    ) -> Iterator[Any]:
        """Yield the examples of a file; of files with rows, only one row is held at a time.

        Args:
            data: a file, folder, glob, URL or `hf:` data set, or rows in memory.
            counts: collects, at the end, the rows left out, with reasons and first locations.
            labelled: whether to read the labels; if not, each label is None.
            keep_unlabelled: whether to keep a row without a label instead of leaving it out.
            scoring: whether the file is only scored; see `example`.
            rows: if given, gets all fields of the row of each example, by its location.

        Raises:
            BertkitError: a column is missing, a field has the wrong type, an ID is empty or occurs
                twice, or (known only at the end) no row is usable.
        """
        if not isinstance(data, MemoryRows) and is_plain(data, self):
            return self.read_lines(data, counts)
        if not isinstance(data, MemoryRows) and not self.in_rows(data):
            return self.read_own_format(data, counts, labelled=labelled, scoring=scoring)
        return self._read_rows(data, counts, labelled, keep_unlabelled, scoring, rows)

    def _read_rows(
        self,
        data: Source,
        counts: TextCounts,
        labelled: bool,
        keep_unlabelled: bool,
        scoring: bool,
        rows: dict[str, Fields] | None,
    ) -> Iterator[Any]:
        read, seen, used = TextCounts(), dict[str, str](), 0
        try:
            for number, location, row in read_rows(
                data,
                read,
                self.format,
                header=self.header,
                columns=self.needed(labelled=labelled),
                optional=self.target if labelled and keep_unlabelled else "",
                whole=rows is not None,
            ):
                example = self.example(row, location, read, labelled=labelled, scoring=scoring)
                if example is None:
                    continue
                if labelled and example.gold is None:
                    read.note("row without label" + ", kept" * keep_unlabelled, location)
                    if not keep_unlabelled:
                        continue
                used += 1
                if rows is not None:
                    rows[location] = row
                yield example._replace(id=self._row_id(number, row, location, seen))
        except MissingColumnError as error:
            options = (*self.input_options, self.target_option, "id")
            names = [flag(o) for o in options if error.column in as_tuple(getattr(self, o))]
            hint = f" ({names[0]} names the column)" if names else ""
            raise MissingColumnError(f"{error}{hint}", error.column) from None
        if not used:
            why = first_left_out(read) or ": it has no rows"
            raise BertkitError(f"{data} has no row that can be used{why}")
        counts += read

    def _row_id(self, number: int, row: Fields, location: str, seen: dict[str, str]) -> str:
        """Return the ID of a row: its number, or what its ID column holds, which must be unique."""
        if not self.id:
            return str(number)
        name = value_name(row[self.id])
        if not name:
            raise BertkitError(f"{location}: no ID in column '{self.id}'; give the row one")
        if name in seen:
            raise BertkitError(
                f"{location}: ID '{name}' is already used at {seen[name]}; give each row its own"
            )
        seen[name] = location
        return name

    def read_lines(self, path: str | Path, counts: TextCounts) -> Iterator[Any]:
        """Yield an example for each line of plain text that is not blank; its ID is its number."""
        source, used, document = one_source(path), 0, 0
        for number, line in plain_lines(source, counts):
            location = f"{source.path}:{number}"
            if not line.strip():
                counts.note("blank line", location)
                document += 1  # as in a corpus, a blank line ends a document
                continue
            yield self.from_line(line, location, str(used), document)
            used += 1
        if not used:
            raise BertkitError(f"{path} holds no text; give one input per line")

    def read_labelled(
        self, data: Source, counts: TextCounts, *, scoring: bool = False, test: bool = False
    ) -> list[Any]:
        """Read the examples of a labelled file; with `test`, labels may be missing."""
        labelled = True
        if test and (isinstance(data, MemoryRows) or self.in_rows(data)):
            source = data if isinstance(data, MemoryRows) else str(data)
            names = column_names(source, self.format, header=self.header)
            labelled = not names or self.target in names
        read = self.read(data, counts, labelled=labelled, keep_unlabelled=test, scoring=scoring)
        return list(read)


def as_tuple(value: Any) -> tuple[Any, ...]:
    """Return a tuple as it is, and any other value in a tuple."""
    return value if isinstance(value, tuple) else (value,)


def is_plain(path: str | Path, columns: Columns) -> bool:
    """Return whether a file is read as plain text, one input per line."""
    if columns.format != "auto":
        return columns.format == "text"
    return extension(str(path)) == ".txt" and columns.in_rows(path)


def row_texts(
    row: Fields, columns: Sequence[str], location: str, counts: TextCounts
) -> list[str] | None:
    """Return the texts of some columns, or None (and a count) if one is empty or not text."""
    texts = [row[column] for column in columns]
    for column, value in zip(columns, texts, strict=True):
        if value is not None and not isinstance(value, str):
            counts.note(f"column '{column}' is not text", location)
            return None
        if not value or value.isspace():
            counts.note(f"empty '{column}'", location)
            return None
    return [valid_text(value, location, counts) for value in texts]


def require_texts(location: str, values: Sequence[Any]) -> list[str]:
    """Return values in memory that must all be texts."""
    for value in values:
        if not isinstance(value, str):
            raise InputTypeError(f"{location}: {short_repr(value)} is not a text")
    return list(values)


def from_json(value: Any) -> Any:
    """Parse a field that is a JSON list or object; return any other field unchanged."""
    if isinstance(value, str) and value.lstrip().startswith(("[", "{")):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value
