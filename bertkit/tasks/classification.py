"""Classification of a text or a pair of texts (paper section 4.1).

The input is [CLS] text [SEP] pair [SEP]; one linear layer maps the pooled [CLS] to logits. They go
through a softmax over the classes, or a sigmoid per class if an input may have several labels.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bertkit.datasets.examples import ChoiceExample, TextExample
from bertkit.errors import BertkitError
from bertkit.model.encoder import ModelConfig
from bertkit.model.task_heads import ClassificationModel
from bertkit.objectives import LossSum, Sums
from bertkit.tasks.metrics import CLASSIFICATION, multi_label
from bertkit.tasks.predictions import Prediction, probability_bars
from bertkit.tasks.task import (
    NOTHING_READ,
    Encoded,
    Item,
    ItemPart,
    Items,
    PredictedSplit,
    Task,
    TaskBatch,
    TaskInputs,
)
from bertkit.tasks.windows import text_windows
from bertkit.tokenizer.wordpiece import Tokenizer

SEEN_ONCE = "label seen once in training, kept"
SHOWN_LABELS = 20
"""The number of known labels that an error lists. It suggests none: the most similar spelling may
mean the opposite."""


@dataclass(frozen=True, slots=True, repr=False)
class LabelPrediction(Prediction):
    """The most probable class of an input."""

    label: str
    probability: float
    probabilities: dict[str, float]
    """The probability of every class."""

    def _repr_html_(self) -> str:
        """Return what notebooks show: the labels with bars."""
        return probability_bars(self.probabilities, [self.label])


@dataclass(frozen=True, slots=True, repr=False)
class LabelSetPrediction(Prediction):
    """The classes with a probability above 0.5, most probable first."""

    labels: tuple[str, ...]
    probabilities: dict[str, float]
    """The probability of every class; they do not add up to 1."""

    def _repr_html_(self) -> str:
        """Return what notebooks show: the labels with bars."""
        return probability_bars(self.probabilities, self.labels)


def in_packed_order(
    values: Sequence[Any], place: np.ndarray, dtype: type[np.number[Any]]
) -> Tensor:
    """Return values of parts in the order of their packed sequences; `place` has their indices."""
    return torch.from_numpy(np.array(values, dtype=dtype)[np.argsort(place)])


def leading(parts: Sequence[ItemPart]) -> dict[str, int]:
    """Count the items whose first part is among the parts; a mean loss is divided by it."""
    return {"examples": sum(part.leads for part in parts)}


def always_the_same(inputs: Sequence[TextExample], found: Sequence[Any]) -> str:
    """Return a message if all inputs got the same prediction but their labels differ, else ""."""
    wanted = {frozenset(i.label) if isinstance(i.label, tuple) else i.label for i in inputs}
    if len(set(found)) > 1 or len(wanted) < 2:
        return ""
    return f"answers {found[0]!r} to every input"


class TextTask(Task):
    """A task on a text or a pair of texts, with windows and one linear layer on [CLS].

    If a text has several windows, each is trained on the label of the text, and the output for the
    text is the mean of their outputs.
    """

    max_length: int
    stride: int
    target_dtype: ClassVar[type[np.number[Any]]] = np.float32

    @abstractmethod
    def target_of(self, given: TextExample) -> Any:
        """Return the target for the loss: an index, a number, or 0 or 1 for each class.

        Raises:
            BertkitError: the label is unknown.
        """

    @abstractmethod
    def losses(self, logits: Tensor, targets: Tensor, class_weights: Tensor | None) -> Tensor:
        """Return the loss of each sequence.

        Args:
            logits: (sequences, classes).
            targets: (sequences, ...).
            class_weights: (classes,) the factors of the classes' losses; None for 1.
        """

    @abstractmethod
    def predictions(self, logits: np.ndarray) -> list[Any]:
        """Return one prediction for each row of logits (inputs, classes)."""

    def build(self, config: ModelConfig) -> ClassificationModel:
        """See `Task`."""
        return ClassificationModel(config, len(self.labels) or 1)

    def items(self, inputs: Sequence[TextExample], tokenizer: Tokenizer) -> Items:
        """See `Task`; each input is one item, whose windows share its target."""
        targets = [self.target_of(given) for given in inputs]
        texts = tokenizer.encode_batch([given.text for given in inputs])
        pairs: list[list[int]] = [[]] * len(inputs)
        if any(given.pair for given in inputs):
            pairs = tokenizer.encode_batch([given.pair or "" for given in inputs])
        items = []
        for i, given in enumerate(inputs):
            pair = None if given.pair is None else pairs[i]
            windows, image = self.encode_windows(given, texts[i], pair, tokenizer)
            parts = [
                ItemPart((window,), targets[i], 1 / len(windows), number == 0, image)
                for number, window in enumerate(windows)
            ]
            items.append(Item(i, parts))
        windowed = sum(len(item.parts) > 1 for item in items)
        empty = sum(
            not text or (given.pair is not None and not pair)
            for given, text, pair in zip(inputs, texts, pairs, strict=True)
        )
        return Items(items, len(inputs), windowed, {NOTHING_READ: empty})

    def encode_windows(
        self, given: TextExample, text: list[int], pair: list[int] | None, tokenizer: Tokenizer
    ) -> tuple[list[Encoded], Any]:
        """Return the windows of an input and its image, given the token ids of its texts.

        Raises:
            BertkitError: see `refuse_image`.
        """
        refuse_image(given)
        return text_windows(text, pair, tokenizer, self.max_length, self.stride), None

    def targets(
        self, parts: Sequence[ItemPart], place: np.ndarray, starts: np.ndarray
    ) -> tuple[dict[str, Tensor], dict[str, int]]:
        """See `Task`; the tensors are the targets and weights of the packed sequences."""
        targets = in_packed_order([part.target for part in parts], place, self.target_dtype)
        weights = in_packed_order([part.weight for part in parts], place, np.float32)
        return {"targets": targets, "weights": weights}, leading(parts)

    def objective(self, model: nn.Module, batch: TaskBatch) -> Sums:
        """See `Task`; the loss is the weighted sum over sequences."""
        targets, class_weights = batch.tensors["targets"], batch.tensors.get("class_weights")
        losses = self.losses(model(batch.packed).float(), targets, class_weights)
        return {"loss": LossSum((losses * batch.tensors["weights"]).sum(), "examples")}

    def decode(
        self, inputs: Sequence[TextExample], items: Items, outputs: Sequence[list[np.ndarray]]
    ) -> list[Any]:
        """See `Task`."""
        if not inputs:
            return []
        return self.predictions(np.stack([np.concatenate(parts).mean(axis=0) for parts in outputs]))

    def official_files(self, folder: Path, done: PredictedSplit) -> list[Path]:
        """See `Task`; for GLUE this is a file of glue.zip."""
        from bertkit.datasets.submissions import write_glue

        found = [self.plain(prediction) for prediction in done.predictions]
        ids = [given.id for given in done.inputs]
        return write_glue(done.name, folder, done.split, ids, found)


@dataclass(frozen=True)
class Classification(TextTask):
    """A task with one label for each input."""

    labels: tuple[str, ...]
    metrics: tuple[str, ...] = ("accuracy", "macro_f1")
    """Names of `metrics.CLASSIFICATION`; runs are compared by the first."""
    max_length: int = 512
    stride: int = 0
    task_type = "classification"
    target_dtype = np.int64
    answer_field = "label"

    def __post_init__(self) -> None:
        """Check the metrics, which a model's `bertkit.json` names.

        Raises:
            BertkitError: there is no metric, or one that does not exist.
        """
        if not self.metrics or not set(self.metrics) <= set(CLASSIFICATION):
            raise BertkitError(
                f"metrics are {', '.join(CLASSIFICATION)}, not {list(self.metrics)!r:.60}"
            )

    @classmethod
    def from_data(cls, data: TaskInputs) -> Self:
        """See `Task`."""
        labels = training_labels(data, at_least=2)
        return cls(labels, max_length=data.max_length, stride=data.windows.stride)

    @property
    def metric(self) -> str:
        """See `Task`."""
        return self.metrics[0]

    @property
    def positive(self) -> str:
        """The positive class of F1: the last one, which is GLUE's 1."""
        return self.labels[-1]

    def target_of(self, given: TextExample) -> int | None:
        """See `TextTask`; the target is the index of the label, or None without a label."""
        if given.label is None:
            return None
        if given.label not in self.labels:
            raise unknown_label(str(given.label), given.place, self.labels)
        return self.labels.index(str(given.label))

    def losses(self, logits: Tensor, targets: Tensor, class_weights: Tensor | None) -> Tensor:
        """See `TextTask`; the loss is the cross entropy."""
        return F.cross_entropy(logits, targets, weight=class_weights, reduction="none")

    def balanced_weights(self, items: Items) -> np.ndarray:
        """See `Task`; inputs / (classes x inputs of the class), as in scikit-learn."""
        targets = [item.parts[0].target for item in items.items]
        return balanced(np.bincount(targets, minlength=len(self.labels)))

    def predictions(self, logits: np.ndarray) -> list[LabelPrediction]:
        """See `TextTask`."""
        return [
            LabelPrediction(
                self.labels[int(row.argmax())],
                float(row.max()),
                dict(zip(self.labels, row.tolist(), strict=True)),
            )
            for row in softmax(logits)
        ]

    def score(
        self, inputs: Sequence[TextExample], predictions: Sequence[LabelPrediction]
    ) -> dict[str, float]:
        """See `Task`."""
        gold = [str(given.label) for given in inputs]
        found = [prediction.label for prediction in predictions]
        return {name: CLASSIFICATION[name](gold, found, self.positive) for name in self.metrics}

    def baseline(self, inputs: Sequence[TextExample]) -> dict[str, float]:
        """See `Task`; always the most frequent or always the positive label."""
        [(common, _)] = label_counts(inputs).most_common(1)
        return best_by_metric(
            self.score(inputs, [LabelPrediction(one, 1.0, {})] * len(inputs))
            for one in {common, self.positive}
        )

    def degenerate(
        self, inputs: Sequence[TextExample], predictions: Sequence[LabelPrediction]
    ) -> str:
        """See `Task`; a degenerate run gives every input the same label."""
        return always_the_same(inputs, [prediction.label for prediction in predictions])


