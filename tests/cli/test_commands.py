"""What users of the command line meet: help, errors in one line, pipes, signals, short output."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bertkit.checkpoints.save import save_model
from bertkit.cli.app import COMMANDS, main
from bertkit.model.heads import PretrainingModel
from bertkit.tokenizer.wordpiece import Tokenizer
from tests.conftest import python, tiny_config

NAMES = [name for group in COMMANDS.values() for name in group]
SUBCOMMANDS = {
    "predict": ("embed", "features", "fill-mask"),
}
Fails = Callable[[str], str]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer) -> Path:
    """A folder with a small pre-trained model, texts, labelled rows, and files in the way."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model = PretrainingModel(tiny_config(tokenizer, initializer_range=0.1))
    save_model(tmp_path / "bert", model, tokenizer, {})
    Path("texts.txt").write_text("River stone bridge.\n\nThe winter garden.\n\nA letter.\n")
    rows = (f"river stone {n},wet\nold copper {n},dry\n" for n in range(12))
    Path("rows.csv").write_text("text,label\n" + "".join(rows))
    Path("folder").mkdir()
    return tmp_path


@pytest.fixture
def fails(capsys: pytest.CaptureFixture[str]) -> Fails:
    """Run a command that a user's error ends, and return the one line that it says."""

    def run(line: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main(line.split())
        assert ended.value.code == 2, line
        printed, told = capsys.readouterr()
        assert printed == ""
        *progress, error = told.splitlines()
        assert error.startswith("error: ")
        assert not [text for text in progress if text.startswith(("error", "Trace", " "))]
        return error

    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [[], *([name] for name in NAMES), *([a, b] for a, names in SUBCOMMANDS.items() for b in names)],
    ids=" ".join,
)
def test_every_command_explains_itself(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*words, "--help"])
    assert ended.value.code == 0
    printed, told = capsys.readouterr()
    assert printed.startswith(" ".join(["Usage: bertkit", *words]))
    assert told == ""


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("frobnicate", "frobnicate"),
        ("learn texts.txt --out new --sise 90", "--size"),
        ("learn texts.txt --out new --size many", "--size"),
        ("learn texts.txt --out new --size 90.5", "--size"),
        ("learn texts.txt", "--out"),
        (
            "finetune classification --train rows.csv --model bert --out new --epochs 2,3",
            "--epochs",
        ),
        ("finetune clasification --train rows.csv --model bert --out new", "clasification"),
        ("pretrain tinny --text texts.txt --out new", "'tiny'"),
        ("pretrain tiny --text texts.txt --out new --phases.stepz 3", "--phases.steps"),
        ("pretrain tiny --out new", "--text"),
        ("pretrain tiny --store store --cased --out new", "--cased"),
        ("predict bert", "--text"),
    ],
)
@pytest.mark.usefixtures("home")
def test_a_wrong_word_or_flag_is_named(line: str, named: str, fails: Fails) -> None:
    assert named in fails(line)
    assert not Path("new").exists()


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("learn gone.txt --out new", "gone.txt"),
        ("clean gone.txt --out new.jsonl", "gone.txt"),
        ("prepare texts.txt --tokenizer gone --out new", "gone"),
        ("pretrain gone.toml --text texts.txt --out new", "gone.toml"),
        ("pretrain tiny --store gone --out new", "gone"),
        ("finetune classification --train gone.csv --model bert --out new", "gone.csv"),
        ("finetune classification --train rows.csv --text body --model bert --out new", "'body'"),
        ("predict embed bert gone.txt --out new.npy", "gone.txt"),
        ("predict embed bert rows.csv --column body --out new.npy", "'body'"),
        ("report gone", "gone"),
        ("serve bert --token-file gone", "gone"),
    ],
)
@pytest.mark.usefixtures("home")
def test_a_missing_file_or_column_is_named(line: str, named: str, fails: Fails) -> None:
    assert named in fails(line)
    assert not [*Path().glob("new*")]


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("clean texts.txt --out folder", "folder"),
        ("learn texts.txt --out rows.csv", "rows.csv"),
        ("clean texts.txt --out texts.txt/new.jsonl", "texts.txt"),
        ("predict embed bert texts.txt --out folder", "folder"),
        ("predict embed bert texts.txt --out new.csv", "new.csv"),
        ("predict embed bert texts.txt --out /proc/new.npy", "/proc/new.npy"),
        ("learn texts.txt --size 90 --out /proc/new", "/proc/new"),
    ],
)
@pytest.mark.usefixtures("home")
def test_an_output_that_cannot_be_written_is_named(line: str, named: str, fails: Fails) -> None:
    assert named in fails(line)


