"""Flags that several commands share, each documented once.

Each task type has its own options for reading files and for windows. A command takes the flags of
all of them, and those that were given become the options of its task type.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from cyclopts import Parameter

from bertkit.outputs import Written

Device = Annotated[
    str, Parameter(help="auto (CUDA, else Apple's mps, else the CPU), cpu, cuda, cuda:N or mps.")
]
Precision = Annotated[
    str,
    Parameter(help="fp32, bf16, int8 (CPUs only), or auto: bf16 if the device computes it fast."),
]
Column = Annotated[str, Parameter(help="The column of the text, in formats that have columns.")]
Pooling = Annotated[
    str,
    Parameter(
        help="cls, mean, pooler, mean-last-four, or auto: what the model's directory says, else "
        "mean."
    ),
]
VectorFormat = Annotated[
    str, Parameter(help="safetensors, parquet, npy, or auto for the ending of the file.")
]
VectorFile = Written("file", beside=".json")
"""A file of vectors; an index is written beside a .npy file."""


@dataclass(frozen=True, kw_only=True)
class ColumnFlags:
    """What the columns of own data are called."""

    text: str | None = None
    """The text ("text" by default); of multiple choice, the context."""
    pair: str | None = None
    """The second text of a pair."""
    label: str | None = None
    """The label, the number, or the right choice: a column's name, a letter, or an index ("label"
    by default)."""
    choices: tuple[str, ...] | None = None
    """Of multiple-choice: the columns of the choices, or the one that holds a list of them."""
    id: str | None = None
    """An identifier; the number of the row where not given."""
    separator: str | None = None
    """Of multi-label-classification: between several labels in one field ("|" by default)."""
    format: str | None = None
    """csv, tsv, jsonl, parquet, huggingface, text (an input on each line, for predict alone), or
    auto (the default)."""
    header: bool | None = None
    """Whether the first row names the columns, as by default; where it does not, they are called 0,
    1, 2, ..."""
    first_choice: int | None = None
    """Of multiple-choice: what the first choice is called where labels are numbers: 0, 1, or -1
    (the default) to decide by the training file."""
    question: str | None = None
    """Of question-answering: the column of the question ("question" by default)."""
    passage: str | None = None
    """Of question-answering: the column of the text to answer from ("context" by default)."""
    answers: str | None = None
    """Of question-answering: the column of the answers ("answers" by default)."""
    words: str | None = None
    """Of token-classification, in rows: the column of the words ("tokens" by default)."""
    tags: str | None = None
    """Of token-classification, in rows: the column of the tags ("ner_tags" by default)."""
    document: str | None = None
    """Of token-classification, in rows: a column that is equal in all sentences of a document."""
    word_column: int | None = None
    """Of token-classification, with a word a line: the column of the word, from 0 (the default); -1
    is the last."""
    tag_column: int | None = None
    """Of token-classification, with a word a line: the column of the tag; the last by default."""


@dataclass(frozen=True, kw_only=True)
class WindowFlags:
    """How long sequences are; longer inputs become several windows."""

    max_length: int | None = None
    """Tokens of a window; by default 384 in question answering, and all the model can take
    elsewhere."""
    stride: int | None = None
    """Tokens from one window to the next; by default 3/4 of the room, in question answering 128 at
    most."""
    max_question_length: int | None = None
    """Of question-answering: longer questions are cut here, and counted; by default 64 tokens, as
    in the published code, or half of a window where that is less."""
    max_answer_length: int | None = None
    """Of question-answering: the most tokens that an answer has; by default 30, as in the published
    code. Longer ones in the data are counted."""
    context: str | None = None
    """Of token-classification: sentence (the default), or document, where every word sees the
    sentences around its own, too."""


def given(flags: ColumnFlags | WindowFlags) -> dict[str, Any]:
    """The flags that were given, by name."""
    return {name: value for name, value in vars(flags).items() if value is not None}


NO_COLUMNS, NO_WINDOWS = ColumnFlags(), WindowFlags()
