"""What a task is: inputs → token sequences → head → loss; outputs → predictions → scores → file.

The tasks are those of paper section 4.

One shape for all task types. An input becomes an `Item`, whose parts are what must stay together in
a batch: a window of a text, or one window of each of n choices. `make_batch` packs any parts;
`run_model` brings the outputs back in their order. What differs between the task types is in
`Classification`, `MultiLabelClassification`, `Regression`, `MultipleChoice`, `TokenClassification`
and `QuestionAnswering`; `spec.py` lists them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor, nn

from bertkit.config import as_json
from bertkit.errors import BertkitError
from bertkit.model.encoder import ONE_SEGMENT, ModelConfig
from bertkit.model.task_heads import ClassificationModel, TaskModel
from bertkit.objectives import Sums
from bertkit.pretraining_data.batch import Packed, from_arrays
from bertkit.text.lines import TextCounts
from bertkit.tokenizer.wordpiece import Tokenizer
from bertkit.training.device import autocast

PREDICTION_TOKENS = 8192
"""Tokens in a batch without gradients."""


NOTHING_READ = "inputs with a text without tokens"
"""Of control and zero-width characters, say: lost as a cut text is, and predicted all the same."""


class Encoded(NamedTuple):
    """One sequence of a batch."""

    ids: np.ndarray
    """(tokens,) int32, special tokens included."""
    first: int
    """Tokens of segment 0; the rest is segment 1."""


class ItemPart(NamedTuple):
    """What must stay in one batch."""

    sequences: tuple[Encoded, ...]
    target: Any = None
    """What the task's objective compares with; None where the input has no label."""
    weight: float = 1.0
    """The part's share of its input in the loss."""
    leads: bool = True
    """Whether it is the first part of its item: items are counted by it."""

    @property
    def tokens(self) -> int:
        """Of all sequences."""
        return sum(len(sequence.ids) for sequence in self.sequences)


class Item(NamedTuple):
    """What is drawn in training: an input, or a window where windows are examples of their own."""

    input: int
    """Index of the input (of the first one, where an item holds several)."""
    parts: list[ItemPart]


class Unknown(NamedTuple):
    """What the vocabulary does not hold."""

    pieces: int = 0
    """[UNK], in all windows; a word is one."""
    total: int = 0
    """Pieces in all windows, [CLS] and [SEP] aside."""
    inputs: int = 0
    """Inputs without one known piece."""

    def plus(self, other: Unknown) -> Unknown:
        """Of both."""
        return Unknown(*map(sum, zip(self, other, strict=True)))


NOTHING_UNKNOWN = Unknown()


@dataclass(frozen=True)
class Items:
    """All inputs of a file as sequences, and what became of the long ones."""

    items: list[Item]
    inputs: int
    windowed: int
    """Inputs that take more than one window."""
    cut: dict[str, int]
    """What was lost -> of how many inputs: the ends of questions of more than 64 tokens, answers
    that no window holds whole, the ends of words longer than a window, texts that hold nothing that
    the tokenizer reads."""
    unknown: Unknown = NOTHING_UNKNOWN
    """As `dataset.with_unknown` has counted it."""

    @property
    def tokens(self) -> int:
        """Of all sequences."""
        return sum(part.tokens for item in self.items for part in item.parts)


def unknown_of_text(parts: Sequence[ItemPart], unknown: int) -> Unknown:
    """What the vocabulary lacks of one text, `[CLS] text [SEP]` in one or more windows.

    Args:
        parts: of the text.
        unknown: the id of [UNK].
    """
    ids = [part.sequences[0].ids[1:-1] for part in parts]
    pieces = sum(int(np.count_nonzero(one == unknown)) for one in ids)
    total = sum(map(len, ids))
    return Unknown(pieces, total, int(pieces == total))


def check_segments(items: Items, config: ModelConfig) -> None:
    """Refuse sequences of two texts for a network that tells no second one.

    Raises:
        BertkitError: there are some, and it has one segment.
    """
    if config.type_vocab_size > 1:
        return
    sequences = (one for item in items.items for part in item.parts for one in part.sequences)
    if any(one.first < len(one.ids) for one in sequences):
        raise BertkitError(ONE_SEGMENT)


@dataclass(frozen=True)
class TaskBatch:
    """Packed sequences with whatever the task's objective needs."""

    packed: Packed
    tensors: Mapping[str, Tensor]
    counts: dict[str, int]
    """What losses are divided by."""
    place: np.ndarray
    """(sequences,) where each sequence of the parts lies among the packed ones."""

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> TaskBatch:
        """The same batch on another device."""
        moved = {n: t.to(device, non_blocking=non_blocking) for n, t in self.tensors.items()}
        return replace(
            self, packed=self.packed.to(device, non_blocking=non_blocking), tensors=moved
        )


