"""Tasks on a text or a pair of texts: their columns, examples and sequences (paper section 4.1).

The input is [CLS] text [SEP] pair [SEP]; one linear layer maps the pooled [CLS] to logits. If a
text has several windows, each is trained on the label of the text, and the output for the text is
the mean of their outputs.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from bertkit.errors import BertkitError, InputTypeError
from bertkit.model.encoder import ModelConfig
from bertkit.model.task_heads import ClassificationModel
from bertkit.objectives import LossSum, Sums
from bertkit.tasks.columns import Columns, require_texts, row_texts
from bertkit.tasks.rows import Fields
from bertkit.tasks.task import (
    NOTHING_READ,
    Item,
    ItemPart,
    Items,
    Task,
    TaskBatch,
    TrainingData,
)
from bertkit.tasks.windows import WindowLengths, text_windows
from bertkit.text.documents import TextCounts
from bertkit.tokenizer.wordpiece import Tokenizer

SEEN_ONCE = "label seen once in training, kept"
SHOWN_LABELS = 20
"""The number of known labels that an error lists. It suggests none: the most similar spelling may
mean the opposite."""


class TextExample(NamedTuple):
    """One text or a pair of texts."""

    id: str
    text: str
    pair: str | None
    label: str | float | tuple[str, ...] | None
    """A name, a number (regression), or any number of names (multi-label classification)."""
    location: str

    @property
    def gold(self) -> str | float | tuple[str, ...] | None:
        """The label or labels, or None if the file has none."""
        return self.label


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

    def example(
        self, row: Fields, location: str, counts: TextCounts, *, labelled: bool, scoring: bool
    ) -> TextExample | None:
        """A row with an empty text is left out."""
        texts = row_texts(row, self.inputs, location, counts)
        if texts is None:
            return None
        label = self.label_in(row.get(self.label), location) if labelled else None
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
    target_dtype: ClassVar[type[np.number[Any]]] = np.float32

    @abstractmethod
    def target_of(self, example: TextExample) -> Any:
        """Return the target for the loss: an index, a number, or 0 or 1 for each class."""

    @abstractmethod
    def losses(self, logits: Tensor, targets: Tensor, class_weights: Tensor | None) -> Tensor:
        """Return the loss of each sequence.

        Args:
            logits: (sequences, classes).
            targets: (sequences, ...).
            class_weights: (classes,) the factors of the classes' losses; None for 1.
        """

    @abstractmethod
    def results(self, logits: np.ndarray) -> list[Any]:
        """Return a result for each row of logits (inputs, classes)."""

    def build(self, config: ModelConfig) -> ClassificationModel:
        return ClassificationModel(config, len(self.labels) or 1)

    def items(self, inputs: Sequence[TextExample], tokenizer: Tokenizer) -> Items:
        """Each input is one item, whose windows share its target."""
        targets = [self.target_of(example) for example in inputs]
        texts = tokenizer.encode_batch([example.text for example in inputs])
        pairs: list[list[int]] = [[]] * len(inputs)
        if any(example.pair for example in inputs):
            pairs = tokenizer.encode_batch([example.pair or "" for example in inputs])
        items, empty = [], 0
        for i, (example, text, pair) in enumerate(zip(inputs, texts, pairs, strict=True)):
            second = None if example.pair is None else pair
            windows = text_windows(text, second, tokenizer, self.max_length, self.stride)
            share = 1 / len(windows)
            parts = [ItemPart((w,), targets[i], share, n == 0) for n, w in enumerate(windows)]
            items.append(Item(i, parts))
            empty += not text or second == []
        windowed = sum(len(item.parts) > 1 for item in items)
        return Items(items, len(inputs), windowed, {NOTHING_READ: empty})

    def targets(
        self, parts: Sequence[ItemPart], packed_index: np.ndarray, starts: np.ndarray
    ) -> tuple[dict[str, Tensor], dict[str, int]]:
        """The tensors are the targets and weights of the packed sequences."""
        targets = in_packed_order([part.target for part in parts], packed_index, self.target_dtype)
        weights = in_packed_order([part.weight for part in parts], packed_index, np.float32)
        return {"targets": targets, "weights": weights}, count_examples(parts)

    def loss(self, model: nn.Module, batch: TaskBatch) -> Sums:
        """The loss is the weighted sum over sequences."""
        targets, class_weights = batch.tensors["targets"], batch.tensors.get("class_weights")
        losses = self.losses(model(batch.packed).float(), targets, class_weights)
        return {"loss": LossSum((losses * batch.tensors["weights"]).sum(), "examples")}

    def decode(
        self, inputs: Sequence[TextExample], items: Items, outputs: Sequence[list[np.ndarray]]
    ) -> list[Any]:
        if not inputs:
            return []
        return self.results(np.stack([np.concatenate(parts).mean(axis=0) for parts in outputs]))


def in_packed_order(
    values: Sequence[Any], packed_index: np.ndarray, dtype: type[np.number[Any]]
) -> Tensor:
    """Return values of parts in the order of their packed sequences."""
    return torch.from_numpy(np.array(values, dtype=dtype)[np.argsort(packed_index)])


def count_examples(parts: Sequence[ItemPart]) -> dict[str, int]:
    """Count the items whose first part is among the parts; a mean loss is divided by it."""
    return {"examples": sum(part.is_first for part in parts)}


def label_counts(inputs: Iterable[Any]) -> Counter[str]:
    """Count the occurrences of each label or tag."""
    golds = (example.gold for example in inputs if example.gold is not None)
    return Counter(chain.from_iterable(g if isinstance(g, tuple) else (str(g),) for g in golds))


def training_labels(data: TrainingData, *, at_least: int) -> tuple[str, ...]:
    """Return the sorted labels of the training data; labels that occur once are noted in counts."""
    seen = label_counts(data.examples)
    for label, count in seen.items():
        if count == 1:
            data.counts.note(SEEN_ONCE, f"label {label!r}")
    if len(seen) < at_least:
        what = f"only the label {next(iter(seen))!r}" if seen else "no label"
        raise BertkitError(
            f"the training data has {what} in column '{data.columns.label}'; there is nothing to "
            "tell apart"
        )
    return tuple(sorted(seen))


def always_the_same(inputs: Sequence[TextExample], answers: Sequence[Any]) -> str:
    """Return a message if all inputs got the same answer but their labels differ, else ""."""
    wanted = {frozenset(i.label) if isinstance(i.label, tuple) else i.label for i in inputs}
    if len(set(answers)) > 1 or len(wanted) < 2:
        return ""
    return f"answers {answers[0]!r} to each input"


def unknown_label(label: str, location: str, labels: Sequence[str]) -> BertkitError:
    """Return the error for a label that is not among the model's labels."""
    shown = ", ".join(sorted(labels)[:SHOWN_LABELS])
    more = f" and {len(labels) - SHOWN_LABELS} more" if len(labels) > SHOWN_LABELS else ""
    return BertkitError(
        f"{location}: the label {label!r} is not one of the model's; known: {shown}{more}"
    )


def softmax(logits: np.ndarray) -> np.ndarray:
    """Compute the softmax along the last axis in double precision."""
    shifted = np.exp(logits.astype(np.float64) - logits.max(axis=-1, keepdims=True))
    return shifted / shifted.sum(axis=-1, keepdims=True)


def balanced(counts: np.ndarray) -> np.ndarray:
    """Return weights (classes,) whose mean over the counted targets is 1, for counts (classes,)."""
    share = counts.sum() / max(1, (counts > 0).sum())
    return np.where(counts > 0, share / np.maximum(counts, 1), 1.0)


def best_scores(scores: Iterable[dict[str, float]]) -> dict[str, float]:
    """Return the highest value of each metric."""
    each = list(scores)
    return {metric: max(values[metric] for values in each) for metric in each[0]}
