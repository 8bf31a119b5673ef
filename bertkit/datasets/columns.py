"""The column names of labelled files, and how a row becomes an example, for each task type."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from bertkit.datasets.conll import conll_sentences
from bertkit.datasets.examples import ChoiceExample, QuestionExample, TextExample, WordsExample
from bertkit.datasets.fields import (
    choice_key,
    expand_choices,
    is_empty_choice,
    label_names,
    letter_index,
    row_answers,
    row_number,
    row_tags,
    row_words,
    single_label,
)
from bertkit.datasets.image_columns import ALIGNED, LABELS_GIVEN, ImageColumns
from bertkit.datasets.readers import Columns, Reading, RowReader, row_texts
from bertkit.datasets.records import Records
from bertkit.datasets.squad import has_json_lines, make_question
from bertkit.datasets.tabular import Fields, numbered_rows
from bertkit.errors import BertkitError
from bertkit.files import from_home
from bertkit.text.lines import TextCounts, value_name
from bertkit.text.sources import extension, folder_files, source_format

ROW_FORMATS = {"csv", "jsonl", "parquet", "huggingface"}
"""Formats with one tagged sentence per row; the others have one word per line."""
NO_ZERO = "keys of choices count from 0, but none is 0 (if from 1, give --first-choice 1), kept"


@dataclass(frozen=True, kw_only=True)
class TextColumns(ImageColumns):
    """Columns of texts or text pairs with one label name each; JSON's 1 is "1", true is "True"."""

    text: str = "text"
    """The column of the text."""
    pair: str = ""
    """The column of the second text of a pair."""
    label: str = "label"
    """The column of the label."""
    input_options = ("text", "pair", "image_column")
    has_image_tasks = True

    def __post_init__(self) -> None:
        """Check the options of images, and that a text has a second text or an image.

        Raises:
            BertkitError: it has both (code "image-pair"), or see `ImageColumns`.
        """
        super().__post_init__()
        if self.image_column and self.pair:
            raise BertkitError(
                "--pair and --image-column cannot be combined: the model has two segments, and an "
                "image takes the first; join the two texts in one column",
                code="image-pair",
            )

    @property
    def target(self) -> str:
        """See `Columns`; the image itself if the task is to find its text."""
        return self.label if self.image_task == LABELS_GIVEN else self.image_column

    def label_in(self, value: object, place: str) -> str | float | tuple[str, ...] | None:
        """Return the label in a field, or None if the field is empty."""
        if self.image_task != LABELS_GIVEN:
            return ALIGNED
        return single_label(value, self.label, place)

    def row_reader(self, reading: Reading) -> RowReader:
        """See `Columns`; a row with an empty text is left out."""
        columns = (self.text, self.pair) if self.pair else (self.text,)
        image_of = self.image_reader(reading)

        def example(row: Fields, place: str) -> TextExample | None:
            texts = row_texts(row, columns, place, reading.counts)
            if texts is None:
                return None
            image = image_of(row, place)
            if image is None and self.image_column:
                return None
            label = self.label_in(row.get(self.label), place) if reading.labelled else None
            return TextExample("", texts[0], texts[1] if self.pair else None, label, place, image)

        return example


@dataclass(frozen=True, kw_only=True)
class NumberColumns(TextColumns):
    """The column names of a regression data set: a text or a text pair, and its number."""

    has_image_tasks = False

    def label_in(self, value: object, place: str) -> float | None:
        """Return the finite number in a field, or None if the field is empty."""
        if value is None or (isinstance(value, str) and not value.strip()):
            return None
        return row_number(value, self.label, place)


@dataclass(frozen=True, kw_only=True)
class LabelSetColumns(TextColumns):
    """Columns of texts or text pairs with any number of labels each.

    The labels are a JSON list of names, or names between separators. An empty field holds no label.
    """

    separator: str = "|"
    """What separates several labels in one field."""
    has_image_tasks = False

    def __post_init__(self) -> None:
        """Check the separator.

        Raises:
            BertkitError: the separator is empty; see also `TextColumns`.
        """
        super().__post_init__()
        if not self.separator:
            raise BertkitError("--separator is empty; give the text that separates the labels")

    def label_in(self, value: object, place: str) -> tuple[str, ...] | None:
        """Return the label names in a field, or None for null."""
        return label_names(value, self.separator, place)


