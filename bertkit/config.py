"""Recipes: TOML files whose every field is also a flag.

Recipes and command lines are read by the same library into the same dataclasses. The keys and types
of a file are checked first, because the library would round 32.5 to 32.
"""

from __future__ import annotations

import dataclasses
import json
import math
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin

from cyclopts import App, ArgumentCollection, CycloptsError, Group, Parameter
from cyclopts.config import Toml

from bertkit.errors import BertkitError, nearest

Recipe = TypeVar("Recipe")
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


def shipped_recipes() -> dict[str, Path]:
    """Return the recipes that are part of the package, by name."""
    folder = Path(str(resources.files("bertkit"))) / "recipes"
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def find_recipe(name: str) -> Path:
    """Return the path of a recipe, given a path or the name of a shipped recipe.

    Raises:
        BertkitError: the file does not exist, or no shipped recipe has that name.
    """
    if name.endswith(".toml"):
        if Path(name).is_file():
            return Path(name)
        raise BertkitError(f"there is no recipe file {name}; check the path")
    recipes = shipped_recipes()
    if name not in recipes:
        raise BertkitError(
            f"give the path of a .toml file, or another name; no recipe is called "
            f"'{name}'{nearest(name, recipes)}"
        )
    return recipes[name]


def recipe_fields(path: Path) -> dict[str, Any]:
    """Return the values of a recipe by dotted name.

    Raises:
        BertkitError: the file cannot be read or is not valid TOML.
    """
    try:
        return dict(dotted_values(tomllib.loads(path.read_text(encoding="utf-8"))))
    except OSError as error:
        raise BertkitError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # not UTF-8 or TOML, or too long or deep
        raise BertkitError(f"{path} is not valid TOML: {error}") from None


def matches_type(value: Any, kind: Any) -> bool:
    """Return whether a TOML or JSON value has a field's type.

    An integer is accepted for a float; NaN is not.
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


TYPE_NAMES = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text in quotes",
    tuple: "a list, as in [1, 2]",
}
"""Types of recipe fields, as messages call them."""


def check_recipe(path: Path, arguments: ArgumentCollection) -> None:
    """Refuse unknown keys and values of the wrong type in a recipe file.

    Raises:
        BertkitError: a key is unknown or a value has the wrong type; names the file and the key.
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
            kind = TYPE_NAMES[get_origin(known[name]) or known[name]]
            raise BertkitError(f"{path}: {name} must be {kind}, not {value!r}")


def fill_from(
    path: Path, app: App, commands: tuple[str, ...], arguments: ArgumentCollection
) -> None:
    """Fill the arguments that were not given on the command line from a recipe file."""
    check_recipe(path, arguments)
    Toml(path, use_commands_as_keys=False)(app, commands, arguments)


def read_recipe(kind: type[Recipe], name: str, flags: Sequence[str] = ()) -> Recipe:
    """Read and validate a recipe.

    Args:
        kind: the dataclass of the recipe; every field has a default.
        name: a path or the name of a shipped recipe.
        flags: overrides, as on the command line: ["--training.learning-rate", "1e-3"].

    Raises:
        BertkitError: a key is unknown, or a value impossible or of the wrong type; names file, key.
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


def parse(
    app: App, tokens: Sequence[str] | None, explain: Callable[[CycloptsError], str] = lambda _: ""
) -> Any:
    """Run a cyclopts app and turn its errors into one-line errors, which `explain` may word.

    Raises:
        BertkitError: the arguments do not fit the command.
    """
    try:
        return app(tokens, exit_on_error=False, print_error=False)
    except CycloptsError as error:
        said = explain(error) or " ".join(str(error).split())
        raise BertkitError(said) from None


def as_json(settings: Any) -> dict[str, Any]:
    """Return a dataclass as the values that reading its JSON file gives: tuples become lists."""
    return json.loads(json.dumps(dataclasses.asdict(settings), default=str))


def dotted_values(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and the value of each field, those of nested objects included."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from dotted_values(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
