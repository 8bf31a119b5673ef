"""What `many` takes from Python, and what it refuses or warns of."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bertkit import load
from bertkit.datasets.benchmarks import DataFiles
from bertkit.datasets.examples import ChoiceExample, QuestionExample, TextExample, WordsExample
from bertkit.errors import BertkitError
from bertkit.predict.evaluate import evaluate
from bertkit.predict.files import predict_file
from bertkit.predict.predictors import TaskPredictor

WORDS = WordsExample("0", ("river",), None, 0, "f")
QUESTION = QuestionExample("0", "who", "a river", None, "f")


def texts() -> Iterator[TextExample]:
    """Three inputs, as a reader gives them."""
    for number in range(3):
        yield TextExample(str(number), "river stone " * number, None, None, "f")


def test_inputs_may_come_one_after_the_other(models: Path) -> None:
    predict = load(models / "classify", device="cpu", precision="fp32")
    assert len(predict.many(texts())) == 3
    assert predict.many(texts()) == predict.many(list(texts()))
    assert predict.many([]) == []


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        ("classify", [("a", "b")], r"a list of TextExample of .* number 0 is \('a', 'b'\)"),
        ("classify", [*texts(), {"text": "x"}], "number 3 is {'text': 'x'}"),
        ("classify", ["river"], "number 0 is 'river'"),
        ("classify", "river", "a list of TextExample .* is 'river'"),
        ("classify", [None], "number 0 is None"),
        ("classify", [QUESTION], "number 0 is QuestionExample"),
        ("answer", [WORDS], "a list of QuestionExample"),
        ("classify", [TextExample("0", None, None, None, "f")], "None in number 0 is not a text"),  # type: ignore[arg-type]
        ("tag", [WORDS, WORDS._replace(words=("a", 3))], "3 in number 1 is not a text"),
        ("choose", [ChoiceExample("0", "a", (), None, "f")], "number 0 has no choice"),
    ],
)
def test_what_is_no_input_is_shown(models: Path, kind: str, given: Any, message: str) -> None:
    with pytest.raises(BertkitError, match=message):
        load(models / kind, device="cpu", precision="fp32").many(given)


@pytest.mark.parametrize("choices", [{"a": "the", "b": "night"}, {"the", "night"}, b"the", "the"])
def test_choices_have_an_order(models: Path, choices: Any) -> None:
    """The keys of a dict would be read, and not its texts."""
    with pytest.raises(BertkitError, match="choices must be a list of texts"):
        load(models / "choose", device="cpu", precision="fp32")("river", choices)


def test_what_is_not_read_is_warned_of(models: Path) -> None:
    predict = load(models / "answer", device="cpu", precision="fp32")
    with pytest.warns(UserWarning, match="questions cut at 16 tokens: 1"):
        predict("river " * 20, "stone bridge")


def test_files_are_predicted_and_scored_from_python(models: Path, tmp_path: Path) -> None:
    """With the columns that the caller names, in one function each."""
    file, out = tmp_path / "own.csv", tmp_path / "found.jsonl"
    file.write_text("said,label\nriver stone,dry\nbridge,wet\n")
    predictor = TaskPredictor.load(models / "classify", device="cpu", precision="fp32")
    predict_file(predictor, str(file), columns={"text": "said"}, out=out)
    found = [json.loads(line)["label"] for line in out.read_text().splitlines()]
    scored = evaluate(
        "classification",
        [models / "classify"],
        DataFiles(dev=str(file)),
        columns={"text": "said"},
        precision="fp32",
        device="cpu",
    )
    right = [label == gold for label, gold in zip(found, ("dry", "wet"), strict=True)]
    assert scored.scores["accuracy"] == sum(right) / 2
    with pytest.raises(BertkitError, match="classification does not accept --words"):
        predict_file(predictor, str(file), columns={"words": "said"}, out=out)
