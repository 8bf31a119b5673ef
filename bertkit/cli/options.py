"""Flags that several commands share, each documented once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, ArgumentCollection, CycloptsError, Group, Parameter
from cyclopts.config import Dict

from bertkit.config import as_json, read_recipe
from bertkit.errors import BertkitError

FLATTEN = Parameter(name="*")
"""The mark for a dataclass parameter whose fields become flags of the command."""


def flag_group(title: str) -> Parameter:
    """Return a `FLATTEN` whose flags have a box of their own in --help, below those without."""
    return Parameter(name="*", group=Group.create_ordered(title))


def shown_default(value: Any) -> str | None:
    """Return a default as it is given on the command line; None if there is nothing to show."""
    if value is None or value is False or value in ("", ()):
        return None
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


FLAGS = Parameter(consume_multiple=True, negative_iterable=(), show_default=shown_default)
"""The behaviour of every flag: `--phases.steps 7 8` gives both numbers."""


def fill_from(
    recipe: str, app: App, commands: tuple[str, ...], arguments: ArgumentCollection
) -> None:
    """Fill the flags of a pre-training recipe that were not given from its file."""
    from bertkit.training.recipe import PretrainRecipe

    values = as_json(read_recipe(PretrainRecipe, recipe))
    Dict(values, source=recipe, use_commands_as_keys=False)(app, commands, arguments)


def parse(
    app: App, tokens: Sequence[str] | None, explain: Callable[[CycloptsError], str] = lambda _: ""
) -> Any:
    """Run a cyclopts app and turn its errors into one-line errors, which `explain` may word."""
    try:
        return app(tokens, exit_on_error=False, print_error=False)
    except CycloptsError as error:
        raise BertkitError(explain(error) or " ".join(str(error).split())) from None


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
