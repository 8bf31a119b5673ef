"""Words to pieces to windows: each word is answered once, where it has the most context."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from bertkit.tasks.entities import WordsExample
from bertkit.tasks.windows import context_windows, word_tokens
from bertkit.tokenizer.wordpiece import Tokenizer

WORDS = ["river", "stone", "meadow", "walking", "x", "zebra", "\u200b", "", "\x07", "Ω", "a.b"]


def sentence(words: str | list[str]) -> WordsExample:
    own = tuple(words.split() if isinstance(words, str) else words)
    return WordsExample("0", own, None, 0, "a:1")


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_windows_answer_every_unit_where_it_has_most_context(data: st.DataObject) -> None:
    room = data.draw(st.integers(1, 12))
    lengths = np.array(data.draw(st.lists(st.integers(1, room), min_size=1, max_size=40)))
    stride = data.draw(st.integers(0, room + 3))
    windows = context_windows(lengths, room, stride)
    ends = np.cumsum(lengths)
    starts = ends - lengths
    assert windows[0].first == 0
    assert windows[-1].end == len(lengths)
    for before, after in pairwise(windows):
        assert before.first < after.first <= before.end < after.end
        shares = ends[before.end - 1] - starts[after.first]
        crowded = ends[before.end] - starts[after.first - 1] > room
        assert crowded or shares >= (room - stride if stride else room // 4)
    for unit in range(len(lengths)):
        contexts = [
            min(starts[unit] - starts[w.first], ends[w.end - 1] - ends[unit])
            if w.first <= unit < w.end
            else -1
            for w in windows
        ]
        answering = [number for number, w in enumerate(windows) if unit in w.answered]
        assert answering == [int(np.argmax(contexts))]
    assert all(ends[w.end - 1] - starts[w.first] <= room for w in windows)


def test_windows_by_hand() -> None:
    windows = context_windows(np.ones(10, dtype=int), 6, 2)
    assert [(w.first, w.end) for w in windows] == [(0, 6), (2, 8), (4, 10)]
    assert [w.answered.tolist() for w in windows] == [[0, 1, 2, 3], [4, 5], [6, 7, 8, 9]]
    words = context_windows(np.array([3, 1, 4, 2, 2]), 6)  # they share a piece
    assert [(w.first, w.end) for w in words] == [(0, 2), (1, 3), (2, 4), (3, 5)]
    [empty] = context_windows(np.ones(0, dtype=int), 6)
    assert (empty.first, empty.end, len(empty.answered)) == (0, 0, 0)


def test_every_word_has_a_piece(tokenizer: Tokenizer) -> None:
    pieces, cut = word_tokens([sentence(WORDS), sentence(WORDS[:2])], tokenizer, 100)
    assert list(pieces) == WORDS
    for word, ids in pieces.items():
        assert ids == (tokenizer.encode(word).ids or [tokenizer.unk_id])
    assert pieces["\u200b"] == pieces[""] == pieces["\x07"] == [tokenizer.unk_id]
    assert cut == 0
    pieces, cut = word_tokens([sentence(["zebra", "zebra"]), sentence("river")], tokenizer, 3)
    assert pieces["zebra"] == tokenizer.encode("zebra").ids[:3]
    assert cut == 1
