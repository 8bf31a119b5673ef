"""The user's own labelled data: the columns of a file, named by the user, as inputs of a task.

BERT's section 4 fits one network to any sentence or pair task; this is where "any" comes in. What
rows are is the business of `rows.py`; here a row becomes a text with a label, or a choice.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from bertkit.errors import BertkitError, nearest
from bertkit.tasks.inputs import ChoiceInput, TextInput
from bertkit.tasks.rows import Fields, has_column, numbered_rows, read_rows
from bertkit.text.documents import LONE_SURROGATE
from bertkit.text.lines import TextCounts

__all__ = ["has_column", "read_choices", "read_rows", "read_texts"]

KINDS = ("classify", "regress", "multi-label")
LETTERS = "abcdefghijklmnopqrstuvwxyz"

Label = str | float | tuple[str, ...]


def read_texts(
    path: str | Path,
    counts: TextCounts,
    *,
    text: str = "text",
    pair: str = "",
    label: str = "label",
    id: str = "",  # noqa: A002
    labelled: bool = True,
    kind: str = "classify",
    separator: str = "|",
    format: str = "auto",  # noqa: A002
    header: bool = True,
) -> list[TextInput]:
    """Texts or pairs of texts with their labels.

    Args:
        path: a file, folder, glob, URL or `hf:` data set (see `rows.numbered_rows`).
        counts: is told of every row left out: an empty text, no label, too few fields.
        text: the column of the text.
        pair: the column of the second text, "" for none.
        label: the column of the label.
        id: the column of the ID; "" gives the number of the row, from 0.
        labelled: False leaves the label column unread: every label is None.
        kind: "classify": a label is a name; JSON's 1 is "1", true is "true". "regress": a number.
            "multi-label": a JSON list of names, or names between separators; empty is no name.
        separator: between the names of a multi-label field.
        format: of the file, "auto" for its extension.
        header: whether the first line of CSV or TSV names the columns; else they are "0", "1", ...

    Raises:
        BertkitError: a column is missing, a number is not finite, an ID stands twice or is empty,
            or no row can be used; the message names file and line.
    """
    if kind not in KINDS:
        raise BertkitError(f"unknown kind '{kind}'{nearest(kind, KINDS)}")
    columns = [name for name in (text, pair, label if labelled else "", id) if name]
    found = TextCounts()
    seen: dict[str, str] = {}
    inputs: list[TextInput] = []
    for number, place, row in numbered_rows(path, found, format, header=header, columns=columns):
        texts = texts_of(row, (text, pair) if pair else (text,), place, found)
        if texts is None:
            continue
        value = label_of(row[label], kind, separator, label, place) if labelled else None
        if labelled and value is None:
            found.note("row without label", place)
            continue
        second = texts[1] if pair else None
        inputs.append(
            TextInput(id_of(id, number, row, place, seen), texts[0], second, value, place)
        )
    check_some(inputs, path, found)
    counts += found
    return inputs


def id_of(column: str, number: int, row: Fields, place: str, seen: dict[str, str]) -> str:
    """The ID of a row, new among those seen (ID -> place); its number where no column is named."""
    if not column:
        return str(number)
    name = name_of(row[column])
    if not name:
        raise BertkitError(f"{place}: no ID in column '{column}'; give the row one")
    if name in seen:
        raise BertkitError(
            f"{place}: ID '{name}' stands at {seen[name]} already; give every row its own"
        )
    seen[name] = place
    return name


def texts_of(
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
    return [whole(str(value), place, counts) for value in texts]


def whole(text: str, place: str, counts: TextCounts) -> str:
    """Text that UTF-8 can hold: JSON can spell half a surrogate pair."""
    if text.isascii() or not LONE_SURROGATE.search(text):
        return text
    counts.note("lone surrogate replaced, kept", place)
    return LONE_SURROGATE.sub("\ufffd", text)


def check_some(inputs: Sequence[object], path: str | Path, counts: TextCounts) -> None:
    """Stop where no row could be used."""
    if inputs:
        return
    reason = next(iter(counts.skipped), "")
    why = f"; the first: {reason} at {counts.examples[reason]}" if reason else ": it has no rows"
    raise BertkitError(f"{path} has no row that can be used{why}")


# Labels ------------------------------------------------------------------------------------------


def label_of(value: object, kind: str, separator: str, column: str, place: str) -> Label | None:
    """A label as the kind of task wants it; None where the row has none."""
    if kind == "multi-label":
        return names_of(value, separator)
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    if kind == "regress":
        return number_of(value, column, place)
    if isinstance(value, list | dict):
        raise BertkitError(
            f"{place}: '{column}' holds a {type(value).__name__}, not one name; for several labels "
            f"a text use the kind multi-label"
        )
    return name_of(value) or None


def name_of(value: object) -> str:
    """A label as a name: numbers and truth values as JSON writes them, "" for none."""
    if isinstance(value, str):
        return LONE_SURROGATE.sub("\ufffd", value.strip())
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and value.is_integer():
        return str(int(value))  # a column of integers with a gap comes as floats
    return str(value)


def names_of(value: object, separator: str) -> tuple[str, ...] | None:
    """The names of a multi-label field, each once, in order; None for null."""
    if value is None:
        return None
    if isinstance(value, str):
        try:
            listed = json.loads(value) if value.lstrip().startswith("[") else None
        except ValueError:
            listed = None
        value = listed if isinstance(listed, list) else value.split(separator)
    names = [name_of(item) for item in (value if isinstance(value, list | tuple) else [value])]
    return tuple(dict.fromkeys(name for name in names if name))


def number_of(value: object, column: str, place: str) -> float:
    """A finite number."""
    try:
        number = float(value) if isinstance(value, str | int | float) else math.nan
    except (ValueError, OverflowError):
        number = math.nan
    if isinstance(value, bool) or not math.isfinite(number):
        raise BertkitError(
            f"{place}: '{column}' is {str(value)[:40]!r}, not a finite number; correct it, or use "
            f"the kind classify if labels are names"
        )
    return number


# Choices -----------------------------------------------------------------------------------------


def read_choices(
    path: str | Path,
    counts: TextCounts,
    *,
    text: str,
    choices: Sequence[str],
    label: str = "label",
    id: str = "",  # noqa: A002
    labelled: bool = True,
    format: str = "auto",  # noqa: A002
    header: bool = True,
) -> list[ChoiceInput]:
    """Texts with several ways to go on or to answer, one of them right.

    A label is the name of a choice's column (where the file has a header), a letter from A or a, or
    an index. Indices count from 0, but from 1 where the file shows that it means so: most of its
    keys are letters (as in ARC, which mixes "A" and "1"), or no key is 0 and one is the number of
    choices. That is noted as "keys counted from 1, kept".

    A row may have fewer choices than others: empty ones at its end are left off.

    Args:
        path: see `read_texts`, as for what is not named here.
        counts: is told of every row left out: an empty text or choice, a label out of range.
        text: the column of what the choices go on from.
        choices: their columns, in order; at least two.
        label: the column of the right choice.
        id: the column of the ID; "" gives the number of the row, from 0.
        labelled: False leaves the label column unread: every label is None.
        format: of the file, "auto" for its extension.
        header: whether the first line of CSV or TSV names the columns; else they are "0", "1", ...

    Raises:
        BertkitError: see `read_texts`.
    """
    if len(set(choices)) != len(choices) or len(choices) < 2:
        raise BertkitError(f"choices need two columns or more, each once, not {list(choices)}")
    columns = [name for name in (text, *choices, label if labelled else "", id) if name]
    found = TextCounts()
    seen: dict[str, str] = {}
    rows: list[tuple[ChoiceInput, str]] = []
    for number, place, row in numbered_rows(path, found, format, header=header, columns=columns):
        texts = texts_of(row, (text, *filled(row, choices)), place, found)
        if texts is None:
            continue
        key = name_of(row[label]) if labelled else ""
        if labelled and not key:
            found.note("row without label", place)
            continue
        name = id_of(id, number, row, place, seen)
        rows.append((ChoiceInput(name, texts[0], tuple(texts[1:]), None, place), key))
    inputs = [given for given, _ in rows]
    if labelled:
        inputs = list(with_labels(rows, choices if header else (), len(choices), found))
    check_some(inputs, path, found)
    counts += found
    return inputs


def filled(row: Fields, choices: Sequence[str]) -> Sequence[str]:
    """The columns of the choices up to the last that is not empty; at least two."""
    count = len(choices)
    while count > 2 and not str(row[choices[count - 1]] or "").strip():
        count -= 1
    return choices[:count]


def with_labels(
    rows: Sequence[tuple[ChoiceInput, str]], names: Sequence[str], most: int, counts: TextCounts
) -> Iterator[ChoiceInput]:
    """The inputs with their keys as indices; those whose key is out of range are left out.

    Args:
        rows: each with its key.
        names: of the choices' columns, which keys may be.
        most: choices of a row.
        counts: is told.
    """
    keys = [key for _, key in rows]
    digits = {key for key in keys if key.isdecimal() and key not in names}
    letters = sum(letter_index(key) >= 0 for key in keys)
    from_one = 2 * letters > len(keys) or ("0" not in digits and str(most) in digits)
    for given, key in rows:
        if key in names:
            index = names.index(key)
        elif key in digits:
            index = int(key[:9]) - from_one  # nine digits are out of range already
        else:
            index = letter_index(key)
        if not 0 <= index < len(given.choices):
            counts.note("label out of range", given.place)
            continue
        if from_one and key in digits:
            counts.note("key counted from 1, kept", given.place)
        yield given._replace(label=index)


def letter_index(key: str) -> int:
    """0 for A or a, 1 for B or b, ...; -1 for anything else."""
    return LETTERS.find(key.lower()) if len(key) == 1 else -1
