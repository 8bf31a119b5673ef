"""What the columns of labelled files are called, and how a row becomes an example: by task type."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from bertkit.datasets.conll import conll_sentences
from bertkit.datasets.examples import ChoiceExample, QuestionExample, TextExample, WordsExample
from bertkit.datasets.fields import (
    expand_choices,
    from_json,
    is_empty_choice,
    label_names,
    letter_index,
    row_answers,
    row_number,
    row_tags,
    row_words,
    single_label,
)
from bertkit.datasets.readers import Columns, Reading, RowReader, row_texts
from bertkit.datasets.records import Records
from bertkit.datasets.squad import has_json_lines, is_json, make_question, read_squad
from bertkit.datasets.tabular import Fields, read_rows, value_name
from bertkit.errors import BertkitError
from bertkit.text.lines import TextCounts
from bertkit.text.sources import source_format

ROW_FORMATS = {"csv", "jsonl", "parquet", "huggingface"}
"""Formats in which sentences of tagged words are rows; elsewhere they are one word a line."""
NO_ZERO = "keys of choices taken to count from 0, of which none is (else --first-choice 1), kept"


@dataclass(frozen=True, kw_only=True)
class TextColumns(Columns):
    """Texts or pairs of texts, each with the name of a label; JSON's 1 is "1", true is "true"."""

    text: str = "text"
    """The column of the text."""
    pair: str = ""
    """The column of the second text of a pair."""
    label: str = "label"
    """The column of the label."""
    input_options = ("text", "pair")

    def label_in(self, value: object, place: str) -> str | float | tuple[str, ...] | None:
        """The label that a field holds; None where it is empty."""
        return single_label(value, self.label, place)

    def row_reader(self, reading: Reading) -> RowReader:
        """See `Columns`: a row with an empty text is left out."""
        columns = (self.text, self.pair) if self.pair else (self.text,)

        def example(row: Fields, place: str) -> TextExample | None:
            texts = row_texts(row, columns, place, reading.counts)
            if texts is None:
                return None
            label = self.label_in(row.get(self.label), place) if reading.labelled else None
            return TextExample("", texts[0], texts[1] if self.pair else None, label, place)

        return example


@dataclass(frozen=True, kw_only=True)
class NumberColumns(TextColumns):
    """Texts or pairs of texts, each with a number."""

    def label_in(self, value: object, place: str) -> float | None:
        """The finite number that a field holds; None where it is empty."""
        if value is None or (isinstance(value, str) and not value.strip()):
            return None
        return row_number(value, self.label, place)


@dataclass(frozen=True, kw_only=True)
class LabelSetColumns(TextColumns):
    """Texts or pairs of texts, each with any number of labels.

    The labels are a JSON list of names, or names between separators. An empty field has none.
    """

    separator: str = "|"
    """Between several labels in one field."""

    def __post_init__(self) -> None:
        """Check the separator.

        Raises:
            BertkitError: it is empty.
        """
        if not self.separator:
            raise BertkitError("--separator is empty; give what stands between several labels")

    def label_in(self, value: object, place: str) -> tuple[str, ...] | None:
        """The names that a field holds; None for null."""
        return label_names(value, self.separator, place)


