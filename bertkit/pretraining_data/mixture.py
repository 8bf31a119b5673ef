"""Several token stores as one corpus, each with a share of the examples.

Multilingual BERT (google-research/bert, `multilingual.md`) has one store per language and samples a
language with the share p of all text in proportion to p**S, with S = 0.7, so that small languages
are seen more often than their share and large ones less often.

The store is not sampled at random: the next sequence comes from the store furthest behind its
share. So a store is never a whole sequence ahead of its share, and never more than
1/2 + 1/3 + ... + 1/n sequences behind it, where n is the number of stores. Each store is cut into
examples separately; a random next sentence comes from the same store.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bertkit.corpus.store import ShardArrays, ShardInfo, TokenStore
from bertkit.errors import BertkitError
from bertkit.pretraining_data.pairs import EXAMPLE_DTYPE, PairOptions
from bertkit.pretraining_data.sampler import START, AnyPosition, DataPosition, ExampleSampler
from bertkit.tokenizer.wordpiece import Tokenizer

PARTS = 10**8
"""Shares are integers out of about this total, so that counting is exact on every machine, up to
90 billion sequences."""

MEASURED = 10_000
"""The number of examples that the statistics of a mixture are computed from."""


class MixedStore(TokenStore):
    """A token store with the shards of several stores of one tokenizer and one split.

    Args:
        stores: the stores, at least one; the same store may occur twice.
        shares: each store's share of the examples, above 0; only their proportions matter.
    """

    def __init__(self, stores: Sequence[TokenStore], shares: Sequence[float]) -> None:
        # The constructor of TokenStore would read a manifest, which a mixture does not have.
        if len(stores) != len(shares) or not stores or len({store.split for store in stores}) > 1:
            raise ValueError("a mixture needs stores of one split and a share for each")
        first = stores[0]
        for store in stores[1:]:
            if store.tokenizer_hash != first.tokenizer_hash:
                store.check_tokenizer(first.tokenizer, f"store {first.folder}")
        self.stores = tuple(stores)
        self.parts = whole_parts(shares)
        self.shares: list[float] = (self.parts / self.parts.sum()).tolist()
        """Each store's share of the examples; the shares sum to 1."""
        self.folder = Path(f"mixture of {len(stores)} stores")  # a name for messages, not a path
        self.split = first.split
        self.manifest = {}
        self.vocabulary_size = first.vocabulary_size
        self.tokenizer_hash = first.tokenizer_hash
        self.first_shards = [0, *accumulate(len(store.shards) for store in stores)]
        """(stores + 1,) the index of each store's first shard in the mixture."""

    @cached_property
    def shards(self) -> Sequence[ShardInfo]:  # type: ignore[override]
        """The shards of all stores."""
        return [shard for store in self.stores for shard in store.shards]

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of all stores."""
        return self.stores[0].tokenizer

    @cached_property
    def unigrams(self) -> np.ndarray:
        """(vocabulary,) float64 share of each id, with the stores weighted by their shares."""
        parts = [
            share * store.unigrams / max(1, store.unigrams.sum()) for store, share in self.members
        ]
        return np.sum(parts, axis=0)

    @property
    def members(self) -> list[tuple[TokenStore, float]]:
        """The stores with their shares of the examples."""
        return list(zip(self.stores, self.shares, strict=True))

    @property
    def held_out(self) -> MixedStore | None:
        """The held-out splits with at least two documents, in the same proportions, or None."""
        opened = [(store.held_out, share) for store, share in self.members]
        found = [(store, share) for store, share in opened if store]
        return MixedStore(*zip(*found, strict=True)) if found else None

    def _total(self, field: str) -> int:
        return sum(store._total(field) for store in self.stores)

    def checksums(self) -> str:
        """Return the checksums of all files of all stores, in order, as hex."""
        return "".join(store.checksums() for store in self.stores)

    def arrays(self, index: int) -> ShardArrays:
        """Return the memory-mapped arrays of one shard."""
        member = bisect_right(self.first_shards, index) - 1
        return self.stores[member].arrays(index - self.first_shards[member])

    def origin(self) -> dict[str, Any]:
        """Return the record by which a run recognises the mixture."""
        return {
            "store": str(self.folder),
            "stores": [str(store.folder) for store in self.stores],
            "shares": self.shares,
            "corpora": [store.content_hash for store in self.stores],
        }

    def describe(self) -> list[dict[str, Any]]:
        """Return each store's place, tokens, shares of tokens and examples, held-out documents."""
        return [
            {
                "store": str(store.folder),
                "tokens": store.tokens,
                "token_share": store.tokens / max(1, self.tokens),
                "share": share,
                "held_out_documents": TokenStore(store.folder, "held_out").documents,
            }
            for store, share in self.members
        ]


def whole_parts(shares: Sequence[float]) -> np.ndarray:
    """Convert shares, which need not sum to 1, to (stores,) int64 with a sum of about `PARTS`."""
    total = sum(shares)
    return np.array([max(1, round(share / total * PARTS)) for share in shares], dtype=np.int64)


