"""SQuAD's files and metrics (paper sections 4.2 and 4.3), and TriviaQA's files.

Scores are those of evaluate-v1.1.py (Rajpurkar et al. 2016, arXiv 1606.05250) and evaluate-v2.0.py
(2018, arXiv 1806.03822), which differ if an answer is empty after normalisation.

TriviaQA (Joshi et al. 2017, arXiv 1705.03551) has answers with aliases but without positions. As in
the paper, contexts are the first 400 words of the documents in which one of these names occurs.
"""

from __future__ import annotations

import json
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bertkit.errors import BertkitError, InputTypeError, short_repr
from bertkit.tasks.columns import (
    Columns,
    Fields,
    Purpose,
    first_left_out,
    from_json,
    require_texts,
    row_texts,
)
from bertkit.text.documents import TextCounts, valid_text
from bertkit.text.sources import (
    DAMAGE,
    HEAD_BYTES,
    extension,
    one_line,
    one_source,
    open_binary,
)

NOT_IN_CONTEXT = -1  # the start of a gold answer that is kept only for the metric
CONTEXT_WORDS = 400
OWN_FORMAT = re.compile(rb'"paragraphs"\s*:|"Data"\s*:\s*\[')
"""What only files in the formats of SQuAD and TriviaQA have in their beginning."""
EVIDENCE_FOLDERS = {"EntityPages": "wikipedia", "SearchResults": "web"}
"""Field with the documents of a question of TriviaQA -> their folder in `evidence/`."""


class GoldAnswer(NamedTuple):
    """An accepted answer; `start` is the index of its first character in the context, or -1."""

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
        return self.answers


@dataclass(frozen=True, kw_only=True)
class QuestionColumns(Columns):
    """Columns of questions, contexts and answers, in rows or in SQuAD's JSON.

    In rows, an answer is a text, which is searched for in the context; an object with `text` and
    `answer_start`, each a value or a list, as in the Hugging Face copies of SQuAD; or a list of
    these. An empty text, an empty list or null means that the context holds no answer.
    """

    question: str = "question"
    """The column of the question."""
    passage: str = "context"
    """The column of the text to answer from."""
    answers: str = "answers"
    """The column of the answers."""
    input_options = ("question", "passage")
    target_option = "answers"
    wanted = "(question, context) tuples"

    def in_rows(self, path: str | Path) -> bool:
        """JSON has rows unless it begins as that of SQuAD or of TriviaQA."""
        if self.format != "auto" or extension(str(path)) not in {"", ".json"}:
            return True
        try:
            with open_binary(one_source(path).path) as stream:
                head = stream.read(HEAD_BYTES)
        except DAMAGE:
            return True  # reading the rows will report it
        return not OWN_FORMAT.search(head)

    def read_own_format(
        self, path: str | Path, counts: TextCounts, purpose: Purpose
    ) -> Iterator[QuestionExample]:
        return iter(read_questions(path, counts, purpose))

    def example(self, row: Fields, location: str, counts: TextCounts, purpose: Purpose) -> Any:
        """Answers are corrected or left out as in `read_questions`."""
        texts = row_texts(row, (self.question, self.passage), location, counts)
        if texts is None:
            return None
        golds = None
        if purpose != "predict" and self.answers in row:
            golds = self.answers_in(from_json(row[self.answers], location), location)
        return make_question("", texts[0], texts[1], golds, location, counts, purpose)

    def answers_in(self, value: Any, location: str) -> list[tuple[str, int | None]]:
        """Return (text, start) of the answers in a field, without those of empty text."""
        if isinstance(value, list | tuple):
            return [answer for item in value for answer in self.answers_in(item, location)]
        if value is None or isinstance(value, str):
            value = {"text": value or ""}
        texts = value.get("text") if isinstance(value, dict) else None
        if isinstance(texts, str):
            texts, value = [texts], {"answer_start": [value.get("answer_start")]}
        if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
            raise BertkitError(
                f"{location}: '{self.answers}' is {value!r:.40}, neither text nor a list nor an "
                "object with 'text' and 'answer_start'"
            )
        starts = value.get("answer_start") or [None] * len(texts)
        pairs = zip(texts, starts, strict=True)
        return [
            (text, None if start is None else int(start)) for text, start in pairs if text.strip()
        ]

    def from_values(self, values: Sequence[Any], location: str, id: str) -> QuestionExample:  # noqa: A002
        texts = require_texts(location, values)
        if len(texts) != 2 or not all(text.strip() for text in texts):
            raise InputTypeError(
                f"{location} is {short_repr(values)}; give a question and a context, both not empty"
            )
        return QuestionExample(id, texts[0], texts[1], None, location)


