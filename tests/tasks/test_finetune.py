"""Every kind from files to a model in use, through the command line and from Python."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bertkit.finetuning.grid import best_run, read_results

from bertkit import DataFiles, FinetuneSettings, TrainingSettings, finetune, load
from bertkit.checkpoints.pretrained import load_config
from bertkit.errors import BertkitError
from bertkit.files import write_json
from bertkit.finetuning import finetune as finetuning
from bertkit.finetuning.settings import Grid
from bertkit.model.task_heads import ScaledLinear
from bertkit.tasks.question_answering import QuestionAnswering
from bertkit.tasks.regression import Regression
from bertkit.tokenizer.wordpiece import Tokenizer
from tests.conftest import run

Write = Callable[[str, str], Path]


def fails(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    capsys.readouterr()
    run(*arguments, status=2)
    lines = capsys.readouterr().err.strip().splitlines()
    assert lines[-1].startswith("error: ")
    return lines[-1]


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


FAST = ("--learning-rate", "5e-3", "--batch-size", "8", "--precision", "fp32")


def tuning(
    task: str, model: object, train: object, out: object, *flags: object, dev: object = None
) -> tuple[object, ...]:
    """The words of a short fine-tuning, of one epoch and with its training data as dev data."""
    more = [word for one in flags for word in (one.split() if isinstance(one, str) else [one])]
    apart = () if dev == "" else ("--dev", train if dev is None else dev)
    once = () if "--epochs" in more else ("--epochs", "1")
    words = ("finetune", task, "--model", model, "--train", train, *apart, "--out", out)
    return (*words, *once, *FAST, *more)


def tune(*arguments: object, **options: object) -> None:
    run(*tuning(*arguments, **options))  # type: ignore[arg-type]


WEATHER = "text,label\n" + "".join(
    f"{word} {other},{label}\n"
    for word, label in (("river stone", "wet"), ("candle forest", "dry"))
    for other in ("bridge", "lantern", "harvest", "winter", "garden", "letter")
)


@pytest.fixture
def weather(write: Write) -> Path:
    return write("weather.csv", WEATHER)


@pytest.fixture(scope="module")
def tuned(pretrained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier of the weather after one epoch, which no test changes."""
    folder = tmp_path_factory.mktemp("tuned")
    (folder / "weather.csv").write_text(WEATHER)
    tune("classification", pretrained, folder / "weather.csv", folder / "run")
    return folder / "run"


