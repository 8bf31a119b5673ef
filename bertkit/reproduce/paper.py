"""The results that the paper reports (`paper.toml`), and the scales at which its tables are run.

A scale is a TOML file next to this module, or a file of the user's.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, get_origin, get_type_hints

from bertkit.config import TYPE_NAMES, matches_type, read_recipe
from bertkit.datasets.benchmarks import OFFICIAL
from bertkit.errors import BertkitError, nearest
from bertkit.finetuning.settings import Grid
from bertkit.outputs import DATA, TEXT
from bertkit.training.recipe import PretrainRecipe

Size = tuple[int, int, int]
"""The size of a network: layers, width, heads."""


@dataclass(frozen=True)
class Claim:
    """A finding of the paper: one row of a table is better than another in some column.

    "first" and "last" stand for the first and last row or column of our table, since a scale may
    choose its rows and columns.
    """

    text: str
    column: str
    better: str
    worse: str
    argued: bool = False
    """Whether the claim is made in the paper's text, while its table lacks one of the rows."""
    needs_pairs: bool = False
    """Whether the claim is only meaningful if next-sentence prediction was learned."""


@dataclass(frozen=True)
class PaperTable:
    """A table of the paper."""

    key: str
    """The key of the table, such as "table-5" or "figure-5"."""
    title: str
    section: str
    remarks: tuple[str, ...]
    ours: tuple[str, ...]
    """Remarks on how our runs differ."""
    columns: tuple[str, ...]
    rows: Mapping[str, tuple[float, ...]]
    """Row -> the paper's value in each column."""
    claims: tuple[Claim, ...] = ()

    @property
    def name(self) -> str:
        """The name shown to readers, such as "Table 5"."""
        return self.key.replace("-", " ").capitalize()

    def value(self, row: str, column: str) -> float | None:
        """Return the paper's value of a cell, or None if it has none."""
        if row not in self.rows or column not in self.columns:
            return None
        return self.rows[row][self.columns.index(column)]


@cache
def paper_tables() -> dict[str, PaperTable]:
    """Read all tables of the paper: key -> table."""
    text = resources.files("bertkit.reproduce").joinpath("paper.toml").read_text("utf-8")
    return {
        key: PaperTable(
            key=key,
            title=values["title"],
            section=values["section"],
            remarks=tuple(values["remarks"]),
            ours=tuple(values.get("ours", ())),
            columns=tuple(values["columns"]),
            rows={name: tuple(row) for name, row in values["rows"].items()},
            claims=tuple(Claim(**claim) for claim in values.get("claims", ())),
        )
        for key, values in tomllib.loads(text).items()
    }


def find_table(name: str) -> PaperTable:
    """Return a table by its key, or by its number alone ("5")."""
    tables = paper_tables()
    key = f"table-{name}" if name.isdigit() else name.lower()
    if key not in tables:
        hint = nearest(key, tables)
        raise BertkitError(f"the paper has no '{name}'{hint}")
    return tables[key]


