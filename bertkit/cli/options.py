"""Flags that several commands share, each documented once.

Each task type has different options for reading files and for windows. A command takes the flags of
all task types, and those that were given become the options of its task type.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from bertkit.outputs import TEXT

AnyModel = Annotated[
    Path, Parameter(help="A model directory, a run, a model of the hub, or a Google checkpoint.")
]
PretrainedModel = Annotated[
    Path, Parameter(help="A pre-trained model: a model directory, a run, or a model of the hub.")
]
TunedModel = Annotated[
    Path, Parameter(help="A fine-tuned model: a model directory, a run, or a model of the hub.")
]
EmbeddingModel = Annotated[
    Path,
    Parameter(
        help="A model directory, also of sentence-transformers, a run, or a model of the hub."
    ),
]
Device = Annotated[
    str, Parameter(help="auto (CUDA, else Apple's mps, else the CPU), cpu, cuda, cuda:N or mps.")
]
Precision = Annotated[
    str,
    Parameter(help="fp32, bf16, int8 (CPUs only), or auto: bf16 if the device computes it fast."),
]
NullThreshold = Annotated[
    float | None,
    Parameter(
        help="For question answering: the null odds above which a question gets no answer. The "
        "default is saved with the model; a model of transformers has none and answers every "
        "question."
    ),
]
Format = Annotated[
    str, Parameter(help="Format of the text; auto detects it from file names and first lines.")
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
    str, Parameter(help="safetensors, parquet, npy, or auto: by the file's extension.")
]


@dataclass(frozen=True, kw_only=True)
class ColumnFlags:
    """The column names of your data."""

    text: str | None = None
    """The column of the text ("text" by default); for multiple-choice, of the context."""
    pair: str | None = None
    """The column of the second text of a pair."""
    label: str | None = None
    """The column of the label, the number, or the right choice, given as a column's name, a letter
    or an index ("label" by default)."""
    choices: tuple[str, ...] | None = None
    """For multiple-choice: the columns of the choices, or the one that holds a list of them."""
    image_column: str | None = None
    """The column of an image that is read with the text: the path of a PNG or JPEG, relative to the
    data file; the image's features as a list of vectors; or its key in --image-features."""
    image_features: Annotated[str | None, TEXT] = None
    """A file of image features: .npy (by row number), .safetensors, or .parquet."""
    image_size: int | None = None
    """The side, in pixels, to which pictures are scaled (224 by default)."""
    patch_size: int | None = None
    """The side, in pixels, of the patches into which pictures are cut (16 by default)."""
    image_boxes: bool | None = None
    """The last four numbers of every vector of features are the box of its region: left, top, right
    and bottom, as fractions of the image's width and height."""
    image_network: str | None = None
    """mmbt (images are tokens of BERT) or vilbert (a stream of their own beside BERT); by default
    that of the model, else mmbt."""
    co_layers: tuple[int, ...] | None = None
    """For vilbert: the text's layers, from 0, before which text and image attend to each other; by
    default the upper half."""
    image_task: str | None = None
    """For classification: labels (the default); or, for vilbert and data without labels, whether
    text and image belong together: alignment, or pretraining, which predicts masked tokens and
    regions too."""
    id: str | None = None
    """The column of the ID; by default, the number of the row is the ID."""
    separator: str | None = None
    """For multi-label-classification: the separator of labels in one field ("|" by default)."""
    format: str | None = None
    """csv, tsv, jsonl, parquet, huggingface, text (one input per line, only for predict), or auto
    (the default)."""
    header: bool | None = None
    """Whether the first row names the columns (the default); if it does not, they are called 0, 1,
    2, ..."""
    first_choice: int | None = None
    """For multiple-choice: the number of the first choice if labels are numbers: 0, 1, or -1 (the
    default) to infer it from the training file."""
    question: str | None = None
    """For question-answering: the column of the question ("question" by default)."""
    passage: str | None = None
    """For question-answering: the column of the text to answer from ("context" by default)."""
    answers: str | None = None
    """For question-answering: the column of the answers ("answers" by default)."""
    words: str | None = None
    """For token-classification in rows: the column of the words ("tokens" by default)."""
    tags: str | None = None
    """For token-classification in rows: the column of the tags ("ner_tags" by default)."""
    document: str | None = None
    """For token-classification in rows: a column with the same value in all sentences of a
    document."""
    word_column: int | None = None
    """For token-classification with one word per line: the column of the word, from 0 (the
    default); -1 is the last."""
    tag_column: int | None = None
    """For token-classification with one word per line: the column of the tag; by default the
    last."""


@dataclass(frozen=True, kw_only=True)
class WindowFlags:
    """The length of sequences; longer inputs become several windows."""

    max_length: int | None = None
    """Maximum tokens of a window; by default 384 for question-answering, otherwise the model's
    maximum."""
    stride: int | None = None
    """Tokens from one window to the next; by default 3/4 of the room, for question-answering at
    most 128."""
    max_question_length: int | None = None
    """For question-answering: the maximum tokens of a question; longer ones are cut and counted. By
    default 64, as in the published code, or half of a window if that is less."""
    max_answer_length: int | None = None
    """For question-answering: the maximum tokens of a predicted answer; by default 30, as in the
    published code. Longer answers in the data are counted."""
    context: str | None = None
    """For token-classification: sentence (the default), or document, in which every word also sees
    the surrounding sentences."""


def given(flags: ColumnFlags | WindowFlags) -> dict[str, Any]:
    """Return the flags that were given, by name."""
    return {name: value for name, value in vars(flags).items() if value is not None}


NO_COLUMNS, NO_WINDOWS = ColumnFlags(), WindowFlags()