@dataclass(frozen=True, kw_only=True)
class ChoiceColumns(Columns):
    """Texts with several ways to go on or to answer, one of them right.

    A label is the name of a choice's column (where the file has a header), a letter from A or a, or
    an index. A row may have fewer choices than others: empty ones at its end are left off.
    """

    text: str = "text"
    """The column of the context."""
    choices: tuple[str, ...] = ()
    """The columns of the choices, or the one that holds a list of them."""
    label: str = "label"
    """The column of the right choice (a column's name, a letter, or an index)."""
    first_choice: int = -1
    """What the first choice is called where labels are numbers: 0, 1, or -1 to decide by the
    training file."""

    @property
    def inputs(self) -> tuple[str, ...]:
        """See `Columns`."""
        return self.text, *self.choices

    @property
    def names(self) -> Sequence[str]:
        """The names by which a key can mean a choice."""
        return self.choices if self.header and len(self.choices) > 1 else ()

    def check(self) -> None:
        """Raise unless there is a column or more, each once, and keys count from 0 or 1."""
        if len(set(self.choices)) != len(self.choices) or not self.choices:
            raise BertkitError(
                f"choices need two columns or more, each once, or one of lists, not "
                f"{', '.join(self.choices) or 'none'}; name them: --choices A B ..."
            )
        if self.first_choice not in (-1, 0, 1):
            raise BertkitError(f"keys of choices count from 0 or 1, not from {self.first_choice}")

    def fitted(self, path: str | Records, counts: TextCounts) -> Self:
        """See `Columns`: whether keys count from 0 or 1 is decided by the training file."""
        if self.first_choice >= 0:
            return self
        return replace(self, first_choice=self.lowest_key(path, counts))

    def lowest_key(self, path: str | Path | Records, counts: TextCounts) -> int:
        """Whether the keys of a file count from 0 or from 1; the file is read for it.

        From 1 where the file shows that it means so: most of its keys are letters (as in ARC,
        which mixes "A" and "1"), or no key is 0 and one is the number of choices of its own row.
        `counts` is told where no key is 0 and nothing shows that they count from 1.

        Raises:
            BertkitError: see `read`.
        """
        self.check()
        keys = letters = zeros = lasts = 0
        counted = ""  # where the first key that is a number stands
        columns = [*self.choices, self.label]
        for place, row in read_rows(
            path, TextCounts(), self.format, header=self.header, columns=columns
        ):
            key = value_name(row[self.label])
            spread, own = expand_choices(row, self.choices, place)
            keys += bool(key)
            letters += letter_index(key) >= 0
            if key.isdecimal() and key not in self.names:
                counted = counted or place
                zeros += key == "0"
                empty = any(is_empty_choice(spread[name]) for name in own)
                lasts += key == str(len(own)) and not empty
        if 2 * letters > keys or (lasts > 0 and not zeros):
            return 1
        if counted and not zeros:
            counts.note(NO_ZERO, counted)
        return 0

    def row_reader(self, reading: Reading) -> RowReader:
        """See `Columns`: a row is left out if a text is empty or its key is out of range."""
        self.check()
        first = self.first_choice
        if first < 0:
            first = self.lowest_key(reading.path, reading.counts) if reading.labelled else 0

        def example(row: Fields, place: str) -> ChoiceExample | None:
            spread, own = expand_choices(row, self.choices, place)
            if len(own) < 2:
                reading.counts.note(f"fewer than two '{self.choices[0]}'", place)
                return None
            texts = row_texts(spread, (self.text, *own), place, reading.counts)
            if texts is None:
                return None
            key = value_name(row.get(self.label)) if reading.labelled else ""
            index = self.index_of(key, first)
            if key and not 0 <= index < len(own):
                reading.counts.note("label out of range", place)
                return None
            if first and key.isdecimal() and key not in self.names:
                reading.counts.note("key counted from 1, kept", place)
            return ChoiceExample("", texts[0], tuple(texts[1:]), index if key else None, place)

        return example

    def index_of(self, key: str, first: int) -> int:
        """The index of the choice that a key means, be it out of range; -1 for no key."""
        if key in self.names:
            return self.names.index(key)
        if key.isdecimal():
            return int(key[:9]) - first  # nine digits are out of range already
        return letter_index(key)


