"""What watches and steers a fine-tuning: records, evaluations, early stopping, weights, metrics."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bertkit.datasets.examples import TextExample, WordsExample
from bertkit.finetuning.run import class_weights, train_task

from bertkit import FinetuneSettings, Grid, TrainingSettings, finetune, load
from bertkit.checkpoints.pretrained import PretrainedWeights
from bertkit.cli.app import main
from bertkit.errors import BertkitError, InputTypeError
from bertkit.finetuning.settings import RunSettings
from bertkit.tasks.classification import Classification, MultiLabelClassification
from bertkit.tasks.regression import Regression
from bertkit.tasks.token_classification import TokenClassification
from bertkit.training.journal import read_journal
from tests.conftest import run

Record = dict[str, Any]
WORDS = ("bridge", "lantern", "harvest", "winter", "garden", "letter", "sailor", "thread")
ROWS = [
    {"text": f"{first} {word}", "label": label}
    for first, label in (("river stone", "wet"), ("candle forest", "dry"))
    for word in WORDS
]
RUN = "b4-lr0.005-e3-s1"


def tune(model: Path, out: Path, *, epochs: int = 3, data: Any = ROWS, **options: Any) -> Any:
    """Fine-tune on `ROWS`, four updates an epoch; settings and arguments by their names."""
    training = {k: options.pop(k) for k in list(options) if k in TrainingSettings.__annotations__}
    chosen = {k: options.pop(k) for k in ("metric", "track", "keep") if k in options}
    settings = FinetuneSettings(
        grid=Grid(batch_size=(4,), learning_rate=(5e-3,), epochs=(epochs,)),
        training=TrainingSettings(precision="fp32", **training),
        **{"track": (), **chosen},
    )
    task_type = options.pop("task_type", "classification")
    return finetune(task_type, model, out, train=data, dev=data, settings=settings, **options)


def outcome(out: Path) -> dict[str, bytes]:
    """The bytes of the model and the predictions, and the results without times."""
    files = [*(out / "model").iterdir(), *(out / "results").iterdir()]
    found = {str(path.relative_to(out)): path.read_bytes() for path in files}
    results = json.loads((out / "results.json").read_text())
    for one in results["runs"]:
        del one["seconds"]
    return {**found, "results": json.dumps(results).encode()}


def kinds(records: list[Record]) -> list[tuple[str, int]]:
    return [(record["kind"], record["step"]) for record in records]


def test_settings_of_another_type_are_refused(pretrained: Path, tmp_path: Path) -> None:
    with pytest.raises(InputTypeError, match="settings must be FinetuneSettings"):
        finetune("classification", pretrained, tmp_path, train=ROWS, settings={"seeds": 2})  # type: ignore[arg-type]


def test_every_record_of_a_run_is_passed_on(pretrained: Path, tmp_path: Path) -> None:
    records: list[Record] = []
    tune(pretrained, tmp_path, eval_every=5, on_record=records.append)
    assert [r for r in kinds(records) if r[0] != "step"] == [
        *(("start", 0), ("evaluation", 5), ("checkpoint", 5)),
        *(("evaluation", 10), ("checkpoint", 10), ("evaluation", 12), ("end", 12)),
    ]
    written = read_journal(tmp_path / "runs" / RUN / "journal.jsonl")
    assert [{"run": RUN, **record} for record in written] == records
    first, last = (record for record in records if record["step"] in (5, 12) and "split" in record)
    assert (first["split"], first["epoch"], last["epoch"]) == ("dev", 1.25, 3.0)
    assert (
        last["accuracy"]
        == json.loads((tmp_path / "results.json").read_text())["scores"]["dev"]["accuracy"]
    )
    assert records[-1]["reason"] == "finished"
    assert records[0]["learning_rate"] == 5e-3
    assert not (tmp_path / "runs" / RUN / "checkpoints").exists()


def test_evaluation_changes_no_weight(pretrained: Path, tmp_path: Path) -> None:
    """Nor does its interval need to be that of the run that is resumed."""
    tune(pretrained, tmp_path / "a")
    tune(pretrained, tmp_path / "b", eval_every=2)
    names = ("model/model.safetensors", "results/dev.jsonl")
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    before = (tmp_path / "b" / "results.json").read_bytes()
    tune(pretrained, tmp_path / "b", eval_every=3)
    assert (tmp_path / "b" / "results.json").read_bytes() == before


class StoppedError(Exception):
    """Raised by a test to stop a run."""


def stop_at(kind: str, step: int) -> Callable[[Record], None]:
    def stop(record: Record) -> None:
        if record["kind"] == kind and record["step"] >= step:
            raise StoppedError

    return stop


@pytest.mark.parametrize("early_stopping", [0, 2])
def test_a_run_stopped_anywhere_ends_with_the_same_bytes(
    pretrained: Path, tmp_path: Path, early_stopping: int
) -> None:
    options = {"early_stopping": early_stopping, "eval_every": 3}
    tune(pretrained, tmp_path / "whole", **options)
    for kind, step in (
        ("start", 0),
        ("step", 3),
        ("evaluation", 3),
        ("step", 6),
        ("checkpoint", 9),
    ):
        with pytest.raises(StoppedError):
            tune(pretrained, tmp_path / "run", on_record=stop_at(kind, step), **options)
    resumed: list[Record] = []
    tune(pretrained, tmp_path / "run", on_record=resumed.append, **options)
    assert kinds(resumed)[0] == ("start", 9)
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")
    first, second = (
        [kinds([r])[0] for r in read_journal(out / "runs" / RUN / "journal.jsonl")
         if r["kind"] in ("step", "evaluation")]
        for out in (tmp_path / "run", tmp_path / "whole")
    )  # fmt: skip
    assert first == second


LONGER: dict[str, Any] = {"epochs": 8, "eval_every": 6, "early_stopping": 4}
KILLED = """
import os, signal, sys
sys.path.insert(0, {root!r})
from pathlib import Path
from tests.tasks.test_hooks import LONGER, tune