def test_classify_from_csv_to_answers(
    pretrained: Path,
    weather: Path,
    tmp_path: Path,
    write: Write,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "run"
    tune("classification", pretrained, weather, out, "--epochs 12")
    said = capsys.readouterr().err
    assert "train: 12 inputs" in said
    assert "0 in several windows, 0 cut" in said
    assert "input-independent baseline: accuracy 50.0%" in said
    results = json.loads((out / "results.json").read_text())
    assert results["scores"]["dev"]["accuracy"] == 1.0
    assert {row["label"] for row in rows(out / "results" / "dev.jsonl")} == {"wet", "dry"}

    config = json.loads((out / "model" / "config.json").read_text())
    assert config["id2label"] == {"0": "dry", "1": "wet"}
    predict = load(out)
    assert predict("river stone").label == "wet"
    assert predict("candle forest candle").probabilities["dry"] > 0.5

    asked = write("asked.txt", "river stone\n\ncandle forest \U0001f600 \u05e9\u05dc\u05d5\u05dd\n")
    run("predict", out, asked, "--out", tmp_path / "found.jsonl", "--precision", "fp32")
    assert [row["label"] for row in rows(tmp_path / "found.jsonl")] == ["wet", "dry"]
    lost = "0 in several windows, 0 cut, 2 of 6 tokens [UNK] (33.3%)"
    assert f"2 inputs, {lost}" in capsys.readouterr().err
    bare = write("asked.csv", "text,label\nriver stone,wet\ncandle forest \U0001f600 \u05e9,dry\n")
    run("evaluate", out, bare)
    assert f"tokens each, {lost}" in capsys.readouterr().err
    some = write("some.csv", "text,label\nriver stone,wet\ncandle,\n")
    run("evaluate", out, some, "--ensemble", out, "--split", "test",
        "--precision", "fp32", "--out", tmp_path / "scored")  # fmt: skip
    assert set(json.loads((tmp_path / "scored" / "test-scores.json").read_text())) == {
        "accuracy",
        "macro_f1",
    }
    record = json.loads((tmp_path / "scored" / "test-run.json").read_text())
    assert (record["inputs"], record["scored"], record["precision"]) == (2, 1, "fp32")
    assert record["models"] == [str(out)] * 2
    assert record["environment"]["versions"]["torch"] == torch.__version__
    (tmp_path / "scored" / "mine.txt").write_text("kept")
    assert record["files"] == ["test.jsonl"]
    for name in ("old.json", "../asked.txt"):
        (tmp_path / "scored" / name).touch()
    record["files"] += ["old.json", "../asked.txt", "..", ".", "absent.txt", "a\0b"]
    (tmp_path / "scored" / "test-run.json").write_text(json.dumps(record))
    bare = write("unlabelled.csv", "text\nriver stone\n")
    run("evaluate", out, bare, "--split", "test", "--out", tmp_path / "scored")
    assert {file.name for file in (tmp_path / "scored").iterdir()} == {
        "mine.txt", "test-run.json", "test.jsonl"
    }, "the scores of other inputs are gone"  # fmt: skip
    assert asked.is_file(), "it is outside"
    run("evaluate", out, some, "--split", "test", "--out", tmp_path / "scored")
    (tmp_path / "scored" / "test.jsonl").unlink()
    (tmp_path / "scored" / "test.jsonl").mkdir()  # nothing can be written there
    run("evaluate", out, bare, "--split", "test", "--out", tmp_path / "scored", status=2)
    assert not (tmp_path / "scored" / "test-scores.json").exists()
    unfinished = {"task": "classification", "files": ["test.jsonl"], "unfinished": True}
    assert json.loads((tmp_path / "scored" / "test-run.json").read_text()) == unfinished
    capsys.readouterr()
    run("evaluate", out, weather, "--ensemble", out, "--split", "test")
    assert "classification test: accuracy 100.0%" in capsys.readouterr().out


def test_from_python(pretrained: Path, weather: Path, tmp_path: Path) -> None:
    best = finetune(
        "classification",
        pretrained,
        tmp_path / "run",
        files=DataFiles(train=str(weather), dev=str(weather)),
        settings=FinetuneSettings(
            grid=Grid(learning_rate=(5e-3,), batch_size=(8,), epochs=(12,)),
            training=TrainingSettings(precision="fp32"),
        ),
    )
    assert best.scores["dev"]["accuracy"] == 1.0
    assert load(tmp_path / "run")("river stone").label == "wet"


def test_transformers_reads_the_tuned_model(tuned: Path) -> None:
    import transformers

    oracle = transformers.AutoModelForSequenceClassification.from_pretrained(tuned / "model").eval()
    predictor = load(tuned, precision="fp32")
    ids = predictor.tokenizer.encode_pair("river stone").ids
    with torch.no_grad():
        expected = oracle(torch.tensor([ids])).logits.softmax(-1)[0]
    found = predictor("river stone").probabilities
    for number, label in oracle.config.id2label.items():
        assert found[label] == pytest.approx(float(expected[number]), abs=1e-5)


@pytest.mark.slow
def test_multi_label_and_regress(pretrained: Path, tmp_path: Path, write: Write) -> None:
    lines = [
        {"text": text, "topics": topics, "score": score}
        for text, topics, score in (
            ("river stone", ["wet"], 1.0),
            ("candle forest", ["dry"], 4.0),
            ("river candle", ["wet", "dry"], 2.5),
            ("garden", [], 3.0),
        )
    ]
    data = write("topics.jsonl", "".join(json.dumps(line) + "\n" for line in lines * 3))
    tune(
        "multi-label-classification",
        pretrained,
        data,
        tmp_path / "many",
        "--label topics --epochs 20",
    )
    found = load(tmp_path / "many")("river candle")
    assert set(found.labels) == {"wet", "dry"}
    assert load(tmp_path / "many")("garden").labels == ()
    tune("regression", pretrained, data, tmp_path / "number", "--label score --epochs 20")
    number = load(tmp_path / "number")
    assert number("river stone").value < number("candle forest").value
    config = json.loads((tmp_path / "number" / "model" / "config.json").read_text())
    assert config["problem_type"] == "regression"


def test_a_scaled_layer_is_saved_as_the_plain_one_but_resumed_as_it_is() -> None:
    plain = torch.nn.Linear(3, 1)
    scaled, rows = ScaledLinear(plain, 64.0), torch.randn(5, 3)
    assert torch.equal(scaled(rows), plain(rows))
    for name, one in plain.state_dict().items():
        assert torch.equal(scaled.state_dict()[name], one)
        assert scaled.state_dict(keep_vars=True)[name] is getattr(scaled, name)


def test_the_head_for_numbers_of_another_size_is_not_kept() -> None:
    def fits(task: Regression, bias: float) -> bool:
        return task.fits_head({"classifier.bias": torch.tensor([bias])})

    prices = Regression(unit=1024.0, mean=50_000.0)
    assert [fits(prices, bias) for bias in (2.0, 50_100.0)] == [False, True]
    assert [fits(Regression(), bias) for bias in (2.0, 50_100.0)] == [True, False]


def test_numbers_that_fp32_cannot_tell_apart_are_refused(pretrained: Path, tmp_path: Path) -> None:
    """Such as times in seconds since 1970."""
    rows = [{"text": f"river {i}", "label": 1.7e9 + 10 * i} for i in range(20)]
    with pytest.raises(BertkitError, match="cannot tell apart; subtract a constant"):
        finetune("regression", pretrained, tmp_path / "run", train=rows, dev=rows)


@pytest.mark.parametrize(("factor", "offset"), [(1e3, 5e4), (2e-4, 0.0), (1.0, 300.0), (0.1, 9.0)])
def test_numbers_of_any_size_are_learned(
    factor: float, offset: float, pretrained: Path, tmp_path: Path, write: Write
) -> None:
    from transformers import AutoModelForSequenceClassification

    known = {"river stone": 1.0, "candle forest": 4.0, "river candle": 2.0, "garden": 3.0}
    lines = [{"text": text, "price": offset + factor * one} for text, one in known.items()]
    data = write("prices.jsonl", "".join(json.dumps(line) + "\n" for line in lines * 3))
    tune("regression", pretrained, data, tmp_path / "first", "--label price --epochs 40")
    found = load(tmp_path / "first")
    for text, one in known.items():
        assert found(text).value == pytest.approx(offset + factor * one, abs=factor / 2)
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / "first" / "model")
    ids = [found.tokenizer.cls_id, *found.tokenizer.encode("garden").ids, found.tokenizer.sep_id]
    value = theirs(torch.tensor([ids])).logits.item()
    assert value == pytest.approx(found("garden").value, abs=1e-3 * factor)
    still = "--label price --epochs 1 --learning-rate 1e-12"
    tune("regression", tmp_path / "first", data, tmp_path / "second", still)
    again = load(tmp_path / "second")("garden").value
    assert again == pytest.approx(found("garden").value, abs=1e-3 * factor)


def test_choose(pretrained: Path, tmp_path: Path, write: Write) -> None:
    head = "start,a,b,c,right\n"
    body = "".join(
        f"{word},river {word},candle {word},garden {word},{key}\n"
        for word, key in (("bridge", "A"), ("lantern", "A"), ("letter", "A"), ("winter", "a"))
    )
    data = write("choices.csv", head + body)
    tune(
        "multiple-choice",
        pretrained,
        data,
        tmp_path / "run",
        "--text start --choices a b c --label right --epochs 20",
    )
    found = load(tmp_path / "run")("stone", ["garden", "river stone", "candle"])
    assert found.choice == 1
    assert found.text == "river stone"
    assert sum(found.probabilities) == pytest.approx(1)
    assert rows(tmp_path / "run" / "results" / "dev.jsonl")[0]["text"] == "river bridge"


