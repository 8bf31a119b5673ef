"""Regression: a number for a text or a pair of texts (paper section 4.1; STS-B).

The number is the output of one linear layer on the pooled [CLS], without a sigmoid.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from torch import Tensor

from bertkit.datasets.examples import TextExample
from bertkit.errors import BertkitError
from bertkit.tasks.classification import TextTask
from bertkit.tasks.metrics import correlations
from bertkit.tasks.predictions import Prediction
from bertkit.tasks.task import TaskInputs


@dataclass(frozen=True, slots=True, repr=False)
class ValuePrediction(Prediction):
    """The predicted number of an input."""

    value: float


@dataclass(frozen=True)
class Regression(TextTask):
    """A task with one number for each input, trained with the mean squared error."""

    max_length: int = 512
    stride: int = 0
    task_type = "regression"
    metric = "spearman"
    answer_field = "value"
    labels = ()
    far = 10.0  # by about this, hundreds of updates move predictions, which begin near 0

    @classmethod
    def from_data(cls, data: TaskInputs) -> Self:
        """See `Task`."""
        if len({given.label for given in data.train}) == 1:
            raise BertkitError(
                f"the training data has only the number {data.train[0].label} in column "
                f"'{data.columns.label}'; there is nothing to tell apart"
            )
        return cls(data.max_length, data.windows.stride)

    def target_of(self, given: TextExample) -> Any:
        """See `TextTask`; the target is the label itself."""
        return given.label

    def losses(self, logits: Tensor, targets: Tensor, class_weights: Tensor | None) -> Tensor:
        """See `TextTask`; the loss is the squared error, and there are no classes."""
        return (logits.squeeze(-1) - targets) ** 2

    def predictions(self, logits: np.ndarray) -> list[ValuePrediction]:
        """See `TextTask`."""
        return [ValuePrediction(float(row[0])) for row in logits]

    def score(
        self, inputs: Sequence[TextExample], predictions: Sequence[ValuePrediction]
    ) -> dict[str, float]:
        """See `Task`."""
        gold = [float(str(given.label)) for given in inputs]
        return correlations(gold, [prediction.value for prediction in predictions])

    def baseline(self, inputs: Sequence[TextExample]) -> dict[str, float]:
        """See `Task`; always the mean of the labels."""
        mean = float(np.mean([given.label for given in inputs]))
        return self.score(inputs, [ValuePrediction(mean)] * len(inputs))

    def remarks(self, inputs: Sequence[TextExample], *, choosing: bool = False) -> list[str]:
        """See `Task`; a note on numbers by which runs cannot be compared, or far from 0."""
        numbers = [float(str(given.label)) for given in inputs if choosing]
        if len(set(numbers)) == 1:
            return ["all numbers are equal, so no model correlates with them; give other rows"]
        if np.hypot(np.mean(numbers or 0), np.std(numbers or 0)) > self.far:
            how = f"subtract their mean {np.mean(numbers):.3g}, divide by {np.std(numbers):.3g}"
            return [f"these numbers are far from 0, near which predictions begin: {how}"]
        return []

    def degenerate(
        self, inputs: Sequence[TextExample], predictions: Sequence[ValuePrediction]
    ) -> str:
        """See `Task`; a degenerate run gives every input nearly the same number."""
        spread = float(np.std([prediction.value for prediction in predictions]))
        wanted = float(np.std([float(str(given.label)) for given in inputs]))
        if spread >= 0.02 * wanted:
            return ""
        by = f"; divide all numbers by {wanted:.1g}" * (wanted > self.far)
        return f"answers nearly one number to every input (spread {spread:.1g} of {wanted:.1g}{by})"
