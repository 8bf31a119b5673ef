"""The shape of the package: imports point forward, and sizes only go down."""

from __future__ import annotations

import ast
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

import bertkit
from tests.conftest import python

PACKAGE = Path(bertkit.__file__).parent

STORY = [
    ("errors",),
    ("files", "processes", "progress"),
    ("text",),
    ("tokenizer",),
    ("corpus",),
    ("pretraining_data",),
    ("model",),
    ("checkpoints",),
    ("training",),
    ("tasks",),
    ("finetuning",),
    ("predict",),
    ("sklearn",),
    ("export",),
    ("report",),
    ("serve",),
    ("demo",),
    ("cli",),
    ("__main__",),
]
"""What stands on a line may import from its own line and from lines above, anywhere in a module."""
RANK = {name: rank for rank, names in enumerate(STORY) for name in names}

CAPS = {
    "top": 1_490,
    "text": 830,
    "tokenizer": 1_250,
    "corpus": 1_120,
    "pretraining_data": 970,
    "model": 2_230,
    "checkpoints": 1_640,
    "training": 2_600,
    "tasks": 4_390,
    "finetuning": 1_330,
    "predict": 1_740,
    "sklearn": 480,
    "export": 680,
    "report": 1_000,
    "serve": 1_715,
    "cli": 1_300,
}
"""The maximum number of lines of each part; they only go down, and their sum is above the total."""
TOTALS = {
    "bertkit/**/*.py": (24_750, 115),
    "experiments/**/*.py": (3_000, 30),
    "benchmarks/**/*.py": (5_000, 25),
    "tests/**/*.py": (19_500, 150),
    "docs/*.md": (4_500, 22),
}
"""The maximum number of lines and of files, by pattern."""
CROSSED = {
    "bertkit.finetuning.finetune": 45,
    "bertkit.predict.load": 40,
    "bertkit.serve.app": 45,
    "bertkit.training.pretrain": 25,
}
"""The maximum number of files that a module imports, directly or through others."""

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
    ("modules", "heavy"),
    [
        ("bertkit", ["torch", "numpy", "tokenizers", "sklearn"]),
        ("bertkit.cli.app", ["torch", "numpy", "matplotlib", "datasets"]),
        ("bertkit.cli.corpus", ["torch", "matplotlib", "datasets", "transformers"]),
        ("bertkit.corpus.prepare", ["torch", "fsspec", "rich"]),  # as in each of its workers
        ("bertkit.cli.training", ["torch", "matplotlib", "datasets", "transformers"]),
        ("bertkit.finetuning.runs", ["torch", "numpy", "tokenizers", "fsspec"]),
        (
            "bertkit.training.pretrain, bertkit.serve.app",
            ["matplotlib", "datasets", "transformers"],
        ),
    ],
)
def test_imports_stay_light(modules: str, heavy: list[str]) -> None:
    code = f"import sys, {modules}; print([n for n in {heavy!r} if n in sys.modules])"
    assert python("-c", code, check=True).stdout.strip() == "[]"


def test_parts_stay_small() -> None:
    lines: Counter[str] = Counter()
    for path in SOURCES:
        inner = len(path.relative_to(PACKAGE).parts) > 1
        lines[chapter(path) if inner else "top"] += len(path.read_text().splitlines())
    assert {name: count for name, count in lines.items() if count > CAPS[name]} == {}


@pytest.mark.parametrize("pattern", TOTALS)
def test_totals_stay_small(pattern: str) -> None:
    paths = list(PACKAGE.parent.glob(pattern))
    lines, files = TOTALS[pattern]
    assert len(paths) <= files
    assert sum(len(path.read_text().splitlines()) for path in paths) <= lines


@cache
def imported_modules(path: Path) -> list[str]:
    """What a file imports, also in functions, but not for type checking only."""
    tree = ast.parse(path.read_text())
    blocks = [node for node in ast.walk(tree) if isinstance(node, ast.If)]
    typing = [block for block in blocks if "TYPE_CHECKING" in ast.dump(block.test)]
    skipped = {id(node) for block in typing for node in ast.walk(block)}
    modules: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and id(node) not in skipped and node.module:
            modules += [node.module, *(f"{node.module}.{name.name}" for name in node.names)]
    return modules


def crossed(module: str) -> set[Path]:
    """The files that a module imports, directly or through others."""
    files: set[Path] = set()
    waiting = [module]
    while waiting:
        stem = PACKAGE.parent / waiting.pop().replace(".", "/")
        path = next(
            (p for p in (stem.with_suffix(".py"), stem / "__init__.py") if p.is_file()), None
        )
        if path is None or path in files:
            continue
        files.add(path)
        waiting += imported_modules(path)
    return {path for path in files if len(path.read_text().splitlines()) > 1}


def test_few_files_are_crossed() -> None:
    assert {m: len(files) for m in CROSSED if len(files := crossed(m)) > CROSSED[m]} == {}
