"""The reader of the user's labelled files, which turns rows into examples for every task.

BERT's section 4 fits one network to any task on sentences or pairs, hence on any labelled file. The
subclasses of `Columns` in `columns.py` define how a row becomes an example.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

from bertkit.datasets.examples import Example
from bertkit.datasets.records import MissingColumnError, Records
from bertkit.datasets.tabular import Fields, first_left_out, has_columns, numbered_rows
from bertkit.errors import BertkitError, flag
from bertkit.text.lines import TextCounts, valid_text, value_name

RowReader = Callable[[Fields, str], Example | None]
"""(fields, location) -> an example without ID, or None (and a count) if the row is unusable."""


class Reading(NamedTuple):
    """The arguments of `Columns.read`."""

    path: str | Path | Records
    counts: TextCounts
    labelled: bool
    keep_unlabelled: bool
    scoring: bool

    @property
    def file(self) -> str | Path:
        """The path; only for data that is in a file, not in memory."""
        assert not isinstance(self.path, Records)
        return self.path


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

    def __post_init__(self) -> None:
        """Check the names of columns; one name where several may stand becomes a tuple.

        Raises:
            BertkitError: a name is not text, or is empty although its column is needed.
        """
        for option in (*self.input_options, self.target_option, "id"):
            value, default = getattr(self, option), getattr(type(self), option)
            empty, several = default == "", isinstance(default, tuple)
            if several and isinstance(value, str):
                object.__setattr__(self, option, (value,))
            for name in value if several and isinstance(value, tuple | list) else [value]:
                if not (isinstance(name, str) or name is None) or not (name or empty):
                    raise BertkitError(
                        f"{flag(option)} is {name!r}, not the name of a column; "
                        "give its name as text",
                        code="column",
                    )

    @property
    def inputs(self) -> tuple[str, ...]:
        """The columns that every row must have, except labels and IDs."""
        return tuple(getattr(self, option) for option in self.input_options)

    @property
    def target(self) -> str:
        """The column of the labels, tags or answers."""
        return str(getattr(self, self.target_option))

    def needed(self, *, labelled: bool) -> list[str]:
        """Return the columns that are read, each once, in the order of the values of a tuple."""
        names = (*self.inputs, self.target if labelled else "", self.id)
        return list(dict.fromkeys(name for name in names if name))

    @abstractmethod
    def row_reader(self, reading: Reading) -> RowReader:
        """Return the function that makes an example of a row and counts the rows left out."""

    def in_rows(self, path: str | Path) -> bool:
        """Return whether a file consists of rows, not of a format specific to the task type."""
        return True

    def read_own_format(self, reading: Reading) -> Iterator[Any]:
        """Return the examples of a file in the task type's specific format."""
        raise NotImplementedError

    def fitted(self, path: str | Records, counts: TextCounts) -> Self:
        """Return the same columns with open settings inferred from the training file."""
        return self

    def read(
        self,
        path: str | Path | Records,
        counts: TextCounts,
        *,
        labelled: bool = True,
        keep_unlabelled: bool = False,
        scoring: bool = False,
        rows: dict[str, Fields] | None = None,
    ) -> Iterator[Any]:
        """Yield the examples of a file; of files with rows, only one row is held at a time.

        Args:
            path: a file, folder, glob, URL or `hf:` data set (see `tabular.numbered_rows`).
            counts: collects, at the end, the rows left out, with reasons and first locations.
            labelled: whether to read the labels; if not, every label is None.
            keep_unlabelled: whether to keep a row without a label instead of leaving it out.
            scoring: whether the file is only scored, so that gold answers that are not in their
                context are kept.
            rows: if given, gets all fields of the row of every example, by the example's `place`.

        Raises:
            BertkitError: a column is missing, a field has the wrong type, an ID is empty or occurs
                twice, or (known only at the end) no row is usable; the message names the file and
                the line.
        """
        reading = Reading(path, counts, labelled, keep_unlabelled, scoring)
        if not self._has_rows(path):
            return self.read_own_format(reading)
        return self._with_hints(
            self._read_rows(reading._replace(counts=TextCounts()), counts, rows)
        )

    def _with_hints(self, examples: Iterator[Any]) -> Iterator[Any]:
        """Yield examples; the error for a missing column says which option names it."""
        try:
            yield from examples
        except MissingColumnError as error:
            for option in (*self.input_options, self.target_option, "id"):
                value = getattr(self, option)
                if error.column in (value if isinstance(value, tuple) else (value,)):
                    said = f"{error} ({flag(option)} names the column)"
                    raise MissingColumnError(said, error.column) from None
            raise

    def _has_rows(self, path: str | Path | Records) -> bool:
        return isinstance(path, Records) or self.in_rows(path)

    def _read_rows(
        self, reading: Reading, counts: TextCounts, rows: dict[str, Fields] | None
    ) -> Iterator[Any]:
        _, found, labelled, keep_unlabelled, _ = reading
        may_lack = labelled and keep_unlabelled and self.target not in self.inputs
        optional = self.target if may_lack else ""
        example = self.row_reader(reading)
        seen: dict[str, str] = {}
        used = 0
        for number, place, row in numbered_rows(
            reading.path,
            found,
            self.format,
            header=self.header,
            columns=self.needed(labelled=labelled),
            optional=optional,
            whole=rows is not None,
        ):
            made = example(row, place)
            if made is None:
                continue
            if labelled and made.gold is None:
                kept = ", kept" if keep_unlabelled else ""
                found.note(f"row without label{kept}", place)
                if not keep_unlabelled:
                    continue
            used += 1
            made = made._replace(id=row_id(self.id, number, row, place, seen))
            if rows is not None:
                rows[place] = row
            yield made
        if not used:
            why = first_left_out(found) or ": it has no rows"
            raise BertkitError(f"{reading.path} has no row that can be used{why}")
        counts += found

    def read_labelled(
        self, path: str | Records, counts: TextCounts, *, scoring: bool = False, test: bool = False
    ) -> Sequence[Any]:
        """Read the examples of a labelled file; with `test`, any or all labels may be missing.

        See `read` for `scoring`, and for `counts`, which collects what is skipped.

        Raises:
            BertkitError: see `read`; or the file is missing or damaged.
        """
        labelled = not (test and self._has_rows(path)) or has_columns(
            path,
            [name for name in (*self.inputs, self.target) if name],
            self.format,
            header=self.header,
        )
        return list(
            self.read(path, counts, labelled=labelled, keep_unlabelled=test, scoring=scoring)
        )


def row_id(column: str, number: int, row: Fields, place: str, seen: dict[str, str]) -> str:
    """Return the ID of a row and add it to `seen` (ID -> location); its number without a column.

    Raises:
        BertkitError: the ID is empty or was seen before.
    """
    if not column:
        return str(number)
    name = value_name(row[column])
    if not name:
        raise BertkitError(f"{place}: no ID in column '{column}'; give the row one")
    if name in seen:
        raise BertkitError(
            f"{place}: ID '{name}' is already used at {seen[name]}; give every row its own"
        )
    seen[name] = place
    return name


def row_texts(
    row: Fields, columns: Sequence[str], place: str, counts: TextCounts
) -> list[str] | None:
    """Return the texts of some columns, or None (and a count) if one is empty or not text."""
    texts = [row[column] for column in columns]
    for column, value in zip(columns, texts, strict=True):
        if value is not None and not isinstance(value, str):
            counts.note(f"column '{column}' is not text", place)
            return None
        if not value or value.isspace():
            counts.note(f"empty '{column}'", place)
            return None
    return [valid_text(str(value), place, counts) for value in texts]
