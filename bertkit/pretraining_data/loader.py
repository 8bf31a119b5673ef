"""The stream of pre-training batches, a pure function of (seed, position).

The sampler decides which examples come in which order. An epoch is a random order of the store's
shards, cut into windows of a few shards; a window is a shuffled table of examples (`plan_window`;
paper, appendix A.2). A position is (epoch, window, offset), so seeking costs one window's plan,
whatever the size of the corpus. Once half of a window is used, another thread plans the next one
and verifies its shards, so that no step waits.

The main process chooses the rows of a batch, and any number of loader processes turn them into
tensors, so the batches are the same for any number of workers. The rows of a global batch are
divided among the ranks. The objective decides what the targets are (paper, sections 3.1 and 5.1).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch

from bertkit.corpus.store import TokenStore
from bertkit.errors import BertkitError
from bertkit.pretraining_data.batch import (
    Packed,
    SequenceLabels,
    TargetIndices,
    TensorFields,
    from_arrays,
)
from bertkit.pretraining_data.examples import (
    MaskingOptions,
    PairOptions,
    draw_masks,
    example_lengths,
    plan_window,
)
from bertkit.processes import MASKS, SHARD_ORDER, keyed_rng, map_in_order, open_executor

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


# Batches ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PretrainingBatch(TensorFields):
    """Packed examples with the targets of the token objective and of the pair objective."""

    packed: Packed
    """The masked tokens, which are the input of the network."""
    target_positions: TargetIndices
    """(targets,) positions in the packed tokens."""
    target_ids: TargetIndices
    """(targets,) the ids to predict at those positions."""
    next_labels: SequenceLabels
    """(sequences,) 0 = B follows A, 1 = B is random (or A and B are swapped)."""

    @property
    def counts(self) -> dict[str, int]:
        """The counts that the sums of the losses are divided by."""
        return {
            "targets": len(self.target_ids),
            "sequences": len(self.next_labels),
            "tokens": len(self.packed.ids),
        }

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle plain arrays, because torch would put every tensor into separate shared memory."""
        packed = self.packed
        arrays = (packed.ids, packed.segment_ids, packed.cu_seqlens.diff())
        targets = (self.target_positions, self.target_ids, self.next_labels)
        return batch_from_arrays, tuple(tensor.numpy() for tensor in (*arrays, *targets))


def batch_from_arrays(
    ids: np.ndarray, segment_ids: np.ndarray, lengths: np.ndarray, *others: np.ndarray
) -> PretrainingBatch:
    """Build a batch from NumPy arrays; the others are target positions, target ids and labels."""
    targets = (torch.from_numpy(array) for array in others)
    return PretrainingBatch(from_arrays(ids, segment_ids, lengths), *targets)


class BatchBuilder:
    """Builds batches from rows without keeping state, so that any process can build any batch.

    It reads the tokens, masks and packs them. The targets are masked tokens ("mlm", "rtd"), at most
    `max_predictions` per example (20 at length 128, 77 at 512), or, without masking, the token
    after each one ("clm").
    """

    def __init__(
        self,
        store: TokenStore,
        masking: MaskingOptions,
        max_predictions: int,
        seed: int,
        token: str = "mlm",
    ) -> None:
        tokenizer = store.tokenizer
        self.store = store
        self.masking = masking
        self.max_predictions = max_predictions
        self.seed = seed
        self.token = token
        self.cls_id, self.sep_id = tokenizer.cls_id, tokenizer.sep_id
        self.mask_id = tokenizer.mask_id
        self.continuation = tokenizer.continuation
        self.maskable = np.ones(tokenizer.size, dtype=bool)
        self.maskable[[self.cls_id, self.sep_id, self.mask_id]] = False

    def __getitem__(self, rows: np.ndarray) -> PretrainingBatch:
        """Build the batch of some rows, longest first, so that equal lengths are neighbours."""
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
        at, truth = np.concatenate(positions), np.concatenate(targets)
        labels = rows["is_random"].astype(np.int64)
        return batch_from_arrays(ids, segment_ids, lengths, at, truth, labels)

    def _fill(self, example: np.ndarray, row: np.void) -> int:
        """Write [CLS] A [SEP] B [SEP], or [CLS] A [SEP]; return the position where B starts."""
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
        """Return target positions and the ids to predict there; for "mlm" and "rtd", also mask."""
        if self.token == "clm":
            return np.arange(len(example) - 1), example[1:].copy()
        epoch, window, number = (int(row[name]) for name in ("epoch", "window", "row"))
        rng = keyed_rng(self.seed, MASKS, epoch=epoch, window=window, row=number)
        candidates = np.concatenate([np.arange(1, middle - 1), np.arange(middle, len(example) - 1)])
        candidates = candidates[self.maskable[example[candidates]]]  # text may contain "[SEP]"
        most, masking = self.max_predictions, self.masking
        chosen, shown = draw_masks(
            example, candidates, self.continuation, most, masking, self.mask_id, rng
        )
        originals = example[chosen]
        example[chosen] = shown
        return chosen, originals


