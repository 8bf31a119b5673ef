"""What a task is asked about: one named tuple for each kind of input, as readers yield them.

`place` is "file:line" (or "file, question ID") and ends up in error messages. A label is None where
the file has none, as in a test set. Labels are *names*, never numbers: numbers are given out when
the training file has been read, and the names travel with the model.
"""

from __future__ import annotations

from typing import NamedTuple


class TextInput(NamedTuple):
    """One text or a pair of texts: to classify or to give a number to."""

    id: str
    text: str
    pair: str | None
    label: str | float | tuple[str, ...] | None
    """A name; a number (regress); any number of names (multi-label)."""
    place: str


class ChoiceInput(NamedTuple):
    """One context with n ways to go on, of which one is right."""

    id: str
    text: str
    choices: tuple[str, ...]
    label: int | None
    """Index into `choices`."""
    place: str


class WordsInput(NamedTuple):
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


class Answer(NamedTuple):
    """An accepted answer; `start` is its first character in the context."""

    text: str
    start: int


class QuestionInput(NamedTuple):
    """A question about a context."""

    id: str
    question: str
    context: str
    answers: tuple[Answer, ...] | None
    """() where the file says that there is no answer; None where it says nothing."""
    place: str


Input = TextInput | ChoiceInput | WordsInput | QuestionInput
