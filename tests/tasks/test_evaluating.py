"""What `bertkit evaluate` scores by, and what it says of models that cannot be right."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bertkit.datasets.columns import NumberColumns
from bertkit.datasets.examples import GoldAnswer as Gold
from bertkit.datasets.examples import QuestionExample, TextExample
from bertkit.datasets.glue import GLUE
from bertkit.finetuning.evaluation import RunEvaluation
from bertkit.finetuning.grid import shown_scores
from bertkit.tasks.spans import FoundAnswer

from bertkit.checkpoints.save import save_model
from bertkit.cli.evaluate import evaluate_command
from bertkit.errors import BertkitError
from bertkit.model.encoder import Encoder, ModelConfig
from bertkit.predict.evaluate import official_scores
from bertkit.predict.features import Extraction, extract
from bertkit.tasks.classification import (
    Classification,
    LabelPrediction,
    LabelSetPrediction,
    MultiLabelClassification,
    unknown_label,
)
from bertkit.tasks.data import labelled_part
from bertkit.tasks.question_answering import QuestionAnswering
from bertkit.tasks.regression import Regression
from bertkit.tasks.saved import saved_task
from bertkit.tasks.task import TaskInputs
from bertkit.tasks.windows import WindowLengths
from bertkit.text.lines import TextCounts
from bertkit.tokenizer.wordpiece import Tokenizer
from tests.conftest import run


def question(number: int, *answers: Gold) -> QuestionExample:
    return QuestionExample(str(number), "who", "Paris or Berlin", answers, "f:1")


def found(start: int, text: str) -> FoundAnswer:
    return FoundAnswer(text, start, start + len(text), 1.0, 0.0, 0.0, ())


def test_a_set_of_glue_has_its_own_metrics_whatever_the_model_was_tuned_with() -> None:
    """A model of somebody's, with the labels in another order and the metrics of plain classes."""
    model = Classification(("equivalent", "not_equivalent"))
    gold = ["equivalent", "equivalent", "not_equivalent", "not_equivalent"]
    said = ["equivalent", "equivalent", "equivalent", "not_equivalent"]
    inputs = [TextExample(str(i), "a", "b", label, "f:1") for i, label in enumerate(gold)]
    predictions = [LabelPrediction(label, 1.0, {}) for label in said]
    scores = official_scores("mrpc", model, inputs, predictions)
    assert scores == pytest.approx({"f1": 4 / 5, "accuracy": 3 / 4}), "F1 is of equivalent"
    assert set(official_scores("classification", model, inputs, predictions)) == set(model.metrics)


def test_a_misspelt_task_is_said_before_the_model_is_read() -> None:
    with pytest.raises(BertkitError, match="no task is called 'mnil'; did you mean 'mnli'"):
        evaluate_command(Path("nowhere"), "f", task="mnil")


def test_labels_of_another_set_are_not_taken_for_misspelt_ones() -> None:
    """RTE's of a model for MNLI: the label spelt most alike is the opposite."""
    error = unknown_label("not_entailment", "f:1", GLUE["mnli"].labels)
    assert str(error).endswith("not one of the model's; known: contradiction, entailment, neutral")
    many = unknown_label("x", "f:1", [f"label{number}" for number in range(30)])
    assert str(many).endswith("label25, label26 and 10 more")


def test_questions_that_a_model_cannot_get_right_are_counted() -> None:
    inputs = [question(0, Gold("Paris", 0)), question(1), question(2)]
    [said] = QuestionAnswering(null=False).remarks(inputs)
    assert said.startswith("2 questions have no answer")
    assert QuestionAnswering(null=True).remarks(inputs, choosing=True) == []
    assert QuestionAnswering(null=False).remarks(inputs[:1]) == []
    assert Classification(("a", "b")).remarks([]) == []


def test_the_baseline_of_questions_names_every_score() -> None:
    """A score that is shown can be chosen, and its name is taken."""
    inputs = [question(0, Gold("Paris", 0)), question(1)]
    task = QuestionAnswering(null=True)
    answerable = {"answerable_f1": 0.0, "answerable_exact_match": 0.0}
    assert task.baseline(inputs) == {
        "f1": 0.5,
        "exact_match": 0.5,
        "unanswerable_accuracy": 1.0,
        **answerable,
    }


