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
from bertkit.tasks.rows import Fields, has_column, name_of, numbered_rows, read_rows, whole
from bertkit.text.lines import TextCounts

__all__ = ["first_key_of", "has_column", "read_choices", "read_rows", "read_texts"]

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
    keep_unlabelled: bool = False,
    kind: str = "classify",
    separator: str = "|",
    format: str = "auto",  # noqa: A002
    header: bool = True,
) -> Iterator[TextInput]:
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
        kind: "classify": a label is a name; JSON's 1 is "1", true is "true". "regress": a number.
            "multi-label": a JSON list of names, or names between separators; empty is no name.
        separator: between the names of a multi-label field.
        format: of the file, "auto" for its extension.
        header: whether the first line of CSV or TSV names the columns; else they are "0", "1", ...

    Raises:
        BertkitError: a column is missing, a number is not finite, an ID stands twice or is empty,
            or, known at the end, no row can be used; the message names file and line.
    """
    if kind not in KINDS:
        raise BertkitError(f"unknown kind '{kind}'{nearest(kind, KINDS)}")
    columns = [name for name in (text, pair, label if labelled else "", id) if name]
    found = TextCounts()
    seen: dict[str, str] = {}
    used = 0
    for number, place, row in numbered_rows(path, found, format, header=header, columns=columns):
        texts = texts_of(row, (text, pair) if pair else (text,), place, found)
        if texts is None:
            continue
        value = label_of(row[label], kind, separator, label, place) if labelled else None
        if labelled and value is None and unlabelled(keep_unlabelled, place, found):
            continue
        second = texts[1] if pair else None
        name = id_of(id, number, row, place, seen)
        yield TextInput(name, texts[0], second, value, place)
        used += 1
    check_some(used, path, found)
    counts += found


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


def unlabelled(keep: bool, place: str, counts: TextCounts) -> bool:
    """Whether a row without label is left out; it is counted either way."""
    counts.note("row without label, kept" if keep else "row without label", place)
    return not keep


def check_some(used: int, path: str | Path, counts: TextCounts) -> None:
    """Stop where no row could be used."""
    if used:
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
    keep_unlabelled: bool = False,
    first_key: int | None = None,
    format: str = "auto",  # noqa: A002
    header: bool = True,
) -> Iterator[ChoiceInput]:
    """Texts with several ways to go on or to answer, one of them right.

    A label is the name of a choice's column (where the file has a header), a letter from A or a, or
    an index. A row may have fewer choices than others: empty ones at its end are left off.

    Args:
        path: see `read_texts`, as for what is not named here.
        counts: is told of every row left out: an empty text or choice, a label out of range; and of
            "key counted from 1, kept".
        text: the column of what the choices go on from.
        choices: their columns, in order; at least two.
        label: the column of the right choice.
        id: as there.
        labelled: as there.
        keep_unlabelled: as there.
        first_key: the index of the first choice, 0 or 1; None decides by this file, as
            `first_key_of` does, for which a labelled file is read twice. Files that belong together
            must be read with the same.
        format: as there.
        header: as there.

    Raises:
        BertkitError: see `read_texts`; or `first_key` is another number.
    """
    if len(set(choices)) != len(choices) or len(choices) < 2:
        raise BertkitError(f"choices need two columns or more, each once, not {list(choices)}")
    if first_key not in (None, 0, 1):
        raise BertkitError(f"keys of choices count from 0 or 1, not from {first_key}")
    names = choices if header else ()
    if labelled and first_key is None:
        first_key = first_key_of(path, choices=choices, label=label, format=format, header=header)
    columns = [name for name in (text, *choices, label if labelled else "", id) if name]
    found = TextCounts()
    seen: dict[str, str] = {}
    used = 0
    for number, place, row in numbered_rows(path, found, format, header=header, columns=columns):
        key = name_of(row[label]) if labelled else ""
        texts = texts_of(row, (text, *filled(row, choices)), place, found)
        if texts is None or (labelled and not key and unlabelled(keep_unlabelled, place, found)):
            continue
        name = id_of(id, number, row, place, seen)
        unkeyed = ChoiceInput(name, texts[0], tuple(texts[1:]), None, place)
        given = with_label(unkeyed, key, names, first_key or 0, found)
        if given is not None:
            yield given
            used += 1
    check_some(used, path, found)
    counts += found


def first_key_of(
    path: str | Path,
    *,
    choices: Sequence[str],
    label: str = "label",
    format: str = "auto",  # noqa: A002
    header: bool = True,
) -> int:
    """Whether the keys of a file's choices count from 0 or from 1.

    From 1 where the file shows that it means so: most of its keys are letters (as in ARC, which
    mixes "A" and "1"), or no key is 0 and one is the number of choices. The arguments are those of
    `read_choices`.

    Raises:
        BertkitError: see `read_texts`.
    """
    rows = read_rows(path, TextCounts(), format, header=header, columns=[*choices, label])
    keys = [name_of(row[label]) for _, row in rows]
    return first_key_among(keys, choices if header else (), len(choices))


def first_key_among(keys: Sequence[str], names: Sequence[str], most: int) -> int:
    """The first index of keys ("" for none), given the names of the columns and how many."""
    digits = {key for key in keys if key.isdecimal() and key not in names}
    letters = sum(letter_index(key) >= 0 for key in keys)
    mostly_letters = 2 * letters > sum(bool(key) for key in keys)
    return int(mostly_letters or ("0" not in digits and str(most) in digits))


def filled(row: Fields, choices: Sequence[str]) -> Sequence[str]:
    """The columns of the choices up to the last that is not empty; at least two."""
    count = len(choices)
    while count > 2 and not str(row[choices[count - 1]] or "").strip():
        count -= 1
    return choices[:count]


def with_label(
    given: ChoiceInput, key: str, names: Sequence[str], first: int, counts: TextCounts
) -> ChoiceInput | None:
    """The input with its key ("" for none) as an index; None where that is out of range."""
    counted = key.isdecimal() and key not in names
    # nine digits are out of range already
    index = int(key[:9]) - first if counted else letter_index(key)
    index = names.index(key) if key in names else index
    if key and not 0 <= index < len(given.choices):
        counts.note("label out of range", given.place)
        return None
    if first and counted:
        counts.note("key counted from 1, kept", given.place)
    return given._replace(label=index if key else None)


def letter_index(key: str) -> int:
    """0 for A or a, 1 for B or b, ...; -1 for anything else."""
    return LETTERS.find(key.lower()) if len(key) == 1 else -1