# Files --------------------------------------------------------------------------------------------


def read_questions(
    path: str | Path, counts: TextCounts, purpose: Purpose = "train", version: str = ""
) -> list[QuestionExample]:
    """Read a JSON file of questions, of SQuAD or TriviaQA, whose archive has `evidence/`, too.

    Training leaves out answers that are not in the context, and questions without any other; the
    metric compares texts, so it needs them. `version` is "1.1" or "2.0", the rules for scoring;
    without it, a file is 2.0 if its field `version` says so or a question has `is_impossible`.
    """
    path, read = one_source(path).path, TextCounts(files=1)
    content = parse_json(path)
    content = {"data": content} if isinstance(content, list) else content
    trivia = isinstance(content, dict) and "Data" in content
    try:
        questions = triviaqa_questions if trivia else squad_questions
        inputs = list(questions(content, path, read, purpose))
    except (KeyError, TypeError, AttributeError) as error:
        what = f"no field {error}" if isinstance(error, KeyError) else str(error)
        raise BertkitError(
            f"{path} is not as SQuAD's JSON ({what}); or give rows with a question, a context and "
            "answers, and name the columns: --question A --passage B --answers C"
        ) from error
    if not inputs:
        raise BertkitError(f"{path} holds no usable question{first_left_out(read)}")
    said = version or str(content.get("version")).lower().removeprefix("v")
    version2 = said.startswith("2") or (not version and any(q.version2 for q in inputs))
    counts += read
    return [question._replace(version2=version2) for question in inputs]


def parse_json(path: str) -> Any:
    """Parse the JSON of a file, compressed or not."""
    try:
        with open_binary(path) as stream:
            return json.load(stream)
    except (*DAMAGE, ValueError, RecursionError) as error:
        raise BertkitError(
            f"{path} is not valid JSON ({one_line(error)}); restore it, or give --format jsonl if "
            "it has an object on each line"
        ) from None


def squad_questions(
    content: Any, path: str, counts: TextCounts, purpose: Purpose
) -> Iterator[QuestionExample]:
    """Yield the questions of SQuAD-JSON; those with `is_impossible` are of version 2."""
    seen: set[str] = set()
    paragraphs = (paragraph for article in content["data"] for paragraph in article["paragraphs"])
    for context, qa in ((p["context"], qa) for p in paragraphs for qa in p["qas"]):
        name = valid_text(str(qa["id"]), path, counts)
        location = f"{path}, question {name}"
        if name in seen:
            raise BertkitError(f"{location} occurs twice; give each an id of its own")
        seen.add(name)
        golds = squad_answers(qa, location, counts)
        example = make_question(name, qa["question"], context, golds, location, counts, purpose)
        if example is not None:
            yield example._replace(version2="is_impossible" in qa)


def squad_answers(
    qa: Mapping[str, Any], location: str, counts: TextCounts
) -> Sequence[tuple[str, int]] | None:
    """Return (text, start) of the answers of a question; None if it has no label."""
    answers = [(answer["text"], answer["answer_start"]) for answer in qa.get("answers") or ()]
    answers = [answer for answer in answers if answer[0].strip()]
    if qa.get("is_impossible"):
        if answers:
            counts.note("answers of a question marked is_impossible", location)
        return ()
    if not answers and qa.get("is_impossible") is False:  # not yet annotated
        return None
    return answers if qa.get("answers") is not None else None


