"""The user's own labelled data: the columns of a file, named by the user, as inputs of a task.

BERT's section 4 fits one network to any sentence or pair task; this is where "any" comes in. What
rows are is the business of `rows.py`; here a row becomes a text with a label. It becomes a text
with choices in `choices.py`, a question or tagged words in `questions.py`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from decimal import Decimal
from pathlib import Path

from bertkit.datasets.examples import TextExample
from bertkit.datasets.tabular import (
    Fields,
    first_left_out,
    label_name,
    numbered_rows,
    refuse_python_list,
    valid_text,
    value_name,
)
from bertkit.errors import BertkitError, nearest
from bertkit.text.lines import TextCounts

INPUT_KINDS = ("classification", "regression", "multi-label-classification")

ReadLabel = str | float | tuple[str, ...]


def read_texts(
    path: str | Path,
    counts: TextCounts,
    *,
    text: str = "text",
    pair: str = "",
    label: str = "label",
    id: str = "",  # noqa: A002
    labelled: bool = True,
    keep_unlabelled: bool = False,
    kind: str = "classification",
    separator: str = "|",
    format: str = "auto",  # noqa: A002
    header: bool = True,
) -> Iterator[TextExample]:
    """Texts or pairs of texts with their labels, as they are read: no more than a row is held.

    Args:
        path: a file, folder, glob, URL or `hf:` data set (see `rows.numbered_rows`).
        counts: is told at the end of every row left out: an empty text, no label, too few fields.
        text: the column of the text.
        pair: the column of the second text, "" for none.
        label: the column of the label.
        id: the column of the ID; "" gives the number of the row, from 0. IDs, to find one that
            stands twice, are all that is kept of earlier rows.
        labelled: False leaves the label column unread: every label is None.
        keep_unlabelled: whether a row without label is kept, with None, and not left out.
        kind: the task type. Of classification a label is a name; JSON's 1 is "1", true is "true".
            Of regression it is a number. Of multi-label-classification it is a JSON list of names,
            or names between separators; empty is no name.
        separator: between the names of a multi-label field.
        format: of the file, "auto" for its extension.
        header: whether the first line of CSV or TSV names the columns; else they are "0", "1", ...

    Raises:
        BertkitError: a column is missing, a number is not finite, an ID stands twice or is empty,
            or, known at the end, no row can be used; the message names file and line.
    """
    if kind not in INPUT_KINDS:
        raise BertkitError(f"unknown kind '{kind}'{nearest(kind, INPUT_KINDS)}")
    columns = [name for name in (text, pair, label if labelled else "", id) if name]
    found = TextCounts()
    seen: dict[str, str] = {}
    used = 0
    optional = label if labelled and keep_unlabelled else ""
    for number, place, row in numbered_rows(
        path, found, format, header=header, columns=columns, optional=optional
    ):
        texts = row_texts(row, (text, pair) if pair else (text,), place, found)
        if texts is None:
            continue
        value = row_label(row.get(label), kind, separator, label, place) if labelled else None
        if labelled and value is None and unlabelled(keep_unlabelled, place, found):
            continue
        second = texts[1] if pair else None
        name = row_id(id, number, row, place, seen)
        yield TextExample(name, texts[0], second, value, place)
        used += 1
    check_some(used, path, found)
    counts += found


def row_id(column: str, number: int, row: Fields, place: str, seen: dict[str, str]) -> str:
    """The ID of a row, new among those seen (ID -> place); its number where no column is named."""
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


def unlabelled(keep: bool, place: str, counts: TextCounts) -> bool:
    """Whether a row without label is left out; it is counted either way."""
    counts.note("row without label, kept" if keep else "row without label", place)
    return not keep


def check_some(used: int, path: str | Path, counts: TextCounts) -> None:
    """Stop where no row could be used."""
    if not used:
        why = first_left_out(counts) or ": it has no rows"
        raise BertkitError(f"{path} has no row that can be used{why}")


# Labels ------------------------------------------------------------------------------------------


def row_label(
    value: object, kind: str, separator: str, column: str, place: str
) -> ReadLabel | None:
    """A label as the kind of task wants it; None where the row has none."""
    if kind == "multi-label-classification":
        return label_names(value, separator, place)
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    if kind == "regression":
        return row_number(value, column, place)
    if isinstance(value, list | dict):
        raise BertkitError(
            f"{place}: '{column}' holds a {type(value).__name__}, not one name; for several labels "
            f"a text use the task type multi-label-classification"
        )
    return label_name(value, place) or None


def label_names(value: object, separator: str, place: str) -> tuple[str, ...] | None:
    """The names of a multi-label field, each once, in order; None for null."""
    if value is None:
        return None
    if isinstance(value, str):
        try:
            listed = json.loads(value) if value.lstrip().startswith("[") else None
        except (ValueError, RecursionError):
            refuse_python_list(value, place)
            listed = None
        value = listed if isinstance(listed, list) else value.split(separator)
    items = list(value) if isinstance(value, list | tuple) else [value]
    if any(isinstance(item, list | tuple | dict) for item in items):
        raise BertkitError(
            f"{place}: the labels are {str(value)[:40]!r}; write a list of names, or names between "
            "separators"
        )
    numbers = [item for item in items if isinstance(item, bool | int | float) and item in (0, 1)]
    if len(numbers) == len(items) > len(set(numbers)):
        raise BertkitError(
            f"{place}: the labels are {str(value)[:40]!r}, which looks like a 0 or 1 for each "
            "label; write the names of those that hold"
        )
    names = (label_name(item, place) for item in items)
    return tuple(dict.fromkeys(name for name in names if name))


LARGEST_NUMBER = 1e15
"""Larger ones overflow the 32-bit sums of training, where they are squared."""


def row_number(value: object, column: str, place: str) -> float:
    """A finite number that a network can be trained on."""
    try:
        number = float(value) if isinstance(value, str | int | float | Decimal) else math.nan
    except (ValueError, OverflowError):
        number = math.nan
    # Python alone reads 1_000 as a number
    if isinstance(value, bool) or "_" in str(value) or not math.isfinite(number):
        raise BertkitError(
            f"{place}: '{column}' is {str(value)[:40]!r}, not a finite number; correct it, or use "
            f"the task type classification if labels are names"
        )
    if abs(number) > LARGEST_NUMBER:
        raise BertkitError(
            f"{place}: '{column}' is {str(value)[:40]!r}; its square overflows in training, so "
            f"numbers go up to {LARGEST_NUMBER:g}; divide the column by a power of ten"
        )
    return number
