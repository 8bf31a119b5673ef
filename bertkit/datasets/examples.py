"""The examples that readers yield: one named tuple for each type of task input.

`place` is the location, "file:line" or "file, question ID", for error messages. A label is None if
the file has none, as in a test set. Labels are *names*, never numbers: numbers are assigned once
the training file has been read, and the names are saved with the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple


class TextExample(NamedTuple):
    """One text or a pair of texts, for classification or regression."""

    id: str
    text: str
    pair: str | None
    label: str | float | tuple[str, ...] | None
    """A name, a number (regression), or any number of names (multi-label classification)."""
    place: str
    image: Any = None
    """The vectors of an image, (vectors, width); see `bertkit.multimodal.images`."""

    @property
    def gold(self) -> str | float | tuple[str, ...] | None:
        """The label or labels, or None if the file has none."""
        return self.label


class ChoiceExample(NamedTuple):
    """One context with n choices, of which one is right."""

    id: str
    text: str
    choices: tuple[str, ...]
    label: int | None
    """The index of the right choice in `choices`."""
    place: str
    image: Any = None
    """See `TextExample`."""

    @property
    def gold(self) -> int | None:
        """The index of the right choice, or None if the file has none."""
        return self.label


class WordsExample(NamedTuple):
    """A sentence as words, each with its tag."""

    id: str
    words: tuple[str, ...]
    tags: tuple[str, ...] | None
    document: int
    """The number of the document; its sentences are adjacent and share this number."""
    place: str
    text: str = ""
    """The running text that was split into words; "" if words were given."""
    spans: tuple[tuple[int, int], ...] = ()
    """The half-open character span of each word in `text`."""

    @property
    def gold(self) -> tuple[str, ...] | None:
        """The tags, or None if the file has none."""
        return self.tags


def joined(words: Sequence[str]) -> tuple[str, list[tuple[int, int]]]:
    """Join words by spaces; return the text and the half-open character span of each word."""
    ends = list(accumulate(len(word) + 1 for word in words))
    spans = [(end - len(word) - 1, end - 1) for word, end in zip(words, ends, strict=True)]
    return " ".join(words), spans


class GoldAnswer(NamedTuple):
    """An accepted answer; `start` is the index of its first character in the context."""

    text: str
    start: int


class QuestionExample(NamedTuple):
    """A question about a context."""

    id: str
    question: str
    context: str
    answers: tuple[GoldAnswer, ...] | None
    """() if the file marks the question as unanswerable; None if it has no answers field."""
    place: str
    version2: bool = False
    """Whether to score it by the rules of SQuAD 2.0; `is_version2` decides for a whole set."""

    @property
    def gold(self) -> tuple[GoldAnswer, ...] | None:
        """The answers, or None if the file has none."""
        return self.answers


Example = TextExample | ChoiceExample | WordsExample | QuestionExample