TAGGED = "-DOCSTART- O\n\n" + "".join(
    f"{word} O\nriver {first}\nstone {inside}\n. O\n\n"
    for word in ("bridge", "lantern", "harvest", "winter", "garden")
    for first, inside in (("B-PLACE", "I-PLACE"),)
)


@pytest.mark.parametrize("context", ["sentence", "document"])
def test_tag(pretrained: Path, tmp_path: Path, write: Write, context: str) -> None:
    data = write("tags.txt", TAGGED)
    out = tmp_path / "run"
    tune("token-classification", pretrained, data, out, "--context", context, "--epochs 25")
    assert json.loads((out / "results.json").read_text())["scores"]["dev"]["f1"] == 1.0
    assert (out / "results" / "dev.txt").read_text().splitlines()[0] == "bridge O O"
    found = load(out)("  letter river   stone.")
    [entity] = found.entities
    assert entity.type == "PLACE"
    assert entity.text == "river   stone"
    assert "  letter river   stone."[entity.start : entity.end] == entity.text
    assert [word.word for word in found.words] == ["letter", "river", "stone", "."]
    [given] = load(out)([["a", "", "\u200b", "river", "stone"]])
    assert len(given.words) == 5


def squad_file(*, impossible: bool) -> str:
    paragraphs = []
    for number, place in enumerate(("bridge", "garden", "harbour", "meadow")):
        context = f"The sailor is in the {place}. The pigeon sleeps slowly."
        start = context.index(place)
        qas = [{"id": f"q{number}", "question": "Where is the sailor?",
                "answers": [{"text": place, "answer_start": start}]}]  # fmt: skip
        if impossible:
            qas[0]["is_impossible"] = False  # type: ignore[assignment]
            qas.append({"id": f"n{number}", "question": "cotton barley copper thread",
                        "answers": [], "is_impossible": True})  # fmt: skip
        paragraphs.append({"context": context, "qas": qas})
    return json.dumps({"version": "1", "data": [{"title": "t", "paragraphs": paragraphs}]})


@pytest.mark.slow
@pytest.mark.parametrize("impossible", [False, True])
def test_answer(pretrained: Path, tmp_path: Path, write: Write, impossible: bool) -> None:
    data = write("questions.json", squad_file(impossible=impossible))
    out = tmp_path / "run"
    tune(
        "question-answering",
        pretrained,
        data,
        out,
        "--max-length 40 --stride 8 --max-question-length 12 --epochs 60",
    )
    scores = json.loads((out / "results.json").read_text())["scores"]["dev"]
    assert scores["f1"] > 0.9
    predictions = json.loads((out / "results" / "dev" / "predictions.json").read_text())
    assert predictions["q0"] == "bridge"
    assert (out / "results" / "dev" / "null_odds.json").exists() == impossible
    details = json.loads((out / "model" / "bertkit.json").read_text())
    assert details["settings"]["null"] is impossible
    ask = load(out)
    context = "The sailor is in the garden. The pigeon sleeps slowly."
    found = ask("Where is the sailor?", context)
    assert context[found.start : found.end] == found.answer == "garden"
    if impossible:
        none = ask("cotton barley copper thread", context)
        assert none.answer == ""
        assert none.start is None
        assert none.no_answer_probability > found.no_answer_probability
        assert none.probability == none.no_answer_probability, "that of what is answered"
        assert found.probability <= 1 - found.no_answer_probability + 1e-6
    long = context + " walking running" * 40  # several windows
    found = ask("Where is the sailor?", long)
    assert found.answer == ("" if found.start is None else long[found.start : found.end])


