"""SQuAD's files and metrics (paper sections 4.2 and 4.3), and TriviaQA's files.

SQuAD-JSON 1.1 is of Rajpurkar et al. 2016 (arXiv 1606.05250), 2.0 of Rajpurkar et al. 2018 (arXiv
1806.03822). Exact match and F1 are computed as evaluate-v1.1.py and evaluate-v2.0.py compute them;
the two differ if an answer is empty after normalisation, and `is_version2` decides which of them
scores a set of questions.

The paper fine-tunes on TriviaQA (Joshi et al. 2017, arXiv 1705.03551) before SQuAD 1.1 (table 2).
Its questions have an answer with aliases and documents that may contain it, but no position. As in
the paper, contexts are the first 400 words of the documents in which one of these names occurs.
"""

from __future__ import annotations

import json
import math
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import groupby, islice
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, TypeVar

from bertkit.errors import BertkitError, nearest
from bertkit.tasks.rows import first_left_out
from bertkit.text.documents import TextCounts, valid_text
from bertkit.text.sources import DAMAGE, one_line, one_source, open_binary

MAX_JSON_LINE = 1 << 20
"""The number of bytes of a first line that are read."""
NOT_IN_CONTEXT = -1
"""The start of a gold answer that is kept only for the metric."""
CONTEXT_WORDS = 400
EVIDENCE_FOLDERS = {"EntityPages": "wikipedia", "SearchResults": "web"}
"""Field with the documents of a question of TriviaQA -> their folder in `evidence/`."""
JSON_TYPES = {
    str: "text",
    int: "a whole number",
    list: "a list",
    dict: "an object",
    bool: "a truth value",
}

Kind = TypeVar("Kind")


class GoldAnswer(NamedTuple):
    """An accepted answer; `start` is the index of its first character in the context."""

    text: str
    start: int


class QuestionExample(NamedTuple):
    """A question about a context."""

    id: str
    question: str
    context: str
    answers: tuple[GoldAnswer, ...] | None
    """() if the file marks the question as unanswerable; None if it has no answers field."""
    location: str
    version2: bool = False
    """Whether to score it by the rules of SQuAD 2.0; `is_version2` decides for a whole set."""

    @property
    def gold(self) -> tuple[GoldAnswer, ...] | None:
        """The answers, or None if the file has none."""
        return self.answers


# Files --------------------------------------------------------------------------------------------


def read_questions(
    path: str | Path, counts: TextCounts, *, scoring: bool = False, version: str = ""
) -> list[QuestionExample]:
    """Read a JSON file of questions, of SQuAD or TriviaQA, into memory.

    Args:
        path: a local file or URL, compressed or not. A file of TriviaQA stands in a folder beside
            `evidence/`, as in the published archive.
        counts: collects each question, answer and document that was left out or corrected.
        scoring: whether the answers are for the metric. Training needs their position in the
            context, so an answer that is not found there is left out, and so is a question without
            any other. The metric compares texts, so both are kept (with `start` -1), as in the
            official metric, and so are empty questions and contexts.
        version: "1.1" or "2.0", the rules for scoring. If it is not given, a file is 2.0 if its
            field `version` says so or one of its questions has `is_impossible`.

    Raises:
        BertkitError: the file is missing or not such JSON, a field is missing or of the wrong type,
            a question has no id or that of another, or there is no usable question.
    """
    path, read = one_source(path).path, TextCounts(files=1)
    content = parse_json(path)
    if isinstance(content, dict) and "Data" in content:
        inputs = list(triviaqa_questions(content, path, read, scoring=scoring))
    else:
        inputs = list(squad_questions(content, path, read, scoring=scoring))
        said = version or str(content.get("version")).lower().removeprefix("v")
        questions = (qa for _, paragraph in paragraphs(content, path) for qa in paragraph["qas"])
        marked = not version and any("is_impossible" in qa for qa in questions)
        version2 = marked or said.startswith("2")
        inputs = [question._replace(version2=version2) for question in inputs]
    if not inputs:
        why = first_left_out(read) or "; is it the right file?"
        raise BertkitError(f"{path} holds no usable question{why}")
    counts += read
    return inputs


def squad_questions(
    content: Any, path: str, counts: TextCounts, *, scoring: bool
) -> Iterator[QuestionExample]:
    """Yield the questions of SQuAD-JSON."""
    seen: dict[str, str] = {}
    for location, paragraph in paragraphs(content, path):
        context = require_field(paragraph, "context", str, location)
        for number, qa in enumerate(require_field(paragraph, "qas", list, location), 1):
            name = read_id(qa, f"{location}, question {number}", counts)
            if name in seen:
                raise BertkitError(
                    f"{location}: question id {name} occurs twice, first at {seen[name]}; rename "
                    "one"
                )
            seen[name] = location
            of_question = f"{path}, question {name}"
            question = require_field(qa, "question", str, of_question)
            answers = read_answers(qa, of_question, counts)
            example = make_question(
                name, question, context, answers, of_question, counts, scoring=scoring
            )
            if example is not None:
                yield example


