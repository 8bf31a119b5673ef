"""Tasks on a text or a pair of texts, and classification with one label or any number of labels.

The input is [CLS] text [SEP] pair [SEP]; one linear layer maps the pooled [CLS] to logits (paper
section 4.1). If a text has several windows, each is trained on the label of the text, and the
output for the text is the mean of their outputs. The logits go through a softmax over the classes,
or through a sigmoid per class if an input may have several labels.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bertkit.errors import BertkitError, InputTypeError
from bertkit.model.encoder import ModelConfig
from bertkit.model.heads import LossSum, Sums
from bertkit.model.outputs import ClassificationModel
from bertkit.tasks.columns import Columns, Fields, Purpose, from_json, require_texts, row_texts
from bertkit.tasks.sequences import WindowLengths, aligned_parts, text_windows
from bertkit.tasks.task import (
    NOTHING_READ,
    Inputs,
    Item,
    Items,
    Metrics,
    Outputs,
    Parts,
    Result,
    Results,
    Targets,
    Task,
    TaskBatch,
    TrainingData,
    balanced,
    count_examples,
    label_counts,
    note_similar,
    softmax,
    unknown_label,
)
from bertkit.text.documents import TextCounts, value_name
from bertkit.tokenizer.wordpiece import Tokenizer

MANY_LABELS, USUAL_TOP = 100, 10
"""With more labels than the first, results have as many probabilities as the second by default."""


class TextExample(NamedTuple):
    """One text or a pair of texts."""

    id: str
    text: str
    pair: str | None
    gold: str | float | tuple[str, ...] | None
    """A name, a number (regression), or any number of names (multi-label classification)."""
    location: str


@dataclass(frozen=True, kw_only=True)
class TextColumns(Columns):
    """Columns of texts or text pairs with a label each; JSON's 1 is "1", true is "True"."""

    text: str = "text"
    """The column of the text."""
    pair: str = ""
    """The column of the second text of a pair."""
    label: str = "label"
    """The column of the label."""
    input_options = ("text", "pair")
    wanted = "texts or (text, second text) tuples"

    @abstractmethod
    def label_in(self, value: Any, location: str) -> Any:
        """Return the label in a field, or None if the field is empty."""

    def label_of(self, row: Fields, location: str) -> Any:
        """Return the label of a row, or None if it has none."""
        return self.label_in(row.get(self.label), location)

    def example(self, row: Fields, location: str, counts: TextCounts, purpose: Purpose) -> Any:
        texts = row_texts(row, self.inputs, location, counts)
        if texts is None:
            return None
        label = None if purpose == "predict" else self.label_of(row, location)
        return TextExample("", texts[0], texts[1] if self.pair else None, label, location)

    def from_values(self, values: Sequence[Any], location: str, id: str) -> TextExample:  # noqa: A002
        """A blank text is valid: the model reads only [CLS] and [SEP]."""
        texts = require_texts(location, values)
        if not 1 <= len(texts) <= 2:
            raise InputTypeError(f"{location} has {len(texts)} texts; give one text or two")
        return TextExample(id, texts[0], texts[1] if len(texts) > 1 else None, None, location)

    def from_line(self, line: str, location: str, id: str, document: int) -> TextExample:  # noqa: A002
        if self.pair:
            raise BertkitError(
                f"{location}: plain text has no columns; give CSV or JSONL for pairs"
            )
        return TextExample(id, line.strip(), None, None, location)


