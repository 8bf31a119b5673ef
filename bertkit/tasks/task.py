"""The interface of a task: from inputs to sequences and losses, from outputs to results and scores.

The tasks are those of paper section 4. An input becomes an `Item`, whose parts must each stay in
one batch: a window of a text, or one window of each of n choices. Each task type is one module with
the columns of its files, its examples, its results and a subclass of `Task`; `types.py` lists them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
from torch import Tensor, nn

from bertkit.errors import BertkitError
from bertkit.files import as_json
from bertkit.model.encoder import ONE_SEGMENT, ModelConfig
from bertkit.model.heads import Sums
from bertkit.pretraining_data.batch import Packed, TensorFields, from_arrays
from bertkit.text.documents import TextCounts
from bertkit.tokenizer.wordpiece import Tokenizer

NOTHING_READ = "inputs with a text without tokens"
"""Such as control characters only; they are predicted all the same."""

Inputs = Sequence[Any]  # the examples of a task type
Results = Sequence[Any]  # one `Result` for each input
Outputs = Sequence[list[np.ndarray]]  # the outputs of `run_task` for each item and part
Targets = tuple[dict[str, Tensor], dict[str, int]]
"""The tensors and the counts that the loss of a batch needs."""
Metrics = dict[str, float]  # name -> value as a fraction of 1 (0.9, not 90)


class Encoded(NamedTuple):
    """One sequence of a batch."""

    ids: np.ndarray  # (tokens,) int32 token ids, including special tokens
    first: int  # the number of tokens in segment 0; the others are in segment 1


class ItemPart(NamedTuple):
    """Sequences that must stay in one batch."""

    sequences: tuple[Encoded, ...]
    target: Any = None  # the target for the task's loss; None if the input has no label
    weight: float = 1.0  # the weight of the part in the loss of its input
    is_first: bool = True  # whether it is the first part of its item, by which items are counted

    @property
    def tokens(self) -> int:
        """The number of tokens in all sequences."""
        return sum(len(sequence.ids) for sequence in self.sequences)


Parts = Sequence[ItemPart]


class Item(NamedTuple):
    """What training draws: an input, or a window if windows are separate examples."""

    input: int  # the index of the input (of the first one if an item holds several)
    parts: list[ItemPart]


@dataclass(frozen=True)
class Items:
    """The inputs of a file as sequences, with counts of what was windowed, cut or unknown."""

    items: list[Item]
    inputs: int
    windowed: int  # the number of inputs that need more than one window
    cut: dict[str, int]  # what was lost -> number of inputs
    unknown_tokens: int = 0  # the number of [UNK] tokens in all windows, out of `encoded_tokens`
    encoded_tokens: int = 0

    @property
    def tokens(self) -> int:
        """The number of tokens in all sequences."""
        return sum(part.tokens for part in self.parts())

    def parts(self) -> Iterator[ItemPart]:
        """Yield the parts of all items."""
        return (part for item in self.items for part in item.parts)

    def sequences(self) -> Iterator[Encoded]:
        """Yield the sequences of all parts."""
        return (sequence for part in self.parts() for sequence in part.sequences)

    def described(self) -> str:
        """Describe what was windowed, cut or unknown, as in "2 in several windows, 0 cut"."""
        lost = [f"{what}: {count:,}" for what, count in self.cut.items() if count]
        text = f"{self.windowed:,} in several windows, {'; '.join(lost) or '0 cut'}"
        if self.unknown_tokens:
            share = self.unknown_tokens / self.encoded_tokens
            text += f", {self.unknown_tokens:,} tokens [UNK] ({share:.1%})"
        return text

    def counts(self) -> dict[str, Any]:
        """Return the counts that the records of runs and evaluations have."""
        names = ("inputs", "windowed", "cut", "unknown_tokens")
        return {name: getattr(self, name) for name in names}

    def plus(self, other: Items) -> Items:
        """Return the counts of both, without the sequences."""
        return Items(
            [],
            self.inputs + other.inputs,
            self.windowed + other.windowed,
            dict(Counter(self.cut) + Counter(other.cut)),
            self.unknown_tokens + other.unknown_tokens,
            self.encoded_tokens + other.encoded_tokens,
        )


@dataclass(frozen=True)
class TaskBatch(TensorFields):
    """Packed sequences with the tensors and counts that the loss needs."""

    packed: Packed
    tensors: Mapping[str, Tensor]
    counts: dict[str, int]  # name -> the count that losses are divided by
    packed_index: np.ndarray
    """(sequences,) the index among the packed sequences of each sequence of the parts."""


class TrainingData(NamedTuple):
    """The labelled examples and options that a task is made from."""

    examples: Sequence[Any]
    columns: Any
    windows: Any
    max_length: int  # the maximum tokens of a window
    counts: TextCounts  # collects what is odd about the labels and the inputs


@dataclass(frozen=True, slots=True)
class Result:
    """A prediction: the same fields in Python, in files and over HTTP."""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as values that JSON can hold: tuples become lists."""
        return {field.name: json_value(getattr(self, field.name)) for field in fields(self)}


