"""Answering a question by a span of its context (paper sections 4.2 and 4.3; SQuAD 1.1 and 2.0).

A start vector and an end vector score every token; training maximises the probability of the right
start and end among the tokens of the window, and [CLS] means "no answer here" (in a left-to-right
network, the scores of [CLS] are read at the last [SEP]: see `SpanModel`). `spans.py` makes the
windows, aligns answers with their tokens and decodes spans. With the head "conditional", the end is
predicted given the start (see `add_conditional_end`): in training given the right one, and in
predictions given each of the best ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bertkit.datasets.examples import GoldAnswer, QuestionExample
from bertkit.files import write_json
from bertkit.model.encoder import ModelConfig
from bertkit.model.task_heads import PAIR_WIDTH, SpanModel
from bertkit.objectives import LossSum, Sums
from bertkit.tasks.classification import in_packed_order
from bertkit.tasks.metrics import best_threshold, squad_scores
from bertkit.tasks.spans import FoundAnswer, Span, SpanWindow, align, decode, make_windows
from bertkit.tasks.task import (
    Encoded,
    Item,
    ItemPart,
    Items,
    PredictedSplit,
    Task,
    TaskBatch,
    TaskInputs,
)
from bertkit.tasks.windows import QuestionWindows
from bertkit.tokenizer.wordpiece import Tokenizer

NO_ANSWER = (0, 0)
"""The target (start, end) of a window without the answer: the index of [CLS]."""


class SpanTarget(NamedTuple):
    """The first and last token of the answer in a window, and the window for decoding."""

    start: int
    end: int
    window: SpanWindow


@dataclass(frozen=True)
class QuestionAnswering(Task):
    """A task that answers each question with a span of its context, or with no answer."""

    null: bool = False
    """Whether questions may have no answer (SQuAD 2.0)."""
    threshold: float = 0.0
    """The null odds above which a question gets no answer."""
    max_length: int = 384
    stride: int = 0
    """The number of context tokens from one window to the next; see `spans.make_windows`."""
    max_question_length: int = 64
    nbest: int = 20
    max_answer_length: int = 30
    """The maximum tokens of a predicted answer; longer ones are used in training, as in the
    published code."""
    task_type = "question-answering"
    labels = ("start", "end")
    metric = "f1"

    @classmethod
    def from_data(cls, data: TaskInputs) -> Self:
        """See `Task`."""
        windows = data.windows
        return cls(
            null=any(given.answers == () for given in data.train),
            max_length=data.max_length,
            stride=windows.stride,
            max_question_length=windows.max_question_length
            or usual_question_length(data.max_length),
            max_answer_length=windows.max_answer_length,
        )

    @classmethod
    def foreign_settings(cls, max_length: int, labels: Sequence[str]) -> dict[str, Any]:
        """See `Task`; windows are as in the paper."""
        window = QuestionWindows().length(max_length)
        return {"max_length": window, "max_question_length": usual_question_length(window)}

    def build(self, config: ModelConfig) -> SpanModel:
        """See `Task`."""
        return SpanModel(config)

    def items(self, inputs: Sequence[QuestionExample], tokenizer: Tokenizer) -> Items:
        """See `Task`; every window is a separate item, as in the published code.

        Windows are made before the shuffle; a window without the answer has [CLS] as its target.
        """
        items, windowed, cut, unaligned, empty, long = [], 0, 0, 0, 0, 0
        for i, given in enumerate(inputs):
            made = make_windows(
                given.question,
                given.context,
                tokenizer,
                max_length=self.max_length,
                stride=self.stride,
                max_question_length=self.max_question_length,
            )
            windowed += len(made.windows) > 1
            cut += made.question_cut > 0
            first = made.windows[0]
            empty += first.first == 2 or not len(first.offsets)  # [CLS] and [SEP] alone
            spans = first_aligned(given.answers or (), made.windows)
            unaligned += any(answer.start >= 0 for answer in given.answers or ()) and not any(spans)
            found = [span for span in spans if span]
            long += bool(found) and all(b - a >= self.max_answer_length for a, b in found)
            for window, span in zip(made.windows, spans, strict=True):
                target = SpanTarget(*(span or NO_ANSWER), window)
                items.append(Item(i, [ItemPart((Encoded(window.ids, window.first),), target)]))
        lost = {
            f"questions cut at {self.max_question_length} tokens": cut,
            "answers in no window whole": unaligned,
            f"answers of more than {self.max_answer_length} tokens, never given": long,
            "questions without tokens, or with a context without": empty,
        }
        return Items(items, len(inputs), windowed, lost)

    def targets(
        self, parts: Sequence[ItemPart], place: np.ndarray, starts: np.ndarray
    ) -> tuple[dict[str, Tensor], dict[str, int]]:
        """See `Task`; "spans" (sequences, 2) has start and end in each window, [CLS] being 0."""
        spans = in_packed_order([part.target[:2] for part in parts], place, np.int64)
        return {"spans": spans}, {"windows": len(parts)}

    def objective(self, model: nn.Module, batch: TaskBatch) -> Sums:
        """See `Task`; the loss is the mean of the cross entropies of start and end."""
        logits = model(batch.packed).float()
        packed = batch.packed
        rows, spans = packed.owners, batch.tensors["spans"]
        logits, pairs = logits[:, :2], logits[:, 2:]
        if pairs.shape[1]:  # ends given the right starts
            query, key = pairs.chunk(2, dim=-1)
            starts = packed.first_tokens + spans[:, 0]
            product = (query[starts][rows] * key).sum(dim=-1) / math.sqrt(PAIR_WIDTH)
            logits = torch.stack([logits[:, 0], logits[:, 1] + product], dim=-1)
        table = logits.new_full((len(spans), packed.max_seqlen, 2), -torch.inf)
        table = table.index_put((rows, packed.position_ids), logits)
        losses = F.cross_entropy(table, spans, reduction="sum") / 2
        return {"loss": LossSum(losses, "windows")}

    def decode(
        self, inputs: Sequence[QuestionExample], items: Items, outputs: Sequence[list[np.ndarray]]
    ) -> list[FoundAnswer]:
        """See `Task`; the threshold is not applied here but in `plain`."""
        windows: list[list[SpanWindow]] = [[] for _ in inputs]
        logits: list[list[np.ndarray]] = [[] for _ in inputs]
        for item, [output] in zip(items.items, outputs, strict=True):
            windows[item.input].append(item.parts[0].target.window)
            logits[item.input].append(output)
        return [
            decode(
                own,
                [row[:, 0] for row in rows],
                rows,
                given.context,
                ends_of=end_scores,
                nbest=self.nbest,
                max_answer_length=self.max_answer_length,
                null=self.null,
            )
            for given, own, rows in zip(inputs, windows, logits, strict=True)
        ]

    def plain(self, prediction: FoundAnswer) -> str:
        """See `Task`; the text of the answer after applying the threshold, "" for no answer."""
        none = self.null and prediction.null_odds > self.threshold
        return "" if none else prediction.text

    def official_files(self, folder: Path, done: PredictedSplit) -> list[Path]:
        """See `Task`; predictions.json, nbest_predictions.json and, for 2.0, null_odds.json."""
        pairs = list(zip(done.inputs, done.predictions, strict=True))
        return write_predictions(
            folder / done.split,
            {given.id: self.plain(found) for given, found in pairs},
            {given.id: found.null_odds for given, found in pairs} if self.null else None,
            {given.id: found.nbest for given, found in pairs},
        )

    def answered(self, prediction: FoundAnswer) -> dict[str, Any]:
        """Return the answer after the threshold, its character span and its probability."""
        text = self.plain(prediction)
        none = self.null and not text
        return {
            "answer": text,
            "start": prediction.start if text else None,
            "end": prediction.end if text else None,
            "probability": prediction.no_answer_probability if none else prediction.probability,
        }

    def score(
        self, inputs: Sequence[QuestionExample], predictions: Sequence[FoundAnswer]
    ) -> dict[str, float]:
        """See `Task`; exact match and F1 by the official rules, for 2.0 also by answerability."""
        texts = {i.id: self.plain(p) for i, p in zip(inputs, predictions, strict=True)}
        return named_scores(inputs, texts)

    def baseline(self, inputs: Sequence[QuestionExample]) -> dict[str, float]:
        """See `Task`; never an answer in 2.0, the whole context in 1.1."""
        texts = {given.id: "" if self.null else given.context for given in inputs}
        return named_scores(inputs, texts)

    def calibrated(
        self, inputs: Sequence[QuestionExample], predictions: Sequence[FoundAnswer]
    ) -> Self:
        """Return the task with the threshold of the best F1 on these questions (section 4.3).

        If all questions have an answer, every high threshold is best, so it is not changed.
        """
        if not (self.null and any(given.answers == () for given in inputs)):
            return self
        pairs = list(zip(inputs, predictions, strict=True))
        odds = {i.id: p.null_odds for i, p in pairs}
        best = best_threshold(inputs, {i.id: p.text for i, p in pairs}, odds)
        lowest = float(best["best_f1_threshold"])
        # All thresholds up to the next odds score the same; take the middle for new questions.
        above = min((value for value in odds.values() if value > lowest), default=math.inf)
        middle = (lowest + above) / 2
        return replace(self, threshold=middle if middle < above else lowest)

    def remarks(self, inputs: Sequence[QuestionExample], *, choosing: bool = False) -> list[str]:
        """See `Task`; notes on questions that always score 0 and on a threshold not chosen."""
        none = sum(given.answers == () for given in inputs)
        if none and not self.null:
            return [f"{none:,} questions have no answer in their context, and the model gives one"]
        if choosing and self.null and not none:
            return ["all questions have an answer, so the threshold for no answer stays at 0"]
        return []

    def degenerate(
        self, inputs: Sequence[QuestionExample], predictions: Sequence[FoundAnswer]
    ) -> str:
        """See `Task`; no answer to any question, or all answers start at the same character."""
        texts = {self.plain(prediction) for prediction in predictions}
        wanted = [{answer.start for answer in given.answers} for given in inputs if given.answers]
        if texts == {""}:
            return "finds no answer to any question" if wanted else ""
        starts = {prediction.start for prediction in predictions}
        same = len(starts) == 1 < len(predictions) and not all(starts & places for places in wanted)
        return "answers with the same position in every context" if same else ""

    def row(self, given: QuestionExample, prediction: FoundAnswer) -> dict[str, Any]:
        """See `Task`."""
        return {
            "id": given.id,
            **self.answered(prediction),
            "no_answer_probability": prediction.no_answer_probability,
            "null_odds": prediction.null_odds,
        }


SCORE_NAMES = {"f1": "f1", "exact": "exact_match", "HasAns_f1": "answerable_f1",
               "HasAns_exact": "answerable_exact_match",
               "NoAns_exact": "unanswerable_accuracy"}  # fmt: skip
"""Score of the official programs -> its name here."""


def named_scores(inputs: Sequence[QuestionExample], texts: Mapping[str, str]) -> dict[str, float]:
    """Return the official scores of answers by id, as fractions, under our names."""
    found = squad_scores(inputs, texts)
    return {name: found[key] / 100 for key, name in SCORE_NAMES.items() if key in found}


def end_scores(outputs: np.ndarray) -> np.ndarray:
    """Return how well each token of a window ends an answer.

    Args:
        outputs: the outputs of a `SpanModel`, (tokens, 2) or (tokens, 2 + 2 * PAIR_WIDTH).

    Returns:
        The end logits, (tokens,); or for conditional ends the logarithms of their probabilities
        given a start, (starts, tokens).
    """
    ends, pairs = outputs[:, 1], outputs[:, 2:]
    if not pairs.shape[1]:
        return ends
    query, key = np.split(pairs, 2, axis=1)
    scores = ends + query @ key.T / math.sqrt(PAIR_WIDTH)
    scores -= scores.max(axis=1, keepdims=True)
    scores -= np.log(np.exp(scores).sum(axis=1, keepdims=True))
    return scores


def usual_question_length(max_length: int) -> int:
    """Return the default maximum question length in tokens: 64, or half of a short window."""
    return min(QuestionAnswering.max_question_length, max(8, max_length // 2))


def first_aligned(
    answers: Sequence[GoldAnswer], windows: Sequence[SpanWindow]
) -> list[tuple[int, int] | None]:
    """Align the first answer that some window contains; return its (start, end) in each or None.

    Training files have one answer per question; of several, any is right.
    """
    for answer in answers:
        spans = [align(answer, window) for window in windows]
        if any(spans):
            return spans
    return [None] * len(windows)


def write_predictions(
    folder: Path,
    predictions: Mapping[str, str],
    null_odds: Mapping[str, float] | None,
    nbest: Mapping[str, Sequence[Span]],
) -> list[Path]:
    """Write predictions.json, nbest_predictions.json and, unless None, null_odds.json.

    The official programs read predictions.json and null_odds.json. The n-best spans are objects
    with the fields of `Span`.

    Returns:
        The written files.

    Raises:
        BertkitError: the folder cannot be written.
    """
    spans = {question_id: [span._asdict() for span in own] for question_id, own in nbest.items()}
    contents: dict[str, Any] = {"nbest_predictions": spans, "predictions": dict(predictions)}
    if null_odds is not None:
        contents["null_odds"] = dict(null_odds)
    for name, content in contents.items():
        write_json(folder / f"{name}.json", content)
    return [folder / f"{name}.json" for name in sorted(contents)]
