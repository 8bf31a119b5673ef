"""What a grid keeps of its runs, and how damage to it is noticed."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest

from bertkit.cli import main
from bertkit.errors import BertkitError
from bertkit.files import read_json, write_json
from bertkit.tasks.grid import Grid, RunResult, model_digest, model_problem, read_results

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


def test_a_damaged_model_is_made_again(
    pretrained: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The best weights have a flipped bit when the grid goes on: it ends as if they had not."""
    rows = [f"{word} {word},{label}" for word in ("river", "stone") for label in ("yes", "no")]
    (tmp_path / "t.csv").write_text("text,label\n" + "\n".join(rows * 3) + "\n")
    out = tmp_path / "out"
    command = ["finetune", "classify", "--model", str(pretrained), "--out", str(out)]
    command += ["--train", str(tmp_path / "t.csv"), "--dev", str(tmp_path / "t.csv")]
    command += ["--epochs", "1", "--batch-size", "8", "--seeds", "2", "--precision", "fp32"]
    with pytest.raises(SystemExit, match="0"):
        main(command)
    whole = (out / "model" / "model.safetensors").read_bytes()
    best = read_json(out / "results.json")["best"]
    shutil.rmtree(out / "model")
    path = out / "runs" / best / "model" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-9] ^= 8
    path.write_bytes(content)
    with pytest.raises(SystemExit, match="0"):
        main(command)
    assert f"{best} has a damaged model: it is made again" in capfd.readouterr().err
    assert path.read_bytes() == whole == (out / "model" / "model.safetensors").read_bytes()


@pytest.mark.parametrize("name", ["recipe.json", "model"])
def test_a_pre_training_run_is_not_tuned_over(
    pretrained: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str
) -> None:
    """`--model RUN --out RUN` would put a classifier where the pre-trained model was."""
    (tmp_path / "t.csv").write_text("text,label\n" + "river,yes\nstone,no\n" * 4)
    (tmp_path / "run" / name).mkdir(parents=True)
    command = ["finetune", "classify", "--model", str(pretrained), "--out", str(tmp_path / "run")]
    command += ["--train", str(tmp_path / "t.csv"), "--dev", str(tmp_path / "t.csv")]
    with pytest.raises(SystemExit, match="2"):
        main(command)
    assert f"has a {name} but no finetune.json" in capfd.readouterr().err
    assert not (tmp_path / "run" / "finetune.json").exists()