def mix_stores(
    stores: Sequence[TokenStore], *, smoothing: float | None = None, weights: Sequence[float] = ()
) -> MixedStore:
    """Build a mixture of training stores.

    Args:
        stores: the training splits, all made with one tokenizer.
        smoothing: the exponent S; a store with n tokens gets a share proportional to n**S. With 1,
            the default, shares are proportional to tokens; 0 makes them equal; multilingual BERT
            uses 0.7.
        weights: the shares, one for each store, in any unit; an alternative to smoothing.

    Raises:
        BertkitError: the tokenizers differ, a store has no text, smoothing or a weight is out of
            range, the number of weights is wrong, or both smoothing and weights are given.
    """
    for store in stores:
        if not store.tokens:
            raise BertkitError(f"store {store.folder} has no {store.split} documents; leave it out")
    if weights:
        if smoothing is not None:
            raise BertkitError("give either smoothing or weights: both say what the shares are")
        return MixedStore(stores, checked_weights(weights, stores))
    exponent = 1.0 if smoothing is None else smoothing
    if not 0 <= exponent <= 1:
        raise BertkitError(
            f"smoothing is {exponent}; it must be between 0 (all stores alike) and 1 (as they are)"
        )
    return MixedStore(stores, smoothed_shares([store.tokens for store in stores], exponent))


def smoothed_shares(tokens: Sequence[int], smoothing: float) -> list[float]:
    """Return exponentially smoothed shares: p**S for the share p of all tokens, normalised to 1."""
    powers = [(count / sum(tokens)) ** smoothing for count in tokens]
    return [power / sum(powers) for power in powers]


def checked_weights(weights: Sequence[float], stores: Sequence[TokenStore]) -> Sequence[float]:
    """Return the weights after checking that they can be shares of the stores."""
    if len(weights) != len(stores):
        raise BertkitError(
            f"there are {len(weights)} weights for {len(stores)} stores; give one for each, in "
            "their order"
        )
    for weight, store in zip(weights, stores, strict=True):
        if not (isfinite(weight) and weight > 0):
            raise BertkitError(
                f"the weight of store {store.folder} is {weight:g}; it must be above 0. Leave out "
                "a store that should have no share"
            )
    return weights


class MixedPosition(NamedTuple):
    """A position in the examples of a mixture; as JSON, two lists."""

    places: list[DataPosition]
    """The position of the next example of each store."""
    counts: list[int]
    """The number of sequences taken from each store so far."""


class MixtureSampler:
    """Iterates over the examples of a mixture in order, with an `ExampleSampler` for each store.

    Memory holds one window of each store, and the next one once half of it is used. A store that
    reaches its end starts a new epoch, independently of the others.
    """

    def __init__(self, store: MixedStore, options: PairOptions, seed: int) -> None:
        self.store = store
        self.tables: list[ExampleSampler] = []
        windows = 0
        for member in store.stores:  # distinct window numbers give distinct random numbers
            self.tables.append(ExampleSampler(member, options, seed, first_window=windows))
            windows += self.tables[-1].windows

    def first(self, limit: int | None = None) -> np.ndarray:
        """Return the first rows of the mixture, in its proportions.

        There are at most `limit` (default 10,000) rows, and at most as many as the first windows
        hold together. A small store with a large share may run through several epochs for them.
        """
        there = sum(len(table.window_rows(0, 0)) for table in self.tables)
        return self.take(START, min(there, MEASURED if limit is None else limit))[0]

    def close(self) -> None:
        """Cancel the prefetch of the next windows."""
        for table in self.tables:
            table.close()

    def take(self, position: AnyPosition, count: int) -> tuple[np.ndarray, MixedPosition]:
        """Return the next `count` rows from a position, and the position after them."""
        members = len(self.tables)
        begun = MixedPosition([START] * members, [0] * members) if position == START else position
        places = [DataPosition(*member) for member in begun[0]]
        chosen, counts = deal_examples(self.store.parts, begun[1], count)
        rows = np.empty(count, dtype=EXAMPLE_DTYPE)
        for member in np.unique(chosen).tolist():
            mine = np.flatnonzero(chosen == member)
            taken, places[member] = self.tables[member].take(places[member], len(mine))
            for side in ("a_shard", "b_shard"):
                taken[side] += self.store.first_shards[member]
            rows[mine] = taken
        return rows, MixedPosition(places, counts)


def deal_examples(
    parts: np.ndarray, counts: Sequence[int], number: int
) -> tuple[np.ndarray, list[int]]:
    """Choose the store of each of the next sequences.

    Sequence k (from 0) comes from the store with the largest share * (k + 1) - count, the first of
    equals.

    Args:
        parts: (stores,) int64 shares as integers; see `whole_parts`.
        counts: (stores,) the number of sequences taken from each store so far.
        number: the number of sequences to choose stores for.

    Returns:
        (number,) the index of each sequence's store, and (stores,) the counts after them.
    """
    after, total = np.array(counts, dtype=np.int64), parts.sum()
    deficits = parts * after.sum() - after * total  # in units of 1 / total of a sequence
    chosen = np.empty(number, dtype=np.int64)
    for position in range(number):
        deficits += parts
        member = chosen[position] = deficits.argmax()
        deficits[member] -= total
    after += np.bincount(chosen, minlength=len(parts))
    return chosen, after.tolist()
