"""Inputs longer than the model become windows: overlapping parts that together hold every token.

Texts and pairs (classification, regression, multiple choice; question answering has its own rules
in `spans.py`):

- One text becomes windows of the maximum length, each `stride` tokens after the one before.
- Of a pair, the shorter text stays whole if it takes at most half of the room, and the longer one
  is windowed. Otherwise both are windowed, each in half of the room, and window i of the one is
  paired with the window of the other at the same relative position.
- In training each window is an example with the label of its input and the weight 1 / windows.
- The output of an input is the mean of the outputs (logits) of its windows.

Words for tagging (paper section 5.3): the first token of a word carries its loss and its
prediction; its other tokens are read only. A word without any token (control characters, an empty
string) is read as [UNK]. A word is trained and predicted only in the window in which it has the
most context on its shorter side, so every word is answered exactly once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import ClassVar, NamedTuple

import numpy as np

from bertkit.datasets.examples import WordsExample
from bertkit.errors import BertkitError, nearest
from bertkit.tasks.task import Encoded, ItemPart
from bertkit.tokenizer.wordpiece import Tokenizer

OVERLAP = 4
"""Where no stride is given, neighbouring windows share 1 / OVERLAP of their room."""


CONTEXTS = ("sentence", "document")


@dataclass(frozen=True, kw_only=True)
class WindowLengths:
    """How long sequences are; longer inputs become several windows."""

    max_length: int = 0
    """Tokens of a window; 0 for all that the model can take (384 in question answering)."""
    stride: int = 0
    """Tokens from one window to the next; 0 for 3/4 of the room (128 at most in question
    answering)."""
    longest: ClassVar[int | None] = None
    """The default length where the paper's windows are shorter than the model allows."""

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            BertkitError: names the flag.
        """
        check_window_lengths(self.max_length, self.stride)

    def length(self, positions: int) -> int:
        """Tokens of a window for a model with so many positions.

        Raises:
            BertkitError: the model has fewer positions than were asked for, or the stride is too
                long.
        """
        if self.max_length > positions:
            raise BertkitError(
                f"windows of {self.max_length} tokens do not fit the model's {positions} "
                "positions; lower --max-length"
            )
        max_length = self.max_length or min(self.longest or positions, positions)
        check_stride(self.stride, max_length)
        return max_length


@dataclass(frozen=True, kw_only=True)
class QuestionWindows(WindowLengths):
    """How long the windows of questions with their contexts are."""

    max_question_length: int = 0
    """Longer questions are cut here, and counted; 0 for 64 tokens, as in the published code, or
    half of a window where that is less."""
    max_answer_length: int = 30
    """The most tokens that an answer has, as in the published code; longer ones in the data are
    counted."""
    longest = 384

    def __post_init__(self) -> None:
        """See `WindowLengths`."""
        super().__post_init__()
        if self.max_question_length < 0:
            raise BertkitError(
                f"--max-question-length must be 0 or more, got {self.max_question_length}"
            )
        if self.max_answer_length < 1:
            raise BertkitError(f"--max-answer-length must be above 0, got {self.max_answer_length}")


@dataclass(frozen=True, kw_only=True)
class WordWindows(WindowLengths):
    """How long the windows of tagged words are, and what stands in them."""

    context: str = "sentence"
    """sentence, or document, where every word sees the sentences around its own, too."""

    def __post_init__(self) -> None:
        """See `WindowLengths`."""
        super().__post_init__()
        check_context(self.context)


def check_context(context: str) -> None:
    """Refuse what is no context.

    Raises:
        BertkitError: names those that there are.
    """
    if context not in CONTEXTS:
        raise BertkitError(f"no context is '{context}'{nearest(context, CONTEXTS)}")


def check_window_lengths(max_length: int, stride: int) -> None:
    """Refuse numbers that are no lengths; 0 is for the default.

    Raises:
        BertkitError: names the flag.
    """
    for name, value in (("max_length", max_length), ("stride", stride)):
        if value < 0:
            raise BertkitError(f"--{name} must be above 0, or 0 for the default; got {value}")


def check_stride(stride: int, max_length: int) -> None:
    """Refuse a stride that leaves no overlap: tokens at the ends of windows would lack context.

    Raises:
        BertkitError: it is as long as a window or longer.
    """
    if stride >= max_length:
        raise BertkitError(
            f"--stride {stride} must be below the {max_length} tokens of a window; choose a lower "
            "one, or 0 for the default",
            code="stride",
        )


def cut_into_windows(ids: Sequence[int], room: int, stride: int = 0) -> list[Sequence[int]]:
    """Parts of at most `room` ids that together hold all; the last one ends with the last id.

    Args:
        ids: of one text.
        room: the longest part, above 0.
        stride: from the start of a part to that of the next; 0 for 3/4 of the room.
    """
    step = min(stride, room) if stride else max(1, room - room // OVERLAP)
    starts = [0]
    while starts[-1] + room < len(ids):
        starts.append(min(starts[-1] + step, len(ids) - room))
    return [ids[start : start + room] for start in starts]


def text_windows(
    text: Sequence[int],
    pair: Sequence[int] | None,
    tokenizer: Tokenizer,
    max_length: int,
    stride: int = 0,
) -> list[Encoded]:
    """`[CLS] text [SEP]` or `[CLS] text [SEP] pair [SEP]`, in as many windows as it takes.

    Args:
        text: ids.
        pair: ids of the second text, or None.
        tokenizer: for [CLS] and [SEP].
        max_length: tokens that a sequence may have, special ones included.
        stride: see `cut_into_windows`.

    Raises:
        BertkitError: `max_length` leaves no room for text.
    """
    room = max_length - (2 if pair is None else 3)
    if room < 2:
        raise BertkitError(
            f"a length of {max_length} leaves no room for text; give at least 5 tokens"
        )
    parts: list[tuple[Sequence[int], Sequence[int] | None]]
    if pair is None:
        parts = [(window, None) for window in cut_into_windows(text, room, stride)]
    elif len(text) + len(pair) <= room:
        parts = [(text, pair)]
    else:
        parts = pair_windows(text, pair, room, stride)
    return [surround(first, second, tokenizer) for first, second in parts]


def pair_windows(
    text: Sequence[int], pair: Sequence[int], room: int, stride: int
) -> list[tuple[Sequence[int], Sequence[int] | None]]:
    """The windows of a pair that is too long for one."""
    shorter = min(len(text), len(pair))
    if shorter <= room // 2:
        left = room - shorter
        if len(text) > len(pair):
            return [(window, pair) for window in cut_into_windows(text, left, stride)]
        return [(text, window) for window in cut_into_windows(pair, left, stride)]
    firsts = cut_into_windows(text, room // 2, stride)
    seconds = cut_into_windows(pair, room - room // 2, stride)
    count = max(len(firsts), len(seconds))
    return [(firsts[at(i, count, firsts)], seconds[at(i, count, seconds)]) for i in range(count)]


def at(index: int, count: int, windows: Sequence[object]) -> int:
    """Which of `windows` stands at the same share of the way as number `index` of `count`."""
    return round(index * (len(windows) - 1) / max(1, count - 1))


def surround(text: Sequence[int], pair: Sequence[int] | None, tokenizer: Tokenizer) -> Encoded:
    """The sequence of one window."""
    ids = [tokenizer.cls_id, *text, tokenizer.sep_id]
    first = len(ids)
    if pair is not None:
        ids += [*pair, tokenizer.sep_id]
    return Encoded(np.array(ids, dtype=np.int32), first)


NO_TAG = -1


class WordTarget(NamedTuple):
    """The n words that a window answers, in order."""

    rows: np.ndarray
    """(n,) where the first piece of each is in the sequence, [CLS] being 0."""
    labels: np.ndarray
    """(n,) index of the tag; `NO_TAG` where the data has none."""
    inputs: np.ndarray
    """(n,) the sentence of each."""
    words: np.ndarray
    """(n,) its number in the sentence."""


class WordWindow(NamedTuple):
    """Neighbouring units of text that are read together."""

    first: int
    end: int
    """One after the last."""
    answered: np.ndarray
    """Those with more context here than in any other window, ascending."""


def context_windows(lengths: np.ndarray, room: int, stride: int = 0) -> list[WordWindow]:
    """Overlapping windows of whole units that together answer each unit exactly once.

    A window takes as many units as fit, and the next one shares its last `room - stride` pieces, or
    a little more, as units stay whole. It shares fewer where it could not hold the next unit else,
    and begins no later than is needed to reach the end. The context of a unit is the number of
    pieces on its shorter side within the window; of equals the first window answers. No units make
    one empty window.

    Args:
        lengths: (units,) pieces of each unit (word, or piece), from 1 to `room`.
        room: pieces that fit into a window.
        stride: pieces from one full window to the next; 0 for 3/4 of the room.
    """
    if len(lengths) == 0:
        return [WordWindow(0, 0, np.arange(0))]
    ends = np.cumsum(lengths)
    starts = ends - lengths
    spans: list[tuple[int, int]] = []
    first = 0
    shared = max(0, room - stride) if stride else min(room - 1, room // OVERLAP)
    while not spans or spans[-1][1] < len(lengths):
        end = int(np.searchsorted(ends, starts[first] + room, side="right"))
        spans.append((first, end))
        if end < len(lengths):
            sharing = np.searchsorted(starts, ends[end - 1] - shared, side="right") - 1
            holding_next = np.searchsorted(starts, ends[end] - room)
            reaching_end = np.searchsorted(starts, ends[-1] - room)
            first = int(min(max(sharing, holding_next), reaching_end))
    if len(spans) == 1:
        return [WordWindow(0, len(lengths), np.arange(len(lengths)))]
    best = np.full(len(lengths), -1)
    winner = np.zeros(len(lengths), dtype=np.int64)
    for number, (first, end) in enumerate(spans):
        left, right = starts[first:end] - starts[first], ends[end - 1] - ends[first:end]
        context = np.minimum(left, right)
        better = first + np.nonzero(context > best[first:end])[0]
        best[better] = context[better - first]
        winner[better] = number
    return [
        WordWindow(first, end, first + np.nonzero(winner[first:end] == number)[0])
        for number, (first, end) in enumerate(spans)
    ]


def word_tokens(
    inputs: Sequence[WordsExample], tokenizer: Tokenizer, room: int
) -> tuple[dict[str, list[int]], int]:
    """The ids of every different word, at least one and at most `room`; each is encoded once.

    Returns:
        Word -> ids, and how many inputs have a word that lost pieces.
    """
    words = list(dict.fromkeys(chain.from_iterable(given.words for given in inputs)))
    encoded = tokenizer.encode_batch(words)
    long = {word for word, ids in zip(words, encoded, strict=True) if len(ids) > room}
    pieces = {w: ids[:room] or [tokenizer.unk_id] for w, ids in zip(words, encoded, strict=True)}
    return pieces, sum(not long.isdisjoint(given.words) for given in inputs) if long else 0


def word_windows(
    group: Sequence[int],
    inputs: Sequence[WordsExample],
    pieces: Mapping[str, Sequence[int]],
    labels: Sequence[np.ndarray],
    tokenizer: Tokenizer,
    max_length: int,
    stride: int,
) -> list[tuple[int, ItemPart]]:
    """The windows of sentences that are read as one stream: `[CLS] words [SEP]`.

    A window that answers no word, as a very short stride makes some, is left out.

    Args:
        group: the numbers of the sentences.
        inputs: all sentences.
        pieces: of `word_tokens`.
        labels: of every sentence, (words,) indices of tags, or `NO_TAG`.
        tokenizer: for [CLS] and [SEP].
        max_length: tokens of a window, these two included.
        stride: see `context_windows`.

    Returns:
        The sentence that each window begins with, and the window; its target is a `WordTarget`.
    """
    words = [pieces[word] for i in group for word in inputs[i].words]
    if not words:
        return []
    lengths = np.array([len(word) for word in words])
    ids = np.array(list(chain.from_iterable(words)), dtype=np.int32)
    counts = [len(inputs[i].words) for i in group]
    owners = np.repeat(group, counts)
    numbers = np.concatenate([np.arange(count) for count in counts])
    known = np.concatenate([labels[i] for i in group])
    ends = np.cumsum(lengths)
    starts = ends - lengths
    found = []
    for first, end, answered in context_windows(lengths, max_length - 2, stride):
        if len(answered):
            inside = ids[starts[first] : ends[end - 1]]
            whole = np.array([tokenizer.cls_id, *inside, tokenizer.sep_id], dtype=np.int32)
            rows = 1 + starts[answered] - starts[first]
            target = WordTarget(rows, known[answered], owners[answered], numbers[answered])
            found.append((int(owners[first]), ItemPart((Encoded(whole, len(whole)),), target)))
    return found
