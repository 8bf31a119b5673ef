"""A number for a text or a pair of texts (paper section 4.1; STS-B).

One linear layer on the pooled [CLS]; the number is its output itself, with no sigmoid.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor, nn

from bertkit.model.encoder import ModelConfig
from bertkit.model.task_heads import ClassificationModel
from bertkit.objectives import Sum, Sums
from bertkit.tasks.classify import mean_logits, text_items, weighted_targets
from bertkit.tasks.inputs import TextInput
from bertkit.tasks.metrics import correlations
from bertkit.tasks.task import Items, Part, TaskBatch, TaskDefaults
from bertkit.tokens.tokenizer import Tokenizer


class Value(NamedTuple):
    """The number of a regression."""

    value: float


@dataclass(frozen=True)
class Regress(TaskDefaults):
    """One number for each input: the output itself, no sigmoid; mean squared error."""

    longest: int = 512
    stride: int = 0
    kind = "regress"
    metric = "spearman"
    labels = ()

    def build(self, config: ModelConfig) -> ClassificationModel:
        """See `Task`."""
        return ClassificationModel(config, 1)

    def items(self, inputs: Sequence[TextInput], tokenizer: Tokenizer) -> Items:
        """See `Task`."""
        return text_items(inputs, [i.label for i in inputs], tokenizer, self.longest, self.stride)

    def targets(
        self, parts: Sequence[Part], place: np.ndarray, starts: np.ndarray
    ) -> tuple[dict[str, Tensor], dict[str, int]]:
        """See `Task`."""
        return weighted_targets("values", parts, place, np.float32)

    def objective(self, model: nn.Module, batch: TaskBatch) -> Sums:
        """Squared error."""
        found = model(batch.packed).float().squeeze(-1)
        errors = (found - batch.tensors["values"]) ** 2
        return {"loss": Sum((errors * batch.tensors["weights"]).sum(), "examples")}

    def decode(
        self, inputs: Sequence[TextInput], items: Items, outputs: Sequence[list[np.ndarray]]
    ) -> list[Value]:
        """See `Task`."""
        return [Value(float(row[0])) for row in mean_logits(outputs)] if inputs else []

    def score(self, inputs: Sequence[TextInput], predictions: Sequence[Value]) -> dict[str, float]:
        """See `Task`."""
        gold = [float(str(given.label)) for given in inputs]
        return correlations(gold, [prediction.value for prediction in predictions])

    def baseline(self, inputs: Sequence[TextInput]) -> dict[str, float]:
        """Always the mean."""
        mean = float(np.mean([given.label for given in inputs]))
        return self.score(inputs, [Value(mean)] * len(inputs))

    def degenerate(self, inputs: Sequence[TextInput], predictions: Sequence[Value]) -> str:
        """Nearly the same number for every input."""
        spread = float(np.std([prediction.value for prediction in predictions]))
        wanted = float(np.std([float(str(given.label)) for given in inputs]))
        if spread >= 0.02 * wanted:
            return ""
        return f"answers nearly one number to every input (spread {spread:.1g} of {wanted:.1g})"
