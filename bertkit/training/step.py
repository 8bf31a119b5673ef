"""The only training loop: a generator that makes one update at a time and yields its record.

The caller logs, evaluates and saves between updates, and stops by leaving its loop.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Any, Generic, Protocol, Self, TypeVar

import torch
from torch import Tensor, nn

from bertkit.errors import BertkitError, DivergedError
from bertkit.model.encoder import Layer
from bertkit.model.heads import CrossEntropy, LanguageHead, Sums, cross_entropy_sums, total_loss
from bertkit.model.native import has_triton
from bertkit.pretraining_data.batch import Packed
from bertkit.training.device import (
    OUT_OF_MEMORY,
    autocast,
    lacks_memory,
    synchronize,
)
from bertkit.training.distributed import ALONE, Ranks, gradient_sync
from bertkit.training.optimizer import AdamW, clip_gradients


class BatchLike(Protocol):
    """The part of a batch's interface that the loop relies on; an objective may need more."""

    @property
    def packed(self) -> Packed: ...

    @property
    def counts(self) -> dict[str, int]:
        """The counts that losses are divided by, for example {"sequences": 32}."""

    def to(self, device: torch.device | str) -> Self: ...


AnyBatch = TypeVar("AnyBatch", bound=BatchLike)
Position = TypeVar("Position")


Objective = Callable[[Any, AnyBatch], Sums]
"""(model, batch) → sums; those whose name ends in `loss` are minimised, divided by their counts."""


@dataclass(frozen=True)
class StepRecord(Generic[Position]):
    """One update of the weights; counts are over all ranks, sums over this rank's micro-batches."""

    step: int
    """The number of the update, counted from 1."""
    after: Position
    """The position of the data stream after this step's batch."""
    sums: Sums
    """Detached, still on the device."""
    counts: dict[str, int]
    gradient_norm: Tensor
    """Before clipping."""
    learning_rate: float
    tokens: int
    stop: bool = False
    """Whether any rank was asked to stop before this update."""


@dataclass(frozen=True, kw_only=True)
class LoopSettings:
    """The settings of the training loop other than model, optimizer, objective and data."""

    device: torch.device
    precision: str
    seed: int
    max_gradient_norm: float
    learning_rate: Callable[[int], float]
    """(number of updates made) → learning rate of the next update."""
    ranks: Ranks = ALONE
    """The processes that share each global batch."""
    asked_to_stop: Callable[[], bool] = lambda: False
    """Whether this rank was asked to stop; all ranks learn of it before the next update."""
    advice_if_too_large: Callable[[Sequence[int]], str] = lambda lengths: "try smaller batches"
    """(lengths of a batch's sequences) → advice, for a batch that does not fit into memory."""


def run_objective(
    objective: Objective[AnyBatch], model: nn.Module, batch: AnyBatch, settings: LoopSettings
) -> Sums:
    """Compute the objective of one batch, on the device and in the precision of the settings."""
    with autocast(settings.device, settings.precision):
        return objective(model, batch.to(settings.device))


def merge_sums(first: Sums | None, second: Sums) -> Sums:
    """Add the sums of two batches, detached from the graph."""
    return {
        name: s._replace(value=s.value.detach() + (first[name].value if first else 0.0))
        for name, s in second.items()
    }


def train_steps(
    model: nn.Module,
    optimizer: AdamW,
    objective: Objective[AnyBatch],
    steps: Iterable[tuple[Sequence[AnyBatch], Position]],
    settings: LoopSettings,
    *,
    done: int = 0,
) -> Iterator[StepRecord[Position]]:
    """Make one update for each global batch.

    The loss of a step is normalised by the counts of all its micro-batches on all ranks together,
    so one micro-batch of 64 and four of 16 give the same gradient. Dropout is seeded by (seed,
    step, micro-batch): it depends neither on what ran before nor on which rank has the micro-batch,
    so a resumed run has the same dropout.

    The model is in training mode and, with several ranks, a result of `replicate`. `steps` has the
    micro-batches of this rank and the position after them for each update after the first `done`.
    """
    ranks = settings.ranks
    for step, (micro_batches, after) in enumerate(steps, start=done):
        rate = settings.learning_rate(step)
        for group in optimizer.param_groups:
            group["lr"] = rate
        exchanged = ranks.all_reduce_counts(step_counts(micro_batches, settings.asked_to_stop()))
        counts: dict[str, int] = {}
        merged: Sums | None = None
        for number, batch in enumerate(micro_batches):
            share = ranks.rank + number * ranks.world
            seed_random(step_seed(settings.seed, step, share), settings.device)
            with (
                named_if_too_large(batch.packed, settings),
                gradient_sync(model, wanted=number == len(micro_batches) - 1),
            ):
                sums = run_objective(objective, model, batch, settings)
                counts = counts or exchanged()
                total_loss(sums, counts).backward()  # type: ignore[no-untyped-call]
            merged = merge_sums(merged, sums)
        assert merged is not None, "a step has at least one micro-batch"
        norm = clip_gradients(model, settings.max_gradient_norm)
        optimizer.step()
        optimizer.zero_grad()
        yield StepRecord(
            step=step + 1,
            after=after,
            sums=merged,
            tokens=counts.pop(ALL_TOKENS),
            stop=counts.pop(STOP) > 0,
            counts=counts,
            gradient_norm=norm,
            learning_rate=rate,
        )