@dataclass(frozen=True, kw_only=True)
class TaskScale:
    """The settings with which a task is fine-tuned."""

    batch_size: int = 32
    learning_rate: float = 5e-5
    frozen_learning_rate: float = 0.0
    """The learning rate of the head on a frozen encoder; 0 for `learning_rate`."""
    epochs: int = 3
    train: int = 0
    """The number of training inputs, drawn at random; 0 for all."""
    dev: int = 0
    """The number of dev inputs, drawn at random; 0 for all."""
    max_length: int = 0
    """The number of tokens of a window; 0 for the default of `bertkit finetune`."""
    stride: int = 0
    context: str = "sentence"
    """The context of a word in tagging: sentence or document."""

    def __post_init__(self) -> None:
        """Check that every value is possible.

        Raises:
            ValueError, BertkitError: a value is not; the message names the field.
        """
        rates, epochs = (self.learning_rate,), (self.epochs,)
        Grid(batch_size=(self.batch_size,), learning_rate=rates, epochs=epochs)
        for name in ("frozen_learning_rate", "train", "dev", "max_length", "stride"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be 0 or more, not {getattr(self, name)}")
        if self.context not in ("sentence", "document"):
            raise ValueError(f"context must be sentence or document, not '{self.context}'")


@dataclass(frozen=True, kw_only=True)
class Scale:
    """The networks, schedules and amounts of data with which the tables are run."""

    name: str
    title: str
    recipe: str
    flags: tuple[str, ...]
    """Flags of the recipe, as on the command line."""
    vocabulary_size: int
    cased: bool
    seeds: int
    """The number of fine-tuning seeds."""
    repeated: tuple[str, ...] = ()
    """The networks that are pre-trained for each seed; the others are pre-trained once."""
    sizes: tuple[Size, ...]
    """The network sizes of table 6: layers, width, heads."""
    bases: Mapping[str, Size] = field(default_factory=dict)
    """Table -> the size of its networks, if that is not the recipe's."""
    steps: tuple[int, ...]
    """The numbers of updates after which figure 5 fine-tunes the model."""
    units: int
    """The number of units of table 7's BiLSTM in each direction."""
    remarks: tuple[str, ...]
    """Remarks for the reader of the tables."""
    tasks: Mapping[str, TaskScale]
    stand_ins: Mapping[str, Mapping[str, str]]
    """Table -> column of the paper -> the task that is run instead."""

    def recipe_flags(self, flags: Sequence[str]) -> list[str]:
        """Return the scale's flags followed by a network's flags, which override them."""
        kept: list[str] = []
        dropping = False
        for word in self.flags:
            if word.startswith("--"):
                dropping = word in flags
            if not dropping:
                kept.append(word)
        return [*kept, *flags]

    def task(self, name: str) -> TaskScale:
        """Return the settings with which a task is fine-tuned at this scale."""
        return self.tasks.get(name, self.tasks["default"])


def shipped_scales() -> list[str]:
    """Return the names of the shipped scales, smallest first."""
    return ["tiny", "small", "base", "large"]


def read_scale(name: str) -> Scale:
    """Read a shipped scale by its name, or one from a .toml file."""
    if name.endswith(".toml"):
        path = Path(name)
        if not path.is_file():
            raise BertkitError(f"{path} does not exist; give the name of a scale or its .toml file")
    elif name in shipped_scales():
        path = Path(str(resources.files("bertkit.reproduce"))) / f"{name}.toml"
    else:
        raise BertkitError(f"no scale is called '{name}'{nearest(name, shipped_scales())}")
    try:
        return build_scale(Path(name).stem, tomllib.loads(path.read_text(encoding="utf-8")))
    except KeyError as error:
        raise BertkitError(f"scale {name}: the field {error} is missing") from None
    except (RecursionError, AttributeError, TypeError, ValueError) as error:
        raise BertkitError(f"scale {name}: {error}; see a shipped scale for the fields") from None


def check_names(tasks: Mapping[str, Any], stand_ins: Mapping[str, Mapping[str, str]]) -> None:
    """Refuse names of tasks, tables and columns that do not exist."""
    known, tables = (*OFFICIAL, "squad-sentences"), paper_tables()
    named = [("a task", task, known) for task in tasks]
    for key, columns in stand_ins.items():
        named.append(("a table", key, tuple(tables)))
        own = ("mnli-m",) if key == "figure-5" else tables[key].columns if key in tables else ()
        named += [(f"a column of {key}", column, own) for column in columns]
        named += [("a task", task, known) for task in columns.values()]
    for what, name, choice in named:
        if name not in choice:
            raise ValueError(f"'{name}' is not {what}{nearest(name, choice)}")


def check_types(kind: type, values: Mapping[str, Any], prefix: str) -> None:
    """Refuse values of a scale's file whose type is not that of their field."""
    for name, hint in get_type_hints(kind).items():
        plain = get_origin(hint) in (None, tuple)  # the others are objects, checked by themselves
        if name in values and plain and not matches_type(values[name], hint):
            wanted = TYPE_NAMES[get_origin(hint) or hint]
            raise ValueError(f"{prefix}{name} must be {wanted}, not {values[name]!r}")


def build_scale(name: str, values: dict[str, Any]) -> Scale:
    """Build a scale from the parsed content of its file; a wrong field raises an error."""
    given = values.pop("tasks", {})
    check_types(Scale, values, "")
    for task, own in given.items():
        check_types(TaskScale, own, f"tasks.{task}.")
    default = TaskScale(**given.pop("default", {}))
    known = {one.name for one in fields(Scale)}
    if unknown := sorted(values.keys() - known):
        raise ValueError(f"there is no field '{unknown[0]}'{nearest(unknown[0], known)}")
    for key in ("vocabulary_size", "seeds", "units"):
        if values[key] < 1:
            raise ValueError(f"{key} must be a positive integer, not {values[key]!r}")
    for key in ("sizes", "steps"):
        if not values[key]:
            raise ValueError(f"{key} must not be empty")
    bases = values.get("bases", {})
    for size in (*values["sizes"], *bases.values()):
        if len(size) != 3 or not all(type(n) is int and n > 0 for n in size):
            raise ValueError("each size must be three numbers: layers, width, heads")
    check_names(given, {**{key: {} for key in bases}, **values.get("stand_ins", {})})
    scale = Scale(
        **{
            **values,
            "name": name,
            "flags": tuple(values["flags"]),
            "sizes": tuple(tuple(size) for size in values["sizes"]),
            "bases": {key: tuple(size) for key, size in bases.items()},
            "steps": tuple(values["steps"]),
            "remarks": tuple(values.get("remarks", ())),
            "repeated": tuple(values.get("repeated", ())),
            "tasks": {"default": default}
            | {task: replace(default, **own) for task, own in given.items()},
            "stand_ins": values.get("stand_ins", {}),
        }
    )
    total = read_recipe(PretrainRecipe, scale.recipe, scale.recipe_flags(())).phases.total_steps
    if not all(type(step) is int and 0 < step <= total for step in scale.steps):
        raise ValueError(f"steps must be numbers of updates up to the recipe's {total:,}")
    return scale


@dataclass(frozen=True, kw_only=True)
class Sources:
    """The inputs of a reproduction."""

    text: Annotated[tuple[str, ...], TEXT] = ()
    """Text to pre-train on: files, folders, globs."""
    data: Annotated[Path | None, DATA] = None
    """A folder with the labelled data: glue, squad, swag, conll2003."""
    model: Path | None = None
    """A model to fine-tune instead of the scale's BERT, which is then not pre-trained."""


NO_SOURCES = Sources()
