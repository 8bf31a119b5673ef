"""Questions and contexts to windows, answers to tokens, and start and end logits to answers.

BERT paper, sections 4.2 and 4.3, as google-research/bert `run_squad.py` fills in the details: a
context that is too long becomes overlapping windows, and a token that is in several of them may
begin an answer only in the one where it has the most context on both sides. Tokens carry exact
character offsets, so answers are slices of the raw context; the original had to search for them.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from bertkit.datasets.examples import GoldAnswer
from bertkit.errors import BertkitError
from bertkit.tokenizer.wordpiece import Tokenizer

USUAL_STRIDE = 128
REMEMBERED_CONTEXTS = 64  # the questions of a paragraph follow each other
LENGTH_BONUS = 0.01  # for the max-context score, per token of a window


class SpanWindow(NamedTuple):
    """`[CLS] question [SEP] part of the context [SEP]`; n tokens of it are context."""

    ids: np.ndarray
    """(first + n + 1,) int32."""
    first: int
    """Length of segment 0, the first [SEP] with it; the context begins at this token."""
    offsets: np.ndarray
    """(n, 2) int32: half-open character spans of the context's tokens in the raw context."""
    best_context: np.ndarray
    """(n,) bool: whether this of all windows gives the token the most context."""
    reach: tuple[int, int]
    """The characters between the token before this part and the token after it."""


class Windows(NamedTuple):
    """All windows of a question, and how many tokens the question lost (0: it is whole)."""

    windows: tuple[SpanWindow, ...]
    question_cut: int


class EncodedContext(NamedTuple):
    """A context's ids, (tokens,) int32, and offsets, (tokens, 2) int32; both are read-only."""

    ids: np.ndarray
    offsets: np.ndarray


class Span(NamedTuple):
    """A possible answer: `context[start:end]`; no answer is the text "" at 0."""

    text: str
    probability: float
    """Among the n best."""
    start_logit: float
    end_logit: float
    start: int
    end: int

    @property
    def score(self) -> float:
        """Start logit plus end logit."""
        return self.start_logit + self.end_logit


class Decoded(NamedTuple):
    """What the logits of a question's windows say."""

    text: str
    """The best answer that is not empty; "" only where the context has no tokens."""
    start: int
    end: int
    """Half-open character span of `text` in the context."""
    score: float
    """Start logit plus end logit of `text`."""
    null_score: float
    """The same at [CLS], in the window where it is lowest."""
    no_answer_probability: float
    """Of "" among the n best; 0 where no answer is not allowed."""
    nbest: tuple[Span, ...]
    """Sorted by score; "" is among them where no answer is allowed."""

    @property
    def null_odds(self) -> float:
        """`null_score - score`; the answer is "" if and only if it is above the threshold."""
        return self.null_score - self.score


