"""Windows for inputs longer than the model: overlapping parts that together hold every token.

- One text becomes windows of the maximum length, each `stride` tokens after the previous one.
- Of a pair, the shorter text stays whole if it takes at most half of the room, and the longer one
  is windowed. Otherwise both are windowed, each in half of the room, and window i of one is paired
  with the window of the other at the same relative position.
- A word or a context token is predicted only in the window that gives it the most context on its
  shorter side, hence exactly once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from bertkit.errors import BertkitError
from bertkit.tasks.task import Encoded
from bertkit.tokenizer.wordpiece import Tokenizer

OVERLAP = 4  # without a stride, neighbouring windows share 1 / OVERLAP of their room


@dataclass(frozen=True, kw_only=True)
class WindowLengths:
    """The length of sequences; longer inputs become several windows."""

    max_length: int = 0
    """Maximum tokens of a window; 0 for the model's maximum (384 in question answering)."""
    stride: int = 0
    """Tokens from one window to the next; 0 for 3/4 of the room (at most 128 in question
    answering)."""
    usual_length: ClassVar[int | None] = None

    def __post_init__(self) -> None:
        if min(self.max_length, self.stride) < 0:
            raise BertkitError("--max-length and --stride must be above 0, or 0 for the default")

    def length(self, positions: int) -> int:
        """Return the maximum tokens of a window for a model with this number of positions."""
        max_length = self.max_length or min(self.usual_length or positions, positions)
        if max_length > positions or self.stride >= max_length:
            raise BertkitError(
                f"windows of {max_length} tokens with a stride of {self.stride} must fit the "
                f"model's {positions} positions and overlap; lower --max-length or --stride"
            )
        return max_length


class Window(NamedTuple):
    """Consecutive units of text (tokens or whole words): `units[first:end]`."""

    first: int
    end: int
    owned: np.ndarray
    """The ascending indices of the units that have the most context in this window."""


def plan_windows(
    lengths: np.ndarray,
    room: int,
    stride: int = 0,
    *,
    reach_end: bool = True,
    length_bonus: float = 0.0,
) -> list[Window]:
    """Plan overlapping windows of whole units, each of which is owned by exactly one window.

    A window takes as many units as fit, and the next one shares its last `room - stride` tokens, or
    a few more, as units stay whole. It shares fewer if it could not hold the next unit otherwise.
    The context of a unit is the number of tokens on its shorter side within the window; of equal
    contexts, the first window's counts. Without units there is one empty window.

    Args:
        lengths: (units,) the number of tokens of each unit, from 1 to `room`.
        room: the number of tokens that fit into a window.
        stride: the number of tokens from one full window to the next; 0 for 3/4 of the room.
        reach_end: whether the last window starts early enough to be full. SQuAD's is shorter.
        length_bonus: added to the context for each token of the window (0.01 in SQuAD).
    """
    count = len(lengths)
    ends = np.cumsum(lengths)
    if count == 0 or ends[-1] <= room:
        return [Window(0, count, np.arange(count))]
    starts = ends - lengths
    spans: list[tuple[int, int]] = []
    first = 0
    shared = max(0, room - stride) if stride else min(room - 1, room // OVERLAP)
    while not spans or spans[-1][1] < count:
        end = int(np.searchsorted(ends, starts[first] + room, side="right"))
        spans.append((first, end))
        if end < count:
            sharing = np.searchsorted(starts, ends[end - 1] - shared, side="right") - 1
            first = int(max(sharing, np.searchsorted(starts, ends[end] - room)))
            if reach_end:
                first = min(first, int(np.searchsorted(starts, ends[-1] - room)))
    best, owner = np.full(count, -1.0), np.zeros(count, dtype=np.int64)
    for number, (first, end) in enumerate(spans):
        left, right = starts[first:end] - starts[first], ends[end - 1] - ends[first:end]
        context = np.minimum(left, right) + length_bonus * (ends[end - 1] - starts[first])
        better = first + np.nonzero(context > best[first:end])[0]
        best[better] = context[better - first]
        owner[better] = number
    return [
        Window(first, end, first + np.nonzero(owner[first:end] == number)[0])
        for number, (first, end) in enumerate(spans)
    ]


def cut_ids(ids: Sequence[int], room: int, stride: int) -> list[Sequence[int]]:
    """Cut token ids into the parts of `plan_windows`."""
    if len(ids) <= room:
        return [ids]
    windows = plan_windows(np.ones(len(ids), dtype=np.int64), room, min(stride, room))
    return [ids[window.first : window.end] for window in windows]


def text_windows(
    text: Sequence[int],
    pair: Sequence[int] | None,
    tokenizer: Tokenizer,
    max_length: int,
    stride: int = 0,
) -> list[Encoded]:
    """Make the windows `[CLS] text [SEP]` or `[CLS] text [SEP] pair [SEP]` of token ids.

    A second text without tokens is left out, as in the published code.
    """
    room = max_length - (3 if pair else 2)
    if room < 2:
        raise BertkitError(f"a length of {max_length} leaves no room for text; raise --max-length")
    if not pair:
        return [surround(window, None, tokenizer) for window in cut_ids(text, room, stride)]
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
            return [(window, pair) for window in cut_ids(text, left, stride)]
        return [(text, window) for window in cut_ids(pair, left, stride)]
    firsts = cut_ids(text, room // 2, stride)
    seconds = cut_ids(pair, room - room // 2, stride)
    count = max(len(firsts), len(seconds))
    return [
        (firsts[aligned(i, count, firsts)], seconds[aligned(i, count, seconds)])
        for i in range(count)
    ]


def aligned(index: int, count: int, windows: Sequence[object]) -> int:
    """Return the index in `windows` at the same relative position as `index` of `count`."""
    return round(index * (len(windows) - 1) / max(1, count - 1))


def surround(
    text: Sequence[int] | np.ndarray, pair: Sequence[int] | None, tokenizer: Tokenizer
) -> Encoded:
    """Add the special tokens to the texts of a window."""
    ids = [tokenizer.cls_id, *text, tokenizer.sep_id]
    first = len(ids)
    if pair is not None:
        ids += [*pair, tokenizer.sep_id]
    return Encoded(np.array(ids, dtype=np.int32), first)
