"""The page of the command line, `commands.md`, made from the commands themselves.

python -m docs.commands    rewrite it; a test compares it with the code and with `--help`
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cyclopts import App
from cyclopts.argument import Argument

from bertkit.cli.app import application
from bertkit.training.recipe import PretrainRecipe

PAGE = Path(__file__).with_name("commands.md")
HEAD = """# Commands

This page lists every command with every flag; `python -m docs.commands` generates it from the code.
`bertkit COMMAND --help` shows the same, and also the fields of a recipe if the command takes one;
[recipes](howto-corpus.md) describes those. `OMP_NUM_THREADS=N bertkit ...` computes with N
threads; the default is the number of cores (`demo` always computes with one). Bold arguments are
required. Tab completes commands and flags after `bertkit --install-completion`.
"""
RECIPE = {field.name for field in dataclasses.fields(PretrainRecipe)}
"""Sections of a recipe: flags such as --training.seed are left to recipes.md."""
KINDS = {"Path": "PATH", "str": "TEXT", "int": "NUMBER", "float": "NUMBER"}


def every_command() -> Iterator[tuple[str, App]]:
    """Yield every command with its full name, subcommands too."""
    app = application()
    for name in app:
        if not name.startswith("-"):
            yield name, app[name]
            for inner in app[name]:
                if not inner.startswith("-"):
                    yield f"{name} {inner}", app[name][inner]


def description(command: Any) -> str:
    """A function's docstring without its parameters."""
    text = inspect.getdoc(command) or ""
    return re.split(r"\n+Args:\n", text)[0].strip()


def is_switch(argument: Argument) -> bool:
    """Whether nothing follows the flag."""
    return "bool" in str(argument.hint)


def placeholder(argument: Argument) -> str:
    """What follows a flag: PATH, NUMBER ..., and so on; nothing for a switch."""
    if is_switch(argument):
        return ""
    names = re.findall(r"Path|str|int|float", str(argument.hint))
    kind = KINDS[names[0]] if names else "TEXT"
    return kind + (" ..." if "tuple" in str(argument.hint) else "")


def default_of(argument: Argument) -> str:
    """The value where a flag is not given; empty where that is nothing."""
    value = argument.field_info.default
    if value is inspect.Parameter.empty or value in (None, "", ()) or isinstance(value, bool):
        return "" if value is not True else "on"
    return f"`{' '.join(map(str, value)) if isinstance(value, tuple) else value}`"


def rows(app: App) -> Iterator[tuple[str, str, str]]:
    """(flag or place, meaning, default) of everything that a command takes."""
    sections = set()
    for argument in app.assemble_argument_collection(parse_docstring=True):
        section, _, field = argument.name.removeprefix("--").partition(".")
        if field and section in RECIPE:
            sections.add(section)
        elif argument.show:
            meaning = " ".join(str(argument.parameter.help or "").split())
            yield (
                named(argument),
                meaning.replace("|", "\\|"),
                default_of(argument).replace("|", "\\|"),
            )
    if sections:
        yield "`--SECTION.FIELD VALUE`", "Every field of a [recipe](howto-corpus.md).", ""


def named(argument: Argument) -> str:
    """An argument as it is written: its place in capitals, or its flags."""
    is_place = argument.index is not None
    names = list(argument.names if is_switch(argument) else argument.names[:1])
    names = [argument.name.removeprefix("--").upper()] if is_place else names
    text = " ".join([" / ".join(names), "" if is_place else placeholder(argument)]).strip()
    several = is_place and "tuple" in str(argument.hint)  # of which there has to be one
    text += " ..." if several else ""
    return f"**`{text}`**" if argument.required or several else f"`{text}`"


def sections_of_page() -> Iterator[str]:
    """The page, one command at a time."""
    yield HEAD
    for name, app in every_command():
        level = "###" if " " in name else "##"
        yield f"{level} {name}\n"
        if app.default_command is None:
            yield f"{app.help}\n"
            continue
        yield f"{description(app.default_command)}\n"
        table = ["| what | meaning | default |", "| --- | --- | --- |"]
        yield "\n".join([*table, *(f"| {' | '.join(row)} |" for row in rows(app))]) + "\n"


def page() -> str:
    """The content of commands.md."""
    return "\n".join(sections_of_page())


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
