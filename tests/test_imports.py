"""The import law (design, law 6): along the story, imports point forward only."""

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
    ("files", "processes", "shapes", "config"),
    ("console",),
    ("outputs",),
    ("text",),
    ("tokenizer",),
    ("corpus",),
    ("pretraining_data",),
    ("model", "checkpoints"),
    ("objectives",),
    ("training",),
    ("planning",),
    ("datasets",),
    ("tasks",),
    ("finetuning",),
    ("predict",),
    ("sklearn",),
    ("export",),
    ("report",),
    ("doctor", "explain"),
    ("serve",),
    ("demo",),
    ("cli",),
    ("__main__",),
]
"""What stands on a line may import from its own line and from lines above."""

RANK = {name: rank for rank, names in enumerate(STORY) for name in names}
SOURCES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def chapter(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_chapters(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names = [node.module]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            assert not isinstance(node, ast.ImportFrom), f"{path}: no relative imports"
            continue
        for name in names:
            parts = name.split(".")
            if parts[0] == "bertkit" and len(parts) > 1:
                found.add(parts[1])
    return found


def test_imports_point_forward() -> None:
    backward = [
        f"{path.relative_to(PACKAGE)} imports {name}, a later chapter"
        for path in SOURCES
        for name in imported_chapters(path)
        if RANK[name] > RANK[chapter(path)]
    ]
    assert backward == []


def test_the_law_would_catch_a_backward_import(tmp_path: Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text("from bertkit.training.step import train_steps\n")
    assert imported_chapters(bad) == {"training"}
    assert RANK["training"] > RANK["text"]


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
        ("bertkit.cli.learn", ["torch", "matplotlib", "datasets", "transformers"]),
        ("bertkit.cli.prepare", ["torch", "matplotlib", "datasets", "transformers"]),
        ("bertkit.cli.clean", ["torch", "matplotlib", "datasets", "transformers"]),
        ("bertkit.cli.plan", ["torch", "matplotlib", "datasets", "transformers"]),
        ("bertkit.cli.pretrain", ["torch", "matplotlib", "datasets", "transformers"]),
        ("bertkit.cli.demo", ["torch", "matplotlib", "datasets", "transformers"]),
        ("bertkit.corpus.build", ["torch", "matplotlib", "datasets", "transformers"]),
        ("bertkit.training.pretrain", ["matplotlib", "datasets", "transformers", "tensorboard"]),
    ],
)
def test_imports_stay_light(module: str, heavy: list[str]) -> None:
    code = f"import sys, {module}; print([n for n in {heavy!r} if n in sys.modules])"
    assert python("-c", code, check=True).stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("module", "most_files", "most_lines"),
    [
        ("bertkit.training.pretrain", 33, 7_221),
        ("bertkit.finetuning.finetune", 80, 16_825),
        ("bertkit.predict.load", 67, 13_903),
    ],
)
def test_what_a_command_imports_stays_small(module: str, most_files: int, most_lines: int) -> None:
    """Our files that a module imports, and their lines that are not blank."""
    code = (
        f"import sys, {module}\n"
        "print(*[m.__file__ for n, m in sys.modules.items() if n.split('.')[0] == 'bertkit'])"
    )
    files = python("-c", code, check=True).stdout.split()
    modules = [Path(file) for file in files if not file.endswith("__init__.py")]
    assert len(modules) <= most_files, [path.name for path in modules]
    lines = [line for path in modules for line in path.read_text().splitlines() if line.strip()]
    assert len(lines) <= most_lines, len(lines)


def public_names(path: Path) -> set[str]:
    """Functions, classes and constants that a module defines at its top level."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            parts = [part for one in targets for part in getattr(one, "elts", [one])]
            found |= {name.id for name in parts if isinstance(name, ast.Name)}
    return {name for name in found if not name.startswith("_")}


def test_the_package_does_not_grow() -> None:
    """A limit goes up only with a feature that is worth its lines; a concept has one name."""
    names = Counter(name for path in SOURCES for name in public_names(path))
    assert {name for name, count in names.items() if count > 1} == set()
    assert len(SOURCES) <= 236
    assert sum(len(path.read_text().splitlines()) for path in SOURCES) <= 49_013