@pytest.mark.slow
def test_predictions_of_an_earlier_best_run_do_not_stay(
    pretrained: Path, tmp_path: Path, write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    """`results/` is of the model beside it, the official files of each split, too."""
    data, out = write("questions.json", squad_file(impossible=True)), tmp_path / "run"
    command = ("finetune", "question-answering", "--model", pretrained, "--train", data,
               "--dev", data,
               "--max-length", "40", "--batch-size", "8", "--precision", "fp32",
               "--out", out)  # fmt: skip
    run(*command, "--learning-rate", "1e-6", "--epochs", "1", "--test", data)
    official = ["nbest_predictions.json", "null_odds.json", "predictions.json"]
    assert sorted(path.name for path in (out / "results" / "test").iterdir()) == official
    capsys.readouterr()
    run(*command, "--learning-rate", "5e-3", "--epochs", "60")
    assert "test predictions of b8-lr1e-06-e1-s1, the best run before, are deleted" in (
        capsys.readouterr().err.replace("\n", " ")
    )
    assert not (out / "results" / "test.jsonl").exists()
    assert not list((out / "results").glob("test/*"))
    assert sorted(path.name for path in (out / "results" / "dev").iterdir()) == official


def test_what_the_review_found(
    pretrained: Path, weather: Path, tmp_path: Path, write: Write, capsys: Any
) -> None:
    """Wrong requests that once passed in silence, and right ones that once failed."""
    common = ("--model", pretrained, "--train", weather, "--dev", weather, "--epochs", "1", *FAST)
    pairs = write(
        "pairs.csv", WEATHER.replace("text,label", "text,label,more").replace("\n", ",x\n")
    )
    pairs.write_text(pairs.read_text().replace("more,x", "more"))
    paired = ("--model", pretrained, "--train", pairs, "--dev", pairs, "--pair", "more")
    run("finetune", "classification", *paired, "--epochs", "1", *FAST, "--out", tmp_path / "pair")
    run("predict", tmp_path / "pair", pairs, "--id", "text", "--out", tmp_path / "found.jsonl")
    assert rows(tmp_path / "found.jsonl")[0]["more"] == "x"

    # "" is said by the caller, though it is the default
    assert "tuned on pairs" in fails(capsys, "predict", tmp_path / "pair", pairs, "--pair", "")

    run("finetune", "classification", *common, "--out", tmp_path / "one")
    weather.write_text(WEATHER.replace("bridge", "kettle"))
    assert "other settings" in fails(
        capsys, "finetune", "classification", *common, "--out", tmp_path / "one", "--seeds", "2"
    )
    assert "tuned for classification, not for multi-label-classification" in fails(
        capsys, "evaluate", tmp_path / "one", weather, "--task", "multi-label-classification"
    )
    assert "choose classification" in fails(
        capsys, "finetune", "sst-2", *common, "--data", tmp_path, "--out", tmp_path / "x"
    )
    assert "has a value twice" in fails(
        *(capsys, "finetune", "classification", *common[:-6], "--out", tmp_path / "x"),
        *("--learning-rate", "5e-5", "0.00005"),
    )
    assert "warmup" in fails(
        capsys, "finetune", "classification", *common, "--out", tmp_path / "x", "--warmup", "-0.5"
    )
    assert not (tmp_path / "x").exists()
    unknown = write("unknown.json", squad_file(impossible=False).replace('"answers"', '"none"'))
    assert "needs one" in fails(
        *(capsys, "finetune", "question-answering", "--model", pretrained, "--train", unknown),
        *("--dev", unknown, "--out", tmp_path / "x"),
    )
    with pytest.raises(BertkitError, match="at least one"):
        load([])


def test_more_models_of_a_finished_grid(
    pretrained: Path, weather: Path, tmp_path: Path, capsys: Any
) -> None:
    out = tmp_path / "run"
    command = tuning("classification", pretrained, weather, out, "--seeds 3 --epochs 2")
    run(*command)
    assert len(list(out.glob("runs/*/model"))) == 1
    run(*command, "--keep", "2")
    kept = sorted(out.glob("runs/*/model"))
    assert len(kept) == 2
    run("evaluate", kept[0], weather, "--ensemble", kept[1])
    assert "classification dev: accuracy" in capsys.readouterr().out


@pytest.mark.slow
def test_other_data_to_predict_of_a_finished_grid(
    pretrained: Path, weather: Path, tmp_path: Path, write: Write, capsys: Any
) -> None:
    out = tmp_path / "run"
    command = tuning("classification", pretrained, weather, out)
    run(*command)
    asked = write("asked.csv", "text\nriver\n")
    run(*command, "--test", asked)
    assert [row["text"] for row in rows(out / "results" / "test.jsonl")] == ["river"]
    asked.write_text("text\ncandle\nforest\n")
    run(*command, "--test", asked)
    assert [row["text"] for row in rows(out / "results" / "test.jsonl")] == ["candle", "forest"]
    run(*command, "--test", asked)
    assert "nothing to do" in capsys.readouterr().err
    assert "no labels to score by" in fails(capsys, "evaluate", out, asked, "--split", "test")
    assert "takes a number" in fails(capsys, *command, "--learning-rate", "nan")
    assert "--keep must be at least 1" in fails(capsys, *command, "--keep", "0")
    own = write("test.jsonl", '{"text": "river"}\n')
    assert "test.jsonl lies in the folder of --out" in fails(
        capsys, "evaluate", out, own, "--split", "test",
        "--out", own.parent,
    )  # fmt: skip
    assert own.read_text() == '{"text": "river"}\n'


def test_heads_of_transformers_without_a_pooler(pretrained: Path, tmp_path: Path) -> None:
    import transformers

    from bertkit.tokenizer.wordpiece import Tokenizer

    for kind in (transformers.BertForTokenClassification, transformers.BertForQuestionAnswering):
        folder = tmp_path / kind.__name__
        kind.from_pretrained(pretrained).save_pretrained(folder)
        Tokenizer.load(pretrained).save(folder)
        load(folder)  # neither reads the pooler, and neither is saved with one
    asked = load(tmp_path / "BertForQuestionAnswering")("river?", "stone bridge lantern " * 30)
    assert asked.answer


def test_scores_of_one_precision_are_not_rounded(pretrained: Path, tmp_path: Path) -> None:
    """Under bf16 autocast the last layer stays in fp32: different texts, different numbers."""
    import numpy as np
    from bertkit.datasets.examples import TextExample

    from bertkit.checkpoints.pretrained import read_pretrained
    from bertkit.tasks.task import run_model

    start, task = read_pretrained(pretrained), Regression(max_length=40)
    torch.manual_seed(0)
    model = start.build(task.build, keep_head=False).model
    words = ("river", "stone", "bridge", "lantern", "harvest", "winter", "garden", "letter")
    texts = [f"{a} {b} {c}" for a in words for b in words for c in words]
    items = task.items([TextExample("0", t, None, None, "t") for t in texts], start.tokenizer)
    outputs = run_model(model, items, torch.device("cpu"), precision="bf16")
    values = np.concatenate([parts[0][:, 0] for parts in outputs])
    assert len(np.unique(values)) > 0.9 * len(texts)


@pytest.mark.slow
def test_a_grid_resumes_where_it_was(
    pretrained: Path,
    weather: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Killed in the third of six runs: the same command makes the missing ones, to the same end."""
    out, whole = tmp_path / "run", tmp_path / "whole"
    command = (
        *(
            "finetune",
            "classification",
            "--model",
            pretrained,
            "--train",
            weather,
            "--dev",
            weather,
        ),
        *("--learning-rate", "1e-3", "5e-3", "--seeds", "3", "--epochs", "2"),
        *("--batch-size", "8", "--precision", "fp32", "--out"),
    )
    real, made = finetuning.train_task, []

    def interrupted(*arguments: Any, **options: Any) -> Any:
        made.append(arguments[3].name)
        if len(made) == 3:
            raise KeyboardInterrupt
        return real(*arguments, **options)

    monkeypatch.setattr(finetuning, "train_task", interrupted)
    run(*command, out, status=130)
    run(*command, out)
    assert len(made) == 3 + 4  # the interrupted one again, and the three others
    assert "2 of 6 runs were done before" in capsys.readouterr().err
    run(*command, whole)
    for name in ("results.json", "results/dev.jsonl", "model/model.safetensors"):
        found, expected = (out / name).read_bytes(), (whole / name).read_bytes()
        if name == "results.json":
            first, second = json.loads(found), json.loads(expected)
            for result in (*first["runs"], *second["runs"]):
                result.pop("seconds")
            assert first == second
        else:
            assert found == expected, name
    grid = Grid(batch_size=(8,), learning_rate=(1e-3, 5e-3), epochs=(2,), seeds=3)
    results = read_results(out, grid.runs())
    assert len(results) == 6
    kept = [path.parent.name for path in out.glob("runs/*/model")]
    assert kept == [best_run(results).name]
    made.clear()
    worst = next(result.name for result in results if result.name not in kept)
    shutil.copytree(out / "model", out / "runs" / worst / "model")  # stopped before it was removed
    run(*command, out)
    assert [path.parent.name for path in out.glob("runs/*/model")] == kept
    assert made == []
    other = [word if word != "3" else "2" for word in command]
    run(*other, out)  # a smaller or a larger grid may use the same folder
    assert made == []
    assert "other settings" in fails(capsys, *command, out, "--weight-decay", "0.5")
    model = out / "runs" / best_run(results).name / "model"
    model.rename(tmp_path / "gone")  # as after a larger grid with another best run
    (out / "results.json").unlink()
    run(*command, out)
    assert made == [best_run(results).name]
    weights = (tmp_path / "gone" / "model.safetensors").read_bytes()
    assert (out / "model" / "model.safetensors").read_bytes() == weights


def test_a_smaller_grid_in_the_same_folder_keeps_the_best_of_all(
    pretrained: Path, weather: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As where --seeds is forgotten: a worse model must not take the place of a better one."""
    out = tmp_path / "run"
    command = ("finetune", "classification", "--model", pretrained, "--train", weather,
               "--dev", weather,
               "--batch-size", "8", "--precision", "fp32", "--out", out)  # fmt: skip
    run(*command, "--learning-rate", "5e-3", "--epochs", "8")
    best, weights = json.loads((out / "results.json").read_text())["best"], out / "model"
    before = (weights / "model.safetensors").read_bytes()
    run(*command, "--learning-rate", "1e-6", "--epochs", "1")
    found = json.loads((out / "results.json").read_text())
    assert found["best"] == best == "b8-lr0.005-e8-s1"
    assert len(found["runs"]) == 2
    assert (weights / "model.safetensors").read_bytes() == before
    assert f"runs of earlier grids in {out} that compete: 1" in capsys.readouterr().err
    assert f"best: {best}" not in fails(capsys, *command, "--learning-rate", "0")
    (out / "runs" / best / "run.json").write_text("{}")
    assert "is damaged; delete it to repeat the run" in fails(capsys, *command)


def test_a_head_of_the_same_labels_in_another_order_is_kept(
    pretrained: Path, weather: Path, tmp_path: Path, write: Write, capsys: Any
) -> None:
    """Own labels are sorted; those of a set, or of transformers, stand as they are."""
    out = tmp_path / "one"
    tune("classification", pretrained, weather, out, "--epochs 6")
    model = out / "model"
    details = json.loads((model / "bertkit.json").read_text())
    assert details["labels"] == ["dry", "wet"]
    (model / "bertkit.json").write_text(json.dumps(details | {"labels": ["wet", "dry"]}))
    with pytest.raises(BertkitError, match="restore the file"):
        load(model)  # other libraries would read the labels of config.json
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"id2label": {"0": "wet", "1": "dry"}}))
    run(*tuning("classification", model, weather, tmp_path / "two"), "--learning-rate", "1e-9")
    assert "reusing the checkpoint's task head" in capsys.readouterr().err
    assert load(tmp_path / "two").task.labels == ("wet", "dry")
    before, after = load(model)("river stone"), load(tmp_path / "two")("river stone")
    assert before.probabilities == pytest.approx(after.probabilities, abs=1e-5)


