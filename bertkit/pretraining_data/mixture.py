"""Several token stores as one corpus, each with a share of the examples.

Multilingual BERT (google-research/bert, `multilingual.md`) has one store a language and samples a
language of the share p of all text as if its share were p**S, with S = 0.7, so that small
languages are seen more often than their share and large ones less often.

The sharing is no draw: the next sequence comes from the store that lags furthest behind its share.
So a store is never a whole sequence ahead of its share, and never more than 1/2 + 1/3 + ... + 1/n
sequences behind it, where n is the number of stores. Each store is cut into examples by itself; a
random next sentence comes from the same store.
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

from bertkit.corpus.shards import ShardArrays, ShardInfo
from bertkit.corpus.store import TokenStore
from bertkit.errors import BertkitError
from bertkit.pretraining_data.pairs import EXAMPLE_DTYPE, PairOptions
from bertkit.pretraining_data.sampler import START, AnyPosition, DataPosition, ExampleSampler
from bertkit.tokenizer.wordpiece import Tokenizer

PARTS = 10**8
"""Shares are whole numbers of this many parts, so that counting is exact on every machine; good for
90 thousand million sequences."""

MEASURED = 10_000
"""Examples that statistics of a mixture are made from."""


class MixedStore(TokenStore):
    """Stores of one tokenizer and one split, looking like a store with the shards of all.

    Args:
        stores: at least one; the same store may be there twice.
        shares: of the examples, one for each store, above 0; only their proportions count.

    Raises:
        BertkitError: the stores have different tokenizers.
    """

    def __init__(self, stores: Sequence[TokenStore], shares: Sequence[float]) -> None:
        # Nothing is read here, and so the constructor of TokenStore has nothing to do.
        if len(stores) != len(shares) or not stores or len({store.split for store in stores}) > 1:
            raise ValueError("a mixture needs stores of one split and a share for each")
        first = stores[0]
        for store in stores[1:]:
            if store.tokenizer_hash != first.tokenizer_hash:
                store.check_tokenizer(first.tokenizer, f"store {first.place}")
        self.stores = tuple(stores)
        self.parts = whole_parts(shares)
        self.shares: list[float] = (self.parts / self.parts.sum()).tolist()
        """Of the examples, one for each store; their sum is 1."""
        self.remote = None
        self.folder = Path(f"mixture of {len(stores)} stores")  # a name for messages, no place
        self.split = first.split
        self.manifest = {}
        self.vocabulary_size = first.vocabulary_size
        self.tokenizer_hash = first.tokenizer_hash
        self.first_shards = [0, *accumulate(len(store.shards) for store in stores)]
        """(stores + 1,) the number that each store's first shard has here."""

    @cached_property
    def shards(self) -> Sequence[ShardInfo]:  # type: ignore[override]
        """The shards of all stores."""
        return [shard for store in self.stores for shard in store.shards]

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that all stores have."""
        return self.stores[0].tokenizer

    @cached_property
    def unigrams(self) -> np.ndarray:
        """(vocabulary,) float64 share of each id, the stores weighted by their shares."""
        parts = [
            share * store.unigrams / max(1, store.unigrams.sum())
            for share, store in zip(self.shares, self.stores, strict=True)
        ]
        return np.sum(parts, axis=0)

    @cached_property
    def held_out(self) -> MixedStore | None:
        """The held-out documents of the stores that have at least two, in the same proportions."""
        opened = [TokenStore(store.folder, "held_out") for store in self.stores]
        pairs = zip(opened, self.shares, strict=True)
        found = [(store, share) for store, share in pairs if store.documents > 1]
        return MixedStore(*zip(*found, strict=True)) if found else None

    def _total(self, field: str) -> int:
        return sum(store._total(field) for store in self.stores)

    def checksums(self) -> str:
        """The checksums of all files of all stores, in order, as hex."""
        return "".join(store.checksums() for store in self.stores)

    def arrays(self, index: int) -> ShardArrays:
        """The memory-mapped arrays of one shard.

        Raises:
            BertkitError: the shard is missing, torn or corrupt.
        """
        member = bisect_right(self.first_shards, index) - 1
        return self.stores[member].arrays(index - self.first_shards[member])

    def origin(self) -> dict[str, Any]:
        """The record by which a run recognises the mixture."""
        return {
            "store": str(self.folder),
            "stores": [store.place for store in self.stores],
            "shares": self.shares,
            "corpora": [store.content_hash for store in self.stores],
        }

    def describe(self) -> list[dict[str, Any]]:
        """Of each store: folder, tokens, share of all tokens, share of examples, held out."""
        return [
            {
                "store": store.place,
                "tokens": store.tokens,
                "token_share": store.tokens / max(1, self.tokens),
                "share": share,
                "held_out_documents": TokenStore(store.folder, "held_out").documents,
            }
            for store, share in zip(self.stores, self.shares, strict=True)
        ]


def whole_parts(shares: Sequence[float]) -> np.ndarray:
    """(stores,) int64: shares, which need not add up to 1, in whole parts of about `PARTS`."""
    total = sum(shares)
    return np.array([max(1, round(share / total * PARTS)) for share in shares], dtype=np.int64)


def mix_stores(
    stores: Sequence[TokenStore],
    *,
    smoothing: float | None = None,
    weights: Sequence[float] = (),
) -> MixedStore:
    """A mixture of training stores.

    Args:
        stores: the training splits, all made with one tokenizer.
        smoothing: S; a store with n tokens gets a share proportional to n**S. 1, which is also
            what None means, takes shares as they are, 0 makes them equal; multilingual BERT has
            0.7.
        weights: the shares, one for each store, in any unit; instead of smoothing.

    Raises:
        BertkitError: different tokenizers, a store without training text, an impossible smoothing
            or weight, a weight too few or too many, or both smoothing and weights.
    """
    for store in stores:
        if not store.tokens:
            raise BertkitError(f"store {store.place} has no {store.split} documents; leave it out")
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
    """Exponentially smoothed shares: p**S for the share p of all tokens, made to add up to 1."""
    powers = [(count / sum(tokens)) ** smoothing for count in tokens]
    return [power / sum(powers) for power in powers]


def checked_weights(weights: Sequence[float], stores: Sequence[TokenStore]) -> Sequence[float]:
    """The weights, if they can be shares of the stores.

    Raises:
        BertkitError: another number of weights than of stores, or one that is not above 0.
    """
    if len(weights) != len(stores):
        raise BertkitError(
            f"there are {len(weights)} weights for {len(stores)} stores; give one for each, in "
            "their order"
        )
    for weight, store in zip(weights, stores, strict=True):
        if not (isfinite(weight) and weight > 0):
            raise BertkitError(
                f"the weight of store {store.place} is {weight:g}; it must be above 0, and a "
                "store without a share is left out"
            )
    return weights


class MixedPosition(NamedTuple):
    """The position of a mixture; as JSON, two lists."""

    places: list[DataPosition]
    """The next example of each store."""
    counts: list[int]
    """Sequences taken from each store so far."""


class MixtureSampler:
    """Walks the examples of a mixture in their order of use: an `ExampleSampler` for each store.

    Memory holds one window of each store, and the next one once half of it is used. A store that
    comes to its end begins a new epoch, whatever the others do.

    Args:
        store: the mixture.
        options: how examples are cut.
        seed: of the run; 0 to 2^63 - 1.
    """

    def __init__(self, store: MixedStore, options: PairOptions, seed: int) -> None:
        self.store = store
        self.tables: list[ExampleSampler] = []
        windows = 0
        for member in store.stores:  # windows of their own numbers: random numbers of their own
            self.tables.append(ExampleSampler(member, options, seed, first_window=windows))
            windows += self.tables[-1].windows

    def first(self, limit: int | None = None) -> np.ndarray:
        """Rows from the beginning, in the shares.

        At most `limit` (10,000 where absent), and as many as the first windows hold together; of a
        small store with a large share they are more than it has, and some repeat its text.
        """
        there = sum(len(table.window_rows(0, 0)) for table in self.tables)
        return self.take(START, min(there, MEASURED if limit is None else limit))[0]

    def close(self) -> None:
        """Cancel the windows that are planned ahead."""
        for table in self.tables:
            table.close()

    def take(self, position: AnyPosition, count: int) -> tuple[np.ndarray, MixedPosition]:
        """The next `count` rows from a position, and the position after them; epochs run on.

        Args:
            position: `START`, a `MixedPosition`, or one that came back from JSON.
            count: of rows.
        """
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
    """Which store gives each of the next sequences.

    Sequence k (from 0) comes from the store with the largest share * (k + 1) - count, the first of
    equals.

    Args:
        parts: (stores,) int64 shares in whole parts.
        counts: (stores,) sequences taken so far.
        number: how many are next.

    Returns:
        (number,) the stores, and (stores,) the counts after them.
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