@lru_cache(maxsize=REMEMBERED_CONTEXTS)
def encode_context(context: str, tokenizer: Tokenizer) -> EncodedContext:
    """The tokens of a context; the last few contexts are remembered."""
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
    """Cut a context into overlapping windows behind the question.

    Args:
        question: its first `max_question_length` tokens are used.
        context: of any length; one without tokens gets one window without any.
        tokenizer: should give offsets that never decrease, as ours do.
        max_length: tokens of a window, [CLS] and both [SEP] with them.
        stride: context tokens from the start of a window to the start of the next. If a window has
            room for fewer, they lie end to end. 0 for 128, or 3/4 of the room where that is less,
            so that windows of any length overlap.
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
    """Context tokens from one window to the next where none are asked for, so that all overlap."""
    return max(1, min(USUAL_STRIDE, room - max(1, room // 4)))


def check_lengths(max_length: int, stride: int, max_question_length: int) -> None:
    """Refuse settings under which a long question would leave no token to the context."""
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
    """For each window and token, whether no other window gives the token more context.

    The context of a token is the smaller of the numbers of tokens to its left and right, plus 0.01
    for each token of the window; the first of equal windows wins (`run_squad.py`, line 542).
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
    """First and last token of an answer, counted from [CLS]; the tightest that cover it.

    None if a token of the answer lies outside of the window, or if it has none (it consists of
    characters that the tokenizer drops). The target of such a window is [CLS], (0, 0), for SQuAD
    1.1 too.
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
    nbest: int = 20,
    max_answer_length: int = 30,
    null: bool = False,
) -> Decoded:
    """The best spans over all windows of one question.

    A window offers its `nbest` best starts times its `nbest` best ends among the context's tokens;
    where none of them fit together, all starts and ends. A span must begin at a token with
    `best_context`, must not end before it begins, and has at most `max_answer_length` tokens. Of
    spans with the same text the best counts.

    Args:
        windows: of `make_windows`.
        start_logits: one array for each window, (tokens of the window,).
        end_logits: the same.
        context: the raw text.
        nbest: how many spans to list.
        max_answer_length: tokens.
        null: whether "no answer" is one of the answers (SQuAD 2.0).

    Raises:
        BertkitError: a logit is not a finite number.
    """
    starts = [np.asarray(logits, dtype=np.float64) for logits in start_logits]
    ends = [np.asarray(logits, dtype=np.float64) for logits in end_logits]
    for window, start, end in zip(windows, starts, ends, strict=True):
        assert len(start) == len(end) == len(window.ids)
        if not (np.isfinite(start).all() and np.isfinite(end).all()):
            raise BertkitError("the model gives logits that are not finite; its training diverged")

    def offered(every: bool) -> list[Span]:
        rows = zip(windows, starts, ends, strict=True)
        found = [candidates(*row, nbest, max_answer_length, every=every) for row in rows]
        return best_spans(np.concatenate(found), context, nbest)

    spans = offered(every=False) or offered(every=True)
    nulls = [(start[0] + end[0], start[0], end[0]) for start, end in zip(starts, ends, strict=True)]
    null_score, null_start, null_end = map(float, min(nulls))
    best = spans[0] if spans else Span("", 0.0, null_start, null_end, 0, 0)
    if null:
        rank = sum(span.score >= null_score for span in spans)
        spans.insert(rank, Span("", 0.0, null_start, null_end, 0, 0))
        del spans[max(nbest, rank + 1) :]
    listed = with_probabilities(spans)
    return Decoded(
        text=best.text,
        start=best.start,
        end=best.end,
        score=best.score,
        null_score=null_score,
        no_answer_probability=listed[rank].probability if null else 0.0,
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
    """The spans that a window offers, (spans, 4): both logits, first and last character.

    They are made of its `nbest` best starts and ends, or of every start and end.

    They stand in the order of the starts' ranks, then of the ends'; of equal logits the earlier
    token comes first. The caller's stable sort keeps this order among equal sums.
    """
    part = slice(window.first, window.first + len(window.offsets))
    taken = None if every else nbest
    first = np.argsort(-start[part], kind="stable")[:taken]
    last = np.argsort(-end[part], kind="stable")[:taken]
    first = first[window.best_context[first]]
    length = last[None, :] - first[:, None]
    rows, columns = np.nonzero((length >= 0) & (length < max_answer_length))
    first, last = first[rows], last[columns]
    return np.stack(
        [start[part][first], end[part][last], window.offsets[first, 0], window.offsets[last, 1]],
        axis=1,
    )


def best_spans(offered: np.ndarray, context: str, nbest: int) -> list[Span]:
    """The `nbest` best texts of (spans, 4) candidates, the best first."""
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
    """The spans with the softmax of their scores."""
    if not spans:
        return ()
    scores = np.array([span.score for span in spans])
    weights = np.exp(scores - scores.max())
    probabilities = (weights / weights.sum()).tolist()
    return tuple(
        span._replace(probability=probability)
        for span, probability in zip(spans, probabilities, strict=True)
    )
