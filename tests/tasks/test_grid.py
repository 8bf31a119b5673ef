"""What a grid keeps of its runs, and how damage to it is noticed."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bertkit.finetuning.grid import (
    RunResult,
    all_results,
    keep_models,
    model_digest,
    model_problem,
    read_results,
)

from bertkit.cli.app import main
from bertkit.errors import BertkitError, DivergedError
from bertkit.files import read_json, write_json
from bertkit.finetuning import finetune as finetuning
from bertkit.finetuning.settings import Grid
from bertkit.training.step import check_finite

GRID = Grid(batch_size=(8,), learning_rate=(1e-3,), epochs=(1,), seeds=2)


def result(name: str, model: str = "") -> RunResult:
    scores = {"dev": {"accuracy": 0.75}}
    return RunResult(name, asdict(GRID.runs()[0]), scores, 0.75, "", 1.5, model)


def test_a_changed_record_is_named(tmp_path: Path) -> None:
    """One digit of a score decides which run is best."""
    first, second = (run.name for run in GRID.runs())
    for name in (first, second):
        write_json(tmp_path / "runs" / name / "run.json", result(name).as_json())
    assert read_results(tmp_path, GRID.runs()) == [result(first), result(second)]
    path = tmp_path / "runs" / second / "run.json"
    text = path.read_text()
    path.write_text(text.replace("0.75", "0.95"))
    with pytest.raises(BertkitError, match=rf"{second}/run\.json is damaged; delete it to repeat"):
        read_results(tmp_path, GRID.runs())
    older = json.loads(text)
    del older["sha256"], older["model"]  # as versions without checksums wrote it
    write_json(path, older)
    assert read_results(tmp_path, GRID.runs())[1] == result(second)
    write_json(path, [older])
    with pytest.raises(BertkitError, match="is damaged"):
        read_results(tmp_path, GRID.runs())


def test_a_record_in_another_runs_folder_is_refused(tmp_path: Path) -> None:
    """Models are deleted by the names in the records, which may lead out of the folder."""
    victim = tmp_path / "victim" / "model"
    victim.mkdir(parents=True)
    path = tmp_path / "tuned" / "runs" / "copied" / "run.json"
    for name in ("../../victim", GRID.runs()[0].name):
        write_json(path, result(name).as_json())
        with pytest.raises(BertkitError) as refused:
            keep_models(tmp_path / "tuned", all_results(tmp_path / "tuned"), 1)
        assert refused.value.code == "renamed-run"
    assert victim.is_dir()


def test_time_is_no_part_of_the_checksum() -> None:
    """Equal runs have equal checksums, however long they took."""
    values = result("a").as_json()
    assert RunResult.from_json({**values, "seconds": 99.0}).seconds == 99.0
    with pytest.raises(TypeError):
        RunResult.from_json({**values, "degenerate": "x"})


def test_model_problems(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    assert model_problem(folder, result("a", "x")) == "did not keep its model"
    (folder / "beside").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "beside" / "model.safetensors").write_bytes(b"12345")
    whole = model_digest(folder)
    assert model_problem(folder, result("a", whole)) == model_problem(folder, result("a")) == ""
    (folder / "beside" / "model.safetensors").write_bytes(b"12355")
    assert model_problem(folder, result("a", whole)) == "has a damaged model"
    (folder / "beside" / "model.safetensors").unlink()
    assert model_problem(folder, result("a", whole)) == "has a damaged model"


@pytest.fixture
def colours(tmp_path: Path) -> Path:
    rows = [f"{word} {word},{label}" for word in ("river", "stone") for label in ("yes", "no")]
    path = tmp_path / "t.csv"
    path.write_text("text,label\n" + "\n".join(rows * 3) + "\n")
    return path


def tune_on(pretrained: Path, data: Path, out: Path, *more: object) -> None:
    """One or more runs of one epoch, in the folder OUT."""
    words = ("finetune", "classification", "--model", pretrained, "--train", data, "--dev", data,
             "--epochs", "1", "--batch-size", "8", "--precision", "fp32", "--out", out)  # fmt: skip
    with pytest.raises(SystemExit, match="0"):
        main([str(word) for word in (*words, *more)])


def model_bytes(out: Path) -> bytes:
    return (out / "model" / "model.safetensors").read_bytes()


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-9] ^= 8
    path.write_bytes(content)


def test_a_damaged_model_is_made_again(
    pretrained: Path, colours: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The best weights have a flipped bit when the grid goes on: it ends as if they had not."""
    out = tmp_path / "out"
    tune_on(pretrained, colours, out, "--seeds", "2")
    whole = model_bytes(out)
    best = read_json(out / "results.json")["best"]
    shutil.rmtree(out / "model")
    path = out / "runs" / best / "model" / "model.safetensors"
    flip_a_bit(path)
    tune_on(pretrained, colours, out, "--seeds", "2")
    assert f"{best} has a damaged model: it is made again" in capfd.readouterr().err
    assert path.read_bytes() == whole == model_bytes(out)


