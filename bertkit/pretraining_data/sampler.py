"""The examples of a store in their order of use, a pure function of (seed, position).

An epoch is a random order of the store's shards, cut into windows of a few shards; a window is a
shuffled table of examples (`plan_block`; paper, appendix A.2). A position is (epoch, window,
offset), so seeking costs one window's plan, whatever the size of the corpus. Once half of a window
is used, another thread plans the next one and verifies its shards, so that no step waits.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from bertkit.corpus.store import TokenStore
from bertkit.errors import BertkitError
from bertkit.pretraining_data.pairs import PairOptions, plan_block
from bertkit.pretraining_data.rng import SHARD_ORDER, keyed_rng

WINDOW_SHARDS = 8
"""The number of shards whose examples are shuffled together and exchange random next sentences."""


class DataPosition(NamedTuple):
    """A position in the data stream: that of the next example to be used."""

    epoch: int = 0
    window: int = 0
    offset: int = 0


START = DataPosition()

AnyPosition = tuple[Any, ...]
"""A `DataPosition`, or a `mixture.MixedPosition`; `START` is the first position of both."""


@runtime_checkable  # for the checks of shapes in the tests
class ExampleSource(Protocol):
    """Examples in their order of use: an `ExampleSampler` or a `mixture.MixtureSampler`."""

    def take(self, position: Any, count: int) -> tuple[np.ndarray, AnyPosition]:
        """Return the next `count` rows from a position, and the position after them."""

    def first(self, limit: int | None = None) -> np.ndarray:
        """Return at most `limit` of the first rows, for statistics or evaluation."""

    def close(self) -> None:
        """Cancel the prefetch of the next window."""


class ExampleSampler:
    """Iterates over the examples of a store in order, as rows of `pairs.EXAMPLE_DTYPE`.

    Samplers with the same seed, 0 to 2^63 - 1, and different window numbers, which count from
    `first_window`, draw different pairs and masks.
    """

    def __init__(
        self, store: TokenStore, options: PairOptions, seed: int, first_window: int = 0
    ) -> None:
        if not store.shards:
            raise BertkitError(
                f"store {store.folder} has no {store.split} documents; prepare it with a larger "
                "held_out share or more text"
            )
        self.store = store
        self.options = options
        self.seed = seed
        self.first_window = first_window
        self.windows = max(1, len(store.shards) // WINDOW_SHARDS)
        self._current: tuple[tuple[int, int], np.ndarray] | None = None
        self._order: tuple[int, np.ndarray] | None = None
        self._ahead: Prefetch | None = None

    def window_rows(self, epoch: int, window: int) -> np.ndarray:
        """Return the rows of one window; those of the latest window are cached."""
        wanted = (epoch, window)
        if self._current is None or self._current[0] != wanted:
            self._current = None  # frees its memory for the new window
            ahead, self._ahead = self._ahead, None
            rows = ahead.result(wanted) if ahead else None
            # If the other thread failed, plan again here, where an error can be raised.
            self._current = (wanted, self._plan(wanted) if rows is None else rows)
        return self._current[1]

    def window_shards(self, epoch: int, window: int) -> list[int]:
        """Return the shards of one window: its share of the epoch's random order."""
        known = self._order  # another thread may plan the next epoch
        if known is None or known[0] != epoch:
            rng = keyed_rng(self.seed, SHARD_ORDER, epoch=epoch, window=self.first_window)
            known = self._order = (epoch, rng.permutation(len(self.store.shards)))
        size, larger = divmod(len(self.store.shards), self.windows)  # the first have one more
        start = window * size + min(window, larger)
        return known[1][start : start + size + (window < larger)].tolist()

    def _plan(self, name: tuple[int, int]) -> np.ndarray:
        epoch, window = name
        number = self.first_window + window
        shards = self.window_shards(epoch, window)
        return plan_block(self.store, shards, self.options, self.seed, epoch, number)

    def _plan_ahead(self, name: tuple[int, int], stop: threading.Event) -> np.ndarray | None:
        """Plan a window in another thread; return None if it was cancelled in the meantime."""
        for shard in self.window_shards(*name):
            if stop.is_set():
                return None
            self.store.arrays(shard)
        return None if stop.is_set() else self._plan(name)

    def close(self) -> None:
        """Cancel the prefetch of the next window."""
        if self._ahead is not None:
            self._ahead.give_up()
            self._ahead = None

    def first(self, limit: int | None = None) -> np.ndarray:
        """Return at most `limit` rows of the first window, in order."""
        return self.window_rows(0, 0)[:limit]

    def take(self, position: AnyPosition, count: int) -> tuple[np.ndarray, DataPosition]:
        """Return the next `count` rows, across epochs if needed, and the position after them."""
        epoch, window, offset = position
        taken: list[np.ndarray] = []
        missing = count
        while True:
            whole = self.window_rows(epoch, window)
            rows = whole[offset : offset + missing]
            taken.append(rows)
            missing -= len(rows)
            offset += len(rows)
            last = window + 1 == self.windows
            following = (epoch + 1, 0) if last else (epoch, window + 1)
            if missing == 0:
                if 2 * offset >= len(whole) and self._ahead is None:
                    self._ahead = Prefetch(self, following)
                return np.concatenate(taken), DataPosition(epoch, window, offset)
            (epoch, window), offset = following, 0


class Prefetch:
    """A window that another thread is planning; one thread serves all samplers of the process."""

    def __init__(self, examples: ExampleSampler, name: tuple[int, int]) -> None:
        self.name = name
        self.stop = threading.Event()
        self.rows: Future[np.ndarray | None] = start_planner().submit(
            examples._plan_ahead, name, self.stop
        )

    def result(self, name: tuple[int, int]) -> np.ndarray | None:
        """Return the rows if they are of the named window and were planned without an error."""
        if name != self.name or self.rows.cancel():
            self.give_up()
            return None
        return None if self.rows.exception() else self.rows.result()

    def give_up(self) -> None:
        """Cancel the planning and discard its result."""
        self.stop.set()
        self.rows.cancel()


@cache
def start_planner() -> ThreadPoolExecutor:
    """Return the thread that plans ahead, which all samplers share."""
    return ThreadPoolExecutor(1, thread_name_prefix="bertkit-plan")