def json_value(value: Any) -> Any:
    """Return a value as it would come back from JSON."""
    if isinstance(value, Result):
        return value.to_dict()
    if isinstance(value, Mapping):
        return {key: json_value(part) for key, part in value.items()}
    return [json_value(part) for part in value] if isinstance(value, tuple | list) else value


class Task(ABC):
    """A task of one task type with its label names and settings.

    Each subclass is a frozen dataclass, whose fields are the settings. Its class attributes tie
    together what depends on the task type.
    """

    task_type: ClassVar[str]  # the name of the task type on the command line and in `bertkit.json`
    head: ClassVar[str]  # the head of the network: sequence, choice, token or span
    problem_type: ClassVar[str] = ""  # the `problem_type` of transformers
    columns: ClassVar[Any]  # the subclass of `Columns` that reads its files
    windows: ClassVar[Any]  # the class of its window options (`windows.WindowLengths`)
    answer_field: ClassVar[str]  # the field of results with the answer
    input_fields: ClassVar[tuple[str, ...]]
    """The fields of examples by which two inputs are equal."""
    group_by: ClassVar[str] = ""
    """The field of examples whose equal values stay together when data is held out."""
    has_labels: ClassVar[bool] = False
    unsaved: ClassVar[tuple[str, ...]] = ("labels", "top")
    """The fields that are not among the settings in `bertkit.json`."""
    labels: tuple[str, ...]
    """The names of the classes, in the order of the outputs; () if there are none."""

    @property
    @abstractmethod
    def metric(self) -> str:
        """The score by which runs are compared; higher is better."""

    @classmethod
    @abstractmethod
    def from_data(cls, data: TrainingData) -> Self:
        """Make the task for training data, which determines its labels and other settings."""

    @classmethod
    def from_transformers(cls, max_length: int) -> dict[str, Any]:
        """Return settings for a model that transformers fine-tuned, from its config.json."""
        return {"max_length": max_length}

    @abstractmethod
    def build(self, config: ModelConfig) -> Any:
        """Build a network with this task's head, initialised from torch's default generator."""

    @abstractmethod
    def items(self, inputs: Inputs, tokenizer: Tokenizer) -> Items:
        """Encode inputs as sequences; an unknown label is an error that names its location."""

    @abstractmethod
    def targets(self, parts: Parts, packed_index: np.ndarray, starts: np.ndarray) -> Targets:
        """Return the tensors and counts for the loss of labelled parts.

        `packed_index` (sequences,) has the packed index of each sequence of the parts, and `starts`
        (sequences,) the index of its first token in the batch.
        """

    @abstractmethod
    def loss(self, model: nn.Module, batch: TaskBatch) -> Sums:
        """Return the summed losses of a batch."""

    @abstractmethod
    def decode(self, inputs: Inputs, items: Items, outputs: Outputs) -> list[Any]:
        """Return one result for each input."""

    @abstractmethod
    def score(self, inputs: Inputs, results: Results) -> Metrics:
        """Return the metrics of results for labelled inputs."""

    @abstractmethod
    def baseline(self, inputs: Inputs) -> Metrics:
        """Return, for each metric, the best score of an answer that ignores the input."""

    def prepare_network(self, network: Any, *, keep_head: bool) -> Any:
        """Return the network of a run before its first update; most tasks do not change it."""
        return network

    def calibrated(self, inputs: Inputs, results: Results) -> Self:
        """Return the task with thresholds chosen on labelled inputs; most tasks have none."""
        return self

    def decided(self, results: Results) -> list[Any]:
        """Return results after the task's threshold, if it has one."""
        return list(results)

    def answer_value(self, result: Any) -> Any:
        """Return the answer of a result as a plain value, to compare with `gold_value`."""
        return getattr(result, self.answer_field)

    def gold_value(self, example: Any) -> Any:
        """Return the label of an example as `answer_value` would give the right answer."""
        return example.gold

    def balanced_weights(self, items: Items) -> np.ndarray:
        """Return a weight for each class, (classes,), such that all classes count equally."""
        raise BertkitError(f"{self.task_type} has no classes, so leave out class weights")

    def settings(self) -> dict[str, Any]:
        """Return the settings for `bertkit.json`."""
        return {name: value for name, value in as_json(self).items() if name not in self.unsaved}