def test_a_label_of_dev_only_stays_in_training(
    pretrained: Path, tmp_path: Path, write: Write, capsys: Any
) -> None:
    """Whatever lies in the tenth that would be set apart, training has every label."""
    rows = "".join(f"{word} stone,{word}\n" for word in ("river", "candle", "winter", "garden"))
    train = write("train.csv", "text,label\n" + rows + WEATHER.partition("\n")[2] * 2)
    out = tmp_path / "run"
    tune("classification", pretrained, train, out, "--dev-share 0.5", dev="")
    assert "label of too few inputs to set one apart, kept" in capsys.readouterr().err
    alone = write("alone.csv", "text,label\nriver,wet\ncandle,dry\n")
    numbered = write("n.csv", "text,label\n" + "".join(f"river {i},{i}\n" for i in range(300)))
    for file, said in ((alone, "2 inputs, 2 labels"), (numbered, "300 inputs, 300 labels")):
        assert f"a label that no other input has ({said}); check the column of the" in fails(
            capsys, *tuning("classification", pretrained, file, tmp_path / "alone", dev="")
        )
    one = write("one.csv", "text,label\nriver,1\n")
    assert "1 inputs are too few to set some apart" in fails(
        capsys, *tuning("regression", pretrained, one, tmp_path / "alone", dev="")
    )
    document = write("one.txt", "-DOCSTART- O\n\nriver B-A\nstone O\n\nlantern O\n")
    assert "2 inputs in 1 document, which stay whole, are too few" in fails(
        capsys, *tuning("token-classification", pretrained, document, tmp_path / "tag", dev="")
    )