@dataclass(frozen=True)
class MultiLabelClassification(TextTask):
    """A task with any number of labels for each input."""

    labels: tuple[str, ...]
    max_length: int = 512
    stride: int = 0
    task_type = "multi-label-classification"
    answer_field = "labels"
    metric = "micro_f1"

    @classmethod
    def from_data(cls, data: TaskInputs) -> Self:
        """See `Task`."""
        labels = training_labels(data, at_least=1)
        return cls(labels, max_length=data.max_length, stride=data.windows.stride)

    def target_of(self, given: TextExample) -> np.ndarray:
        """See `TextTask`; the target says of each label, in a byte, whether the input has it."""
        wanted = self.plain_gold(given)
        for label in wanted:
            if label not in self.labels:
                raise unknown_label(label, given.place, self.labels)
        return np.array([label in wanted for label in self.labels])

    def losses(self, logits: Tensor, targets: Tensor, class_weights: Tensor | None) -> Tensor:
        """See `TextTask`; the loss is the mean binary cross entropy over the classes.

        A class's weight is that of the inputs that have it.
        """
        return F.binary_cross_entropy_with_logits(
            logits, targets, pos_weight=class_weights, reduction="none"
        ).mean(-1)

    def balanced_weights(self, items: Items) -> np.ndarray:
        """See `Task`; inputs without the class / inputs with it."""
        counts = np.sum([item.parts[0].target for item in items.items], axis=0)
        absent = len(items.items) - counts
        return np.where(counts * absent > 0, absent / np.maximum(counts, 1), 1.0)

    def predictions(self, logits: np.ndarray) -> list[LabelSetPrediction]:
        """See `TextTask`."""
        found = []
        for row in 1 / (1 + np.exp(-logits.astype(np.float64))):
            chances = dict(zip(self.labels, row.tolist(), strict=True))
            above = (label for label in self.labels if chances[label] > 0.5)
            ordered = tuple(sorted(above, key=lambda name: -chances[name]))
            found.append(LabelSetPrediction(ordered, chances))
        return found

    def plain(self, prediction: LabelSetPrediction) -> tuple[str, ...]:
        """See `Task`; the labels in alphabetical order."""
        return tuple(sorted(prediction.labels))

    def plain_gold(self, given: TextExample) -> tuple[str, ...]:
        """See `Task`; the labels in alphabetical order."""
        return tuple(sorted(given.label)) if isinstance(given.label, tuple) else ()

    def score(
        self, inputs: Sequence[TextExample], predictions: Sequence[LabelSetPrediction]
    ) -> dict[str, float]:
        """See `Task`."""
        gold = [self.plain_gold(given) for given in inputs]
        return multi_label(gold, [found.labels for found in predictions], self.labels)

    def baseline(self, inputs: Sequence[TextExample]) -> dict[str, float]:
        """See `Task`; always the k best labels for micro F1, all labels, or the commonest set."""
        seen = label_counts(inputs)
        ranked = [label for label, _ in seen.most_common()]
        right = [0, *accumulate(seen[label] for label in ranked)]
        micro = [n / (k * len(inputs) + seen.total() or 1) for k, n in enumerate(right)]
        [(usual, _)] = Counter(map(self.plain_gold, inputs)).most_common(1)
        return best_by_metric(
            self.score(inputs, [LabelSetPrediction(tuple(one), {})] * len(inputs))
            for one in (ranked[: micro.index(max(micro))], ranked, usual)
        )

    def degenerate(
        self, inputs: Sequence[TextExample], predictions: Sequence[LabelSetPrediction]
    ) -> str:
        """See `Task`; a degenerate run gives every input the same set of labels."""
        found = [" and ".join(self.plain(one)) or "no label" for one in predictions]
        return always_the_same(inputs, found)