def time_updates(
    model: nn.Module,
    optimizer: AdamW,
    objective: Objective[AnyBatch],
    steps: Iterable[tuple[Sequence[AnyBatch], Position]],
    settings: LoopSettings,
    seconds: float,
) -> tuple[float, float]:
    """Make updates for about so many seconds of rank 0, and at least two.

    Returns:
        The seconds of the first update, and the median of the later ones.
    """
    ends = [time.perf_counter()]
    enough = lambda: settings.ranks.rank == 0 and ends[-1] - ends[0] > seconds  # noqa: E731
    for update in train_steps(
        model, optimizer, objective, steps, replace(settings, asked_to_stop=enough)
    ):
        synchronize(settings.device)
        ends.append(time.perf_counter())
        if update.stop:
            break
    first, *later = [end - start for start, end in pairwise(ends)]
    return first, median(later)


ALL_TOKENS, STOP = "all tokens", "asked to stop"
"""The names of the counts that ranks exchange in addition to those of the losses."""


def step_counts(micro_batches: Sequence[BatchLike], asked_to_stop: bool) -> dict[str, int]:
    """Return the counts that this rank contributes to a step."""
    counts: Counter[str] = Counter()
    for batch in micro_batches:
        counts.update(batch.counts)
    tokens = sum(sum(batch.packed.lengths) for batch in micro_batches)
    return {**counts, ALL_TOKENS: tokens, STOP: int(asked_to_stop)}


@contextmanager
def named_if_too_large(packed: Packed, settings: LoopSettings) -> Iterator[None]:
    """Raise an error that names the batch if the device lacks the memory for the block."""
    try:
        yield
    except RuntimeError as error:
        if not lacks_memory(error):
            raise
        sizes = packed.lengths
        raise BertkitError(
            f"the device has too little free memory for a batch of {len(sizes):,} sequences with "
            f"{sum(sizes):,} tokens, the longest of {max(sizes):,}; "
            f"{settings.advice_if_too_large(sizes)}",
            code=OUT_OF_MEMORY,
        ) from error


def seed_random(seed: int, device: torch.device) -> None:
    """Seed the random numbers of a device, such as those of dropout, as `torch.manual_seed` does.

    On a CPU that function takes a third of a millisecond, for GPUs that may be used later.
    """
    if device.type == "cpu":
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)


def step_seed(seed: int, step: int, micro_batch: int) -> int:
    """Return the 63-bit dropout seed of a micro-batch, so that checkpoints need no generator state.

    It is a cryptographic hash, so that neighbouring steps have unrelated seeds.
    """
    mixed = hashlib.blake2b(f"dropout {seed} {step} {micro_batch}".encode(), digest_size=8).digest()
    return int.from_bytes(mixed, "little") >> 1


def mean_losses(sums: Sums, counts: Mapping[str, int]) -> dict[str, float]:
    """Divide sums by their counts, and add the total loss as "loss"; waits for the device."""
    means = {name: float(s.value) / max(1, counts[s.per]) for name, s in sums.items()}
    losses = [sums[name].weight * v for name, v in means.items() if name.endswith("loss")]
    return {"loss": sum(losses), **means}


