"""Inputs longer than the model become windows: overlapping parts that together hold every token.

Rules for classification, regression and choice (answers and tags have their own, `spans.py` and
`tag.py`):

- One text: windows of the longest length; from one to the next it moves on by `stride` tokens.
- A pair: the shorter text stays whole where it takes up to half of the room, and the longer one is
  windowed. Else both are windowed, each in half of the room, and window i of the one goes with the
  window of the other at the same share of its way.
- In training each window is an example with the label of its input and the weight 1 / windows.
- The output of an input is the mean of its windows' outputs (logits).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bertkit.errors import BertkitError
from bertkit.tasks.task import Encoded
from bertkit.tokens.tokenizer import Tokenizer

OVERLAP = 4
"""Where no stride is given, neighbouring windows share 1 / OVERLAP of their room."""


def check_window_lengths(longest: int, stride: int) -> None:
    """Refuse numbers that are no lengths; 0 is for the default.

    Raises:
        BertkitError: names the flag.
    """
    for name, value in (("longest", longest), ("stride", stride)):
        if value < 0:
            raise BertkitError(f"--{name} must be above 0, or 0 for the default; got {value}")


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
    longest: int,
    stride: int = 0,
) -> list[Encoded]:
    """`[CLS] text [SEP]` or `[CLS] text [SEP] pair [SEP]`, in as many windows as it takes.

    Args:
        text: ids.
        pair: ids of the second text, or None.
        tokenizer: for [CLS] and [SEP].
        longest: tokens that a sequence may have, special ones included.
        stride: see `cut_into_windows`.

    Raises:
        BertkitError: `longest` leaves no room for text.
    """
    room = longest - (2 if pair is None else 3)
    if room < 2:
        raise BertkitError(f"a length of {longest} leaves no room for text; give at least 5 tokens")
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
