"""The user's own multiple choice: a text and ways to go on, in columns named by the user.

The right one is named by its column, a letter or a number; numbers count from 0 or, where the file
shows that it means so, from 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from bertkit.errors import BertkitError
from bertkit.tasks.inputs import ChoiceInput
from bertkit.tasks.rows import Fields, name_of, numbered_rows, read_rows
from bertkit.tasks.tables import check_some, id_of, texts_of, unlabelled
from bertkit.text.lines import TextCounts

LETTERS = "abcdefghijklmnopqrstuvwxyz"


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
        path: see `tables.read_texts`, as for what is not named here.
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
        BertkitError: see `tables.read_texts`; or there are no two choices, or `first_key` is
            another number.
    """
    check_columns(choices)
    if first_key not in (None, 0, 1):
        raise BertkitError(f"keys of choices count from 0 or 1, not from {first_key}")
    names = choices if header else ()
    if labelled and first_key is None:
        first_key = first_key_of(path, choices=choices, label=label, format=format, header=header)
    columns = [name for name in (text, *choices, label if labelled else "", id) if name]
    found = TextCounts()
    seen: dict[str, str] = {}
    used = 0
    optional = label if labelled and keep_unlabelled else ""
    for number, place, row in numbered_rows(
        path, found, format, header=header, columns=columns, optional=optional
    ):
        key = name_of(row.get(label)) if labelled else ""
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


def check_columns(choices: Sequence[str]) -> None:
    """Stop unless there are two columns or more, each once."""
    if len(set(choices)) != len(choices) or len(choices) < 2:
        raise BertkitError(
            f"choices need two columns or more, each once, not {', '.join(choices) or 'none'}; "
            f"name them: --choices A B ..."
        )


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
    mixes "A" and "1"), or no key is 0 and one is the number of choices of its own row. The
    arguments are those of `read_choices`.

    Raises:
        BertkitError: see `tables.read_texts`.
    """
    check_columns(choices)
    names = choices if header else ()
    keys = letters = zeros = lasts = 0
    for _, row in read_rows(path, TextCounts(), format, header=header, columns=[*choices, label]):
        key, own = name_of(row[label]), filled(row, choices)
        keys += bool(key)
        letters += letter_index(key) >= 0
        if key.isdecimal() and key not in names:
            zeros += key == "0"
            lasts += key == str(len(own)) and not any(is_empty(row[name]) for name in own)
    return int(2 * letters > keys or (lasts > 0 and not zeros))


def filled(row: Fields, choices: Sequence[str]) -> Sequence[str]:
    """The columns of the choices up to the last that is not empty; at least two."""
    count = len(choices)
    while count > 2 and is_empty(row[choices[count - 1]]):
        count -= 1
    return choices[:count]


def is_empty(value: object) -> bool:
    """Whether a field holds nothing but white space."""
    return not str(value or "").strip()


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