def test_pairs_and_single_texts_are_told_apart(
    pretrained: Path, tuned: Path, tmp_path: Path, write: Write, capsys: Any
) -> None:
    classify = load(tuned)
    with pytest.raises(BertkitError, match="tuned on single texts, and here are two"):
        classify("river", "stone")
    for wrong in (["river", 7], None, 7):
        with pytest.raises(TypeError):
            classify(wrong)
    assert classify("").label in {"wet", "dry"}
    rows = "".join(f"river,{word},{label}\n" for word, label in (("stone", "wet"), ("moss", "dry")))
    pairs = write("pairs.csv", "text,second,label\n" + rows * 4)
    out = tmp_path / "pairs"
    tune("classification", pretrained, pairs, out, "--pair second")
    assert load(out)("river", "stone").label in {"wet", "dry"}
    with pytest.raises(BertkitError, match="tuned on pairs of texts, and here is one"):
        load(out)("river")
    with pytest.raises(BertkitError, match="cannot mix models fine-tuned on pairs"):
        load([tuned, out])
    details = json.loads((out / "model" / "bertkit.json").read_text())
    (out / "model" / "bertkit.json").write_text(json.dumps(details | {"columns": {}}))
    said = fails(capsys, "predict", out, pairs)  # as of official sets, which name no columns
    assert "pairs.csv:2: the model was fine-tuned on pairs" in said


def test_a_network_without_dropout_is_tuned_with_dropout_on_demand(
    pretrained: Path, weather: Path, tmp_path: Path, capsys: Any
) -> None:
    """Recipes for little text pre-train without it; the paper tunes with 0.1."""
    import shutil

    start = tmp_path / "start"
    shutil.copytree(pretrained, start)
    config = json.loads((start / "config.json").read_text())
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    (start / "config.json").write_text(json.dumps(config | none))
    tune("classification", start, weather, tmp_path / "without")
    assert "there is no dropout, as in the checkpoint" in capsys.readouterr().err
    assert load_config(tmp_path / "without" / "model").hidden_dropout_prob == 0
    tune("classification", start, weather, tmp_path / "with", "--dropout 0.2")
    assert "there is no dropout" not in capsys.readouterr().err
    tuned = load_config(tmp_path / "with" / "model")
    assert (tuned.hidden_dropout_prob, tuned.attention_probs_dropout_prob) == (0.2, 0.2)
    weights = [
        (tmp_path / name / "model" / "model.safetensors").read_bytes()
        for name in ("without", "with")
    ]
    assert weights[0] != weights[1]
    whole = tuning("classification", start, weather, tmp_path / "x", "--dropout 1")
    assert "from 0 to below 1, not 1.0" in fails(capsys, *whole)


def test_predictions_are_not_read_as_inputs(tuned: Path, tmp_path: Path, capsys: Any) -> None:
    folder = tmp_path / "asked"
    folder.mkdir()
    (folder / "a.jsonl").write_text('{"text": "river"}\n')
    out = folder / "found.jsonl"
    assert "found.jsonl lies in INPUTS" in fails(capsys, "predict", tuned, folder, "--out", out)
    assert not out.exists()


def test_a_test_file_with_some_labels_is_scored_by_them(
    pretrained: Path, weather: Path, tmp_path: Path, write: Write, capsys: Any
) -> None:
    some = write("some.csv", "text,label\nriver stone,wet\ncandle forest,\n")
    tune("classification", pretrained, weather, tmp_path / "run", "--epochs 8 --test", some)
    said = "test: 1 of 2 inputs have no label and are not scored"
    assert said in capsys.readouterr().err
    assert "test" in json.loads((tmp_path / "run" / "results.json").read_text())["scores"]
    run("evaluate", tmp_path / "run", some, "--split", "test")
    found = capsys.readouterr()
    assert said in found.err
    assert "classification test: accuracy 100.0%" in found.out


def test_what_has_no_label_in_rows_is_predicted_too(
    pretrained: Path, tmp_path: Path, write: Write, capsys: Any
) -> None:
    """Questions in rows, and choices in lists; the model remembers that they are."""
    row = {"question": "Where?", "context": "river stone bridge", "text": "river"}
    row |= {"choices": ["river stone", "bridge", "garden"]}
    whole = json.dumps({**row, "answers": "stone", "label": "A"})
    train = write("train.jsonl", f"{whole}\n{whole}\n")
    short = json.dumps({**row, "choices": ["candle", "river"]})
    test = write("test.jsonl", f"{short}\n{whole}\n{short}\n")
    for kind, own in (
        ("question-answering", ("--max-question-length", "8")),
        ("multiple-choice", ("--choices", "choices")),
    ):
        out = tmp_path / kind
        tune(kind, pretrained, train, out, *own, "--test", test)
        said = capsys.readouterr().err
        assert "row without label, kept: 2" in said
        assert "test: 2 of 3 inputs have no label and are not scored" in said
        assert len(rows(out / "results" / "test.jsonl")) == 3
        run("predict", out, test, "--out", tmp_path / f"{kind}.jsonl")
        assert len(rows(tmp_path / f"{kind}.jsonl")) == 3
        run("evaluate", out, test, "--split", "test")
        assert "2 of 3 inputs have no label" in capsys.readouterr().err


