"""The reader of SQuAD's files (BERT paper, sections 4.2 and 4.3).

Questions are read from SQuAD-JSON 1.1 (Rajpurkar et al. 2016, arXiv 1606.05250) and 2.0 (Rajpurkar
et al. 2018, arXiv 1806.03822).
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from bertkit.datasets.examples import GoldAnswer, QuestionExample
from bertkit.datasets.tabular import first_left_out
from bertkit.errors import BertkitError, nearest
from bertkit.text.lines import TextCounts, valid_text
from bertkit.text.sources import DAMAGE, one_line, one_source, open_binary

SQUAD_SITE = "https://rajpurkar.github.io/SQuAD-explorer/"
SQUAD_FILES = {
    "1.1": {"train": "train-v1.1.json", "dev": "dev-v1.1.json"},
    "2.0": {"train": "train-v2.0.json", "dev": "dev-v2.0.json"},
}
"""Version -> split -> official file name."""

MAX_JSON_LINE = 1 << 20
"""The number of bytes of a first line that are read."""

NOT_IN_CONTEXT = -1  # the start of a gold answer that is kept only for the metric

Kind = TypeVar("Kind")
AnswerStart = TypeVar("AnswerStart", int, int | None)
JSON_TYPES = {
    str: "text",
    int: "a whole number",
    list: "a list",
    dict: "an object",
    bool: "a truth value",
}


def read_squad(
    path: str | Path, counts: TextCounts, *, scoring: bool = False, version: str = ""
) -> list[QuestionExample]:
    """Read a file of questions; `answers` is () for unanswerable ones and None if absent.

    The file is one JSON value, so it is held in memory; convert larger data to rows.

    Args:
        path: a local file or URL of SQuAD-JSON 1.1 or 2.0, compressed or not.
        counts: collects every question and answer that was left out or corrected.
        scoring: whether the answers are for the metric. Training needs their position in the
            context, so an answer that is not found there is left out, and so is a question without
            any other. The metric compares texts, so both are kept (with `start` -1), as in the
            official metric, and so are empty questions and contexts.
        version: "1.1" or "2.0", the rules for scoring. If it is not given, a file is 2.0 if its
            field `version` says so or one of its questions has `is_impossible`.

    Raises:
        BertkitError: the file is missing or not SQuAD-JSON, a field is missing or of the wrong
            type, a question has no id or that of another, or there is no usable question.
    """
    path = one_source(path).path
    content = parse_json(path)
    return squad_examples(content, path, counts, scoring=scoring, version=version)


def squad_examples(
    content: Any, path: str, counts: TextCounts, *, scoring: bool = False, version: str = ""
) -> list[QuestionExample]:
    """Return the questions of a file's JSON; see `read_squad`."""
    found = TextCounts(files=1)
    inputs: list[QuestionExample] = []
    seen: dict[str, str] = {}
    version2 = version == "2.0" or (not version and says_version2(content))
    for place, paragraph in paragraphs(content, path):
        context = require_field(paragraph, "context", str, place)
        for number, qa in enumerate(require_field(paragraph, "qas", list, place), 1):
            question_id = read_id(qa, f"{place}, question {number}", found)
            if question_id in seen:
                raise BertkitError(
                    f"{place}: question id {question_id} occurs twice, first at "
                    f"{seen[question_id]}; rename one"
                )
            seen[question_id] = place
            version2 |= not version and "is_impossible" in qa
            of_question = f"{path}, question {question_id}"
            question = require_field(qa, "question", str, of_question)
            answers = read_answers(qa, of_question, found)
            made = make_question(
                question_id, question, context, answers, of_question, found, scoring=scoring
            )
            if made is not None:
                inputs.append(made)
    refuse_no_question(inputs, path, found)
    counts += found
    return [question._replace(version2=version2) for question in inputs]


def refuse_no_question(inputs: Sequence[QuestionExample], path: str, counts: TextCounts) -> None:
    """Raise an error that says what was left out first if a file holds no usable question."""
    if not inputs:
        why = first_left_out(counts) or "; is it the right file?"
        raise BertkitError(f"{path} holds no usable question{why}")


def says_version2(content: Any) -> bool:
    """Return whether the `version` of a file begins with 2, as 2.0 and v2.0 do."""
    version = content.get("version") if isinstance(content, dict) else None
    return str(version).lower().removeprefix("v").startswith("2")


def has_json_lines(path: str) -> bool:
    """Return whether the first line with text is one JSON object and not a whole file's JSON.

    `data` is the main field of SQuAD's files, and `Data` that of TriviaQA's.
    """
    try:
        with open_binary(path) as stream:
            line = b"\n"
            while line and not line.strip():
                line = stream.readline(MAX_JSON_LINE)
            row = json.loads(line)
    except (BertkitError, *DAMAGE, ValueError, RecursionError):  # reading the file will report it
        return False
    return isinstance(row, dict) and row.keys().isdisjoint({"data", "Data"})


def parse_json(path: str) -> Any:
    """Parse the JSON of a local file or URL, compressed or not."""
    try:
        with open_binary(path) as stream:
            return json.load(stream)
    except DAMAGE as error:
        raise BertkitError(f"{path} cannot be read ({one_line(error)}); restore it") from None
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, too long, too deep
        raise BertkitError(
            f"{path} is not valid JSON ({error}); restore it, or give --format jsonl if it has an "
            f"object on each line"
        ) from None