@dataclass(frozen=True, kw_only=True)
class ChoiceColumns(ImageColumns):
    """Columns of texts with several continuations or answers, of which one is right.

    A label is the name of a choice's column (if the file has a header), a letter from A or a, or an
    index. A row may have fewer choices than others: empty choices at its end are dropped.
    """

    text: str = "text"
    """The column of the context."""
    choices: tuple[str, ...] = ()
    """The columns of the choices, or the one column that holds a list of them."""
    label: str = "label"
    """The column of the right choice (a column's name, a letter, or an index)."""
    first_choice: int = -1
    """The number of the first choice if labels are numbers: 0, 1, or -1 to infer it from the
    training file."""
    input_options = ("text", "choices", "image_column")

    @property
    def inputs(self) -> tuple[str, ...]:
        """See `Columns`."""
        image = (self.image_column,) if self.image_column else ()
        return self.text, *self.choices, *image

    @property
    def names(self) -> Sequence[str]:
        """The column names that a label may use to name a choice."""
        return self.choices if self.header and len(self.choices) > 1 else ()

    def check(self) -> None:
        """Check that at least one column is named, each once, and that keys count from 0 or 1."""
        if len(set(self.choices)) != len(self.choices) or not self.choices:
            raise BertkitError(
                f"choices need two columns or more, each once, or one of lists, not "
                f"{', '.join(self.choices) or 'none'}; name them: --choices A B ..."
            )
        if self.first_choice not in (-1, 0, 1):
            raise BertkitError(f"keys of choices count from 0 or 1, not from {self.first_choice}")

    def fitted(self, path: str | Records, counts: TextCounts) -> Self:
        """See `Columns`; whether keys count from 0 or 1 is inferred from the training file."""
        if self.first_choice >= 0:
            return self
        return replace(self, first_choice=self.lowest_key(path, counts))

    def lowest_key(self, path: str | Path | Records, counts: TextCounts, optional: str = "") -> int:
        """Return the number from which the keys of a file count, 0 or 1; -1 if no key is a number.

        They count from 1 if the file shows it: most of its keys are letters (as in ARC, which mixes
        "A" and "1"), or no key is 0 and some key equals the number of choices in its row. If no key
        is 0 but nothing shows that they count from 1, `counts` records a note.

        Raises:
            BertkitError: a number names no column, but other numbers do; see also `read`.
        """
        self.check()
        keys = letters = zeros = lasts = 0
        numbers_are_names = any(map(str.isdecimal, self.names))
        counted = ""  # location of the first numeric key
        columns = self.needed(labelled=True)
        for _, place, row in numbered_rows(
            path, TextCounts(), self.format, header=self.header, columns=columns, optional=optional
        ):
            key = choice_key(row.get(self.label), self.names)
            spread, own = expand_choices(row, self.choices, place)
            keys += bool(key)
            letters += letter_index(key) >= 0
            if key.isdecimal() and key not in self.names:
                if numbers_are_names:
                    raise BertkitError(
                        f"{place}: no choice is called {key}; for indices, give --first-choice"
                    )
                counted = counted or place
                zeros += key == "0"
                empty = any(is_empty_choice(spread[name]) for name in own)
                lasts += key == str(len(own)) and not empty
        if not counted:
            return -1
        if 2 * letters > keys or (lasts > 0 and not zeros):
            return 1
        if not zeros:
            counts.note(NO_ZERO, counted)
        return 0

    def row_reader(self, reading: Reading) -> RowReader:
        """See `Columns`; a row is left out if a text is empty or its key is out of range."""
        self.check()
        image_of = self.image_reader(reading)
        first = self.first_choice
        if first < 0 and reading.labelled:
            optional = self.label if reading.keep_unlabelled else ""
            first = self.lowest_key(reading.path, reading.counts, optional)

        def example(row: Fields, place: str) -> ChoiceExample | None:
            spread, own = expand_choices(row, self.choices, place)
            if len(own) < 2:
                reading.counts.note(f"fewer than two '{self.choices[0]}'", place)
                return None
            texts = row_texts(spread, (self.text, *own), place, reading.counts)
            if texts is None:
                return None
            image = image_of(row, place)
            if image is None and self.image_column:
                return None
            key = choice_key(row.get(self.label), self.names) if reading.labelled else ""
            index = self.choice_index(key, first)
            if key and not 0 <= index < len(own):
                reading.counts.note("label out of range", place)
                return None
            if first > 0 and key.isdecimal():
                reading.counts.note("key counted from 1, kept", place)
            right = index if key else None
            return ChoiceExample("", texts[0], tuple(texts[1:]), right, place, image)

        return example

    def choice_index(self, key: str, first: int) -> int:
        """Return the index of the choice that a key names, possibly out of range; -1 for no key."""
        if first >= 0 and key.isdecimal():
            return int(key[:9]) - first  # any nine-digit number is out of range
        return self.names.index(key) if key in self.names else letter_index(key)


