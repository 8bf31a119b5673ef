"""Learn WordPiece tokens by likelihood: merge the pair that makes the text most probable.

Schuster and Nakajima ("Japanese and Korean Voice Search", 2012, section 4) build a language model
of the current tokens, and merge the two that raise the likelihood of the training data most.
Here the model is the unigram model with maximum-likelihood estimates. With n(p) occurrences of
token p, N = sum of n(p), and F(n) = n ln n, the log-likelihood of the text is

    L = sum over p of n(p) ln(n(p) / N) = sum over p of F(n(p)) - F(N).

Merging all k occurrences of the pair (a, b) to the token x gains

    F(n(a)-k) - F(n(a)) + F(n(b)-k) - F(n(b)) + F(n(x)+k) - F(n(x)) - F(N-k) + F(N);

n(x) is 0 unless x was made from another pair before. If a = b, n(a) loses 2k once. With few merges
(k far below n(a) and n(b)) this is nearly k (ln(k N / (n(a) n(b))) - 1): the mutual information of
the pair times how often it occurs. The quotient k / (n(a) n(b)) alone, which is often called the
WordPiece score, is not this gain: it prefers pairs of tokens that occur once or twice.

The gain of a pair changes whenever N or the count of one of its tokens does. But a falling N only
lowers it, as do a rising n(a) and a falling n(x); it can be raised by a falling n(a) or n(b), a
rising n(x) and a changed k. After a merge only pairs affected by the latter are recomputed. The
others keep an upper bound, and the best pair is found by computing those whose bound is largest.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise

import numpy as np

from bertkit.tokenizer.files import CONTINUATION

DECIMALS = 6
"""The digits to which gains, in nats, are rounded, so that no processor's last bit decides."""
SLACK = 1e-5  # how far rounding errors may put a stored bound below the gain
TOGETHER = 2e-3  # share of the largest bound within which gains are computed at once
BLOCK_PAIRS = 256  # pairs per block; the largest bound of each block is stored
RIGHT_BITS = 24
"""A pair's key is left << 24 | right, where left and right are token numbers."""
PROGRESS_TOKENS = 100


def merge_by_likelihood(
    counts: Mapping[str, int],
    letters: Iterable[str],
    number: int,
    min_frequency: int,
    progress: Callable[[int], None] | None = None,
) -> list[str]:
    """Return the tokens that merging makes, in order; they depend on the arguments only.

    Pairs of equal gain are merged in the order of the text of what they make, then of their left
    token. A pair that makes an existing token is merged like any other but not counted in `number`.
    Learning ends early when no pair with `min_frequency` occurrences raises the likelihood.

    The initial tokens, `letters`, are single characters, among them all of the words, and
    characters after "##". `progress` is called with the number of tokens made, every 100 tokens.
    """
    pairs = PairCounts(counts, letters, min_frequency)
    known = set(pairs.tokens)
    made: list[str] = []
    while len(made) < number and (best := pairs.best()) is not None:
        token = pairs.merge(best)
        if token in known:
            continue
        known.add(token)
        made.append(token)
        if progress is not None and len(made) % PROGRESS_TOKENS == 0:
            progress(len(made))
    return made


