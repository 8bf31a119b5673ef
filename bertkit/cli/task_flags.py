"""Flags of the task types: those of their columns and windows, made from the task modules.

Each task type has different options. A command takes the flags of all task types, and those that
were given become the options of its task type.
"""

from __future__ import annotations

from dataclasses import field, fields, make_dataclass
from typing import Annotated, Any, get_type_hints

from cyclopts import Parameter
from docstring_parser import parse_from_object

from bertkit.tasks.types import TASKS


def flags_of(name: str, title: str) -> Any:
    """Return a dataclass with the options of all task types' `name`, which are None by default."""
    texts: dict[str, dict[str, list[str]]] = {}
    types: dict[str, Any] = {}
    for task in TASKS.values():
        options = getattr(task, name)
        hints = get_type_hints(options)
        described = {
            param.arg_name: param.description or ""
            for kind in reversed(options.__mro__[:-1])
            for param in parse_from_object(kind).params
        }
        for option in fields(options):
            types[option.name] = hints[option.name]
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
        hint: Any = types[option_name] | None
        hint = Annotated[hint, parameter]
        made.append((option_name, hint, field(default=None)))
    flags = make_dataclass(title, made, frozen=True, kw_only=True)
    flags.__module__ = __name__
    return flags


ColumnFlags = flags_of("columns", "ColumnFlags")
WindowFlags = flags_of("windows", "WindowFlags")
NO_COLUMNS, NO_WINDOWS = ColumnFlags(), WindowFlags()


def set_flags(flags: Any) -> dict[str, Any]:
    """Return the flags that were set, by name."""
    return {name: value for name, value in vars(flags).items() if value is not None}