def kill(record):
    if record["kind"] == "step" and record["step"] == 18:
        os.kill(os.getpid(), signal.SIGKILL)

tune(Path(sys.argv[1]), Path(sys.argv[2]), on_record=kill, **LONGER)
"""


@pytest.mark.slow
def test_a_run_that_is_killed_ends_with_the_same_bytes(pretrained: Path, tmp_path: Path) -> None:
    script = KILLED.format(root=str(Path(__file__).resolve().parents[2]))
    out, whole = tmp_path / "run", tmp_path / "whole"
    killed = subprocess.run(
        [sys.executable, "-c", script, str(pretrained), str(out)],
        capture_output=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    [saved] = out.glob("runs/*/checkpoints/step-*")
    assert saved.name == "step-00000012"
    resumed: list[Record] = []
    tune(pretrained, out, on_record=resumed.append, **LONGER)
    assert kinds(resumed)[0] == ("start", 12)
    tune(pretrained, whole, **LONGER)
    assert outcome(out) == outcome(whole)


def test_a_model_is_kept_with_its_own_scores(pretrained: Path, tmp_path: Path) -> None:
    """A run is stopped when it has kept a model, whose evaluation then ends otherwise."""
    options: Record = {"early_stopping": 4, "eval_every": 3, "metric": "mine"}
    with pytest.raises(StoppedError):
        tune(
            *(pretrained, tmp_path),
            metrics={"mine": shown_loss([0.6, 0.8])},
            on_record=stop_at("evaluation", 6),
            **options,
        )
    tune(pretrained, tmp_path, metrics={"mine": shown_loss([0.5])}, **options)
    results = json.loads((tmp_path / "results.json").read_text())
    details = json.loads((tmp_path / "model" / "bertkit.json").read_text())
    assert details["scores"]["dev"]["mine"] == 0.5
    assert results["scores"]["dev"]["mine"] == 0.5


def test_a_damaged_checkpoint_is_named(pretrained: Path, tmp_path: Path) -> None:
    with pytest.raises(StoppedError):
        tune(pretrained, tmp_path, on_record=stop_at("checkpoint", 4))
    [saved] = tmp_path.glob("runs/*/checkpoints/step-*")
    (saved / "model.safetensors").write_bytes(b"")
    with pytest.raises(BertkitError, match=r"no checkpoint in .*/checkpoints is intact"):
        tune(pretrained, tmp_path)


def shown_loss(values: list[float]) -> Callable[[list[Any], list[Any]], float]:
    """A metric that gives these values, one at each call, and then the last one."""
    left = list(values)
    return lambda gold, found: left.pop(0) if len(left) > 1 else left[0]


@pytest.mark.parametrize("value", [None, "high", {}, math.nan, 1j])
def test_a_metric_that_is_no_number(pretrained: Path, tmp_path: Path, value: object) -> None:
    with pytest.raises(BertkitError, match=r"the metric 'mine' returned .*; it must return"):
        tune(pretrained, tmp_path, metrics={"mine": lambda *_: value}, epochs=1)  # type: ignore[dict-item,return-value]


def test_a_metric_of_ones_own_is_shown_first_and_as_a_number(
    pretrained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such as an error, negated so that higher is better."""
    metrics = {"negated_error": lambda *_: -18.5}
    tune(pretrained, tmp_path, epochs=1, metrics=metrics, metric="negated_error")
    said = capsys.readouterr().err
    assert f"{RUN.replace('e3', 'e1')}: dev negated_error -18.5, accuracy " in said
    assert "negated_error median -18.5 (-18.5 to -18.5), " in said
    assert r"negated\_error -18.5, accuracy" in (tmp_path / "model" / "README.md").read_text()
    run("report", tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert "-18.500" in page
    assert "1850" not in page


def test_early_stopping_keeps_the_best(pretrained: Path, tmp_path: Path) -> None:
    records: list[Record] = []
    best = tune(
        *(pretrained, tmp_path / "stopped"),
        eval_every=2,
        epochs=5,
        early_stopping=2,
        metric="mine",
        metrics={"mine": shown_loss([0.1, 0.4, 0.4, 0.3])},
        on_record=records.append,
    )
    assert [step for kind, step in kinds(records) if kind == "evaluation"] == [2, 4, 6, 8]
    assert (records[-1]["kind"], records[-1]["reason"]) == ("end", "stopped early")
    assert best.metric == best.scores["dev"]["mine"] == 0.4
    with pytest.raises(StoppedError):  # after the fourth update, the first evaluation there
        tune(
            *(pretrained, tmp_path / "other"),
            eval_every=4,
            epochs=5,
            early_stopping=1,
            on_record=stop_at("checkpoint", 4),
        )
    [kept] = (tmp_path / "other").glob("runs/*/model/model.safetensors")
    assert kept.read_bytes() == (tmp_path / "stopped" / "model" / "model.safetensors").read_bytes()


def test_a_metric_may_have_the_name_of_a_field_of_the_journal(
    pretrained: Path, tmp_path: Path
) -> None:
    metrics = {"step": lambda *_: 0.5}
    with pytest.raises(StoppedError):
        tune(pretrained, tmp_path, metrics=metrics, on_record=stop_at("checkpoint", 8))
    tune(pretrained, tmp_path, metrics=metrics)
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["scores"]["dev"]["step"] == 0.5


def test_a_metric_that_is_no_function(pretrained: Path, tmp_path: Path) -> None:
    with pytest.raises(BertkitError) as raised:
        tune(pretrained, tmp_path, metrics={"mine": 5}, epochs=1)  # type: ignore[dict-item]
    assert raised.value.code == "metric"


def test_runs_are_compared_by_the_chosen_metric(pretrained: Path, tmp_path: Path) -> None:
    calls: list[tuple[list[Any], list[Any]]] = []

    def share_of_wet(gold: list[Any], found: list[Any]) -> float:
        calls.append((gold, found))
        return found.count("wet") / len(gold)

    best = tune(pretrained, tmp_path, metrics={"wet": share_of_wet}, metric="wet", epochs=1)
    gold, found = calls[-1]
    assert gold == [row["label"] for row in ROWS]
    assert best.metric == best.scores["dev"]["wet"] == found.count("wet") / 16
    results = json.loads((tmp_path / "results.json").read_text())
    assert (results["metric"], results["scores"]["dev"]["wet"]) == ("wet", best.metric)
    with pytest.raises(BertkitError, match="other settings"):
        tune(pretrained, tmp_path, epochs=1)
    other = tune(pretrained, tmp_path / "other", metric="macro_f1", epochs=1)
    assert other.metric == other.scores["dev"]["macro_f1"]


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"metric": "acuracy"}, "metric"),
        ({"metrics": {"accuracy": lambda gold, found: 0.0}}, "error"),
        ({"metrics": {"mine": lambda gold, found: float("nan")}}, "error"),
        ({"class_weights": {"wett": 2.0}}, "class-weights"),
        ({"class_weights": "balance"}, "class-weights"),
        ({"class_weights": False}, "class-weights"),
        ({"class_weights": [("wet", 2.0)]}, "class-weights"),
        ({"class_weights": {"wet": -1}}, "class-weights"),
        ({"early_stopping": -1}, "error"),
        ({"keep": 1.5}, "error"),
        ({"track": ("tensorbord",)}, "error"),
    ],
)
def test_impossible_wishes(
    pretrained: Path, tmp_path: Path, options: dict[str, Any], code: str
) -> None:
    with pytest.raises(BertkitError) as refused:
        tune(pretrained, tmp_path, epochs=1, **options)
    assert refused.value.code == code


