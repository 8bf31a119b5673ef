"""The pages made from the code: the commands are those of --help, the reference has every name."""

from __future__ import annotations

import inspect
import io
import re
from importlib import import_module
from typing import get_overloads

import pytest
from rich.console import Console

import bertkit
from bertkit.cli.app import application
from bertkit.predict import predictors as tasks
from docs import commands
from tests.markdown import ROOT, section, table_rows

REFERENCE = (ROOT / "docs/reference.md").read_text()
COMMANDS = (ROOT / "docs/commands.md").read_text()
NAMES = [name for name, _ in commands.every_command()]
WIDE = 1000
"""Columns in which nothing is broken over lines."""


def help_of(command: str, width: int) -> str:
    """What --help prints."""
    file = io.StringIO()
    application().help_print(command.split(), console=Console(width=width, file=file))
    return file.getvalue()


def plain(text: str) -> str:
    """Text without marks, frames and the width of white space."""
    return " ".join(re.sub(r"[`*\\]", "", text.replace("│", " ")).split())


def test_help_fits_into_80_columns() -> None:
    widths = {name: max(map(len, help_of(name, 80).splitlines())) for name in NAMES}
    assert {name: width for name, width in widths.items() if width > 80} == {}


def test_the_page_of_commands_is_made_from_the_code() -> None:
    """If this fails: python -m docs.commands."""
    assert commands.page() == COMMANDS


def test_the_page_of_commands_says_what_help_says(subtests: pytest.Subtests) -> None:
    for command in NAMES:
        with subtests.test(command):
            page_says_what_help_says(command)


def page_says_what_help_says(command: str) -> None:
    printed_help = help_of(command, WIDE)
    level = "###" if " " in command else "##"
    part = re.split(r"\n##+ ", COMMANDS.split(f"\n{level} {command}\n")[1])[0]
    found = table_rows(part) if "\n| " in part else []
    rows = [row for row in found if "SECTION.FIELD" not in row[0]]
    printed = plain(printed_help)
    for what, meaning, *_ in rows:
        assert all(flag in printed for flag in re.findall(r"--[a-z][\w-]*", what)), what
        assert plain(meaning) in printed, (what, meaning)
    shown = set(re.findall(r"--[a-z][\w.-]*", " ".join(row[0] for row in rows)))
    flags = re.findall(r"^│ [* ]*((?:--[a-z][\w.-]* ?)+)", printed_help, re.MULTILINE)
    fields = {flag for text in flags for flag in text.split() if "." in flag}
    printed_flags = {flag for text in flags for flag in text.split()} - fields
    assert printed_flags - {"--help", "--version"} <= shown | places(command)
    assert bool(fields) == ("SECTION.FIELD" in part)


def places(command: str) -> set[str]:
    """Flags that are given by their place as a rule."""
    app = dict(commands.every_command())[command]
    if app.default_command is None:
        return set()
    return {
        name
        for argument in app.assemble_argument_collection()
        if argument.index is not None
        for name in argument.names
    }


def test_the_reference_has_every_public_name() -> None:
    named = set(re.findall(r"auto\w+:: bertkit\.(\w+)$", REFERENCE, re.MULTILINE))
    assert named == set(bertkit.__all__)


def test_the_reference_names_what_is_there() -> None:
    named = re.findall(r"auto(\w+):: ([\w.]+)", REFERENCE)
    assert len(named) > 25
    for kind, path in named:
        if kind == "module":
            assert inspect.getdoc(import_module(path))
            continue
        module, _, name = path.rpartition(".")
        found = getattr(import_module(module), name)
        assert inspect.isfunction(found) == (kind == "function"), path
        assert inspect.getdoc(found), path


def test_what_predictors_return_is_in_the_reference() -> None:
    part = section(REFERENCE, "Fine-tuned models")
    returned = [
        inspect.signature(way).return_annotation
        for kind in PREDICTORS
        for way in get_overloads(kind.__call__)
    ]
    shown = " ".join(map(str, returned))
    shown = shown.replace("TextPrediction", str(tasks.TextPrediction))
    names = set(re.findall(r"\w+(?=[\s\]|]|$)", shown))
    assert {
        "LabelPrediction",
        "ValuePrediction",
        "ChoicePrediction",
        "TaggedText",
        "GivenAnswer",
    } <= names
    for name in names:
        assert getattr(tasks, name).__module__ == tasks.__name__ or f".{name}\n" in part, name


PREDICTORS = sorted(set(tasks.PREDICTORS.values()), key=lambda kind: kind.__name__)