def paragraphs(content: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield (location, paragraph) for the content of a file; locations count from 1."""
    for number, article in enumerate(require_field(content, "data", list, path), 1):
        place = f"{path}, article {number}"
        for index, paragraph in enumerate(require_field(article, "paragraphs", list, place), 1):
            yield f"{place}, paragraph {index}", paragraph


def require_field(record: Any, name: str, kind: type[Kind], place: str) -> Kind:
    """Return a field of a JSON object.

    Raises:
        BertkitError: the field is missing or has the wrong type.
    """
    if not isinstance(record, dict):
        raise BertkitError(
            f"{place}: expected an object with field '{name}'; name a file of rows .jsonl"
        )
    if name not in record:
        raise BertkitError(f"{place}: field '{name}' is missing{nearest(name, record)}")
    value = record[name]
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise BertkitError(
            f"{place}: field '{name}' is {value!r:.40}; it must be {JSON_TYPES[kind]}"
        )
    return value


def read_id(qa: Any, place: str, counts: TextCounts) -> str:
    """Return the id of a question as valid text; some SQuAD-JSON files have integer ids."""
    if isinstance(qa, dict) and type(qa.get("id")) is int:
        return str(qa["id"])
    question_id = require_field(qa, "id", str, place)
    if not question_id or question_id.isspace():
        raise BertkitError(f"{place}: field 'id' is empty; give the question one of its own")
    return valid_text(question_id, place, counts)


def read_answers(
    qa: Mapping[str, Any], place: str, counts: TextCounts
) -> Sequence[tuple[str, int]] | None:
    """Return (text, start) of the answers of a question; None if it has no label."""
    impossible = "is_impossible" in qa and require_field(qa, "is_impossible", bool, place)
    if qa.get("answers") is None:
        return () if impossible else None
    answers = with_text(
        (
            require_field(answer, "text", str, place),
            require_field(answer, "answer_start", int, place),
        )
        for answer in require_field(qa, "answers", list, place)
    )
    if answers and impossible:
        counts.note("answers of a question marked is_impossible", place)
        return ()
    if not answers and qa.get("is_impossible") is False:
        counts.note("no answer and not is_impossible, so no label, kept", place)
        return None
    if not answers and "is_impossible" not in qa:
        counts.note("empty answers taken as no answer, kept", place)
    return answers


def with_text(answers: Iterable[tuple[str, AnswerStart]]) -> list[tuple[str, AnswerStart]]:
    """Return the answers without those of empty text, which means that there is no answer."""
    return [(text, start) for text, start in answers if text and not text.isspace()]


def make_question(
    question_id: str,
    question: str,
    context: str,
    answers: Sequence[tuple[str, int | None]] | None,
    place: str,
    counts: TextCounts,
    *,
    scoring: bool = False,
) -> QuestionExample | None:
    """Make a checked question, or return None (and count it) if it must be left out.

    The answers are (text, index of the first character) of each; an index of None means the first
    occurrence. They are () for an unanswerable question, and None if the file has no answers. See
    `read_squad` for `scoring`, and for `counts`, which collects what was left out or corrected.
    """
    for name, text in (("question", question), ("context", context)):
        if not text or text.isspace():
            counts.note(f"empty {name}, kept" if scoring else f"empty {name}", place)
            if not scoring:
                return None
    question, context = (valid_text(question, place, counts), valid_text(context, place, counts))
    if not answers:
        return QuestionExample(
            question_id, question, context, None if answers is None else (), place
        )
    found = []
    for text, start in ((valid_text(text, place, counts), start) for text, start in answers):
        answer = locate(text, start, context, place, counts)
        if answer is not None:
            found.append(answer)
        elif scoring:
            counts.note("answer not in its context, for scoring kept", place)
            found.append(GoldAnswer(text, NOT_IN_CONTEXT))
        else:
            counts.note("answer not in its context", place)
    if not found:
        counts.note("question left without an answer", place)
        return None
    return QuestionExample(question_id, question, context, tuple(found), place)


def locate(
    text: str, start: int | None, context: str, place: str, counts: TextCounts
) -> GoldAnswer | None:
    """Find the occurrence of an answer nearest to its start; white space may differ.

    Without a start it is the first one that begins and ends at the borders of words, if any does.
    """
    words = text.split()
    if not words:
        return None
    if start is not None and start >= 0 and context.startswith(text, start):
        return GoldAnswer(text, start)
    moved = in_windows_ends(start or 0, context)
    if start is not None and moved != start and context.startswith(text, moved):
        counts.note("answer_start counted with Unix line ends, kept", place)
        return GoldAnswer(text, moved)
    pattern = re.compile(r"\s+".join(map(re.escape, words)))

    def rank(match: re.Match[str]) -> tuple[bool, int]:
        return start is None and inside_word(match, context), abs(match.start() - (start or 0))

    found = min(pattern.finditer(context), key=rank, default=None)
    if found is None:
        return None
    if start is None:
        counts.note("answer without a start, first occurrence kept", place)
    elif found.start() != start:
        counts.note("answer_start corrected, kept", place)
    else:
        counts.note("answer with other white space than its context, kept", place)
    return GoldAnswer(found.group(), found.start())


def inside_word(match: re.Match[str], context: str) -> bool:
    """Return whether a match has a letter, a digit or a mark, as a vowel sign, right beside it."""
    first, end = match.span()
    beside = context[max(0, first - 1) : first] + context[end : end + 1]
    return any(char.isalnum() or unicodedata.category(char)[0] == "M" for char in beside)


def in_windows_ends(start: int, context: str) -> int:
    r"""Convert a position counted with "\r\n" as one character to an index into the context."""
    ends = enumerate(re.finditer("\r\n", context))
    return start + sum(end.start() - number < start for number, end in ends)
