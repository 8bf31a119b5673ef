"""Reads the documents of the repository: sections, code blocks, commands, tables."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`\n]+)`")
PROGRAMS = {"bertkit", "make", "python", "python3", "pip"}
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").glob("*.md")),
]


def blocks(text: str, language: str) -> list[str]:
    """The code blocks of a language; "" for those without one."""
    return [content for name, content in BLOCK.findall(text) if name == language]


def section(text: str, title: str) -> str:
    """What stands under a heading of the second level."""
    return text.split(f"\n## {title}\n")[1].partition("\n## ")[0]


def spans(text: str) -> list[str]:
    """The code spans of the sentences."""
    return SPAN.findall(BLOCK.sub("", text))


def commands(text: str) -> list[list[str]]:
    """The command lines of the blocks without a language, as words, comments left out."""
    lines = "".join(blocks(text, "")).replace("\\\n", " ").splitlines()
    split = [shlex.split(line, comments=True) for line in lines]
    return [words for words in split if set(words) & PROGRAMS]