def test_an_error_is_no_score_to_compare_by(pretrained: Path, tmp_path: Path) -> None:
    rows = [{"text": row["text"], "label": float(i)} for i, row in enumerate(ROWS)]
    with pytest.raises(BertkitError) as refused:
        tune(pretrained, tmp_path, data=rows, task_type="regression", metric="mean_squared_error")
    assert refused.value.code == "metric"


def test_plain_predictions_of_every_task_type(pretrained: Path, tmp_path: Path) -> None:
    words = [
        {"tokens": row["text"].split(), "ner_tags": ["O", "B-X", "O"]} for row in ROWS
    ]  # one tag for each word
    numbers = [{"text": row["text"], "label": float(i)} for i, row in enumerate(ROWS)]
    sets = [{"text": row["text"], "label": [row["label"], "all"]} for row in ROWS]
    choices = [{"text": row["text"], "choices": ["river", "dust"], "label": 0} for row in ROWS]
    answers = [
        {"question": "What?", "context": row["text"],
         "answers": {"text": [row["text"].split()[0]], "answer_start": [0]}}
        for row in ROWS
    ]  # fmt: skip
    from bertkit import ChoiceColumns

    for task_type, rows, more, kind in (
        ("token-classification", words, {}, tuple),
        ("regression", numbers, {}, float),
        ("multi-label-classification", sets, {}, tuple),
        ("multiple-choice", choices, {"columns": ChoiceColumns(choices=("choices",))}, int),
        ("question-answering", answers, {}, str),
    ):
        seen: list[Any] = []

        def keep(gold: list[Any], found: list[Any], seen: list[Any] = seen) -> float:
            seen.append((gold[0], found[0]))
            return len(found)

        best = tune(
            *(pretrained, tmp_path / task_type),
            task_type=task_type,
            data=rows,
            metrics={"seen": keep},
            epochs=1,
            **more,
        )
        assert best.scores["dev"]["seen"] == 16
        assert all(type(found) is kind for _, found in seen), task_type
        if kind not in (str, tuple):
            assert all(type(gold) is kind for gold, _ in seen), task_type


