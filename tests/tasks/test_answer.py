"""Answers as a task: which one is learnt, and the threshold of none."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from bertkit.datasets.columns import QuestionColumns
from bertkit.datasets.examples import GoldAnswer as Gold
from bertkit.datasets.examples import QuestionExample
from bertkit.tasks.spans import FoundAnswer

from bertkit.errors import BertkitError
from bertkit.tasks.question_answering import QuestionAnswering
from bertkit.tasks.task import TaskInputs
from bertkit.tasks.windows import QuestionWindows
from bertkit.text.lines import TextCounts
from bertkit.tokenizer.wordpiece import Tokenizer


def question(number: int, *answers: Gold, context: str = "x") -> QuestionExample:
    return QuestionExample(str(number), "who", context, answers, f"file:{number}")


def found(text: str, odds: float) -> FoundAnswer:
    return FoundAnswer(text, 0, len(text), 0.5, 0.5, odds, ())


def scored(inputs: Sequence[QuestionExample], odds: Sequence[float], texts: Sequence[str]) -> float:
    predictions = [found(text, value) for text, value in zip(texts, odds, strict=True)]
    return (
        QuestionAnswering(null=True)
        .calibrated(inputs, predictions)
        .score(inputs, predictions)["f1"]
    )


@pytest.mark.parametrize("seed", range(20))
def test_the_threshold_reaches_its_optimum_where_no_answer_is_best(seed: int) -> None:
    odds = sorted(np.random.default_rng(seed).normal(0, 5, 3).tolist())
    inputs = [question(0), question(1), question(2, Gold("x", 0))]
    assert scored(inputs, odds, ["x", "x", "y"]) == pytest.approx(2 / 3)
    assert scored(inputs[::-1], odds, ["x", "y", "y"]) == pytest.approx(1.0)


def test_the_first_answer_that_stands_in_a_window_is_learnt(tokenizer: Tokenizer) -> None:
    words = ["river", "stone", "bridge", "garden", "letter", "candle", "forest", "winter"] * 3
    context = " ".join(words)
    task = QuestionAnswering(max_length=20, stride=4, max_question_length=4)
    long, short = Gold(" ".join(words[:18]), 0), Gold("bridge", context.index("bridge"))
    items = task.items([question(0, long, short, context=context)], tokenizer)
    targets = [item.parts[0].target[:2] for item in items.items]
    assert any(target != (0, 0) for target in targets)
    assert items.cut["answers in no window whole"] == 0
    lost = task.items([question(0, long, context=context)], tokenizer)
    assert all(item.parts[0].target[:2] == (0, 0) for item in lost.items)
    assert lost.cut["answers in no window whole"] == 1


def test_a_wanted_length_of_questions_is_kept() -> None:
    def made(**given: int) -> QuestionAnswering:
        train = [question(0, Gold("x", 0))]
        windows = QuestionWindows(**given)
        length = windows.length(512)
        return QuestionAnswering.from_data(
            TaskInputs(train, QuestionColumns(), windows, length, TextCounts())
        )

    assert made(max_length=40).max_question_length == 20  # the default gives way
    assert made(max_length=128, max_question_length=100).max_question_length == 100
    assert made(max_length=100, max_question_length=64).max_question_length == 64
    assert made(max_answer_length=50).max_answer_length == 50
    with pytest.raises(BertkitError, match="question-length"):
        QuestionWindows(max_question_length=-1)
    with pytest.raises(BertkitError, match="answer-length"):
        QuestionWindows(max_answer_length=0)


def test_answers_that_can_never_be_given_are_counted(tokenizer: Tokenizer) -> None:
    context = "river stone bridge lantern"
    given = [question(0, Gold(context, 0), context=context)]
    counted = "answers of more than {} tokens, never given"
    assert (
        QuestionAnswering(max_answer_length=4).items(given, tokenizer).cut[counted.format(4)] == 0
    )
    assert (
        QuestionAnswering(max_answer_length=3).items(given, tokenizer).cut[counted.format(3)] == 1
    )


def test_one_question_is_no_degenerate_run() -> None:
    given = [question(0, Gold("b", 2))]
    found = FoundAnswer("a", 0, 1, 1.0, 0.0, -1.0, ())
    assert QuestionAnswering().degenerate(given, [found]) == ""
    assert "the same position" in QuestionAnswering().degenerate(given * 2, [found] * 2)


def test_answers_are_found_with_the_published_numbers() -> None:
    """Those of google-research/bert `run_squad.py`, also where nothing is asked for."""
    windows = QuestionWindows()
    data = TaskInputs([question(0, Gold("x", 0))], None, windows, 384, TextCounts())
    own = QuestionAnswering.from_data(data)
    for task in (QuestionAnswering(), own):
        assert isinstance(task, QuestionAnswering)
        assert (task.max_length, task.stride, task.max_question_length) == (384, 0, 64)
        assert (task.nbest, task.max_answer_length) == (20, 30)
