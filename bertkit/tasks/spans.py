"""Windows of questions with contexts, alignment of answers to tokens, and decoding of logits.

This follows sections 4.2 and 4.3 of the BERT paper, with the details of `run_squad.py` in
google-research/bert: a context that is too long becomes overlapping windows, and a token in several
windows may start an answer only in the one where it has the most context on both sides. Tokens have
exact character offsets, so answers are slices of the raw context; the original had to search for
them.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from bertkit.datasets.examples import GoldAnswer
from bertkit.errors import NOT_FINITE, BertkitError
from bertkit.tasks.classification import softmax
from bertkit.tasks.predictions import Prediction
from bertkit.tokenizer.wordpiece import Tokenizer

USUAL_STRIDE = 128
REMEMBERED_CONTEXTS = 64  # the questions of a paragraph are adjacent
LENGTH_BONUS = 0.01  # for the max-context score, per token of a window


class SpanWindow(NamedTuple):
    """A sequence `[CLS] question [SEP] part of the context [SEP]` with n context tokens."""

    ids: np.ndarray
    """(first + n + 1,) int32 token ids."""
    first: int
    """The length of segment 0 with its [SEP], which is the index of the first context token."""
    offsets: np.ndarray
    """(n, 2) int32 half-open character spans of the context tokens in the raw context."""
    best_context: np.ndarray
    """(n,) bool: whether this is the window that gives the token the most context."""
    reach: tuple[int, int]
    """The character span from the end of the token before this part to the start of the one after
    it."""


class Windows(NamedTuple):
    """All windows of a question, and the number of tokens cut from the question."""

    windows: tuple[SpanWindow, ...]
    question_cut: int


class EncodedContext(NamedTuple):
    """The ids, (tokens,) int32, and offsets, (tokens, 2) int32, of a context, both read-only."""

    ids: np.ndarray
    offsets: np.ndarray


class Span(NamedTuple):
    """A candidate answer, `context[start:end]`; "no answer" has the text "" and the span (0, 0)."""

    text: str
    probability: float
    """The probability among the n best."""
    start_logit: float
    end_logit: float
    """The logit of the end; or the logarithm of its probability given the start."""
    start: int
    end: int

    @property
    def score(self) -> float:
        """The sum of the start logit and the end logit."""
        return self.start_logit + self.end_logit


@dataclass(frozen=True, slots=True, repr=False)
class FoundAnswer(Prediction):
    """The best span of a context, and the probability that there is no answer."""

    text: str
    """The text of the best span, even if "no answer" scores higher; "" only if the context has no
    tokens."""
    start: int
    """The index of its first character in the context."""
    end: int
    """The index after its last character."""
    probability: float
    """The probability of the span within the n-best list."""
    no_answer_probability: float
    """The probability of no answer; 0 if the model was not trained on unanswerable questions."""
    null_odds: float
    """The score of no answer, at [CLS] in the window where it is lowest, minus that of the span;
    above the threshold there is no answer."""
    nbest: tuple[Span, ...]
    """The best spans, sorted by score; "" is among them if "no answer" is allowed."""


@lru_cache(maxsize=REMEMBERED_CONTEXTS)
def encode_context(context: str, tokenizer: Tokenizer) -> EncodedContext:
    """Encode a context; the results for the last few contexts are cached."""
    encoding = tokenizer.encode(context)
    ids = np.array(encoding.ids, dtype=np.int32)
    offsets = np.array(encoding.offsets, dtype=np.int32).reshape(-1, 2)
    ids.flags.writeable = offsets.flags.writeable = False
    return EncodedContext(ids, offsets)


def make_windows(
    question: str,
    context: str,
    tokenizer: Tokenizer,
    *,
    max_length: int = 384,
    stride: int = 0,
    max_question_length: int = 64,
) -> Windows:
    """Cut a context into overlapping windows, each behind the question.

    Args:
        question: the question; only its first `max_question_length` tokens are used.
        context: a context of any length; one without tokens gets one window without any.
        tokenizer: the model's tokenizer, whose offsets must never decrease.
        max_length: the maximum tokens of a window, including [CLS] and both [SEP].
        stride: the number of context tokens from the start of a window to that of the next. If a
            window has room for fewer, the windows are adjacent. 0 means 128, or 3/4 of the room if
            that is less, so that windows of any length overlap.
        max_question_length: see `question`.

    Raises:
        BertkitError: the lengths leave no room for the context.
    """
    check_lengths(max_length, stride, max_question_length)
    question_ids = tokenizer.encode_batch([question])[0]
    kept = question_ids[:max_question_length]
    head = np.array([tokenizer.cls_id, *kept, tokenizer.sep_id], dtype=np.int32)
    tail = np.array([tokenizer.sep_id], dtype=np.int32)
    ids, offsets = encode_context(context, tokenizer)
    count, room = len(ids), max_length - len(head) - 1
    step = min(stride, room) if stride else usual_step(room)
    starts = range(0, max(count - room, 0) + step, step)
    windows = []
    for start, best in zip(starts, best_contexts(count, starts, room), strict=True):
        end = min(start + room, count)
        reach = (
            int(offsets[start - 1, 1]) if start else 0,
            int(offsets[end, 0]) if end < count else len(context),
        )
        window_ids = np.concatenate([head, ids[start:end], tail])
        windows.append(SpanWindow(window_ids, len(head), offsets[start:end], best, reach))
    return Windows(tuple(windows), len(question_ids) - len(kept))


def usual_step(room: int) -> int:
    """Return the default stride for a window with this room, at which windows overlap."""
    return max(1, min(USUAL_STRIDE, room - max(1, room // 4)))


def check_lengths(max_length: int, stride: int, max_question_length: int) -> None:
    """Reject settings with which a long question would leave no room for the context."""
    if stride < 0 or max_question_length < 1:
        raise BertkitError(
            f"stride is {stride} and max_question_length {max_question_length}; give 0 or more, "
            "and 1 or more"
        )
    if max_length - max_question_length - 3 < 1:
        raise BertkitError(
            f"windows of {max_length} tokens have no room for the context behind a question of "
            f"{max_question_length} and 3 special tokens; raise --max-length or lower "
            "--max-question-length"
        )


def best_contexts(count: int, starts: range, room: int) -> list[np.ndarray]:
    """Return, for each window, a mask of the tokens that have the most context in that window.

    The context of a token is the smaller of the numbers of tokens to its left and right, plus 0.01
    for each token of the window; ties go to the first window (`run_squad.py`, line 542).
    """
    if len(starts) == 1:
        return [np.ones(count, dtype=bool)]
    best = np.full(count, -1.0)
    winner = np.zeros(count, dtype=np.int64)
    for index, start in enumerate(starts):
        part = slice(start, min(start + room, count))
        place = np.arange(part.stop - start)
        scores = np.minimum(place, place[::-1]) + LENGTH_BONUS * len(place)
        better = scores > best[part]
        best[part][better] = scores[better]
        winner[part][better] = index
    return [winner[start : start + room] == index for index, start in enumerate(starts)]


def align(answer: GoldAnswer, window: SpanWindow) -> tuple[int, int] | None:
    """Return the first and last token that cover an answer, counted from [CLS].

    Returns None if a token of the answer is outside the window, or if the answer has no token (the
    tokenizer drops all its characters). The target of such a window is [CLS], (0, 0), in SQuAD 1.1
    too.
    """
    start, end = answer.start, answer.start + len(answer.text)
    if start < window.reach[0] or end > window.reach[1]:
        return None
    first = int(np.searchsorted(window.offsets[:, 1], start, side="right"))
    last = int(np.searchsorted(window.offsets[:, 0], end, side="left")) - 1
    return (window.first + first, window.first + last) if first <= last else None


def decode(
    windows: Sequence[SpanWindow],
    start_logits: Sequence[np.ndarray],
    end_logits: Sequence[np.ndarray],
    context: str,
    *,
    ends_of: Callable[[np.ndarray], np.ndarray] = np.asarray,
    nbest: int = 20,
    max_answer_length: int = 30,
    null: bool = False,
) -> FoundAnswer:
    """Find the best spans over all windows of one question.

    The candidates are the pairs of the `nbest` best starts among the context tokens of each window
    and their `nbest` best ends; if no pair is valid, all starts and ends are tried. A span must
    start at a token with `best_context`, must not end before it starts, and has at most
    `max_answer_length` tokens. Of spans with the same text, only the best is kept.

    Args:
        windows: the windows from `make_windows`.
        start_logits: the start logits of each window, (tokens of the window,).
        end_logits: the end logits of each window, likewise; or (starts, tokens), those of each
            token for an answer that starts at each token.
        context: the raw text.
        ends_of: computes the end logits of a window from what is given for it; called when they are
            needed, since those given starts are many.
        nbest: the number of spans to list.
        max_answer_length: the maximum tokens of an answer.
        null: whether "no answer" is a possible answer (SQuAD 2.0).

    Raises:
        BertkitError: a logit is not a finite number.
    """

    def scored() -> Iterator[tuple[SpanWindow, np.ndarray, np.ndarray]]:
        for window, starts, given in zip(windows, start_logits, end_logits, strict=True):
            start = np.asarray(starts, dtype=np.float64)
            end = np.atleast_2d(np.asarray(ends_of(given), dtype=np.float64))
            assert len(start) == end.shape[1] == len(window.ids)
            if not (np.isfinite(start).all() and np.isfinite(end).all()):
                raise BertkitError(
                    "the model gives logits that are not finite; its training diverged",
                    code=NOT_FINITE,
                )
            yield window, start, end

    found, nulls = [], []
    for window, start, end in scored():
        found.append(candidates(window, start, end, nbest, max_answer_length, every=False))
        nulls.append((start[0] + end[0, 0], start[0], end[0, 0]))
    spans = best_spans(np.concatenate(found), context, nbest)
    if not spans:
        found = [candidates(*row, nbest, max_answer_length, every=True) for row in scored()]
        spans = best_spans(np.concatenate(found), context, nbest)
    null_score, null_start, null_end = map(float, min(nulls))
    best = spans[0] if spans else Span("", 0.0, null_start, null_end, 0, 0)
    if null:
        rank = sum(span.score >= null_score for span in spans)
        spans.insert(rank, Span("", 0.0, null_start, null_end, 0, 0))
        del spans[max(nbest, rank + 1) :]
    listed = with_probabilities(spans)
    return FoundAnswer(
        text=best.text,
        start=best.start,
        end=best.end,
        probability=next((one.probability for one in listed if one.text == best.text), 0.0),
        no_answer_probability=listed[rank].probability if null else 0.0,
        null_odds=null_score - best.score,
        nbest=listed,
    )


def candidates(
    window: SpanWindow,
    start: np.ndarray,
    end: np.ndarray,
    nbest: int,
    max_answer_length: int,
    *,
    every: bool,
) -> np.ndarray:
    """Return the candidates of a window, (spans, 4): start and end logit, start and end character.

    They are made of its `nbest` best starts and ends, or of `every` start and end; `start` is
    (tokens,) and `end` (1, tokens), or (starts, tokens) for ends that depend on the start.

    They are ordered by the rank of the start, then of the end; of equal logits the earlier token
    comes first. The caller's stable sort keeps this order among equal sums.
    """
    part = slice(window.first, window.first + len(window.offsets))
    taken = None if every else nbest
    first = np.argsort(-start[part], kind="stable")[:taken]
    first = first[window.best_context[first]]
    end = end[:, part] if len(end) == 1 else end[part, part][first]
    last = np.argsort(-end, axis=1, kind="stable")[:, :taken]
    length = last - first[:, None]
    rows, columns = np.nonzero((length >= 0) & (length < max_answer_length))
    last = np.broadcast_to(last, length.shape)[rows, columns]
    ends = np.broadcast_to(end, (len(first), end.shape[1]))[rows, last]
    first = first[rows]
    return np.stack(
        [start[part][first], ends, window.offsets[first, 0], window.offsets[last, 1]], axis=1
    )


def best_spans(offered: np.ndarray, context: str, nbest: int) -> list[Span]:
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


def with_probabilities(spans: Sequence[Span]) -> tuple[Span, ...]:
    """Set the probabilities of spans to the softmax of their scores."""
    if not spans:
        return ()
    chances = softmax(np.array([span.score for span in spans])).tolist()
    return tuple(
        span._replace(probability=chance) for span, chance in zip(spans, chances, strict=True)
    )
