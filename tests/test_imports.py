"""The shape of the package: imports point forward along the story, stay light, and places small."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest

import bertkit
from tests.conftest import python

PACKAGE = Path(bertkit.__file__).parent

STORY = [
    ("errors",),
    ("files", "executors", "processes", "shapes"),
    ("progress",),
    ("text",),
    ("tokenizer",),
    ("corpus",),
    ("pretraining_data",),
    ("model", "checkpoints"),
    ("training", "planning"),
    ("tasks", "datasets"),
    ("finetuning",),
    ("predict",),
    ("sklearn",),
    ("export",),
    ("report",),
    ("doctor", "explain", "reproduce"),
    ("serve",),
    ("demo",),
    ("cli",),
    ("__main__",),
]
"""What stands on a line may import from its own line and from lines above, anywhere in a module."""
RANK = {name: rank for rank, names in enumerate(STORY) for name in names}

CAPS = {
    "top": 2_600,
    "text": 1_300,
    "tokenizer": 2_100,
    "corpus": 2_100,
    "pretraining_data": 1_350,
    "model": 3_100,
    "checkpoints": 3_300,
    "training": 5_300,
    "tasks": 7_900,
    "finetuning": 2_100,
    "predict": 4_100,
    "sklearn": 950,
    "export": 1_600,
    "report": 3_900,
    "serve": 3_200,
    "cli": 2_700,
    "reproduce": 2_400,
}
"""The maximum number of lines of each place; a feature that needs more is worth its lines."""
MERGED = {"demo": "top", "planning": "training", "datasets": "tasks"}
MERGED |= {"doctor": "report", "explain": "report"}
MAX_LINES, MAX_MODULES = 49_200, 237

SOURCES = sorted(PACKAGE.rglob("*.py"))


def chapter(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_chapters(path: Path) -> set[str]:
    modules: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.module, f"{path}: no relative imports"
            assert node.level == 0, f"{path}: no relative imports"
            modules.append(node.module)
        elif isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
    parts = [name.split(".") for name in modules]
    return {name[1] for name in parts if name[0] == "bertkit" and len(name) > 1}


def test_imports_point_forward() -> None:
    backward = [
        f"{path.relative_to(PACKAGE)} imports {name}, a later chapter"
        for path in SOURCES
        if chapter(path) != "__init__"
        for name in imported_chapters(path)
        if RANK[name] > RANK[chapter(path)]
    ]
    assert backward == []


def test_public_names_exist_and_are_sorted() -> None:
    assert bertkit.__all__ == sorted(bertkit.__all__)
    for name in bertkit.__all__:
        assert getattr(bertkit, name).__module__.startswith("bertkit."), name
    assert set(bertkit.__all__) <= set(dir(bertkit))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = bertkit.nothing


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("bertkit", ["torch", "numpy", "tokenizers", "sklearn"]),
        ("bertkit.cli.app", ["torch", "numpy", "matplotlib", "datasets"]),
        ("bertkit.cli.corpus", ["torch", "matplotlib", "datasets", "transformers"]),
        ("bertkit.cli.training", ["torch", "matplotlib", "datasets", "transformers"]),
        ("bertkit.training.pretrain", ["matplotlib", "datasets", "transformers", "tensorboard"]),
        ("bertkit.serve.app", ["matplotlib", "datasets", "transformers"]),
    ],
)
def test_imports_stay_light(module: str, heavy: list[str]) -> None:
    code = f"import sys, {module}; print([n for n in {heavy!r} if n in sys.modules])"
    assert python("-c", code, check=True).stdout.strip() == "[]"


def test_places_stay_small() -> None:
    lines: Counter[str] = Counter()
    for path in SOURCES:
        inner = len(path.relative_to(PACKAGE).parts) > 1
        name = chapter(path) if inner else "top"
        lines[MERGED.get(name, name)] += len(path.read_text().splitlines())
    assert {name: count for name, count in lines.items() if count > CAPS[name]} == {}
    assert lines.total() <= MAX_LINES
    assert len(SOURCES) <= MAX_MODULES
