"""Classification of a text or a pair of texts: one label, or any number of labels, for each input.

The logits go through a softmax over the classes (paper section 4.1), or through a sigmoid per class
if an input may have several labels.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from bertkit.errors import BertkitError
from bertkit.tasks.metrics import CLASSIFICATION, multi_label
from bertkit.tasks.task import Items, Result, TrainingData
from bertkit.tasks.texts import (
    TextColumns,
    TextExample,
    TextTask,
    always_the_same,
    balanced,
    best_scores,
    label_counts,
    softmax,
    training_labels,
    unknown_label,
)
from bertkit.text.documents import value_name


@dataclass(frozen=True, kw_only=True)
class LabelColumns(TextColumns):
    """Columns of texts or text pairs with one label name each; JSON's 1 is "1", true is "True"."""

    def label_in(self, value: Any, location: str) -> str | None:
        if isinstance(value, list | tuple | set | frozenset | dict | bytes):
            raise BertkitError(
                f"{location}: '{self.label}' holds a {type(value).__name__}, not one name; for "
                "several labels per text use the task type multi-label-classification"
            )
        return value_name(value) or None


@dataclass(frozen=True, slots=True, repr=False)
class LabelResult(Result):
    """The most probable class of an input."""

    label: str
    probability: float
    probabilities: dict[str, float]
    """The probability of each class."""


@dataclass(frozen=True)
class Classification(TextTask):
    """A task with one label for each input."""

    labels: tuple[str, ...]
    metrics: tuple[str, ...] = ("accuracy", "macro_f1")
    """Names of `metrics.CLASSIFICATION`; runs are compared by the first."""
    max_length: int = 512
    stride: int = 0
    task_type = "classification"
    columns = LabelColumns
    has_labels = True
    target_dtype = np.int64
    answer_field = "label"

    @classmethod
    def from_data(cls, data: TrainingData) -> Self:
        labels = training_labels(data, at_least=2)
        return cls(labels, max_length=data.max_length, stride=data.windows.stride)

    @property
    def metric(self) -> str:
        return self.metrics[0]

    @property
    def positive(self) -> str:
        """The positive class of F1: the last one, which is GLUE's 1."""
        return self.labels[-1]

    def target_of(self, example: TextExample) -> int | None:
        """The target is the index of the label, or None without a label."""
        if example.label is None:
            return None
        if example.label not in self.labels:
            raise unknown_label(str(example.label), example.location, self.labels)
        return self.labels.index(str(example.label))

    def losses(self, logits: Tensor, targets: Tensor, class_weights: Tensor | None) -> Tensor:
        """The loss is the cross entropy."""
        return F.cross_entropy(logits, targets, weight=class_weights, reduction="none")

    def balanced_weights(self, items: Items) -> np.ndarray:
        targets = [item.parts[0].target for item in items.items]
        return balanced(np.bincount(targets, minlength=len(self.labels)))

    def results(self, logits: np.ndarray) -> list[LabelResult]:
        return [
            LabelResult(
                self.labels[int(row.argmax())],
                float(row.max()),
                dict(zip(self.labels, row.tolist(), strict=True)),
            )
            for row in softmax(logits)
        ]

    def score(
        self, inputs: Sequence[TextExample], results: Sequence[LabelResult]
    ) -> dict[str, float]:
        gold = [str(example.label) for example in inputs]
        predicted = [result.label for result in results]
        return {name: CLASSIFICATION[name](gold, predicted, self.positive) for name in self.metrics}

    def baseline(self, inputs: Sequence[TextExample]) -> dict[str, float]:
        """Always the most frequent or always the positive label."""
        [(common, _)] = label_counts(inputs).most_common(1)
        return best_scores(
            self.score(inputs, [LabelResult(label, 1.0, {})] * len(inputs))
            for label in {common, self.positive}
        )

    def degenerate(self, inputs: Sequence[TextExample], results: Sequence[LabelResult]) -> str:
        """A degenerate run gives each input the same label."""
        return always_the_same(inputs, [result.label for result in results])

    def official_files(
        self, name: str, split: str, folder: Path, inputs: Sequence[Any], results: Sequence[Any]
    ) -> list[Path]:
        """For GLUE this is a file of its server."""
        from bertkit.tasks.official import write_glue

        ids, labels = [example.id for example in inputs], [result.label for result in results]
        return write_glue(name, split, folder, ids, labels)


