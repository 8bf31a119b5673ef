"""Words → pieces → windows, so that every word is answered exactly once (paper section 5.3).

The first piece of a word speaks for it; its other pieces are read but carry no loss. A word without
any piece (control characters, nothing at all) is read as [UNK]. Text that is too long for the model
is read through overlapping windows of whole words, and a word is trained and predicted only in the
window where it has the most pieces on its shorter side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from bertkit.tasks.inputs import WordsInput
from bertkit.tasks.task import Encoded, Part
from bertkit.tasks.windows import OVERLAP
from bertkit.tokens.tokenizer import Tokenizer

NO_TAG = -1


class Target(NamedTuple):
    """The n words that a window answers, in order."""

    rows: np.ndarray
    """(n,) where the first piece of each is in the sequence, [CLS] being 0."""
    labels: np.ndarray
    """(n,) index of the tag; `NO_TAG` where the data has none."""
    inputs: np.ndarray
    """(n,) the sentence of each."""
    words: np.ndarray
    """(n,) its number in the sentence."""


class Window(NamedTuple):
    """Neighbouring units of text that are read together."""

    first: int
    end: int
    """One after the last."""
    answered: np.ndarray
    """Those with more context here than in any other window, ascending."""


def context_windows(lengths: np.ndarray, room: int, stride: int = 0) -> list[Window]:
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
        return [Window(0, 0, np.arange(0))]
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
        return [Window(0, len(lengths), np.arange(len(lengths)))]
    best = np.full(len(lengths), -1)
    winner = np.zeros(len(lengths), dtype=np.int64)
    for number, (first, end) in enumerate(spans):
        left, right = starts[first:end] - starts[first], ends[end - 1] - ends[first:end]
        context = np.minimum(left, right)
        better = first + np.nonzero(context > best[first:end])[0]
        best[better] = context[better - first]
        winner[better] = number
    return [
        Window(first, end, first + np.nonzero(winner[first:end] == number)[0])
        for number, (first, end) in enumerate(spans)
    ]


def word_pieces(
    inputs: Sequence[WordsInput], tokenizer: Tokenizer, room: int
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
    inputs: Sequence[WordsInput],
    pieces: Mapping[str, Sequence[int]],
    labels: Sequence[np.ndarray],
    tokenizer: Tokenizer,
    longest: int,
    stride: int,
) -> list[tuple[int, Part]]:
    """The windows of sentences that are read as one stream: `[CLS] words [SEP]`.

    A window that answers no word, as a very short stride makes some, is left out.

    Args:
        group: the numbers of the sentences.
        inputs: all sentences.
        pieces: of `word_pieces`.
        labels: of every sentence, (words,) indices of tags, or `NO_TAG`.
        tokenizer: for [CLS] and [SEP].
        longest: tokens of a window, these two included.
        stride: see `context_windows`.

    Returns:
        The sentence that each window begins with, and the window; its target is a `Target`.
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
    for first, end, answered in context_windows(lengths, longest - 2, stride):
        if len(answered):
            inside = ids[starts[first] : ends[end - 1]]
            whole = np.array([tokenizer.cls_id, *inside, tokenizer.sep_id], dtype=np.int32)
            rows = 1 + starts[answered] - starts[first]
            target = Target(rows, known[answered], owners[answered], numbers[answered])
            found.append((int(owners[first]), Part((Encoded(whole, len(whole)),), target)))
    return found
