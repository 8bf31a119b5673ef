"""The likelihood criterion agrees with a reference that recounts everything at every step."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bertkit.tokenizer.likelihood import PairCounts, merge_by_likelihood, nlogn_drop
from bertkit.tokenizer.train import count_words, learn_from_counts, learn_vocabulary
from bertkit.tokenizer.wordpiece import SPECIAL_TOKENS, Tokenizer
from tests.tokenizer.test_tokenizer import wikipedia

Words = list[tuple[list[str], int]]


def spell(word: str) -> list[str]:
    return [word[0], *(f"##{letter}" for letter in word[1:])]


def merge_in(word: Sequence[str], left: str, right: str) -> list[str]:
    merged: list[str] = []
    for token in word:
        if merged and merged[-1] == left and token == right:
            merged[-1:] = [left + right[2:], ""]  # "" keeps the new token from being merged again
        else:
            merged.append(token)
    return [token for token in merged if token]


def frequencies(words: Words) -> Counter[str]:
    found: Counter[str] = Counter()
    for word, count in words:
        for token in word:
            found[token] += count
    return found


def log_likelihood(words: Words) -> float:
    found = frequencies(words)
    total = found.total()
    return math.fsum(count * math.log(count / total) for count in found.values())


def reference(counts: dict[str, int], number: int, min_frequency: int) -> list[str]:
    """Join every pair for trial, keep the best."""
    words = [(spell(word), count) for word, count in counts.items()]
    known = set(frequencies(words))
    made: list[str] = []
    while len(made) < number:
        before, trials = log_likelihood(words), []
        for left, right in {pair for word, _ in words for pair in pairwise(word)}:
            after = [(merge_in(word, left, right), count) for word, count in words]
            merges = frequencies(words).total() - frequencies(after).total()
            gain = round(log_likelihood(after) - before, 6)
            if merges >= min_frequency and gain > 0:
                trials.append((-gain, left + right[2:], left, after))
        if not trials:
            return made
        _, token, _, words = min(trials, key=lambda trial: trial[:3])
        if token not in known:
            made.append(token)
            known.add(token)
    return made


def letters_of(counts: dict[str, int]) -> list[str]:
    return sorted({token for word in counts for token in spell(word)})


WORDS = st.dictionaries(
    st.text("abc", min_size=1, max_size=7), st.integers(1, 9), min_size=1, max_size=8
)


@settings(max_examples=150, deadline=None)
@given(WORDS, st.integers(1, 3))
@example({"aaaaaaa": 1, "aaaa": 5, "baaaab": 2}, 1)  # runs of one token merge from the left
@example({"abcab": 3, "cab": 2, "abc": 2, "aabc": 4}, 1)  # one token made of two pairs
def test_agrees_with_recounting_everything(counts: dict[str, int], min_frequency: int) -> None:
    found = merge_by_likelihood(counts, letters_of(counts), 12, min_frequency)
    assert found == reference(counts, 12, min_frequency)


def test_agrees_on_real_words(data: Path) -> None:
    counts = count_words(wikipedia(data, 40), lowercase=True)
    counts = Counter(dict(counts.most_common(60)))
    found = merge_by_likelihood(counts, letters_of(counts), 30, 2)
    assert len(found) == 30
    assert found == reference(counts, 30, 2)


def test_kept_counts_and_bounds_stay_true(data: Path) -> None:
    counts = count_words(wikipedia(data, 300), lowercase=True)
    pairs = PairCounts(counts, letters_of(counts), 2)
    for _ in range(400):
        best = pairs.best()
        assert best is not None
        pairs.merge(best)
    words = list(zip(pairs.words, pairs.word_counts, strict=True))
    fresh = [0] * len(pairs.tokens)
    for word, count in words:
        for token in word:
            fresh[token] += count
    assert pairs.frequency[: len(fresh)].tolist() == fresh
    assert pairs.total == sum(fresh)
    alive = np.array(sorted(pairs.pair_ids.values()))
    assert (pairs.count[alive] > 0).all()
    assert (pairs.gains(alive) <= pairs.bound[alive] + 1e-5).all()
    assert (pairs.bound.reshape(len(pairs.top), -1).max(axis=1) <= pairs.top).all()
    # nothing spelt is lost, whatever was merged
    spelt = ["".join(pairs.tokens[p].removeprefix("##") for p in word) for word in pairs.words]
    assert spelt == list(counts)


def test_by_hand() -> None:
    # 10 x "ab", 4 x "ca": n(a) = 10, n(##b) = 10, n(c) = 4, n(##a) = 4, N = 28. Joining "ab" takes
    # both tokens away: gain 10 ln 10 + 28 ln 28 - 18 ln 18 - 2 (0) ... = F(28) - F(18) - F(10).
    pairs = PairCounts({"ab": 10, "ca": 4}, letters_of({"ab": 1, "ca": 1}), 1)
    best = pairs.best()
    assert best is not None
    assert pairs.texts(best) == ("ab", "a")
    expected = 28 * math.log(28) - 18 * math.log(18) - 10 * math.log(10)
    assert pairs.gains(np.array([best]))[0] == pytest.approx(expected, abs=1e-6)


def test_it_prefers_what_belongs_together_to_what_is_frequent() -> None:
    # "e" stands before everything, so "e ##x" is the most frequent pair but tells little; "q ##u"
    # is rarer and certain.
    words = {"ex": 30, "ey": 30, "ez": 30, "ax": 30, "ay": 30, "az": 30, "qu": 25}
    letters = letters_of(words)
    assert merge_by_likelihood(words, letters, 1, 1) == ["qu"]
    assert learn_from_counts(Counter(words), 5 + 7 + 7 + 1)[-1] in ("ex", "ax")


def test_it_stops_where_no_merge_raises_the_likelihood() -> None:
    # n(a) = 101, n(##b) = 3, N = 306: "ab" occurs once, as often as chance would have it.
    words = {"a": 100, "c": 100, "d": 100, "ab": 1, "cb": 1, "db": 1}
    assert merge_by_likelihood(words, letters_of(words), 50, 1) == []
    assert merge_by_likelihood({"a": 3, "b": 1}, ["a", "b"], 5, 1) == []
    assert merge_by_likelihood({"ab": 3, "cd": 1}, letters_of({"ab": 1, "cd": 1}), 5, 4) == []


def test_fall_keeps_its_digits() -> None:
    n, k = np.array([10**12, 5, 7]), np.array([3, 5, 0])
    exact = 3 * (math.log(10**12) + 1)  # its derivative, as 3 is tiny beside n
    assert nlogn_drop(n, k) == pytest.approx([exact, 5 * math.log(5), 0.0], rel=1e-12)


def test_order_of_texts_does_not_matter(data: Path) -> None:
    lines = wikipedia(data, 300)
    first = learn_vocabulary(lines, 900, criterion="likelihood")
    assert len(first) == len(set(first)) == 900
    assert learn_vocabulary(lines[::-1], 900, criterion="likelihood") == first
    assert first[:700] == learn_vocabulary(lines, 700, criterion="likelihood")
    by_frequency = learn_vocabulary(lines, 900)
    assert set(first) != set(by_frequency)
    alone = [token for token in first if len(token.removeprefix("##")) == 1]
    assert first[: 5 + len(alone)] == by_frequency[: 5 + len(alone)]  # the same alphabet
    tokenizer = Tokenizer.from_vocabulary(first, lowercase=True)
    text = " ".join(lines[:50])
    ids = tokenizer.encode_batch([text])[0]
    assert tokenizer.unk_id not in ids
    assert tokenizer.encode_batch([tokenizer.decode(ids)])[0] == ids
    assert first[:5] == list(SPECIAL_TOKENS)