# Any number of labels -----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LabelSetColumns(TextColumns):
    """Columns of texts or text pairs with any number of labels each.

    The labels are a JSON list of names, or names between separators. An empty field holds no label.
    """

    separator: str = "|"
    """What separates several labels in one field."""

    def __post_init__(self) -> None:
        """Check the separator."""
        super().__post_init__()
        if not self.separator:
            raise BertkitError("--separator is empty; give the text that separates the labels")

    def label_in(self, value: Any, location: str) -> tuple[str, ...] | None:
        """Return the distinct label names in a field, in order, or None for null."""
        if value is None:
            return None
        if isinstance(value, str):
            value = label_list(value, self.separator)
        if isinstance(value, set | frozenset):
            value = sorted(value, key=str)
        items = list(value) if isinstance(value, list | tuple) else [value]
        if any(hasattr(item, "__len__") and not isinstance(item, str) for item in items):
            raise BertkitError(
                f"{location}: the labels are {str(value)[:40]!r}; write a list of names, or names "
                "between separators"
            )
        vector = all(isinstance(item, bool | int | float) and item in (0, 1) for item in items)
        # [0, 1] may be two class numbers; a float, a bool, a repetition or another order is not
        if vector and len(items) > 1 and list(map(repr, items)) != ["0", "1"]:
            raise BertkitError(
                f"{location}: the labels are {str(value)[:40]!r}, which looks like a 0 or 1 for "
                "each label; write the names of the labels that apply"
            )
        names = (value_name(item) for item in items)
        return tuple(dict.fromkeys(name for name in names if name))


def label_list(value: str, separator: str) -> list[Any]:
    """Return the labels of a text: a JSON list, or names between separators."""
    if value.lstrip().startswith("["):
        try:
            parsed = json.loads(value)
        except (ValueError, RecursionError):
            parsed = None
        if isinstance(parsed, list):
            return parsed
    return list(value.split(separator))


@dataclass(frozen=True, slots=True, repr=False)
class LabelSetResult(Result):
    """The classes with a probability above 0.5, most probable first."""

    labels: tuple[str, ...]
    probabilities: dict[str, float]
    """The probability of each class; they do not add up to 1."""


@dataclass(frozen=True)
class MultiLabelClassification(TextTask):
    """A task with any number of labels for each input."""

    labels: tuple[str, ...]
    max_length: int = 512
    stride: int = 0
    task_type = "multi-label-classification"
    problem_type = "multi_label_classification"
    columns = LabelSetColumns
    has_labels = True
    answer_field = "labels"
    metric = "micro_f1"

    @classmethod
    def from_data(cls, data: TrainingData) -> Self:
        labels = training_labels(data, at_least=1)
        return cls(labels, max_length=data.max_length, stride=data.windows.stride)

    def target_of(self, example: TextExample) -> np.ndarray:
        """The target says of each label whether the input has it."""
        wanted = self.gold_value(example)
        for label in wanted:
            if label not in self.labels:
                raise unknown_label(label, example.location, self.labels)
        return np.array([label in wanted for label in self.labels])

    def losses(self, logits: Tensor, targets: Tensor, class_weights: Tensor | None) -> Tensor:
        """The loss is the mean binary cross entropy over the classes.

        A class's weight is that of the inputs that have it.
        """
        return F.binary_cross_entropy_with_logits(
            logits, targets, pos_weight=class_weights, reduction="none"
        ).mean(-1)

    def balanced_weights(self, items: Items) -> np.ndarray:
        """Inputs without the class / inputs with it."""
        counts = np.sum([item.parts[0].target for item in items.items], axis=0)
        absent = len(items.items) - counts
        return np.where(counts * absent > 0, absent / np.maximum(counts, 1), 1.0)

    def results(self, logits: np.ndarray) -> list[LabelSetResult]:
        results = []
        for row in 1 / (1 + np.exp(-logits.astype(np.float64))):
            chances = dict(zip(self.labels, row.tolist(), strict=True))
            above = (label for label in self.labels if chances[label] > 0.5)
            ordered = tuple(sorted(above, key=lambda name: -chances[name]))
            results.append(LabelSetResult(ordered, chances))
        return results

    def answer_value(self, result: LabelSetResult) -> tuple[str, ...]:
        """The labels in alphabetical order."""
        return tuple(sorted(result.labels))

    def gold_value(self, example: TextExample) -> tuple[str, ...]:
        """The labels in alphabetical order."""
        return tuple(sorted(example.label)) if isinstance(example.label, tuple) else ()

    def score(
        self, inputs: Sequence[TextExample], results: Sequence[LabelSetResult]
    ) -> dict[str, float]:
        gold = [self.gold_value(example) for example in inputs]
        return multi_label(gold, [result.labels for result in results], self.labels)

    def baseline(self, inputs: Sequence[TextExample]) -> dict[str, float]:
        """Always the k best labels for micro F1, all labels, or the commonest set."""
        seen = label_counts(inputs)
        ranked = [label for label, _ in seen.most_common()]
        right = [0, *accumulate(seen[label] for label in ranked)]
        micro = [n / (k * len(inputs) + seen.total() or 1) for k, n in enumerate(right)]
        [(usual, _)] = Counter(map(self.gold_value, inputs)).most_common(1)
        return best_scores(
            self.score(inputs, [LabelSetResult(tuple(labels), {})] * len(inputs))
            for labels in (ranked[: micro.index(max(micro))], ranked, usual)
        )

    def degenerate(self, inputs: Sequence[TextExample], results: Sequence[LabelSetResult]) -> str:
        """A degenerate run gives each input the same labels."""
        answers = [" and ".join(self.answer_value(result)) or "no label" for result in results]
        return always_the_same(inputs, answers)
