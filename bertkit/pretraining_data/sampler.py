"""The examples of a store in their order of use, a pure function of (seed, position).

An epoch is a random order of the store's shards, cut into windows of a few shards; a window is a
shuffled table of examples (`plan_window`; paper, appendix A.2). A position is (epoch, window,
offset), so seeking costs one window's plan, whatever the size of the corpus. Once half of a window
is used, another thread plans the next one and verifies its shards, so that no step waits.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import NamedTuple

import numpy as np

from bertkit.corpus.store import TokenStore
from bertkit.errors import BertkitError
from bertkit.pretraining_data.pairs import PairOptions, plan_window
from bertkit.pretraining_data.rng import SHARD_ORDER, keyed_rng

WINDOW_SHARDS = 8
"""The number of shards whose examples are shuffled together and exchange random next sentences."""


class DataPosition(NamedTuple):
    """A position in the data stream: that of the next example to be used."""

    epoch: int = 0
    window: int = 0
    offset: int = 0


START = DataPosition()


class ExampleSampler:
    """The examples of a store in order, as rows of `pairs.EXAMPLE_DTYPE`.

    Samplers with different seeds, 0 to 2^63 - 1, draw different pairs and masks.
    """

    def __init__(self, store: TokenStore, options: PairOptions, seed: int) -> None:
        if not store.shards:
            raise BertkitError(
                f"store {store.folder} has no {store.split} documents; prepare it with a larger "
                "held_out share or more text"
            )
        self.store, self.options, self.seed = store, options, seed
        self.windows = max(1, len(store.shards) // WINDOW_SHARDS)
        self._current: tuple[tuple[int, int], np.ndarray] | None = None
        self._ahead: tuple[tuple[int, int], Future[np.ndarray]] | None = None

    def window_rows(self, epoch: int, window: int) -> np.ndarray:
        """Return the rows of one window; those of the latest window are cached."""
        wanted = (epoch, window)
        if self._current is None or self._current[0] != wanted:
            self._current = None  # frees its memory for the new window
            ahead, self._ahead = self._ahead, None
            planned = ahead[1] if ahead and ahead[0] == wanted and not ahead[1].cancel() else None
            # if the other thread failed, plan again here, where an error can be raised
            usable = planned is not None and planned.exception() is None
            rows = planned.result() if planned is not None and usable else self._plan(wanted)
            self._current = (wanted, rows)
        return self._current[1]

    def window_shards(self, epoch: int, window: int) -> list[int]:
        """Return the shards of one window: its share of the epoch's random order."""
        order = keyed_rng(self.seed, SHARD_ORDER, epoch=epoch).permutation(len(self.store.shards))
        size, larger = divmod(len(self.store.shards), self.windows)  # the first have one more
        start = window * size + min(window, larger)
        return order[start : start + size + (window < larger)].tolist()

    def _plan(self, name: tuple[int, int]) -> np.ndarray:
        epoch, window = name
        shards = self.window_shards(epoch, window)
        return plan_window(self.store, shards, self.options, self.seed, epoch, window)

    def close(self) -> None:
        """Cancel the planning of the next window."""
        if self._ahead is not None:
            self._ahead[1].cancel()
            self._ahead = None

    def first(self, limit: int | None = None) -> np.ndarray:
        """Return at most `limit` rows of the first window, in order."""
        return self.window_rows(0, 0)[:limit]

    def take(self, position: DataPosition, count: int) -> tuple[np.ndarray, DataPosition]:
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
                    self._ahead = (following, planner().submit(self._plan, following))
                return np.concatenate(taken), DataPosition(epoch, window, offset)
            (epoch, window), offset = following, 0


@cache
def planner() -> ThreadPoolExecutor:
    """Return the thread that plans ahead, which all samplers of the process share."""
    return ThreadPoolExecutor(1, thread_name_prefix="bertkit-plan")
