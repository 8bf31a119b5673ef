"""The only training loop: a generator that makes one update at a time and yields what it did.

The caller logs, evaluates, saves, and stops by no longer asking for the next step.

On CUDA the layers may be compiled: dropout, residual, LayerNorm and GELU become a few fused
kernels, forward and backward. Only the layers are compiled, because they are most of the work and
share their code. Matrix products and attention stay the library's own kernels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Generic, Protocol, Self, TypeVar

import torch
from torch import Tensor, nn

from bertkit.errors import BertkitError, DivergedError
from bertkit.model.encoder import Encoder
from bertkit.objectives import Sums, total_loss
from bertkit.pretraining_data.batch import Packed
from bertkit.training.device import autocast, step_seed
from bertkit.training.distributed import ALONE, Ranks
from bertkit.training.optimizer import clip_gradients, set_learning_rate

COMPILED_SHAPES = 64
"""How often torch may compile the same code: a handful of shapes in each phase, and once more for
the last layer, which computes chosen rows. Beyond that torch would run the code uncompiled."""


class BatchLike(Protocol):
    """What the loop needs of a batch; the objective needs more."""

    @property
    def packed(self) -> Packed:
        """The sequences."""

    @property
    def counts(self) -> dict[str, int]:
        """What losses are divided by, for example {"sequences": 32}."""

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Self:
        """The same batch on another device."""


AnyBatch = TypeVar("AnyBatch", bound=BatchLike)
AnyPosition = TypeVar("AnyPosition")


Objective = Callable[[Any, AnyBatch], Sums]
"""(model, batch) → sums; those named `..._loss` are minimised, each divided by its count."""


@dataclass(frozen=True)
class StepRecord(Generic[AnyPosition]):
    """One update of the weights."""

    step: int
    """Counts from 1."""
    after: AnyPosition
    """Where the data stands after this step's batch."""
    sums: Sums
    """Over this rank's micro-batches, detached, still on the device."""
    counts: dict[str, int]
    gradient_norm: Tensor
    """Before clipping."""
    learning_rate: float
    tokens: int
    """In the sequences of all ranks, as are the counts above."""
    sum_squared_lengths: int
    stop: bool = False
    """Whether, before this update, any rank was asked to stop."""


@dataclass(frozen=True, kw_only=True)
class LoopSettings:
    """What one update needs to know besides model, optimizer, objective and data."""

    device: torch.device
    precision: str
    seed: int
    max_gradient_norm: float
    learning_rate: Callable[[int], float]
    """Learning rate of the update that follows so many updates."""
    ranks: Ranks = ALONE
    """The processes that share each global batch."""
    asked_to_stop: Callable[[], bool] = lambda: False
    """Whether this rank was; all are told before the next update."""


def run_objective(
    objective: Objective[AnyBatch], model: nn.Module, batch: AnyBatch, settings: LoopSettings
) -> Sums:
    """The objective of one batch, on the device and in the precision of the settings."""
    with autocast(settings.device, settings.precision):
        return objective(model, batch.to(settings.device, non_blocking=True))


def merge_sums(first: Sums | None, second: Sums) -> Sums:
    """Add two batches' sums; gradients are not followed further."""
    return {
        name: s._replace(value=s.value.detach() + (first[name].value if first else 0.0))
        for name, s in second.items()
    }