class PairCounts:
    """Words as lists of tokens, and every pair of neighbours with the gain of merging it.

    Attributes:
        tokens, ids: the text of each token and its number; number 0 is unused and occurs 0 times.
        frequency: (tokens,) int64, current occurrences of each token; `total` is their sum.
        words, word_counts: each distinct word as token numbers, and how often it occurs.
        pair_ids: the number of each pair that occurs, by its key. Numbers are not reused.
        left, right, merged, count, bound: arrays by pair number: its two tokens, the token it makes
            if that exists (else 0), its occurrences, and the upper bound of its gain.
        places: for each pair the words it may occur in; around: for each token its pairs.
        top: (pairs // BLOCK_PAIRS,) an upper bound of the bounds of each block of pairs.
    """

    def __init__(
        self, counts: Mapping[str, int], letters: Iterable[str], min_frequency: int
    ) -> None:
        self.min_frequency = min_frequency
        self.tokens = ["", *letters]
        self.ids = {token: number for number, token in enumerate(self.tokens)}
        self.around = [array("i") for _ in self.tokens]
        self.frequency = np.zeros(2 * len(self.tokens), np.int64)
        self.word_counts = list(counts.values())
        ids, first = self.ids, len(CONTINUATION)
        tails = {token[first:]: ids[token] for token in ids if token.startswith(CONTINUATION)}
        self.words = [[ids[word[0]], *(tails[letter] for letter in word[1:])] for word in counts]
        self.pair_ids: dict[int, int] = {}
        self.places: list[list[int]] = []
        self.left = np.zeros(BLOCK_PAIRS, np.int32)
        self.right = np.zeros(BLOCK_PAIRS, np.int32)
        self.merged = np.zeros(BLOCK_PAIRS, np.int32)
        self.count = np.zeros(BLOCK_PAIRS, np.int64)
        self.bound = np.full(BLOCK_PAIRS, -np.inf)
        self.top = np.full(1, -np.inf)
        self._count_all()
        self.total = int(self.frequency.sum())
        self._refresh(np.arange(len(self.places)))

    def _count_all(self) -> None:
        frequency = [0] * len(self.tokens)
        changes: defaultdict[int, int] = defaultdict(int)
        places: defaultdict[int, list[int]] = defaultdict(list)
        for index, (word, count) in enumerate(zip(self.words, self.word_counts, strict=True)):
            for token in word:
                frequency[token] += count
            for key in pair_keys(word):
                changes[key] += count
                places[key].append(index)
        self.frequency[: len(frequency)] = frequency
        self._change(changes, places)

    def best(self) -> int | None:
        """Return the pair that gains most, or None if no frequent pair has a positive gain."""
        while True:
            highest = float(self.top.max())
            if not highest > 0:
                return None
            least = highest - max(2 * SLACK, TOGETHER * highest)
            blocks = np.flatnonzero(self.top >= least)
            rows, columns = np.nonzero(self.bound.reshape(-1, BLOCK_PAIRS)[blocks] >= least)
            pairs = blocks[rows] * BLOCK_PAIRS + columns
            gains = self.gains(pairs)
            self.bound[pairs] = gains
            self.top[blocks] = self.bound.reshape(-1, BLOCK_PAIRS)[blocks].max(axis=1)
            if len(gains) and gains.max() >= least + SLACK:
                largest = gains.max()
                if not largest > 0:
                    return None
                return min(pairs[gains == largest].tolist(), key=self.texts)

    def texts(self, pair: int) -> tuple[str, str]:
        """Return the token that a pair makes, and its left token."""
        left, right = self.tokens[self.left[pair]], self.tokens[self.right[pair]]
        return left + right.removeprefix(CONTINUATION), left

    def gains(self, pairs: np.ndarray) -> np.ndarray:
        """Return (pairs,) the gains in log-likelihood of merging them, in nats; -inf if rare."""
        gains = np.full(len(pairs), -np.inf)
        usable = self.count[pairs] >= self.min_frequency
        pairs = pairs[usable]
        k, left, right = self.count[pairs], self.left[pairs], self.right[pairs]
        twice = left == right
        gain = nlogn_drop(self.frequency[self.merged[pairs]] + k, k) + nlogn_drop(self.total, k)
        gain -= nlogn_drop(self.frequency[left], np.where(twice, 2 * k, k))
        gain -= nlogn_drop(self.frequency[right], np.where(twice, 0, k))
        gains[usable] = gain.round(DECIMALS)
        return gains

    def merge(self, pair: int) -> str:
        """Join a pair everywhere it occurs, and return the token it makes."""
        token, _ = self.texts(pair)
        left, right = int(self.left[pair]), int(self.right[pair])
        new = self._number(token)
        changes: defaultdict[int, int] = defaultdict(int)
        places: defaultdict[int, list[int]] = defaultdict(list)
        occurrences = 0
        for index in self.places[pair]:
            before, count = self.words[index], self.word_counts[index]
            after = replaced(before, left, right, new)
            if len(after) == len(before):
                continue  # listed twice, or changed by another merge since
            self.words[index] = after
            occurrences += count * (len(before) - len(after))
            for key in pair_keys(before):
                changes[key] -= count
            for key in pair_keys(after):
                changes[key] += count
                if new in (key >> RIGHT_BITS, key & (1 << RIGHT_BITS) - 1):
                    places[key].append(index)
        self.frequency[left] -= occurrences
        self.frequency[right] -= occurrences
        self.frequency[new] += occurrences
        self.total -= occurrences
        changed = self._change(changes, places)
        concerned = [self._around(left), self._around(right), changed, self._making(token)]
        self._refresh(np.concatenate(concerned))
        return token

    def _number(self, token: str) -> int:
        """Return a token's number; a new token is added, also as the product of its pairs."""
        if token not in self.ids:
            number = self.ids[token] = len(self.tokens)
            self.tokens.append(token)
            self.around.append(array("i"))
            if number == len(self.frequency):
                self.frequency = np.concatenate([self.frequency, np.zeros_like(self.frequency)])
            self.merged[self._making(token)] = number
        return self.ids[token]

    def _making(self, token: str) -> np.ndarray:
        """Return the pairs that make a token."""
        begin = len(CONTINUATION) + 1 if token.startswith(CONTINUATION) else 1
        found = []
        for cut in range(begin, len(token)):
            left, right = self.ids.get(token[:cut]), self.ids.get(CONTINUATION + token[cut:])
            if left is not None and right is not None:
                found.append(self.pair_ids.get(left << RIGHT_BITS | right, -1))
        return np.array([pair for pair in found if pair >= 0], np.int64)

    def _around(self, token: int) -> np.ndarray:
        """Return the pairs that contain a token; those that no longer occur are removed here."""
        pairs = np.frombuffer(self.around[token], np.int32).astype(np.int64)
        alive = pairs[self.count[pairs] > 0]
        if 2 * len(alive) < len(pairs):
            self.around[token] = array("i", alive.astype(np.int32).tobytes())
        return alive

    def _change(
        self, changes: Mapping[int, int], places: Mapping[int, Sequence[int]]
    ) -> np.ndarray:
        """Change the counts of pairs, add new pairs, delete vanished ones; return all of these."""
        keys = [key for key, change in changes.items() if change]
        numbers = [self._pair(key) for key in keys]
        pairs = np.array(numbers, np.int64)
        self.count[pairs] += np.array([changes[key] for key in keys], np.int64)
        for key, pair, left in zip(keys, numbers, self.count[pairs].tolist(), strict=True):
            if not left:
                del self.pair_ids[key]
                self.places[pair] = []
        for key, words in places.items():
            if key in self.pair_ids:
                self.places[self.pair_ids[key]] += words
        return pairs

    def _pair(self, key: int) -> int:
        """Return a pair's number; a new pair is added with a count of 0."""
        pair = self.pair_ids.get(key)
        if pair is not None:
            return pair
        pair = self.pair_ids[key] = len(self.places)
        left, right = key >> RIGHT_BITS, key & (1 << RIGHT_BITS) - 1
        if pair == len(self.count):
            self._grow()
        self.places.append([])
        self.left[pair], self.right[pair] = left, right
        self.merged[pair] = self.ids.get(self.texts(pair)[0], 0)
        for token in {left, right}:
            self.around[token].append(pair)
        return pair

    def _grow(self) -> None:
        """Double the capacity of the arrays by pair."""
        for name in ("left", "right", "merged", "count", "bound", "top"):
            column = getattr(self, name)
            empty = np.full_like(column, -np.inf if column.dtype == np.float64 else 0)
            setattr(self, name, np.concatenate([column, empty]))

    def _refresh(self, pairs: np.ndarray) -> None:
        """Recompute the gains of pairs; a block's upper bound is only ever raised here."""
        gains = self.gains(pairs)
        self.bound[pairs] = gains
        np.maximum.at(self.top, pairs // BLOCK_PAIRS, gains)


def nlogn_drop(n: np.ndarray | int, k: np.ndarray) -> np.ndarray:
    """Compute F(n) - F(n - k) for F(n) = n ln n, 0 <= k <= n, 0 < n, without cancellation."""
    rest = n - k
    return k * np.log(n) - rest * np.log1p(np.where(rest > 0, -k / n, 0.0))


def pair_keys(word: Sequence[int]) -> list[int]:
    """Return the key of each pair; of overlapping equal pairs (a a a) every second one."""
    keys = [left << RIGHT_BITS | right for left, right in pairwise(word)]
    if len(set(keys)) == len(keys):
        return keys
    kept, last = [], -1
    for key in keys:
        last = -1 if key == last else key  # only a run of one token repeats a key at once
        kept += [key] if last >= 0 else []
    return kept


def replaced(word: Sequence[int], left: int, right: int, new: int) -> list[int]:
    """Return the word with the pair merged, from left to right."""
    merged: list[int] = []
    for token in word:
        if token == right and merged and merged[-1] == left:
            merged[-1] = new
        else:
            merged.append(token)
    return merged