def test_the_score_that_chooses_is_shown_first_also_if_it_is_of_one_type() -> None:
    scores = {"f1": 0.5, "precision": 0.5, "recall": 0.5, "f1/LOC": 0.1, "f1/PER": 0.9}
    assert shown_scores(scores, "f1/PER").startswith("f1/PER 90.0%, f1 50.0%, precision")
    assert "/" not in shown_scores(scores, "recall")


def test_settings_of_a_model_are_checked() -> None:
    details = {"task": "classification", "labels": ["a", "b"], "settings": {"metrics": ["foo"]}}
    with pytest.raises(BertkitError):
        saved_task(details, Path("model"))


def test_a_threshold_is_chosen_only_where_questions_have_no_answer() -> None:
    task, inputs = QuestionAnswering(null=True), [question(0, Gold("Paris", 0))]
    predictions = [replace(found(0, "Paris"), null_odds=-7.0)]
    assert task.calibrated(inputs, predictions).threshold == 0
    [said] = task.remarks(inputs, choosing=True)
    assert "the threshold for no answer stays at 0" in said
    assert task.remarks(inputs) == []


def test_inputs_without_label_are_left_out_of_the_score() -> None:
    inputs = [
        TextExample(str(i), "a", None, label, "f") for i, label in enumerate(["x", None, "y"])
    ]
    known, predictions, said = labelled_part(inputs, ["p", "q", "r"])
    assert ([given.id for given in known], predictions) == (["0", "2"], ["p", "r"])
    assert said == "1 of 3 inputs have no label and are not scored"
    assert labelled_part(inputs[:1], ["p"])[2] == ""


def test_the_same_place_everywhere_is_suspect_only_where_it_is_wrong() -> None:
    task, same = QuestionAnswering(null=False), [found(0, "Paris"), found(0, "Paris")]
    right = [question(0, Gold("Paris", 0)), question(1, Gold("Paris or", 0))]
    wrong = [right[0], question(1, Gold("Berlin", 9))]
    assert task.degenerate(right, same) == ""
    assert "same position" in task.degenerate(wrong, same)
    nothing = [found(0, ""), found(0, "")]
    assert "no answer to any" in task.degenerate(right, nothing)
    assert task.degenerate([question(0), question(1)], nothing) == ""


def test_cls_of_a_model_from_left_to_right_is_refused(tokenizer: Tokenizer) -> None:
    """It has seen no other token, so that it would be the same for every text."""
    torch.manual_seed(0)
    config = ModelConfig(
        vocab_size=tokenizer.size, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=64, max_position_embeddings=32, direction="left_to_right",
    )  # fmt: skip
    encoder = Encoder(config)
    with pytest.raises(BertkitError, match="choose --pooling mean"):
        list(extract(encoder, tokenizer, ["river"], Extraction(pooling="cls")))
    assert len(list(extract(encoder, tokenizer, ["river"], Extraction(pooling="mean")))) == 1


def many(*labels: str) -> list[TextExample]:
    return [TextExample(str(i), "a", None, tuple(label), "f:1") for i, label in enumerate(labels)]


def test_the_best_answer_without_looking() -> None:
    """What a model must beat to have learnt anything."""
    task = MultiLabelClassification(("a", "b", "c"))
    rare = many(*(45 * ["a"] + 30 * ["b"] + 25 * ["c"]))
    assert task.baseline(rare)["micro_f1"] == pytest.approx(0.5), "all three, always"
    common = many(*(60 * ["a"] + 30 * ["b"] + 10 * ["c"]))
    assert task.baseline(common)["micro_f1"] == pytest.approx(0.6), "a, always"
    mixed = many(*(45 * [""] + 40 * ["ab"] + 15 * ["c"]))  # each metric has its own best answer
    assert task.baseline(mixed) == pytest.approx(
        {
            "micro_f1": 2 * 80 / (2 * 100 + 95),  # a and b, always
            "macro_f1": (2 * 2 * 40 / 140 + 2 * 15 / 115) / 3,  # all three, always
            "exact_match": 0.45,  # no label, always
        }
    )
    assert task.baseline(many("", ""))["micro_f1"] == 0.0
    pairs = Classification(("not_duplicate", "duplicate"), metrics=("f1", "accuracy"))
    asked = [
        TextExample(str(i), "a", "b", "duplicate" if i < 37 else "not_duplicate", "f:1")
        for i in range(100)
    ]
    assert pairs.baseline(asked) == pytest.approx({"f1": 2 * 0.37 / 1.37, "accuracy": 0.63})