def best_by_metric(scores: Iterable[dict[str, float]]) -> dict[str, float]:
    """Return the highest value of each metric."""
    each = list(scores)
    return {metric: max(found[metric] for found in each) for metric in each[0]}


def balanced(counts: np.ndarray) -> np.ndarray:
    """Return weights (classes,) whose mean over the counted targets is 1, for counts (classes,).

    Classes that do not occur have the weight 1.
    """
    share = counts.sum() / max(1, (counts > 0).sum())
    return np.where(counts > 0, share / np.maximum(counts, 1), 1.0)


def softmax(logits: np.ndarray) -> np.ndarray:
    """Compute the softmax along the last axis in double precision."""
    shifted = np.exp(logits.astype(np.float64) - logits.max(axis=-1, keepdims=True))
    return shifted / shifted.sum(axis=-1, keepdims=True)


def unknown_label(label: str, place: str, labels: Sequence[str]) -> BertkitError:
    """Return the error for a label that is not among the model's labels."""
    shown = ", ".join(sorted(labels)[:SHOWN_LABELS])
    more = f" and {len(labels) - SHOWN_LABELS} more" if len(labels) > SHOWN_LABELS else ""
    return BertkitError(
        f"{place}: the label {label!r} is not one of the model's; known: {shown}{more}"
    )


