"""Multiple choice: choosing one of n continuations (paper section 4.4, SWAG).

Each choice is a separate sequence, [CLS] context [SEP] choice [SEP]; one vector scores each, and
the softmax is over the choices of an input. Inputs may have different numbers of choices. If a
context is too long, window i of every choice makes one comparison.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bertkit.datasets.examples import ChoiceExample
from bertkit.datasets.swag import write_swag_predictions
from bertkit.model.encoder import ModelConfig
from bertkit.model.task_heads import ClassificationModel
from bertkit.objectives import LossSum, Sums
from bertkit.tasks.classification import leading, refuse_image, softmax
from bertkit.tasks.predictions import Prediction, probability_bars
from bertkit.tasks.task import (
    NOTHING_READ,
    Item,
    ItemPart,
    Items,
    PredictedSplit,
    Task,
    TaskBatch,
    TaskInputs,
)
from bertkit.tasks.windows import at, text_windows
from bertkit.tokenizer.wordpiece import Tokenizer


@dataclass(frozen=True, slots=True, repr=False)
class ChoicePrediction(Prediction):
    """The most probable choice: its index, text and probability, and all probabilities."""

    choice: int
    text: str
    probability: float
    probabilities: tuple[float, ...]

    def _repr_html_(self) -> str:
        """Return what notebooks show: the choices by their number, with bars."""
        names = [str(number) for number in range(len(self.probabilities))]
        names[self.choice] += f": {self.text}"
        shares = dict(zip(names, self.probabilities, strict=True))
        return probability_bars(shares, [names[self.choice]])


@dataclass(frozen=True)
class MultipleChoice(Task):
    """A task that picks one of the choices of each input."""

    max_length: int = 512
    stride: int = 0
    task_type = "multiple-choice"
    answer_field = "choice"
    metric = "accuracy"
    labels = ()

    @classmethod
    def from_data(cls, data: TaskInputs) -> Self:
        """See `Task`."""
        return cls(data.max_length, data.windows.stride)

    def build(self, config: ModelConfig) -> ClassificationModel:
        """See `Task`."""
        return ClassificationModel(config, 1)

    def items(self, inputs: Sequence[ChoiceExample], tokenizer: Tokenizer) -> Items:
        """See `Task`."""
        contexts = tokenizer.encode_batch([given.text for given in inputs])
        endings = tokenizer.encode_batch([text for given in inputs for text in given.choices])
        items, begin, empty = [], 0, 0
        for i, given in enumerate(inputs):
            own = endings[begin : begin + len(given.choices)]
            begin += len(given.choices)
            empty += not (contexts[i] and all(own))
            image = self.image_part(given)
            windows = [
                text_windows(contexts[i], ending, tokenizer, self.max_length, self.stride)
                for ending in own
            ]
            count = max(map(len, windows))
            parts = [
                ItemPart(
                    tuple(choice[at(number, count, choice)] for choice in windows),
                    given.label,
                    1 / count,
                    leads=number == 0,
                    image=image,
                )
                for number in range(count)
            ]
            items.append(Item(i, parts))
        windowed = sum(len(item.parts) > 1 for item in items)
        return Items(items, len(inputs), windowed, {NOTHING_READ: empty})

    def image_part(self, given: ChoiceExample) -> Any:
        """Return what `ItemPart.image` of an input is: nothing, or see `refuse_image`."""
        refuse_image(given)

    def targets(
        self, parts: Sequence[ItemPart], place: np.ndarray, starts: np.ndarray
    ) -> tuple[dict[str, Tensor], dict[str, int]]:
        """See `Task`; "table" (parts, max choices) has packed indices, -1 for absent choices."""
        sizes = [len(part.sequences) for part in parts]
        table = np.full((len(parts), max(sizes)), -1, dtype=np.int64)
        table[np.arange(max(sizes)) < np.array(sizes)[:, None]] = place
        tensors = {
            "table": torch.from_numpy(table),
            "labels": torch.tensor([part.target for part in parts]),
            "weights": torch.tensor([part.weight for part in parts], dtype=torch.float32),
        }
        return tensors, leading(parts)

    def objective(self, model: nn.Module, batch: TaskBatch) -> Sums:
        """See `Task`; the loss is the cross entropy over the choices of each part."""
        scores = model(batch.packed).float().squeeze(-1)
        table = batch.tensors["table"]
        logits = scores[table.clamp(min=0)].masked_fill(table < 0, -torch.inf)
        losses = F.cross_entropy(logits, batch.tensors["labels"], reduction="none")
        return {"loss": LossSum((losses * batch.tensors["weights"]).sum(), "examples")}

    def decode(
        self, inputs: Sequence[ChoiceExample], items: Items, outputs: Sequence[list[np.ndarray]]
    ) -> list[ChoicePrediction]:
        """See `Task`."""
        found = []
        for given, parts in zip(inputs, outputs, strict=True):
            chances = softmax(np.mean([part[:, 0] for part in parts], axis=0))
            best, every = int(chances.argmax()), tuple(chances.tolist())
            found.append(ChoicePrediction(best, given.choices[best], every[best], every))
        return found

    def score(
        self, inputs: Sequence[ChoiceExample], predictions: Sequence[ChoicePrediction]
    ) -> dict[str, float]:
        """See `Task`."""
        right = sum(i.label == p.choice for i, p in zip(inputs, predictions, strict=True))
        return {"accuracy": right / max(1, len(inputs))}

    def baseline(self, inputs: Sequence[ChoiceExample]) -> dict[str, float]:
        """See `Task`; always the index that is right most often."""
        [(_, right)] = Counter(given.label for given in inputs).most_common(1)
        return {"accuracy": right / len(inputs)}

    def degenerate(
        self, inputs: Sequence[ChoiceExample], predictions: Sequence[ChoicePrediction]
    ) -> str:
        """See `Task`; a degenerate run gives all choices nearly equal probabilities."""
        spread = max(max(p.probabilities) - min(p.probabilities) for p in predictions)
        return "gives every choice nearly the same probability" if spread < 0.01 else ""

    def official_files(self, folder: Path, done: PredictedSplit) -> list[Path]:
        """See `Task`; for SWAG this is a CSV with one index per line."""
        if done.name != "swag":
            return []
        path = folder / f"{done.split}.csv"
        choices = [prediction.choice for prediction in done.predictions]
        write_swag_predictions(path, [given.id for given in done.inputs], choices)
        return [path]
