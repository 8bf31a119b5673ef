"""A page of the documentation as the steps that it asks a newcomer to take.

- A block without a language that begins with a program holds commands, one on each line.
- A block after "as `NAME`:" is a file to save.
- A block of Python is run as a program of its own.
- A block of text after commands is what they print; … stands for anything.
- "add `FLAGS` to `bertkit VERB`" says how to make commands small; such flags are added.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SAVED = re.compile(r"as\s+`([^`\s]+)`:\s*\Z")
REHEARSAL = re.compile(r"add\s+`(--[^`]+)`\s+to\s+`(bertkit [^`]+)`")
PROGRAMS = ("bertkit ", "make ", "python3 ", ". ", "pip ", "curl ", ".venv/bin/")
PLACEHOLDER = re.compile(r"(?<![\w\[/.-])[A-Z]{3,}(?:\.[a-z]+)?(?![\w\]])")
"""A word such as CORPUS or TRAIN.csv; [MASK] is none."""


class Step(NamedTuple):
    """One thing to do, or to see."""

    kind: str
    """command, file, python or output."""
    line: int
    """Of the page, from 1."""
    text: str
    """A command line, or a block's content."""
    name: str = ""
    """Of a file."""


def steps_of(page: str) -> list[Step]:
    """Everything that a page asks for, in order.

    Raises:
        ValueError: a block of commands holds a line that is none.
    """
    small = [(prefix, flags) for flags, prefix in REHEARSAL.findall(page)]
    steps: list[Step] = []
    for block in BLOCK.finditer(page):
        language, content = block.groups()
        first = page.count("\n", 0, block.start()) + 2
        saved = SAVED.search(page[: block.start()])
        if saved:
            steps.append(Step("file", first, content, saved[1]))
        elif language == "python":
            steps.append(Step("python", first, content))
        elif language == "text" and any(step.kind == "command" for step in steps):
            steps.append(Step("output", first, content))
        elif not language and content.startswith(PROGRAMS):
            steps += commands_of(content, first, small)
    return steps


def commands_of(content: str, first: int, small: list[tuple[str, str]]) -> Iterator[Step]:
    """The commands of a block; a backslash at a line's end joins it to the next.

    Args:
        content: the block.
        first: the number of its first line.
        small: beginnings of commands, and flags that make them small.
    """
    waiting, begun = "", first
    for number, line in enumerate(content.splitlines(), start=first):
        begun = begun if waiting else number
        waiting += line.strip()
        if waiting.endswith("\\"):
            waiting = waiting[:-1]
            continue
        if waiting and not waiting.startswith(PROGRAMS):
            raise ValueError(f"line {begun} stands among commands and is none: {waiting}")
        if waiting:
            added = [flags for prefix, flags in small if waiting.startswith(prefix)]
            yield Step("command", begun, " ".join([waiting, *added]))
        waiting = ""


def placeholders_of(steps: list[Step]) -> set[str]:
    """The words that stand for something of the reader's own."""
    commands = [step.text for step in steps if step.kind == "command"]
    return {found for text in commands for found in PLACEHOLDER.findall(bare(text))}


def bare(command: str) -> str:
    """A command without its texts for a model, in double quotes, and without its comment."""
    return re.sub(r'"[^"]*"|\s#.*', "", command)


def missing_output(expected: str, printed: str) -> list[str]:
    """The lines of a page's output that no printed line is like."""
    lines = [line.strip() for line in printed.splitlines()]
    missing = []
    for wanted in expected.splitlines():
        parts = [re.escape(part) for part in wanted.strip().split("…")]
        pattern = re.compile(".*".join(parts))
        if wanted.strip() and not any(pattern.fullmatch(line) for line in lines):
            missing.append(wanted)
    return missing
