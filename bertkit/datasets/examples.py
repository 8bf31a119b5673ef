"""What a task is asked about: one named tuple for each kind of input, as readers yield them.

`place` is "file:line" (or "file, question ID") and ends up in error messages. A label is None where
the file has none, as in a test set. Labels are *names*, never numbers: numbers are given out when
the training file has been read, and the names travel with the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple


class TextExample(NamedTuple):
    """One text or a pair of texts: to classify or to give a number to."""

    id: str
    text: str
    pair: str | None
    label: str | float | tuple[str, ...] | None
    """A name; a number (regression); any number of names (multi-label classification)."""
    place: str

    @property
    def gold(self) -> str | float | tuple[str, ...] | None:
        """The label or labels; None where the file has none."""
        return self.label

    @property
    def texts(self) -> tuple[str, ...]:
        """Every text of the example."""
        return (self.text,) if self.pair is None else (self.text, self.pair)


class ChoiceExample(NamedTuple):
    """One context with n ways to go on, of which one is right."""

    id: str
    text: str
    choices: tuple[str, ...]
    label: int | None
    """Index into `choices`."""
    place: str

    @property
    def gold(self) -> int | None:
        """The index of the right choice; None where the file has none."""
        return self.label

    @property
    def texts(self) -> tuple[str, ...]:
        """Every text of the example."""
        return (self.text, *self.choices)


class WordsExample(NamedTuple):
    """A sentence as words, each with its tag."""

    id: str
    words: tuple[str, ...]
    tags: tuple[str, ...] | None
    document: int
    """Sentences with the same number follow each other in one document."""
    place: str
    text: str = ""
    """The running text that the words were found in; "" where words were given."""
    spans: tuple[tuple[int, int], ...] = ()
    """Of each word in the text: its first character and one after its last."""

    @property
    def gold(self) -> tuple[str, ...] | None:
        """The tags; None where the file has none."""
        return self.tags

    @property
    def texts(self) -> tuple[str, ...]:
        """Every text of the example."""
        return self.words


def joined(words: Sequence[str]) -> tuple[str, list[tuple[int, int]]]:
    """Words with a space between them, and where each begins and ends in that text."""
    ends = list(accumulate(len(word) + 1 for word in words))
    spans = [(end - len(word) - 1, end - 1) for word, end in zip(words, ends, strict=True)]
    return " ".join(words), spans


class GoldAnswer(NamedTuple):
    """An accepted answer; `start` is its first character in the context."""

    text: str
    start: int


class QuestionExample(NamedTuple):
    """A question about a context."""

    id: str
    question: str
    context: str
    answers: tuple[GoldAnswer, ...] | None
    """() where the file says that there is no answer; None where it says nothing."""
    place: str
    version2: bool = False
    """Whether it is scored by the rules of SQuAD 2.0; `is_version2` asks this of a whole set."""

    @property
    def gold(self) -> tuple[GoldAnswer, ...] | None:
        """The answers; None where the file has none."""
        return self.answers

    @property
    def texts(self) -> tuple[str, ...]:
        """Every text of the example."""
        return (self.question, self.context)


Example = TextExample | ChoiceExample | WordsExample | QuestionExample
