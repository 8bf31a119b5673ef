"""The user's own questions and tagged words, from the columns of a file.

Data sets keep answers and tags inside of fields: as objects and lists (JSON lines, Parquet, Hugging
Face data sets) or written as JSON (CSV, TSV). SQuAD's own JSON is read by `squad.py`, one word a
line by `conll.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bertkit.datasets.classification import check_some, row_id, row_texts, unlabelled
from bertkit.datasets.conll import TAG
from bertkit.datasets.conllu import SPACES
from bertkit.datasets.examples import QuestionExample, WordsExample
from bertkit.datasets.squad import make_question, with_text
from bertkit.datasets.tabular import (
    label_name,
    numbered_rows,
    refuse_python_list,
    valid_text,
    value_name,
)
from bertkit.errors import BertkitError, nearest
from bertkit.text.lines import TextCounts

Gold = list[tuple[str, int | None]]
"""Text and first character of every answer; None where that is not known."""


# Questions ---------------------------------------------------------------------------------------


def read_questions(
    path: str | Path,
    counts: TextCounts,
    *,
    question: str = "question",
    context: str = "context",
    answer: str = "answers",
    id: str = "",  # noqa: A002
    labelled: bool = True,
    keep_unlabelled: bool = False,
    scoring: bool = False,
    format: str = "auto",  # noqa: A002
    header: bool = True,
) -> Iterator[QuestionExample]:
    """Questions about contexts, with their answers, in the columns of a file, as they are read.

    An answer is a text, which is looked for in the context; an object with `text` and
    `answer_start`, each a value or a list, as in the Hugging Face copies of SQuAD; or a list of
    these. An empty text, an empty list and null say that the context holds no answer. In CSV and
    TSV, objects and lists are written as JSON.

    Args:
        path: a file, folder, glob, URL or `hf:` data set (see `rows.numbered_rows`).
        counts: is told at the end of every row left out and every answer that was corrected.
        question: the column of the question.
        context: the column of the text to answer from.
        answer: the column of the answers.
        id: the column of the ID, each of which is kept to find one that stands twice; "" gives the
            number of the row, from 0.
        labelled: False leaves the answers unread: all are None.
        keep_unlabelled: whether a row of JSON lines that lacks the field of the answers is kept,
            with None, and not left out.
        scoring: whether answers that are not in their context are kept, as in `read_squad`.
        format: of the file, "auto" for its extension.
        header: whether the first line of CSV or TSV names the columns; else they are "0", "1", ...

    Raises:
        BertkitError: a column is missing, an answer is of another type, an ID stands twice or is
            empty, or no row can be used; the message names file and line.
    """
    columns = [name for name in (question, context, answer if labelled else "", id) if name]
    found = TextCounts()
    seen: dict[str, str] = {}
    used = 0
    optional = answer if labelled and keep_unlabelled else ""
    for number, place, row in numbered_rows(
        path, found, format, header=header, columns=columns, optional=optional
    ):
        texts = row_texts(row, (question, context), place, found)
        if texts is None:
            continue
        name = row_id(id, number, row, place, seen)
        golds = None
        if labelled and answer in row:
            golds = row_answers(from_json(row[answer], str | dict, place), answer, place)
        elif labelled:
            unlabelled(keep_unlabelled, place, found)
        asked, about = texts
        made = make_question(name, asked, about, golds, place, found, scoring=scoring)
        if made is not None:
            yield made
            used += 1
    check_some(used, path, found)
    counts += found


def row_answers(value: Any, column: str, place: str) -> Gold:
    """The answers of a field; empty texts are none."""
    return [gold for item in flat(value) for gold in answers_in(item, column, place)]


def flat(value: Any) -> Iterator[Any]:
    """The items of lists within lists, however deep, in order; what is no list by itself."""
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, list):
            pending += reversed(item)
        else:
            yield item


def answers_in(value: Any, column: str, place: str) -> Gold:
    """The answers of a text or an object."""
    if value is None or isinstance(value, str):
        return with_text([(value or "", None)])
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
    pairs = zip(texts, starts, strict=True)
    return [gold for pair in pairs for gold in answer_at(*pair, column, place)]


def answer_at(text: Any, start: Any, column: str, place: str) -> Gold:
    """The answer of a text and a start, as they stand in a file; none where the text is empty."""
    if isinstance(start, float) and start.is_integer():
        start = int(start)  # a column of integers with a gap comes as floats
    if not isinstance(text, str | None) or not (start is None or type(start) is int):
        raise BertkitError(
            f"{place}: '{column}' holds the text {text!r:.40} with the start {start!r:.40}; they "
            f"must be text and a whole number"
        )
    return with_text([(text or "", start)])


def as_list(value: Any) -> list[Any]:
    """A list as it is, anything else as a list of one, None as an empty one."""
    if isinstance(value, list):
        return value
    return [] if value is None else [value]


def from_json(value: Any, items: Any, place: str) -> Any:
    """What a field holds that is written as a JSON list of such items, or as an object with `text`.

    Any other field stays as it is: a text may begin with a bracket.

    Raises:
        BertkitError: it is written as Python shows lists and objects.
    """
    if not isinstance(value, str) or not value.lstrip().startswith(("[", "{")):
        return value
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        refuse_python_list(value, place)
        return value
    listed = isinstance(found, list) and all(isinstance(item, items) for item in found)
    return found if listed or (isinstance(found, dict) and "text" in found) else value


# Words -------------------------------------------------------------------------------------------


def read_word_rows(
    path: str | Path,
    counts: TextCounts,
    *,
    words: str = "tokens",
    tags: str = "ner_tags",
    id: str = "",  # noqa: A002
    document: str = "",
    labelled: bool = True,
    keep_unlabelled: bool = False,
    format: str = "auto",  # noqa: A002
    header: bool = True,
) -> Iterator[WordsExample]:
    """Sentences with a tag for every word, one a row, as they are read.

    Words and tags are lists, or stand between spaces. Class numbers of a Hugging Face data set
    become names; other numbers are taken as they are and counted.

    Args:
        path: a file, folder, glob, URL or `hf:` data set (see `rows.numbered_rows`).
        counts: is told at the end of every row left out: one without words or tags.
        words: the column of the words.
        tags: the column of the tags.
        id: the column of the ID, each of which is kept to find one that stands twice; "" gives the
            number of the row, from 0.
        document: a column that is equal in the rows of a document, which follow each other in one
            file; "", or null in a row, makes a sentence a document of its own.
        labelled: False leaves the tags unread: all are None.
        keep_unlabelled: whether a row without tags is kept, with None, and not left out.
        format: of the file, "auto" for its extension.
        header: whether the first line of CSV or TSV names the columns; else they are "0", "1", ...

    Raises:
        BertkitError: a column is missing, a row has another number of words than of tags, a word or
            tag is none, an ID stands twice or is empty, or no row can be used; the message names
            file and line.
    """
    columns = [name for name in (words, tags if labelled else "", id, document) if name]
    found = TextCounts()
    seen: dict[str, str] = {}
    used = 0
    before, documents = ("", ""), -1
    optional = tags if labelled and keep_unlabelled else ""
    for number, place, row in numbered_rows(
        path, found, format, header=header, columns=columns, optional=optional
    ):
        own = value_name(row[document]) if document else ""
        here = (place.rpartition(":")[0], own)  # the names of another file are its own
        documents += not own or here != before
        before = here
        given = row_words(row[words], words, place, found)
        golds = row_tags(row.get(tags), tags, place, found) if labelled else None
        if golds is not None and len(golds) != len(given):
            raise BertkitError(
                f"{place}: {len(given)} words in '{words}' and {len(golds)} tags in '{tags}'; give "
                f"a tag for every word"
            )
        if not given:
            found.note(f"empty '{words}'", place)
            continue
        if labelled and golds is None and unlabelled(keep_unlabelled, place, found):
            continue
        name = row_id(id, number, row, place, seen)
        yield WordsExample(name, given, golds, documents, place)
        used += 1
    check_some(used, path, found)
    counts += found


def row_words(value: Any, column: str, place: str, counts: TextCounts) -> tuple[str, ...]:
    """The words of a field; () where it is empty."""
    for number, word in enumerate(items := list_items(value, str, column, place), 1):
        if not isinstance(word, str):
            raise BertkitError(f"{place}: word {number} in '{column}' is {word!r:.40}, not text")
    return tuple(valid_text(word, place, counts) for word in items)


def row_tags(value: Any, column: str, place: str, counts: TextCounts) -> tuple[str, ...] | None:
    """The tags of a field; None where it is empty or null."""
    if value is None or value == "":
        return None
    tags = []
    for number, item in enumerate(list_items(value, str | int, column, place), 1):
        tag = label_name(item, place)
        if not TAG.fullmatch(tag) or (tag[0] == "[" and len(tag) > 1):
            raise BertkitError(
                f"{place}: tag {number} in '{column}' is {item!r:.40}, not a tag such as O, B-PER "
                f"or NOUN; correct it or name the column of the tags"
            )
        if not isinstance(item, str):
            counts.note("tag that is a number, kept", place)
        tags.append(tag)
    return tuple(tags)


def list_items(value: Any, items: Any, column: str, place: str) -> Sequence[Any]:
    """A list, one of such items written as JSON, or what stands between the spaces of a text."""
    value = from_json(value, items, place)
    if value is None or isinstance(value, str):
        # spaces alone separate, as in CoNLL's files: other white space may be a word
        return [item for item in SPACES.split(value or "") if item]
    if not isinstance(value, list):
        raise BertkitError(
            f"{place}: '{column}' is {value!r:.40}, neither a list nor text; name another column"
        )
    return value
