"""Counter-based random numbers, which depend on their key and not on earlier draws.

The generator is Philox (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), keyed
by (seed, purpose) and started at the counter (row, window, epoch). So any process can draw the
pairs of a window and the masks of an example, in any order and any number of times.
"""

from __future__ import annotations

import numpy as np

SHARD_ORDER, PAIRS, MASKS, FINE_TUNING, DATA_SPLIT = range(5)
"""Purposes; two purposes never share random numbers."""


def keyed_rng(
    seed: int, purpose: int, *, epoch: int = 0, window: int = 0, row: int = 0
) -> np.random.Generator:
    """Return the random generator of one purpose at one position of the corpus."""
    counter = np.array([0, row, window, epoch], dtype=np.uint64)
    key = np.array([seed, purpose], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(counter=counter, key=key))
