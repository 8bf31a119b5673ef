"""Equal sentences and documents of a token store, by hashes of their ids, in bounded memory.

A hash is a polynomial over random 64-bit keys of the pieces. When too many different hashes came,
only the lowest half of their range is kept, and so on: what is kept then is a sample of the texts
in which every text has all of its copies, so shares of copies are not biased.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from bertkit.corpus.shards import ShardArrays

CHUNK_TOKENS = 1 << 20
"""Tokens that are hashed at a time."""
MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
"""Odd, so its powers never become 0."""


class Texts(NamedTuple):
    """The texts of one shard: a row is a sentence or a document."""

    hashes: np.ndarray
    """(texts,) uint64."""
    tokens: np.ndarray
    """(texts,) int64."""


def piece_keys(vocabulary_size: int) -> np.ndarray:
    """(vocabulary,) uint64: a random number for each piece, always the same."""
    rng = np.random.Generator(np.random.Philox(key=0))
    return rng.integers(0, 1 << 64, vocabulary_size, dtype=np.uint64)


def powers(count: int) -> np.ndarray:
    """(count,) uint64: the powers of `MULTIPLIER`, beginning with 1."""
    factors = np.full(count, MULTIPLIER, dtype=np.uint64)
    factors[:1] = 1
    return np.cumprod(factors, dtype=np.uint64)


def mixed(values: np.ndarray) -> np.ndarray:
    """Spread each number over all 64 bits (the last step of SplitMix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def polynomials(values: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """One hash for each stretch of values.

    Args:
        values: (n,) uint64.
        bounds: (stretches + 1,) where each begins, from 0 to n; none is empty.
    """
    lengths = np.diff(bounds)
    places = np.arange(len(values)) - np.repeat(bounds[:-1], lengths)
    terms = values * powers(int(lengths.max()))[places]
    return mixed(np.add.reduceat(terms, bounds[:-1]))


def hash_sentences(arrays: ShardArrays, keys: np.ndarray) -> Texts:
    """Every sentence of a shard."""
    bounds = arrays.sentences.astype(np.int64)
    count = len(bounds) - 1
    hashes = np.zeros(count, dtype=np.uint64)
    first = 0
    while first < count:
        after = int(np.searchsorted(bounds, bounds[first] + CHUNK_TOKENS, side="right")) - 1
        stop = min(count, max(first + 1, after))
        values = keys[arrays.tokens[bounds[first] : bounds[stop]]]
        hashes[first:stop] = polynomials(values, bounds[first : stop + 1] - bounds[first])
        first = stop
    return Texts(hashes, np.diff(bounds))


def hash_documents(arrays: ShardArrays, sentences: Texts) -> Texts:
    """Every document of a shard, from the hashes of its sentences."""
    bounds = arrays.documents.astype(np.int64)
    hashes = polynomials(sentences.hashes, bounds)
    return Texts(hashes, np.add.reduceat(sentences.tokens, bounds[:-1]))


class Tally:
    """How often each text came.

    Args:
        most: different texts that are remembered.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.level = 0
        """One in 2 ** level of the different texts is remembered."""
        self.hashes = np.zeros(0, dtype=np.uint64)
        """(texts,) ascending."""
        self.counts = np.zeros(0, dtype=np.int64)
        self.tokens = np.zeros(0, dtype=np.int64)
        """Of one copy."""
        self.places = np.zeros(0, dtype=np.int64)
        """Where the first copy is, as the caller numbers places."""
        self._waiting: list[tuple[np.ndarray, ...]] = []
        self._waiting_rows = 0

    def add(self, texts: Texts, places: np.ndarray) -> None:
        """Count the texts of one shard."""
        kept = self.is_sampled(texts.hashes)
        ones = np.ones(int(kept.sum()), dtype=np.int64)
        self._waiting.append((texts.hashes[kept], ones, texts.tokens[kept], places[kept]))
        self._waiting_rows += len(ones)
        if self._waiting_rows >= self.most:
            self.settle()

    def is_sampled(self, hashes: np.ndarray) -> np.ndarray:
        """(texts,) bool: whether a text is among those that are remembered."""
        if self.level == 0:
            return np.ones(len(hashes), dtype=bool)
        return hashes >> np.uint64(64 - self.level) == 0

    def settle(self) -> None:
        """Join equal texts, and halve the sample until few enough are left."""
        rows = [(self.hashes, self.counts, self.tokens, self.places), *self._waiting]
        hashes, counts, tokens, places = (np.concatenate(c) for c in zip(*rows, strict=True))
        self._waiting, self._waiting_rows = [], 0
        self.hashes, first, inverse = np.unique(hashes, return_index=True, return_inverse=True)
        self.counts = np.bincount(inverse, counts, len(first)).astype(np.int64)
        self.tokens, self.places = tokens[first], places[first]
        while len(self.hashes) > self.most:
            self.level += 1
            kept = self.is_sampled(self.hashes)
            self.hashes, self.counts = self.hashes[kept], self.counts[kept]
            self.tokens, self.places = self.tokens[kept], self.places[kept]

    @property
    def texts(self) -> int:
        """Texts counted, copies too."""
        return int(self.counts.sum())

    @property
    def copies(self) -> int:
        """Texts that came before."""
        return self.texts - len(self.counts)

    @property
    def copied_tokens(self) -> int:
        """Tokens of texts that came before."""
        return int(((self.counts - 1) * self.tokens).sum())

    @property
    def all_tokens(self) -> int:
        """Tokens of all texts counted."""
        return int((self.counts * self.tokens).sum())

    @property
    def looked_at(self) -> str:
        """Such as `all` or `a sample of 1 in 8`."""
        return "all" if self.level == 0 else f"a sample of 1 in {1 << self.level}"