def test_a_model_of_transformers_may_answer_that_there_is_none(
    pretrained: Path, tuned: Path, weather: Path, tmp_path: Path, write: Write, capsys: Any
) -> None:
    """Its config does not say whether it was tuned on questions without an answer."""
    import transformers

    folder = tmp_path / "theirs"
    transformers.BertForQuestionAnswering.from_pretrained(pretrained).save_pretrained(folder)
    Tokenizer.load(pretrained).save(folder)
    context = "stone bridge lantern"
    assert load(folder)("river?", context).answer
    found = load(folder, null_threshold=-1e9)("river?", context)
    assert (found.answer, found.start) == ("", None)
    assert 0 < found.no_answer_probability < 1
    assert found.probability == found.no_answer_probability, "not that of the suppressed span"
    assert load(folder, null_threshold=1e9)("river?", context).answer
    asked = write("asked.json", squad_file(impossible=True))
    command = ("evaluate", folder, asked, "--task", "squad-2.0")
    run(*command)
    assert "give --null-threshold 0" in capsys.readouterr().err
    run(*command, "--null-threshold", "-1e9")
    found = capsys.readouterr()
    assert "give --null-threshold 0" not in found.err
    assert "unanswerable_accuracy 100.0%" in found.out
    settings = {
        "null": True,
        "threshold": -1e9,
        "max_length": 40,
        "max_question_length": 8,
    }  # as the page says for serving
    write_json(folder / "bertkit.json", {"task": "question-answering", "settings": settings})
    assert load(folder)("river?", context).answer == ""
    assert load(folder, null_threshold=1e9)("river?", context).answer
    write_json(
        folder / "bertkit.json", {"task": "question-answering", "settings": {"max_length": "40"}}
    )
    with pytest.raises(
        BertkitError, match=r"bertkit\.json: the setting 'max_length' cannot be '40'"
    ):
        load(folder)
    write_json(
        folder / "bertkit.json",
        {"task": "question-answering", "settings": QuestionAnswering().settings()},
    )
    with pytest.raises(BertkitError, match="tuned on questions that all have an answer"):
        load(folder, null_threshold=0)
    with pytest.raises(BertkitError, match="was not fine-tuned for a task"):
        load(pretrained, null_threshold=0)
    assert "for models that answer, not for classification" in fails(
        capsys, "predict", tuned, weather, "--null-threshold", "0"
    )


@pytest.mark.slow
def test_tuning_twice_keeps_a_head_of_the_same_labels(
    pretrained: Path, weather: Path, tmp_path: Path, write: Write, capsys: Any
) -> None:
    tune("classification", pretrained, weather, tmp_path / "one", "--epochs 6")
    assert "the task head is new" in capsys.readouterr().err
    tune("classification", tmp_path / "one", weather, tmp_path / "two", "--epochs 6")
    assert "the task head is new" not in capsys.readouterr().err
    other = write("other.csv", WEATHER.replace("wet", "damp").replace(",dry\n", ",arid\n", 3))
    tune("classification", tmp_path / "one", other, tmp_path / "three")
    assert "the task head is new" in capsys.readouterr().err
    assert load(tmp_path / "three")("river").label in {"damp", "dry", "arid"}


def test_a_google_checkpoint_is_a_start(data: Path, tmp_path: Path, write: Write) -> None:
    texts = write("small.csv", "text,label\na b,x\nc d,y\ne f,x\ng h,y\n")
    tune("classification", data / "tf-checkpoint", texts, tmp_path / "run")
    assert load_config(tmp_path / "run" / "model").hidden_size == 4


