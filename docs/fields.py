"""Tables of the docs that are made from the code.

Those of recipes.md are made from the recipe's dataclasses and the shipped recipes; in paper.md the
way from the code to the paper is made from the way from the paper to the code.

python -m docs.fields    rewrite them; a test compares
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bertkit.config import read_recipe, shipped_recipes
from bertkit.model.heads import count_parameters
from bertkit.training.recipe import PretrainRecipe

PAGES = [Path(__file__).with_name(name) for name in ("recipes.md", "paper.md")]
SECTION = re.compile(r"(<!-- made:(\w+) -->\n).*?(<!-- /made -->)", re.DOTALL)
VOCABULARY = 30_522
"""Tokens assumed in the parameter counts: those of the paper's English model."""


def descriptions(kind: type) -> dict[str, str]:
    """Field → the docstring below it, as one line."""
    [definition] = ast.parse(inspect.getsource(kind)).body
    assert isinstance(definition, ast.ClassDef)
    found = {}
    for statement, following in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            assert isinstance(following, ast.Expr), "each field has a docstring"
            found[statement.target.id] = " ".join(ast.literal_eval(following.value).split())
    return found


def shown(value: Any) -> str:
    """A value as it stands in TOML."""
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(shown, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    return f"{value:_}" if isinstance(value, int) else str(value)


def field_rows() -> Iterator[tuple[str, ...]]:
    """Every field of a recipe with its default."""
    yield "field", "default", "meaning"
    yield "---", "---", "---"
    recipe = PretrainRecipe()
    for section in dataclasses.fields(recipe):
        settings = getattr(recipe, section.name)
        texts = descriptions(type(settings))
        for field in dataclasses.fields(settings):
            default = shown(getattr(settings, field.name))
            yield f"`{section.name}.{field.name}`", f"`{default}`", texts[field.name]


def recipe_rows() -> Iterator[tuple[str, ...]]:
    """The shipped recipes, the smallest network first."""
    yield "recipe", "layers x width", "parameters", "lengths", "updates", "batches", "peak rate"
    yield ("---",) * 7
    recipes = {name: read_recipe(PretrainRecipe, name) for name in shipped_recipes()}
    counts = {
        name: count_parameters(recipe.model.config(VOCABULARY)) for name, recipe in recipes.items()
    }
    for name in sorted(recipes, key=lambda name: (counts[name], name)):
        recipe = recipes[name]
        phases = recipe.phases
        yield (
            f"`{name}`",
            f"{recipe.model.num_hidden_layers} x {recipe.model.hidden_size}",
            f"{counts[name]:,}",
            *(
                ", ".join(f"{number:,}" for number in numbers)
                for numbers in (phases.lengths, phases.steps, phases.batch_sizes)
            ),
            f"{recipe.training.learning_rate:g}",
        )


def section_rows() -> Iterator[tuple[str, ...]]:
    """Every file that the paper's sections lead to, and what its docstring begins with."""
    yield "file", "sections", "what it is"
    yield ("---",) * 3
    text = Path(__file__).with_name("paper.md").read_text(encoding="utf-8")
    found: dict[str, list[str]] = {}
    rows = re.findall(r"^\| ([\w.]+) \| [^|]* \| `(bertkit/[^`]+)` \|", text, re.MULTILINE)
    for part, file in rows:
        found.setdefault(file, []).append(part)
    for file, parts in sorted(found.items()):
        source = (Path(__file__).parents[1] / file).read_text(encoding="utf-8")
        first = (ast.get_docstring(ast.parse(source)) or "").partition("\n\n")[0]
        what = " ".join(first.split()).replace("|", "\\|")
        yield f"`{file}`", ", ".join(dict.fromkeys(parts)), what


TABLES = {"fields": field_rows, "recipes": recipe_rows, "sections": section_rows}


def filled(text: str) -> str:
    """The page with its tables made anew."""

    def table(found: re.Match[str]) -> str:
        lines = "".join(f"| {' | '.join(row)} |\n" for row in TABLES[found[2]]())
        return f"{found[1]}{lines}{found[3]}"

    return SECTION.sub(table, text)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")
