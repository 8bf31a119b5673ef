"""The settings of fine-tuning runs: those that differ within a grid, and those that are shared."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from bertkit.errors import BertkitError, nearest
from bertkit.tasks.task import Items, Task

BALANCED = "balanced"
ClassWeights = tuple[str, ...] | str | Mapping[str, float]
"""`BALANCED`, or label -> weight; as strings, LABEL=WEIGHT."""


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
    eval_every: int = 0
    """Updates between evaluations on dev; 0 for one in each epoch. A stopped run resumes from its
    last evaluation."""
    early_stopping: int = 0
    """Stop a run after this many evaluations without a better score, and keep the model of its best
    evaluation; 0 trains to the end and keeps the last model."""
    class_weights: ClassWeights = ()
    """balanced, or LABEL=WEIGHT ...: factors of the classes' losses; classes that are not named
    have 1."""

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
        if self.eval_every < 0 or self.early_stopping < 0:
            raise BertkitError("eval_every and early_stopping must be 0 or more")
        object.__setattr__(self, "class_weights", weight_settings(self.class_weights))


def weight_settings(given: ClassWeights) -> tuple[str, ...]:
    """Return class weights as they are recorded: "balanced", or LABEL=WEIGHT for each label.

    Raises:
        BertkitError: a weight is not a finite number above 0.
    """
    if isinstance(given, str):
        given = (given,)
    if isinstance(given, Mapping):
        given = tuple(f"{label}={weight}" for label, weight in given.items())
    for one in () if tuple(given) == (BALANCED,) else given:
        _, equals, weight = one.rpartition("=")
        try:
            usable = bool(equals) and 0 < float(weight) < math.inf
        except ValueError:
            usable = False
        if not usable:
            raise BertkitError(
                f"class_weights takes {BALANCED}, or LABEL=WEIGHT with a weight above 0, not "
                f"{one!r:.60}",
                code="class-weights",
            )
    return tuple(given)


def class_weights(task: Task, items: Items, given: ClassWeights) -> Tensor | None:
    """Return the weights of a task's classes in the loss, (classes,), or None without weights.

    Args:
        task: the task.
        items: the labelled training items.
        given: `TrainingSettings.class_weights`.

    Raises:
        BertkitError: the task has no classes, or no such one.
    """
    if not given:
        return None
    balanced = task.balanced_weights(items)
    if tuple(given) == (BALANCED,):
        return torch.from_numpy(balanced).float()
    weights = dict.fromkeys(task.labels, 1.0)
    for label, _, weight in (str(one).rpartition("=") for one in given):
        if label not in weights:
            raise BertkitError(
                f"class_weights names '{label}'{nearest(label, weights)}", code="class-weights"
            )
        weights[label] = float(weight)
    return torch.tensor(list(weights.values()))