@pytest.mark.parametrize(
    "command",
    ["info {}", "explain {} x", "predict {} --text x", "predict fill-mask {} x",
     "export {} --out new"],
)  # fmt: skip
@pytest.mark.parametrize(
    "model", ["no-such-model", "org/no-such-model", "./no-such-model", "folder"]
)
@pytest.mark.usefixtures("home")
def test_an_unknown_model_is_named(command: str, model: str, fails: Fails) -> None:
    error = fails(command.format(model))
    assert model.removeprefix("./") in error
    if model.startswith("./"):  # a path is never a name on the hub
        assert "hub" not in error


def test_a_folder_wins_over_a_name_of_the_hub(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for model in ("bert", "./bert", str(home / "bert")):
        with pytest.raises(SystemExit) as ended:
            main(["info", model])
        assert ended.value.code == 0
        assert "pre-training" in capsys.readouterr().out


@pytest.mark.usefixtures("home")
def test_a_folder_with_other_settings_is_refused(fails: Fails) -> None:
    flags = "--processes 1 --tokenizer bert"
    with pytest.raises(SystemExit) as ended:
        main(f"prepare texts.txt {flags} --held-out 0 --out store".split())
    assert ended.value.code == 0
    before = {path: path.read_bytes() for path in Path("store").rglob("*.npy")}
    assert "store" in fails(f"prepare texts.txt {flags} --held-out 0.5 --out store")
    assert "store" in fails("finetune classification --train rows.csv --model bert --out store")
    assert "store" in fails("learn texts.txt --size 90 --out store")
    assert {path: path.read_bytes() for path in Path("store").rglob("*.npy")} == before


@pytest.mark.slow
@pytest.mark.usefixtures("home")
def test_predict_reads_a_named_column_or_the_texts_of_one_input(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = "--epochs 1 --batch-size 8 --learning-rate 1e-3"
    with pytest.raises(SystemExit) as ended:
        main(f"finetune classification --train rows.csv --model bert --out tuned {flags}".split())
    assert ended.value.code == 0
    told = capsys.readouterr().err.splitlines()
    assert len(told) <= 10, told
    Path("other.csv").write_text("text,body\nwrong,river stone\n")
    for words in ("tuned other.csv --text body", "tuned --text river"):
        with pytest.raises(SystemExit) as ended:
            main(["predict", *words.split()])
        assert ended.value.code == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["label"] in ("wet", "dry") for line in lines] == [True, True]
    assert lines[0]["body"] == "river stone"


# Processes ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_reader_that_leaves_ends_a_command_quietly() -> None:
    line = f"set -o pipefail; {sys.executable} -m bertkit --help | head -1"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
    assert done.stdout == "Usage: bertkit COMMAND\n"
    assert done.stderr == ""


@pytest.mark.slow
def test_only_the_program_settles_the_environment() -> None:
    imports = """
import logging, os
before = dict(os.environ)
import bertkit.report.page, bertkit.export.export, bertkit.finetuning.finetune
import bertkit.predict.load, bertkit.serve.app
assert before == dict(os.environ)
assert not [name for name in ("", "matplotlib") if logging.getLogger(name).level not in (0, 30)]
"""
    assert python("-c", imports).returncode == 0
    program = """
import os, sys
from bertkit.cli.app import run_program
sys.argv = ["bertkit", "--version"]
try:
    run_program()
except SystemExit:
    print(os.environ["OMP_WAIT_POLICY"])
"""
    environment = {name: value for name, value in os.environ.items() if "OMP" not in name}
    chosen = {**environment, "OMP_WAIT_POLICY": "ACTIVE"}
    shown = [python("-c", program, env=e).stdout.split()[-1] for e in (environment, chosen)]
    assert shown == ["PASSIVE", "ACTIVE"]