def refuse_image(given: TextExample | ChoiceExample) -> None:
    """Check that an input has no image.

    Raises:
        BertkitError: it has one, which the task does not read (code "image-unexpected").
    """
    if given.image is not None:
        raise BertkitError(
            f"{given.place}: the model reads only text, and here is an image; leave it out, or "
            "fine-tune a model on images (--image-column)",
            code="image-unexpected",
        )


def label_counts(inputs: Iterable[Any]) -> Counter[str]:
    """Count the occurrences of each label or tag."""
    known = (given.gold for given in inputs if given.gold is not None)
    sets = (gold if isinstance(gold, tuple) else (str(gold),) for gold in known)
    return Counter(chain.from_iterable(sets))


def training_labels(data: TaskInputs, *, at_least: int) -> tuple[str, ...]:
    """Return the sorted labels of the training data; labels that occur once are noted in counts.

    Raises:
        BertkitError: there are fewer than `at_least` labels.
    """
    seen = label_counts(data.train)
    for label, count in seen.items():
        if count == 1:
            data.counts.note(SEEN_ONCE, f"label {label!r}")
    if len(seen) < at_least:
        found = f"only the label {next(iter(seen))!r}" if seen else "no label"
        raise BertkitError(
            f"the training data has {found} in column '{data.columns.label}'; there is nothing to "
            "tell apart"
        )
    return tuple(sorted(seen))