def test_one_set_of_labels_is_one_in_any_order() -> None:
    task = MultiLabelClassification(("a", "b"))
    same = [LabelSetPrediction(("a", "b"), {}), LabelSetPrediction(("b", "a"), {})]
    assert task.degenerate(many("a", "b"), same) == "answers 'a and b' to every input"
    assert task.degenerate(many("ab", "ba"), same) == "", "as the gold labels are"
    assert task.degenerate(many("a", "b"), [same[0], LabelSetPrediction(("a",), {})]) == ""


def test_numbers_that_are_all_the_same_are_refused() -> None:
    inputs = [TextExample(str(i), "a", None, 3.0, f"f:{i}") for i in range(4)]
    with pytest.raises(BertkitError, match=r"only the number 3\.0 in column 'label'"):
        Regression.from_data(TaskInputs(inputs, NumberColumns(), WindowLengths(), 40, TextCounts()))
    assert "all numbers are equal" in Regression().remarks(inputs, choosing=True)[0]
    other = inputs[0]._replace(label=4.0)
    assert not Regression().remarks([*inputs, other], choosing=True)
    assert not Regression().remarks(inputs)


@pytest.mark.parametrize(
    ("numbers", "unit", "mean"),
    [
        ([0.0, 2.0, 3.0, 5.0], 1.0, 0.0),
        ([8.5, 9.0, 9.5], 0.5, 9.0),
        ([100.0, 200.0], 64.0, 150.0),
        ([2.0**-90, 2.0**-89], 2.0**-91, 1.5 * 2.0**-90),
    ],
)
def test_numbers_far_from_zero_or_large_have_a_unit(
    numbers: list[float], unit: float, mean: float
) -> None:
    inputs = [TextExample("0", "a", None, one, "f:1") for one in numbers]
    given = TaskInputs(inputs, NumberColumns(), WindowLengths(), 40, TextCounts())
    task = Regression.from_data(given)
    assert (task.unit, task.mean) == (unit, mean)


@pytest.mark.parametrize("verb", ["predict", "evaluate"])
def test_outputs_that_overflow_are_no_predictions(
    verb: str, tokenizer: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Finite weights, an infinite output: JSON has no number for it."""
    config = ModelConfig(
        vocab_size=tokenizer.size, hidden_size=8, num_hidden_layers=1, num_attention_heads=1,
        intermediate_size=8, max_position_embeddings=16,
    )  # fmt: skip
    task = Regression(16)
    model = task.build(config)
    with torch.no_grad():
        model.encoder.pooler.bias.fill_(9.0)
        model.classifier.weight.fill_(3e38)
    details = {"task": task.task_type, "labels": [], "settings": task.settings()}
    save_model(tmp_path / "model", model, tokenizer, details)
    data = tmp_path / "data.csv"
    data.write_text("text,label\nriver,1\nstone,2\n")
    name, out = str(tmp_path / "model"), tmp_path / "out"
    arguments = {"predict": [name, str(data)], "evaluate": [name, str(data)]}
    run(verb, *arguments[verb], "--out", out, "--device", "cpu", status=2)
    said = capsys.readouterr()
    assert "output is NaN or infinite" in said.err
    assert not said.out
    assert not out.is_file()
    assert not list(tmp_path.glob("out/*"))


def test_a_run_is_judged_with_the_threshold_that_it_keeps() -> None:
    answered, left = found(0, "Paris"), found(0, "Rome")
    dev = [question(0, Gold("Paris", 0)), question(1)]
    odds = [replace(answered, null_odds=0.5), replace(left, null_odds=3.0)]
    task = QuestionAnswering(null=True)
    kept = []
    scorer: Any = SimpleNamespace(
        data=SimpleNamespace(dev=[("dev", dev)]), task=task, metric="f1",
        predict=lambda *_, **__: odds, score=lambda task, *pair: task.score(*pair),
    )  # fmt: skip
    evaluation = RunEvaluation(scorer, 0, "run", lambda *given: kept.append(given))
    evaluation(None, 5, last=True)
    [(_, chosen, scores)] = kept
    assert (scores["dev"]["f1"], evaluation.state["degenerate"]) == (1, "")
    assert task.degenerate(dev, odds)
    assert chosen.threshold > 0.5