@dataclass(frozen=True, kw_only=True)
class QuestionColumns(Columns):
    """Questions about contexts, with their answers, in rows or in SQuAD's JSON.

    In rows an answer is a text, which is looked for in the context; an object with `text` and
    `answer_start`, each a value or a list, as in the Hugging Face copies of SQuAD; or a list of
    these. An empty text, an empty list and null say that the context holds no answer.
    """

    question: str = "question"
    """The column of the question."""
    passage: str = "context"
    """The column of the text to answer from."""
    answers: str = "answers"
    """The column of the answers."""
    input_options = ("question", "passage")
    target_option = "answers"

    def in_rows(self, path: str | Path) -> bool:
        """See `Columns`: else it is SQuAD's JSON."""
        path = from_home(path)
        if self.format != "auto":
            return self.format in {*ROW_FORMATS, "tsv"}
        if is_json(path):
            return has_json_lines(path)
        return path.startswith("hf:") or source_format(path, "auto") in {*ROW_FORMATS, "tsv"}

    def read_own_format(self, reading: Reading) -> Iterator[Any]:
        """See `Columns`; SQuAD's JSON is one value, so all of it is held in memory."""
        return iter(read_squad(reading.file, reading.counts, scoring=reading.scoring))

    def row_reader(self, reading: Reading) -> RowReader:
        """See `Columns`: answers are corrected or left out as in `read_squad`."""

        def example(row: Fields, place: str) -> QuestionExample | None:
            texts = row_texts(row, (self.question, self.passage), place, reading.counts)
            if texts is None:
                return None
            golds = None
            if reading.labelled and self.answers in row:
                value = from_json(row[self.answers], str | dict, place)
                golds = row_answers(value, self.answers, place)
            return make_question(
                "", texts[0], texts[1], golds, place, reading.counts, scoring=reading.scoring
            )

        return example


@dataclass(frozen=True, kw_only=True)
class WordColumns(Columns):
    """Sentences with a tag for every word, one a row, or one word a line as in CoNLL's files.

    In rows, words and tags are lists, or stand between spaces. Class numbers of a Hugging Face data
    set become names; other numbers are taken as they are and counted.
    """

    words: str = "tokens"
    """The column of the words, in rows."""
    tags: str = "ner_tags"
    """The column of the tags, in rows."""
    document: str = ""
    """A column that is equal in the rows of a document, which follow each other in one file;
    without one, or null in a row, a sentence is a document of its own."""
    word_column: int = 0
    """The column of the word where each has a line, from 0; -1 is the last."""
    tag_column: int = -1
    """The column of the tag where each word has a line."""
    input_options = ("words", "document")
    target_option = "tags"

    def in_rows(self, path: str | Path) -> bool:
        """See `Columns`: else there is one word a line."""
        if self.format != "auto":
            return self.format in {*ROW_FORMATS, "tsv"}
        path = from_home(path)
        return path.startswith("hf:") or source_format(path, "auto") in ROW_FORMATS

    def read_own_format(self, reading: Reading) -> Iterator[Any]:
        """See `Columns` and `conll_sentences`."""
        return conll_sentences(
            reading.file,
            reading.counts,
            word_column=self.word_column,
            tag_column=self.tag_column if reading.labelled else None,
            untagged_ok=reading.keep_unlabelled,
        )

    def row_reader(self, reading: Reading) -> RowReader:
        """See `Columns`: every word needs a tag, and a row without words is left out."""
        before, number = ("", ""), -1

        def example(row: Fields, place: str) -> WordsExample | None:
            nonlocal before, number
            own = value_name(row[self.document]) if self.document else ""
            here = (place.rpartition(":")[0], own)  # the names of another file are its own
            number += not own or here != before
            before = here
            given = row_words(row[self.words], self.words, place, reading.counts)
            golds = (
                row_tags(row.get(self.tags), self.tags, place, reading.counts)
                if reading.labelled
                else None
            )
            if golds is not None and len(golds) != len(given):
                raise BertkitError(
                    f"{place}: {len(given)} words in '{self.words}' and {len(golds)} tags in "
                    f"'{self.tags}'; give a tag for every word"
                )
            if not given:
                reading.counts.note(f"empty '{self.words}'", place)
                return None
            return WordsExample("", given, golds, number, place)

        return example


def from_home(path: str | Path) -> str:
    """A path with the folder that its ~ stands for, as the readers take it."""
    path = str(path)
    return str(Path(path).expanduser()) if path.startswith("~") else path
