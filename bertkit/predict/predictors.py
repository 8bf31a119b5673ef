"""Using a tuned model from Python: `load(folder)` gives one of these, ready to be called.

    classify = load("runs/mrpc/model")
    classify("He sold it.", "It was sold.").label

Several folders make an ensemble: the mean of the models' outputs.
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
"""Inputs that are tokenised and run together."""


class Entity(NamedTuple):
    """A tagged stretch of a text; `text[start:end]`."""

    type: str
    start: int
    end: int
    text: str
    word_start: int
    """Its first word."""
    word_end: int
    """One after its last word."""


class WordTag(NamedTuple):
    """A word of a text and its tag."""

    word: str
    tag: str
    probability: float
    start: int
    end: int


class TaggedText(NamedTuple):
    """The tags of a text's words, and the entities that they make."""

    words: tuple[WordTag, ...]
    entities: tuple[Entity, ...]


class GivenAnswer(NamedTuple):
    """The answer to a question, `context[start:end]`; "" and None where there is none."""

    answer: str
    start: int | None
    end: int | None
    probability: float
    """Of this answer, be it "", among the best spans and none."""
    no_answer_probability: float
    """0 where the model was not trained on questions without an answer."""


def stretches(inputs: Iterable[Any], *, whole: bool = False) -> Iterator[list[Any]]:
    """Inputs in stretches of `CHUNK_INPUTS`, or of a little more where documents must stay whole.

    Args:
        inputs: of `bertkit.datasets.examples`; they are taken as they are needed.
        whole: whether no document of tagged words may be divided. One longer than a stretch is held
            in memory.
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
    """A tuned model, or several of the same task, on a device.

    Args:
        loaded: the models; task and tokenizer are the first one's.
        device: where to compute.
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
                "an ensemble cannot mix models tuned on pairs of texts with models of single texts"
            )
        self.pairs = known[0] if known else None
        """Whether the models were tuned on pairs of texts; None where none of them says it."""
        if isinstance(self.task, QuestionAnswering):  # outputs are averaged, and so are thresholds
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
        """Load one tuned model, or several for an ensemble; see `bertkit.predict.load.load`.

        Raises:
            BertkitError: see `load_task_model`.
        """
        where = choose_device(device)
        many = [paths] if isinstance(paths, str | Path) else list(paths)
        loaded = [load_task_model(Path(path), where, null_threshold) for path in many]
        return cls(loaded, where, precision)

    @property
    def reads_documents(self) -> bool:
        """Whether the sentences of a document are read together."""
        return isinstance(self.task, TokenClassification) and self.task.context == "document"

    def run(
        self, inputs: Sequence[Any], progress: Callable[[int, int], None] | None = None
    ) -> tuple[list[Any], Items]:
        """Predictions for many inputs, in order, and their sequences; see `run_items`."""
        items = with_unknown(self.items(inputs), self.tokenizer.unk_id)
        return self.run_items(inputs, items, progress), items

    def items(self, inputs: Sequence[Any]) -> Items:
        """The sequences of inputs.

        Raises:
            BertkitError: the model was tuned on pairs and an input is a single text, or vice versa;
                or it has one segment, and inputs need two.
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
        """Predictions for inputs whose sequences are made, in order.

        Args:
            inputs: of `bertkit.datasets.examples`.
            items: what the task's `items` made of them.
            progress: is told how many windows are done, and of how many: first that none is, then
                after every batch. Each model of an ensemble has its own.
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
        """Predictions for inputs of `bertkit.datasets.examples`, in order.

        Warns where some of an input is not read: the end of a long question, say.

        Raises:
            BertkitError: an input is of another type, or holds what is no text; see `items`.
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
        del cut[NOTHING_READ]  # a blank text is an input, too
        if lost := describe_cut(cut):
            warnings.warn(lost, stacklevel=2)
        return found


def unthresholded(task: Any) -> dict[str, Any]:
    """A task's settings but for what was chosen on its own dev data."""
    found = {name: value for name, value in task.settings().items() if name != "threshold"}
    if isinstance(task, QuestionAnswering):  # 0 means 128 in windows with room for it
        found["stride"] = task.stride or usual_step(task.max_length - task.max_question_length - 3)
    return found


def not_an_input(given: object, number: int, wanted: type[Example]) -> BertkitError:
    """The error for what `many` cannot take."""
    return BertkitError(
        f"many() takes a list of {wanted.__name__} of bertkit.datasets.examples; "
        f"number {number} is {given!r:.60}"
    )


def check_input(given: Any, number: int, wanted: type[Example]) -> None:
    """Raise unless it is such an example, whose texts are texts; shows it and its number."""
    if not isinstance(given, wanted):
        raise not_an_input(given, number, wanted)
    if isinstance(given, ChoiceExample) and not given.choices:
        raise BertkitError(f"number {number} has no choice to choose from")
    for text in given.texts:
        if not isinstance(text, str):
            raise BertkitError(f"{text!r:.40} in number {number} is not a text")


def require_texts(*given: object) -> None:
    """Stop unless all are texts.

    Raises:
        BertkitError: shows the first that is none.
    """
    for text in given:
        if not isinstance(text, str):
            raise BertkitError(f"{str(text)[:40]!r} is not a text; many() takes lists of inputs")


def require_list(given: Any, what: str) -> tuple[Any, ...]:
    """The items of a list.

    Raises:
        BertkitError: it is one text, or has no items in an order.
    """
    if isinstance(given, str | bytes | Mapping | Set) or not isinstance(given, Iterable):
        raise BertkitError(f"{what} must be a list of texts, not {str(given)[:40]!r}")
    return tuple(given)


class TextPredictor(TaskPredictor):
    """Classification, multi-label classification and regression."""

    def __call__(
        self, text: str, pair: str | None = None
    ) -> LabelPrediction | LabelSetPrediction | ValuePrediction:
        """The prediction for a text or a pair of texts; for many texts see `many`.

        A blank text is one, too: the model reads [CLS] and [SEP] alone, and has a prediction.
        """
        require_texts(text, *([] if pair is None else [pair]))
        return self.many([TextExample("0", text, pair, None, "text")])[0]


class ChoicePredictor(TaskPredictor):
    """Multiple choice."""

    def __call__(self, text: str, choices: Sequence[str]) -> ChoicePrediction:
        """The most probable choice."""
        own = require_list(choices, "choices")
        require_texts(text, *own)
        if not own:
            raise BertkitError("there is no choice to choose from")
        return self.many([ChoiceExample("0", text, own, None, "text")])[0]


class TagPredictor(TaskPredictor):
    """Tags and entities."""

    def __call__(self, text: str | Sequence[str]) -> TaggedText:
        """The tags of running text, which is split into words here, or of given words.

        Offsets are of the text; of given words, of the words joined by spaces.
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
    """Tags and entities with their places, see `split_words_with_offsets`."""
    rows = zip(found.tags, found.probabilities, spans, strict=True)
    words = tuple(WordTag(text[a:b], tag, chance, a, b) for tag, chance, (a, b) in rows)
    entities = []
    for kind, first, last in found.entities:
        start, end = spans[first][0], spans[last - 1][1]
        entities.append(Entity(kind, start, end, text[start:end], first, last))
    return TaggedText(words, tuple(entities))


class AnswerPredictor(TaskPredictor):
    """Answers in a context."""

    def __call__(self, question: str, context: str) -> GivenAnswer:
        """The best span of the context, or none where the model was trained to say so."""
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
"""Example of a task type -> what `load` gives."""