def paragraphs(content: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield (location, paragraph) for the content of a file; locations count from 1."""
    for number, article in enumerate(require_field(content, "data", list, path), 1):
        location = f"{path}, article {number}"
        for index, paragraph in enumerate(require_field(article, "paragraphs", list, location), 1):
            yield f"{location}, paragraph {index}", paragraph


def read_id(qa: Any, location: str, counts: TextCounts) -> str:
    """Return the id of a question as valid text; some SQuAD-JSON files have integer ids."""
    if isinstance(qa, dict) and type(qa.get("id")) is int:
        return str(qa["id"])
    name = require_field(qa, "id", str, location)
    if not name or name.isspace():
        raise BertkitError(f"{location}: field 'id' is empty; give the question one of its own")
    return valid_text(name, location, counts)


def read_answers(
    qa: Mapping[str, Any], location: str, counts: TextCounts
) -> Sequence[tuple[str, int]] | None:
    """Return (text, start) of the answers of a question; None if it has no label."""
    impossible = "is_impossible" in qa and require_field(qa, "is_impossible", bool, location)
    if qa.get("answers") is None:
        return () if impossible else None
    answers = [
        (
            require_field(answer, "text", str, location),
            require_field(answer, "answer_start", int, location),
        )
        for answer in require_field(qa, "answers", list, location)
    ]
    answers = [answer for answer in answers if answer[0].strip()]
    if answers and impossible:
        counts.note("answers of a question marked is_impossible", location)
        return ()
    if not answers and qa.get("is_impossible") is False:
        counts.note("no answer and not is_impossible, so no label, kept", location)
        return None
    if not answers and "is_impossible" not in qa:
        counts.note("empty answers taken as no answer, kept", location)
    return answers


def make_question(
    id: str,  # noqa: A002
    question: str,
    context: str,
    answers: Sequence[tuple[str, int | None]] | None,
    location: str,
    counts: TextCounts,
    *,
    scoring: bool = False,
) -> QuestionExample | None:
    """Make a checked question, or return None (and count it) if it must be left out.

    The answers are (text, index of the first character) of each; an index of None means the first
    occurrence. They are () for an unanswerable question, and None if the file has no answers.
    """
    for name, text in (("question", question), ("context", context)):
        if not text or text.isspace():
            counts.note(f"empty {name}, kept" if scoring else f"empty {name}", location)
            if not scoring:
                return None
    question, context = (valid_text(text, location, counts) for text in (question, context))
    if not answers:
        return QuestionExample(id, question, context, None if answers is None else (), location)
    golds = []
    for text, start in ((valid_text(text, location, counts), start) for text, start in answers):
        answer = locate(text, start, context, location, counts)
        if answer is not None:
            golds.append(answer)
        elif scoring:
            counts.note("answer not in its context, for scoring kept", location)
            golds.append(GoldAnswer(text, NOT_IN_CONTEXT))
        else:
            counts.note("answer not in its context", location)
    if not golds:
        counts.note("question left without an answer", location)
        return None
    return QuestionExample(id, question, context, tuple(golds), location)


def locate(
    text: str, start: int | None, context: str, location: str, counts: TextCounts
) -> GoldAnswer | None:
    """Find the occurrence of an answer nearest to its start; white space may differ.

    Without a start it is the first one that begins and ends at the borders of words, if any does.
    """
    words = text.split()
    if not words:
        return None
    if start is not None and start >= 0 and context.startswith(text, start):
        return GoldAnswer(text, start)
    pattern = re.compile(r"\s+".join(map(re.escape, words)))

    def rank(match: re.Match[str]) -> tuple[bool, int]:
        return start is None and inside_word(match, context), abs(match.start() - (start or 0))

    match = min(pattern.finditer(context), key=rank, default=None)
    if match is None:
        return None
    if start is None:
        counts.note("answer without a start, first occurrence kept", location)
    elif match.start() != start:
        counts.note("answer_start corrected, kept", location)
    else:
        counts.note("answer with other white space than its context, kept", location)
    return GoldAnswer(match.group(), match.start())


def inside_word(match: re.Match[str], context: str) -> bool:
    """Return whether a match has a letter, a digit or a mark, as a vowel sign, right beside it."""
    first, end = match.span()
    beside = context[max(0, first - 1) : first] + context[end : end + 1]
    return any(char.isalnum() or unicodedata.category(char)[0] == "M" for char in beside)


def has_json_lines(path: str) -> bool:
    """Return whether the first line with text is one JSON object and not a whole file's JSON."""
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
            "object on each line"
        ) from None


