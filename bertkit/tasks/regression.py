"""Regression: a number for a text or a pair of texts (paper section 4.1; STS-B).

The number is the output of one linear layer on the pooled [CLS], without a sigmoid. Updates move it
by about the learning rate, whatever the numbers are, so that prices would not be reached. So large
and tiny numbers, and those far from 0 for their spread, are measured in a unit that is a power of
two near their standard deviation: the loss is that of these, the layer's outputs are multiplied by
the unit, and its bias begins at the mean.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from bertkit.datasets.examples import TextExample
from bertkit.errors import BertkitError
from bertkit.model.task_heads import ScaledLinear
from bertkit.tasks.classification import TextTask
from bertkit.tasks.metrics import correlations
from bertkit.tasks.predictions import Prediction
from bertkit.tasks.task import TaskInputs

MIN_SPREAD = 1e-5
"""The smallest standard deviation of the numbers as a share of their mean: 84 steps of fp32."""
UNSCALED, FAR = (0.1, 10.0), 4.0
"""Numbers are learned as they are if their root mean square lies between the first two, and their
mean is at most `FAR` standard deviations from 0."""


@dataclass(frozen=True, slots=True, repr=False)
class ValuePrediction(Prediction):
    """The predicted number of an input."""

    value: float


@dataclass(frozen=True)
class Regression(TextTask):
    """A task with one number for each input, trained with the mean squared error.

    Args:
        unit: what the numbers are divided by in training.
        mean: the number that a new network predicts.
    """

    max_length: int = 512
    stride: int = 0
    unit: float = 1.0
    mean: float = 0.0
    task_type = "regression"
    metric = "spearman"
    answer_field = "value"
    labels = ()

    @classmethod
    def from_data(cls, data: TaskInputs) -> Self:
        """See `Task`."""
        if len({given.label for given in data.train}) == 1:
            raise BertkitError(
                f"the training data has only the number {data.train[0].label} in column "
                f"'{data.columns.label}'; there is nothing to tell apart"
            )
        numbers = [float(given.label) for given in data.train]
        mean, spread = float(np.mean(numbers)), float(np.std(numbers))
        if spread < MIN_SPREAD * abs(mean):
            raise BertkitError(
                f"the numbers in column '{data.columns.label}' are about {mean:.10g} and differ by "
                f"about {spread:.2g}, which the outputs of a model in fp32 cannot tell apart; "
                "subtract a constant from all of them"
            )
        near = abs(mean) <= FAR * spread  # as in STS-B
        if near and UNSCALED[0] <= math.hypot(mean, spread) <= UNSCALED[1]:
            return cls(data.max_length, data.windows.stride)
        unit = 2.0 ** round(math.log2(max(spread, 2.0**-100)))
        return cls(data.max_length, data.windows.stride, unit, mean)

    def settings(self) -> dict[str, Any]:
        """See `Task`; a saved model predicts the numbers themselves."""
        found = super().settings()
        return {name: found[name] for name in found if name not in {"unit", "mean"}}

    def fits_head(self, tensors: Mapping[str, Tensor]) -> bool:
        """See `Task`; a head for numbers of another size would have to be learned from afar."""
        bias = tensors.get("classifier.bias")
        return bias is None or abs(float(bias[0]) - self.mean) <= 10 * self.unit

    def prepare_network(self, network: Any, *, keep_head: bool) -> Any:
        """See `Task`."""
        if not keep_head:
            with torch.no_grad():
                network.classifier.weight.mul_(self.unit)
                network.classifier.bias.fill_(self.mean)
        if self.unit != 1:
            network.classifier = ScaledLinear(network.classifier, self.unit)
        return network

    def target_of(self, given: TextExample) -> Any:
        """See `TextTask`; the target is the label itself."""
        return given.label

    def losses(self, logits: Tensor, targets: Tensor, class_weights: Tensor | None) -> Tensor:
        """See `TextTask`; the loss is the squared error, and there are no classes."""
        return ((logits.squeeze(-1) - targets) / self.unit) ** 2

    def predictions(self, logits: np.ndarray) -> list[ValuePrediction]:
        """See `TextTask`."""
        return [ValuePrediction(float(row[0])) for row in logits]

    def score(
        self, inputs: Sequence[TextExample], predictions: Sequence[ValuePrediction]
    ) -> dict[str, float]:
        """See `Task`."""
        gold = [self.target_of(given) for given in inputs]
        return correlations(gold, [prediction.value for prediction in predictions])

    def baseline(self, inputs: Sequence[TextExample]) -> dict[str, float]:
        """See `Task`; always the mean of the labels."""
        mean = float(np.mean([given.label for given in inputs]))
        return self.score(inputs, [ValuePrediction(mean)] * len(inputs))

    def remarks(self, inputs: Sequence[TextExample], *, choosing: bool = False) -> list[str]:
        """See `Task`; a note on numbers by which runs cannot be compared."""
        if choosing and len({given.label for given in inputs}) == 1:
            return ["all numbers are equal, so no model correlates with them; give other rows"]
        return []

    def degenerate(
        self, inputs: Sequence[TextExample], predictions: Sequence[ValuePrediction]
    ) -> str:
        """See `Task`; a degenerate run gives every input nearly the same number."""
        spread = float(np.std([prediction.value for prediction in predictions]))
        wanted = float(np.std([self.target_of(given) for given in inputs]))
        if spread >= 0.02 * wanted:
            return ""
        return f"answers nearly one number to every input (spread {spread:.1g} of {wanted:.1g})"
