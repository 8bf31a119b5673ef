"""What models do for requests: the pieces of `bertkit.predict` with many requests in one run.

Each work has two halves. `prepare` cuts a request's texts into tokens, apart from the model's
thread; `run` computes several requests at once and gives each its own predictions.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from bertkit.errors import BertkitError
from bertkit.predict.embedding import Embedder, EncodedText
from bertkit.predict.tasks import TaskPredictor
from bertkit.predict.words import words_of
from bertkit.serve.batching import Prepared
from bertkit.serve.bodies import Choices, Question, Text, Words
from bertkit.serve.limits import RefusedError
from bertkit.tasks.answer import Answer
from bertkit.tasks.inputs import ChoiceInput, QuestionInput, TextInput, WordsInput
from bertkit.tasks.task import Items, mean_outputs


class TaskWork:
    """A tuned model's predictions.

    Args:
        predictor: of any kind.
    """

    def __init__(self, predictor: TaskPredictor) -> None:
        self.predictor = predictor

    def prepare(self, inputs: Sequence[Any]) -> Prepared:
        """A request's inputs (of `bertkit.tasks.inputs`) as sequences."""
        items = self.predictor.items(inputs)
        lost = {what: count for what, count in items.cut.items() if count}
        if isinstance(self.predictor.task, Answer):  # without a known answer none can be missed
            lost = {what: count for what, count in lost.items() if what.startswith("questions")}
        return Prepared((inputs, items), items.tokens, len(inputs), items.windowed, lost)

    def run(self, many: Sequence[tuple[Sequence[Any], Items]]) -> list[list[Any]]:
        """Predictions, as the task's `decode` gives them, for each request."""
        together = [item for _, items in many for item in items.items]
        whole = Items(together, sum(len(inputs) for inputs, _ in many), 0, {})
        by_model = [engine.run(whole) for engine in self.predictor.engines]
        outputs = by_model[0] if len(by_model) == 1 else mean_outputs(by_model)
        ends = accumulate((len(items.items) for _, items in many), initial=0)
        return [
            self.predictor.task.decode(inputs, items, outputs[start:end])
            for (inputs, items), (start, end) in zip(many, pairwise(ends), strict=True)
        ]


class EmbeddingWork:
    """Vectors of texts.

    Args:
        embedder: any.
    """

    def __init__(self, embedder: Embedder) -> None:
        self.embedder = embedder

    def prepare(self, asked: Sequence[str] | Sequence[list[int]]) -> Prepared:
        """Texts, or ids of texts, as sequences.

        Raises:
            RefusedError: an id is not in the vocabulary.
        """
        texts = [one for one in asked if isinstance(one, str)]
        encoded = self.embedder.encode(texts) or self._of_ids(asked)
        windowed = sum(len(text.parts) > 1 for text in encoded)
        return Prepared(encoded, sum(text.tokens for text in encoded), len(encoded), windowed)

    def _of_ids(self, asked: Sequence[Any]) -> list[EncodedText]:
        """Ids as sequences; the prompt stands before them, as before texts."""
        settings, tokenizer = self.embedder.settings, self.embedder.tokenizer
        prompt = settings.whole_texts([""], special=tokenizer.compat == "hf")
        [before], encoded = tokenizer.encode_batch(prompt), []
        for number, one in enumerate(asked):
            if (worst := max(one)) >= tokenizer.size:
                raise RefusedError(
                    422,
                    f"input.{number}: {worst} is no id of the model's vocabulary of "
                    f"{tokenizer.size:,}; send the text, or ids of its own tokenizer",
                    f"input.{number}",
                )
            ids = np.array([*before, *one], dtype=np.int32)
            encoded.append(self.embedder.windows_of(ids, windows=True))
        return encoded

    def run(self, many: Sequence[list[EncodedText]]) -> list[np.ndarray]:
        """(texts, width) float32 for each request."""
        vectors = self.embedder.vectors([text for texts in many for text in texts])
        ends = accumulate((len(texts) for texts in many), initial=0)
        return [vectors[start:end] for start, end in pairwise(ends)]


def text_inputs(asked: Sequence[Text]) -> list[TextInput]:
    """A request's texts."""
    return [
        TextInput(str(i), given.text, given.pair, None, f"inputs.{i}")
        for i, given in enumerate(asked)
    ]


def choice_inputs(asked: Sequence[Choices]) -> list[ChoiceInput]:
    """A request's texts and choices."""
    return [
        ChoiceInput(str(i), given.text, tuple(given.choices), None, f"inputs.{i}")
        for i, given in enumerate(asked)
    ]


def question_inputs(asked: Sequence[Question]) -> list[QuestionInput]:
    """A request's questions.

    Raises:
        BertkitError: one is blank.
    """
    for i, given in enumerate(asked):
        for field in ("question", "context"):
            if not getattr(given, field).strip():
                raise BertkitError(f"inputs.{i}.{field}: the text is blank; give one with words")
    return [
        QuestionInput(str(i), given.question, given.context, None, f"inputs.{i}")
        for i, given in enumerate(asked)
    ]


def words_inputs(asked: Sequence[Words]) -> list[WordsInput]:
    """A request's words.

    Raises:
        RefusedError: an input has both, text and words, or none.
    """
    inputs = []
    for i, given in enumerate(asked):
        if (given.text is None) == (given.words is None):
            both = "both" if given.words is not None else "neither"
            raise RefusedError(
                422, f"inputs.{i} has {both} of text and words; give one of them", f"inputs.{i}"
            )
        text, spans = words_of(given.given)
        words = tuple(text[start:end] for start, end in spans)
        document = -1 - i if given.document is None else given.document
        inputs.append(WordsInput(str(i), words, None, document, f"inputs.{i}"))
    return inputs
