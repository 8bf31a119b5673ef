"""Text that every Python carries: reference topics and docstrings, read without importing."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from bertkit.training.journal import Console

LIBRARIES = ("numpy", "torch", "matplotlib", "rich", "fsspec")
LARGEST_SOURCE = 400_000
"""Bytes; larger source files are generated tables."""


class Docstring(NamedTuple):
    """One docstring and where it is from."""

    module: str
    family: str
    text: str


def source_files() -> Iterator[tuple[str, Path]]:
    """(module name, source file) of the standard library and of some dependencies, sorted."""
    roots = [(Path(sysconfig.get_paths()["stdlib"]), "")]
    for library in LIBRARIES:
        found = importlib.util.find_spec(library)
        if found is not None and found.origin:
            roots.append((Path(found.origin).parent, library))
    skipped = {"test", "tests", "idle_test", "site-packages", "lib2to3", "testing", "__pycache__"}
    for root, prefix in roots:
        for path in sorted(root.rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            if skipped.isdisjoint(parts) and path.stat().st_size <= LARGEST_SOURCE:
                yield ".".join((prefix, *parts) if prefix else parts), path


def clean(docstring: str) -> str:
    """A docstring's prose: no examples, no parameter tables, one paragraph a line."""
    paragraphs = re.split(r"\n\s*\n", docstring)
    prose = [" ".join(p.split()) for p in paragraphs if not re.search(r">>>|----|::|^\s*\.\. ", p)]
    return "\n".join(p for p in prose if len(p.split()) >= 4)


def read_docstrings(module: str, path: Path) -> list[Docstring]:
    """Every docstring of a module as prose; none where the source does not parse."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError, ValueError):
        return []
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = []
    for node in ast.walk(tree):
        if isinstance(node, kinds) and (text := clean(ast.get_docstring(node) or "")):
            found.append(Docstring(module, module.partition(".")[0], text))
    return found


def is_apart(module: str) -> bool:
    """Whether a module belongs to the fifth that training never sees."""
    return hashlib.blake2b(module.encode(), digest_size=1).digest()[0] < 256 // 5


def gather(console: Console) -> tuple[list[str], list[Docstring]]:
    """(documents to pre-train on, all docstrings)."""
    from pydoc_data.topics import topics

    console.start(None, title="reading docstrings", unit="modules")
    by_module: dict[str, list[Docstring]] = {}
    for number, (module, path) in enumerate(source_files(), start=1):
        by_module[module] = read_docstrings(module, path)
        if number % 100 == 0:
            console.update({"done": number})
    console.close()
    documents = [clean(text) for text in topics.values()]
    for module, docstrings in by_module.items():
        if not is_apart(module) and len(docstrings) > 1:
            documents.append("\n".join(docstring.text for docstring in docstrings))
    everything = [docstring for found in by_module.values() for docstring in found]
    return [text for text in dict.fromkeys(documents) if text], everything