def holds_rows(path: str, formats: Collection[str]) -> bool:
    """Return whether a path is a data set, or a file or folder with a file of such a format."""
    files = folder_files(path) if Path(path).is_dir() else [path]
    return path.startswith("hf:") or any(source_format(file, "auto") in formats for file in files)


@dataclass(frozen=True, kw_only=True)
class QuestionColumns(Columns):
    """Columns of questions, contexts and answers, in rows or in SQuAD's JSON.

    In rows, an answer is a text, which is searched for in the context; an object with `text` and
    `answer_start`, each a value or a list, as in the Hugging Face copies of SQuAD; or a list of
    these. An empty text, an empty list or null means that the context holds no answer.
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
        """See `Columns`; a file without rows is the JSON of SQuAD or TriviaQA."""
        path = from_home(path)
        if self.format != "auto":
            return self.format in {*ROW_FORMATS, "tsv"}
        ending = extension(path)
        if ending == ".json" or (not ending and Path(path).is_file()):
            return has_json_lines(path)
        return holds_rows(path, {*ROW_FORMATS, "tsv"})

    def read_own_format(self, reading: Reading) -> Iterator[Any]:
        """See `Columns`; a file's JSON is one value, so the whole file is held in memory."""
        from bertkit.datasets.triviaqa import read_questions

        return iter(read_questions(reading.file, reading.counts, scoring=reading.scoring))

    def row_reader(self, reading: Reading) -> RowReader:
        """See `Columns`; answers are corrected or left out as in `read_squad`."""

        def example(row: Fields, place: str) -> QuestionExample | None:
            texts = row_texts(row, (self.question, self.passage), place, reading.counts)
            if texts is None:
                return None
            golds = None
            if reading.labelled and self.answers in row:
                golds = row_answers(row[self.answers], self.answers, place)
            return make_question(
                "", texts[0], texts[1], golds, place, reading.counts, scoring=reading.scoring
            )

        return example


@dataclass(frozen=True, kw_only=True)
class WordColumns(Columns):
    """Columns of tagged sentences: one sentence per row, or one word per line as in CoNLL's files.

    In rows, words and tags are lists or are separated by spaces. Class numbers of a Hugging Face
    data set become names; other numbers are kept as tags and counted.
    """

    words: str = "tokens"
    """The column of the words, in rows."""
    tags: str = "ner_tags"
    """The column of the tags, in rows."""
    document: str = ""
    """A column with the same value in all rows of a document, which must be adjacent in one file;
    without the column, or if a row has null in it, each sentence is a document."""
    word_column: int = 0
    """The column of the word in files with one word per line, from 0; -1 is the last."""
    tag_column: int = -1
    """The column of the tag in files with one word per line."""
    input_options = ("words", "document")
    target_option = "tags"

    def in_rows(self, path: str | Path) -> bool:
        """See `Columns`; a file without rows has one word per line."""
        if self.format != "auto":
            return self.format in {*ROW_FORMATS, "tsv"}
        return holds_rows(from_home(path), ROW_FORMATS)

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
        """See `Columns`; every word needs a tag, and a row without words is left out."""
        before, number = ("", ""), -1

        def example(row: Fields, place: str) -> WordsExample | None:
            nonlocal before, number
            own = value_name(row[self.document]) if self.document else ""
            here = (place.rpartition(":")[0], own)  # document names are per file
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
