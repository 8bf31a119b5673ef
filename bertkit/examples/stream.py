"""The endless stream of pre-training batches, a pure function of (seed, place).

What its targets are is the objective (paper sections 3.1 and 5.1).

An epoch is a random order of the store's shards, cut into windows of a few shards; a window is a
shuffled table of examples (`plan_window`). A place in the stream is (epoch, window, offset), so
seeking costs one window's plan, whatever the size of the corpus. While a window is used, another
thread plans the next one, and fetches and verifies its shards, so that no step waits. The rows of a
batch are chosen in the main process and turned into tensors by any number of loader processes: both
are pure functions, so the batches are the same for any number of workers, and ranks share out the
rows of one global batch.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from bertkit.corpus.store import TokenStore
from bertkit.errors import BertkitError
from bertkit.examples.generator import MASKS, SHARD_ORDER, generator
from bertkit.examples.masking import MaskingOptions, draw_masks
from bertkit.examples.packed import Packed, from_arrays
from bertkit.examples.pairs import PairOptions, example_lengths, plan_window
from bertkit.processes import begin_worker
from bertkit.shapes import SequenceLabels, TargetIndices

WORDS = ("masked", "left_to_right", "right_to_left", "replaced")
"""What the targets are; see `BatchBuilder`."""

WINDOW_SHARDS = 8
"""Shards whose examples are shuffled together and lend each other random next sentences."""


class Place(NamedTuple):
    """Where the stream stands: the next example to be used."""

    epoch: int = 0
    window: int = 0
    offset: int = 0


START = Place()

AnyPlace = tuple[Any, ...]
"""A `Place`, or where a mixture stands (`mixture.MixedPlace`); `START` begins both."""


@runtime_checkable
class Examples(Protocol):
    """Examples in their order of use: an `ExampleTable` or a `mixture.MixtureTable`."""

    def take(self, place: Any, count: int) -> tuple[np.ndarray, AnyPlace]:
        """The next `count` rows from a place, and the place after them."""

    def first(self, limit: int | None = None) -> np.ndarray:
        """Rows from the beginning, to measure or to evaluate on, at most `limit`."""

    def close(self) -> None:
        """Give up what is planned ahead."""


@dataclass(frozen=True)
class PretrainingBatch:
    """Packed examples with the targets of words and of sentence pairs."""

    packed: Packed
    """Ids as the network sees them, masked."""
    target_positions: TargetIndices
    """(targets,) places in the packed tokens."""
    target_ids: TargetIndices
    """(targets,) the true ids there."""
    next_labels: SequenceLabels
    """(sequences,) 0 = B follows A, 1 = B is random (or A and B are swapped)."""

    @property
    def counts(self) -> dict[str, int]:
        """What the sums of the losses are divided by."""
        return {
            "targets": len(self.target_ids),
            "sequences": len(self.next_labels),
            "tokens": len(self.packed.ids),
        }

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> PretrainingBatch:
        """The same batch on another device."""
        return PretrainingBatch(
            self.packed.to(device, non_blocking=non_blocking),
            self.target_positions.to(device, non_blocking=non_blocking),
            self.target_ids.to(device, non_blocking=non_blocking),
            self.next_labels.to(device, non_blocking=non_blocking),
        )


class ExampleTable:
    """Walks the examples of a store in their order of use, as rows of `pairs.ROW`.

    Args:
        store: one split of a corpus.
        options: how examples are cut.
        seed: of the run; 0 to 2^63 - 1.
        first_window: number of the first window; tables of one seed with windows of different
            numbers draw different pairs and masks.
    """

    def __init__(
        self, store: TokenStore, options: PairOptions, seed: int, first_window: int = 0
    ) -> None:
        if not store.shards:
            raise BertkitError(
                f"store {store.place} has no {store.split} documents; prepare it with a larger "
                "held_out share or more text"
            )
        self.store = store
        self.options = options
        self.seed = seed
        self.first_window = first_window
        self.windows = max(1, len(store.shards) // WINDOW_SHARDS)
        self._current: tuple[tuple[int, int], np.ndarray] | None = None
        self._order: tuple[int, np.ndarray] | None = None
        self._ahead: Ahead | None = None

    def rows_of(self, epoch: int, window: int) -> np.ndarray:
        """The table of one window; the last one asked for is kept."""
        wanted = (epoch, window)
        if self._current is None or self._current[0] != wanted:
            self._current = None  # its memory serves the new one
            ahead, self._ahead = self._ahead, None
            rows = ahead.result(wanted) if ahead else None
            # What another thread failed in is tried here, where it can be told.
            self._current = (wanted, self._plan(wanted) if rows is None else rows)
        return self._current[1]

    def shards_of(self, epoch: int, window: int) -> list[int]:
        """The shards of one window: its share of the epoch's random order."""
        known = self._order  # another thread may plan the next epoch
        if known is None or known[0] != epoch:
            rng = generator(self.seed, SHARD_ORDER, epoch=epoch, window=self.first_window)
            known = self._order = (epoch, rng.permutation(len(self.store.shards)))
        size, larger = divmod(len(self.store.shards), self.windows)  # the first have one more
        start = window * size + min(window, larger)
        return known[1][start : start + size + (window < larger)].tolist()

    def _plan(self, name: tuple[int, int]) -> np.ndarray:
        epoch, window = name
        number = self.first_window + window
        shards = self.shards_of(epoch, window)
        return plan_window(self.store, shards, self.options, self.seed, epoch, number)

    def _plan_ahead(self, name: tuple[int, int], stop: threading.Event) -> np.ndarray | None:
        """A window's table, made by another thread; None where nobody wants it any more."""
        for shard in self.shards_of(*name):
            if stop.is_set():
                return None
            self.store.arrays(shard)
        return None if stop.is_set() else self._plan(name)

    def close(self) -> None:
        """Give up what is planned ahead."""
        if self._ahead is not None:
            self._ahead.give_up()
            self._ahead = None

    def first(self, limit: int | None = None) -> np.ndarray:
        """Rows of the first window, in order, at most `limit`."""
        return self.rows_of(0, 0)[:limit]

    def take(self, place: AnyPlace, count: int) -> tuple[np.ndarray, Place]:
        """The next `count` rows from a place, and the place after them; epochs run on."""
        epoch, window, offset = place
        taken: list[np.ndarray] = []
        missing = count
        while True:
            whole = self.rows_of(epoch, window)
            rows = whole[offset : offset + missing]
            taken.append(rows)
            missing -= len(rows)
            offset += len(rows)
            last = window + 1 == self.windows
            following = (epoch + 1, 0) if last else (epoch, window + 1)
            if missing == 0:
                if 2 * offset >= len(whole) and self._ahead is None:
                    self._ahead = Ahead(self, following)
                return np.concatenate(taken), Place(epoch, window, offset)
            (epoch, window), offset = following, 0


