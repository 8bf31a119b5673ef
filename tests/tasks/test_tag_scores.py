"""Scores of tags, against seqeval, and runs that learnt nothing."""

from __future__ import annotations

import pytest
from bertkit.tasks.predictions import tagged_text

from bertkit.tasks.entities import WordsExample, conll_scheme, find_entities, to_iob2
from bertkit.tasks.token_classification import TagsPrediction, TokenClassification, tag_labels
from bertkit.tasks.words import split_words_with_offsets

LABELS = ("O", "B-LOC", "B-PER", "I-LOC", "I-PER")


def sentence(words: str, tags: str) -> WordsExample:
    return WordsExample("0", tuple(words.split()), tuple(tags.split()), 0, "a:1")


def predicted(tags: str) -> TagsPrediction:
    own = tuple(tags.split())
    return TagsPrediction(own, (1.0,) * len(own), tuple(find_entities(conll_scheme(own))))


def test_plain_tags_are_in_iob2_on_both_sides() -> None:
    task = TokenClassification(LABELS)
    given, found = sentence("a b c", "O B-X I-X"), predicted("O I-X I-X")
    assert task.plain_gold(given) == task.plain(found) == ("O", "B-X", "I-X")


def test_scores() -> None:
    seqeval = pytest.importorskip("seqeval.metrics")
    gold = ["B-PER I-PER O B-LOC", "O O", "I-LOC I-LOC B-LOC"]
    found = ["B-PER I-PER O B-PER", "B-LOC O", "B-LOC I-LOC B-LOC"]
    inputs = [sentence("x " * len(tags.split()), tags) for tags in gold]
    task = TokenClassification(LABELS)
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
    plain = TokenClassification(("A", "B"), entities=False)
    own = [sentence("x x x", "A B B")]
    assert plain.score(own, [TagsPrediction(("A", "B", "A"), (1.0,) * 3, ())]) == {
        "accuracy": 2 / 3
    }
    assert plain.baseline(own) == {"accuracy": 2 / 3}


def test_runs_that_learnt_nothing() -> None:
    task, plain = TokenClassification(LABELS), TokenClassification(("A", "B"), entities=False)
    gold, none = [sentence("x x", "O B-PER"), sentence("x", "O")], [sentence("x x", "O O")] * 2
    assert task.degenerate(gold, [predicted("O O"), predicted("O")]) == "finds no entity"
    assert task.degenerate(gold, [predicted("O O"), predicted("B-PER")]) == ""
    assert task.degenerate(none, [predicted("O O"), predicted("O O")]) == "", "there is none"
    same, other = (
        [TagsPrediction(("A", "A"), (1.0, 1.0), ())],
        [TagsPrediction(("A", "B"), (1.0, 1.0), ())],
    )
    assert "'A'" in plain.degenerate([sentence("x x", "A B")], same)
    assert plain.degenerate([sentence("x x", "A A")], same) == "", "that is right"
    assert plain.degenerate([sentence("x x", "A B")], other) == ""


def test_entities_without_a_type() -> None:
    """As in some files of one kind of names: B, I and O alone."""
    own = [sentence("x x x x", "B I O B")]
    labels, are_entities = tag_labels(own)
    assert (labels, are_entities) == (("O", "B", "I"), True)
    task = TokenClassification(labels)
    found = [TagsPrediction(("B", "I", "O", "O"), (1.0,) * 4, ())]
    scores = task.score(own, found)
    assert scores == pytest.approx(
        {"f1": 2 / 3, "precision": 1.0, "recall": 0.5, "accuracy": 3 / 4}
    )
    assert to_iob2(["I", "I", "O", "U"]) == ["B", "I", "O", "B"]
    assert tag_labels([sentence("x x", "B NOUN")])[1] is False
    assert tag_labels([sentence("x x x", "B E S")]) == (("B", "E", "S"), False), "no entities"


def test_places_of_entities_in_running_text() -> None:
    """Characters of the line, or of the words joined by spaces; and words are counted."""
    line = "  Nils\tOkafor, at U.N.  "
    _, spans = split_words_with_offsets(line)
    words = tuple(line[start:end] for start, end in spans)
    assert words == ("Nils", "Okafor", ",", "at", "U.N.")
    given = WordsExample("1", words, None, 0, "f:1", line, tuple(spans))
    tags = TagsPrediction(
        ("B-PER", "I-PER", "O", "O", "B-ORG"), (1.0,) * 5, (("PER", 0, 2), ("ORG", 4, 5))
    )
    person, place = TokenClassification(LABELS).row(given, tags)["entities"]
    counted = {"word_start": 0, "word_end": 2}
    assert person == {"type": "PER", "start": 2, "end": 13, "text": "Nils\tOkafor", **counted}
    assert line[place["start"] : place["end"]] == place["text"] == "U.N."
    assert (place["word_start"], place["word_end"]) == (4, 5)
    from_python = tagged_text(tags, line, spans).entities
    assert [one.to_dict() for one in from_python] == [person, place]
    alone, last = TokenClassification(LABELS).row(given._replace(text="", spans=()), tags)[
        "entities"
    ]
    assert alone == {**person, "start": 0, "end": 11, "text": "Nils Okafor"}
    assert " ".join(words)[last["start"] : last["end"]] == last["text"] == "U.N."