def make_question(
    id: str,  # noqa: A002
    question: str,
    context: str,
    answers: Sequence[tuple[str, int | None]] | None,
    location: str,
    counts: TextCounts,
    purpose: Purpose = "train",
) -> QuestionExample | None:
    """Make a question, or return None and count it; an answer without a start is searched for."""
    training = purpose == "train"
    for name, text in (("question", question), ("context", context)):
        if not text or text.isspace():
            counts.note(f"empty {name}" if training else f"empty {name}, kept", location)
            if training:
                return None
    question, context = (valid_text(text, location, counts) for text in (question, context))
    if not answers:
        return QuestionExample(id, question, context, None if answers is None else (), location)
    golds = []
    for text, start in ((valid_text(text, location, counts), start) for text, start in answers):
        answer = locate(text, start, context, location, counts)
        if answer is not None:
            golds.append(answer)
        elif training:
            counts.note("answer not in its context", location)
        else:
            counts.note("answer not in its context, for scoring kept", location)
            golds.append(GoldAnswer(text, NOT_IN_CONTEXT))
    if not golds:
        counts.note("question left without an answer", location)
        return None
    return QuestionExample(id, question, context, tuple(golds), location)


def locate(
    text: str, start: int | None, context: str, location: str, counts: TextCounts
) -> GoldAnswer | None:
    """Find the occurrence nearest to a start, else the first of whole words, in any white space."""
    words = text.split()
    if not words:
        return None
    if start is not None and start >= 0 and context.startswith(text, start):
        return GoldAnswer(text, start)

    def rank(match: re.Match[str]) -> tuple[bool, int]:
        return start is None and inside_word(match, context), abs(match.start() - (start or 0))

    matches = re.finditer(r"\s+".join(map(re.escape, words)), context)
    match = min(matches, key=rank, default=None)
    if match is None:
        return None
    reason = "answer with other white space than its context, kept"
    if match.start() != start:
        reason = "answer without a start, first occurrence kept"
        reason = reason if start is None else "answer_start corrected, kept"
    counts.note(reason, location)
    return GoldAnswer(match.group(), match.start())


def inside_word(match: re.Match[str], context: str) -> bool:
    """Return whether a letter, a digit or a mark (such as a vowel sign) stands beside a match."""
    first, end = match.span()
    beside = context[max(0, first - 1) : first] + context[end : end + 1]
    return any(char.isalnum() or unicodedata.category(char)[0] == "M" for char in beside)


# TriviaQA -----------------------------------------------------------------------------------------


def triviaqa_questions(
    content: Any, path: str, counts: TextCounts, purpose: Purpose
) -> Iterator[QuestionExample]:
    """Yield an example for each question and document; to train, with the first answer alone."""
    evidence = Path(path).absolute().parent.parent / "evidence"
    if not evidence.is_dir():
        raise BertkitError(
            f"{path}: TriviaQA's documents are missing; unpack its whole archive, so that "
            f"{evidence} holds them"
        )
    for record in content["Data"]:
        name, answer = record["QuestionId"], record.get("Answer") or {}
        location = f"{path}, question {name}"
        question = valid_text(record["Question"], location, counts)
        names = [answer["Value"], *(answer.get("Aliases") or ())] if answer else []
        names = [name for name in dict.fromkeys(names) if name.strip()]
        files = [
            Path(folder, document["Filename"])
            for field, folder in EVIDENCE_FOLDERS.items()
            for document in record.get(field) or ()
        ]
        for file in files:
            if file.is_absolute() or ".." in file.parts or not (evidence / file).is_file():
                counts.note("document missing", f"{location}, {file}")
                continue
            context, golds = (evidence / file).read_text("utf-8", errors="replace"), None
            if "\ufffd" in context:
                counts.note("invalid UTF-8 replaced, kept", f"{location}, {file}")
            if names:
                words = list(islice(re.finditer(r"\S+", context), CONTEXT_WORDS + 1))
                if len(words) > CONTEXT_WORDS:
                    counts.note(f"document cut to its first {CONTEXT_WORDS} words", location)
                    context = context[: words[-2].end()]
                golds = golds_in_context(context, names, purpose)
                if not golds:
                    counts.note("document without an answer in the words that are read", location)
                    continue
            document_id = file.relative_to(file.parts[0]).as_posix()
            yield QuestionExample(f"{name}--{document_id}", question, context, golds, location)