def test_metrics_get_labels_in_the_form_of_predictions(pretrained: Path, tmp_path: Path) -> None:
    """Tags of data in IOB1 or IOBES are IOB2 there, and sets of labels have one order."""

    def same(gold: list[Any], found: list[Any]) -> float:
        assert len(gold) == len(found) == 16
        return float(np.mean([g == f for g, f in zip(gold, found, strict=True)]))

    words = [{"tokens": row["text"].split(), "ner_tags": ["I-X", "O", "S-Y"]} for row in ROWS]
    sets = [{**row, "label": [row["label"], "all"]} for row in ROWS]
    for task_type, rows, own in (
        ("token-classification", words, "accuracy"),
        ("multi-label-classification", sets, "exact_match"),
    ):
        more: dict[str, Any] = {"metrics": {"same": same}, "data": rows, "epochs": 20}
        best = tune(pretrained, tmp_path / own, task_type=task_type, **more)
        assert best.scores["dev"]["same"] == best.scores["dev"][own] == 1.0


def text(number: int, label: Any) -> TextExample:
    return TextExample(str(number), f"river {WORDS[number % 8]}", None, label, f"a:{number}")


def test_balanced_weights(start: PretrainedWeights) -> None:
    """As in scikit-learn; for sets of labels, the inputs without a label over those with it."""
    from sklearn.utils.class_weight import compute_class_weight

    labels = ["dry"] * 2 + ["wet"] * 6
    items = Classification(("dry", "wet"), max_length=20).items(
        [text(i, label) for i, label in enumerate(labels)], start.tokenizer
    )
    task: Any = Classification(("dry", "wet"), max_length=20)
    found = class_weights(task, items, ("balanced",))
    assert found is not None
    expected = compute_class_weight("balanced", classes=np.unique(labels), y=labels)
    assert found.tolist() == pytest.approx(expected.tolist())
    given = class_weights(task, items, ("wet=3.5",))
    assert given is not None
    assert given.tolist() == [1.0, 3.5]
    assert class_weights(task, items, ()) is None
    task = MultiLabelClassification(("a", "b", "c"), max_length=20)
    sets = [text(i, ("a", "b") if i < 2 else ("a",)) for i in range(8)]
    found = class_weights(task, task.items(sets, start.tokenizer), ("balanced",))
    assert found is not None
    assert found.tolist() == [1.0, 3.0, 1.0]  # without inputs on both sides there is no weight
    task = TokenClassification(("O", "B-X", "I-X"), max_length=20)
    words = [WordsExample("0", ("a", "b", "c", "d"), ("O", "B-X", "O", "O"), 0, "a:1")]
    found = class_weights(task, task.items(words, start.tokenizer), ("balanced",))
    assert found is not None
    assert found.tolist() == pytest.approx([2 / 3, 2.0, 1.0])
    regression = Regression(max_length=20)
    with pytest.raises(BertkitError) as refused:
        class_weights(regression, regression.items([text(0, 1.0)], start.tokenizer), ("balanced",))
    assert refused.value.code == "class-weights"


