"""The interface of a task: from inputs to sequences and losses, from outputs to scores and files.

The tasks are those of paper section 4, with one interface for all task types. An input becomes an
`Item`, whose parts must each stay in one batch: a window of a text, or one window of each of n
choices. `make_batch` packs any parts; `run_model` returns the outputs in the order of the items.
The task types differ only in the subclasses `Classification`, `MultiLabelClassification`,
`Regression`, `MultipleChoice`, `TokenClassification` and `QuestionAnswering`, which `spec.py`
lists.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from bertkit.config import as_json
from bertkit.errors import NOT_FINITE, BertkitError
from bertkit.model.encoder import ONE_SEGMENT, ModelConfig
from bertkit.model.task_heads import ClassificationModel, TaskModel
from bertkit.objectives import Sums
from bertkit.pretraining_data.batch import Packed, TensorFields, from_arrays
from bertkit.text.lines import TextCounts
from bertkit.tokenizer.wordpiece import Tokenizer
from bertkit.training.device import autocast
from bertkit.training.memory import in_halves

if TYPE_CHECKING:
    from bertkit.checkpoints.pretrained import PretrainedWeights

PREDICTION_TOKENS = 8192
"""The maximum tokens of a batch without gradients on a CPU."""
GPU_PREDICTION_TOKENS = 65_536
"""The same on a GPU, which only large batches keep busy."""


def prediction_tokens(device: torch.device) -> int:
    """Return the maximum tokens of a batch without gradients on a device."""
    return PREDICTION_TOKENS if device.type == "cpu" else GPU_PREDICTION_TOKENS


NOTHING_READ = "inputs with a text without tokens"
"""The name of a count: inputs with a text of, say, control characters only, which are predicted
all the same."""


class Encoded(NamedTuple):
    """One sequence of a batch."""

    ids: np.ndarray
    """(tokens,) int32 token ids, including special tokens."""
    first: int
    """The number of tokens in segment 0; the others are in segment 1."""


class ItemPart(NamedTuple):
    """Sequences that must stay in one batch."""

    sequences: tuple[Encoded, ...]
    target: Any = None
    """The target for the task's objective; None if the input has no label."""
    weight: float = 1.0
    """The weight of the part in the loss of its input."""
    leads: bool = True
    """Whether it is the first part of its item, by which items are counted."""
    image: Any = None
    """(vectors, width) what takes the place of the tokens after [CLS] of the only sequence; or the
    `Regions` of an image that is a sequence by itself."""

    @property
    def placeholders(self) -> int:
        """The number of tokens that stand for the vectors of an image."""
        return len(self.image) if isinstance(self.image, np.ndarray) else 0

    @property
    def tokens(self) -> int:
        """The number of tokens in all sequences, with an image by itself for each of them."""
        apart = self.image is not None and not self.placeholders
        regions = 1 + len(self.image.vectors) if apart else 0
        return sum(regions + len(sequence.ids) for sequence in self.sequences)


class Item(NamedTuple):
    """What training draws: an input, or a window if windows are separate examples."""

    input: int
    """The index of the input (of the first one if an item holds several)."""
    parts: list[ItemPart]


class Unknown(NamedTuple):
    """Counts of what the vocabulary does not contain."""

    tokens: int = 0
    """The number of [UNK] tokens in all windows; an unknown word is one."""
    total: int = 0
    """The number of tokens in all windows, without [CLS] and [SEP]."""
    inputs: int = 0
    """The number of inputs without any known token."""

    def plus(self, other: Unknown) -> Unknown:
        """Return the sum of both counts."""
        return Unknown(*map(sum, zip(self, other, strict=True)))


NOTHING_UNKNOWN = Unknown()


@dataclass(frozen=True)
class Items:
    """All inputs of a file as sequences, with counts of what was windowed, cut or unknown."""

    items: list[Item]
    inputs: int
    windowed: int
    """The number of inputs that need more than one window."""
    cut: dict[str, int]
    """What was lost -> number of inputs; every task names what it loses."""
    unknown: Unknown = NOTHING_UNKNOWN
    """The counts of `data.with_unknown`."""

    @property
    def tokens(self) -> int:
        """The number of tokens in all sequences."""
        return sum(part.tokens for item in self.items for part in item.parts)


