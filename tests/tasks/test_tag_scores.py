"""Scores of tags, against seqeval, and runs that learnt nothing."""

from __future__ import annotations

import pytest

from bertkit.tasks.entities import WordsExample, words_example
from bertkit.tasks.token_classification import TagsResult, TokenClassification, tag_labels
from tests.conftest import ORACLES

LABELS = ("O", "B-LOC", "B-PER", "I-LOC", "I-PER")


def sentence(words: str, tags: str) -> WordsExample:
    return WordsExample("0", tuple(words.split()), tuple(tags.split()), "a", "a:1")


def predicted(tags: str, *, entities: bool = True) -> TagsResult:
    names = tags.split()
    words = WordsExample("0", ("x",) * len(names), None, "a", "a:1")
    return TokenClassification(LABELS, entities=entities).tagged(words, names, [1.0] * len(names))


def test_plain_tags_are_in_iob2_on_both_sides() -> None:
    task = TokenClassification(LABELS)
    given, found = sentence("a b c", "O B-X I-X"), predicted("O I-X I-X")
    assert task.gold_value(given) == task.answer_value(found) == ("O", "B-X", "I-X")


@ORACLES
def test_scores() -> None:
    seqeval = pytest.importorskip("seqeval.metrics")
    gold = ["B-PER I-PER O B-LOC", "O O", "I-LOC I-LOC B-LOC"]
    found = ["B-PER I-PER O B-PER", "B-LOC O", "B-LOC I-LOC B-LOC"]
    inputs = [sentence("x " * len(tags.split()), tags) for tags in gold]
    task = TokenClassification(LABELS)
    scores = task.score(inputs, [predicted(tags) for tags in found])
    first, second = [t.split() for t in gold], [t.split() for t in found]
    assert [name for name in scores if "/" not in name] == ["f1", "precision", "recall", "accuracy"]
    assert scores["f1"] == pytest.approx(seqeval.f1_score(first, second))
    assert scores["precision"] == pytest.approx(seqeval.precision_score(first, second))
    assert scores["recall"] == pytest.approx(3 / 4)
    assert scores["accuracy"] == pytest.approx(7 / 9)
    assert scores["f1/PER"] == pytest.approx(2 / 3)
    assert task.baseline(inputs)["f1"] == 0.0
    assert task.baseline(inputs)["accuracy"] == pytest.approx(3 / 9)
    assert task.calibrated(inputs, []) is task
    plain = TokenClassification(("A", "B"), entities=False)
    own = [sentence("x x x", "A B B")]
    assert plain.score(own, [predicted("A B A", entities=False)]) == {"accuracy": 2 / 3}
    assert plain.baseline(own) == {"accuracy": 2 / 3}


def test_entities_without_a_type() -> None:
    """As in some files of one kind of names: B, I and O alone."""
    own = [sentence("x x x x", "B I O B")]
    labels, are_entities = tag_labels(own)
    assert (labels, are_entities) == (("O", "B", "I"), True)
    task = TokenClassification(labels)
    found = [predicted("B I O O", entities=False)]
    scores = task.score(own, found)
    assert scores == pytest.approx(
        {"f1": 2 / 3, "precision": 1.0, "recall": 0.5, "accuracy": 3 / 4}
    )
    assert task.in_scheme(["I", "I", "O", "U"]) == ["B", "I", "O", "B"]
    assert tag_labels([sentence("x x", "B NOUN")])[1] is False
    assert tag_labels([sentence("x x x", "B E S")]) == (("B", "E", "S"), False), "no entities"


def test_locations_of_entities_in_running_text() -> None:
    """Characters of the line, or of the words joined by spaces; and words are counted."""
    line = "  Nils\tOkafor, at U.N.  "
    example = words_example("1", line, "f", "f:1")
    assert example.words == ("Nils", "Okafor", ",", "at", "U.N.")
    tags, task = ["B-PER", "I-PER", "O", "O", "B-ORG"], TokenClassification(LABELS)
    result = task.tagged(example, tags, [1.0] * 5).to_dict()
    person, place = result["entities"]
    counted = {"word_start": 0, "word_end": 2}
    assert person == {"type": "PER", "start": 2, "end": 13, "text": "Nils\tOkafor", **counted}
    assert line[place["start"] : place["end"]] == place["text"] == "U.N."
    assert result["words"][4] == {
        "word": "U.N.", "tag": "B-ORG", "probability": 1.0, "start": 18, "end": 22
    }  # fmt: skip
    alone = task.tagged(example._replace(text="", spans=()), tags, [1.0] * 5).entities[0]
    assert alone.to_dict() == {**person, "start": 0, "end": 11, "text": "Nils Okafor"}
