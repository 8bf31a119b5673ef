"""Words to pieces to windows: each word is answered once, where it has the most context."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from bertkit.tasks.windows import plan_windows


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_windows_answer_every_unit_where_it_has_most_context(data: st.DataObject) -> None:
    room = data.draw(st.integers(1, 12))
    lengths = np.array(data.draw(st.lists(st.integers(1, room), min_size=1, max_size=40)))
    stride = data.draw(st.integers(0, room + 3))
    windows = plan_windows(lengths, room, stride)
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
        answering = [number for number, w in enumerate(windows) if unit in w.owned]
        assert answering == [int(np.argmax(contexts))]
    assert all(ends[w.end - 1] - starts[w.first] <= room for w in windows)


def test_windows_by_hand() -> None:
    windows = plan_windows(np.ones(10, dtype=int), 6, 2)
    assert [(w.first, w.end) for w in windows] == [(0, 6), (2, 8), (4, 10)]
    assert [w.owned.tolist() for w in windows] == [[0, 1, 2, 3], [4, 5], [6, 7, 8, 9]]
    words = plan_windows(np.array([3, 1, 4, 2, 2]), 6)  # they share a piece
    assert [(w.first, w.end) for w in words] == [(0, 2), (1, 3), (2, 4), (3, 5)]
    [empty] = plan_windows(np.ones(0, dtype=int), 6)
    assert (empty.first, empty.end, len(empty.owned)) == (0, 0, 0)