class TextTask(Task):
    """A task on a text or a pair of texts, with windows and one linear layer on [CLS]."""

    head = "sequence"
    windows = WindowLengths
    max_length: int
    stride: int
    input_fields = ("text", "pair")
    target_dtype: ClassVar[type[np.number[Any]]] = np.float32

    @cached_property
    def indices(self) -> dict[str, int]:
        """The index of each label."""
        return {label: index for index, label in enumerate(self.labels)}

    def texts_of(self, example: Any) -> list[tuple[str, ...]]:
        """Return the text, or the text and its pair, of each sequence of an input."""
        return [(example.text,) if example.pair is None else (example.text, example.pair)]

    @abstractmethod
    def target_of(self, example: Any) -> Any:
        """Return the target for the loss: an index, a number, or 0 or 1 for each class."""

    @abstractmethod
    def losses(self, logits: Tensor, targets: Tensor, class_weights: Tensor | None) -> Tensor:
        """Return the loss of each part, of logits (parts, sequences, classes)."""

    @abstractmethod
    def results(self, inputs: Inputs, logits: Sequence[np.ndarray]) -> list[Any]:
        """Return a result for each input and its logits (sequences, classes)."""

    def build(self, config: ModelConfig) -> ClassificationModel:
        return ClassificationModel(config, len(self.labels) or 1)

    def items(self, inputs: Inputs, tokenizer: Tokenizer) -> Items:
        """Each input is one item, whose windows share its target."""
        read = [(self.target_of(example), self.texts_of(example)) for example in inputs]
        distinct = list(dict.fromkeys(text for _, pairs in read for pair in pairs for text in pair))
        ids = dict(zip(distinct, tokenizer.encode_batch(distinct), strict=True))
        items, empty = [], 0
        for number, (target, pairs) in enumerate(read):
            encoded = [[ids[text] for text in pair] for pair in pairs]
            empty += not all(map(all, encoded))
            windows = [
                text_windows(text, *pair, tokenizer=tokenizer, length=self.max_length,
                             stride=self.stride)
                for text, *pair in encoded
            ]  # fmt: skip
            items.append(Item(number, aligned_parts(windows, target)))
        windowed = sum(len(item.parts) > 1 for item in items)
        return Items(items, len(inputs), windowed, {NOTHING_READ: empty})

    def targets(self, parts: Parts, packed_index: np.ndarray, starts: np.ndarray) -> Targets:
        """The tensor "table" (parts, sequences) has packed indices, -1 for absent sequences."""
        sizes = np.array([len(part.sequences) for part in parts])
        table = np.full((len(parts), sizes.max()), -1)
        table[np.arange(sizes.max()) < sizes[:, None]] = packed_index
        tensors = {
            "table": table,
            "targets": np.array([part.target for part in parts], dtype=self.target_dtype),
            "weights": np.array([part.weight for part in parts], dtype=np.float32),
        }
        return {n: torch.from_numpy(values) for n, values in tensors.items()}, count_examples(parts)

    def loss(self, model: nn.Module, batch: TaskBatch) -> Sums:
        table, tensors = batch.tensors["table"], batch.tensors
        logits = model(batch.packed).float()[table.clamp(min=0)]
        logits = logits.masked_fill(table[..., None] < 0, -torch.inf)
        losses = self.losses(logits, tensors["targets"], tensors.get("class_weights"))
        return {"loss": LossSum((losses * tensors["weights"]).sum(), "examples")}

    def decode(self, inputs: Inputs, items: Items, outputs: Outputs) -> list[Any]:
        means = [np.mean(parts, axis=0) for parts in outputs]
        return self.results(inputs, means) if inputs else []


@dataclass(frozen=True)
class LabelTask(TextTask):
    """A task whose outputs are classes."""

    labels: tuple[str, ...]
    max_length: int = 512
    stride: int = 0
    top: int = 0  # the number of probabilities in a result; see `shown_probabilities`
    has_labels = True
    least_labels: ClassVar[int] = 1

    @classmethod
    def from_data(cls, data: TrainingData) -> Self:
        labels = training_labels(data, cls.least_labels)
        return cls(labels, max_length=data.max_length, stride=data.windows.stride)


def training_labels(data: TrainingData, least: int) -> tuple[str, ...]:
    """Return the sorted labels of the training data; similar ones are noted in counts."""
    seen = label_counts(data.examples)
    note_similar(seen, data.counts)
    if len(seen) < least:
        what = f"only the label {next(iter(seen))!r}" if seen else "no label"
        raise BertkitError(
            f"the training data has {what} in column '{', '.join(data.columns.targets)}'; there is "
            "nothing to tell apart"
        )
    return tuple(sorted(seen))