def check_segments(items: Items, config: ModelConfig) -> None:
    """Check that sequences have one text if the network has only one segment.

    Raises:
        BertkitError: a sequence has two texts, and the network has one segment.
    """
    if config.type_vocab_size > 1:
        return
    sequences = (one for item in items.items for part in item.parts for one in part.sequences)
    if any(one.first < len(one.ids) for one in sequences):
        raise BertkitError(ONE_SEGMENT)


@dataclass(frozen=True)
class TaskBatch(TensorFields):
    """Packed sequences with the tensors and counts that the task's objective needs."""

    packed: Packed
    tensors: Mapping[str, Tensor]
    counts: dict[str, int]
    """Name -> the count that losses are divided by."""
    place: np.ndarray
    """(sequences,) the index among the packed sequences of each sequence of the parts."""


class TaskInputs(NamedTuple):
    """The training data and options that a task is made from."""

    train: Sequence[Any]
    """Labelled examples."""
    columns: Any
    """The options for reading them; see `bertkit.datasets.columns`."""
    windows: Any
    """The options for the length of sequences; see `bertkit.tasks.windows.WindowLengths`."""
    max_length: int
    """The maximum tokens of a window."""
    counts: TextCounts
    """Collects what is odd about the labels and the inputs."""


class PredictedSplit(NamedTuple):
    """A whole split of a data set with its predictions."""

    name: str
    """The name of the data set, or the task type for the user's data."""
    split: str
    inputs: Sequence[Any]
    predictions: Sequence[Any]
    """One for each input."""