# Batches ------------------------------------------------------------------------------------------


def encode(task: Task, inputs: Sequence[Any], tokenizer: Tokenizer, config: ModelConfig) -> Items:
    """Encode inputs as sequences, and count their unknown tokens."""
    items = task.items(inputs, tokenizer)
    unknown = 0
    for sequence in items.sequences():
        unknown += int(np.count_nonzero(sequence.ids == tokenizer.unk_id))
        if config.type_vocab_size == 1 and sequence.first < len(sequence.ids):
            raise BertkitError(ONE_SEGMENT)
    return replace(items, unknown_tokens=unknown, encoded_tokens=items.tokens)


def make_batch(
    parts: Parts,
    targets: Callable[..., Targets] | None = None,
    compact: np.ndarray | None = None,
) -> TaskBatch:
    """Pack sequences, longest first; `compact` maps ids to rows of a smaller embedding matrix."""
    sequences = [sequence for part in parts for sequence in part.sequences]
    lengths = np.array([len(sequence.ids) for sequence in sequences])
    order = np.argsort(-lengths, kind="stable")
    packed_index = np.argsort(order)
    ordered = [sequences[i] for i in order]
    ids = np.concatenate([sequence.ids for sequence in ordered])
    ids = ids.astype(np.int64) if compact is None else compact[ids]
    sizes, firsts = lengths[order], np.array([sequence.first for sequence in ordered])
    starts = np.cumsum(sizes) - sizes
    positions = np.arange(len(ids)) - np.repeat(starts, sizes)
    packed = from_arrays(ids, (positions >= np.repeat(firsts, sizes)).astype(np.int64), sizes)
    tensors, counts = targets(parts, packed_index, starts[packed_index]) if targets else ({}, {})
    return TaskBatch(packed, tensors, counts, packed_index)


def split_parts(
    parts: Iterable[Any], tokens: int, tokens_of: Callable[[Any], int] = attrgetter("tokens")
) -> Iterator[list[Any]]:
    """Yield groups of consecutive parts of at most `tokens` tokens; a longer part is alone."""
    group: list[Any] = []
    size = 0
    for part in parts:
        length = tokens_of(part)
        if group and size + length > tokens:
            yield group
            group, size = [], 0
        group.append(part)
        size += length
    if group:
        yield group


def count_examples(parts: Parts) -> dict[str, int]:
    """Count the items whose first part is among the parts; a mean loss is divided by it."""
    return {"examples": sum(part.is_first for part in parts)}


# Labels and probabilities -------------------------------------------------------------------------


def label_counts(inputs: Iterable[Any]) -> Counter[str]:
    """Count the occurrences of each label or tag."""
    golds = (example.gold for example in inputs if example.gold is not None)
    return Counter(chain.from_iterable(g if isinstance(g, tuple) else (str(g),) for g in golds))


def note_similar(labels: Iterable[str], counts: TextCounts) -> None:
    """Count the labels that are equal to another without case and spaces."""
    names: dict[str, str] = {}
    for label in labels:
        known = names.setdefault("".join(label.split()).casefold(), label)
        if known != label:
            where = f"labels {known!r} and {label!r}"
            counts.note("label that differs from another only in case or spaces, kept", where)


def unknown_label(label: str, location: str, labels: Sequence[str]) -> BertkitError:
    """Return the error for a label that is not among the model's labels."""
    known = ", ".join(sorted(labels)[:20])
    return BertkitError(
        f"{location}: the label {label!r} is not one of the model's {len(labels)}: {known}"
    )


def softmax(logits: np.ndarray) -> np.ndarray:
    """Compute the softmax along the last axis in double precision."""
    shifted = np.exp(logits.astype(np.float64) - logits.max(axis=-1, keepdims=True))
    return shifted / shifted.sum(axis=-1, keepdims=True)


def balanced(counts: np.ndarray) -> np.ndarray:
    """Return weights (classes,) whose mean over the counted targets is 1, for counts (classes,)."""
    share = counts.sum() / max(1, (counts > 0).sum())
    return np.where(counts > 0, share / np.maximum(counts, 1), 1.0)
