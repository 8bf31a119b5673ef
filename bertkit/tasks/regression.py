"""A number for a text or a pair of texts (paper section 4.1; STS-B).

One linear layer on the pooled [CLS]; the number is its output itself, with no sigmoid.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
from torch import Tensor, nn

from bertkit.datasets.examples import TextExample
from bertkit.datasets.glue import write_glue
from bertkit.errors import BertkitError
from bertkit.model.encoder import ModelConfig
from bertkit.model.task_heads import ClassificationModel
from bertkit.objectives import LossSum, Sums
from bertkit.tasks.classification import mean_logits, text_items, weighted_targets
from bertkit.tasks.metrics import correlations
from bertkit.tasks.task import (
    ItemPart,
    Items,
    PredictedSplit,
    TaskBatch,
    TaskDefaults,
    TrainingData,
)
from bertkit.tokenizer.wordpiece import Tokenizer


class ValuePrediction(NamedTuple):
    """The number of a regression."""

    value: float


@dataclass(frozen=True)
class Regression(TaskDefaults):
    """One number for each input: the output itself, no sigmoid; mean squared error."""

    max_length: int = 512
    stride: int = 0
    task_type = "regression"
    metric = "spearman"
    labels = ()

    @classmethod
    def from_data(cls, data: TrainingData) -> Self:
        """See `Task`."""
        if len({given.label for given in data.train}) == 1:
            raise BertkitError(
                f"the training data has only the number {data.train[0].label} in column "
                f"'{data.columns.label}'; there is nothing to tell apart"
            )
        return cls(data.max_length, data.windows.stride)

    def build(self, config: ModelConfig) -> ClassificationModel:
        """See `Task`."""
        return ClassificationModel(config, 1)

    def items(self, inputs: Sequence[TextExample], tokenizer: Tokenizer) -> Items:
        """See `Task`."""
        return text_items(
            inputs, [i.label for i in inputs], tokenizer, self.max_length, self.stride
        )

    def targets(
        self, parts: Sequence[ItemPart], place: np.ndarray, starts: np.ndarray
    ) -> tuple[dict[str, Tensor], dict[str, int]]:
        """See `Task`."""
        return weighted_targets("values", parts, place, np.float32)

    def objective(self, model: nn.Module, batch: TaskBatch) -> Sums:
        """Squared error."""
        found = model(batch.packed).float().squeeze(-1)
        errors = (found - batch.tensors["values"]) ** 2
        return {"loss": LossSum((errors * batch.tensors["weights"]).sum(), "examples")}

    def decode(
        self, inputs: Sequence[TextExample], items: Items, outputs: Sequence[list[np.ndarray]]
    ) -> list[ValuePrediction]:
        """See `Task`."""
        return [ValuePrediction(float(row[0])) for row in mean_logits(outputs)] if inputs else []

    def score(
        self, inputs: Sequence[TextExample], predictions: Sequence[ValuePrediction]
    ) -> dict[str, float]:
        """See `Task`."""
        gold = [float(str(given.label)) for given in inputs]
        return correlations(gold, [prediction.value for prediction in predictions])

    def baseline(self, inputs: Sequence[TextExample]) -> dict[str, float]:
        """Always the mean."""
        mean = float(np.mean([given.label for given in inputs]))
        return self.score(inputs, [ValuePrediction(mean)] * len(inputs))

    def degenerate(
        self, inputs: Sequence[TextExample], predictions: Sequence[ValuePrediction]
    ) -> str:
        """Nearly the same number for every input."""
        spread = float(np.std([prediction.value for prediction in predictions]))
        wanted = float(np.std([float(str(given.label)) for given in inputs]))
        if spread >= 0.02 * wanted:
            return ""
        return f"answers nearly one number to every input (spread {spread:.1g} of {wanted:.1g})"

    def official_files(self, folder: Path, done: PredictedSplit) -> list[Path]:
        """See `Task`: of STS-B, a file of glue.zip."""
        found = [prediction.value for prediction in done.predictions]
        ids = [given.id for given in done.inputs]
        return write_glue(done.name, folder, done.split, ids, found)
