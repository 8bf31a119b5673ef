"""Keys of equal and of nearly equal documents."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bertkit.corpus.clean import BANDS, ROWS, KeySet, band_keys, exact_key, shingles
from tests.conftest import WORDS

KEYS = st.integers(0, 2**64 - 1)


def test_case_and_white_space_make_no_difference_and_letters_do() -> None:
    key = exact_key("The River.\nThe  stone.")
    assert exact_key(" the river. THE\tSTONE.\n") == key
    assert exact_key("The River. The stone!") != key
    assert exact_key("The River. The ston\u00e9.") != key
    assert exact_key("\udfff") != exact_key("\udffe")


def test_keys_never_change() -> None:
    """Counts of an earlier version stay comparable."""
    assert exact_key("The river.") == 14539992433035123410
    assert band_keys("The river and the stone under the bridge.")[:2].tolist() == [
        5035537606509462044,
        7793393598117975499,
    ]


def test_shingles_are_sets_of_runs_of_words() -> None:
    text = "one two three four five six seven"
    assert len(shingles(text)) == 3
    assert shingles(text).tolist() == shingles("One, two; three (four) FIVE six -- seven!").tolist()
    shifted = shingles("zero one two three four five six seven")
    assert shifted[1:].tolist() == shingles(text).tolist()
    assert shingles("one two three four five")[0] != shingles("two one three four five")[0]
    assert len(shingles("one two")) == 1
    assert len(shingles("...")) == len(band_keys("...")) == 0
    assert len(shingles("\u6cb3\u6d41\u548c\u77f3\u5934\u3002")) == 1, "each ideograph is a word"
    long = " ".join(map(str, range(5000)))  # more than are hashed at once
    assert len(set(shingles(long).tolist())) == 4996


@pytest.mark.slow
@pytest.mark.parametrize(("similarity", "changed"), [(0.9, 1), (0.7, 3), (0.5, 7)])
def test_near_duplicates_are_found_as_often_as_the_formula_says(
    similarity: float, changed: int
) -> None:
    """Every `changed` words at random: the formula at each pair's true similarity, summed."""
    rng = np.random.default_rng(int(similarity * 10))
    found = expected = 0.0
    pairs = 300
    for number in range(pairs):
        words = [f"{rng.choice(WORDS)}{rng.integers(50)}" for _ in range(100)]
        other = list(words)
        for place in rng.choice(100, changed, replace=False):
            other[place] = f"x{number}y{place}"
        first, second = " ".join(words), " ".join(other)
        a, b = set(shingles(first).tolist()), set(shingles(second).tolist())
        expected += 1 - (1 - (len(a & b) / len(a | b)) ** ROWS) ** BANDS
        found += bool((band_keys(first) == band_keys(second)).any())
    spread = 4 * (expected * (1 - expected / pairs)) ** 0.5 + 1
    assert abs(found - expected) < spread
    assert found > 0


def test_bands_of_different_documents_do_not_meet() -> None:
    rng = np.random.default_rng(1)
    rows = [band_keys(" ".join(rng.choice(WORDS, 80))) for _ in range(200)]
    assert len(np.unique(np.concatenate(rows))) == 200 * BANDS


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(KEYS, max_size=5), max_size=60), st.lists(KEYS, max_size=5))
def test_key_set_is_a_set(added: list[list[int]], asked: list[int]) -> None:
    keys, plain = KeySet(waiting=7), set[int]()
    for some in added:
        assert keys.has_any(some) == bool(plain & set(some))
        keys.add(some)
        plain |= set(some)
        assert keys.has_any(some) == bool(some)
    assert keys.has_any(asked) == bool(plain & set(asked))
    for key in sorted(plain)[:20]:
        assert keys.has_any([key])
