"""Fine-tuning of each task type: what it learns, what it leaves, and how it resumes."""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bertkit import load
from bertkit.checkpoints.pretrained import PretrainedWeights
from bertkit.cli.app import main
from bertkit.errors import BertkitError
from bertkit.finetuning import train
from bertkit.finetuning.finetune import finetune
from bertkit.finetuning.runs import FinetuneSettings, Grid, TrainingSettings
from bertkit.finetuning.train import TaskTraining
from bertkit.predict.evaluate import evaluate
from bertkit.report.pretraining import write_report
from bertkit.tasks.types import TASKS
from bertkit.training.step import mean_losses
from tests.conftest import run

GRID = Grid(batch_size=(8,), learning_rate=(1e-2,), epochs=(12,))
FAST = FinetuneSettings(grid=GRID, training=TrainingSettings(precision="fp32"))
WET, DRY = ("river", "harbour", "thunder"), ("stone", "candle", "copper")
PAIRS = [
    (f"{word} {i % 7}", "wet" if word in WET else "dry") for i in range(8) for word in WET + DRY
]


def rows(task: str) -> list[dict[str, Any]]:
    """Rows that a network can learn from their words."""
    made: list[dict[str, Any]] = []
    for text, label in PAIRS:
        wet = label == "wet"
        made.append(
            {
                "classification": {"text": text, "label": label},
                "multi-label-classification": {"text": text, "label": [label, "any"]},
                "regression": {"text": text, "label": 2.0 if wet else -2.0},
                "multiple-choice": {
                    "text": "the",
                    "choices": [text, f"window {text[-1]}"][:: 1 if wet else -1],
                    "label": 0 if wet else 1,
                },
                "token-classification": {
                    "tokens": text.split(),
                    "ner_tags": ["B-W" if wet else "O", "O"],
                },
                "question-answering": {
                    "question": "garden",
                    "context": f"meadow {text} forest",
                    "answers": text.split()[0] if wet else "",
                },
            }[task]
        )
    return made


@pytest.mark.slow
@pytest.mark.parametrize("task", list(TASKS))
def test_each_task_type_learns_and_is_used(task: str, pretrained: Path, tmp_path: Path) -> None:
    out, data = tmp_path / "run", rows(task)
    result = finetune(task, pretrained, out, train=data, dev=data, settings=FAST)
    metric = result.values["metric"]
    assert result.scores["dev"][metric] > result.values["baseline"]["dev"][metric]
    assert {path.name for path in out.iterdir()} == {
        "model", "results.json", "journal.jsonl", "predictions", "finetune.json", ".lock"
    } - ({".lock"} - {path.name for path in out.iterdir()})  # fmt: skip
    predictor: Any = load(out, precision="fp32")
    results = predictor(data)
    written = (out / "predictions" / "dev.jsonl").read_text().splitlines()
    fields = results[0].to_dict()
    for line, found in zip(written, results, strict=True):
        row = json.loads(line)
        answer = predictor.task.answer_field
        if answer != "tags":
            expected = json.loads(json.dumps(found.to_dict()))[answer]
            assert row[answer] == (
                pytest.approx(expected, abs=1e-3) if answer == "value" else expected
            )
        assert fields.keys() <= row.keys()
    scores = evaluate(out, data, precision="fp32").scores
    assert scores[metric] == pytest.approx(result.scores["dev"][metric], abs=1e-6)


@pytest.mark.slow
def test_a_finished_run_is_not_repeated(pretrained: Path, tmp_path: Path) -> None:
    data = rows("classification")
    first = finetune("classification", pretrained, tmp_path, train=data, settings=FAST)
    stamp = (tmp_path / "model" / "model.safetensors").stat().st_mtime_ns
    again = finetune("classification", pretrained, tmp_path, train=data, settings=FAST)
    assert again.values == first.values
    for name, path in (("finetune.json", "training"), ("results.json", "runs")):
        record = json.loads((tmp_path / name).read_text())
        for part in record[path] if path == "runs" else [record[path]]:
            part.pop("early_stopping" if path == "training" else "degenerate")
        for later in ("task_type", "environment", "labels", "settings", "predicted"):
            record.pop(later if path == "runs" else "", None)
        (tmp_path / name).write_text(json.dumps(record))  # as of a version without these fields
    again = finetune("classification", pretrained, tmp_path, train=data, settings=FAST)
    assert again.best == first.best
    assert write_report(tmp_path).is_file()
    assert (tmp_path / "model" / "model.safetensors").stat().st_mtime_ns == stamp
    patient = replace(FAST, training=replace(FAST.training, early_stopping=2))
    with pytest.raises(BertkitError, match=r"training\.early_stopping None -> 2"):
        finetune("classification", pretrained, tmp_path, train=data, settings=patient)
    with pytest.raises(BertkitError, match="other settings"):
        finetune("classification", pretrained, tmp_path, train=data[1:], settings=FAST)


