"""The loop that reads the user's own labelled files: rows to examples, the same for every task.

BERT's section 4 fits one network to any sentence or pair task; this is where "any" comes in. What
a row becomes is up to the subclasses of `Columns` in `columns.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

from bertkit.datasets.examples import Example
from bertkit.datasets.records import Records
from bertkit.datasets.tabular import (
    Fields,
    first_left_out,
    has_columns,
    numbered_rows,
    valid_text,
    value_name,
)
from bertkit.errors import BertkitError
from bertkit.text.lines import TextCounts

RowReader = Callable[[Fields, str], Example | None]
"""(fields, place) -> an example without its ID; None, counted, where the row cannot be used."""


class Reading(NamedTuple):
    """What is asked of a file; see `Columns.read`."""

    path: str | Path | Records
    counts: TextCounts
    labelled: bool
    keep_unlabelled: bool
    scoring: bool

    @property
    def file(self) -> str | Path:
        """The path, of data that is a file."""
        assert not isinstance(self.path, Records)
        return self.path


@dataclass(frozen=True, kw_only=True)
class Columns(ABC):
    """What the columns of a file are called; a subclass for every kind of example."""

    id: str = ""
    """The column of an identifier; without one, rows are numbered from 0."""
    format: str = "auto"
    """csv, tsv, jsonl, parquet, huggingface, text (an input on each line, for predict alone), or
    auto."""
    header: bool = True
    """Whether the first row names the columns; where it does not, they are called 0, 1, 2, ..."""

    input_options: ClassVar[tuple[str, ...]]
    """The options that name the columns every row must have, labels and IDs aside."""
    target_option: ClassVar[str] = "label"
    """The option that names the column of the labels, tags or answers."""

    @property
    def inputs(self) -> tuple[str, ...]:
        """The columns that every row must have, labels and IDs aside."""
        return tuple(getattr(self, option) for option in self.input_options)

    @property
    def target(self) -> str:
        """The column of the labels, tags or answers."""
        return str(getattr(self, self.target_option))

    @abstractmethod
    def row_reader(self, reading: Reading) -> RowReader:
        """What makes an example of a row; rows that are left out are counted."""

    def in_rows(self, path: str | Path) -> bool:
        """Whether a file has rows with columns, and not a format of the task's own."""
        return True

    def read_own_format(self, reading: Reading) -> Iterator[Any]:
        """The examples of a file that has no rows."""
        raise NotImplementedError

    def fitted(self, path: str | Records, counts: TextCounts) -> Self:
        """The same columns, with what is left open decided by the training file."""
        return self

    def read(
        self,
        path: str | Path | Records,
        counts: TextCounts,
        *,
        labelled: bool = True,
        keep_unlabelled: bool = False,
        scoring: bool = False,
    ) -> Iterator[Any]:
        """The examples of a file, as they are read: no more than a row is held.

        Args:
            path: a file, folder, glob, URL or `hf:` data set (see `tabular.numbered_rows`).
            counts: is told at the end of every row left out, with the reason and the first place.
            labelled: False leaves the labels unread: every one is None.
            keep_unlabelled: whether a row without label is kept, with None, and not left out.
            scoring: whether the file is only scored, so that gold answers that are not in their
                context are kept.

        Raises:
            BertkitError: a column is missing, a field cannot be what it is meant to be, an ID
                stands twice or is empty, or, known at the end, no row can be used; the message
                names file and line.
        """
        reading = Reading(path, counts, labelled, keep_unlabelled, scoring)
        if not (isinstance(path, Records) or self.in_rows(path)):
            return self.read_own_format(reading)
        return self._read_rows(reading._replace(counts=TextCounts()), counts)

    def _read_rows(self, reading: Reading, counts: TextCounts) -> Iterator[Any]:
        _, found, labelled, keep_unlabelled, _ = reading
        names = [name for name in (*self.inputs, self.target if labelled else "", self.id) if name]
        optional = self.target if labelled and keep_unlabelled else ""
        example = self.row_reader(reading)
        seen: dict[str, str] = {}
        used = 0
        for number, place, row in numbered_rows(
            reading.path, found, self.format, header=self.header, columns=names, optional=optional
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
            yield made
        if not used:
            why = first_left_out(found) or ": it has no rows"
            raise BertkitError(f"{reading.path} has no row that can be used{why}")
        counts += found

    def read_labelled(
        self, path: str | Records, counts: TextCounts, *, scoring: bool = False, test: bool = False
    ) -> Sequence[Any]:
        """The examples of a labelled file.

        Args:
            path: the file.
            counts: is told of what is skipped.
            scoring: whether the file is only scored; see `read`.
            test: whether labels may be missing, in all rows or in some.

        Raises:
            BertkitError: see `read`; or the file is absent or damaged.
        """
        in_rows = isinstance(path, Records) or self.in_rows(path)
        labelled = not (test and in_rows) or has_columns(
            path, [self.target], self.format, header=self.header
        )
        return list(
            self.read(path, counts, labelled=labelled, keep_unlabelled=test, scoring=scoring)
        )


def row_id(column: str, number: int, row: Fields, place: str, seen: dict[str, str]) -> str:
    """The ID of a row, new among those seen (ID -> place); its number where no column is named.

    Raises:
        BertkitError: the ID is empty, or stands twice.
    """
    if not column:
        return str(number)
    name = value_name(row[column])
    if not name:
        raise BertkitError(f"{place}: no ID in column '{column}'; give the row one")
    if name in seen:
        raise BertkitError(
            f"{place}: ID '{name}' stands at {seen[name]} already; give every row its own"
        )
    seen[name] = place
    return name


def row_texts(
    row: Fields, columns: Sequence[str], place: str, counts: TextCounts
) -> list[str] | None:
    """The texts of some columns, or None, counted, if one is empty or not text."""
    texts = [row[column] for column in columns]
    for column, value in zip(columns, texts, strict=True):
        if value is not None and not isinstance(value, str):
            counts.note(f"column '{column}' is not text", place)
            return None
        if not value or value.isspace():
            counts.note(f"empty '{column}'", place)
            return None
    return [valid_text(str(value), place, counts) for value in texts]
