"""Windows for inputs longer than the model: overlapping parts that together contain every token.

Texts and pairs (classification, regression, multiple choice; question answering has other rules in
`spans.py`):

- One text becomes windows of the maximum length, each `stride` tokens after the previous one.
- Of a pair, the shorter text stays whole if it takes at most half of the room, and the longer one
  is windowed. Otherwise both are windowed, each in half of the room, and window i of one is paired
  with the window of the other at the same relative position.
- In training, each window is an example with the label of its input and the weight 1 / windows.
- The output for an input is the mean of the outputs (logits) of its windows.

Words for tagging (paper section 5.3): the loss and the prediction of a word are at its first token;
its other tokens are only context. A word without any token (control characters, an empty string)
becomes [UNK]. A word is trained and predicted only in the window in which it has the most context
on its shorter side, hence exactly once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import ClassVar, NamedTuple

import numpy as np

from bertkit.datasets.examples import WordsExample
from bertkit.errors import BertkitError, check_known
from bertkit.tasks.task import Encoded, ItemPart
from bertkit.tokenizer.wordpiece import Tokenizer

OVERLAP = 4
"""Without a stride, neighbouring windows share 1 / OVERLAP of their room."""
CONTEXTS = ("sentence", "document")


@dataclass(frozen=True, kw_only=True)
class WindowLengths:
    """The length of sequences; longer inputs become several windows."""

    max_length: int = 0
    """Maximum tokens of a window; 0 for the model's maximum (384 in question answering)."""
    stride: int = 0
    """Tokens from one window to the next; 0 for 3/4 of the room (at most 128 in question
    answering)."""
    longest: ClassVar[int | None] = None
    """The default length if the paper's windows are shorter than the model allows, else None."""

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            BertkitError: a number is negative; the message names the flag.
        """
        check_window_lengths(self.max_length, self.stride)

    def length(self, positions: int) -> int:
        """Return the maximum tokens of a window for a model with this number of positions.

        Raises:
            BertkitError: `max_length` exceeds the positions, or the stride is too long.
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
    """The lengths of windows of questions with their contexts."""

    max_question_length: int = 0
    """Maximum tokens of a question; longer ones are cut and counted. 0 for 64, as in the published
    code, or half of a window if that is less."""
    max_answer_length: int = 30
    """Maximum tokens of a predicted answer, as in the published code; longer answers in the data
    are counted."""
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
    """The lengths of windows of tagged words, and what a window may span."""

    context: str = "sentence"
    """sentence, or document, in which every word also sees the surrounding sentences."""

    def __post_init__(self) -> None:
        """See `WindowLengths`."""
        super().__post_init__()
        check_known("context", self.context, CONTEXTS)


def check_window_lengths(max_length: int, stride: int) -> None:
    """Check that lengths are not negative; 0 is for the default.

    Raises:
        BertkitError: a number is negative; the message names the flag.
    """
    for flag, value in (("--max-length", max_length), ("--stride", stride)):
        if value < 0:
            raise BertkitError(f"{flag} must be above 0, or 0 for the default; got {value}")


def check_stride(stride: int, max_length: int) -> None:
    """Reject a stride without overlap, since tokens at the ends of windows would lack context.

    Raises:
        BertkitError: the stride is at least as long as a window.
    """
    if stride >= max_length:
        raise BertkitError(
            f"--stride {stride} must be below the {max_length} tokens of a window; choose a lower "
            "one, or 0 for the default",
            code="stride",
        )