@pytest.mark.parametrize("name", ["recipe.json", "model"])
def test_a_pre_training_run_is_not_tuned_over(
    pretrained: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str
) -> None:
    """`--model RUN --out RUN` would put a classifier where the pre-trained model was."""
    (tmp_path / "t.csv").write_text("text,label\n" + "river,yes\nstone,no\n" * 4)
    (tmp_path / "run" / name).mkdir(parents=True)
    command = [
        "finetune",
        "classification",
        "--model",
        str(pretrained),
        "--out",
        str(tmp_path / "run"),
    ]
    command += ["--train", str(tmp_path / "t.csv"), "--dev", str(tmp_path / "t.csv")]
    with pytest.raises(SystemExit, match="2"):
        main(command)
    assert f"has a {name} but no finetune.json" in capfd.readouterr().err
    assert not (tmp_path / "run" / "finetune.json").exists()


def test_the_record_of_the_machine_stays_that_of_the_runs(
    pretrained: Path, colours: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Opening a finished folder elsewhere must not say that its numbers were made there."""
    out = tmp_path / "out"
    tune_on(pretrained, colours, out)
    path = out / "environment.json"
    write_json(path, {**read_json(path), "cpu": "another machine"})
    tune_on(pretrained, colours, out)
    assert read_json(path)["cpu"] == "another machine"
    said = capfd.readouterr().err
    assert "different from when this folder was created: cpu 'another machine' ->" in said
    tune_on(pretrained, colours, out, "--seeds", "2")
    for name in ("b8-lr0.0005-e1-s1", "b8-lr0.0005-e1-s2"):
        assert read_json(out / "runs" / name / "environment.json")["cpu"] != "another machine"


def test_a_run_that_is_made_again_counts_with_its_new_scores(
    pretrained: Path,
    colours: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another machine's arithmetic gives other scores, or none, and maybe another best run."""
    out = tmp_path / "out"
    tune_on(pretrained, colours, out, "--seeds", "3", "--keep", "2")
    first = read_json(out / "results.json")
    second = next(run for run in first["runs"] if run["name"] != first["best"])["name"]
    real = finetuning.train_task

    def diverges(*arguments: Any, **options: Any) -> Any:
        if arguments[3].name == first["best"]:
            raise DivergedError("as on another machine")
        return real(*arguments, **options)

    monkeypatch.setattr(finetuning, "train_task", diverges)
    shutil.rmtree(out / "runs" / first["best"] / "model")
    tune_on(pretrained, colours, out, "--seeds", "3", "--keep", "2")
    now = read_json(out / "results.json")
    assert now["best"] != first["best"]
    recorded = {run["name"]: run for run in now["runs"]}
    for name, values in recorded.items():
        assert values == read_json(out / "runs" / name / "run.json")
    assert recorded[first["best"]]["scores"] == {}
    assert recorded[second]["scores"]
    path = out / "runs" / now["best"] / "model" / "model.safetensors"
    assert path.read_bytes() == model_bytes(out)
    assert "again, " in capfd.readouterr().err


def test_of_equal_runs_the_same_is_best_whatever_was_asked_for_last(
    pretrained: Path, colours: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    tune_on(pretrained, colours, out, "--learning-rate", "1e-6")
    before = model_bytes(out)
    tune_on(pretrained, colours, out, "--learning-rate", "2e-6")
    results = read_json(out / "results.json")
    assert len({run["metric"] for run in results["runs"]}) == 1
    assert model_bytes(out) == before
    tune_on(pretrained, colours, out, "--learning-rate", "1e-6")
    assert model_bytes(out) == before


def test_results_are_of_the_model_beside_them(
    pretrained: Path, colours: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """What was predicted with --test stays as long as the best run does."""
    out, rate = tmp_path / "out", "--learning-rate"
    path = tmp_path / "one.jsonl"
    path.write_text('{"text": "river", "label": "yes"}\n{"text": "stone"}\n')
    tune_on(pretrained, colours, out, rate, "1e-6", "--test", path)
    first = read_json(out / "results.json")
    assert first["predicted"]["test"]["inputs"] == 2
    assert first["predicted"]["test"]["scored"] == 1
    assert first["predicted"]["test"]["files"] == ["test.jsonl"]
    tune_on(pretrained, colours, out, rate, "1e-6")
    assert "nothing to do" in capfd.readouterr().err
    tune_on(pretrained, colours, out, rate, "2e-6")
    second = read_json(out / "results.json")
    assert second["best"] == first["best"]
    assert second["scores"] == first["scores"]
    assert (out / "results" / "test.jsonl").is_file()
    run = out / "runs" / first["best"] / "run.json"
    outside = tmp_path / "outside"
    outside.touch()
    second["predicted"]["test"]["files"] += ["../../outside", str(outside)]
    write_json(out / "results.json", second)
    worse = RunResult.from_json(read_json(run))
    scores = {"dev": {**worse.scores["dev"], "accuracy": 0.0}}
    write_json(run, replace(worse, scores=scores, metric=0.0).as_json())
    tune_on(pretrained, colours, out, rate, "2e-6")
    third = read_json(out / "results.json")
    assert third["best"] != first["best"]
    assert "test" not in third["scores"]
    assert not (out / "results" / "test.jsonl").exists()
    assert outside.is_file()  # the record may be a stranger's
    assert f"test predictions of {first['best']}, the best run before" in capfd.readouterr().err
    tune_on(pretrained, colours, out, rate, "2e-6", "--test", path)
    assert (out / "results" / "test.jsonl").is_file()


def test_a_hidden_file_beside_a_model_is_no_damage_and_a_flipped_bit_is(
    pretrained: Path, colours: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    tune_on(pretrained, colours, out)
    best = read_json(out / "results.json")["best"]
    for folder in (out / "model", out / "runs" / best / "model"):
        (folder / ".DS_Store").write_bytes(b"x")
        (folder / ".ipynb_checkpoints").mkdir()  # of a file that was edited in Jupyter
        (folder / ".ipynb_checkpoints" / "README-checkpoint.md").write_bytes(b"x")
    tune_on(pretrained, colours, out)
    assert "is finished; nothing to do" in capfd.readouterr().err
    predictions = out / "results" / "dev.jsonl"
    before = predictions.read_bytes()
    predictions.unlink()
    tune_on(pretrained, colours, out)
    assert predictions.read_bytes() == before
    assert "nothing to do" not in capfd.readouterr().err
    whole = model_bytes(out)
    flip_a_bit(out / "model" / "model.safetensors")
    tune_on(pretrained, colours, out)
    assert "nothing to do" not in capfd.readouterr().err
    assert model_bytes(out) == whole


def test_the_end_of_a_run_names_what_was_lost(
    pretrained: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "t.csv", tmp_path / "out"
    path.write_text("text,label\n" + "river stone,yes\ngarden,no\n" * 4 + "\u200b,no\n")
    tune_on(pretrained, path, out)
    said = capfd.readouterr().err.splitlines()
    end = "inputs in several windows: train 0, dev 0; inputs with a text without tokens: 2"
    assert end in said
    assert read_json(out / "results.json")["unknown"]["dev"]["inputs"] == 1


@pytest.mark.parametrize(
    "given",
    [
        {"seeds": 10**30},
        {"seeds": [1, 2]},
        {"seeds": True},
        {"epochs": (2.5,)},
        {"batch_size": ("8",)},
        {"batch_size": (8.5,)},
    ],
)
def test_grids_that_cannot_be(given: dict[str, Any]) -> None:
    with pytest.raises(BertkitError):
        Grid(**given)


def test_a_run_that_diverged_keeps_no_model(tmp_path: Path) -> None:
    best, lost = (RunResult(name, {}, scores, 0.5, "", 1.0) for name, scores in
                  (("a", {"dev": {"f1": 0.5}}), ("b", {})))  # fmt: skip
    for name in "ab":
        (tmp_path / "runs" / name / "model").mkdir(parents=True)
    keep_models(tmp_path, [best, lost], 1)
    assert (tmp_path / "runs" / "a" / "model").is_dir()
    assert not (tmp_path / "runs" / "b" / "model").exists()


def test_divergence_tells_its_step() -> None:
    with pytest.raises(DivergedError) as caught:
        check_finite(float("nan"), 1.0, 400, 1e-3)
    assert caught.value.step == 400


def test_values_of_numpy_are_those_of_python() -> None:
    rates = np.logspace(-4, -3, 2)
    grid = Grid(
        learning_rate=tuple(rates), batch_size=(np.int64(4),), epochs=(2.0,), seeds=np.int64(1)
    )
    expected = Grid(learning_rate=tuple(rates.tolist()), batch_size=(4,), epochs=(2,))
    assert grid == expected == replace(expected, learning_rate=rates)  # type: ignore[arg-type]
    values = [value for run in grid.runs() for value in vars(run).values()]
    assert {type(value) for value in values} == {int, float}


@pytest.mark.parametrize(
    ("width", "inputs", "task_type", "rate"),
    [
        (1024, 10_000, "classification", 2e-5),
        (768, 400, "token-classification", 5e-5),
        (384, 10_000, "classification", 1e-4),
        (384, 400, "token-classification", 2e-4),
        (256, 2_000, "classification", 4e-4),
        (256, 3_000, "classification", 2e-4),
        (256, 3_000, "token-classification", 4e-4),
    ],
)
def test_the_rate_fits_model_task_and_data(
    width: int, inputs: int, task_type: str, rate: float
) -> None:
    assert Grid().chosen(width, inputs, task_type).learning_rate == (rate,)
    assert Grid(learning_rate=(1e-3,)).chosen(width, inputs, task_type).learning_rate == (1e-3,)
