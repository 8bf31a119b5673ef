"""Recipes: TOML files whose every field is also a flag.

A recipe is read by the same library that reads the command line, into the same dataclasses. Keys
and types of the file are checked first: the library would round 32.5 to 32.
"""

from __future__ import annotations

import dataclasses
import json
import math
import tomllib
from collections.abc import Collection, Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin

from cyclopts import App, ArgumentCollection, CycloptsError, Parameter
from cyclopts.config import Toml

from bertkit.errors import BertkitError, nearest
from bertkit.files import read_json, write_json

Recipe = TypeVar("Recipe")
LONGEST_DIFFERENCE = 120
"""Characters of one difference in an error."""
SIGNS = (
    *("config.json", "model", "vocab.txt", "manifest.json", "journal.jsonl"),
    *("finetune.json", "reproduce.json", "export.json"),
)
"""What lies in a model, a tokenizer, a store, a run, a fine-tuning, a reproduction or an export."""
FLATTEN = Parameter(name="*")
"""Marks a dataclass parameter whose fields become flags of the command."""
FLAGS = Parameter(consume_multiple=True, negative_iterable=())
"""How every flag behaves: `--phases.steps 7 8` gives both numbers."""


def shipped_recipes() -> dict[str, Path]:
    """Recipes inside the package, by name."""
    folder = Path(str(resources.files("bertkit"))) / "recipes"
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def find_recipe(name: str) -> Path:
    """A recipe's file, from a path or the name of a shipped recipe.

    Raises:
        BertkitError: there is neither.
    """
    if name.endswith(".toml"):
        if Path(name).is_file():
            return Path(name)
        raise BertkitError(f"recipe {name} does not exist")
    recipes = shipped_recipes()
    if name not in recipes:
        raise BertkitError(f"no recipe '{name}'{nearest(name, recipes)}, or give a .toml file")
    return recipes[name]


def recipe_fields(path: Path) -> dict[str, Any]:
    """The values of a recipe by dotted name.

    Raises:
        BertkitError: the file is not TOML.
    """
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BertkitError(f"{path} is not valid TOML: {error}") from None
    fields: dict[str, Any] = {}
    for table, values in tables.items():
        inside = values.items() if isinstance(values, dict) else [("", values)]
        fields |= {f"{table}.{key}".rstrip("."): value for key, value in inside}
    return fields


def matches_type(value: Any, kind: Any) -> bool:
    """Whether a TOML or JSON value is of a field's type.

    An integer will do for a float, NaN will not.
    """
    if get_origin(kind) is tuple:
        return isinstance(value, list) and all(
            matches_type(item, get_args(kind)[0]) for item in value
        )
    if kind is float:
        if isinstance(value, float):
            return not math.isnan(value)
        return type(value) is int
    return type(value) is kind


def check_recipe(path: Path, arguments: ArgumentCollection) -> None:
    """Refuse keys that no field has, and values of another type than the field's.

    Raises:
        BertkitError: names file and key.
    """
    known = {
        argument.name.removeprefix("--").replace("-", "_"): argument.hint
        for argument in arguments
        if "." in argument.name
    }
    for name, value in recipe_fields(path).items():
        if name not in known:
            raise BertkitError(f"{path}: there is no field '{name}'{nearest(name, known)}")
        if not matches_type(value, known[name]):
            kind = getattr(known[name], "__name__", str(known[name]))
            raise BertkitError(f"{path}: {name} must be of type {kind}, not {value!r}")


def fill_from(
    path: Path, app: App, commands: tuple[str, ...], arguments: ArgumentCollection
) -> None:
    """Take the fields of a recipe file for the arguments that were not given."""
    check_recipe(path, arguments)
    Toml(path, use_commands_as_keys=False)(app, commands, arguments)


