"""Parsers for one field of a row: a label, a number, choices, answers, words or tags.

Fields may hold lists and objects: as values (JSON lines, Parquet, Hugging Face data sets) or
written as JSON (CSV, TSV).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from decimal import Decimal
from typing import Any

from bertkit.datasets.conll import SPACES, TAG
from bertkit.datasets.squad import with_text
from bertkit.datasets.tabular import Fields, label_name, refuse_python_list
from bertkit.errors import BertkitError, nearest
from bertkit.text.lines import TextCounts, valid_text, value_name

LARGEST_NUMBER = 1e15
"""The largest regression label; the squares of larger ones overflow the 32-bit sums of training."""
LETTERS = "abcdefghijklmnopqrstuvwxyz"

Gold = list[tuple[str, int | None]]
"""(text, index of the first character) of every answer; the index is None if it is unknown."""


# Labels ------------------------------------------------------------------------------------------


def single_label(value: object, column: str, place: str) -> str | None:
    """Return the name of the one label in a field, or None if the field is empty.

    Raises:
        BertkitError: the field holds a list or an object.
    """
    if isinstance(value, list | tuple | set | frozenset | dict | bytes):
        raise BertkitError(
            f"{place}: '{column}' holds a {type(value).__name__}, not one name; for several labels "
            f"per text use the task type multi-label-classification"
        )
    return label_name(value, place) or None


def label_names(value: object, separator: str, place: str) -> tuple[str, ...] | None:
    """Return the distinct label names in a field, in order, or None for null.

    Raises:
        BertkitError: the field holds objects or nested lists, or looks like a 0 or 1 per label.
    """
    if value is None:
        return None
    if isinstance(value, str):
        try:
            listed = json.loads(value) if value.lstrip().startswith("[") else None
        except (ValueError, RecursionError):
            refuse_python_list(value, place)
            listed = None
        value = listed if isinstance(listed, list) else value.split(separator)
    if isinstance(value, set | frozenset):
        value = sorted(value, key=str)
    items = list(value) if isinstance(value, list | tuple) else [value]
    if any(hasattr(item, "__len__") and not isinstance(item, str) for item in items):
        raise BertkitError(
            f"{place}: the labels are {str(value)[:40]!r}; write a list of names, or names between "
            "separators"
        )
    numbers = [item for item in items if isinstance(item, bool | int | float) and item in (0, 1)]
    # [0, 1] may be two class numbers; a float, a bool, a repetition or another order is a vector
    if len(numbers) == len(items) > 1 and list(map(repr, items)) != ["0", "1"]:
        raise BertkitError(
            f"{place}: the labels are {str(value)[:40]!r}, which looks like a 0 or 1 for each "
            "label; write the names of the labels that apply"
        )
    names = (label_name(item, place) for item in items)
    return tuple(dict.fromkeys(name for name in names if name))


def row_number(value: object, column: str, place: str) -> float:
    """Return the number in a field; raise unless it is finite and at most `LARGEST_NUMBER`."""
    try:
        number = float(value) if isinstance(value, str | int | float | Decimal) else math.nan
    except (ValueError, OverflowError):
        number = math.nan
    # only Python reads 1_000 as a number
    if isinstance(value, bool) or "_" in str(value) or not math.isfinite(number):
        raise BertkitError(
            f"{place}: '{column}' is {str(value)[:40]!r}, not a finite number; correct it, or use "
            f"the task type classification if labels are names"
        )
    if abs(number) > LARGEST_NUMBER:
        raise BertkitError(
            f"{place}: '{column}' is {str(value)[:40]!r}; numbers go up to {LARGEST_NUMBER:g}; "
            "divide the column by a power of ten"
        )
    return number


# Choices -----------------------------------------------------------------------------------------


def expand_choices(row: Fields, choices: Sequence[str], place: str) -> tuple[Fields, Sequence[str]]:
    """Return a row with one field per choice, and the names of these fields.

    If one column holds the list of choices, its items get fields named "COLUMN 1" and so on. The
    list may be the field "text" of an object, as in ARC and CommonsenseQA on the hub, whose "label"
    lists the keys.

    Raises:
        BertkitError: only one column is named, and its field is not a list.
    """
    if len(choices) == 1:
        [column] = choices
        found = [] if is_empty_choice(row[column]) else from_json(row[column], object, place)
        if isinstance(found, dict) and "text" in found:
            found = found["text"]
        if not isinstance(found, list | tuple):
            raise BertkitError(
                f"{place}: '{column}' is {found!r:.40}, not a list of choices; name a column for "
                "each: --choices A B ..."
            )
        listed = {f"{column} {number}": choice for number, choice in enumerate(found, 1)}
        row, choices = {**row, **listed}, tuple(listed)
    return row, choices[: count_choices([row[name] for name in choices])]


def count_choices(choices: Sequence[object]) -> int:
    """Return the number of choices up to the last one that is not empty, at least two."""
    count = len(choices)
    while count > 2 and is_empty_choice(choices[count - 1]):
        count -= 1
    return count


def is_empty_choice(value: object) -> bool:
    """Return whether a field is empty, NaN or only white space."""
    return not value_name(value)


def choice_key(value: object, names: Sequence[str]) -> str:
    """Return the key in a field; "0.0", as pandas writes 0 beside nulls, is "0" unless a name."""
    key = value_name(value)
    return key if key in names else re.sub(r"^(\d+)\.0$", r"\1", key)


def letter_index(key: str) -> int:
    """Return 0 for A or a, 1 for B or b, and so on; -1 for anything else."""
    return LETTERS.find(key.lower()) if len(key) == 1 else -1


# Answers -----------------------------------------------------------------------------------------


def row_answers(value: Any, column: str, place: str) -> Gold:
    """Return the answers in a field, without those of empty text."""
    items = flat(from_json(value, str | dict, place))
    return with_text(gold for item in items for gold in answers_in(item, column, place))


def flat(value: Any) -> Iterator[Any]:
    """Yield the items of arbitrarily nested lists in order; yield any other value itself."""
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, list | tuple):
            pending += reversed(item)
        else:
            yield item


def answers_in(value: Any, column: str, place: str) -> Gold:
    """Return the answers in a text, or in an object with `text` and `answer_start`."""
    if value is None or isinstance(value, str):
        return [(value or "", None)]
    if not isinstance(value, dict):
        raise BertkitError(
            f"{place}: '{column}' is {value!r:.40}, neither text nor a list nor an object with "
            f"'text' and 'answer_start'; correct it"
        )
    if "text" not in value:
        hint = nearest("text", value)
        raise BertkitError(f"{place}: the object in '{column}' has no field 'text'{hint}")
    texts = as_list(value["text"])
    starts = as_list(value.get("answer_start")) or [None] * len(texts)
    if len(starts) != len(texts):
        raise BertkitError(
            f"{place}: '{column}' has {len(texts)} texts and {len(starts)} starts; give one for "
            f"each"
        )
    return [answer_at(*pair, column, place) for pair in zip(texts, starts, strict=True)]


def answer_at(text: Any, start: Any, column: str, place: str) -> tuple[str, int | None]:
    """Return the text and the start of one answer, after checking their types."""
    if isinstance(start, float) and start.is_integer():
        start = int(start)  # integer columns with missing values are read as floats
    if not isinstance(text, str | None) or not (start is None or type(start) is int):
        raise BertkitError(
            f"{place}: '{column}' holds the text {text!r:.40} with the start {start!r:.40}; they "
            f"must be text and a whole number"
        )
    return text or "", start


def as_list(value: Any) -> list[Any]:
    """Return the items of a list or tuple, none for None, and any other value in a list."""
    if isinstance(value, list | tuple):
        return list(value)
    return [] if value is None else [value]


def from_json(value: Any, items: Any, place: str) -> Any:
    """Parse a field that is a JSON list with items of some types, or a JSON object with `text`.

    Any other field is returned unchanged, since a text may begin with a bracket. A list may also
    have other items, such as null, which the caller refuses.

    Raises:
        BertkitError: the field is a list or object in Python's notation.
    """
    if not isinstance(value, str) or not value.lstrip().startswith(("[", "{")):
        return value
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        refuse_python_list(value, place)
        return value
    listed = isinstance(found, list) and (
        not found or any(isinstance(item, items) for item in found)
    )
    return found if listed or (isinstance(found, dict) and "text" in found) else value


# Words -------------------------------------------------------------------------------------------


def row_words(value: Any, column: str, place: str, counts: TextCounts) -> tuple[str, ...]:
    """Return the words in a field; () if it is empty."""
    for number, word in enumerate(items := list_items(value, str, column, place), 1):
        if not isinstance(word, str):
            raise BertkitError(f"{place}: word {number} in '{column}' is {word!r:.40}, not text")
    return tuple(valid_text(word, place, counts) for word in items)


def row_tags(value: Any, column: str, place: str, counts: TextCounts) -> tuple[str, ...] | None:
    """Return the tags in a field, or None if it is empty or null."""
    if value is None or (isinstance(value, str) and not value):
        return None
    tags = []
    for number, item in enumerate(list_items(value, str | int, column, place), 1):
        tag = label_name(item, place)
        if not TAG.fullmatch(tag) or (tag[0] == "[" and len(tag) > 1):
            raise BertkitError(
                f"{place}: tag {number} in '{column}' is {item!r:.40}, not a tag such as O, B-PER "
                f"or NOUN; correct it or name the column of the tags"
            )
        if isinstance(item, int) and item < 0:  # -100 in data for transformers
            raise BertkitError(
                f"{place}: tag {number} in '{column}' is {item}, which marks a token without a "
                "tag; give one tag for each word"
            )
        if not isinstance(item, str):
            counts.note("tag that is a number, kept", place)
        tags.append(tag)
    return tuple(tags)


def list_items(value: Any, items: Any, column: str, place: str) -> Sequence[Any]:
    """Return the items of a list, of a list written as JSON, or of a text split at spaces."""
    value = from_json(value, items, place)
    if value is None or isinstance(value, str):
        # split only at spaces, as in CoNLL's files: other white space may be a word
        return [item for item in SPACES.split(value or "") if item]
    if not isinstance(value, list | tuple):
        raise BertkitError(
            f"{place}: '{column}' is {value!r:.40}, neither a list nor text; name another column"
        )
    return value
