"""One pass over the shards of a token store: sizes, and the hashes of its texts.

A shard is memory-mapped and read in chunks, and of the hashes only so many are remembered, so
memory does not grow with the corpus.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from bertkit.corpus.shards import ShardArrays
from bertkit.corpus.store import TokenStore
from bertkit.doctor.copies import Tally, Texts, hash_documents, hash_sentences, piece_keys
from bertkit.errors import BertkitError
from bertkit.training.journal import Console

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
            result.add(index, open_shard(store, index))
        except BertkitError as error:
            result.damaged.append(str(error))
        done += shard.tokens
        console.update({"done": done})
    result.copies.settle()
    result.repeats.settle()
    console.close()
    return result


def open_shard(store: TokenStore, index: int) -> ShardArrays:
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
