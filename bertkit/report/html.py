"""Rendering of self-contained HTML pages from `templates/` by Jinja2."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any

import jinja2
from markupsafe import Markup


@cache
def template_environment() -> jinja2.Environment:
    """Return the environment for this package's templates, which escapes every value."""
    made = jinja2.Environment(
        loader=jinja2.PackageLoader("bertkit.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters["cell"] = cell_text
    made.globals["source"] = template_source
    return made


def template_source(name: str) -> Markup:
    """Return a file of `templates/` without rendering it, such as a style sheet or script."""
    return Markup((files("bertkit.report") / "templates" / name).read_text(encoding="utf-8"))  # noqa: S704


def render_page(template: str, **values: Any) -> str:
    """Render a template as a whole page."""
    return template_environment().get_template(template).render(values)


def field_title(name: str) -> str:
    """Return a field's name with spaces instead of underscores."""
    return name.replace("_", " ")


def flatten_fields(value: Any, name: str = "") -> list[tuple[str, Any]]:
    """Flatten nested JSON into (dotted name, value) pairs, except for lists of plain values."""
    if isinstance(value, dict):
        children = list(value.items())
    elif isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
        children = [(str(i), item) for i, item in enumerate(value)]
    else:
        return [(name, value)]
    return [
        row
        for key, item in children
        for row in flatten_fields(item, f"{name}.{key}" if name else key)
    ]


def cell_text(value: Any) -> str:
    """Format a value for a table: text unchanged, floats to six digits, other values as JSON."""
    if value is None:
        return "–"
    if isinstance(value, str):
        return value
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        return ", ".join(cell_text(item) for item in value)
    return json.dumps(value, ensure_ascii=False)
