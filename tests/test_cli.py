from __future__ import annotations

import errno
import importlib
import inspect
import io
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from bertkit.cli.launch import parse_words
from bertkit.tasks.spec import SPECS

from bertkit.cli import app
from bertkit.cli.app import COMMANDS, SUBCOMMANDS, application, main
from bertkit.cli.evaluate import evaluate_command
from bertkit.cli.export import export_command
from bertkit.cli.finetune import finetune_command
from bertkit.cli.predict import names_file, standard_input
from bertkit.cli.pretrain import has_steps
from bertkit.corpus.store import SPLITS, TokenStore
from bertkit.errors import BertkitError
from bertkit.predict.files import predict_texts
from bertkit.tokenizer.wordpiece import Tokenizer
from tests.conftest import python, run

TOY = """
[model]
hidden_size = 32
num_hidden_layers = 1
num_attention_heads = 2
max_position_embeddings = 64
[phases]
lengths = [48]
steps = [4]
batch_sizes = [4]
max_predictions = [7]
[training]
warmup_steps = 1
[logging]
held_out_sequences = 8
"""


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "toy.toml"
    path.write_text(TOY)
    return str(path)


@pytest.fixture
def text(tmp_path: Path, corpus_text: str) -> str:
    path = tmp_path / "corpus.txt"
    path.write_text(corpus_text)
    return str(path)


