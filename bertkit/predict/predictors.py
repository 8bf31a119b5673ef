"""Predictors for fine-tuned models, which `load(folder)` returns.

    classify = load("runs/mrpc/model")
    classify("He sold it.", "It was sold.").label

Several folders make an ensemble, which averages the outputs of its models.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch

from bertkit.datasets.examples import (
    ChoiceExample,
    Example,
    QuestionExample,
    TextExample,
    WordsExample,
)
from bertkit.errors import BertkitError
from bertkit.predict.engine import Engine, choose_mode
from bertkit.predict.word_splitter import split_words_with_offsets
from bertkit.tasks.classification import LabelPrediction, LabelSetPrediction
from bertkit.tasks.data import describe_cut, with_unknown
from bertkit.tasks.multiple_choice import ChoicePrediction
from bertkit.tasks.question_answering import FoundAnswer, QuestionAnswering
from bertkit.tasks.regression import ValuePrediction
from bertkit.tasks.saved import LoadedTask, load_task_model
from bertkit.tasks.spans import usual_step
from bertkit.tasks.spec import SPECS
from bertkit.tasks.task import NOTHING_READ, Items, check_segments, mean_outputs
from bertkit.tasks.token_classification import TagsPrediction, TokenClassification
from bertkit.training.device import choose_device

CHUNK_INPUTS = 2048
"""The number of inputs that are tokenised and run together."""


class Entity(NamedTuple):
    """A tagged span of a text, `text[start:end]`."""

    type: str
    start: int
    end: int
    text: str
    word_start: int
    """The index of its first word."""
    word_end: int
    """The index after its last word."""


class WordTag(NamedTuple):
    """A word of a text and its tag."""

    word: str
    tag: str
    probability: float
    start: int
    end: int


class TaggedText(NamedTuple):
    """The tags of the words of a text, and the entities that they form."""

    words: tuple[WordTag, ...]
    entities: tuple[Entity, ...]


class GivenAnswer(NamedTuple):
    """The answer to a question, `context[start:end]`; "" and None if there is no answer."""

    answer: str
    start: int | None
    end: int | None
    probability: float
    """The probability of this answer, possibly "", among the best spans and no answer."""
    no_answer_probability: float
    """The probability of no answer; 0 if the model was not trained on unanswerable questions."""


def stretches(inputs: Iterable[Any], *, whole: bool = False) -> Iterator[list[Any]]:
    """Yield chunks of `CHUNK_INPUTS` inputs, or a few more if documents must stay whole.

    Args:
        inputs: examples of `bertkit.datasets.examples`, which are consumed lazily.
        whole: whether to keep every document of tagged words in one chunk. A document longer than a
            chunk is held in memory.
    """
    stretch: list[Any] = []
    for given in inputs:
        if len(stretch) >= CHUNK_INPUTS and not (whole and stretch[-1].document == given.document):
            yield stretch
            stretch = []
        stretch.append(given)
    if stretch:
        yield stretch


class TaskPredictor:
    """A fine-tuned model, or an ensemble of models for the same task, on a device.

    Args:
        loaded: the models; the task and the tokenizer are those of the first.
        device: the device to compute on.
        precision: "fp32", "bf16", "int8" or "auto"; see `choose_mode`.

    Raises:
        BertkitError: the models are of different tasks, or the precision is unknown.
    """

    def __init__(
        self, loaded: Sequence[LoadedTask], device: torch.device, precision: str = "auto"
    ) -> None:
        if not loaded:
            raise BertkitError("there is no model to predict with; name at least one")
        self.loaded, self.device = list(loaded), device
        self.precision = choose_mode(precision, device)
        self.task, self.tokenizer = loaded[0].task, loaded[0].tokenizer
        for other in loaded[1:]:
            same = (other.task.task_type, other.task.labels) == (
                self.task.task_type,
                self.task.labels,
            )
            if not same or other.tokenizer.content_hash != self.tokenizer.content_hash:
                raise BertkitError(
                    "the models of an ensemble must have the same task, labels and tokenizer"
                )
            if unthresholded(other.task) != unthresholded(self.task):
                raise BertkitError(
                    "the models of an ensemble must have the same settings, such as window lengths"
                )
        said = [one.details.get("pairs") for one in loaded]
        known = [pairs for pairs in said if isinstance(pairs, bool)]
        if len(set(known)) > 1:
            raise BertkitError(
                "an ensemble cannot mix models fine-tuned on pairs of texts with those on single "
                "texts"
            )
        self.pairs = known[0] if known else None
        """Whether the models were fine-tuned on pairs of texts; None if no model records it."""
        if isinstance(self.task, QuestionAnswering):  # thresholds are averaged like outputs
            thresholds = [
                one.task.threshold for one in loaded if isinstance(one.task, QuestionAnswering)
            ]
            self.task = replace(self.task, threshold=sum(thresholds) / len(thresholds))
        self.engines = [Engine(one.model, device, self.precision) for one in loaded]

    @classmethod
    def load(
        cls,
        paths: Sequence[Path | str] | Path | str,
        *,
        device: str = "auto",
        precision: str = "auto",
        null_threshold: float | None = None,
    ) -> Self:
        """Load one fine-tuned model, or several for an ensemble; see `bertkit.predict.load.load`.

        Raises:
            BertkitError: see `load_task_model`.
        """
        where = choose_device(device)
        many = [paths] if isinstance(paths, str | Path) else list(paths)
        loaded = [load_task_model(Path(path), where, null_threshold) for path in many]
        return cls(loaded, where, precision)

    @property
    def reads_documents(self) -> bool:
        """Whether the windows of tagged words span whole documents."""
        return isinstance(self.task, TokenClassification) and self.task.context == "document"

    def run(
        self, inputs: Sequence[Any], progress: Callable[[int, int], None] | None = None
    ) -> tuple[list[Any], Items]:
        """Return the predictions for many inputs, in order, and their sequences."""
        items = with_unknown(self.items(inputs), self.tokenizer.unk_id)
        return self.run_items(inputs, items, progress), items

    def items(self, inputs: Sequence[Any]) -> Items:
        """Encode inputs as sequences.

        Raises:
            BertkitError: the model was fine-tuned on pairs and an input is a single text, or vice
                versa; or it has one segment, and inputs need two.
        """
        for given in inputs if self.pairs is not None else ():
            if isinstance(given, TextExample) and (given.pair is not None) != self.pairs:
                raise BertkitError(
                    f"{given.place}: the model was tuned on pairs of texts, and here is one text; "
                    "give the second (in a file --pair names its column)"
                    if self.pairs
                    else f"{given.place}: the model was tuned on single texts, and here are two; "
                    "leave the second out"
                )
        items = self.task.items(inputs, self.tokenizer)
        check_segments(items, self.loaded[0].model.config)
        return items

    def run_items(
        self,
        inputs: Sequence[Any],
        items: Items,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[Any]:
        """Return the predictions for encoded inputs, in order.

        Args:
            inputs: examples of `bertkit.datasets.examples`.
            items: their sequences, from `items`.
            progress: called with the numbers of windows done and in total, first with 0 done, then
                after every batch. The windows count once for each model of an ensemble.
        """
        parts = sum(len(item.parts) for item in items.items)

        def tell(before: int, done: int) -> None:
            if progress is not None:
                progress(before + done, parts * len(self.engines))

        tell(0, 0)
        many = [
            engine.run(items, partial(tell, number * parts))
            for number, engine in enumerate(self.engines)
        ]
        outputs = many[0] if len(many) == 1 else mean_outputs(many)
        return self.task.decode(inputs, items, outputs)

    def many(self, inputs: Iterable[Any]) -> list[Any]:
        """Return the predictions for examples of `bertkit.datasets.examples`, in order.

        This warns if a part of an input is not read, such as the end of a long question.

        Raises:
            BertkitError: an input has the wrong type, or a field is not text; see `items`.
        """
        wanted = SPECS[self.task.task_type].example
        if isinstance(inputs, str | bytes | Mapping):
            raise not_an_input(inputs, 0, wanted)
        found: list[Any] = []
        cut: Counter[str] = Counter()
        for stretch in stretches(inputs, whole=self.reads_documents):
            for number, given in enumerate(stretch, len(found)):
                check_input(given, number, wanted)
            predictions, items = self.run(stretch)
            found += predictions
            cut.update(items.cut)
        del cut[NOTHING_READ]  # blank texts are valid inputs
        if lost := describe_cut(cut):
            warnings.warn(lost, stacklevel=2)
        return found


def unthresholded(task: Any) -> dict[str, Any]:
    """Return the settings of a task without the threshold, which was chosen on dev data."""
    found = {name: value for name, value in task.settings().items() if name != "threshold"}
    if isinstance(task, QuestionAnswering):  # 0 means 128 in windows with room for it
        found["stride"] = task.stride or usual_step(task.max_length - task.max_question_length - 3)
    return found


def not_an_input(given: object, number: int, wanted: type[Example]) -> BertkitError:
    """Return the error for a value that `many` does not accept."""
    return BertkitError(
        f"many() takes a list of {wanted.__name__} of bertkit.datasets.examples; "
        f"number {number} is {given!r:.60}"
    )


def check_input(given: Any, number: int, wanted: type[Example]) -> None:
    """Raise unless an input is an example of the expected type whose texts are strings."""
    if not isinstance(given, wanted):
        raise not_an_input(given, number, wanted)
    if isinstance(given, ChoiceExample) and not given.choices:
        raise BertkitError(f"number {number} has no choice to choose from")
    for text in given.texts:
        if not isinstance(text, str):
            raise BertkitError(f"{text!r:.40} in number {number} is not a text")


def require_texts(*given: object) -> None:
    """Check that all values are strings.

    Raises:
        BertkitError: a value is not a string; the message shows the first one.
    """
    for text in given:
        if not isinstance(text, str):
            raise BertkitError(f"{str(text)[:40]!r} is not a text; many() takes lists of inputs")


def require_list(given: Any, what: str) -> tuple[Any, ...]:
    """Return the items of a list or another ordered iterable as a tuple.

    Raises:
        BertkitError: the value is a string, or not an ordered iterable.
    """
    if isinstance(given, str | bytes | Mapping | Set) or not isinstance(given, Iterable):
        raise BertkitError(f"{what} must be a list of texts, not {str(given)[:40]!r}")
    return tuple(given)


class TextPredictor(TaskPredictor):
    """A predictor for classification, multi-label classification and regression."""

    def __call__(
        self, text: str, pair: str | None = None
    ) -> LabelPrediction | LabelSetPrediction | ValuePrediction:
        """Return the prediction for a text or a pair of texts; for many texts use `many`.

        A blank text is valid: the model reads only [CLS] and [SEP].
        """
        require_texts(text, *([] if pair is None else [pair]))
        return self.many([TextExample("0", text, pair, None, "text")])[0]


class ChoicePredictor(TaskPredictor):
    """A predictor for multiple choice."""

    def __call__(self, text: str, choices: Sequence[str]) -> ChoicePrediction:
        """Return the most probable choice."""
        own = require_list(choices, "choices")
        require_texts(text, *own)
        if not own:
            raise BertkitError("there is no choice to choose from")
        return self.many([ChoiceExample("0", text, own, None, "text")])[0]


class TagPredictor(TaskPredictor):
    """A predictor for the tags and entities of words."""

    def __call__(self, text: str | Sequence[str]) -> TaggedText:
        """Return the tags of a running text, which is split into words here, or of given words.

        Offsets refer to the text, or to the given words joined by spaces.
        """
        if not isinstance(text, str):
            text = require_list(text, "words")
            require_texts(*text)
        text, spans = split_words_with_offsets(text)
        if not spans:
            return TaggedText((), ())
        words = tuple(text[start:end] for start, end in spans)
        found = self.many([WordsExample("0", words, None, 0, "text")])[0]
        return tagged_text(found, text, spans)


def tagged_text(found: TagsPrediction, text: str, spans: Sequence[tuple[int, int]]) -> TaggedText:
    """Add the character spans of `split_words_with_offsets` to tags and entities."""
    rows = zip(found.tags, found.probabilities, spans, strict=True)
    words = tuple(WordTag(text[a:b], tag, chance, a, b) for tag, chance, (a, b) in rows)
    entities = []
    for kind, first, last in found.entities:
        start, end = spans[first][0], spans[last - 1][1]
        entities.append(Entity(kind, start, end, text[start:end], first, last))
    return TaggedText(words, tuple(entities))


class AnswerPredictor(TaskPredictor):
    """A predictor for extractive question answering."""

    def __call__(self, question: str, context: str) -> GivenAnswer:
        """Return the best span of the context, or no answer if the model was trained for it."""
        require_texts(question, context)
        if not question.strip() or not context.strip():
            raise BertkitError("an answer needs a question and a context, and one of them is empty")
        found: FoundAnswer = self.many([QuestionExample("0", question, context, None, "text")])[0]
        assert isinstance(self.task, QuestionAnswering)
        given = self.task.answered(found)
        return GivenAnswer(**given, no_answer_probability=found.no_answer_probability)


PREDICTORS: dict[Any, type[TaskPredictor]] = {
    TextExample: TextPredictor,
    ChoiceExample: ChoicePredictor,
    WordsExample: TagPredictor,
    QuestionExample: AnswerPredictor,
}
"""Example type of a task type -> the class of predictor that `load` returns."""
