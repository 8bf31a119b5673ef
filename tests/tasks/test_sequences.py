"""Windows together hold each token; a unit is predicted once, where it has most context."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bertkit.errors import BertkitError
from bertkit.predict.features import Extraction
from bertkit.tasks.sequences import WindowLengths, cut_ids, plan_windows, text_windows
from bertkit.tokenizer.wordpiece import Tokenizer


@given(st.integers(0, 200), st.integers(1, 30), st.integers(0, 40))
def test_windows_hold_every_id_in_order(length: int, room: int, stride: int) -> None:
    ids = list(range(length))
    windows = cut_ids(ids, room, stride)
    assert set().union(*windows) == set(ids)
    assert all(len(window) <= room for window in windows)
    starts = [window[0] for window in windows if window]
    assert starts == sorted(set(starts))
    assert len(windows) == 1 or all(len(window) == room for window in windows)
    if stride and len(windows) > 1:
        steps = np.diff(starts)
        assert (steps[:-1] == min(stride, room)).all()


def test_a_stride_without_overlap_is_refused() -> None:
    assert WindowLengths(max_length=64, stride=63).length(512) == 64
    for lengths in (WindowLengths(max_length=64, stride=64), WindowLengths(stride=999)):
        with pytest.raises(BertkitError, match="--stride"):
            lengths.length(512)


def test_neighbours_share_a_quarter_by_default() -> None:
    windows = cut_ids(list(range(100)), 40, 0)
    assert [window[0] for window in windows] == [0, 30, 60]


@settings(max_examples=60, deadline=None)
@given(
    first=st.integers(0, 120), second=st.none() | st.integers(0, 120), max_length=st.integers(5, 60)
)
def test_nothing_of_a_text_or_a_pair_is_lost(
    tokenizer: Tokenizer, first: int, second: int | None, max_length: int
) -> None:
    text = [100 + i for i in range(first)]
    pair = None if second is None else [1000 + i for i in range(second)]
    windows = text_windows(text, pair or (), tokenizer=tokenizer, length=max_length)
    seen: set[int] = set()
    for window in windows:
        ids = window.ids.tolist()
        assert len(ids) <= max_length
        assert ids[0] == tokenizer.cls_id
        assert ids[window.first - 1] == tokenizer.sep_id
        assert ids[-1] == tokenizer.sep_id
        assert ids.count(tokenizer.sep_id) == (2 if pair else 1)
        assert all(100 <= i < 1000 for i in ids[1 : window.first - 1])
        assert all(i >= 1000 for i in ids[window.first : -1])
        seen |= set(ids)
    assert seen >= {*text, *(pair or [])}
    fits = first + (second or 0) + (3 if pair else 2) <= max_length
    assert (len(windows) == 1) == fits


def test_the_shorter_text_of_a_pair_stays_whole(tokenizer: Tokenizer) -> None:
    question, context = list(range(100, 110)), list(range(1000, 1100))
    windows = text_windows(question, context, tokenizer=tokenizer, length=43)
    assert len(windows) > 1
    assert all(window.ids[1:11].tolist() == question for window in windows)
    turned = text_windows(context, question, tokenizer=tokenizer, length=43)
    assert all(window.ids[-11:-1].tolist() == question for window in turned)


@pytest.mark.parametrize(("max_length", "stride"), [(-1, 0), (0, -1)])
def test_negative_lengths_are_refused(max_length: int, stride: int) -> None:
    for settings_of in (WindowLengths, Extraction):
        with pytest.raises(BertkitError, match="must be above 0"):
            settings_of(max_length=max_length, stride=stride)


def test_a_length_without_room_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(BertkitError, match="no room"):
        text_windows([1, 2], [3], tokenizer=tokenizer, length=4)


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
