"""Find duplicate sentences and documents in a token store by hashing their ids in bounded memory.

Each shard is memory-mapped and read in chunks, in one pass. A hash is a polynomial over random
64-bit keys of the tokens. When there are too many distinct hashes, only the lower half of the hash
range is kept, and it is halved again as often as necessary. A sample kept in this way contains
every copy of each text in it, so the duplicate shares are unbiased, and memory does not grow with
the corpus.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from bertkit.console import Console
from bertkit.corpus.minhash import hash_parameters, hash_segments
from bertkit.corpus.store import ShardArrays, TokenStore
from bertkit.errors import BertkitError

CHUNK_TOKENS = 1 << 20
"""The number of tokens that are hashed at a time."""


class Texts(NamedTuple):
    """The sentences, or the documents, of one shard: one array entry for each text."""

    hashes: np.ndarray
    """(texts,) uint64 hash of each text."""
    tokens: np.ndarray
    """(texts,) int64 number of tokens in each text."""


def hash_sentences(arrays: ShardArrays, keys: np.ndarray) -> Texts:
    """Hash every sentence of a shard; `keys` are (vocabulary,) uint64 random numbers of the ids."""
    bounds = arrays.sentences.astype(np.int64)
    count = len(bounds) - 1
    hashes = np.zeros(count, dtype=np.uint64)
    first = 0
    while first < count:
        after = int(np.searchsorted(bounds, bounds[first] + CHUNK_TOKENS, side="right")) - 1
        stop = min(count, max(first + 1, after))
        values = keys[arrays.tokens[bounds[first] : bounds[stop]]]
        hashes[first:stop] = hash_segments(values, np.diff(bounds[first : stop + 1]))
        first = stop
    return Texts(hashes, np.diff(bounds))


def hash_documents(arrays: ShardArrays, sentences: Texts) -> Texts:
    """Hash every document of a shard, using the hashes of its sentences."""
    bounds = arrays.documents.astype(np.int64)
    hashes = hash_segments(sentences.hashes, np.diff(bounds))
    return Texts(hashes, np.add.reduceat(sentences.tokens, bounds[:-1]))


class Tally:
    """A counter of how often each text occurs."""

    def __init__(self, maximum: int) -> None:
        self.maximum = maximum
        self.level = 0
        """One in 2 ** level of the distinct texts is remembered."""
        self.hashes = np.zeros(0, dtype=np.uint64)
        """(texts,) hashes in ascending order."""
        self.counts = np.zeros(0, dtype=np.int64)
        self.tokens = np.zeros(0, dtype=np.int64)
        """(texts,) number of tokens in one copy."""
        self.places = np.zeros(0, dtype=np.int64)
        """(texts,) position of the first copy, in the caller's numbering."""
        self._waiting: list[tuple[np.ndarray, ...]] = []

    def add(self, texts: Texts, places: np.ndarray) -> None:
        """Count the texts of one shard, whose positions are `places`: (texts,) int64."""
        kept = self.is_sampled(texts.hashes)
        ones = np.ones(int(kept.sum()), dtype=np.int64)
        self._waiting.append((texts.hashes[kept], ones, texts.tokens[kept], places[kept]))
        if sum(len(rows[0]) for rows in self._waiting) >= self.maximum:
            self.settle()

    def is_sampled(self, hashes: np.ndarray) -> np.ndarray:
        """Return whether each text is in the sample that is remembered: (texts,) bool."""
        if self.level == 0:
            return np.ones(len(hashes), dtype=bool)
        return hashes >> np.uint64(64 - self.level) == 0

    def settle(self) -> None:
        """Merge equal texts, and halve the sample until at most `maximum` texts are left."""
        rows = [(self.hashes, self.counts, self.tokens, self.places), *self._waiting]
        hashes, counts, tokens, places = (np.concatenate(c) for c in zip(*rows, strict=True))
        self._waiting = []
        self.hashes, first, inverse = np.unique(hashes, return_index=True, return_inverse=True)
        self.counts = np.bincount(inverse, counts, len(first)).astype(np.int64)
        self.tokens, self.places = tokens[first], places[first]
        while len(self.hashes) > self.maximum:
            self.level += 1
            kept = self.is_sampled(self.hashes)
            self.hashes, self.counts = self.hashes[kept], self.counts[kept]
            self.tokens, self.places = self.tokens[kept], self.places[kept]

    @property
    def texts(self) -> int:
        """The number of texts counted, including copies."""
        return int(self.counts.sum())

    @property
    def copies(self) -> int:
        """The number of texts that are copies of earlier ones."""
        return self.texts - len(self.counts)

    @property
    def copied_tokens(self) -> int:
        """The number of tokens in texts that are copies of earlier ones."""
        return int(((self.counts - 1) * self.tokens).sum())

    @property
    def all_tokens(self) -> int:
        """The number of tokens in all texts counted."""
        return int((self.counts * self.tokens).sum())

    @property
    def looked_at(self) -> str:
        """The part of the texts that was compared, such as `all` or `a sample of 1 in 8`."""
        return "all" if self.level == 0 else f"a sample of 1 in {1 << self.level}"


MAX_DOCUMENTS = 1_000_000
"""The maximum number of distinct documents to remember; beyond it, a sample of them is kept."""
MAX_SENTENCES = 1_000_000
"""The maximum number of distinct sentences to remember."""
SHORT_SENTENCE = 8
"""The minimum number of tokens of a sentence that is compared: shorter ones always repeat."""
LONG_SENTENCE = 125
"""The number of tokens that fill an example of length 128 and leave no room for B."""
SHARD_BITS = 40
"""The number of low bits of a position that hold the sentence; the bits above hold the shard."""


@dataclass
class Scan:
    """The statistics that one pass over a split collects."""

    keys: np.ndarray
    """(vocabulary,) random numbers from which the hashes are computed."""
    damaged: list[str] = field(default_factory=list)
    """One error message for each shard that cannot be read."""
    whole: list[int] = field(default_factory=list)
    """The indices of the undamaged shards; all statistics below cover only these."""
    copies: Tally = field(default_factory=lambda: Tally(MAX_DOCUMENTS))
    """The counts of the documents."""
    repeats: Tally = field(default_factory=lambda: Tally(MAX_SENTENCES))
    """The counts of the sentences that have at least `SHORT_SENTENCE` tokens."""
    documents: int = 0
    tokens: int = 0
    single: int = 0
    """The number of documents that have only one sentence."""
    largest: int = 0
    """The number of tokens in the largest document."""
    long_tokens: int = 0
    """The number of tokens in sentences longer than `LONG_SENTENCE`."""

    def add(self, index: int, arrays: ShardArrays) -> None:
        """Add the statistics of the shard with this index."""
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
    """Read every shard of a split once; damaged shards are recorded and skipped."""
    result, done = Scan(hash_parameters(store.vocabulary_size, 4)), 0
    console.start(store.tokens, title=f"reading {store.split}", unit="tokens")
    for index, shard in enumerate(store.shards):
        try:
            result.add(index, store.arrays(index))
        except BertkitError as error:
            result.damaged.append(str(error))
        except (ValueError, OSError) as error:
            result.damaged.append(f"shard {shard.name} cannot be read ({error})")
        done += shard.tokens
        console.update({"done": done})
    result.copies.settle()
    result.repeats.settle()
    console.close()
    return result