def require_field(record: Any, name: str, kind: type[Kind], location: str) -> Kind:
    """Return a field of a JSON object; raise if it is missing or has the wrong type."""
    if not isinstance(record, dict):
        raise BertkitError(
            f"{location}: expected an object with field '{name}'; name a file of rows .jsonl"
        )
    if name not in record:
        raise BertkitError(f"{location}: field '{name}' is missing{nearest(name, record)}")
    value = record[name]
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise BertkitError(
            f"{location}: field '{name}' is {value!r:.40}; it must be {JSON_TYPES[kind]}"
        )
    return value


# TriviaQA -----------------------------------------------------------------------------------------


def triviaqa_questions(
    content: Any, path: str, counts: TextCounts, *, scoring: bool
) -> Iterator[QuestionExample]:
    """Yield an example for each question and document; one without an answer is left out.

    Without labels, as in the test files, documents are whole. For scoring, all names of an answer
    are right; otherwise the one that occurs first in the context is the answer.
    """
    evidence = Path(path).absolute().parent.parent / "evidence"
    if not evidence.is_dir():
        raise BertkitError(
            f"{path}: TriviaQA's documents are missing; unpack its whole archive, so that "
            f"{evidence} holds them"
        )
    for number, record in enumerate(require_field(content, "Data", list, path), 1):
        name = require_field(record, "QuestionId", str, f"{path}, question {number}")
        location = f"{path}, question {name}"
        question = valid_text(require_field(record, "Question", str, location), location, counts)
        names = answer_names(record, location)
        for filename, text in documents_of(record, evidence, location, counts):
            context, golds = text, None
            if names is not None:
                words = list(islice(re.finditer(r"\S+", text), CONTEXT_WORDS))
                context = text[: words[-1].end()] if words else ""
                if len(context) < len(text.rstrip()):
                    counts.note(f"document cut to its first {CONTEXT_WORDS} words", location)
                golds = golds_in_context(context, names, scoring=scoring)
                if not golds:
                    counts.note("document without an answer in the words that are read", location)
                    continue
            yield QuestionExample(f"{name}--{filename}", question, context, golds, location)


def answer_names(record: Any, location: str) -> list[str] | None:
    """Return the answer and its aliases; None if the question has no label."""
    if record.get("Answer") is None:
        return None
    answer = require_field(record, "Answer", dict, location)
    names = [require_field(answer, "Value", str, location), *map(str, answer.get("Aliases") or ())]
    return [name for name in dict.fromkeys(names) if name.strip()]


