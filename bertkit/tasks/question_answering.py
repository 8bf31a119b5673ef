"""Answering a question by a span of its context (paper sections 4.2 and 4.3; SQuAD 1.1 and 2.0).

A start vector and an end vector score each token; training maximises the probability of the right
start and end among the tokens of the window, and [CLS] means "no answer here" (see `SpanModel` for
left-to-right networks). As in `run_squad.py` of google-research/bert, a long context becomes
overlapping windows, and a token may start an answer only where it has the most context on both
sides. Answers are slices of the raw context.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from bertkit.errors import BertkitError
from bertkit.model.encoder import ModelConfig
from bertkit.model.heads import LossSum, Sums
from bertkit.model.outputs import SpanModel
from bertkit.tasks.sequences import WindowLengths, plan_windows
from bertkit.tasks.squad import (
    GoldAnswer,
    QuestionColumns,
    QuestionExample,
    best_threshold,
    squad_scores,
)
from bertkit.tasks.task import (
    Encoded,
    Inputs,
    Item,
    ItemPart,
    Items,
    Metrics,
    Outputs,
    Parts,
    Result,
    Results,
    Targets,
    Task,
    TaskBatch,
    TrainingData,
    softmax,
)
from bertkit.tokenizer.wordpiece import Tokenizer

NO_ANSWER = (0, 0)  # the target (start, end) of a window without the answer: the index of [CLS]
USUAL_STRIDE, USUAL_QUESTION, USUAL_WINDOW, SHORTEST_WINDOW = 128, 64, 384, 8
LENGTH_BONUS = 0.01
"""What each token of a window adds to the context of its tokens (`run_squad.py`, line 542)."""


@dataclass(frozen=True, kw_only=True)
class QuestionWindows(WindowLengths):
    """The lengths of windows of questions with their contexts."""

    max_question_length: int = USUAL_QUESTION
    """Maximum tokens of a question, and at most half of a window; longer ones are cut and
    counted."""
    max_answer_length: int = 30
    """Maximum tokens of a predicted answer, as in the published code; longer answers in the data
    are counted."""
    usual_length = USUAL_WINDOW

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_question_length < 1 or self.max_answer_length < 1:
            raise BertkitError("--max-question-length and --max-answer-length must be above 0")


# Windows ------------------------------------------------------------------------------------------


class SpanWindow(NamedTuple):
    """A sequence `[CLS] question [SEP] part of the context [SEP]` with n context tokens."""

    ids: np.ndarray  # (first + n + 1,) int32 token ids
    first: int
    """The length of segment 0 with its [SEP], which is the index of the first context token."""
    offsets: np.ndarray
    """(n, 2) int32 half-open character spans of the context tokens in the raw context."""
    owned: np.ndarray  # (n,) bool: whether this is the window that gives the token the most context
    reach: tuple[int, int]
    """The character span from the end of the token before this part to the start of the one after
    it."""


def usual_stride(room: int) -> int:
    """Return the default stride for a window with this room, at which windows overlap."""
    return max(1, min(USUAL_STRIDE, room - max(1, room // 4)))


def align(answer: GoldAnswer, window: SpanWindow) -> tuple[int, int] | None:
    """Return the first and last token of an answer, from [CLS]; None if it is not in the window."""
    start, end = answer.start, answer.start + len(answer.text)
    if start < window.reach[0] or end > window.reach[1]:
        return None
    first = int(np.searchsorted(window.offsets[:, 1], start, side="right"))
    last = int(np.searchsorted(window.offsets[:, 0], end, side="left")) - 1
    return (window.first + first, window.first + last) if first <= last else None


def first_aligned(
    answers: Sequence[GoldAnswer], windows: Sequence[SpanWindow]
) -> list[tuple[int, int] | None]:
    """Align the first answer that some window contains; return its (start, end) in each or None."""
    for answer in answers:
        spans = [align(answer, window) for window in windows]
        if any(spans):
            return spans
    return [None] * len(windows)


# Results ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Span(Result):
    """A candidate answer, `context[start:end]`; "no answer" has the text "" and the span (0, 0)."""

    text: str
    probability: float  # the probability among the best spans
    start_logit: float
    end_logit: float
    start: int
    end: int

    @property
    def score(self) -> float:
        return self.start_logit + self.end_logit


@dataclass(frozen=True, slots=True)
class Answer(Result):
    """The answer to a question, `context[start:end]`; "" and None if there is no answer."""

    answer: str
    start: int | None
    end: int | None
    probability: float
    """The probability of this answer, possibly "", among the best spans and no answer."""
    no_answer_probability: float
    """The probability of no answer; 0 if the model was not trained on unanswerable questions."""
    null_odds: float
    """The score of no answer, at [CLS] in the window where it is lowest, minus that of the best
    span; above the threshold there is no answer."""
    best: Span
    """The best span, even if "no answer" scores higher; "" only if the context has no tokens."""
    nbest: tuple[Span, ...]
    """The best spans, sorted by score; "" is among them if "no answer" is allowed."""

    def to_dict(self) -> dict[str, Any]:
        values = super(Answer, self).to_dict()
        return {name: values[name] for name in values if name not in ("best", "nbest")}


@dataclass(frozen=True)
class QuestionAnswering(Task):
    """A task that answers each question with a span of its context, or with no answer."""

    null: bool = False  # whether questions may have no answer (SQuAD 2.0)
    threshold: float = 0.0  # the null odds above which a question gets no answer
    max_length: int = USUAL_WINDOW
    stride: int = 0
    max_question_length: int = USUAL_QUESTION
    nbest: int = 20
    max_answer_length: int = 30
    task_type = "question-answering"
    head = "span"
    columns = QuestionColumns
    windows = QuestionWindows
    input_fields = ("question", "context")
    group_by = "context"
    labels = ("start", "end")
    answer_field = "answer"
    metric = "f1"

    def __post_init__(self) -> None:
        if self.max_length < SHORTEST_WINDOW:
            raise BertkitError(
                f"windows of {self.max_length} tokens have no room for a question and its context; "
                f"--max-length is at least {SHORTEST_WINDOW}"
            )

    @property
    def question_limit(self) -> int:
        """The maximum tokens of a question, which leaves room for a token of its context."""
        return min(self.max_question_length, self.max_length - 4)

    @classmethod
    def from_data(cls, data: TrainingData) -> Self:
        windows: QuestionWindows = data.windows
        return cls(
            null=any(example.answers == () for example in data.examples),
            max_length=data.max_length,
            stride=windows.stride,
            max_question_length=min(windows.max_question_length, data.max_length // 2),
            max_answer_length=windows.max_answer_length,
        )

    @classmethod
    def from_transformers(cls, max_length: int) -> dict[str, Any]:
        length = QuestionWindows().length(max_length)
        return {"max_length": length, "max_question_length": min(USUAL_QUESTION, length // 2)}

    def build(self, config: ModelConfig) -> SpanModel:
        return SpanModel(config)

    def items(self, inputs: Inputs, tokenizer: Tokenizer) -> Items:
        """Each window is an item, as in the published code; its target may be [CLS], no answer."""
        items, windowed, cut, unaligned, empty = [], 0, 0, 0, 0
        questions = tokenizer.encode_batch([example.question for example in inputs])
        context, encoding = "", None
        for i, (example, question) in enumerate(zip(inputs, questions, strict=True)):
            if encoding is None or example.context != context:  # those of a paragraph are adjacent
                context, encoding = example.context, tokenizer.encode(example.context)
            windows = self.span_windows(question, context, encoding, tokenizer)
            windowed += len(windows) > 1
            cut += len(question) > self.question_limit
            empty += not question or not len(windows[0].offsets)
            golds = example.answers or ()
            spans = first_aligned(golds, windows)
            unaligned += any(answer.start >= 0 for answer in golds) and not any(spans)
            for window, span in zip(windows, spans, strict=True):
                sequence = Encoded(window.ids, window.first)
                items.append(Item(i, [ItemPart((sequence,), (*(span or NO_ANSWER), window))]))
        lost = {
            f"questions cut at {self.question_limit} tokens": cut,
            "answers in no window whole": unaligned,
            "questions without tokens, or with a context without": empty,
        }
        return Items(items, len(inputs), windowed, lost)

    def span_windows(
        self, question: Sequence[int], context: str, encoding: Any, tokenizer: Tokenizer
    ) -> list[SpanWindow]:
        """Cut an encoded context into overlapping windows, each behind the question."""
        question_ids = question[: self.question_limit]
        head = np.array([tokenizer.cls_id, *question_ids, tokenizer.sep_id], dtype=np.int32)
        tail = np.array([tokenizer.sep_id], dtype=np.int32)
        ids = np.array(encoding.ids, dtype=np.int32)
        offsets = np.array(encoding.offsets, dtype=np.int32).reshape(-1, 2)
        room, count = self.max_length - len(head) - 1, len(ids)
        stride = min(self.stride, room) if self.stride else usual_stride(room)
        windows = []
        for first, end, owned in plan_windows(
            np.ones_like(ids), room, stride, reach_end=False, length_bonus=LENGTH_BONUS
        ):
            mask = np.zeros(end - first, dtype=bool)
            mask[owned - first] = True
            reach = (
                int(offsets[first - 1, 1]) if first else 0,
                int(offsets[end, 0]) if end < count else len(context),
            )
            window_ids = np.concatenate([head, ids[first:end], tail])
            windows.append(SpanWindow(window_ids, len(head), offsets[first:end], mask, reach))
        return windows

    def targets(self, parts: Parts, packed_index: np.ndarray, starts: np.ndarray) -> Targets:
        """The tensor "spans" (sequences, 2) has start and end in each window, [CLS] being 0."""
        spans = np.array([part.target[:2] for part in parts])[np.argsort(packed_index)]
        return {"spans": torch.from_numpy(spans)}, {"windows": len(parts)}

    def loss(self, model: nn.Module, batch: TaskBatch) -> Sums:
        packed, spans = batch.packed, batch.tensors["spans"]
        logits = model(packed).float()
        table = logits.new_full((len(spans), packed.max_seqlen, 2), -torch.inf)
        table = table.index_put((packed.owners, packed.position_ids), logits)
        losses = F.cross_entropy(table, spans, reduction="sum") / 2
        return {"loss": LossSum(losses, "windows")}

    def decode(self, inputs: Inputs, items: Items, outputs: Outputs) -> list[Answer]:
        windows: list[list[tuple[SpanWindow, np.ndarray]]] = [[] for _ in inputs]
        for item, [logits] in zip(items.items, outputs, strict=True):
            windows[item.input].append((item.parts[0].target[2], logits.astype(np.float64)))
        return self.decided(
            [self.best_spans(w, e.context) for e, w in zip(inputs, windows, strict=True)]
        )

    def best_spans(self, windows: Sequence[tuple[SpanWindow, np.ndarray]], context: str) -> Answer:
        """Find the best spans over all windows of a question, before the threshold.

        They pair the `nbest` best starts of a window with its `nbest` best ends; if no pair is
        valid, all starts and ends are tried. Of spans with the same text, the best counts.
        """
        spans: list[Span] = []
        for limit in (self.nbest, None):
            rows = [candidates(*window, limit, self.max_answer_length) for window in windows]
            spans = spans or distinct_spans(np.concatenate(rows), context, self.nbest)
        null_score, null_start, null_end = min(
            (float(logits[0].sum()), *logits[0].tolist()) for _, logits in windows
        )
        nothing = Span("", 0.0, null_start, null_end, 0, 0)
        best = spans[0] if spans else nothing
        rank = sum(span.score >= null_score for span in spans)
        if self.null:
            spans.insert(rank, nothing)
            del spans[max(self.nbest, rank + 1) :]
        chances = softmax(np.array([span.score for span in spans])).tolist() if spans else []
        listed = [replace(span, probability=p) for span, p in zip(spans, chances, strict=True)]
        best = next((span for span in listed if span.text == best.text), best)
        none = listed[rank].probability if self.null else 0.0
        odds = null_score - best.score
        return Answer(
            best.text, best.start, best.end, best.probability, none, odds, best, tuple(listed)
        )

    def decided(self, results: Results) -> list[Any]:
        return [self.with_answer(result) for result in results]

    def with_answer(self, result: Answer) -> Answer:
        """Return a result with its best span as the answer, or without one above the threshold."""
        best = result.best
        if best.text and not (self.null and result.null_odds > self.threshold):
            start, end, chance = best.start, best.end, best.probability
            return replace(result, answer=best.text, start=start, end=end, probability=chance)
        chance = result.no_answer_probability if self.null else best.probability
        return replace(result, answer="", start=None, end=None, probability=chance)

    def gold_value(self, example: QuestionExample) -> Any:
        return tuple(answer.text for answer in example.answers or ())

    def score(self, inputs: Inputs, results: Results) -> Metrics:
        return squad_scores(inputs, [result.answer for result in results])

    def baseline(self, inputs: Inputs) -> Metrics:
        """Never an answer in 2.0, the whole context in 1.1."""
        return squad_scores(inputs, ["" if self.null else e.context for e in inputs])

    def calibrated(self, inputs: Inputs, results: Results) -> Self:
        """Return the task with the threshold of the best F1, if some have none (section 4.3)."""
        if not (self.null and any(example.answers == () for example in inputs)):
            return self
        odds = [result.null_odds for result in results]
        lowest = best_threshold(inputs, [result.best.text for result in results], odds)
        # All thresholds up to the next odds score the same; take the middle for new questions.
        above = min((value for value in odds if value > lowest), default=math.inf)
        middle = (lowest + above) / 2
        return replace(self, threshold=middle if middle < above else lowest)


def candidates(
    window: SpanWindow, logits: np.ndarray, limit: int | None, max_answer_length: int
) -> np.ndarray:
    """Return the candidates of a window, (spans, 4): start and end logit, start and end character.

    They are made of its `limit` best starts and ends (None: all), ordered by the rank of the start,
    then of the end; of equal logits the earlier token comes first. `logits` is (tokens, 2).
    """
    start, end = logits[window.first : window.first + len(window.offsets)].T
    first = np.argsort(-start, kind="stable")[:limit]
    first = first[window.owned[first]]
    last = np.argsort(-end, kind="stable")[:limit]
    length = last - first[:, None]
    rows, columns = np.nonzero((length >= 0) & (length < max_answer_length))
    first, last = first[rows], last[columns]
    return np.stack(
        [start[first], end[last], window.offsets[first, 0], window.offsets[last, 1]], axis=1
    )


def distinct_spans(offered: np.ndarray, context: str, nbest: int) -> list[Span]:
    """Return the `nbest` best distinct texts among (spans, 4) candidates, the best first."""
    spans: dict[str, Span] = {}
    for index in np.argsort(-(offered[:, 0] + offered[:, 1]), kind="stable"):
        start_logit, end_logit, start, end = offered[index].tolist()
        start, end = int(start), int(end)
        while end < len(context) and unicodedata.category(context[end]) == "Mn":
            end += 1  # accents of the last letter, which an uncased tokenizer drops
        text = context[start:end]
        if text not in spans:
            spans[text] = Span(text, 0.0, start_logit, end_logit, start, end)
            if len(spans) == nbest:
                break
    return list(spans.values())
