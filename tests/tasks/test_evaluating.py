"""What `bertkit evaluate` scores by, and what it says of models that cannot be right."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bertkit.errors import BertkitError
from bertkit.model.encoder import Encoder, ModelConfig
from bertkit.tasks.answer import Answer, FoundAnswer
from bertkit.tasks.classify import Classify, ClassifyMany, Label, LabelSet, unknown_label
from bertkit.tasks.dataset import labelled_part
from bertkit.tasks.features import Extraction, extract
from bertkit.tasks.glue import GLUE
from bertkit.tasks.inputs import Answer as Gold
from bertkit.tasks.inputs import QuestionInput, TextInput
from bertkit.tasks.own import Lengths, task_for
from bertkit.tasks.own_files import Columns
from bertkit.text.lines import TextCounts
from bertkit.tokens.tokenizer import Tokenizer
from bertkit.verbs.evaluate import evaluate, official_scores


def question(number: int, *answers: Gold) -> QuestionInput:
    return QuestionInput(str(number), "who", "Paris or Berlin", answers, "f:1")


def found(start: int, text: str) -> FoundAnswer:
    return FoundAnswer(text, start, start + len(text), 1.0, 0.0, 0.0, ())


def test_a_set_of_glue_has_its_own_metrics_whatever_the_model_was_tuned_with() -> None:
    """A model of somebody's, with the labels in another order and the metrics of plain classes."""
    model = Classify(("equivalent", "not_equivalent"))
    gold = ["equivalent", "equivalent", "not_equivalent", "not_equivalent"]
    said = ["equivalent", "equivalent", "equivalent", "not_equivalent"]
    inputs = [TextInput(str(i), "a", "b", label, "f:1") for i, label in enumerate(gold)]
    predictions = [Label(label, 1.0, {}) for label in said]
    scores = official_scores("mrpc", model, inputs, predictions)
    assert scores == pytest.approx({"f1": 4 / 5, "accuracy": 3 / 4}), "F1 is of equivalent"
    assert set(official_scores("classify", model, inputs, predictions)) == set(model.metrics)


def test_a_misspelt_task_is_said_before_the_model_is_read() -> None:
    with pytest.raises(BertkitError, match="no task is called 'mnil'; did you mean 'mnli'"):
        evaluate("mnil", model=[Path("nowhere")])


def test_labels_of_another_set_are_not_taken_for_misspelt_ones() -> None:
    """RTE's of a model for MNLI: the label spelt most alike is the opposite."""
    error = unknown_label("not_entailment", "f:1", GLUE["mnli"].labels)
    assert str(error).endswith("not one of the model's; known: contradiction, entailment, neutral")
    many = unknown_label("x", "f:1", [f"label{number}" for number in range(30)])
    assert str(many).endswith("label25, label26 and 10 more")


def test_questions_that_a_model_cannot_get_right_are_counted() -> None:
    inputs = [question(0, Gold("Paris", 0)), question(1), question(2)]
    [said] = Answer(null=False).remarks(inputs)
    assert said.startswith("2 questions have no answer")
    assert Answer(null=True).remarks(inputs, choosing=True) == []
    assert Answer(null=False).remarks(inputs[:1]) == []
    assert Classify(("a", "b")).remarks([]) == []


def test_a_threshold_is_chosen_only_where_questions_have_no_answer() -> None:
    task, inputs = Answer(null=True), [question(0, Gold("Paris", 0))]
    predictions = [found(0, "Paris")._replace(null_odds=-7.0)]
    assert task.calibrated(inputs, predictions).threshold == 0
    [said] = task.remarks(inputs, choosing=True)
    assert "the threshold for giving none stays at 0" in said
    assert task.remarks(inputs) == []


def test_inputs_without_label_are_left_out_of_the_score() -> None:
    inputs = [TextInput(str(i), "a", None, label, "f") for i, label in enumerate(["x", None, "y"])]
    known, predictions, said = labelled_part(inputs, ["p", "q", "r"])
    assert ([given.id for given in known], predictions) == (["0", "2"], ["p", "r"])
    assert said == "1 of 3 inputs have no label and are not scored"
    assert labelled_part(inputs[:1], ["p"])[2] == ""


def test_the_same_place_everywhere_is_suspect_only_where_it_is_wrong() -> None:
    task, same = Answer(null=False), [found(0, "Paris"), found(0, "Paris")]
    right = [question(0, Gold("Paris", 0)), question(1, Gold("Paris or", 0))]
    wrong = [right[0], question(1, Gold("Berlin", 9))]
    assert task.degenerate(right, same) == ""
    assert "same place" in task.degenerate(wrong, same)
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


def many(*labels: str) -> list[TextInput]:
    return [TextInput(str(i), "a", None, tuple(label), "f:1") for i, label in enumerate(labels)]


def test_the_best_answer_without_looking() -> None:
    """What a model must beat to have learnt anything."""
    task = ClassifyMany(("a", "b", "c"))
    rare = many(*(45 * ["a"] + 30 * ["b"] + 25 * ["c"]))
    assert task.baseline(rare)["micro_f1"] == pytest.approx(0.5), "all three, always"
    common = many(*(60 * ["a"] + 30 * ["b"] + 10 * ["c"]))
    assert task.baseline(common)["micro_f1"] == pytest.approx(0.6), "a, always"
    assert task.baseline(many("", ""))["micro_f1"] == 0.0
    pairs = Classify(("not_duplicate", "duplicate"), metrics=("f1", "accuracy"))
    asked = [
        TextInput(str(i), "a", "b", "duplicate" if i < 37 else "not_duplicate", "f:1")
        for i in range(100)
    ]
    assert pairs.baseline(asked) == pytest.approx({"f1": 2 * 0.37 / 1.37, "accuracy": 0.37})


def test_one_set_of_labels_is_one_in_any_order() -> None:
    task = ClassifyMany(("a", "b"))
    same = [LabelSet(("a", "b"), {}), LabelSet(("b", "a"), {})]
    assert task.degenerate(many("a", "b"), same) == "answers 'a and b' to every input"
    assert task.degenerate(many("ab", "ba"), same) == "", "as the gold labels are"
    assert task.degenerate(many("a", "b"), [same[0], LabelSet(("a",), {})]) == ""


def test_numbers_that_are_all_the_same_are_refused() -> None:
    inputs = [TextInput(str(i), "a", None, 3.0, f"f:{i}") for i in range(4)]
    with pytest.raises(BertkitError, match=r"only the number 3\.0 in column 'label'"):
        task_for("regress", inputs, Columns(), Lengths(), 40, TextCounts())
