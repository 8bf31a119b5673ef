"""Scores of little data: cross-validation, intervals, and what macro F1 is over."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bertkit import load
from bertkit.errors import BertkitError
from bertkit.finetuning.finetune import finetune
from bertkit.finetuning.runs import FinetuneSettings, Grid, TrainingSettings, main_interval
from bertkit.predict.evaluate import evaluate
from bertkit.report.finetuning import finetuning_page
from bertkit.tasks.classification import Classification
from bertkit.tasks.regression import Regression
from tests.conftest import run

FP32 = TrainingSettings(precision="fp32")
ROWS = [(f"{word} {n}", "wet" if word == "river" else "dry") for n in range(9) for word in
        ("river", "stone")]  # fmt: skip


def grid(**values: int) -> FinetuneSettings:
    return FinetuneSettings(
        grid=Grid(batch_size=(8,), learning_rate=(1e-2,), epochs=(4,), **values), training=FP32
    )


@pytest.mark.slow
def test_folds_score_all_rows_and_the_model_is_trained_on_them(
    pretrained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new = [("river 77", "wet")]
    result = finetune("classification", pretrained, tmp_path, train=ROWS * 2, test=new,
                      settings=grid(folds=3))  # fmt: skip
    [setting] = result.values["settings"]
    spread = setting["scores"]["dev"]["accuracy"]
    assert setting["runs"] == 3
    assert spread["lowest"] <= spread["mean"] <= spread["highest"]
    assert result.scores["dev"]["accuracy"] == spread["mean"] == result.best.metric
    assert result.scores["test"].keys() == result.scores["dev"].keys()
    assert [r.settings["fold"] for r in result.runs] == [1, 2, 3, 0]
    starts = [
        json.loads((tmp_path / "runs" / r.name / "journal.jsonl").read_text().splitlines()[0])
        for r in result.runs
    ]
    assert [start["steps_total"] for start in starts] == [12, 12, 12, 20], "24 rows, and 36"
    assert load(tmp_path, precision="fp32")("river 3").label == "wet"
    assert "mean" in capsys.readouterr().err
    again = finetune("classification", pretrained, tmp_path, train=ROWS * 2, test=new,
                     settings=grid(folds=3))  # fmt: skip
    assert again.values == result.values


def test_what_folds_cannot_be_combined_with(pretrained: Path, tmp_path: Path) -> None:
    with pytest.raises(BertkitError, match="folds"):
        Grid(folds=1)
    with pytest.raises(BertkitError, match="--dev"):
        finetune("classification", pretrained, tmp_path / "a", train=ROWS, dev=ROWS,
                 settings=grid(folds=3))  # fmt: skip
    file = tmp_path / "rows.csv"
    file.write_text("text,label\n" + "".join(f"{text},{label}\n" for text, label in ROWS))
    words = ("finetune", "classification", "--train", file, "--model", pretrained, "--out",
             tmp_path / "b", "--dev-share", "0.3")  # fmt: skip
    run(*words, "--dev", file, status=2)
    run(*words, "--folds", "3", status=2)


def test_intervals_are_wilson_s_and_fisher_s() -> None:
    task = Classification(("a", "b"))
    assert main_interval(task, {"accuracy": 1.0}, 2) == pytest.approx([0.342, 1.0], abs=1e-3)
    assert main_interval(task, {"accuracy": 0.5}, 10) == pytest.approx([0.237, 0.763], abs=1e-3)
    assert main_interval(task, {"accuracy": 0.5}, 50) is None
    found = main_interval(Regression(), {"spearman": 0.6}, 20)
    assert found == pytest.approx([0.214, 0.823], abs=1e-3)


def test_little_data_and_missing_labels_are_said(
    pretrained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [*ROWS, ("candle one", "rare")]
    tuned = finetune("classification", pretrained, tmp_path / "run", train=rows, settings=grid())
    low, high = tuned.values["predicted"]["dev"]["intervals"]["accuracy"]
    assert f"{low:.1%} to {high:.1%}" in finetuning_page(tuned.folder)
    said = capsys.readouterr().err
    assert "label 'rare'" in said
    assert "dev has only 2 inputs: accuracy is" in said
    assert "dev lacks 1 of 3 labels, such as 'rare'" in said
    file, out = tmp_path / "tests.csv", tmp_path / "out"
    file.write_text("text,label\nriver 5,wet\n")
    run("evaluate", tmp_path / "run", file, "--precision", "fp32", "--out", out)
    shown = capsys.readouterr()
    assert "tests: 1 input," in shown.err
    assert "1 inputs" not in shown.err
    assert "dev" not in shown.err
    assert {path.name for path in out.iterdir()} == {"tests.jsonl", "tests-scores.json"}
    assert evaluate(tmp_path / "run", [("river 1", "wet")], precision="fp32").split == "data"
