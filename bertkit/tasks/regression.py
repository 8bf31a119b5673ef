"""Regression: a number for a text or a pair of texts (paper section 4.1; STS-B).

The number is the output of one linear layer on the pooled [CLS]. Updates move it by about the
learning rate, so that prices would not be reached. So large and tiny numbers, and those far from 0
for their spread, are measured in a unit that is a power of two near their standard deviation, by
which the layer's outputs are multiplied, and the layer's bias begins at their mean.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from bertkit.errors import BertkitError
from bertkit.model.outputs import ScaledLinear
from bertkit.tasks.classification import TextColumns, TextExample, TextTask
from bertkit.tasks.task import Inputs, Metrics, Result, Results, TrainingData

LARGEST_NUMBER = 1e15
"""The largest label; the squares of larger ones overflow the 32-bit sums of training."""
MIN_SPREAD = 1e-5
"""The smallest standard deviation of the numbers as a share of their mean: 84 steps of fp32."""
UNSCALED, FAR = (0.1, 10.0), 4.0
"""Numbers are learned as they are if their root mean square lies between the first two, and their
mean is at most `FAR` standard deviations from 0."""


@dataclass(frozen=True, kw_only=True)
class NumberColumns(TextColumns):
    """Columns of texts or text pairs with a number each."""

    def label_in(self, value: Any, location: str) -> float | None:
        """Return the finite number in a field, or None if the field is empty."""
        if value is None or (isinstance(value, str) and not value.strip()):
            return None
        return read_number(value, self.label, location)


def read_number(value: Any, column: str, location: str) -> float:
    """Return the number in a field; raise unless it is finite and at most `LARGEST_NUMBER`."""
    try:
        number = math.nan if isinstance(value, bool) or "_" in str(value) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not abs(number) <= LARGEST_NUMBER:
        raise BertkitError(
            f"{location}: '{column}' is {str(value)[:40]!r}, not a number up to "
            f"{LARGEST_NUMBER:g}; if labels are names, the task type is classification"
        )
    return number


@dataclass(frozen=True, slots=True)
class NumberResult(Result):
    """The predicted number of an input."""

    value: float


@dataclass(frozen=True)
class Regression(TextTask):
    """A task with one number for each input, trained with the mean squared error."""

    max_length: int = 512
    stride: int = 0
    unit: float = 1.0  # what the numbers are divided by in training
    mean: float = 0.0  # the number that a new network predicts
    task_type = "regression"
    problem_type = "regression"
    columns = NumberColumns
    metric = "spearman"
    answer_field = "value"
    labels = ()
    unsaved = ("unit", "mean")  # a saved model predicts the numbers themselves

    @classmethod
    def from_data(cls, data: TrainingData) -> Self:
        numbers = [float(example.gold) for example in data.examples]
        mean, spread = float(np.mean(numbers)), float(np.std(numbers))
        if len(set(numbers)) == 1 or spread < MIN_SPREAD * abs(mean):
            raise BertkitError(
                f"the numbers in column '{data.columns.label}' are about {mean:.10g} and differ by "
                f"about {spread:.2g}, too little for a model in fp32; subtract a constant"
            )
        near = abs(mean) <= FAR * spread  # as in STS-B
        if near and UNSCALED[0] <= math.hypot(mean, spread) <= UNSCALED[1]:
            return cls(data.max_length, data.windows.stride)
        unit = 2.0 ** round(math.log2(max(spread, 2.0**-100)))
        return cls(data.max_length, data.windows.stride, unit, mean)

    def prepare_network(self, network: Any, *, keep_head: bool) -> Any:
        if not keep_head:
            with torch.no_grad():
                network.classifier.weight.mul_(self.unit)
                network.classifier.bias.fill_(self.mean)
        if self.unit != 1:
            network.classifier = ScaledLinear(network.classifier, self.unit)
        return network

    def target_of(self, example: TextExample) -> Any:
        return example.gold

    def losses(self, logits: Tensor, targets: Tensor, class_weights: Tensor | None) -> Tensor:
        return ((logits[:, 0, 0] - targets) / self.unit) ** 2

    def results(self, inputs: Inputs, logits: Sequence[np.ndarray]) -> list[NumberResult]:
        return [NumberResult(value.item()) for value in logits]

    def score(self, inputs: Inputs, results: Results) -> Metrics:
        """Pearson, Spearman (GLUE's for STS-B; both 0 if a side is constant), squared error."""
        gold = np.array([self.target_of(example) for example in inputs], dtype=float)
        predicted = np.array([result.value for result in results])
        constant = len(gold) < 2 or np.ptp(gold) == 0 or np.ptp(predicted) == 0
        pearson, spearman = (
            0.0 if constant else np.corrcoef(*sides)[0, 1].item()
            for sides in ((gold, predicted), (ranks(gold), ranks(predicted)))
        )
        error = float(np.mean((gold - predicted) ** 2))
        return {"pearson": pearson, "spearman": spearman, "mean_squared_error": error}

    def baseline(self, inputs: Inputs) -> Metrics:
        mean = float(np.mean([example.gold for example in inputs]))
        return self.score(inputs, [NumberResult(mean)] * len(inputs))


def ranks(values: np.ndarray) -> np.ndarray:
    """Return the ranks of values; equal values share the mean of their ranks."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[inverse]
