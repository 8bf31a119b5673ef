"""Reads the documents of the repository: sections, code blocks, commands, tables."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`\n]+)`")
SAVED = re.compile(
    r"[Ss]ave\s+this\s+as\s+`([^`]+)`[^`]*?\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL
)
PROGRAMS = ("bertkit ", "torchrun ", "python ", "pip ", "curl ")
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").glob("*.md")),
]


def blocks(text: str, language: str) -> list[str]:
    """The code blocks of a language; "" for those without one."""
    return [content for name, content in BLOCK.findall(text) if name == language]


def saved_files(text: str) -> dict[str, str]:
    """The files that a page asks its readers to save."""
    return dict(SAVED.findall(text))


def spans(text: str) -> list[str]:
    """The code spans of the sentences."""
    return SPAN.findall(BLOCK.sub("", text))


def commands(text: str) -> list[list[str]]:
    """The command lines of the blocks without a language, as words, comments left out."""
    lines = "".join(blocks(text, "")).replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True) for line in lines if line.startswith(PROGRAMS)]


def table_rows(text: str) -> list[list[str]]:
    """The cells of the rows of all tables, with their headers."""
    lines = [line.strip(" |") for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.split(" | ")] for line in lines]