class Task(ABC):
    """A task of one task type with its label names and settings.

    Each subclass is a frozen dataclass, whose fields are the settings.
    """

    task_type: ClassVar[str]
    """The name of the task type in `bertkit.json`: classification, regression, ..."""
    labels: tuple[str, ...]
    """The names of the classes, in the order of the outputs; () if there are none."""
    answer_field: ClassVar[str]
    """The field of predictions with the answer: a label, labels, tags, a number or an index."""
    reads_images: ClassVar[bool] = False
    """Whether every input has an image beside its text; see `bertkit.tasks.images`."""

    @property
    @abstractmethod
    def metric(self) -> str:
        """The score by which runs are compared; higher is better."""

    @classmethod
    @abstractmethod
    def from_data(cls, data: TaskInputs) -> Self:
        """Make the task for training data, which determines its labels and other settings.

        Raises:
            BertkitError: the data has too few different labels.
        """

    @abstractmethod
    def build(self, config: ModelConfig) -> TaskModel:
        """Build a network with this task's head, initialised from torch's default generator."""

    @abstractmethod
    def items(self, inputs: Sequence[Any], tokenizer: Tokenizer) -> Items:
        """Encode inputs as sequences.

        Raises:
            BertkitError: a label is unknown; the message names its location.
        """

    @abstractmethod
    def targets(
        self, parts: Sequence[ItemPart], place: np.ndarray, starts: np.ndarray
    ) -> tuple[dict[str, Tensor], dict[str, int]]:
        """Return the tensors and counts for the objective.

        Args:
            parts: parts that all have a target.
            place: (sequences,) the packed index of each sequence of the parts.
            starts: (sequences,) the index of its first token in the batch.
        """

    @abstractmethod
    def objective(self, model: nn.Module, batch: TaskBatch) -> Sums:
        """Return the summed losses of a batch."""

    @abstractmethod
    def decode(
        self, inputs: Sequence[Any], items: Items, outputs: Sequence[list[np.ndarray]]
    ) -> list[Any]:
        """Return one prediction for each input, from the results of `items` and of `run_model`."""

    @abstractmethod
    def score(self, inputs: Sequence[Any], predictions: Sequence[Any]) -> dict[str, float]:
        """Return the metrics of predictions for labelled inputs, unscaled (0.9, not 90)."""

    @abstractmethod
    def baseline(self, inputs: Sequence[Any]) -> dict[str, float]:
        """Return the scores of an input-independent baseline."""

    @property
    def predicts_tokens(self) -> bool:
        """Whether the objective needs the embeddings of tokens that no input has."""
        return False

    def initialised_from(self, start: PretrainedWeights) -> Self:
        """Return the task with what the weights to initialise from decide; for most tasks nothing.

        Raises:
            BertkitError: the weights are of another network.
        """
        return self

    def fits_head(self, tensors: Mapping[str, Tensor]) -> bool:
        """Return whether a checkpoint's head for this task type suits the data, too."""
        return True

    def prepare_network(self, network: Any, *, keep_head: bool) -> Any:
        """Return the network of a run before its first update; most tasks do not change it.

        With `keep_head`, the weights of its head come from the checkpoint.
        """
        return network

    def scored_inputs(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """Return the inputs on which the task is scored: mostly the labelled ones as they are."""
        return inputs

    def calibrated(self, inputs: Sequence[Any], predictions: Sequence[Any]) -> Self:
        """Return the task with thresholds chosen on labelled inputs; most tasks have none."""
        return self

    @abstractmethod
    def degenerate(self, inputs: Sequence[Any], predictions: Sequence[Any]) -> str:
        """Return why predictions on labelled inputs show a run that learned nothing, else ""."""

    def plain(self, prediction: Any) -> Any:
        """Return a prediction as a plain value, such as a label, to compare with `plain_gold`."""
        return getattr(prediction, self.answer_field)

    def plain_gold(self, given: Any) -> Any:
        """Return the label of an input as the right prediction would be given by `plain`."""
        return given.gold

    def balanced_weights(self, items: Items) -> np.ndarray:
        """Return a weight for each class, (classes,), such that all classes count equally.

        Raises:
            BertkitError: the task has no classes.
        """
        raise BertkitError(
            f"{self.task_type} has no classes, so leave out class weights", code="class-weights"
        )

    def remarks(self, inputs: Sequence[Any], *, choosing: bool = False) -> list[str]:
        """Return notes for the user on these inputs, with or without labels, as sentences.

        With `choosing`, a run or a threshold is chosen by their scores.
        """
        return []

    def row(self, given: Any, prediction: Any) -> dict[str, Any]:
        """Return a line of a result file as JSON values: by default the prediction's fields."""
        return {"id": given.id, **prediction.to_dict()}

    def settings(self) -> dict[str, Any]:
        """Return the settings for `bertkit.json`: every field except the labels."""
        return {name: value for name, value in as_json(self).items() if name != "labels"}

    def official_files(self, folder: Path, done: PredictedSplit) -> list[Path]:
        """Write files for the server or script of the data set, if any, and return their paths."""
        return []

    @classmethod
    def foreign_settings(cls, max_length: int, labels: Sequence[str]) -> dict[str, Any]:
        """Return settings for a model fine-tuned by transformers, from its positions and labels."""
        return {"max_length": max_length}


def make_batch(
    parts: Sequence[ItemPart],
    targets: Callable[..., tuple[dict[str, Tensor], dict[str, int]]] | None = None,
    compact: np.ndarray | None = None,
) -> TaskBatch:
    """Pack the sequences of some parts, longest first.

    Args:
        parts: the parts, at least one.
        targets: the task's `targets`; None if only outputs are needed.
        compact: maps ids to rows of a smaller embedding matrix (`run.CompactEmbeddings`).
    """
    sequences = [sequence for part in parts for sequence in part.sequences]
    lengths = np.array([len(sequence.ids) for sequence in sequences])
    order = np.argsort(-lengths, kind="stable")
    place = np.argsort(order)
    ordered = [sequences[i] for i in order]
    ids = np.concatenate([one.ids for one in ordered])
    ids = ids.astype(np.int64) if compact is None else compact[ids]
    sizes, firsts = lengths[order], np.array([one.first for one in ordered])
    starts = np.cumsum(sizes) - sizes
    positions = np.arange(len(ids)) - np.repeat(starts, sizes)
    packed = from_arrays(ids, (positions >= np.repeat(firsts, sizes)).astype(np.int64), sizes)
    if parts[0].image is not None:
        from bertkit.multimodal.model import with_images

        images = [part.image for part in parts for _ in part.sequences]
        packed = with_images(packed, [images[i] for i in order])
    tensors, counts = targets(parts, place, starts[place]) if targets else ({}, {})
    return TaskBatch(packed, tensors, counts, place)


def split_parts(
    parts: Iterable[Any], tokens: int, tokens_of: Callable[[Any], int] = attrgetter("tokens")
) -> Iterator[list[Any]]:
    """Yield groups of consecutive parts of at most `tokens` tokens; a longer part is alone."""
    group: list[Any] = []
    size = 0
    for part in parts:
        own = tokens_of(part)
        if group and size + own > tokens:
            yield group
            group, size = [], 0
        group.append(part)
        size += own
    if group:
        yield group


def check_outputs(*outputs: np.ndarray) -> None:
    """Check that all outputs are finite, because no prediction can be made otherwise.

    Raises:
        BertkitError: an output is NaN or infinite.
    """
    if not all(np.isfinite(output).all() for output in outputs):
        raise BertkitError(
            "the model's output is NaN or infinite: its weights are damaged or so large that they "
            "overflow; use another checkpoint of the model, or train it again",
            code=NOT_FINITE,
        )


def run_model(
    model: TaskModel,
    items: Items,
    device: torch.device,
    *,
    precision: str = "fp32",
    progress: Callable[[int], None] = lambda done: None,
    tokens: int = 0,
    each: Callable[[Callable[[Any], Any], Iterable[Any]], Iterable[Any]] = map,
) -> list[list[np.ndarray]]:
    """Return the model's outputs for every part, in the order of the items.

    Args:
        model: the network on the device; it is put into evaluation mode and left in it.
        items: the sequences.
        device: the device of the model.
        precision: "fp32", "bf16" or "bf16-residual".
        progress: called with the number of parts done.
        tokens: the maximum tokens of a batch, or 0 for the device's default; a longer part is a
            batch by itself.
        each: maps a function over the batches in order: `map`, or a version with threads.

    Returns:
        For each item and part, an fp32 array: (sequences, classes) from a head on [CLS], or
        (tokens, classes) from a head on tokens, whose parts have one sequence.

    Raises:
        BertkitError: an output is NaN or infinite, which gives no answer and no valid JSON; or the
            device has too little memory for a part by itself (code "out-of-memory").
    """
    if model.training:  # visiting every module takes as long as a layer for a short text
        model.eval()
    places = [(i, j) for i, item in enumerate(items.items) for j in range(len(item.parts))]
    flat = [items.items[i].parts[j] for i, j in places]
    order = sorted(range(len(flat)), key=lambda n: -len(flat[n].sequences[0].ids))

    @torch.inference_mode()
    def launch(group: list[ItemPart]) -> tuple[HostCopy, TaskBatch, list[ItemPart]]:
        batch = make_batch(group).to(device)
        with autocast(device, precision):
            logits = model(batch.packed)
        return HostCopy(logits.float()), batch, group

    outputs: list[list[Any]] = [[None] * len(item.parts) for item in items.items]
    done = 0
    groups = split_parts([flat[n] for n in order], tokens or prediction_tokens(device))
    every = chain.from_iterable(each(partial(in_halves, launch), groups))
    for copy, batch, group in one_ahead(every, device):
        rows = copy.numpy()
        check_outputs(rows)
        for output in split_outputs(rows, batch, group, isinstance(model, ClassificationModel)):
            i, j = places[order[done]]
            outputs[i][j] = output
            done += 1
        progress(done)
    return outputs


class HostCopy:
    """A tensor on its way from its device to the host, which need not wait for it."""

    def __init__(self, tensor: Tensor) -> None:
        self.host = tensor.to("cpu", non_blocking=tensor.is_cuda)  # into page-locked memory
        self.done: Any = torch.cuda.Event() if tensor.is_cuda else None  # type: ignore[no-untyped-call]
        if self.done is not None:
            self.done.record()

    def numpy(self) -> np.ndarray:
        """Return the values, after waiting for the copy."""
        if self.done is not None:
            self.done.synchronize()
        return self.host.numpy()


Launched = TypeVar("Launched")


def one_ahead(launched: Iterable[Launched], device: torch.device) -> Iterator[Launched]:
    """Yield batches; on a GPU each one only after the next is launched, so that it stays busy.

    `launched` launches a batch whenever it is asked for the next.
    """
    if device.type == "cpu":
        yield from launched
        return
    iterator = iter(launched)
    last = next(iterator, None)
    while last is not None:
        following = next(iterator, None)
        yield last
        last = following


def split_outputs(
    logits: np.ndarray, batch: TaskBatch, parts: Sequence[ItemPart], pooled: bool
) -> Iterator[np.ndarray]:
    """Yield the rows of each part: one per sequence if pooled, else one per token."""
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
    """Return the outputs of an ensemble: the mean of its models' outputs (paper, table 2)."""
    return [
        [np.mean(parts, axis=0) for parts in zip(*items, strict=True)]
        for items in zip(*many, strict=True)
    ]
