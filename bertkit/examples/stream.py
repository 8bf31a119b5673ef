"""The endless stream of pre-training batches, a pure function of (seed, place).

What its targets are is the objective (paper sections 3.1 and 5.1).

Which examples come, and in which order, is the table's (`examples.table`). The rows of a batch are
chosen in the main process and turned into tensors by any number of loader processes: both are pure
functions, so the batches are the same for any number of workers, and ranks share out the rows of
one global batch.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from bertkit.corpus.store import TokenStore
from bertkit.errors import BertkitError
from bertkit.examples.generator import MASKS, generator
from bertkit.examples.masking import MaskingOptions, draw_masks
from bertkit.examples.packed import Packed, from_arrays
from bertkit.examples.pairs import example_lengths
from bertkit.examples.table import START, AnyPlace, Examples
from bertkit.processes import begin_worker
from bertkit.shapes import SequenceLabels, TargetIndices

WORDS = ("masked", "left_to_right", "right_to_left", "replaced")
"""What the targets are; see `BatchBuilder`."""


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
        self.maskable = np.ones(tokenizer.size, dtype=bool)
        self.maskable[[self.cls_id, self.sep_id, self.mask_id]] = False

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
        candidates = candidates[self.maskable[example[candidates]]]  # the text may say "[SEP]"
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
