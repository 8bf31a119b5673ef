"""Equal sentences and documents of a token store, found by hashes of their ids in bounded memory.

A shard is memory-mapped and read in chunks, in one pass. A hash is a polynomial over random 64-bit
keys of the tokens. When there are too many different hashes, only the lowest half of their range is
kept, and so on: what is kept is a sample of the texts that contains all copies of every text in it,
so the shares of copies are unbiased, and memory does not grow with the corpus.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from bertkit.corpus.shards import ShardArrays
from bertkit.corpus.store import TokenStore
from bertkit.errors import BertkitError
from bertkit.training.journal import Console

CHUNK_TOKENS = 1 << 20
"""Tokens that are hashed at a time."""
HASH_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
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
    """(count,) uint64: the powers of `HASH_MULTIPLIER`, beginning with 1."""
    factors = np.full(count, HASH_MULTIPLIER, dtype=np.uint64)
    factors[:1] = 1
    return np.cumprod(factors, dtype=np.uint64)


def mix_hashes(values: np.ndarray) -> np.ndarray:
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
    return mix_hashes(np.add.reduceat(terms, bounds[:-1]))


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


MOST_DOCUMENTS = 1_000_000
"""Different documents that are remembered; beyond that, a sample of them."""
MOST_SENTENCES = 1_000_000
"""Different sentences that are remembered."""
SHORT_SENTENCE = 8
"""Tokens; shorter sentences repeat in any language and are not looked at."""
LONG_SENTENCE = 125
"""Tokens that fill an example of length 128; a longer sentence leaves no room for B."""
SHARD_BITS = 40
"""A place is a shard's index, and in so many lower bits a sentence within it."""


@dataclass
class Scan:
    """What one pass over a split found."""

    keys: np.ndarray
    """(vocabulary,) random numbers that the hashes are made of."""
    damaged: list[str] = field(default_factory=list)
    """One line for each shard that cannot be used."""
    whole: list[int] = field(default_factory=list)
    """Indices of the shards that can; the numbers below are theirs."""
    copies: Tally = field(default_factory=lambda: Tally(MOST_DOCUMENTS))
    """Of documents."""
    repeats: Tally = field(default_factory=lambda: Tally(MOST_SENTENCES))
    """Of sentences of `SHORT_SENTENCE` tokens and more."""
    documents: int = 0
    tokens: int = 0
    single: int = 0
    """Documents of one sentence."""
    largest: int = 0
    """Tokens of the largest document."""
    long_tokens: int = 0
    """Tokens of sentences longer than `LONG_SENTENCE`."""

    def add(self, index: int, arrays: ShardArrays) -> None:
        """Look at one shard."""
        sentences = hash_sentences(arrays, self.keys)
        documents = hash_documents(arrays, sentences)
        places = np.arange(len(sentences.hashes)) + (index << SHARD_BITS)
        shown = sentences.tokens >= SHORT_SENTENCE
        self.repeats.add(Texts(sentences.hashes[shown], sentences.tokens[shown]), places[shown])
        self.copies.add(documents, places[arrays.documents[:-1].astype(np.int64)])
        self.documents += len(documents.hashes)
        self.tokens += len(arrays.tokens)
        self.single += int((np.diff(arrays.documents) == 1).sum())
        self.largest = max(self.largest, int(documents.tokens.max()))
        self.long_tokens += int(sentences.tokens[sentences.tokens > LONG_SENTENCE].sum())
        self.whole.append(index)


def scan(store: TokenStore, console: Console) -> Scan:
    """Read every shard of a split once; damaged ones are noted and left out."""
    result, done = Scan(piece_keys(store.vocabulary_size)), 0
    console.start(store.tokens, title=f"reading {store.split}", unit="tokens")
    for index, shard in enumerate(store.shards):
        try:
            result.add(index, shard_arrays(store, index))
        except BertkitError as error:
            result.damaged.append(str(error))
        done += shard.tokens
        console.update({"done": done})
    result.copies.settle()
    result.repeats.settle()
    console.close()
    return result


def shard_arrays(store: TokenStore, index: int) -> ShardArrays:
    """The arrays of a shard.

    Raises:
        BertkitError: a file is missing, torn or corrupt, offsets do not fit, or an id is outside
            of the vocabulary.
    """
    shard = store.shards[index]
    try:
        return store.arrays(index)
    except (ValueError, OSError) as error:
        raise BertkitError(f"shard {shard.name} cannot be read ({error})") from None