def test_targets_of_many_labels_take_a_byte_each(start: PretrainedWeights) -> None:
    labels = tuple(f"label {number}" for number in range(2000))
    task = MultiLabelClassification(labels, max_length=20)
    inputs = [text(number, (labels[number],)) for number in range(200)]
    tracemalloc.start()
    try:
        items = task.items(inputs, start.tokenizer)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(items.items) == 200
    assert taken < 2 * 200 * 2000


def updated(start: PretrainedWeights, task: Any, inputs: list[Any], weights: Any) -> torch.Tensor:
    """The bias of the head after one update."""
    torch.manual_seed(0)
    model = train_task(
        *(start, task, task.items(inputs, start.tokenizer)),
        RunSettings(batch_size=8, learning_rate=0.01, epochs=1, seed=1),
        TrainingSettings(dropout=0.0, class_weights=weights, max_gradient_norm=1e9),
        device=torch.device("cpu"),
        precision="fp32",
        keep_head=False,
    )
    return model.state_dict()["classifier.bias"]


@pytest.mark.parametrize(
    ("task", "gold"),
    [
        (Classification(("dry", "wet"), max_length=20), "wet"),
        (MultiLabelClassification(("dry", "wet"), max_length=20), ("wet",)),
    ],
)
def test_weights_scale_the_loss_of_their_class(
    start: PretrainedWeights, task: Any, gold: Any
) -> None:
    """A weight of 2 is the gradient of an input that is there twice."""
    from bertkit.tasks.task import make_batch

    inputs = [text(0, gold), text(1, "dry" if gold == "wet" else ("dry",))]
    items = task.items(inputs, start.tokenizer)
    torch.manual_seed(0)
    model = start.build(task.build, keep_head=False).model.eval().requires_grad_(False)
    parts = [part for item in items.items for part in item.parts]
    batch = make_batch(parts, task.targets)
    plain = [
        float(task.objective(model, make_batch([part], task.targets))["loss"].value)
        for part in parts
    ]
    tensors = {**batch.tensors, "class_weights": torch.tensor([1.0, 2.0])}
    weighted = task.objective(model, type(batch)(batch.packed, tensors, batch.counts, batch.place))
    if gold == "wet":
        expected = 2 * plain[0] + plain[1]
    else:  # of the labels that an input has
        logits = model(make_batch(parts[:1]).packed)
        extra = float(torch.nn.functional.softplus(-logits[0, 1])) / 2
        expected = plain[0] + extra + plain[1]
    assert float(weighted["loss"].value) == pytest.approx(expected, rel=1e-5)