def shown_probabilities(
    labels: Sequence[str], chances: np.ndarray, top: int
) -> list[dict[str, float]]:
    """Return label -> probability of each row (inputs, labels): of all, or the `top` best first."""
    top = top or (len(labels) if len(labels) <= MANY_LABELS else USUAL_TOP)
    if top >= len(labels):
        return [dict(zip(labels, row, strict=True)) for row in chances.tolist()]
    best = np.argpartition(-chances, top - 1, axis=1)[:, :top].tolist()
    return [
        {labels[index]: float(row[index]) for index in sorted(indices, key=lambda i: -row[i])}
        for row, indices in zip(chances, best, strict=True)
    ]


def best_scores(scores: Iterable[Metrics]) -> Metrics:
    """Return the highest value of each metric."""
    each = list(scores)
    return {metric: max(values[metric] for values in each) for metric in each[0]}


# One label ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LabelColumns(TextColumns):
    """Columns of texts or text pairs with one label name each; JSON's 1 is "1", true is "True"."""

    def label_in(self, value: Any, location: str) -> str | None:
        if isinstance(value, list | tuple | set | frozenset | dict):
            raise BertkitError(
                f"{location}: '{self.label}' holds a {type(value).__name__}, not one name; for "
                "several labels per text use the task type multi-label-classification"
            )
        return value_name(value) or None


@dataclass(frozen=True, slots=True)
class LabelResult(Result):
    """The most probable class of an input."""

    label: str
    probability: float
    probabilities: dict[str, float]
    """The probability of each class, or of the most probable ones; see `shown_probabilities`."""


@dataclass(frozen=True)
class Classification(LabelTask):
    """A task with one label for each input."""

    metrics: tuple[str, ...] = ("accuracy", "macro_f1")
    """Names of `label_score`; runs are compared by the first."""
    task_type = "classification"
    columns = LabelColumns
    target_dtype = np.int64
    answer_field = "label"
    least_labels = 2

    @property
    def metric(self) -> str:
        return self.metrics[0]

    @property
    def positive(self) -> str:
        return self.labels[-1]

    def target_of(self, example: TextExample) -> int | None:
        if example.gold is None:
            return None
        if example.gold not in self.indices:
            raise unknown_label(str(example.gold), example.location, self.labels)
        return self.indices[str(example.gold)]

    def losses(self, logits: Tensor, targets: Tensor, class_weights: Tensor | None) -> Tensor:
        return F.cross_entropy(logits[:, 0], targets, weight=class_weights, reduction="none")

    def balanced_weights(self, items: Items) -> np.ndarray:
        targets = [item.parts[0].target for item in items.items]
        return balanced(np.bincount(targets, minlength=len(self.labels)))

    def results(self, inputs: Inputs, logits: Sequence[np.ndarray]) -> list[LabelResult]:
        chances = softmax(np.concatenate(logits))
        shown = shown_probabilities(self.labels, chances, self.top)
        best = zip(chances.argmax(axis=1).tolist(), chances.max(axis=1).tolist(), strict=True)
        return [
            LabelResult(self.labels[index], probability, shares)
            for (index, probability), shares in zip(best, shown, strict=True)
        ]

    def score(self, inputs: Inputs, results: Results) -> Metrics:
        gold = [str(example.gold) for example in inputs]
        predicted = [result.label for result in results]
        return {name: label_score(name, gold, predicted, self.positive) for name in self.metrics}

    def baseline(self, inputs: Inputs) -> Metrics:
        """Always the most frequent or always the positive label."""
        [(common, _)] = label_counts(inputs).most_common(1)
        return best_scores(
            self.score(inputs, [LabelResult(label, 1.0, {})] * len(inputs))
            for label in {common, self.positive}
        )