def golds_in_context(
    context: str, names: Sequence[str], purpose: Purpose
) -> tuple[GoldAnswer, ...]:
    """Return the answer that occurs first in a context, for scoring with all names; () for none."""
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
    return (first, *others) if purpose != "train" else (first,)


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
    """Return the F1 over normalised words; of two empty texts it is 1.0 in version 2."""
    predicted, wanted = normalize_answer(prediction).split(), normalize_answer(gold).split()
    if version2 and not (predicted and wanted):
        return float(predicted == wanted)
    common = (Counter(predicted) & Counter(wanted)).total()
    return 2 * common / (len(predicted) + len(wanted)) if common else 0.0


def is_version2(inputs: Sequence[QuestionExample]) -> bool:
    """Return whether to score a set as 2.0: it was read as 2.0, or a question is unanswerable."""
    return any(question.version2 or question.answers == () for question in inputs)


def question_scores(
    inputs: Sequence[QuestionExample], answers: Sequence[str]
) -> list[tuple[float, float]]:
    """Return the (exact match, F1) of each answer, each the best over the gold answers."""
    version2, scores = is_version2(inputs), []
    for question, answer in zip(inputs, answers, strict=True):
        golds = [gold.text for gold in question.answers or ()]
        if version2:
            golds = [gold for gold in golds if normalize_answer(gold)] or [""]
        exact = max(exact_match(answer, gold) for gold in golds)
        scores.append((exact, max(answer_f1(answer, gold, version2=version2) for gold in golds)))
    return scores


def squad_scores(inputs: Sequence[QuestionExample], answers: Sequence[str]) -> dict[str, float]:
    """Compute the official programs' scores of the answer to each question, as fractions."""
    scores = np.array(question_scores(inputs, answers))
    exact, f1 = scores.mean(axis=0).tolist()
    result = {"f1": f1, "exact_match": exact}
    if is_version2(inputs):
        answerable = np.array([bool(question.answers) for question in inputs])
        if answerable.any():
            exact, f1 = scores[answerable].mean(axis=0).tolist()
            result |= {"answerable_f1": f1, "answerable_exact_match": exact}
        if not answerable.all():
            result["unanswerable_accuracy"] = scores[~answerable, 0].mean().item()
    return result


def best_threshold(
    inputs: Sequence[QuestionExample], answers: Sequence[str], null_odds: Sequence[float]
) -> float:
    """Return the threshold for the null odds with the highest F1 (2.0); no answer is above it.

    `answers` are the best texts that are not empty. Unlike in evaluate-v2.0.py, questions with
    equal odds are decided together, and the threshold is below all odds if never answering is best.
    """
    scores = question_scores(inputs, answers)
    gains = [
        f1 if question.answers else -float(bool(answer))
        for question, answer, (_, f1) in zip(inputs, answers, scores, strict=True)
    ]
    levels, indices = np.unique(np.array(null_odds, dtype=float), return_inverse=True)
    totals = np.cumsum(np.bincount(indices, gains))  # what answering up to a level gains
    best = int(totals.argmax())
    return float(levels[best]) if totals[best] > 0 else min(0.0, np.nextafter(levels[0], -np.inf))
