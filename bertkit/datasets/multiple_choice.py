"""The user's own multiple choice: a text and ways to go on, in columns named by the user.

The right one is named by its column, a letter or a number; numbers count from 0 or, where the file
shows that it means so, from 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bertkit.datasets.classification import check_some, row_id, row_texts, unlabelled
from bertkit.datasets.examples import ChoiceExample
from bertkit.datasets.questions import from_json
from bertkit.datasets.tabular import Fields, numbered_rows, read_rows, value_name
from bertkit.errors import BertkitError
from bertkit.text.lines import TextCounts

NO_ZERO = "keys of choices taken to count from 0, of which none is (else --first-choice 1), kept"
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
) -> Iterator[ChoiceExample]:
    """Texts with several ways to go on or to answer, one of them right.

    A label is the name of a choice's column (where the file has a header), a letter from A or a, or
    an index. A row may have fewer choices than others: empty ones at its end are left off.

    Args:
        path: see `tables.read_texts`, as for what is not named here.
        counts: is told of every row left out: an empty text or choice, a label out of range; of
            "key counted from 1, kept"; and where a file leaves open what its keys count from.
        text: the column of what the choices go on from.
        choices: their columns, in order, at least two; or the one whose fields hold the list of all
            (in CSV and TSV written as JSON).
        label: the column of the right choice.
        id: as there.
        labelled: as there.
        keep_unlabelled: as there.
        first_key: the index of the first choice, 0 or 1; None decides by this file, as
            `lowest_label` does, for which a labelled file is read twice. Files that belong together
            must be read with the same.
        format: as there.
        header: as there.

    Raises:
        BertkitError: see `tables.read_texts`; or one column is named for the choices and a field
            of it is no list, or `first_key` is another number.
    """
    check_columns(choices)
    if first_key not in (None, 0, 1):
        raise BertkitError(f"keys of choices count from 0 or 1, not from {first_key}")
    found = TextCounts()
    names = choices if header and len(choices) > 1 else ()
    if labelled and first_key is None:
        shown: dict[str, Any] = {"choices": choices, "label": label, "format": format}
        first_key = lowest_label(path, header=header, counts=found, **shown)
    columns = [name for name in (text, *choices, label if labelled else "", id) if name]
    seen: dict[str, str] = {}
    used = 0
    optional = label if labelled and keep_unlabelled else ""
    for number, place, row in numbered_rows(
        path, found, format, header=header, columns=columns, optional=optional
    ):
        key = value_name(row.get(label)) if labelled else ""
        texts = text_and_choices(row, text, choices, place, found)
        if texts is None or (labelled and not key and unlabelled(keep_unlabelled, place, found)):
            continue
        name = row_id(id, number, row, place, seen)
        unkeyed = ChoiceExample(name, texts[0], tuple(texts[1:]), None, place)
        given = with_label(unkeyed, key, names, first_key or 0, found)
        if given is not None:
            yield given
            used += 1
    check_some(used, path, found)
    counts += found


def check_columns(choices: Sequence[str]) -> None:
    """Stop unless there is a column or more, each once."""
    if len(set(choices)) != len(choices) or not choices:
        raise BertkitError(
            f"choices need two columns or more, each once, or one of lists, not "
            f"{', '.join(choices) or 'none'}; name them: --choices A B ..."
        )


def lowest_label(
    path: str | Path,
    *,
    choices: Sequence[str],
    label: str = "label",
    format: str = "auto",  # noqa: A002
    header: bool = True,
    counts: TextCounts | None = None,
) -> int:
    """Whether the keys of a file's choices count from 0 or from 1.

    From 1 where the file shows that it means so: most of its keys are letters (as in ARC, which
    mixes "A" and "1"), or no key is 0 and one is the number of choices of its own row. The
    arguments are those of `read_choices`; `counts` is told where no key is 0 and nothing shows that
    they count from 1.

    Raises:
        BertkitError: see `tables.read_texts`.
    """
    check_columns(choices)
    names = choices if header and len(choices) > 1 else ()
    keys = letters = zeros = lasts = 0
    counted = ""  # where the first key that is a number stands
    columns = [*choices, label]
    for place, row in read_rows(path, TextCounts(), format, header=header, columns=columns):
        key = value_name(row[label])
        spread, own = expand_choices(row, choices, place)
        keys += bool(key)
        letters += letter_index(key) >= 0
        if key.isdecimal() and key not in names:
            counted = counted or place
            zeros += key == "0"
            lasts += key == str(len(own)) and not any(is_empty_choice(spread[name]) for name in own)
    if 2 * letters > keys or (lasts > 0 and not zeros):
        return 1
    if counted and not zeros and counts is not None:
        counts.note(NO_ZERO, counted)
    return 0


def text_and_choices(
    row: Fields, text: str, choices: Sequence[str], place: str, counts: TextCounts
) -> list[str] | None:
    """The text and the choices of a row, or None, counted, if one is empty or there are no two."""
    spread, own = expand_choices(row, choices, place)
    if len(own) < 2:
        counts.note(f"fewer than two '{choices[0]}'", place)
        return None
    return row_texts(spread, (text, *own), place, counts)


def expand_choices(row: Fields, choices: Sequence[str], place: str) -> tuple[Fields, Sequence[str]]:
    """A row with a field for every choice, and their names; of a list those are made here.

    Raises:
        BertkitError: one column is named, and this field of it is no list.
    """
    if len(choices) > 1:
        return row, fill_choices(row, choices)
    [column] = choices
    found = [] if is_empty_choice(row[column]) else from_json(row[column], str, place)
    if not isinstance(found, list):
        raise BertkitError(
            f"{place}: '{column}' is {found!r:.40}, not a list of choices; name a column for each: "
            f"--choices A B ..."
        )
    listed = {f"{column} {number}": choice for number, choice in enumerate(found, 1)}
    return {**row, **listed}, fill_choices(listed, tuple(listed))


def fill_choices(row: Fields, choices: Sequence[str]) -> Sequence[str]:
    """The columns of the choices up to the last that is not empty; at least two."""
    count = len(choices)
    while count > 2 and is_empty_choice(row[choices[count - 1]]):
        count -= 1
    return choices[:count]


def is_empty_choice(value: object) -> bool:
    """Whether a field holds nothing but white space."""
    return not str(value or "").strip()


def with_label(
    given: ChoiceExample, key: str, names: Sequence[str], first: int, counts: TextCounts
) -> ChoiceExample | None:
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
