"""Files of one's own by naming columns: which reader takes which file.

Texts and choices stand in CSV, TSV, JSON lines, Parquet and Hugging Face data sets; questions too,
or in SQuAD's JSON; tagged words too, or one word a line as in CoNLL's files.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from bertkit.datasets.classification import read_texts
from bertkit.datasets.conll import conll_sentences
from bertkit.datasets.multiple_choice import lowest_label, read_choices
from bertkit.datasets.questions import read_questions, read_word_rows
from bertkit.datasets.squad import read_squad
from bertkit.datasets.tabular import has_column
from bertkit.errors import BertkitError
from bertkit.files import BLOCK_BYTES
from bertkit.text.documents import optional_library
from bertkit.text.lines import TextCounts
from bertkit.text.sources import DAMAGE, DECOMPRESSORS, open_binary, source_format

T = TypeVar("T")
LONGEST_LINE = 1 << 20
"""Bytes of a row that is looked at."""
ROW_FORMATS = {"csv", "jsonl", "parquet", "huggingface"}
"""In which sentences of tagged words are rows; elsewhere they are one word a line."""


def remember_given(made: type[T]) -> type[T]:
    """A dataclass that knows in `given` which of its fields were."""
    init: Callable[..., None] = made.__init__

    @wraps(init)
    def remember(self: T, **given: Any) -> None:
        init(self, **given)
        self.__dict__["_given"] = frozenset(given)

    made.__init__ = remember  # type: ignore[method-assign,assignment]
    return made


@remember_given
@dataclass(frozen=True, kw_only=True)
class Columns:
    """What the columns of own data are called."""

    text: str = "text"
    """The text; of choose, the context."""
    pair: str = ""
    """The second text of a pair."""
    label: str = "label"
    """The label, the number, or the right choice (a column's name, a letter, or an index)."""
    choices: tuple[str, ...] = ()
    """Of choose: the columns of the choices, or the one that holds a list of them."""
    id: str = ""
    """An identifier; the number of the row where not given."""
    separator: str = "|"
    """Between several labels in one field."""
    format: str = "auto"
    """csv, tsv, jsonl, parquet, huggingface, text (an input on each line, for predict alone), or
    auto."""
    header: bool = True
    """Whether the first row names the columns; where it does not, they are called 0, 1, 2, ..."""
    first_choice: int = -1
    """Of choose: what the first choice is called where labels are numbers: 0, 1, or -1 to decide by
    the training file."""
    question: str = "question"
    """Of answer: the column of the question."""
    passage: str = "context"
    """Of answer: the column of the text to answer from."""
    answers: str = "answers"
    """Of answer: the column of the answers."""
    words: str = "tokens"
    """Of tag, in rows: the column of the words."""
    tags: str = "ner_tags"
    """Of tag, in rows: the column of the tags."""
    document: str = ""
    """Of tag, in rows: a column that is equal in all sentences of a document."""
    word_column: int = 0
    """Of tag, with a word a line: the column of the word, from 0; -1 is the last."""
    tag_column: int = -1
    """Of tag, with a word a line: the column of the tag."""

    def __post_init__(self) -> None:
        """Check the separator.

        Raises:
            BertkitError: there is none.
        """
        if not self.separator:
            raise BertkitError("--separator is empty; give what stands between several labels")

    @property
    def given(self) -> frozenset[str]:
        """The names of what the caller has said; after `dataclasses.replace` all.

        It goes before what a model remembers, be it what it would be anyway.
        """
        return self.__dict__["_given"]


def has_rows(kind: str, path: str, columns: Columns) -> bool:
    """Whether questions or tagged words stand in rows with columns."""
    path = from_home(path)
    if columns.format != "auto":
        return columns.format in {*ROW_FORMATS, "tsv"}
    if kind == "question-answering" and is_json(path):
        return has_json_lines(path)
    found = source_format(path, "auto")
    return (
        path.startswith("hf:")
        or found in ROW_FORMATS
        or (kind == "question-answering" and found == "tsv")
    )


def from_home(path: str) -> str:
    """A path with the folder that its ~ stands for, as the readers take it."""
    return str(Path(path).expanduser()) if path.startswith("~") else path


def is_json(path: str) -> bool:
    """Whether a name ends in .json, under a suffix of compression too."""
    name = PurePosixPath(path.lower())
    return (name.stem if name.suffix in DECOMPRESSORS else name.name).endswith(".json")


def has_json_lines(path: str) -> bool:
    """Whether a file's first line is an object by itself, and not all of SQuAD's JSON."""
    try:
        with open_binary(path) as stream:
            row = json.loads(stream.readline(LONGEST_LINE))
    except (BertkitError, *DAMAGE, ValueError, RecursionError):  # reading it will say why
        return False
    return isinstance(row, dict) and "data" not in row


def end_position(path: str, columns: Columns) -> int | None:
    """The last line of a local, uncompressed file, or the last row of a Parquet file.

    It is what the places of inputs ("file:line") go up to. None where to count lines would take
    long (compressed files, URLs) or places are no lines.
    """
    path = from_home(path)
    if "://" in path or path.startswith("hf:") or not Path(path).is_file():
        return None
    if Path(path).suffix.lower() in DECOMPRESSORS:
        return None
    if source_format(path, columns.format) == "parquet":
        parquet = optional_library("pyarrow.parquet", "Parquet files")
        try:
            return int(parquet.read_metadata(path).num_rows)
        except (OSError, ValueError):  # damaged: reading it will say so
            return None
    with Path(path).open("rb") as file:
        last, lines = b"", 0
        while block := file.read(BLOCK_BYTES):
            lines += block.count(b"\n")
            last = block[-1:]
    return lines + (last != b"\n")


def with_first_choice(kind: str, path: str, columns: Columns, counts: TextCounts) -> Columns:
    """With what numbers as labels mean, decided by the training file; counted where it is open."""
    if kind != "multiple-choice" or columns.first_choice >= 0:
        return columns
    first = lowest_label(
        path,
        choices=columns.choices,
        label=columns.label,
        format=columns.format,
        header=columns.header,
        counts=counts,
    )
    return replace(columns, first_choice=first)


def read_user_file(
    kind: str,
    path: str,
    columns: Columns,
    counts: TextCounts,
    *,
    scoring: bool = False,
    test: bool = False,
) -> Sequence[Any]:
    """The inputs of a file of one's own.

    Args:
        kind: of the task.
        path: the file.
        columns: what they are called.
        counts: of what is skipped.
        scoring: whether the file is only scored, so that gold answers outside of a context stay.
        test: whether labels may be missing, in all rows or in some.

    Raises:
        BertkitError: the file is absent or damaged, or lacks a column.
    """
    named = {"question-answering": columns.answers, "token-classification": columns.tags}.get(
        kind, columns.label
    )
    rows = kind not in {"question-answering", "token-classification"} or has_rows(
        kind, path, columns
    )
    labels = not (test and rows) or has_column(path, named, columns.format, header=columns.header)
    return list(read_any(kind, path, columns, counts, labels=labels, scoring=scoring, test=test))


def read_unlabelled(kind: str, path: str, columns: Columns, counts: TextCounts) -> Iterator[Any]:
    """The inputs of a file to predict for, as they are read; its labels are not.

    All but SQuAD's JSON is read as it is asked for, so that a file may be larger than memory, and
    what is wrong with it is known only when it is come to. Of `counts` that is the end.

    Raises:
        BertkitError: see `read_user_file`.
    """
    return read_any(kind, path, columns, counts, labels=False, scoring=True, test=True)


def read_any(
    kind: str,
    path: str,
    columns: Columns,
    counts: TextCounts,
    *,
    labels: bool,
    scoring: bool,
    test: bool,
) -> Iterator[Any]:
    """The inputs of a file, with labels or without, as they are read."""
    shared: dict[str, Any] = {"id": columns.id, "labelled": labels}
    shared |= {"format": columns.format, "header": columns.header}
    if kind == "question-answering" and not has_rows(kind, path, columns):
        return iter(read_squad(path, counts, scoring=scoring))
    if kind == "question-answering":
        shared |= {"question": columns.question, "context": columns.passage, "scoring": scoring}
        return read_questions(path, counts, answer=columns.answers, keep_unlabelled=test, **shared)
    if kind == "token-classification" and not has_rows(kind, path, columns):
        tags = columns.tag_column if labels else None
        return conll_sentences(
            path, counts, word_column=columns.word_column, tag_column=tags, untagged_ok=test
        )
    if kind == "token-classification":
        shared |= {"words": columns.words, "tags": columns.tags, "document": columns.document}
        return read_word_rows(path, counts, keep_unlabelled=test, **shared)
    shared |= {"text": columns.text, "label": columns.label, "keep_unlabelled": test}
    if kind == "multiple-choice":
        first = None if columns.first_choice < 0 else columns.first_choice
        return read_choices(path, counts, choices=columns.choices, first_key=first, **shared)
    return read_texts(
        path, counts, pair=columns.pair, kind=kind, separator=columns.separator, **shared
    )
