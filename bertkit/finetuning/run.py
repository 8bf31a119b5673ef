"""One fine-tuning run, which trains a checkpoint on a task's items (paper sections 4 and A.3).

Only the word embeddings that the training data uses are trained, with the same result as training
all. A token that never occurs has a zero gradient in every step, so its Adam moments stay 0 and its
row only shrinks by weight decay, each step by the factor 1 - learning rate x decay. So the rows
that occur are fine-tuned in a small matrix, and the others are shrunk once at the end. On small
data sets with a vocabulary of 30,522 this saves most of the optimizer's work: half of the
parameters of a small BERT are word embeddings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from bertkit.checkpoints.pretrained import PretrainedWeights
from bertkit.errors import BertkitError
from bertkit.model.encoder import Encoder
from bertkit.model.task_heads import TaskModel
from bertkit.pretraining_data.rng import FINE_TUNING, keyed_rng
from bertkit.tasks.task import Items, Task, TaskBatch, make_batch, split_parts
from bertkit.training.journal import Journal
from bertkit.training.optimizer import build_optimizer
from bertkit.training.recipe import learning_rate
from bertkit.training.step import LoopSettings, MetricWindow, train_steps


class CompactEmbeddings:
    """A small word embedding matrix of the used rows, which replaces that of an encoder.

    Args:
        encoder: the encoder, which is changed until `restore` is called.
        items: all items that it will be fine-tuned on.
    """

    def __init__(self, encoder: Encoder, items: Items) -> None:
        self.encoder = encoder
        self.whole = encoder.word_embeddings
        seen = np.zeros(self.whole.num_embeddings, dtype=bool)
        for item in items.items:
            for part in item.parts:
                for sequence in part.sequences:
                    seen[sequence.ids] = True
        self.used = torch.from_numpy(np.flatnonzero(seen)).to(self.whole.weight.device)
        self.table = np.cumsum(seen) - 1
        """(vocabulary,) id -> row of the small matrix, for `make_batch`."""
        rows = self.whole.weight.detach()[self.used].clone()
        encoder.word_embeddings = nn.Embedding(rows.shape[0], rows.shape[1], _weight=rows)

    @torch.no_grad()
    def restore(self, shrinkage: float) -> None:
        """Write the trained rows back and multiply all others by `shrinkage`, the total decay."""
        tuned = self.encoder.word_embeddings.weight
        self.whole.weight.mul_(shrinkage)
        self.whole.weight[self.used] = tuned.to(self.whole.weight.dtype)
        self.encoder.word_embeddings = self.whole


LOG_EVERY = 20
"""The number of updates between two lines of the journal."""


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """The settings that differ between the runs of a grid."""

    batch_size: int
    learning_rate: float
    epochs: int
    seed: int

    @property
    def name(self) -> str:
        """The name of the run's folder."""
        return f"b{self.batch_size}-lr{self.learning_rate:g}-e{self.epochs}-s{self.seed}"


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """The settings that all runs of a grid share."""

    warmup: float = 0.1
    """The share of the updates over which the learning rate rises; it then falls to 0."""
    weight_decay: float = 0.01
    """The weight decay, which does not apply to biases and LayerNorm."""
    max_gradient_norm: float = 1.0
    """The maximum gradient norm, to which gradients are clipped."""
    dropout: float | None = None
    """The dropout of the encoder and the head; by default that of the pre-trained model."""
    bias_correction: bool = True
    """False for the paper's variant of Adam, with which runs on small data often learn nothing."""
    precision: str = "auto"
    """fp32, bf16, or auto: bf16 if the device computes it fast."""
    max_tokens: int = 16384
    """The maximum tokens per forward pass; larger batches are split, with the same result except
    for rounding and dropout."""

    def __post_init__(self) -> None:
        """Check every value.

        Raises:
            BertkitError: a value is out of range; the message names the field.
        """
        if not 0 <= self.warmup < 1:
            raise BertkitError(f"warmup is a share from 0 to below 1, not {self.warmup}")
        if not 0 <= (self.dropout or 0) < 1:
            raise BertkitError(f"dropout is a share from 0 to below 1, not {self.dropout}")
        if not 0 <= self.weight_decay < 1:
            raise BertkitError(f"weight_decay is from 0 to below 1, not {self.weight_decay}")
        if not self.max_gradient_norm > 0 or self.max_tokens < 1:
            raise BertkitError("max_gradient_norm and max_tokens must be above 0")


def micro_batches(
    task: Task, items: Items, run: RunSettings, max_tokens: int, table: Any
) -> Iterator[tuple[list[TaskBatch], None]]:
    """Yield the micro-batches of every update; each epoch has a different order."""
    for epoch in range(run.epochs):
        order = keyed_rng(run.seed, FINE_TUNING, epoch=epoch).permutation(len(items.items))
        for start in range(0, len(order), run.batch_size):
            drawn = [items.items[i] for i in order[start : start + run.batch_size]]
            parts = [part for item in drawn for part in item.parts]
            yield (
                [
                    make_batch(group, task.targets, table)
                    for group in split_parts(parts, max_tokens)
                ],
                None,
            )


def train_task(
    start: PretrainedWeights,
    task: Task,
    items: Items,
    run: RunSettings,
    tuning: TrainingSettings,
    *,
    device: torch.device,
    precision: str,
    keep_head: bool,
    journal: Journal,
    progress: Callable[[dict[str, Any]], None],
    build: Callable[..., TaskModel] | None = None,
) -> TaskModel:
    """Train once over all epochs.

    Args:
        start: the weights to initialise from; they are not changed.
        task: the task, which defines the objective.
        items: the labelled items.
        run: batch size, learning rate, epochs, seed (of the new head, the order and the dropout).
        tuning: the settings that all runs share.
        device: the device to train on.
        precision: "fp32" or "bf16".
        keep_head: whether to initialise the head from the checkpoint too.
        journal: receives a record every `LOG_EVERY` updates.
        progress: called with each of these records.
        build: the function that builds the network; None for the task's `build`.

    Returns:
        The model, on the device, in training mode.

    Raises:
        BertkitError: the loss became NaN or infinite.
    """
    torch.manual_seed(run.seed)
    model = start.build(build or task.build, keep_head=keep_head).model.to(device).train()
    steps = math.ceil(len(items.items) / run.batch_size) * run.epochs
    warmup = min(round(tuning.warmup * steps), steps - 1)

    def rate(step: int) -> float:
        return learning_rate(step, peak=run.learning_rate, warmup_steps=warmup, total_steps=steps)

    trained = model.encoder.word_embeddings.weight.requires_grad
    compact = CompactEmbeddings(model.encoder, items) if trained else None
    optimizer = build_optimizer(
        model,
        learning_rate=run.learning_rate,
        weight_decay=tuning.weight_decay,
        bias_correction=tuning.bias_correction,
    )
    settings = LoopSettings(
        device=device,
        precision=precision,
        seed=run.seed,
        max_gradient_norm=tuning.max_gradient_norm,
        learning_rate=rate,
    )
    batches = micro_batches(
        task, items, run, tuning.max_tokens, None if compact is None else compact.table
    )
    stretch = MetricWindow()
    for record in train_steps(model, optimizer, task.objective, batches, settings):
        stretch.add(record)
        if record.step % LOG_EVERY == 0 or record.step == steps:
            line = stretch.close()
            journal.write(line)
            progress(line)
    if compact is not None:
        compact.restore(math.prod(1 - rate(step) * tuning.weight_decay for step in range(steps)))
    return model