def cut_into_windows(ids: Sequence[int], room: int, stride: int = 0) -> list[Sequence[int]]:
    """Cut ids into parts of at most `room` that together hold all; the last ends at the last id.

    Args:
        ids: the token ids of one text.
        room: the maximum length of a part, above 0.
        stride: the distance from the start of a part to that of the next; 0 for 3/4 of the room.
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
    """Make the windows `[CLS] text [SEP]` or `[CLS] text [SEP] pair [SEP]` of an input.

    Args:
        text: the token ids of the text.
        pair: the token ids of the second text; without any there is only one text, as in the
            published code.
        tokenizer: the model's tokenizer, for [CLS] and [SEP].
        max_length: the maximum tokens of a sequence, including special tokens.
        stride: see `cut_into_windows`.

    Raises:
        BertkitError: `max_length` leaves no room for text.
    """
    room = max_length - (3 if pair else 2)
    if room < 2:
        least = max_length + 2 - room
        raise BertkitError(
            f"a length of {max_length} leaves no room for text; give at least {least} tokens"
        )
    if not pair:
        cut = cut_into_windows(text, room, stride)
        return [surround(window, None, tokenizer) for window in cut]
    parts = pair_windows(text, pair, room, stride)
    return [surround(first, second, tokenizer) for first, second in parts]


def pair_windows(
    text: Sequence[int], pair: Sequence[int], room: int, stride: int
) -> list[tuple[Sequence[int], Sequence[int]]]:
    """Return the windows of a pair: one, if it fits into the room."""
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
    """Return the index in `windows` at the same relative position as `index` of `count`."""
    return round(index * (len(windows) - 1) / max(1, count - 1))


def surround(
    text: Sequence[int] | np.ndarray, pair: Sequence[int] | None, tokenizer: Tokenizer
) -> Encoded:
    """Add the special tokens to the texts of one window."""
    ids = [tokenizer.cls_id, *text, tokenizer.sep_id]
    first = len(ids)
    if pair is not None:
        ids += [*pair, tokenizer.sep_id]
    return Encoded(np.array(ids, dtype=np.int32), first)


NO_TAG = -1


class WordTarget(NamedTuple):
    """The n words that are predicted in a window, in order."""

    rows: np.ndarray
    """(n,) index of the first token of each word in the sequence, [CLS] being 0."""
    labels: np.ndarray
    """(n,) index of its tag; `NO_TAG` if the data has none."""
    inputs: np.ndarray
    """(n,) index of its sentence."""
    words: np.ndarray
    """(n,) its number in the sentence."""


class WordWindow(NamedTuple):
    """Consecutive units of text (words or tokens) in one window."""

    first: int
    end: int
    """The index after the last unit."""
    answered: np.ndarray
    """The units predicted in this window, which gives them the most context; ascending."""


def context_windows(lengths: np.ndarray, room: int, stride: int = 0) -> list[WordWindow]:
    """Make overlapping windows of whole units in which each unit is predicted exactly once.

    A window takes as many units as fit, and the next one shares its last `room - stride` tokens, or
    a few more, as units stay whole. It shares fewer if it could not hold the next unit otherwise,
    and starts no later than is needed to reach the end. The context of a unit is the number of
    tokens on its shorter side within the window; ties go to the first window. Without units there
    is one empty window.

    Args:
        lengths: (units,) the number of tokens of each unit (word or token), from 1 to `room`.
        room: the number of tokens that fit into a window.
        stride: the number of tokens from one full window to the next; 0 for 3/4 of the room.
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
    """Encode every distinct word once, as at least one and at most `room` token ids.

    Returns:
        Word -> ids, and the number of inputs with a word that was cut.
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
    """Make the windows `[CLS] words [SEP]` of sentences that form one stream.

    A window in which no word is predicted, as with a very short stride, is left out. The sentences
    of the stream are those of `inputs` with the indices `group`; `pieces` is the result of
    `word_tokens`, and `labels` has (words,) indices of tags, or `NO_TAG`, for every sentence. The
    maximum length includes [CLS] and [SEP]; see `context_windows` for the stride.

    Returns:
        The index of the first sentence of each window, and the window with a `WordTarget`.
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
            window = surround(ids[starts[first] : ends[end - 1]], None, tokenizer)
            rows = 1 + starts[answered] - starts[first]
            target = WordTarget(rows, known[answered], owners[answered], numbers[answered])
            found.append((int(owners[first]), ItemPart((window,), target)))
    return found