class StreamStep(NamedTuple):
    """One global batch: this rank's micro-batches, and the position after the batch."""

    micro_batches: list[PretrainingBatch]
    after: DataPosition


Request = tuple[np.ndarray, DataPosition]
"""The rows of a global batch, and the position after it."""


def build_step(
    request: Request, *, builder: BatchBuilder, micro_batches: int, rank: int, world: int
) -> StreamStep:
    """Divide the rows of a global batch into micro-batches, and build those of this rank."""
    rows, after = request
    mine = share_rows(rows, micro_batches)[rank::world]
    return StreamStep([builder[share] for share in mine], after)


def share_rows(rows: np.ndarray, shares: int) -> list[np.ndarray]:
    """Divide rows by length, so that every share has about the same number of tokens."""
    order = np.argsort(-(rows["a_length"] + rows["b_length"]), kind="stable")
    return [rows[order[share::shares]] for share in range(shares)]


def check_batch_sizes(sizes: Sequence[int], micro_batches: int, world: int) -> None:
    """Check that a batch of each phase has a sequence for every micro-batch, over all ranks."""
    if min(sizes) < micro_batches:
        raise BertkitError(
            f"a batch of {min(sizes)} sequences cannot be cut into {micro_batches} micro-batches "
            f"for {world} process(es); raise phases.batch_sizes, lower training.accumulate, or "
            "start fewer processes"
        )


def stream_steps(
    examples: ExampleSampler,
    builder: BatchBuilder,
    *,
    batch_size: int,
    steps: int,
    position: DataPosition = START,
    micro_batches: int = 1,
    rank: int = 0,
    world: int = 1,
    workers: int = 0,
) -> Generator[StreamStep, None, None]:
    """Yield `steps` global batches, starting from a position.

    To resume, the position is `StreamStep.after` of the last batch used. A global batch has
    `batch_size` sequences over all ranks and micro-batches, and is divided into `micro_batches` in
    the same way for any number of processes; this one gets micro-batches rank, rank + world, ...
    Loader processes (`workers`) end when the generator is closed; with 0 or 1, this process builds
    the batches.
    """
    assert micro_batches % world == 0, "every rank gets the same number of micro-batches"
    build = partial(
        build_step, builder=builder, micro_batches=micro_batches, rank=rank, world=world
    )
    requests = take_rows(examples, batch_size, steps, position)
    return build_steps(build, requests, workers)


def take_rows(
    examples: ExampleSampler, batch_size: int, steps: int, position: DataPosition
) -> Iterator[Request]:
    """Yield the rows of each global batch, starting from a position."""
    try:
        for _ in range(steps):
            rows, position = examples.take(position, batch_size)
            yield rows, position
    finally:
        examples.close()


def build_steps(
    build: Callable[[Request], StreamStep], requests: Iterator[Request], workers: int
) -> Generator[StreamStep, None, None]:
    """Build steps in this process or in loader processes, which end with this generator."""
    with open_executor(max(1, workers)) as executor:
        yield from map_in_order(build, requests, executor)
