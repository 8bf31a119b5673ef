"""Recipes: TOML files that are read into frozen dataclasses.

A recipe may say `extends = "base"`, the name of another recipe or a path beside it, whose values
it then changes. Every field of a recipe is also a flag of the command line.
"""

from __future__ import annotations

import dataclasses
import json
import math
import tomllib
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from bertkit.errors import BertkitError, nearest

Recipe = TypeVar("Recipe")


def shipped_recipes() -> dict[str, Path]:
    """Return the recipes that are part of the package, by name."""
    folder = Path(str(resources.files("bertkit"))) / "recipes"
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def find_recipe(name: str, beside: Path = Path()) -> Path:
    """Return the path of a recipe from its path, or from the name of a shipped recipe."""
    if name.endswith(".toml"):
        if (beside / name).is_file():
            return beside / name
        raise BertkitError(f"there is no recipe file {beside / name}; check the path")
    recipes = shipped_recipes()
    if name not in recipes:
        raise BertkitError(
            f"give the path of a .toml file, or another name; no recipe is called "
            f"'{name}'{nearest(name, recipes)}"
        )
    return recipes[name]


def read_recipe(
    kind: type[Recipe], name: str | Path, overrides: Mapping[str, Any] | None = None
) -> Recipe:
    """Read and validate a recipe.

    Args:
        kind: the dataclass of the recipe; every field has a default.
        name: a path that ends in .toml, or the name of a shipped recipe.
        overrides: values by dotted name that replace those of the file, such as
            {"training.learning_rate": 1e-3}.

    Raises:
        BertkitError: there is no such recipe, a field is unknown, or a value is impossible or of
            the wrong type; the message names the file and the field.
    """
    values: dict[str, tuple[Any, str]] = {}
    path, seen = find_recipe(str(name)), set[Path]()
    while True:
        content = read_toml(path)
        base = content.pop("extends", None)
        for field, value in dotted_values(content):
            values.setdefault(field, (value, str(path)))
        seen.add(path.resolve())
        if base is None:
            break
        if not isinstance(base, str):
            raise BertkitError(f"{path}: extends must be the name of a recipe, not {base!r}")
        path = find_recipe(base, path.parent)
        if path.resolve() in seen:
            raise BertkitError(f"{path} extends itself; remove an `extends`")
    values |= {field: (value, "the recipe") for field, value in (overrides or {}).items()}
    return build(kind, values)


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BertkitError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # not UTF-8 or TOML, or too long or deep
        raise BertkitError(f"{path} is not valid TOML: {error}") from None


def field_types(kind: type[Any], prefix: str = "") -> dict[str, Any]:
    """Return the type of each field of a dataclass and of the dataclasses in it, by dotted name."""
    types: dict[str, Any] = {}
    for name, hint in get_type_hints(kind).items():
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            types |= field_types(hint, f"{prefix}{name}.")
        else:
            types[f"{prefix}{name}"] = hint
    return types


def build(kind: type[Recipe], values: Mapping[str, tuple[Any, str]]) -> Recipe:
    """Build a dataclass from (value, where it stands) by dotted name, after checking all types."""
    types = field_types(kind)
    groups: dict[str, dict[str, Any]] = {}
    for name, (value, source) in values.items():
        if name not in types:
            raise BertkitError(f"{source}: there is no field '{name}'{nearest(name, types)}")
        hint = types[name]
        if not matches_type(value, hint):
            expected = TYPE_NAMES[get_origin(hint) or hint]
            raise BertkitError(f"{source}: {name} must be {expected}, not {value!r}")
        group, _, field = name.rpartition(".")
        converted = tuple(value) if get_origin(hint) is tuple else value
        groups.setdefault(group, {})[field] = float(value) if hint is float else converted
    hints = get_type_hints(kind)
    parts = {group: hints[group](**fields) for group, fields in groups.items() if group}
    return kind(**parts, **groups.get("", {}))


def matches_type(value: Any, kind: Any) -> bool:
    """Return whether a TOML or JSON value has a field's type.

    An integer is accepted for a float; NaN is not.
    """
    if get_origin(kind) is tuple:
        return isinstance(value, list | tuple) and all(
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
