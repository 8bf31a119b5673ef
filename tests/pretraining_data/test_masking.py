from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bertkit.errors import BertkitError
from bertkit.pretraining_data.examples import (
    MaskingOptions,
    choose_tokens,
    choose_whole_words,
    corrupt,
    count_targets,
)
from bertkit.processes import MASKS, PAIRS, keyed_rng


@pytest.mark.parametrize(
    ("tokens", "most", "expected"),
    [
        (5, 20, 1),  # round(0.75) = 1
        (3, 20, 1),  # round(0.45) = 0, but at least one
        (10, 20, 2),  # round(1.5) = 2: Python rounds halves to even
        (30, 20, 4),  # round(4.5) = 4
        (128, 20, 19),
        (512, 77, 77),
        (512, 20, 20),
    ],
)
def test_number_of_targets(tokens: int, most: int, expected: int) -> None:
    assert count_targets(tokens, 0.15, most) == expected


@pytest.mark.parametrize("shares", [(0.8, 0.1), (1.0, 0.0), (0.0, 1.0), (0.0, 0.2), (0.8, 0.2)])
def test_shares_of_what_is_shown(shares: tuple[float, float]) -> None:
    count, size = 200_000, 1000
    originals = np.full(count, 7)
    options = MaskingOptions(mask_share=shares[0], random_share=shares[1])
    shown = corrupt(originals, options, 4, size, keyed_rng(0, MASKS))
    assert np.mean(shown == 4) == pytest.approx(shares[0] + shares[1] / size, abs=0.005)
    kept = 1 - sum(shares)
    assert np.mean(shown == 7) == pytest.approx(kept + shares[1] / size, abs=0.005)
    others = shown[(shown != 4) & (shown != 7)]
    assert len(others) / count == pytest.approx(shares[1] * (1 - 2 / size), abs=0.005)
    if shares[1]:  # random pieces come from the whole vocabulary, evenly
        assert others.min() == 0
        assert others.max() == size - 1
        assert others.mean() == pytest.approx((size - 1) / 2, rel=0.02)


@pytest.mark.slow
def test_every_candidate_is_equally_likely() -> None:
    candidates = np.array([1, 2, 3, 5, 6, 7, 8])
    counts = np.zeros(9)
    for row in range(7000):
        chosen = choose_tokens(candidates, 2, keyed_rng(3, MASKS, row=row))
        assert len(set(chosen.tolist())) == 2
        counts[chosen] += 1
    assert counts[[0, 4]].sum() == 0
    np.testing.assert_allclose(counts[candidates], 2000, rtol=0.1)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(
    continuation=st.lists(st.booleans(), min_size=1, max_size=60),
    gap=st.integers(0, 59),
    count=st.integers(1, 12),
    seed=st.integers(0, 2**31),
)
def test_whole_words_stay_whole(continuation: list[bool], gap: int, count: int, seed: int) -> None:
    size = len(continuation)
    candidates = np.arange(1, size + 1)
    candidates[min(gap, size) :] += 1  # a [SEP] in between
    flags = np.array(continuation)
    chosen = choose_whole_words(candidates, flags, count, keyed_rng(seed, MASKS))
    assert len(chosen) <= count
    assert (np.diff(chosen) > 0).all()
    words: list[list[int]] = []
    for index, position in enumerate(candidates.tolist()):
        follows = index > 0 and flags[index] and position == candidates[index - 1] + 1
        if follows:
            words[-1].append(position)
        else:
            words.append([position])
    taken = set(chosen.tolist())
    left = count - len(taken)
    for word in words:
        assert taken.issuperset(word) or taken.isdisjoint(word)
        if taken.isdisjoint(word):
            assert len(word) > left, "a word that fits was skipped"


def test_purposes_and_rows_draw_different_numbers() -> None:
    draws = {
        tuple(keyed_rng(1, purpose, epoch=epoch, window=window, row=row).integers(0, 2**62, 4))
        for purpose in (MASKS, PAIRS)
        for epoch in (0, 1)
        for window in (0, 1)
        for row in (0, 1, 2)
    }
    assert len(draws) == 24
    assert keyed_rng(1, MASKS, row=5).random() == keyed_rng(1, MASKS, row=5).random()


def test_impossible_options_are_refused() -> None:
    with pytest.raises(BertkitError, match=r"masking\.probability"):
        MaskingOptions(probability=0.0)
    with pytest.raises(BertkitError, match=r"masking\.mask_share"):
        MaskingOptions(mask_share=0.8, random_share=0.3)
    with pytest.raises(BertkitError, match=r"masking\.mask_share"):
        MaskingOptions(mask_share=float("nan"))