class Ahead:
    """A window that another thread is planning, one for all tables of the process.

    Args:
        table: whose window it is.
        name: its epoch and number.
    """

    def __init__(self, table: ExampleTable, name: tuple[int, int]) -> None:
        self.name = name
        self.stop = threading.Event()
        self.rows: Future[np.ndarray | None] = planner().submit(table._plan_ahead, name, self.stop)

    def result(self, name: tuple[int, int]) -> np.ndarray | None:
        """The table, if it is the one that is wanted, was begun and was made without an error."""
        if name != self.name or self.rows.cancel():
            self.give_up()
            return None
        return None if self.rows.exception() else self.rows.result()

    def give_up(self) -> None:
        """Stop soon; what was made is not kept."""
        self.stop.set()
        self.rows.cancel()


@cache
def planner() -> ThreadPoolExecutor:
    """The thread that plans ahead: one, whatever the number of tables."""
    return ThreadPoolExecutor(1, thread_name_prefix="bertkit-plan")


class BatchBuilder(Dataset[PretrainingBatch]):
    """Rows → batch: reads the tokens, draws the masks, packs. Stateless, so any process may do it.

    Targets are masked pieces ("masked", "replaced"), or, unmasked, at each token the next one
    ("left_to_right") or the one before ("right_to_left").

    Args:
        store: the corpus the rows point into.
        masking: see `MaskingOptions`.
        max_predictions: the most MLM targets an example has (20 at length 128, 77 at 512).
        seed: of the run.
        words: one of `WORDS`.
    """

    def __init__(
        self,
        store: TokenStore,
        masking: MaskingOptions,
        max_predictions: int,
        seed: int,
        words: str = "masked",
    ) -> None:
        tokenizer = store.tokenizer
        self.store = store
        self.masking = masking
        self.max_predictions = max_predictions
        self.seed = seed
        self.words = words
        self.cls_id, self.sep_id, self.mask_id = (
            tokenizer.cls_id,
            tokenizer.sep_id,
            tokenizer.mask_id,
        )
        self.continuation = tokenizer.continuation

    def __getitem__(self, rows: np.ndarray) -> PretrainingBatch:
        """Build the batch of some rows, longest first (equal lengths together serve attention)."""
        lengths = example_lengths(rows)
        order = np.argsort(-lengths, kind="stable")
        rows, lengths = rows[order], lengths[order].astype(np.int64)
        ends = np.cumsum(lengths)
        ids = np.empty(int(ends[-1]), dtype=np.int64)
        segment_ids = np.zeros_like(ids)
        positions: list[np.ndarray] = []
        targets: list[np.ndarray] = []
        for row, start, end in zip(rows, ends - lengths, ends, strict=True):
            example = ids[start:end]
            middle = self._fill(example, row)
            segment_ids[start + middle : end] = 1
            chosen, originals = self._targets(example, row, middle)
            positions.append(chosen + start)
            targets.append(originals)
        return PretrainingBatch(
            packed=from_arrays(ids, segment_ids, lengths),
            target_positions=torch.from_numpy(np.concatenate(positions)),
            target_ids=torch.from_numpy(np.concatenate(targets)),
            next_labels=torch.from_numpy(rows["is_random"].astype(np.int64)),
        )

    def _fill(self, example: np.ndarray, row: np.void) -> int:
        """Write [CLS] A [SEP] B [SEP], or [CLS] A [SEP]; returns where B begins."""
        a_start, a_length = int(row["a_start"]), int(row["a_length"])
        b_start, b_length = int(row["b_start"]), int(row["b_length"])
        middle = a_length + 2
        example[0] = self.cls_id
        a, b = (self.store.arrays(int(row[shard])).tokens for shard in ("a_shard", "b_shard"))
        example[1 : middle - 1] = a[a_start : a_start + a_length]
        example[middle - 1] = self.sep_id
        example[middle:-1] = b[b_start : b_start + b_length]
        example[-1] = self.sep_id
        return middle

    def _targets(
        self, example: np.ndarray, row: np.void, middle: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Places where something is predicted, and the ids to predict; masks where that is it."""
        if self.words == "left_to_right":
            return np.arange(len(example) - 1), example[1:].copy()
        if self.words == "right_to_left":
            return np.arange(1, len(example)), example[:-1].copy()
        return self._mask(example, row, middle)

    def _mask(
        self, example: np.ndarray, row: np.void, middle: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Mask an example in place; returns the target positions and their true ids."""
        epoch, window, number = (int(row[name]) for name in ("epoch", "window", "row"))
        rng = generator(self.seed, MASKS, epoch=epoch, window=window, row=number)
        candidates = np.concatenate([np.arange(1, middle - 1), np.arange(middle, len(example) - 1)])
        most, masking = self.max_predictions, self.masking
        chosen, shown = draw_masks(
            example, candidates, self.continuation, most, masking, self.mask_id, rng
        )
        originals = example[chosen]
        example[chosen] = shown
        return chosen, originals


class Step(NamedTuple):
    """One global batch: its rows, this rank's micro-batches, and the place after it."""

    micro_batches: list[PretrainingBatch]
    after: AnyPlace


class _Steps(Dataset[Step]):
    """Shares the rows of a global batch among micro-batches, and builds this rank's."""

    def __init__(self, builder: BatchBuilder, micro_batches: int, rank: int, world: int) -> None:
        self.builder = builder
        self.micro_batches = micro_batches
        self.rank = rank
        self.world = world

    def __getitem__(self, request: tuple[np.ndarray, AnyPlace]) -> Step:
        rows, after = request
        shares = share_rows(rows, self.micro_batches)
        mine = shares[self.rank :: self.world]
        return Step([self.builder[share] for share in mine], after)


def share_rows(rows: np.ndarray, shares: int) -> list[np.ndarray]:
    """Deal rows out by length, so that every share has about the same number of tokens."""
    order = np.argsort(-(rows["a_length"] + rows["b_length"]), kind="stable")
    return [rows[order[share::shares]] for share in range(shares)]


def stream_steps(
    table: Examples,
    builder: BatchBuilder,
    *,
    batch_size: int,
    steps: int,
    place: AnyPlace = START,
    micro_batches: int = 1,
    rank: int = 0,
    world: int = 1,
    workers: int = 0,
) -> Iterator[Step]:
    """Yield `steps` global batches from a place on.

    Args:
        table: which examples, in which order.
        builder: rows → batch.
        batch_size: sequences in a global batch, over all ranks and micro-batches.
        steps: how many batches.
        place: where to begin; `Step.after` of the last batch used, to resume.
        micro_batches: into how many the global batch is cut, over all ranks; the same cut for any
            number of ranks.
        rank: this process's number; it gets micro-batches rank, rank + world, ...
        world: number of processes; a divisor of `micro_batches`.
        workers: loader processes; 0 builds the batches in this process.

    Raises:
        BertkitError: the batch cannot be shared out, or `workers` is negative.
    """
    if workers < 0:
        raise BertkitError(f"workers must be 0 or more, got {workers}")
    if batch_size < micro_batches:
        raise BertkitError(
            f"a batch of {batch_size} sequences cannot be cut into {micro_batches} micro-batches "
            f"for {world} process(es); raise phases.batch_sizes, lower training.accumulate, or "
            "start fewer processes"
        )
    assert micro_batches % world == 0, "every rank gets the same number of micro-batches"

    def requests() -> Iterator[tuple[np.ndarray, AnyPlace]]:
        at = place
        try:
            for _ in range(steps):
                rows, at = table.take(at, batch_size)
                yield rows, at
        finally:
            table.close()

    dataset = _Steps(builder, micro_batches, rank, world)
    if workers == 0:
        return (dataset[request] for request in requests())
    loader = DataLoader(
        dataset,
        sampler=requests(),
        batch_size=None,
        num_workers=workers,
        multiprocessing_context="spawn",
        worker_init_fn=begin_loader,
        prefetch_factor=4,
    )
    with ignored_interrupts():
        return iter(loader)


def begin_loader(number: int) -> None:
    """Begin a loader process: signals to all processes of a run are for the trainer, which ends it.

    Args:
        number: of the process, as DataLoader gives it.
    """
    begin_worker()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


@contextmanager
def ignored_interrupts() -> Iterator[None]:
    """Processes started inside the block ignore Ctrl-C, which reaches every process of a terminal.

    Only the trainer knows how to stop.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