def test_weights_of_tags(start: PretrainedWeights) -> None:
    words = [WordsExample("0", ("river", "stone"), ("O", "B-X"), 0, "a:1")]
    task = TokenClassification(("O", "B-X", "I-X"), max_length=20)
    plain, same, other = (
        updated(start, task, words, weights)
        for weights in ((), {"O": 1.0}, {"B-X": 1e-6, "I-X": 5.0})
    )
    assert torch.equal(plain, same)
    assert plain[1] > 0.005  # the first update of Adam is the learning rate
    assert other[1] < 0.005


def test_flags(pretrained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("text,label\n" + "".join(f"{r['text']},{r['label']}\n" for r in ROWS[:12]))
    words = ("finetune", "classification", "--train", path, "--dev", path, "--model", pretrained,
             "--out", tmp_path / "run", "--epochs", "4", "--batch-size", "4", "--eval-every", "2",
             "--early-stopping", "1", "--class-weights", "wet=2", "dry=1", "--metric", "macro_f1",
             "--learning-rate", "1e-9")  # fmt: skip
    with pytest.raises(SystemExit) as end:
        main([str(word) for word in words])
    assert end.value.code == 0
    said = capsys.readouterr().err
    assert "class weights: dry 1, wet 2" in said
    assert "stopped early" in said
    [journal] = (tmp_path / "run").glob("runs/*/journal.jsonl")
    records = read_journal(journal)
    assert kinds(records)[-1] == ("end", 4)  # the second evaluation is no better than the first
    assert records[0]["tuning"]["class_weights"] == ["wet=2", "dry=1"]
    assert isinstance(load(tmp_path / "run")("river").label, str)


def test_a_mapping_is_recorded_as_the_flags_would_be() -> None:
    weights: Mapping[str, float] = {"a=b": 2, "c": 0.5}
    assert TrainingSettings(class_weights=weights).class_weights == ("a=b=2", "c=0.5")
    assert TrainingSettings(class_weights=None).class_weights == ()  # type: ignore[arg-type]
