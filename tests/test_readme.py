"""The README is true: its tree, commands, code and numbers."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks import tables
from bertkit import ModelConfig, PretrainingModel, Tokenizer
from bertkit.cli import GROUPS, VERBS, application
from bertkit.config import shipped_recipes
from bertkit.model.saving import save_model
from bertkit.model.task_heads import ClassificationModel, SpanModel, TokenClassificationModel
from tests.markdown import DOCUMENTS, ROOT, blocks, commands, section

README = (ROOT / "README.md").read_text()
MAKE_TARGETS = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
PLACEHOLDERS = {"CORPUS": "corpus.txt"}


def tree_files() -> list[str]:
    """The files that the tree names, as paths within the package."""
    [tree] = blocks(section(README, "The tree"), "")
    found, folder = [], ""
    for line in tree.splitlines():
        if top := re.match(r"  (\S+?)(/?)( |$)", line):
            folder = f"{top[1]}/" if top[2] else ""
        elif not line.startswith(" "):
            folder = ""
        found += [folder + name for name in re.findall(r"[\w-]+\.(?:py|toml)\b", line)]
    return found


def bertkit_commands() -> list[list[str]]:
    found = []
    for path in DOCUMENTS:
        for words in commands(path.read_text()):
            if words[0] == "bertkit" and not words[1].startswith("--"):
                found.append([PLACEHOLDERS.get(word, word) for word in words[1:]])
    return found


def test_the_tree_is_the_disk() -> None:
    package = ROOT / "bertkit"
    disk = {
        str(path.relative_to(package))
        for path in package.rglob("*")
        if path.suffix in {".py", ".toml"} and path.name != "__init__.py"
    }
    named = tree_files()
    assert len(named) == len(set(named)), "a file is named twice"
    assert set(named) == disk | {"__init__.py"}


def test_the_trees_folders_exist() -> None:
    [tree] = blocks(section(README, "The tree"), "")
    for name in re.findall(r"^(\w+)/", tree, re.MULTILINE):
        assert (ROOT / name).is_dir(), name
    packages = {path.parent.name for path in (ROOT / "bertkit").glob("*/__init__.py")}
    assert packages <= set(re.findall(r"^  (\w+)/", tree, re.MULTILINE))


def test_make_targets_exist() -> None:
    for path in DOCUMENTS:
        text = path.read_text()
        for target in re.findall(r"(?:^|`)make ([a-z]+)", text, re.MULTILINE):
            assert target in MAKE_TARGETS, f"{path.name}: make {target}"


@pytest.mark.parametrize("words", bertkit_commands(), ids=" ".join)
def test_commands_are_accepted(words: list[str]) -> None:
    """Verb, recipe and flags are looked up and converted; nothing is run."""
    assert words[0] in {*VERBS, *GROUPS}
    application().parse_args(words, exit_on_error=False, print_error=False)


def test_a_wrong_flag_would_be_noticed() -> None:
    with pytest.raises(Exception, match="--sise"):
        application().parse_args(
            ["learn", "a.txt", "--sise", "9"], exit_on_error=False, print_error=False
        )


def test_the_readme_shows_every_verb() -> None:
    shown = {words[1] for words in commands(README) if words[0] == "bertkit"}
    assert {*VERBS, *GROUPS} - {"demo"} <= shown
    assert "make demo" in README


def test_recipes_named_exist() -> None:
    for path in DOCUMENTS:
        for name in re.findall(r"bertkit pretrain ([a-z][\w-]*)", path.read_text()):
            assert name in shipped_recipes(), f"{path.name}: {name}"


def test_the_python_blocks_run(
    tokenizer: Tokenizer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = ModelConfig(
        vocab_size=tokenizer.size,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=128,
    )
    save_model(tmp_path / "runs/demo/model", PretrainingModel(config), tokenizer, {})
    topics = {"task": "classify", "labels": ["a", "b"]}
    save_model(tmp_path / "runs/topics/model", ClassificationModel(config, 2), tokenizer, topics)
    answers = {"task": "answer", "labels": ["start", "end"], "settings": {"longest": 128}}
    save_model(tmp_path / "runs/squad/model", SpanModel(config), tokenizer, answers)
    tags = {"task": "tag", "labels": ["O", "B-PER", "I-PER"]}
    save_model(tmp_path / "runs/ner/model", TokenClassificationModel(config, 3), tokenizer, tags)
    monkeypatch.chdir(tmp_path)
    pretrained, tuned = blocks(README, "python")
    exec(compile(tuned, "README.md", "exec"), {})
    label, answer, entities = capsys.readouterr().out.splitlines()
    assert label in {"a", "b"}
    assert answer in "The sailor is in the garden."
    assert entities.startswith("(")
    exec(compile(pretrained, "README.md", "exec"), {})
    candidate, probability, shape = capsys.readouterr().out.splitlines()
    assert candidate.startswith("Candidate(piece='")
    assert 0 < float(probability) < 1
    assert re.fullmatch(r"torch\.Size\(\[\d+, 16\]\)", shape)


def test_results_are_those_of_the_files() -> None:
    """If this fails: python -m benchmarks.tables."""
    assert tables.stale(tables.documents(), ROOT / "results") == []


def test_every_results_file_is_shown() -> None:
    texts = [path.read_text() for path in tables.documents()]
    shown = {name for text in texts for _, name, _ in tables.SECTION.findall(text)}
    assert {path.stem for path in (ROOT / "results").glob("*.json")} <= shown


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