@pytest.mark.slow
@pytest.mark.parametrize("pause", [0.0, train.CHECKPOINT_SECONDS])
def test_a_stopped_run_ends_with_the_same_bytes(
    pause: float,
    pretrained: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(train, "CHECKPOINT_SECONDS", pause)
    monkeypatch.setattr(train, "CHECKPOINT_SHARE", math.inf)
    data, updates = rows("classification"), TaskTraining.updates
    for stop in (7, 13, 60):

        def stopped(self: TaskTraining, stop: int = stop) -> Any:
            for update in updates(self):
                yield update
                if update.step == stop:
                    raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(TaskTraining, "updates", stopped)
            with pytest.raises(KeyboardInterrupt):
                finetune("classification", pretrained, tmp_path / "s", train=data, settings=FAST)
        assert not (tmp_path / "s" / "results.json").exists()
        steps = [path.name for path in (tmp_path / "s").glob("checkpoints/step-*")]
        saved = {7: [], 13: ["step-00000012"], 60: ["step-00000060"]}[stop]
        assert steps == ([] if pause else saved), "a run of seconds has no checkpoint"
    resumed = finetune("classification", pretrained, tmp_path / "s", train=data, settings=FAST)
    assert pause or "resuming after 60 of" in capfd.readouterr().err
    whole = finetune("classification", pretrained, tmp_path / "w", train=data, settings=FAST)
    assert resumed.scores == whole.scores
    for name in ("model/model.safetensors", "predictions/dev.jsonl"):
        assert (tmp_path / "s" / name).read_bytes() == (tmp_path / "w" / name).read_bytes()
    journals = [journal(tmp_path / name) for name in ("s", "w")]
    losses = [[r["loss"] for r in records if r["kind"] == "step"] for records in journals]
    assert losses[0] == losses[1]


def journal(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_evaluating_takes_a_tenth_of_training(pretrained: Path, tmp_path: Path) -> None:
    data, counts = rows("classification"), {}
    for name, train_rows, dev, every in (
        ("few", data, data[:6], 0), ("many", data[:8], 10 * data, 0), ("asked", data[:8], data, 3)
    ):  # fmt: skip
        training = TrainingSettings(precision="fp32", eval_every=every)
        settings = FinetuneSettings(grid=GRID, training=training)
        out = tmp_path / name
        finetune("classification", pretrained, out, train=train_rows, dev=dev, settings=settings)
        counts[name] = [r["step"] for r in journal(out) if r["kind"] == "evaluation"]
    assert counts == {"few": [12, 24, 36, 48, 60, 72], "many": [12], "asked": [3, 6, 9, 12]}


def write_csv(path: Path, texts: list[tuple[str, str]]) -> Path:
    path.write_text("".join(f"{text},{label}\n" for text, label in [("text", "label"), *texts]))
    return path


@pytest.mark.slow
def test_the_same_command_returns_at_once(
    pretrained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    data = write_csv(tmp_path / "data.csv", PAIRS)
    words = f"finetune classification --model {pretrained} --train {data} --out {tmp_path / 'b'}"
    words += f" --epochs 2 --test {write_csv(tmp_path / 'test.csv', PAIRS[:6])}"
    monkeypatch.setattr(sys, "argv", ["bertkit", *words.split()])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 0
    assert len(capsys.readouterr().err.splitlines()) <= 10 + 3  # of the test file
    with monkeypatch.context() as patch:
        patch.setattr("bertkit.cli.app.application", None)
        with pytest.raises(SystemExit) as end:
            main()
        assert end.value.code == 0
        shown = capsys.readouterr().err
        assert "is finished; best: b4-lr0.0005-e2" in shown
        assert "; test accuracy" in shown
        write_csv(data, PAIRS[1:])
        with pytest.raises(TypeError):
            main()
    with pytest.raises(SystemExit):
        main()
    assert "other settings" in capsys.readouterr().err


@pytest.mark.slow
def test_random_init_takes_sizes_and_tokenizer_alone(
    pretrained: Path, start: PretrainedWeights, tmp_path: Path
) -> None:
    data = rows("classification")
    grid = Grid(batch_size=(8,), learning_rate=(1e-4,), epochs=(1,))
    other = replace(start, tensors={name: 2 * t for name, t in start.tensors.items()})
    weights = []
    for number, (model, random) in enumerate(
        ((start, True), (other, True), (start, False), (other, False))
    ):
        settings = FinetuneSettings(grid=grid, training=FAST.training, random_init=random)
        result = finetune(
            "classification", model, tmp_path / str(number), train=data, settings=settings
        )
        weights.append((result.model / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]
    assert len(set(weights)) == 3


@pytest.mark.slow
def test_a_grid_keeps_the_best_of_its_runs(pretrained: Path, tmp_path: Path) -> None:
    data = rows("classification")
    grid = Grid(batch_size=(8,), learning_rate=(1e-2, 1e-6), epochs=(6,), seeds=2)
    settings = FinetuneSettings(grid=grid, training=FAST.training)
    result = finetune(
        "classification", pretrained, tmp_path, train=data, dev=data, settings=settings
    )
    assert len(result.runs) == 4
    assert result.best.metric == max(run.metric or 0.0 for run in result.runs)
    assert "lr0.01" in result.best.name
    rows_by_setting = result.values["settings"]
    assert [row["runs"] for row in rows_by_setting] == [2, 2]
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {r.name for r in result.runs}
    assert not list(tmp_path.glob("runs/*/model"))
    assert load(tmp_path, precision="fp32")("river").label == "wet"


@pytest.mark.slow
def test_early_stopping_keeps_the_best_evaluation(
    pretrained: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    training = TrainingSettings(early_stopping=2, eval_every=3, precision="fp32")
    settings = FinetuneSettings(grid=GRID, training=training)
    data = rows("classification")
    result = finetune(
        "classification", pretrained, tmp_path, train=data, dev=data, settings=settings
    )
    records = journal(tmp_path)
    evaluations = [r["accuracy"] for r in records if r["kind"] == "evaluation"]
    assert result.best.metric == max(evaluations)
    assert len(evaluations) - 1 - evaluations.index(max(evaluations)) == 2
    assert records[-1]["reason"].startswith("stopped early")
    assert records[-1]["reason"] in capfd.readouterr().err
    assert evaluate(tmp_path, data, precision="fp32").scores["accuracy"] == result.best.metric


@pytest.mark.parametrize("epochs", [(), (20,)])
def test_training_that_has_converged_ends_unless_epochs_are_set(
    pretrained: Path, tmp_path: Path, epochs: tuple[int, ...]
) -> None:
    grid = Grid(batch_size=(8,), learning_rate=(4e-3,), epochs=epochs)
    settings, data = replace(FAST, grid=grid), rows("classification")
    finetune("classification", pretrained, tmp_path, train=data, dev=data[:8], settings=settings)
    start, *records = journal(tmp_path)
    assert start["steps_total"] == 20 * len(data) / 8
    last = [record for record in records if record["kind"] == "step"][-1]
    if epochs:
        assert (last["step"], records[-1]["reason"]) == (start["steps_total"], "finished")
    else:
        assert last["loss"] < 0.01
        assert last["step"] in range(6, start["steps_total"], 6)
        other = replace(settings, grid=replace(grid, epochs=(20,)))
        with pytest.raises(BertkitError, match="other settings"):
            finetune(
                "classification", pretrained, tmp_path, train=data, dev=data[:8], settings=other
            )


def test_all_updates_of_an_epoch_decide_whether_it_converged(
    pretrained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses: list[float] = []
    updates = TaskTraining.updates

    def noted(self: TaskTraining) -> Any:
        for update in updates(self):
            losses.append(mean_losses(update.sums, update.counts)["loss"])
            yield update

    monkeypatch.setattr(TaskTraining, "updates", noted)
    data = rows("classification")[:41]  # the last batch of an epoch has one row
    settings = replace(FAST, grid=Grid(batch_size=(8,), learning_rate=(4e-3,)))
    finetune("classification", pretrained, tmp_path, train=data, dev=data[:8], settings=settings)
    means = [statistics.fmean(losses[first : first + 6]) for first in range(0, len(losses), 6)]
    assert len(losses) % 6 == 0
    assert [mean < 0.01 for mean in means] == [False] * (len(means) - 1) + [True]


@pytest.mark.slow
def test_held_out_data_keeps_labels_and_groups(pretrained: Path, tmp_path: Path) -> None:
    data = [*rows("classification"), {"text": "walking", "label": "rare"}]
    result = finetune("classification", pretrained, tmp_path / "a", train=data, settings=FAST)
    assert "rare" in result.values["labels"]
    assert result.values["inputs"]["dev"]["inputs"] == 4
    questions = rows("question-answering")[:12]
    for number, row in enumerate(questions):
        row["context"] = ("meadow river forest", "meadow stone forest")[number % 2]
        row["answers"] = "river" if number % 2 == 0 else ""
    result = finetune(
        "question-answering", pretrained, tmp_path / "b", train=questions, settings=FAST
    )
    assert result.values["inputs"]["dev"]["inputs"] == 6, "questions on a context stay together"


@pytest.mark.slow
def test_class_weights_and_own_metrics(pretrained: Path, tmp_path: Path) -> None:
    data = rows("classification")[:30] + [{"text": "garden", "label": "dry"}] * 20
    training = TrainingSettings(class_weights={"wet": 5.0}, precision="fp32")
    settings = FinetuneSettings(grid=GRID, training=training, metric="share")
    metrics = {"share": lambda gold, found: sum(map(str.__eq__, gold, found)) / len(gold)}
    result = finetune(
        "classification",
        pretrained,
        tmp_path,
        train=data,
        dev=data,
        settings=settings,
        metrics=metrics,
    )
    assert result.scores["dev"]["share"] == result.scores["dev"]["accuracy"] == result.best.metric
    wrong = TrainingSettings(class_weights={"moist": 2.0})
    settings = FinetuneSettings(grid=GRID, training=wrong)
    with pytest.raises(BertkitError, match="moist"):
        finetune("classification", pretrained, tmp_path / "w", train=data, settings=settings)
    with pytest.raises(BertkitError, match="finite"):
        finetune("classification", pretrained, tmp_path / "n", train=data, dev=data, settings=FAST,
                 metrics={"none": lambda gold, found: float("nan")})  # fmt: skip
    with pytest.raises(BertkitError, match="rename your own"):
        finetune("classification", pretrained, tmp_path / "t", train=data, settings=FAST,
                 metrics={"accuracy": lambda gold, found: 1.0})  # fmt: skip


@pytest.mark.slow
def test_a_head_for_the_same_task_is_reused(pretrained: Path, tmp_path: Path) -> None:
    data = rows("classification")
    finetune("classification", pretrained, tmp_path / "a", train=data, dev=data, settings=FAST)
    short = FinetuneSettings(
        grid=Grid(batch_size=(8,), learning_rate=(1e-9,), epochs=(1,)),
        training=FAST.training,
    )
    kept = finetune(
        "classification", tmp_path / "a", tmp_path / "b", train=data, dev=data, settings=short
    )
    assert kept.scores["dev"]["accuracy"] == 1.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train": []}, "no row that can be used"),
        ({"train": [{"text": "a", "label": "x"}] * 4}, "only the label"),
        ({"train": [{"texts": "a", "label": "x"}] * 4}, "did you mean 'texts'"),
        ({"train": 7}, "give a path, a DataFrame"),
        ({"dev": [{"text": "a", "label": "moist"}]}, "'moist' is not one of"),
        ({"settings": FinetuneSettings(grid=GRID, metric="f2")}, "f2"),
    ],
)
def test_bad_data_is_refused(
    change: dict[str, Any], message: str, start: PretrainedWeights, tmp_path: Path
) -> None:
    arguments: dict[str, Any] = {"train": rows("classification"), "settings": FAST, **change}
    with pytest.raises(BertkitError, match=message):
        finetune("classification", start, tmp_path / "run", **arguments)


def test_names_of_tasks(pretrained: Path, tmp_path: Path, write: Callable[..., Path]) -> None:
    with pytest.raises(BertkitError, match="did you mean 'regression'"):
        finetune("regresion", pretrained, tmp_path / "a", train=rows("regression"))
    with pytest.raises(BertkitError, match="--data FOLDER"):
        finetune("mrpc", pretrained, tmp_path / "a")
    with pytest.raises(BertkitError, match="official"):
        finetune("squad-1.1", pretrained, tmp_path / "a", train=rows("question-answering"))


TAGGED = {
    "rows.csv --words w --tags t --sentence s": "s,w,t\n"
    + "1,river,wet\n,stone,O\n2,candle,O\n" * 9,
    "spans.jsonl": '{"text": "river, stone", "label": [[0, 5, "wet"]]}\n' * 9,
    "io.txt": "river wet\nstone O\n\n" * 9,
}


@pytest.mark.slow
@pytest.mark.parametrize("flags", TAGGED)
def test_entities_by_command(flags: str, pretrained: Path, tmp_path: Path) -> None:
    """Of tables of words, spans of characters and tags without marks."""
    name, *options = flags.split()
    file, out = tmp_path / name, tmp_path / "run"
    file.write_text(TAGGED[flags])
    options = [*options, "--epochs", "12", "--learning-rate", "1e-2", "--batch-size", "4"]
    start = ["--model", pretrained, "--out", out, "--precision", "fp32"]
    run("finetune", "token-classification", "--train", file, "--dev", file, *options, *start)
    predictions = (out / "predictions" / "dev.jsonl").read_text().splitlines()
    entities = [entity for line in predictions for entity in json.loads(line)["entities"]]
    assert [(entity["type"], entity["text"]) for entity in entities] == [("wet", "river")] * 9
    assert json.loads((out / "results.json").read_text())["scores"]["dev"]["f1/wet"] == 1.0
    run("predict", out, file, "--out", tmp_path / "out.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [entity["text"] for row in rows for entity in row["entities"]] == ["river"] * 9
