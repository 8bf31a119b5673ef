"""The reader of TriviaQA's reading comprehension files (Joshi et al. 2017, arXiv 1705.03551).

The paper fine-tunes on TriviaQA before SQuAD 1.1 (section 4.2, table 2). A question has an answer
with its aliases and documents that may contain it, but no position. As in the paper, its contexts
are the first 400 words of the documents in which one of these names occurs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any

from bertkit.datasets.examples import GoldAnswer, QuestionExample
from bertkit.datasets.squad import (
    NOT_IN_CONTEXT,
    inside_word,
    parse_json,
    refuse_no_question,
    require_field,
    squad_examples,
)
from bertkit.errors import BertkitError
from bertkit.text.lines import TextCounts, decode_line, valid_text
from bertkit.text.sources import is_remote, one_source

CONTEXT_WORDS = 400
EVIDENCE_FOLDERS = {"EntityPages": "wikipedia", "SearchResults": "web"}
"""Field with the documents of a question -> their folder in `evidence/`."""
CONTEXT_WORD = re.compile(r"\S+")


def read_questions(
    path: str | Path, counts: TextCounts, *, scoring: bool = False
) -> list[QuestionExample]:
    """Read a JSON file of questions, of SQuAD or TriviaQA; see `read_squad`.

    Raises:
        BertkitError: see `read_squad` and `triviaqa_examples`.
    """
    path = one_source(path).path
    content = parse_json(path)
    if not isinstance(content, dict) or "Data" not in content:
        return squad_examples(content, path, counts, scoring=scoring)
    found = TextCounts(files=1)
    inputs = list(triviaqa_examples(content, path, found, scoring=scoring))
    refuse_no_question(inputs, path, found)
    counts += found
    return inputs


def triviaqa_examples(
    content: Any, path: str, counts: TextCounts, *, scoring: bool = False
) -> Iterator[QuestionExample]:
    """Yield an example for each question and document of a file of `qa/`.

    A document whose first 400 words have no answer is left out. Without labels, as in the test
    files, documents are whole.

    Args:
        content: the JSON of the file.
        path: the file, in a folder beside `evidence/`, as in the published archive.
        counts: collects the documents that are missing, shortened or left out.
        scoring: whether all names of an answer are right; otherwise the one that occurs first in
            the context is the answer.

    Raises:
        BertkitError: a field is missing or of the wrong type, or there is no folder of documents.
    """
    evidence = Path(path).absolute().parent.parent / "evidence"
    if is_remote(path) or not evidence.is_dir():
        raise BertkitError(
            f"{path}: TriviaQA's documents are missing; unpack its whole archive, so that "
            f"{evidence if not is_remote(path) else 'a local folder evidence/'} holds them"
        )
    for number, record in enumerate(require_field(content, "Data", list, path), 1):
        question_id = require_field(record, "QuestionId", str, f"{path}, question {number}")
        place = f"{path}, question {question_id}"
        question = valid_text(require_field(record, "Question", str, place), place, counts)
        names = answer_names(record, place)
        for filename, text in documents_of(record, evidence, place, counts):
            context, golds = text, None
            if names is not None:
                context = first_words(text)
                if len(context) < len(text.rstrip()):
                    counts.note(f"document cut to its first {CONTEXT_WORDS} words", place)
                golds = golds_in_context(context, names, scoring=scoring)
                if not golds:
                    where = f"its first {CONTEXT_WORDS} words"
                    counts.note(f"document without an answer in {where}", place)
                    continue
            yield QuestionExample(f"{question_id}--{filename}", question, context, golds, place)


def answer_names(record: Any, place: str) -> list[str] | None:
    """Return the answer and its aliases; None if the question has no label."""
    if record.get("Answer") is None:
        return None
    answer = require_field(record, "Answer", dict, place)
    aliases = require_field(answer, "Aliases", list, place) if "Aliases" in answer else []
    names = [require_field(answer, "Value", str, place), *map(str, aliases)]
    return [name for name in dict.fromkeys(names) if name.strip()]


def documents_of(
    record: Any, evidence: Path, place: str, counts: TextCounts
) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each document of a question.

    Raises:
        BertkitError: a name leads out of the folder of documents.
    """
    for field, folder in EVIDENCE_FOLDERS.items():
        documents = require_field(record, field, list, place) if field in record else []
        for number, document in enumerate(documents, 1):
            name = require_field(document, "Filename", str, f"{place}, {field} {number}")
            parts = PurePosixPath(name)
            if parts.is_absolute() or ".." in parts.parts:
                raise BertkitError(f"{place}: Filename {name!r} is not a file of evidence/{folder}")
            file, where = evidence / folder / name, f"{place}, {folder}/{name}"
            with suppress(OSError):
                if file.is_file():  # a pipe never ends
                    yield name, decode_line(file.read_bytes(), where, counts)
                    continue
            counts.note("document missing", where)
    if not any(record.get(field) for field in EVIDENCE_FOLDERS):
        counts.note("question without documents", place)


def first_words(text: str) -> str:
    """Return a text up to the end of its word number `CONTEXT_WORDS`."""
    ends = [word.end() for word in islice(CONTEXT_WORD.finditer(text), CONTEXT_WORDS)]
    return text[: ends[-1]] if ends else ""


def golds_in_context(context: str, names: list[str], *, scoring: bool) -> tuple[GoldAnswer, ...]:
    """Return the answer that occurs first in a context, in any case; () if there is none.

    For scoring, the other names follow it without a position.
    """
    if not names:
        return ()
    longest_first = sorted(names, key=len, reverse=True)
    pattern = "|".join(r"\s+".join(map(re.escape, name.split())) for name in longest_first)
    every = re.finditer(rf"(?<!\w)(?:{pattern})(?!\w)", context, re.IGNORECASE)
    found = next((match for match in every if not inside_word(match, context)), None)
    if found is None:
        return ()
    first = GoldAnswer(found.group(), found.start())
    others = [GoldAnswer(name, NOT_IN_CONTEXT) for name in names if name != first.text]
    return (first, *others) if scoring else (first,)