@torch.no_grad()
def evaluate_batches(
    model: nn.Module,
    objective: Objective[AnyBatch],
    batches: Iterable[AnyBatch],
    settings: LoopSettings,
) -> tuple[Sums, Counter[str]]:
    """Return the objective's sums over all batches, with dropout off, and the counts."""
    was_training = model.training
    model.eval()
    sums: Sums = {}
    counts: Counter[str] = Counter()
    try:
        for batch in batches:
            with named_if_too_large(batch.packed, settings):
                sums = merge_sums(sums, run_objective(objective, model, batch, settings))
            counts.update(batch.counts)
    finally:
        model.train(was_training)
    return sums, counts


def check_finite(loss: float, gradient_norm: float, step: int, learning_rate: float) -> None:
    """Raise a DivergedError with advice if the loss or the gradient norm is NaN or infinite."""
    if not (math.isfinite(loss) and math.isfinite(gradient_norm)):
        error = DivergedError(
            f"training has diverged: loss {loss}, gradient norm {gradient_norm} at step {step} "
            f"(learning rate {learning_rate:.2e}); start a new run with a lower learning rate or "
            "a longer warm-up"
        )
        error.step = step
        raise error


def compile_training(model: nn.Module, device: torch.device) -> CrossEntropy:
    """Compile the layers and token heads of a model in place, and return a compiled cross entropy.

    Dropout, residual, LayerNorm and GELU become a few fused kernels, and so does the softmax over
    the vocabulary. Code is generated for any number of tokens, sequences and targets, because every
    packed batch differs in them. The first update waits for the compiler.
    """
    check_compiler(device)
    for module in model.modules():
        if isinstance(module, Layer | LanguageHead):
            compile_in_training(module)
    return torch.compile(cross_entropy_sums, dynamic=True)


def check_compiler(device: torch.device) -> None:
    """Raise a BertkitError unless training can be compiled for a device."""
    if device.type != "cuda":
        raise BertkitError(f"compiled training needs a CUDA device; turn it off on {device}")
    if not has_triton():
        raise BertkitError(
            "compiled training needs the package triton, a C compiler and Python's headers "
            "(python3-dev); install what is missing, or turn compiling off",
            code="no-compiler",
        )


def compile_in_training(module: nn.Module, **options: Any) -> None:
    """Make a module run compiled code in training mode; evaluation would need code of its own."""
    uncompiled = module.forward
    compiled = torch.compile(uncompiled, dynamic=True, **options)

    def forward(*inputs: Any) -> Any:
        return (compiled if module.training else uncompiled)(*inputs)

    module.forward = forward


class MetricWindow:
    """The updates since the last record in the journal, averaged over all ranks.

    All ranks have to close the window together.
    """

    def __init__(self, ranks: Ranks = ALONE) -> None:
        self.ranks = ranks
        self.restart()

    def restart(self) -> None:
        """Start a new window now, so that evaluation and saving are not counted as training."""
        self.began = time.perf_counter()
        self.sums: Sums | None = None
        self.counts: Counter[str] = Counter()
        self.tokens = 0
        self.last: StepRecord[Any] | None = None

    def add(self, record: StepRecord[Any]) -> None:
        """Add one update to the window."""
        self.sums = merge_sums(self.sums, record.sums)
        self.counts.update(record.counts)
        self.tokens += record.tokens
        self.last = record

    def so_far(self) -> dict[str, float]:
        """Return the means of the open window; {} with several ranks, which would have to meet."""
        return mean_losses(self.sums, self.counts) if self.sums and self.ranks.world == 1 else {}

    def close(self) -> dict[str, Any]:
        """Return the journal's record of the window, and start the next window."""
        assert self.sums is not None
        assert self.last is not None
        values = self.ranks.all_reduce_scalars(
            {name: total.value for name, total in self.sums.items()}
        )
        sums = {name: total._replace(value=values[name]) for name, total in self.sums.items()}
        means = mean_losses(sums, self.counts)
        norm = float(self.last.gradient_norm)
        seconds = time.perf_counter() - self.began
        check_finite(means["loss"], norm, self.last.step, self.last.learning_rate)
        record = {
            "kind": "step",
            "step": self.last.step,
            **means,
            "learning_rate": self.last.learning_rate,
            "gradient_norm": norm,
            "tokens": self.tokens,
            **self.counts,
            "tokens_per_second": self.tokens / seconds,
            "seconds": seconds,
        }
        self.restart()
        return record