def documents_of(
    record: Any, evidence: Path, location: str, counts: TextCounts
) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each document of a question."""
    for field, folder in EVIDENCE_FOLDERS.items():
        for document in require_field(record, field, list, location) if field in record else []:
            name = require_field(document, "Filename", str, location)
            parts = PurePosixPath(name)
            if parts.is_absolute() or ".." in parts.parts:
                raise BertkitError(f"{location}: Filename {name!r} is not in evidence/{folder}")
            file = evidence / folder / name
            with suppress(OSError):  # such as a name that is too long
                if file.is_file():
                    text = file.read_bytes().decode(errors="replace")
                    if "\ufffd" in text:
                        counts.note("invalid UTF-8 replaced, kept", f"{location}, {folder}/{name}")
                    yield name, text
                    continue
            counts.note("document missing", f"{location}, {folder}/{name}")
    if not any(record.get(field) for field in EVIDENCE_FOLDERS):
        counts.note("question without documents", location)


def golds_in_context(context: str, names: list[str], *, scoring: bool) -> tuple[GoldAnswer, ...]:
    """Return the answer that occurs first in a context, in any case; () if there is none.

    For scoring, the other names follow it without a position.
    """
    if not names:
        return ()
    longest_first = sorted(names, key=len, reverse=True)
    pattern = "|".join(r"\s+".join(map(re.escape, name.split())) for name in longest_first)
    matches = re.finditer(rf"(?<!\w)(?:{pattern})(?!\w)", context, re.IGNORECASE)
    match = next((match for match in matches if not inside_word(match, context)), None)
    if match is None:
        return ()
    first = GoldAnswer(match.group(), match.start())
    others = [GoldAnswer(name, NOT_IN_CONTEXT) for name in names if name != first.text]
    return (first, *others) if scoring else (first,)


# Metrics ------------------------------------------------------------------------------------------

ARTICLES = re.compile(r"\b(?:a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_answer(text: str) -> str:
    """Lowercase a text, drop ASCII punctuation and English articles, and normalise spaces."""
    return " ".join(ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split())


def exact_match(prediction: str, gold: str) -> float:
    """Return 1.0 if both texts are equal when normalised, else 0.0."""
    return float(normalize_answer(prediction) == normalize_answer(gold))


def answer_f1(prediction: str, gold: str, *, version2: bool = False) -> float:
    """Return the F1 over normalised words, counted with repetition.

    Two texts that are both empty when normalised score 1.0 with `version2` and 0.0 otherwise.
    """
    predicted, wanted = normalize_answer(prediction).split(), normalize_answer(gold).split()
    if version2 and not (predicted and wanted):
        return float(predicted == wanted)
    common = (Counter(predicted) & Counter(wanted)).total()
    return 2 * common / (len(predicted) + len(wanted)) if common else 0.0


def is_version2(inputs: Sequence[QuestionExample]) -> bool:
    """Return whether to score a set as 2.0: it was read as 2.0, or a question is unanswerable."""
    return any(question.version2 or question.answers == () for question in inputs)


def raw_scores(
    inputs: Sequence[QuestionExample], predictions: Mapping[str, str]
) -> dict[str, tuple[float, float]]:
    """Return id -> (exact, F1), each the best over the gold answers."""
    if not inputs:
        raise BertkitError("there is no question to score")
    version2 = is_version2(inputs)
    scores = {}
    for question in inputs:
        if question.answers is None:
            raise BertkitError(
                f"{question.location}: no gold answers to score against; use a dev file"
            )
        golds = [answer.text for answer in question.answers]
        if version2:
            golds = [gold for gold in golds if normalize_answer(gold)] or [""]
        prediction = predictions[question.id]
        scores[question.id] = (
            max(exact_match(prediction, gold) for gold in golds),
            max(answer_f1(prediction, gold, version2=version2) for gold in golds),
        )
    return scores


def squad_scores(
    inputs: Sequence[QuestionExample], predictions: Mapping[str, str]
) -> dict[str, float]:
    """Compute exact match and F1 in percent, as the official programs do.

    The questions, with gold answers, are read with `scoring=True`. The predictions are the text for
    the id of each question, "" if there is no answer.

    Returns:
        `exact`, `f1` and `total`; for 2.0 also `HasAns_exact`, `HasAns_f1`, `HasAns_total`, and the
        same with `NoAns_` for the unanswerable questions.
    """
    scores = raw_scores(inputs, predictions)
    result = squad_averages(scores, inputs)
    if is_version2(inputs):
        for name, wanted in (("HasAns", True), ("NoAns", False)):
            part = [question for question in inputs if bool(question.answers) == wanted]
            values = squad_averages(scores, part) if part else {}
            result |= {f"{name}_{key}": value for key, value in values.items()}
    return result


def squad_averages(
    scores: Mapping[str, tuple[float, float]], inputs: Sequence[QuestionExample]
) -> dict[str, float]:
    """Return mean scores in percent."""
    pairs = [scores[question.id] for question in inputs]
    exact, overlap = (100.0 * sum(values) / len(pairs) for values in zip(*pairs, strict=True))
    return {"exact": exact, "f1": overlap, "total": len(pairs)}


def best_threshold(
    inputs: Sequence[QuestionExample],
    predictions: Mapping[str, str],
    null_odds: Mapping[str, float],
) -> dict[str, float]:
    """Find the thresholds for the null odds with the highest exact match and F1 (2.0).

    A question whose odds are above the threshold counts as answered with "".

    This differs from evaluate-v2.0.py in two cases where its threshold does not give the score that
    it reports: questions with equal odds are decided together, and if never answering is best and
    some odds are 0 or less, the threshold is below all odds and not 0.

    Args:
        inputs: see `squad_scores`.
        predictions: id -> the best text that is not empty, whatever its odds.
        null_odds: id -> the finite score of no answer relative to the answer.

    Returns:
        `best_exact`, `best_exact_threshold`, `best_f1`, `best_f1_threshold`; scores in percent.
    """
    scores = raw_scores(inputs, predictions)
    answerable = {question.id for question in inputs if question.answers}
    ordered = sorted(scores, key=lambda question_id: null_odds[question_id])
    result: dict[str, float] = {}
    for column, name in enumerate(("exact", "f1")):
        best = current = float(sum(question_id not in answerable for question_id in scores))
        threshold = min(0.0, math.nextafter(null_odds[ordered[0]], -math.inf))
        for odds, group in groupby(ordered, key=lambda question_id: null_odds[question_id]):
            for question_id in group:
                if question_id in answerable:
                    current += scores[question_id][column]
                else:
                    current -= bool(predictions[question_id])
            if current > best:
                best, threshold = current, odds
        result |= {f"best_{name}": 100.0 * best / len(inputs), f"best_{name}_threshold": threshold}
    return result
