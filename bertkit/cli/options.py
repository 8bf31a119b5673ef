"""Flags that several commands share, each documented once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

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
Language = Annotated[
    str,
    Parameter(
        help="Language code for the sentence splitter; `lines` makes each line one sentence."
    ),
]
Pooling = Annotated[
    str,
    Parameter(
        help="cls, mean, pooler, mean-last-four, or auto: what the model's directory says, else "
        "mean."
    ),
]


@dataclass(frozen=True, kw_only=True)
class TextFlags:
    """The flags of a run that starts from text instead of a store."""

    text: tuple[str, ...] = ()
    """Text to train on: files, folders, globs, URLs, hf:NAME (instead of --store)."""
    tokenizer: Path | None = None
    """An existing tokenizer for --text; by default that of --init-from, or else a vocabulary is
    learned."""
    vocabulary_size: int = 30522
    """Size of the vocabulary that is learned from --text."""
    cased: bool = False
    """Whether the learned vocabulary keeps upper case and accents."""
    language: str = "en"
    """Language of --text, for the sentence splitter."""
    format: str = "auto"
    """Format of --text; auto detects it from file names and first lines."""
    column: str = "text"
    """Column of --text that holds the text, in formats that have columns."""
    processes: int = 0
    """Worker processes for preparing --text; 0 uses one for each core."""


NO_TEXT = TextFlags()
