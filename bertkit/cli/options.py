"""Flags that several commands share, each documented once."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, fields, make_dataclass
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, get_type_hints

from cyclopts import App, ArgumentCollection, Group, Parameter
from cyclopts.config import Dict

from bertkit.files import as_json

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


def fill_from_recipe(
    recipe: str, app: App, commands: tuple[str, ...], arguments: ArgumentCollection
) -> None:
    """Fill the flags of a pre-training recipe that were not given from its file."""
    from bertkit.training.recipe import read_recipe

    values = as_json(read_recipe(recipe))
    Dict(values, source=recipe, use_commands_as_keys=False)(app, commands, arguments)


AnyModel = Annotated[
    str, Parameter(help="A model directory, a run, a model of the hub, or a Google checkpoint.")
]
PretrainedModel = Annotated[
    str, Parameter(help="A pre-trained model: a model directory, a run, or a model of the hub.")
]
TunedModel = Annotated[
    str, Parameter(help="A fine-tuned model: a model directory, a run, or a model of the hub.")
]
EmbeddingModel = Annotated[
    str,
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
Top = Annotated[
    int | None,
    Parameter(
        help="For classification: the number of labels whose probabilities are shown; by default "
        "all of up to 100, else 10."
    ),
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
        help="cls, mean, max, lasttoken, mean_sqrt_len, weightedmean, several of them as in "
        "cls+mean, pooler, or auto: what the model's directory says, else mean."
    ),
]


@dataclass(frozen=True, kw_only=True)
class Compute:
    """Where and in which precision a model computes."""

    precision: Precision = "auto"
    device: Device = "auto"


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How text is read."""

    format: str = "auto"
    """Format of the text; auto detects it from file names and first lines."""
    column: Column = "text"
    processes: int = 0
    """The number of worker processes; 0 means one per core. It does not affect the result."""


@dataclass(frozen=True, kw_only=True)
class TextFlags:
    """The flags of a run that starts from text instead of a store."""

    text: tuple[str, ...] = ()
    """Text to train on: files, folders, globs, hf:NAME (instead of --store)."""
    tokenizer: Path | None = None
    """An existing tokenizer for --text; by default that of --init-from, or else a vocabulary is
    learned."""
    vocabulary_size: int = 30522
    """Size of the vocabulary that is learned from --text."""
    cased: bool = False
    """Whether the learned vocabulary keeps upper case and accents."""
    keep_accents: bool | None = None
    """Whether the learned vocabulary keeps accents and marks; see `bertkit learn`."""
    language: Language = "en"
    reading: Annotated[Reading, FLATTEN] = Reading()


AUTO, USUAL_READING, NO_TEXT = Compute(), Reading(), TextFlags()


def task_flags(name: str, title: str, *, without: Collection[str] = ()) -> Any:
    """Return a dataclass with the options of all task types' `name`, which are None by default.

    Each task type has different options. A command takes the flags of all task types, and those
    that were given become the options of its task type.
    """
    from docstring_parser import parse_from_object

    parse = cache(parse_from_object)
    from bertkit.tasks.types import TASKS

    texts: dict[str, dict[str, list[str]]] = {}
    types: dict[str, Any] = {}
    for task in TASKS.values():
        options = getattr(task, name)
        hints = get_type_hints(options)
        described = {
            param.arg_name: param.description or ""
            for kind in reversed(options.__mro__[:-1])
            for param in parse(kind).params
        }
        for option in fields(options):
            if option.name in without:
                continue
            hint: Any = hints[option.name]
            several = isinstance(hint, UnionType) or types.get(option.name) == tuple[str, ...]
            types[option.name] = tuple[str, ...] if several else hint
            by_text = texts.setdefault(option.name, {})
            by_text.setdefault(described.get(option.name, ""), []).append(task.task_type)
    made = []
    for option_name, by_text in texts.items():
        whole = sum(map(len, by_text.values())) == len(TASKS) and len(by_text) == 1
        parts = [
            text if whole else f"For {', '.join(task_types)}: {text[:1].lower()}{text[1:]}"
            for text, task_types in by_text.items()
        ]
        parameter = Parameter(help=" ".join(" ".join(parts).split()))
        optional: Any = Annotated[types[option_name] | None, parameter]
        made.append((option_name, optional, field(default=None)))
    flags = make_dataclass(title, made, frozen=True, kw_only=True)
    flags.__module__ = __name__
    return flags


def set_flags(flags: Any) -> dict[str, Any]:
    """Return the flags that were set, by name."""
    return {name: value for name, value in vars(flags).items() if value is not None}