def label_score(
    name: str, gold: Sequence[str], predicted: Sequence[str], positive: str = ""
) -> float:
    """Return a metric as a fraction, 0 if it is undefined; macro F1 is over classes that occur."""
    hits = Counter(g for g, p in zip(gold, predicted, strict=True) if g == p)
    golds, guesses, total, right = Counter(gold), Counter(predicted), len(gold), hits.total()
    if name == "accuracy":
        return right / max(1, total)
    if name != "matthews":
        labels = [positive] if name == "f1" else [*(golds | guesses)]
        scores = [2 * hits[label] / max(1, golds[label] + guesses[label]) for label in labels]
        return sum(scores) / max(1, len(scores))
    chance = sum(count * guesses[label] for label, count in golds.items())
    spreads = [total**2 - sum(n**2 for n in counts.values()) for counts in (golds, guesses)]
    return (right * total - chance) / math.sqrt(math.prod(spreads) or 1)


# Any number of labels -----------------------------------------------------------------------------

BINARY = {"0": False, "0.0": False, "false": False, "1": True, "1.0": True, "true": True}
"""The values, in lower case, of a column that says whether its label applies."""


@dataclass(frozen=True, kw_only=True)
class LabelSetColumns(TextColumns):
    """Columns of texts or pairs with sets of labels: lists, separated names, or 0/1 columns."""

    label: str | tuple[str, ...] = "label"  # type: ignore[assignment]
    """The column of the labels, or several columns with 0 or 1, which are named as the labels."""
    separator: str = ""
    """What separates several labels in one field; by default it is |, and a label that consists of
    others, such as "a, b" beside "a" and "b", is an error."""

    def label_of(self, row: Fields, location: str) -> tuple[str, ...] | None:
        if isinstance(self.label, str):
            return self.label_in(row.get(self.label), location)
        values = {name: row.get(name) for name in self.label}
        return marked_labels(values, location) if any(map(value_name, values.values())) else None

    def check(self, examples: Sequence[TextExample]) -> None:
        """Raise if the labels are only 0 and 1, or if one is others with another separator."""
        if not isinstance(self.label, str):
            return
        first: dict[str, str] = {}
        sizes: set[int] = set()
        for example in examples:
            golds = example.gold if isinstance(example.gold, tuple) else ()
            sizes.add(len(golds))
            for label in golds:
                first.setdefault(label, example.location)
        # sets of classes called 0 and 1 differ in size; 0/1 columns and lists of 0 and 1 do not
        if len(sizes - {0}) == 1 and {label.lower() for label in first} <= BINARY.keys():
            raise BertkitError(
                f"column '{self.label}' holds only {' and '.join(sorted(first))}, not names; name "
                "the columns of all labels, --label A B ..., or choose classification for one"
            )
        for separator in "" if self.separator else ",;#/+&":
            parts = {name: [part.strip() for part in name.split(separator)] for name in first}
            joined = {n: pieces for n, pieces in parts.items() if len(pieces) > 1 and all(pieces)}
            labels = first.keys() - joined.keys() | {*chain.from_iterable(joined.values())}
            for label, pieces in joined.items():
                if first.keys() >= {*pieces} or len(labels) < len(first):
                    raise BertkitError(
                        f"{first[label]}: the label {label!r} seems to consist of other labels; "
                        f"add --separator '{separator}' (or '|' if it is a label of its own)"
                    )

    def label_in(self, value: Any, location: str) -> tuple[str, ...] | None:
        """Return the distinct label names in a field, in order, or None for null."""
        if value is None:
            return None
        value = from_json(value, location)
        if isinstance(value, Mapping):  # choices of Label Studio, or 0 or 1 for each as in spaCy
            value = value.get("choices") or marked_labels(value, location)
        if isinstance(value, str):
            value = value.split(self.separator or "|")
        elif not isinstance(value, list | tuple):
            value = sorted(value, key=str) if isinstance(value, set | frozenset) else [value]
        names = [name for name in map(value_name, value) if name]
        marks = len(names) > len(set(names)) and {name.lower() for name in names} <= BINARY.keys()
        if marks or any(isinstance(item, Mapping | list) for item in value):
            raise BertkitError(
                f"{location}: the labels are {str(value)[:40]!r}, which look like objects, or a 0 "
                "or 1 for each label; write the names of the labels that apply"
            )
        return tuple(dict.fromkeys(names))


