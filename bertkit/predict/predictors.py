"""Predictors for fine-tuned models, which `load(folder)` returns.

    classify = load("runs/mrpc/model")
    classify("He sold it.", "It was sold.").label
    classify([("He sold it.", "It was sold."), ("He sold it.", "It rained.")])

Several folders make an ensemble, which averages the outputs of its models.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from hashlib import blake2b
from itertools import chain
from typing import Any, ClassVar, overload

import numpy as np
import torch

from bertkit.datasets.examples import (
    ChoiceExample,
    Example,
    QuestionExample,
    TextExample,
    WordsExample,
)
from bertkit.datasets.fields import count_choices, from_json, row_words
from bertkit.datasets.glue import GLUE
from bertkit.datasets.records import Records, as_source
from bertkit.errors import BertkitError, InputTypeError, is_ordered, short_repr
from bertkit.model.task_heads import extra_head
from bertkit.predict.engine import Engine, choose_mode, warn_caller
from bertkit.predict.word_splitter import words_example
from bertkit.tasks.classification import LabelPrediction, LabelSetPrediction
from bertkit.tasks.data import describe_cut, with_unknown
from bertkit.tasks.multiple_choice import ChoicePrediction
from bertkit.tasks.predictions import GivenAnswer, TaggedText, TagsPrediction, tagged_text
from bertkit.tasks.question_answering import QuestionAnswering
from bertkit.tasks.regression import ValuePrediction
from bertkit.tasks.saved import LoadedTask
from bertkit.tasks.spans import FoundAnswer, usual_step
from bertkit.tasks.spec import SPECS
from bertkit.tasks.task import NOTHING_READ, Items, check_segments, mean_outputs
from bertkit.tasks.token_classification import TokenClassification
from bertkit.text.lines import TextCounts, value_name

TextPrediction = LabelPrediction | LabelSetPrediction | ValuePrediction
CHUNK_INPUTS = 2048
"""The number of inputs that are tokenised and run together."""


def input_chunks(inputs: Iterable[Any], *, whole: bool = False) -> Iterator[list[Any]]:
    """Yield chunks of `CHUNK_INPUTS` examples, which are consumed lazily.

    With `whole`, every document of tagged words stays in one chunk, so a chunk may be longer.
    """
    chunk: list[Any] = []
    for given in inputs:
        if len(chunk) >= CHUNK_INPUTS and not (whole and chunk[-1].document == given.document):
            yield chunk
            chunk = []
        chunk.append(given)
    if chunk:
        yield chunk


class TaskPredictor:
    """A fine-tuned model, or an ensemble of models for the same task, on a device.

    The task and the tokenizer are those of the first model; see `choose_mode` for the precision.

    Raises:
        BertkitError: the models are of different tasks, or the precision is unknown.
    """

    def __init__(
        self, loaded: Sequence[LoadedTask], device: torch.device, precision: str = "auto"
    ) -> None:
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
        if len(loaded) > 1 and any(extra_head(one.model) == "conditional" for one in loaded):
            raise BertkitError(
                "models that score ends given starts (--head conditional) cannot form an ensemble"
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
                    f"{given.place}: the model was fine-tuned on pairs of texts, and here is one; "
                    "give the second (in a file --pair names its column)"
                    if self.pairs
                    else f"{given.place}: the model was fine-tuned on single texts, and here are "
                    "two; leave the second out"
                )
        items = self.task.items(inputs, self.tokenizer)
        for one in self.loaded:
            check_segments(items, one.model.config)
        return items

    def run_items(
        self,
        inputs: Sequence[Any],
        items: Items,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[Any]:
        """Return the predictions for inputs and their sequences, in order.

        `progress` is called with the numbers of windows done and in total, first with 0 done, then
        after every batch. The windows count once for each model of an ensemble.
        """
        return self.task.decode(inputs, items, self.outputs(items, progress))

    def outputs(
        self, items: Items, progress: Callable[[int, int], None] | None = None
    ) -> list[list[np.ndarray]]:
        """Return the outputs for every part of encoded inputs, averaged over an ensemble."""
        parts = sum(len(item.parts) for item in items.items)

        def tell(before: int, done: int) -> None:
            if progress is not None:
                progress(before + done, parts * len(self.engines))

        tell(0, 0)
        many = [
            engine.run(items, partial(tell, number * parts))
            for number, engine in enumerate(self.engines)
        ]
        return many[0] if len(many) == 1 else mean_outputs(many)

    def many(self, inputs: Iterable[Example]) -> list[Any]:
        """Return the predictions for examples of `bertkit.datasets.examples`, in order.

        This warns if a part of an input is not read, such as the end of a long question.
        """
        return [prediction for _, prediction in self._predict(inputs)]

    def _predict(self, inputs: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
        """Yield each example with its prediction; warn at the end if a part was not read."""
        cut: Counter[str] = Counter()
        for chunk in input_chunks(inputs, whole=self.reads_documents):
            predictions, items = self.run(chunk)
            yield from zip(chunk, predictions, strict=True)
            cut.update(items.cut)
        del cut[NOTHING_READ]  # blank texts are valid inputs
        if lost := describe_cut(cut):
            warn_caller(lost)

    def _call(self, inputs: Any, *more: Any) -> Any:
        """Return the prediction for one input, or the predictions for a list of inputs."""
        if isinstance(inputs, str):
            example = self.example((inputs, *more) if more else inputs, "input", "0")
            return self._results([example])[0]
        if more:
            raise InputTypeError(
                f"the first of several arguments must be a text, not {short_repr(inputs)}; give "
                f"many inputs as one list of {self.wanted}"
            )
        return self.results(inputs)

    def results(self, inputs: Any) -> list[Any]:
        """Return the predictions for inputs in memory, in order.

        Args:
            inputs: an iterable of inputs, a DataFrame or a `datasets.Dataset`. An input is a text,
                a tuple, or a mapping that has the columns with which the model was fine-tuned.

        Raises:
            InputTypeError: an input is neither; the message gives its number.
            BertkitError: an input lacks a column or is of the wrong kind, such as a single text for
                a model of pairs.
        """
        if not is_ordered(inputs) and not hasattr(inputs, "columns"):  # a DataFrame has columns
            raise InputTypeError(f"give a list of {self.wanted}, not {short_repr(inputs)}")
        rows = as_source(inputs, "inputs")
        assert isinstance(rows, Records)
        return self._results(
            self.example(given, f"inputs[{number}]", str(number))
            for number, given in enumerate(rows.rows_with(chain.from_iterable(self.columns)))
        )

    def _results(self, examples: Iterable[Any]) -> list[Any]:
        return [self.result(given, found) for given, found in self._predict(examples)]

    wanted: ClassVar[str]
    """What the inputs are, for messages."""

    def example(self, given: Any, place: str, id: str) -> Any:  # noqa: A002
        """Return the example of one input; see `results`."""
        raise NotImplementedError

    def result(self, example: Any, prediction: Any) -> Any:
        """Return what a caller sees of a prediction."""
        return prediction

    def input_fields(self, given: Any, place: str) -> tuple[Any, ...]:
        """Return the fields of an input: of a mapping those that the model's columns name.

        Raises:
            InputTypeError: the input is neither a text, nor a tuple or list, nor a mapping.
            BertkitError: a mapping lacks a column.
        """
        if isinstance(given, str):
            return (given,)
        if isinstance(given, Mapping):
            for columns in self.columns:
                if all(column in given for column in columns):
                    return tuple(given[column] for column in columns)
            missing = next(column for column in self.columns[0] if column not in given)
            raise BertkitError(
                f"{place} has no column '{missing}' (columns: {', '.join(map(str, given))}); "
                "the model was fine-tuned with that name",
                code="column",
            )
        if isinstance(given, tuple | list):
            return tuple(given)
        raise InputTypeError(f"{place} is {short_repr(given)}; give a list of {self.wanted}")

    @cached_property
    def columns(self) -> list[list[str]]:
        """The column names of an input: those that the model was fine-tuned with, or the usual."""
        spec, details = SPECS[self.task.task_type], self.loaded[0].details
        own, usual = spec.merged_columns({}, details).inputs, spec.make_columns({}).inputs
        if (task := GLUE.get(str(details.get("data")))) is not None:
            own = (task.text, task.pair)
        if spec.example is TextExample and (self.pairs or self.task.reads_images):
            usual = ("text", "image" if self.task.reads_images else "pair")
        if spec.example is ChoiceExample:
            usual = ("text", "choices", *(["image"] if self.task.reads_images else []))
            own = own if len(own) > 1 else usual  # no columns were recorded
        found = [[name for name in names if name] for names in (own, usual)]
        if self.pairs is None and spec.example is TextExample and found == [["text"]] * 2:
            found.insert(0, ["text", "pair"])  # it is not recorded whether the model reads pairs
        return found


def unthresholded(task: Any) -> dict[str, Any]:
    """Return the settings of a task without the threshold, which was chosen on dev data."""
    found = {name: value for name, value in task.settings().items() if name != "threshold"}
    if isinstance(task, QuestionAnswering):  # 0 means 128 in windows with room for it
        found["stride"] = task.stride or usual_step(task.max_length - task.max_question_length - 3)
    return found


def require_texts(place: str, *given: object) -> None:
    """Check that all values are strings.

    Raises:
        InputTypeError: a value is not a string; the message shows the first one.
    """
    for text in given:
        if not isinstance(text, str):
            raise InputTypeError(f"{place}: {short_repr(text)} is not a text")


def require_list(given: Any, what: str) -> tuple[Any, ...]:
    """Return the items of a list or another ordered iterable as a tuple.

    Raises:
        InputTypeError: the value is a string, or not an ordered iterable.
    """
    if not is_ordered(given):
        raise InputTypeError(f"{what} must be a list of texts, not {short_repr(given)}")
    return tuple(given)


class TextPredictor(TaskPredictor):
    """A predictor for classification, multi-label classification and regression."""

    wanted = "texts or (text, second text) tuples"

    @overload
    def __call__(self, text: str, pair: Any = None) -> TextPrediction: ...
    @overload
    def __call__(self, text: Iterable[Any]) -> list[TextPrediction]: ...
    def __call__(self, text: Any, pair: Any = None) -> Any:
        """Return the prediction for a text or a pair of texts, or a list of them for a list.

        A blank text is valid: the model reads only [CLS] and [SEP].

        Args:
            text: a text; or many inputs, as `results` takes them.
            pair: the second text, if the first argument is one text of a pair; or the image, if the
                model reads images: its features, or the path, the bytes or the pixels of a picture.

        Raises:
            InputTypeError: an argument is not a text.
            BertkitError: a model of pairs gets single texts, or the other way round.
        """
        return self._call(text) if pair is None else self._call(text, pair)

    def example(self, given: Any, place: str, id: str) -> TextExample:  # noqa: A002
        """See `TaskPredictor`; an image follows the text in its place in a pair."""
        texts = self.input_fields(given, place)
        task: Any = self.task
        image = None
        if task.reads_images and len(texts) == 2:
            image = task.read_image(texts[1], place)
            texts = texts[:1]
        require_texts(place, *texts)
        if not 1 <= len(texts) <= 2:
            raise InputTypeError(f"{place} has {len(texts)} texts; give one text or two")
        pair = texts[1] if len(texts) > 1 else None
        return TextExample(id, texts[0], pair, None, place, image)


class ChoicePredictor(TaskPredictor):
    """A predictor for multiple choice."""

    wanted = "(text, choices) tuples"

    @overload
    def __call__(
        self, text: str, choices: Sequence[str], image: Any = None
    ) -> ChoicePrediction: ...
    @overload
    def __call__(self, text: Iterable[Any]) -> list[ChoicePrediction]: ...
    def __call__(self, text: Any, choices: Any = None, image: Any = None) -> Any:
        """Return the most probable choice for a text, or a list of them for a list of inputs.

        Args:
            text: the context; or many inputs, as `results` takes them.
            choices: the texts to choose from, if the first argument is one text.
            image: the image, if the model reads images; see `TextPredictor`.

        Raises:
            InputTypeError: an argument is of the wrong type.
            BertkitError: there is no choice.
        """
        more = [one for one in (choices, image) if one is not None]
        return self._call(text, *more)

    def example(self, given: Any, place: str, id: str) -> ChoiceExample:  # noqa: A002
        """See `TaskPredictor`; the choices of a mapping are one list or have a column each."""
        text, *choices = self.input_fields(given, place) or ("",)
        task: Any = self.task
        image = None
        if task.reads_images and len(choices) > 1:
            image = task.read_image(choices.pop(), place)
        if len(choices) != 1 and not isinstance(given, Mapping):
            raise InputTypeError(f"{place} is {short_repr(given)}; give {self.wanted}")
        if len(choices) == 1:
            listed = from_json(choices[0], str, place)
            if isinstance(given, Mapping) and isinstance(listed, Mapping):
                listed = listed.get("text")  # beside the keys, as in ARC; see `expand_choices`
            choices = [*require_list(listed, f"{place}: choices")]
        if isinstance(given, Mapping):  # the last choices may be empty, as in a file
            choices = choices[: count_choices(choices)]
        require_texts(place, text, *choices)
        if not choices:
            raise BertkitError(f"{place} has no choice to choose from")
        return ChoiceExample(id, text, tuple(choices), None, place, image)


class TagPredictor(TaskPredictor):
    """A predictor for the tags and entities of words."""

    wanted = "texts or lists of words"

    @overload
    def __call__(self, text: str) -> TaggedText: ...
    @overload
    def __call__(self, text: Iterable[Any]) -> list[TaggedText]: ...
    def __call__(self, text: Any) -> Any:
        """Return the tags and entities of a text, or of every input of a list.

        A text is split into words here; an input of a list may also be a list of words, as in
        `tag([["Anna", "lives", "here"]])`. Offsets refer to the text, or to the words joined by
        spaces.

        Raises:
            InputTypeError: an argument is of the wrong type.
        """
        return self._call(text)

    def example(self, given: Any, place: str, id: str) -> WordsExample:  # noqa: A002
        """See `TaskPredictor`."""
        document = int(id)
        if isinstance(given, Mapping):
            column = self.columns[0][0]
            given, *named = self.input_fields(given, place)
            given = [*row_words(given, column, place, TextCounts())]  # as the rows of a file
            if named and (name := value_name(named[0])):  # adjacent sentences share its number
                document = -1 - int.from_bytes(blake2b(name.encode(), digest_size=7).digest())
        if not isinstance(given, str):
            given = require_list(given, f"{place}: words")
            require_texts(place, *given)
        return words_example(id, given, document, place)

    def result(self, example: WordsExample, prediction: TagsPrediction) -> TaggedText:
        """See `TaskPredictor`."""
        return tagged_text(prediction, example.text, example.spans)


class AnswerPredictor(TaskPredictor):
    """A predictor for extractive question answering."""

    wanted = "(question, context) tuples"

    @overload
    def __call__(self, question: str, context: str) -> GivenAnswer: ...
    @overload
    def __call__(self, question: Iterable[Any]) -> list[GivenAnswer]: ...
    def __call__(self, question: Any, context: str | None = None) -> Any:
        """Return the best span of the context, or no answer if the model was trained for it.

        Args:
            question: a question; or many inputs, as `results` takes them.
            context: the text to answer from, if the first argument is one question.

        Raises:
            InputTypeError: an argument is of the wrong type.
            BertkitError: a question or a context is empty.
        """
        return self._call(question) if context is None else self._call(question, context)

    def example(self, given: Any, place: str, id: str) -> QuestionExample:  # noqa: A002
        """See `TaskPredictor`."""
        texts = self.input_fields(given, place)
        require_texts(place, *texts)
        if len(texts) != 2:
            raise InputTypeError(f"{place} is {short_repr(given)}; give a list of {self.wanted}")
        if not all(text.strip() for text in texts):
            raise BertkitError(
                f"{place}: an answer needs a question and a context, and one of them is empty"
            )
        return QuestionExample(id, texts[0], texts[1], None, place)

    def result(self, example: QuestionExample, prediction: FoundAnswer) -> GivenAnswer:
        """See `TaskPredictor`."""
        assert isinstance(self.task, QuestionAnswering)
        answer = self.task.answered(prediction)
        return GivenAnswer(
            **answer,
            no_answer_probability=prediction.no_answer_probability,
            context=example.context,
        )


PREDICTORS: dict[Any, type[TaskPredictor]] = {
    TextExample: TextPredictor,
    ChoiceExample: ChoicePredictor,
    WordsExample: TagPredictor,
    QuestionExample: AnswerPredictor,
}
"""Example type of a task type -> the class of predictor that `load` returns."""