def test_dev_data_is_set_apart_where_there_is_none(
    pretrained: Path, weather: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tune("classification", pretrained, weather, tmp_path / "run", "--dev-share 0.25", dev="")
    said = capsys.readouterr().err
    assert "train: 9 inputs" in said
    assert "dev: 3 inputs" in said


def test_a_tilde_is_the_home_folder_of_models_data_and_outputs(
    pretrained: Path, tmp_path: Path, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shell leaves it as it is in --out=~/run, and Python always does."""
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    shutil.copytree(pretrained, home / "model")
    (home / "train.csv").write_text(WEATHER)
    elsewhere.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(elsewhere)
    settings = FinetuneSettings(grid=Grid(epochs=(1,)), track=())
    data = {"train": "~/train.csv", "dev": "~/train.csv"}
    finetune("classification", "~/model", "~/python", settings=settings, **data)
    tilde = "--model=~/model --train=~/train.csv --dev=~/train.csv --out=~/command"
    run("finetune", "classification", *tilde.split(), "--epochs", 1)
    assert not [*elsewhere.iterdir()]
    for out in ("python", "command"):
        assert load(f"~/{out}").task.labels == load(home / out).task.labels
    assert DataFiles(data="~/glue").data == home / "glue"  # type: ignore[arg-type]


def test_long_texts_are_windowed_and_counted(
    pretrained: Path, tmp_path: Path, write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    long = "river stone " * 60
    data = write("long.csv", f"text,label\n{long},wet\ncandle,dry\ncandle forest,dry\n{long},wet\n")
    tune("classification", pretrained, data, tmp_path / "run", "--epochs 8")
    assert "inputs in several windows: train 2, dev 2; cut: 0" in capsys.readouterr().err
    assert load(tmp_path / "run")(long).label == "wet"


def test_a_text_of_a_million_characters_is_read_whole(
    tuned: Path, tmp_path: Path, write: Write, capsys: Any
) -> None:
    text = write("long.txt", "river stone " * 84_000 + "\n")
    run("predict", tuned, text, "--out", tmp_path / "found.jsonl")
    assert "1 inputs, 1 in several windows, 0 cut" in capsys.readouterr().err
    assert len(rows(tmp_path / "found.jsonl")) == 1


def test_diverged_runs_are_flagged_and_do_not_end_the_grid(
    pretrained: Path, weather: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    command = ("finetune", "classification", "--model", pretrained, "--train", weather,
               "--dev", weather,
               "--epochs", "2", "--batch-size", "8", "--precision", "fp32")  # fmt: skip
    run(*command, "--learning-rate", "1e30", "1e-3", "--out", out)
    said = capsys.readouterr().err
    assert "degenerate: diverged" in said
    assert "1 diverged" in said
    assert json.loads((out / "results.json").read_text())["best"] == "b8-lr0.001-e2-s1"
    found = fails(capsys, *command, "--learning-rate", "1e30", "--out", tmp_path / "none")
    assert "every run diverged" in found


def test_degenerate_runs_come_last() -> None:
    from bertkit.finetuning.grid import RunResult

    flat = RunResult("a-s1", {}, {"dev": {"f1": 0.81}}, 0.81, "answers 'yes' to every input", 1.0)
    real = RunResult("b-s1", {}, {"dev": {"f1": 0.80}}, 0.80, "", 1.0)
    assert best_run([flat, real]) is real
    assert best_run([flat]) is flat


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("text,label\nriver,wet\nstone,dry\nbridge,misty\n", "misty"),
        ("words,label\nriver,wet\n", "column"),
        ("text,label\nriver,\n", "label"),
    ],
    ids=["unknown label in dev", "missing column", "no label"],
)
def test_bad_dev_data_is_named(
    pretrained: Path,
    weather: Path,
    tmp_path: Path,
    write: Write,
    capsys: pytest.CaptureFixture[str],
    text: str,
    message: str,
) -> None:
    dev = write("dev.csv", text)
    found = fails(capsys, *tuning("classification", pretrained, weather, tmp_path / "run", dev=dev))
    assert message in found
    assert "dev.csv" in found


def test_a_label_seen_once_is_counted(
    pretrained: Path, tmp_path: Path, write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    train = write("train.csv", WEATHER + "kettle,odd\n")
    tune("classification", pretrained, train, tmp_path / "run")
    assert "label seen once in training, kept: 1 (first: label 'odd')" in capsys.readouterr().err


def test_absent_official_data_says_where_to_get_it(
    pretrained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {"mrpc": "gluebenchmark.com", "squad-2.0": "SQuAD-explorer", "swag": "swagaf",
              "conll-2003": "clips.uantwerpen.be"}  # fmt: skip
    for task, place in places.items():
        found = fails(
            capsys,
            *("finetune", task, "--model", pretrained, "--data", tmp_path, "--out", tmp_path / "x"),
        )
        assert place in found, task


def test_wrong_requests(
    pretrained: Path, weather: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ("--out", tmp_path / "x")
    own = ("--model", pretrained, "--train", weather, *out)
    assert "did you mean 'mrpc'" in fails(capsys, "finetune", "mrcp", "--model", pretrained, *out)
    assert "--data FOLDER" in fails(capsys, "finetune", "mrpc", "--model", pretrained, *out)
    assert "--train FILE" in fails(
        capsys, "finetune", "classification", "--model", pretrained, *out
    )
    assert "positions" in fails(capsys, "finetune", "classification", *own, "--max-length", "999")
    assert "--frozen" in fails(capsys, "finetune", "classification", *own, "--layers", "sum")
    assert "--frozen" in fails(capsys, "finetune", "classification", *own, "--beside", pretrained)
    assert "mean 'bilstm'" in fails(capsys, "finetune", "classification", *own, "--head", "bilst")
    assert "--frozen is for token-classification" in fails(
        capsys, "finetune", "classification", *own, "--frozen"
    )
    assert "seeds" in fails(capsys, "finetune", "classification", *own, "--seeds", "0")
    assert "not fine-tuned for a task" in fails(capsys, "evaluate", pretrained, weather)
    with pytest.raises(BertkitError, match="no model"):
        load(tmp_path / "nothing")


@pytest.mark.slow
def test_questions_and_words_by_columns(
    pretrained: Path, tmp_path: Path, write: Write, capsys: Any
) -> None:
    lines = []
    for place in ("bridge", "garden", "harbour", "meadow"):
        passage = f"The sailor is in the {place}."
        lines.append({"asked": "Where is the sailor?", "text": passage, "answers": place})
        lines.append({"asked": "cotton copper", "text": passage, "answers": ""})
    data = write("asked.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    names = ("--question", "asked", "--passage", "text")
    tune("question-answering", pretrained, data, tmp_path / "answers", *names, "--max-length 40")
    assert load(tmp_path / "answers").task.null
    run("predict", tmp_path / "answers", data, "--out", tmp_path / "found.jsonl")
    assert len(rows(tmp_path / "found.jsonl")) == 8

    tagged = [
        {"tokens": [word, "river", "stone"], "ner_tags": ["O", "B-PLACE", "I-PLACE"]}
        for word in ("bridge", "garden", "letter")
    ]
    data = write("tagged.jsonl", "".join(json.dumps(line) + "\n" for line in tagged))
    tune("token-classification", pretrained, data, tmp_path / "tags", "--epochs 20")
    assert [e.text for e in load(tmp_path / "tags")("harvest river stone").entities]
    plain = write("plain.txt", "river\nstone\n\nbridge\n")
    tune("token-classification", pretrained, data, tmp_path / "untagged", "--test", plain)
    assert len(rows(tmp_path / "untagged" / "results" / "test.jsonl")) == 2


def test_what_numbers_mean_is_decided_by_the_training_file(
    pretrained: Path, tmp_path: Path, write: Write
) -> None:
    head, row = "text,a,b,c,d,label\n", "river,stone,bridge,garden,letter"
    train = write("train.csv", head + "".join(f"{row},{key}\n" for key in (1, 2, 3, 4)))
    dev = write("dev.csv", head + "".join(f"{row},{key}\n" for key in (1, 2, 3)))
    tune("multiple-choice", pretrained, train, tmp_path / "run", "--choices a b c d", dev=dev)
    details = json.loads((tmp_path / "run" / "model" / "bertkit.json").read_text())
    assert details["columns"]["first_choice"] == 1


def test_the_threshold_stands_between_two_odds() -> None:
    from bertkit.datasets.examples import GoldAnswer as Gold
    from bertkit.datasets.examples import QuestionExample
    from bertkit.tasks.spans import FoundAnswer

    from bertkit.tasks.question_answering import QuestionAnswering

    inputs = [
        QuestionExample("a", "?", "river stone", (Gold("river", 0),), "a"),
        QuestionExample("b", "?", "river stone", (), "b"),
    ]
    found = [FoundAnswer("river", 0, 5, 0.9, 0.1, odds, ()) for odds in (-14.0, -2.0)]
    task = QuestionAnswering(null=True).calibrated(inputs, found)
    assert task.threshold == -8.0
    assert task.score(inputs, found)["f1"] == 1.0