def train_steps(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    objective: Objective[AnyBatch],
    steps: Iterable[tuple[Sequence[AnyBatch], AnyPosition]],
    settings: LoopSettings,
    *,
    done: int = 0,
) -> Iterator[StepRecord[AnyPosition]]:
    """Make one update for each global batch.

    The loss of a step is normalised by the counts of all its micro-batches on all ranks together,
    so one micro-batch of 64 and four of 16 give the same gradient. Dropout is seeded by (seed,
    step, micro-batch): it does not depend on what ran before, nor on which rank has the
    micro-batch, and a resumed run draws the same.

    Args:
        model: in training mode; on several ranks as `bertkit.training.parallel` makes it.
        optimizer: of the model's parameters.
        objective: (model, batch) → sums.
        steps: (micro-batches of this rank, position after them) for each update.
        settings: see `LoopSettings`.
        done: updates already made.
    """
    ranks = settings.ranks
    for step, (micro_batches, after) in enumerate(steps, start=done):
        rate = settings.learning_rate(step)
        set_learning_rate(optimizer, rate)
        exchanged = ranks.all_reduce_counts(step_counts(micro_batches, settings.asked_to_stop()))
        counts: dict[str, int] = {}
        kept: Sums | None = None
        for number, batch in enumerate(micro_batches):
            share = ranks.rank + number * ranks.world
            torch.manual_seed(step_seed(settings.seed, step, share))
            with synchronized(model, ranks, last=number == len(micro_batches) - 1):
                sums = run_objective(objective, model, batch, settings)
                counts = counts or exchanged()
                total_loss(sums, counts).backward()  # type: ignore[no-untyped-call]
            kept = merge_sums(kept, sums)
        assert kept is not None, "a step has at least one micro-batch"
        norm = clip_gradients(model, settings.max_gradient_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield StepRecord(
            step=step + 1,
            after=after,
            sums=kept,
            tokens=counts.pop(TOKENS),
            sum_squared_lengths=counts.pop(SQUARES),
            stop=counts.pop(STOP) > 0,
            counts=counts,
            gradient_norm=norm,
            learning_rate=rate,
        )


TOKENS, SQUARES, STOP = "all tokens", "squared lengths", "asked to stop"
"""What ranks tell each other besides the counts of the losses."""


def step_counts(micro_batches: Sequence[BatchLike], asked_to_stop: bool) -> dict[str, int]:
    """What this rank contributes to a step."""
    counts: Counter[str] = Counter()
    lengths: list[int] = []
    for batch in micro_batches:
        counts.update(batch.counts)
        lengths += batch.packed.lengths
    squares = sum(length * length for length in lengths)
    return {**counts, TOKENS: sum(lengths), SQUARES: squares, STOP: int(asked_to_stop)}


def synchronized(
    model: nn.Module, ranks: Ranks, *, last: bool
) -> AbstractContextManager[None, bool | None]:
    """A micro-batch's pass; ranks exchange gradients only in the last one of a step."""
    if ranks.world == 1:
        return nullcontext()
    from bertkit.training.parallel import gradient_sync

    return gradient_sync(model, last)


def mean_losses(sums: Sums, counts: Mapping[str, int]) -> dict[str, float]:
    """Sums → means, by name, and their total as "loss"; waits for the device."""
    means = {name: float(s.value) / max(1, counts[s.per]) for name, s in sums.items()}
    losses = [sums[name].weight * v for name, v in means.items() if name.endswith("loss")]
    return {"loss": sum(losses), **means}


@torch.no_grad()
def evaluate_batches(
    model: nn.Module,
    objective: Objective[AnyBatch],
    batches: Iterable[AnyBatch],
    settings: LoopSettings,
) -> tuple[dict[str, float], dict[str, int]]:
    """Means of the objective's sums over all batches with dropout off, and the counts.

    Raises:
        BertkitError: there is no batch.
    """
    was_training = model.training
    model.eval()
    kept: Sums | None = None
    counts: Counter[str] = Counter()
    for batch in batches:
        kept = merge_sums(kept, run_objective(objective, model, batch, settings))
        counts.update(batch.counts)
    model.train(was_training)
    if kept is None:
        raise BertkitError("there is nothing to evaluate on: no batch was given")
    return mean_losses(kept, counts), dict(counts)


def check_finite(loss: float, gradient_norm: float, step: int, learning_rate: float) -> None:
    """Stop a run whose loss or gradient is no longer a number.

    Raises:
        DivergedError: says at which step and what to change.
    """
    if not bool(torch.isfinite(torch.tensor([loss, gradient_norm])).all()):
        raise DivergedError(
            f"training has diverged: loss {loss}, gradient norm {gradient_norm} at step {step} "
            f"(learning rate {learning_rate:.2e}); start a new run with a lower learning rate or "
            "a longer warm-up"
        )


def compile_layers(encoder: Encoder, loss_fn: Any, device: torch.device) -> Any:
    """Compile the layers of an encoder in place; names and values of parameters stay.

    Code is made for exact shapes (`dynamic=False`), so batches are rounded up to a few. The first
    update of a shape waits for the compiler.

    Args:
        encoder: to be trained.
        loss_fn: (model, `PretrainingBatch`) → sums, of a model with that encoder.
        device: where it is trained.

    Returns:
        The loss on rounded batches, for `train_steps`.

    Raises:
        BertkitError: the device is not CUDA.
    """
    if device.type != "cuda":
        raise BertkitError(f"compiled training is for CUDA devices; leave it off for {device}")
    import torch._dynamo

    from bertkit.pretraining_data.buckets import on_rounded_batches

    torch._dynamo.config.recompile_limit = COMPILED_SHAPES
    for layer in encoder.layers:
        compile_in_training(layer)
    return on_rounded_batches(loss_fn, encoder.config.max_position_embeddings)


def compile_in_training(layer: nn.Module, **options: Any) -> None:
    """Give a layer compiled code that runs while the layer is in training mode.

    In evaluation it runs uncompiled: batches of many shapes would all be compiled.

    Args:
        layer: is changed.
        options: of `torch.compile`.
    """
    uncompiled = layer.forward
    compiled = torch.compile(uncompiled, dynamic=False, **options)

    def forward(*inputs: Any) -> Any:
        return (compiled if layer.training else uncompiled)(*inputs)

    layer.forward = forward