def read_recipe(kind: type[Recipe], name: str, flags: Sequence[str] = ()) -> Recipe:
    """Read and validate a recipe.

    Args:
        kind: the dataclass that describes it; every field has a default.
        name: a path or the name of a shipped recipe.
        flags: overrides as on the command line, for example ["--training.learning-rate", "1e-3"].

    Raises:
        BertkitError: unknown key, wrong type or impossible value; names file and key.
    """

    def take(*, settings: Annotated[Any, FLATTEN] = kind()) -> Any:  # noqa: B008
        return settings

    path = find_recipe(name)
    take.__annotations__ = {"settings": Annotated[kind, FLATTEN], "return": Any}
    app = App(
        config=lambda *call: fill_from(path, *call),
        result_action="return_value",
        default_parameter=FLAGS,
    )
    app.default(take)
    return parse(app, list(flags))


def parse(app: App, tokens: Sequence[str] | None) -> Any:
    """Run a cyclopts app; its complaints become one-line errors.

    Raises:
        BertkitError: what the user wrote does not fit the command.
    """
    try:
        return app(tokens, exit_on_error=False, print_error=False)
    except CycloptsError as error:
        raise BertkitError(" ".join(str(error).split())) from None


def as_json(settings: Any) -> dict[str, Any]:
    """A dataclass as the JSON values that a file gives back: tuples are lists."""
    return json.loads(json.dumps(dataclasses.asdict(settings), default=str))


def differences(
    before: dict[str, Any],
    after: dict[str, Any],
    prefix: str = "",
    *,
    ignored: Collection[str] = (),
) -> list[str]:
    """Dotted names of the fields in which two recorded settings differ, with both values.

    Args:
        before: JSON values.
        after: JSON values.
        prefix: of the names.
        ignored: dotted names of fields that may differ, or of what holds such fields.
    """
    found: list[str] = []
    for key in sorted(key for key in {*before, *after} if f"{prefix}{key}" not in ignored):
        old, new = before.get(key), after.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            found += differences(old, new, f"{prefix}{key}.", ignored=ignored)
        elif old != new:
            found.append(f"{prefix}{key} {old!r} -> {new!r}")
    return found


def filled(values: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """Recorded settings, with defaults for the fields that did not exist at the time."""
    inner = {
        key: filled(value, defaults[key])
        for key, value in values.items()
        if isinstance(value, dict) and isinstance(defaults.get(key), dict)
    }
    return defaults | values | inner


def refuse_foreign(path: Path, what: str, foreign: Collection[str] = SIGNS) -> None:
    """Refuse a folder of something else, whose files would be mixed with new ones.

    Args:
        path: the file in it that is there where the folder is what it should be.
        what: it should hold, for the error.
        foreign: names that are a sign of something else where the file is not there.

    Raises:
        BertkitError: the file is not there, and one of the signs is.
    """
    for name in foreign if not path.is_file() else ():
        if (path.parent / name).exists():
            raise BertkitError(
                f"{path.parent} has a {name} but no {path.name}, so it does not hold {what}; "
                "choose another --out",
                code="foreign-folder",
            )


def claim_settings(
    path: Path,
    settings: dict[str, Any],
    what: str,
    *,
    ignored: Collection[str] = (),
    foreign: Collection[str] = SIGNS,
    defaults: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Write settings where there are none yet, or make sure that they are the same.

    Args:
        path: the JSON file.
        settings: plain JSON values.
        what: is named in the error, for example "a run".
        ignored: settings that may differ; see `differences`.
        foreign: see `refuse_foreign`.
        defaults: of fields that the file may lack because an earlier version wrote it.

    Returns:
        The settings in the file.

    Raises:
        BertkitError: the file is damaged, or holds other settings; the folder is something else's.
    """
    if not path.is_file():
        refuse_foreign(path, what, foreign)
        write_json(path, settings)
        return settings
    begun = read_json(path)
    if not isinstance(begun, dict):
        raise BertkitError(f"{path} is damaged; choose another --out")
    begun = filled(begun, defaults or {})
    changed = differences(begun, settings, ignored=ignored)
    if changed:
        named = "; ".join(text[:LONGEST_DIFFERENCE] for text in changed[:3])
        raise BertkitError(
            f"{path.parent} holds {what} with other settings ({named}); "
            "choose another --out, or restore the settings to go on"
        )
    return begun