def test_the_whole_story_command_by_command(
    text: str, recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Raw text to a filled mask: learn, prepare, pretrain, report, predict."""
    (tmp_path / "tokenizer.v2").mkdir()
    (tmp_path / "tokenizer").symlink_to(tmp_path / "tokenizer.v2")  # as `latest` may be
    run("learn", text, "--out", str(tmp_path / "tokenizer"), "--size", "150")
    shown = capsys.readouterr().err
    assert "150 tokens in the vocabulary" in shown
    assert "tokens per word" in shown
    report = json.loads((tmp_path / "tokenizer" / "vocabulary.json").read_text())
    assert report["unknown_share"] == 0
    run(
        "prepare", text, "--tokenizer", str(tmp_path / "tokenizer"), "--out",
        str(tmp_path / "store"), "--held-out", "0.2", "--processes", "1",
    )  # fmt: skip
    splits = [TokenStore(tmp_path / "store", split).documents for split in SPLITS]
    assert sum(splits) == 60
    shown = capsys.readouterr().err
    assert f"{splits[0]} documents" in shown
    assert f"{splits[1]} documents" in shown
    out = str(tmp_path / "run")
    run(
        "pretrain", recipe, "--store", str(tmp_path / "store"), "--out", out,
        "--phases.steps", "6", "--training.learning-rate", "2e-3",
    )  # fmt: skip
    resolved = json.loads((tmp_path / "run" / "recipe.json").read_text())["recipe"]
    assert resolved["phases"]["steps"] == [6]
    assert resolved["training"]["learning_rate"] == 2e-3
    assert (tmp_path / "run" / "report.html").is_file()
    run("report", out)
    capsys.readouterr()
    run("predict", "fill-mask", f"{out}/model", "river [MASK] stone", "--top", "3")
    assert "mask 1" in capsys.readouterr().out
    run("predict", "next-sentence", f"{out}/model", "river.", "stone.")
    assert "follows with probability 0." in capsys.readouterr().out


def test_one_command_from_text_to_model(
    text: str, recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        "pretrain", recipe, "--text", text, "--vocabulary-size", "150", "--processes", "1",
        "--out", str(tmp_path / "run"),
    ]  # fmt: skip
    run(*arguments)
    for name in ("tokenizer/vocab.txt", "store/manifest.json", "model/model.safetensors"):
        assert (tmp_path / "run" / name).is_file()
    capsys.readouterr()
    run(*arguments)
    assert "is finished" in capsys.readouterr().err


def test_existing_tokenizer_is_used(text: str, recipe: str, tmp_path: Path, store) -> None:
    run(
        "pretrain", recipe, "--text", text, "--tokenizer", str(store.folder / "tokenizer"),
        "--processes", "1", "--out", str(tmp_path / "run"),
    )  # fmt: skip
    assert Tokenizer.load(tmp_path / "run" / "model").content_hash == store.tokenizer_hash


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["pretrian"], "pretrian"),
        (["pretrain", "toy", "--out", "x", "--store", "nowhere"], "no recipe is called 'toy'"),
        (["pretrain", "mini", "--out", "x"], "either --store STORE or --text"),
        (["pretrain", "mini", "--out", "x", "--store", "nowhere"], "nowhere is not a token store"),
        (["pretrain", "mini", "--store", "x"], "--out"),
        (
            ["pretrain", "mini", "--out", "x", "--text", "y", "--device", "cpu", "--compile"],
            "needs a CUDA device",
        ),
        (
            ["pretrain", "mini", "--out", "y", "--store", "x", "--training.lerning-rate", "1"],
            "learning-rate",
        ),
        (
            ["pretrain", "mini", "--out", "y", "--store", "x", "--training.seed", "one"],
            "--training.seed",
        ),
        (["prepare", "nowhere.txt", "--tokenizer", "x", "--out", "y"], "x"),
        (["learn", "nowhere.txt", "--out", "y"], "nowhere.txt"),
        (["learn", "--out", "y"], "no input was named"),
        (["report", "nowhere"], "nowhere"),
        (["report", "/dev/null"], "the folder of a run"),
        (["predict", "fill-mask", "nowhere", "[MASK]"], "nowhere"),
    ],
)
def test_mistakes_are_one_clear_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str],
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    run(*arguments, status=2)
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert len(error.strip().splitlines()) == 1
    assert not list(tmp_path.rglob("*.tmp*"))


@pytest.mark.parametrize("command", [*COMMANDS, "predict fill-mask", "vocab extend"])
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    run(*command.split(), "--help")
    shown = capsys.readouterr().out
    assert shown.startswith("Usage:")
    assert "--" in shown or command in SUBCOMMANDS


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    run("--help")
    shown = capsys.readouterr().out
    for command in COMMANDS:
        assert command in shown
    run("--version")
    assert capsys.readouterr().out.strip() == "0.1.0"


def test_changed_text_in_the_same_folder_is_refused(
    text: str, recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ["--vocabulary-size", "150", "--processes", "1", "--out", str(tmp_path / "run")]
    run("pretrain", recipe, "--text", text, *out)
    capsys.readouterr()
    run("pretrain", recipe, "--text", text, "--cased", *out, status=2)
    assert "a corpus with other settings (cased" in capsys.readouterr().err


def test_a_mistake_in_the_text_does_not_claim_the_folder(
    text: str, recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is wrong in a first command may be put right in the second."""
    out = ["--vocabulary-size", "150", "--processes", "1", "--out", str(tmp_path / "run")]
    command = ["pretrain", recipe, "--text", text, *out]
    run("pretrain", recipe, "--text", str(tmp_path / "typo.txt"), *out, status=2)
    run(*command, "--language", "nonsense", status=2)
    run(*command, "--processes", "-1", status=2)
    run(*command, "--track", "nothing", status=2)
    assert not (tmp_path / "run" / "store").exists()
    run(*command, "--tokenizer", str(tmp_path), status=2)
    assert "--vocabulary-size and --cased are for" in capsys.readouterr().err
    inside = ["--text", str(tmp_path), "--out", str(tmp_path / "run")]
    run("pretrain", recipe, *inside, status=2)
    assert "whose files are all read as text" in capsys.readouterr().err
    run(*command)
    Path(text).unlink()
    run(*command)
    assert "finished" in capsys.readouterr().err


def test_flags_that_did_not_work_do_not_claim_the_folder(
    text: str, recipe: str, tmp_path: Path, store: TokenStore, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each is refused after the folder was begun, and nothing was made of it yet."""
    command = ["pretrain", recipe, "--text", text, "--processes", "1", "--out", str(tmp_path / "r")]
    run(*command, "--vocabulary-size", "20", status=2)
    run(*command, "--tokenizer", str(tmp_path), status=2)
    run(*command, "--vocabulary-size", "150")
    capsys.readouterr()
    run(*command, "--vocabulary-size", "160", status=2)
    assert "a corpus with other settings (vocabulary_size" in capsys.readouterr().err


def test_positions_that_no_example_reaches_are_told(
    recipe: str, store: TokenStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["pretrain", recipe, "--store", str(store.folder), "--out"]
    run(*command, str(tmp_path / "a"))
    said = "so the last 16 of the model's 64 positions are never trained"
    assert said in capsys.readouterr().err
    run(*command, str(tmp_path / "b"), "--model.max-position-embeddings", "48")
    assert "never trained" not in capsys.readouterr().err


def test_a_run_stopped_before_its_first_update_has_nothing_to_report(tmp_path: Path) -> None:
    journal = tmp_path / "journal.jsonl"
    assert not has_steps(journal)
    journal.write_text('{"kind": "start"}\n{"kind": "end", "step": 0}\n')
    assert not has_steps(journal)
    journal.write_text('{"kind": "start"}\n{"kind": "step", "step": 1}\n')
    assert has_steps(journal)


def test_a_cache_is_for_addresses(
    recipe: str, store: TokenStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["pretrain", recipe, "--store", str(store.folder), "--out", str(tmp_path / "run")]
    for flags in (["--cache", str(tmp_path)], ["--cache-gigabytes", "0"]):
        run(*command, *flags, status=2)
        assert "are for stores at a URL" in capsys.readouterr().err


def test_a_device_without_room_is_one_clear_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

    monkeypatch.setattr("bertkit.cli.app.parse", full)
    run("pretrain", "tiny", status=2)
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: the device is out of memory")

    def other(*_: object) -> None:
        raise RuntimeError("something else")

    monkeypatch.setattr("bertkit.cli.app.parse", other)
    with pytest.raises(RuntimeError, match="something else"):
        main(["pretrain", "tiny"])


@pytest.mark.parametrize("flag", ["--out=", "--out"])
def test_an_empty_path_is_not_this_folder(
    text: str,
    flag: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    given = [flag] if "=" in flag else [flag, ""]
    run("learn", text, "--size", "150", *given, status=2)
    assert capsys.readouterr().err == "error: --out is empty; give a path\n"
    assert not [*Path().iterdir()]


def test_errors_of_the_file_system_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("learn", "x" * 300 + ".txt", "--out", str(tmp_path / "out"), status=2)
    assert capsys.readouterr().err.endswith(".txt: File name too long\n")


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        ModuleNotFoundError("No module named 'sklearn'", name="sklearn.metrics"),
        OSError(errno.EMFILE, "Too many open files"),
        OSError(errno.EMFILE, "Too many open files", "/some/file"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        OSError("CRC check failed"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to ..."),
        RuntimeError("can't start new thread"),
        ImportError("libtorch_cpu.so: failed to map segment from shared object"),
        ImportError("libcudart.so.13: cannot open shared object file: No such file or directory"),
        ImportError("/site-packages/torch/lib/libtorch_cuda.so: undefined symbol: ncclCommAbort"),
        OSError("libcudart.so.13: cannot open shared object file: No such file or directory"),
    ],
    ids=str,
)
def test_what_the_system_lacks_is_one_line(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("bertkit.cli.app.parse", fail)
    run("doctor", "x", status=2)
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")


def test_numbers_that_are_none_are_refused(tmp_path: Path) -> None:
    for words in (
        ["evaluate", "m", "f", "--bound", "nan"],
        ["export", "m", "--to", "onnx", "--out", str(tmp_path / "x"), "--max-error", "NaN"],
        ["finetune", "rte", "--model", "m", "--out", "x", "--learning-rate", "1e-4", "nan"],
    ):
        with pytest.raises(BertkitError) as refused:
            application().parse_args(words, exit_on_error=False, print_error=False)
        assert refused.value.code == "number"
    for bound in (float("nan"), float("inf")):
        with pytest.raises(BertkitError) as refused:
            evaluate_command(tmp_path, "f", bound=bound)
        assert refused.value.code == "number"
        with pytest.raises(BertkitError) as refused:
            export_command(tmp_path, to="onnx", out=tmp_path / "x", bound=bound)
        assert refused.value.code == "number"


def test_a_deeply_nested_recipe_is_one_clear_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "deep.toml"
    recipe.write_text("a = " + "[" * 100_000)
    run("plan", str(recipe), "--tokens", "1000", "--machine", "t4", status=2)
    assert "deep.toml is not valid TOML" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options",
    [
        *(["--nproc-per-node", number] for number in ("0", "-2", "two")),
        ["--no-python"],
        ["--run-path"],
        ["--nnodes", "2:1"],
        ["--nnodes", "many"],
        ["--rdzv-endpoint", "host:port"],
        ["--master-port", "99999999"],
        ["--max-restarts", "-1"],
        ["--tee", "9x"],
    ],
    ids=" ".join,
)
def test_launch_refuses_what_torchrun_cannot_start(
    options: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    run("launch", *options, "pretrain", "tiny", "--store", "s", "--out", "o", status=2)
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: torchrun: ")
    assert "OMP_NUM_THREADS" not in os.environ
    assert parse_words(["--nproc-per-node", "2", "pretrain", "tiny"]).processes == 2


@pytest.mark.parametrize(
    "flags",
    [["--strategy", "fdsp"], ["--workers", "-1"], ["--timeout", "1e99"], ["--timeout", "0"]],
)
def test_what_cannot_work_is_refused_before_text_is_prepared(
    flags: list[str], recipe: str, text: str, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    run("pretrain", recipe, "--text", text, "--out", str(out), *flags, status=2)
    assert not out.exists()


@pytest.mark.slow
def test_a_launch_ends_with_the_status_of_its_processes(recipe: str, tmp_path: Path) -> None:
    words = ["pretrain", recipe, "--store", str(tmp_path / "none"), "--out", str(tmp_path / "run")]
    launch = [sys.executable, "-m", "bertkit", "launch", "--nproc-per-node", "2", *words]
    ended = subprocess.run(launch, check=False, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2, ended.stderr
    assert "none is not a token store" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_pretraining_leaves_folders_of_something_else_alone(
    recipe: str, text: str, store: TokenStore, tmp_path: Path
) -> None:
    source = ["--text", text, "--vocabulary-size", "150", "--processes", "1"]
    for number, sign in enumerate(("config.json", "vocab.txt", "manifest.json", "finetune.json")):
        out = tmp_path / str(number)
        out.mkdir()
        (out / sign).write_text("{}")
        for words in (source, ["--store", str(store.folder)]):
            run("pretrain", recipe, *words, "--out", str(out), status=2)
        run("demo", "--out", str(out), status=2)
        if sign != "vocab.txt":  # a vocabulary may be learned again
            run("learn", text, "--size", "60", "--out", str(out), status=2)
        assert {path.name for path in out.iterdir()} <= {sign, ".lock"}


def test_store_and_text_flags_exclude_each_other(
    recipe: str, store: TokenStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["pretrain", recipe, "--store", str(store.folder), "--out", str(tmp_path / "run")]
    run(*arguments, "--language", "de", status=2)
    assert "leave out --language" in capsys.readouterr().err


def test_fractions_for_whole_numbers_are_refused(
    recipe: str, store: TokenStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["pretrain", recipe, "--store", str(store.folder), "--out", str(tmp_path / "run")]
    run(*arguments, "--model.hidden-size", "32.5", status=2)
    assert "--model.hidden-size takes a whole number" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "words",
    [
        ["finetune", "classification", "--model", "m", "--out", "o", "--learning-rate"],
        ["finetune", "classification", "--model", "m", "--out", "o", "--class-weights"],
        ["pretrain", "--store", "s", "--out", "o", "--weights", "--workers", "0"],
    ],
)
def test_a_flag_without_a_value_is_refused(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """As when a shell variable is not set: the default would be taken without a word."""
    run(*words, status=2)
    assert "has no value" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["vocab", "measure", "tokenizer", "text.txt", "--max-documents", "9" * 20],
        ["learn", "text.txt", "--out", "t", "--size", "200", "--min-frequency", "9" * 5000],
    ],
)
def test_numbers_beyond_64_bits_are_refused(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run(*words, status=2)
    assert "takes a number below 10^18" in capsys.readouterr().err


def test_one_number_with_a_comma_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    run("finetune", "rte", "--model", "m", "--out", "o", "--dropout", "0,1", status=2)
    assert 'unable to convert "0,1"' in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "value", "apart"),
    [("--epochs", "3,6", "3 6"), ("--learning-rate", "1e-4, 2e-4", "1e-4 2e-4")],
)
def test_numbers_with_commas_between_them_are_refused(
    flag: str, value: str, apart: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run("finetune", "rte", "--model", "m", "--out", "o", flag, value, status=2)
    assert f"{flag} takes numbers with spaces between them: {flag} {apart}" in (
        capsys.readouterr().err
    )


def test_pieces_are_shown_as_they_are(
    store: TokenStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """[unused1] and the like are no markup."""
    from bertkit.checkpoints.save import save_model
    from bertkit.model.encoder import ModelConfig
    from bertkit.model.heads import PretrainingModel

    vocabulary = [*store.tokenizer.vocabulary, "[unused1]", "[/b]"]
    tokenizer = Tokenizer.from_vocabulary(vocabulary, lowercase=True)
    config = ModelConfig(
        vocab_size=tokenizer.size, hidden_size=16, num_hidden_layers=1, num_attention_heads=1
    )
    save_model(tmp_path / "model", PretrainingModel(config), tokenizer, {})
    run("predict", "fill-mask", str(tmp_path / "model"), "[MASK]", "--top", str(tokenizer.size))
    shown = capsys.readouterr().out
    assert "[unused1]" in shown
    assert "[/b]" in shown


def test_counted_losses_are_told_by_learn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "latin.txt"
    text.write_bytes(b"river stone river stone\n\n" * 40 + b"caf\xe9 river\n")
    run("learn", str(text), "--out", str(tmp_path / "t"), "--size", "40")
    assert "counted: invalid UTF-8 replaced, kept: 1" in capsys.readouterr().err
    run("learn", str(text), "--out", str(tmp_path / "t"), "--size", "99999999999", status=2)
    assert "a vocabulary needs a size" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["embed", "model", "texts.txt"],
            "there is no command 'embed'; it is bertkit predict embed",
        ),
        (["pretrian"], "no command 'pretrian'; did you mean 'pretrain'?"),
        (
            ["predict", "fil-mask", "m"],
            "no command 'predict fil-mask'; did you mean 'predict fill-",
        ),
        (["vocab", "extent"], "no command 'vocab extent'; did you mean 'vocab extend'?"),
        (["vocab", "train", "a.txt", "--size", "9"], 'Unknown command "train"'),
        (["--device", "cpu", "pretrain", "small"], "there is no option --device"),
    ],
)
def test_a_misspelt_command_is_answered_with_the_right_one(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run(*words, status=2)
    assert message in capsys.readouterr().err


def test_groups_name_all_their_subcommands() -> None:
    for command, own in SUBCOMMANDS.items():
        group = getattr(importlib.import_module(f"bertkit.cli.{command}"), f"{command}_application")
        assert {name for name in group if not name.startswith("-")} == set(own)


@pytest.mark.parametrize(("ranks", "cleaned"), [("1", True), ("2", False)])
def test_one_of_several_ranks_ends_without_the_end_of_python(ranks: str, *, cleaned: bool) -> None:
    """Threads of gloo may hold tensors: one that lets go while Python ends aborts the process."""
    script = """
import atexit, sys
from bertkit.cli import app as cli
atexit.register(print, "cleaned")
def main():
    print("written, but in a buffer")
    sys.exit(3)
cli.main = main
cli.run_program()
"""
    done = python("-c", script, env={**os.environ, "WORLD_SIZE": ranks})
    assert done.returncode == 3
    assert done.stdout.splitlines() == ["written, but in a buffer", *["cleaned"] * cleaned]


@pytest.mark.parametrize(
    ("words", "other", "flag"),
    [
        ("finetune classification", "--lr", "--learning-rate"),
        ("finetune classification --model m --out o", "--output_dir", "--out"),
        ("finetune classification --model m --out o", "--num-train-epochs", "--epochs"),
        ("pretrain --store s --out o", "--lr", "--training.learning-rate"),
        ("predict m f", "--fp16", "--precision"),
    ],
)
def test_flags_of_other_programs_are_translated(
    words: str, other: str, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The unknown flag is named first, also where a required one is missing."""
    for value in ("=1", " 1"):
        run(*f"{words} {other}{value}".split(), status=2)
        said = capsys.readouterr().err
        assert said == f"error: there is no option {other}; did you mean {flag}?\n"


def test_a_text_that_begins_with_a_hyphen_is_no_option(capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("- a list item", "-5 degrees"):
        run("predict", "m", text, status=2)
        assert "write -- before a text that begins with -" in capsys.readouterr().err
        run("predict", "m", "--", text, status=2)
        assert "neither" in capsys.readouterr().err


def test_a_seed_is_no_number_of_runs(capsys: pytest.CaptureFixture[str]) -> None:
    run("finetune", "regression", "--model", "m", "--out", "o", "--seed", "42", status=2)
    assert "--seeds N makes N runs" in capsys.readouterr().err


def test_threads_are_set_for_every_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    threads = torch.get_num_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    try:
        run("info", tmp_path, "--threads", "3", status=2)
        assert "holds no model" in capsys.readouterr().err
        assert torch.get_num_threads() == 3
        assert os.environ["OMP_NUM_THREADS"] == "3"
        for wrong in (["--threads", "none"], ["--threads=0"], ["--threads"]):
            run("info", "m", *wrong, status=2)
            assert "--threads takes a whole number" in capsys.readouterr().err
    finally:
        torch.set_num_threads(threads)


def test_the_examples_in_the_help_of_finetune_are_accepted() -> None:
    text = inspect.getdoc(finetune_command) or ""
    lines = text.split("```")[1].strip().splitlines()
    types = [line.split()[0] for line in lines]
    assert set(SPECS) <= set(types)
    for line in lines:
        words = ["finetune", "--model", "m", "--out", "o", *shlex.split(line)]
        application().parse_args(words, exit_on_error=False, print_error=False)


@pytest.mark.parametrize("other", ["--bs 32", "--num-epochs 3"])
def test_flags_that_a_command_lacks_are_not_suggested(
    other: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run("pretrain", "base", "--store", "s", "--out", "o", *other.split(), status=2)
    said = capsys.readouterr().err
    assert f"there is no option {other.split(maxsplit=1)[0]}" in said
    assert "--batch-size?" not in said
    assert "--epochs?" not in said


def test_the_command_is_found_behind_the_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    assert app.command_of(["--threads", "2", "serve", "m"]) == "serve"
    assert app.command_of(["--threads=2", "serve"]) == app.command_of(["serve"]) == "serve"
    assert app.command_of([]) == app.command_of(["--threads"]) == ""
    given: list[list[str]] = []
    monkeypatch.setattr(app, "parse", lambda _, words, __: given.append(words))
    threads = torch.get_num_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    run("--threads", str(threads), "predict", "model", "-")
    assert given == [["predict", "model", "/dev/stdin"]]


def test_texts_that_look_like_files_are_texts_beside_others(tmp_path: Path) -> None:
    for text in ("3.5", "yes/no", "TCP/IP"):
        assert names_file(text, alone=True)
        assert not names_file(text, alone=False)
    assert names_file("notes.csv", alone=False)
    (tmp_path / "notes").touch()
    assert names_file(str(tmp_path / "notes"), alone=False)


@pytest.mark.parametrize(
    ("columns", "ending"), [({}, "txt"), ({"format": "auto"}, "txt"), ({"format": "csv"}, "csv")]
)
def test_the_standard_input_has_a_format(
    columns: dict[str, str], ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(b"a text\n")))
    with standard_input(columns) as file:
        assert Path(file).read_bytes() == b"a text\n"
        assert Path(file).suffix == f".{ending}"
    assert not Path(file).exists()


def test_a_tagger_takes_one_text() -> None:
    predictor = SimpleNamespace(task=SimpleNamespace(task_type="token-classification"))
    with pytest.raises(BertkitError) as caught:
        predict_texts(predictor, ["Anna lives in Paris", "Bob works here"])  # type: ignore[arg-type]
    assert caught.value.code == "texts"