class TaskInputs(NamedTuple):
    """What a task is made from."""

    train: Sequence[Any]
    """Labelled examples."""
    columns: Any
    """The options they were read with; see `bertkit.datasets.columns`."""
    windows: Any
    """The options for the length of sequences; see `bertkit.tasks.windows.WindowLengths`."""
    max_length: int
    """Tokens of a window."""
    counts: TextCounts
    """Is told of labels that are seen once."""


class PredictedSplit(NamedTuple):
    """A whole split of a data set with its predictions."""

    name: str
    """Of the data set; the task type where the data is the user's own."""
    split: str
    inputs: Sequence[Any]
    predictions: Sequence[Any]
    """One for each input."""


class Task(ABC):
    """What one task type computes, ready for its data: it knows the names of the labels.

    Each task is a frozen dataclass; its fields are its settings.
    """

    task_type: ClassVar[str]
    """The name of the task type in `bertkit.json`: classification, regression, ..."""
    labels: tuple[str, ...]
    """The names of the classes, in the order of the outputs; () where there are none."""

    @property
    @abstractmethod
    def metric(self) -> str:
        """The score by which runs are compared; higher is better."""

    @classmethod
    @abstractmethod
    def from_data(cls, data: TaskInputs) -> Self:
        """The task with what the training data says of it, such as its labels.

        Raises:
            BertkitError: the data has nothing to tell apart.
        """

    @abstractmethod
    def build(self, config: ModelConfig) -> TaskModel:
        """The network with this task's head, drawn from torch's generator."""

    @abstractmethod
    def items(self, inputs: Sequence[Any], tokenizer: Tokenizer) -> Items:
        """Inputs as sequences.

        Raises:
            BertkitError: a label is unknown; the message names the place.
        """

    @abstractmethod
    def targets(
        self, parts: Sequence[ItemPart], place: np.ndarray, starts: np.ndarray
    ) -> tuple[dict[str, Tensor], dict[str, int]]:
        """Tensors and counts for the objective.

        Args:
            parts: all with a target.
            place: (sequences,) the packed place of each sequence of the parts.
            starts: (sequences,) its first token in the batch.
        """

    @abstractmethod
    def objective(self, model: nn.Module, batch: TaskBatch) -> Sums:
        """Losses of a batch."""

    @abstractmethod
    def decode(
        self, inputs: Sequence[Any], items: Items, outputs: Sequence[list[np.ndarray]]
    ) -> list[Any]:
        """One prediction for each input.

        Args:
            inputs: as given to `items`.
            items: what `items` made of them.
            outputs: of `run_model`.
        """

    @abstractmethod
    def score(self, inputs: Sequence[Any], predictions: Sequence[Any]) -> dict[str, float]:
        """The metrics, as fractions of 1, of predictions for labelled inputs."""

    @abstractmethod
    def baseline(self, inputs: Sequence[Any]) -> dict[str, float]:
        """What the best answer that does not look at the input would score."""

    def calibrated(self, inputs: Sequence[Any], predictions: Sequence[Any]) -> Self:
        """The task with thresholds chosen on these labelled inputs; most tasks have none."""
        return self

    @abstractmethod
    def degenerate(self, inputs: Sequence[Any], predictions: Sequence[Any]) -> str:
        """Why a run learnt nothing, judged by its predictions on labelled inputs; "" if it did."""

    def remarks(self, inputs: Sequence[Any], *, choosing: bool = False) -> list[str]:
        """What its user should know of inputs and this task, in sentences.

        Args:
            inputs: with or without labels.
            choosing: whether thresholds are chosen on them.
        """
        return []

    def row(self, given: Any, prediction: Any) -> dict[str, Any]:
        """A prediction as plain JSON values, for a line of a result file: by default its fields."""
        return {"id": given.id, **prediction._asdict()}

    def settings(self) -> dict[str, Any]:
        """What `bertkit.json` keeps to make the task anew: every field but the labels."""
        return {name: value for name, value in as_json(self).items() if name != "labels"}

    def official_files(self, folder: Path, done: PredictedSplit) -> list[Path]:
        """Write what the server or script of the data set reads, if any; returns the files."""
        return []

    @classmethod
    def foreign_settings(cls, max_length: int, labels: Sequence[str]) -> dict[str, Any]:
        """The settings of a model that transformers tuned, with its positions and labels."""
        return {"max_length": max_length}