def marked_labels(marks: Mapping[str, Any], location: str) -> tuple[str, ...]:
    """Return the names whose value is 1 or true; every value must be 0 or 1, or false or true."""
    values = {name: value_name(value).lower() for name, value in marks.items()}
    for name, value in values.items():
        if value not in BINARY:
            raise BertkitError(
                f"{location}: '{name}' is {value[:40]!r}; each of several labels needs 0 or 1 in "
                "every row"
            )
    return tuple(name for name, value in values.items() if BINARY[value])


@dataclass(frozen=True, slots=True)
class LabelSetResult(Result):
    """The classes with a probability above 0.5, most probable first."""

    labels: tuple[str, ...]
    probabilities: dict[str, float]
    """The probability of each class, or of the most probable ones; they do not add up to 1."""


@dataclass(frozen=True)
class MultiLabelClassification(LabelTask):
    """A task with any number of labels for each input."""

    task_type = "multi-label-classification"
    problem_type = "multi_label_classification"
    columns = LabelSetColumns
    answer_field = "labels"
    metric = "micro_f1"

    def target_of(self, example: TextExample) -> np.ndarray:
        wanted = self.gold_value(example)
        for label in wanted:
            if label not in self.indices:
                raise unknown_label(label, example.location, self.labels)
        return self.indicator(wanted)

    def indicator(self, names: Iterable[str]) -> np.ndarray:
        """Return whether each label is among names, (labels,)."""
        row = np.zeros(len(self.labels), dtype=bool)
        row[[self.indices[name] for name in names]] = True
        return row

    def losses(self, logits: Tensor, targets: Tensor, class_weights: Tensor | None) -> Tensor:
        """The mean binary cross entropy of the classes; weights are those of present classes."""
        return F.binary_cross_entropy_with_logits(
            logits[:, 0], targets, pos_weight=class_weights, reduction="none"
        ).mean(-1)

    def balanced_weights(self, items: Items) -> np.ndarray:
        counts = np.sum([item.parts[0].target for item in items.items], axis=0)
        absent = len(items.items) - counts
        return np.where(counts * absent > 0, absent / np.maximum(counts, 1), 1.0)

    def results(self, inputs: Inputs, logits: Sequence[np.ndarray]) -> list[LabelSetResult]:
        results = []
        chances = 1 / (1 + np.exp(-np.concatenate(logits).astype(np.float64)))
        shown = shown_probabilities(self.labels, chances, self.top)
        for row, shares in zip(chances, shown, strict=True):
            above = sorted(np.flatnonzero(row > 0.5).tolist(), key=lambda index: -row[index])
            results.append(LabelSetResult(tuple(self.labels[index] for index in above), shares))
        return results

    def answer_value(self, result: LabelSetResult) -> tuple[str, ...]:
        """The labels in alphabetical order."""
        return tuple(sorted(result.labels))

    def gold_value(self, example: TextExample) -> tuple[str, ...]:
        return tuple(sorted(example.gold)) if isinstance(example.gold, tuple) else ()

    def score(self, inputs: Inputs, results: Results) -> Metrics:
        """Micro F1 over all (input, label) pairs, macro F1 over labels that occur, exact sets."""
        true = np.stack([self.indicator(self.gold_value(example)) for example in inputs])
        predicted = np.stack([self.indicator(result.labels) for result in results])
        # not scikit-learn's: it takes a single column for two classes
        right, total = (true & predicted).sum(axis=0), true.sum(axis=0) + predicted.sum(axis=0)
        return {
            "micro_f1": float(2 * right.sum() / max(1, total.sum())),
            "macro_f1": float((2 * right / np.maximum(1, total)).sum() / max(1, (total > 0).sum())),
            "exact_match": float((true == predicted).all(axis=1).mean()),
        }

    def baseline(self, inputs: Inputs) -> Metrics:
        """Always all labels, or always the commonest set of labels."""
        [(usual, _)] = Counter(map(self.gold_value, inputs)).most_common(1)
        return best_scores(
            self.score(inputs, [LabelSetResult(labels, {})] * len(inputs))
            for labels in (self.labels, usual)
        )
