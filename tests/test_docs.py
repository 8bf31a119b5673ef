"""The pages of docs/ are true: names, tests and code blocks."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import nbformat
import pytest

from docs import fields, notebook
from tests.markdown import DOCUMENTS, ROOT, SPAN, blocks, section, table_rows

PAPER = (ROOT / "docs/paper.md").read_text()
PACKAGE = sorted((ROOT / "bertkit").rglob("*.py"))


@cache
def names_of(path: Path) -> frozenset[str]:
    """Functions, classes, constants, and members of classes of a module ("Class.member")."""

    def collect(body: list[ast.stmt], prefix: str) -> set[str]:
        found = set()
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(prefix + node.name)
            elif isinstance(node, ast.AnnAssign | ast.Assign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                found |= {prefix + name.id for name in targets if isinstance(name, ast.Name)}
            if isinstance(node, ast.ClassDef):
                found |= collect(node.body, f"{prefix}{node.name}.")
        return found

    return frozenset(collect(ast.parse(path.read_text()).body, ""))


def test_names_of_the_paper_page_exist() -> None:
    rows = table_rows(section(PAPER, "From the paper to the code"))
    assert [row for row in rows if not SPAN.findall(row[3])] == []
    missing = [
        f"{file} has no {name}"
        for _, _, file, names in rows
        for name in SPAN.findall(names)
        if name not in names_of(ROOT / file.strip("`"))
    ]
    assert missing == []


def test_every_file_of_the_paper_names_one_of_its_sections() -> None:
    """Whoever opens a file finds out where in the paper it is."""
    rows = table_rows(section(PAPER, "From the code to the paper"))
    assert len(rows) > 40
    for file, parts, _ in rows:
        text = ast.get_docstring(ast.parse((ROOT / file.strip("`")).read_text())) or ""
        named = [
            part
            for part in parts.split(", ")
            if re.search(rf"(?<![\d.]){re.escape(part)}(?!\.?\d)", text)
        ]
        assert named, f"{file} names none of {parts}"


def test_every_module_says_what_it_is() -> None:
    assert [path for path in PACKAGE if not ast.get_docstring(ast.parse(path.read_text()))] == []


def test_files_named_in_documents_exist() -> None:
    for path in DOCUMENTS:
        for span in SPAN.findall(path.read_text()):
            file = span.partition("::")[0]
            if file.startswith(("bertkit/", "tests/", "benchmarks/", "docs/", "results/")):
                assert "*" in file or "NAME" in file or (ROOT / file).exists(), (path.name, span)


def test_links_outside_of_the_pages_lead_to_files() -> None:
    """Sphinx checks those of docs/."""
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md"):
        links = re.findall(r"\]\(([^)#]+)", path.read_text())
        assert links
        assert [link for link in links if not (ROOT / link).is_file()] == [], path.name


def test_tests_named_in_documents_exist() -> None:
    named = [
        (path.name, *span.split("::"))
        for path in DOCUMENTS
        for span in SPAN.findall(path.read_text())
        if "::" in span
    ]
    assert len(named) > 40
    for page, file, test in named:
        assert test in names_of(ROOT / file), f"{page}: {file} has no {test}"


def test_tables_made_from_the_code_are_those_of_the_code() -> None:
    """If this fails: python -m docs.fields."""
    pages = {path.name: path.read_text() for path in fields.PAGES}
    assert [name for name, page in pages.items() if "<!-- made:" not in page] == []
    assert [name for name, page in pages.items() if fields.filled(page) != page] == []


def test_the_glossary_is_in_order() -> None:
    lines = (ROOT / "docs/glossary.md").read_text().splitlines()
    terms = [line.split("**")[1].lower() for line in lines if line.startswith("**")]
    assert terms == sorted(terms)
    assert len(terms) == len(set(terms))


def test_documents_name_no_machine() -> None:
    for path in DOCUMENTS:
        text = path.read_text()
        for place in ("/work", "/home/", "/root/", "/tmp/"):
            assert place not in text, (path.name, place)


def test_the_tour_runs(
    corpus_text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "corpus.txt").write_text(corpus_text)
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for number, block in enumerate(blocks((ROOT / "docs/tour.md").read_text(), "python"), start=1):
        exec(compile(block, f"docs/tour.md block {number}", "exec"), names)
    shown = capsys.readouterr().out
    assert "60 documents; skipped: {}" in shown
    assert "['checkpoints', 'environment.json', 'journal.jsonl', 'model', 'recipe.json'" in shown
    assert "{'accuracy': 1.0, 'macro_f1': 1.0}" in shown
    assert len(shown.splitlines()) == 14


def test_the_notebook_has_the_cells_of_its_source_and_their_outputs() -> None:
    written = nbformat.read(ROOT / "docs/notebook.ipynb", as_version=4)
    cells = [(cell.cell_type, cell.source) for cell in written.cells]
    assert cells == [(cell.cell_type, cell.source) for cell in notebook.build().cells]
    code = [cell for cell in written.cells if cell.cell_type == "code"]
    assert all(cell.outputs for cell in code)
    assert not any(out.output_type == "error" for cell in code for out in cell.outputs)
    assert any("text/html" in out.get("data", {}) for cell in code for out in cell.outputs)