def make_batch(
    parts: Sequence[ItemPart],
    targets: Callable[..., tuple[dict[str, Tensor], dict[str, int]]] | None = None,
    compact: np.ndarray | None = None,
) -> TaskBatch:
    """Pack the sequences of some parts, longest first.

    Args:
        parts: at least one.
        targets: of the task; None when only outputs are wanted.
        compact: maps ids to rows of a smaller embedding matrix (see `compact.py`).
    """
    sequences = [sequence for part in parts for sequence in part.sequences]
    lengths = np.array([len(sequence.ids) for sequence in sequences])
    order = np.argsort(-lengths, kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    sorted_lengths = lengths[order]
    ids = np.concatenate([sequences[i].ids for i in order])
    ids = ids.astype(np.int64) if compact is None else compact[ids]
    firsts = np.array([sequences[i].first for i in order])
    ends = np.cumsum(sorted_lengths)
    starts = ends - sorted_lengths
    positions = np.arange(len(ids)) - np.repeat(starts, sorted_lengths)
    segment_ids = (positions >= np.repeat(firsts, sorted_lengths)).astype(np.int64)
    packed = from_arrays(ids, segment_ids, sorted_lengths)
    tensors, counts = targets(parts, place, starts[place]) if targets else ({}, {})
    return TaskBatch(packed, tensors, counts, place)


def split_parts(parts: Sequence[ItemPart], tokens: int) -> Iterator[list[ItemPart]]:
    """Neighbouring parts in groups of at most so many tokens; a longer part stands alone."""
    group: list[ItemPart] = []
    size = 0
    for part in parts:
        if group and size + part.tokens > tokens:
            yield group
            group, size = [], 0
        group.append(part)
        size += part.tokens
    if group:
        yield group


def run_model(
    model: TaskModel,
    items: Items,
    device: torch.device,
    *,
    precision: str = "fp32",
    progress: Callable[[int], None] = lambda done: None,
    tokens: int = PREDICTION_TOKENS,
    each: Callable[[Callable[[Any], Any], Iterable[Any]], Iterable[Any]] = map,
) -> list[list[np.ndarray]]:
    """The model's outputs for every part, in the order of the items.

    Args:
        model: on the device; it is put into evaluation mode and left in it.
        items: the sequences.
        device: where to compute.
        precision: "fp32" or "bf16".
        progress: is told how many parts are done.
        tokens: in a batch; a longer part stands alone.
        each: how the batches are worked through, in order: `map`, or one that uses threads.

    Returns:
        For each item, for each part: (sequences, classes) from a head on [CLS], (tokens, classes)
        from a head on tokens, whose parts have one sequence; fp32.

    Raises:
        BertkitError: an output is no finite number, of which no answer and no JSON can be made.
    """
    model.eval()
    places = [(i, j) for i, item in enumerate(items.items) for j in range(len(item.parts))]
    flat = [items.items[i].parts[j] for i, j in places]
    order = sorted(range(len(flat)), key=lambda n: -len(flat[n].sequences[0].ids))

    @torch.inference_mode()
    def compute(group: list[ItemPart]) -> list[np.ndarray]:
        batch = make_batch(group).to(device)
        with autocast(device, precision):
            logits = model(batch.packed)
        rows = logits.float().cpu().numpy()
        if not np.isfinite(rows).all():
            raise BertkitError(
                "the model's output is NaN or infinite: its weights are damaged or so large that "
                "they overflow; restore the model or tune it again"
            )
        return list(split_outputs(rows, batch, group, isinstance(model, ClassificationModel)))

    outputs: list[list[Any]] = [[None] * len(item.parts) for item in items.items]
    done = 0
    for group in each(compute, split_parts([flat[n] for n in order], tokens)):
        for output in group:
            i, j = places[order[done]]
            outputs[i][j] = output
            done += 1
        progress(done)
    return outputs


def split_outputs(
    logits: np.ndarray, batch: TaskBatch, parts: Sequence[ItemPart], pooled: bool
) -> Iterator[np.ndarray]:
    """The rows of each part: of its sequences where pooled, else of its one sequence's tokens."""
    lengths = batch.packed.lengths
    boundaries = np.cumsum([0, *lengths])
    at = 0
    for part in parts:
        places = batch.place[at : at + len(part.sequences)]
        at += len(part.sequences)
        if pooled:
            yield logits[places]
        else:
            yield logits[boundaries[places[0]] : boundaries[places[0] + 1]]


def mean_outputs(many: Sequence[list[list[np.ndarray]]]) -> list[list[np.ndarray]]:
    """The outputs of an ensemble: the mean of its models' outputs (paper, table 2)."""
    return [
        [np.mean(parts, axis=0) for parts in zip(*items, strict=True)]
        for items in zip(*many, strict=True)
    ]
