"""Scores of tags, against seqeval, and runs that learnt nothing."""

from __future__ import annotations

import pytest

from bertkit.predict.words import words_of
from bertkit.tasks.conll import to_iob2
from bertkit.tasks.inputs import WordsInput
from bertkit.tasks.tag import Tag, Tags, tag_labels

LABELS = ("O", "B-LOC", "B-PER", "I-LOC", "I-PER")


def sentence(words: str, tags: str) -> WordsInput:
    return WordsInput("0", tuple(words.split()), tuple(tags.split()), 0, "a:1")


def predicted(tags: str) -> Tags:
    own = tuple(tags.split())
    return Tags(own, (1.0,) * len(own), Tag(LABELS)._entities(own))


def test_scores() -> None:
    seqeval = pytest.importorskip("seqeval.metrics")
    gold = ["B-PER I-PER O B-LOC", "O O", "I-LOC I-LOC B-LOC"]
    found = ["B-PER I-PER O B-PER", "B-LOC O", "B-LOC I-LOC B-LOC"]
    inputs = [sentence("x " * len(tags.split()), tags) for tags in gold]
    task = Tag(LABELS)
    scores = task.score(inputs, [predicted(tags) for tags in found])
    first, second = [t.split() for t in gold], [t.split() for t in found]
    assert list(scores)[:4] == ["f1", "precision", "recall", "accuracy"]
    assert scores["f1"] == pytest.approx(seqeval.f1_score(first, second))
    assert scores["precision"] == pytest.approx(seqeval.precision_score(first, second))
    assert scores["recall"] == pytest.approx(3 / 4)
    assert scores["accuracy"] == pytest.approx(7 / 9)
    assert scores["f1/PER"] == pytest.approx(2 / 3)
    assert task.baseline(inputs)["f1"] == 0.0
    assert task.baseline(inputs)["accuracy"] == pytest.approx(3 / 9)
    assert task.calibrated(inputs, []) is task
    plain = Tag(("A", "B"), entities=False)
    own = [sentence("x x x", "A B B")]
    assert plain.score(own, [Tags(("A", "B", "A"), (1.0,) * 3, ())]) == {"accuracy": 2 / 3}
    assert plain.baseline(own) == {"accuracy": 2 / 3}


def test_runs_that_learnt_nothing() -> None:
    task, plain = Tag(LABELS), Tag(("A", "B"), entities=False)
    gold, none = [sentence("x x", "O B-PER"), sentence("x", "O")], [sentence("x x", "O O")] * 2
    assert task.degenerate(gold, [predicted("O O"), predicted("O")]) == "finds no entity"
    assert task.degenerate(gold, [predicted("O O"), predicted("B-PER")]) == ""
    assert task.degenerate(none, [predicted("O O"), predicted("O O")]) == "", "there is none"
    same, other = [Tags(("A", "A"), (1.0, 1.0), ())], [Tags(("A", "B"), (1.0, 1.0), ())]
    assert "'A'" in plain.degenerate([sentence("x x", "A B")], same)
    assert plain.degenerate([sentence("x x", "A A")], same) == "", "that is right"
    assert plain.degenerate([sentence("x x", "A B")], other) == ""


def test_entities_without_a_type() -> None:
    """As in some files of one kind of names: B, I and O alone."""
    own = [sentence("x x x x", "B I O B")]
    labels, are_entities = tag_labels(own)
    assert (labels, are_entities) == (("O", "B", "I"), True)
    task = Tag(labels)
    found = [Tags(("B", "I", "O", "O"), (1.0,) * 4, ())]
    scores = task.score(own, found)
    assert scores == pytest.approx(
        {"f1": 2 / 3, "precision": 1.0, "recall": 0.5, "accuracy": 3 / 4}
    )
    assert to_iob2(["I", "I", "O", "U"]) == ["B", "I", "O", "B"]
    assert tag_labels([sentence("x x", "B NOUN")])[1] is False
    assert tag_labels([sentence("x x x", "B E S")]) == (("B", "E", "S"), False), "no entities"


def test_places_of_entities_in_running_text() -> None:
    """Words are counted, and so are the characters of the line, where it was one."""
    line = "  Nils\tOkafor, at U.N.  "
    _, spans = words_of(line)
    words = tuple(line[start:end] for start, end in spans)
    assert words == ("Nils", "Okafor", ",", "at", "U.N.")
    given = WordsInput("1", words, None, 0, "f:1", line, tuple(spans))
    tags = Tags(("B-PER", "I-PER", "O", "O", "B-ORG"), (1.0,) * 5, (("PER", 0, 2), ("ORG", 4, 5)))
    person, place = Tag(LABELS).row(given, tags)["entities"]
    assert person == {
        "type": "PER", "start": 0, "end": 2, "start_char": 2, "end_char": 13,
        "text": "Nils\tOkafor",
    }  # fmt: skip
    assert line[place["start_char"] : place["end_char"]] == place["text"] == "U.N."
    [alone, _] = Tag(LABELS).row(given._replace(spans=()), tags)["entities"]
    assert alone == {"type": "PER", "start": 0, "end": 2, "text": "Nils Okafor"}
