"""Columns of words and tags, and the score of entities against seqeval and conlleval's rules."""

from __future__ import annotations

import gzip
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bertkit.errors import BertkitError
from bertkit.tasks.entities import (
    WordsExample,
    conll_sentences,
    entity_scores,
    find_entities,
    tag_pattern,
    to_iob2,
)
from bertkit.tasks.token_classification import tag_labels
from bertkit.text.documents import TextCounts
from tests.conftest import ORACLES

Write = Callable[[str], Path]
TAGS = ["O", *(f"{prefix}-{kind}" for prefix in "BIES" for kind in ("PER", "LOC", "A-B"))]


def numbered(inputs: Iterable[WordsExample]) -> list[int]:
    """The documents of sentences, numbered in the order of their first sentence."""
    names = [example.document for example in inputs]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return [numbers[name] for name in names]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_file(text: str) -> Path:
        path = tmp_path / "t.txt"
        path.write_text(text, encoding="utf-8")
        return path

    return write_file


def sentences(path: Path, counts: TextCounts, **options: Any) -> list[WordsExample]:
    return list(conll_sentences(path, counts, **options))


# Files -------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sentences", "documents"),
    [("train", 14041, 946), ("valid", 3250, 216), ("test", 3453, 231)],
)
def test_conll_2003(data: Path, name: str, sentences: int, documents: int) -> None:
    counts = TextCounts()
    inputs = list(conll_sentences(data / "conll2003" / f"{name}.txt", counts))
    assert len(inputs) == sentences
    assert numbered(inputs) == sorted(numbered(inputs))
    assert set(numbered(inputs)) == set(range(documents))
    assert not counts.skipped
    assert all(to_iob2(given.tags or ()) == list(given.tags or ()) for given in inputs)


def test_without_marks_every_sentence_is_a_document(write: Write) -> None:
    inputs = sentences(write("a O\n\nb O\n\nc O\n"), TextCounts())
    assert numbered(inputs) == [0, 1, 2]


def test_words_of_other_whitespace_stay_words(write: Write) -> None:
    text = "\u200b\tO\n\u00a0\tB-X\n\u3000\tI-X\n \tO\nNew York\tB-LOC\n\tO\n"
    [given] = sentences(write(text), TextCounts())
    assert given.words == ("\u200b", "\u00a0", "\u3000", " ", "New York", "")
    assert given.tags == ("O", "B-X", "I-X", "O", "B-LOC", "O")
    [given] = sentences(write("\u200b  O \n\u00a0 O\n"), TextCounts())
    assert given.words == ("\u200b", "\u00a0")


def test_columns_by_number_and_no_tags(write: Write) -> None:
    path = write("1 John B-PER x\n2 ran O y\n")
    [given] = sentences(path, TextCounts(), word_column=1, tag_column=2)
    assert (given.words, given.tags) == (("John", "ran"), ("B-PER", "O"))
    [given] = sentences(write("John\nran\n"), TextCounts(), purpose="predict")
    assert (given.words, given.tags) == (("John", "ran"), None)


def test_a_first_document_without_its_line(tmp_path: Path) -> None:
    """Each sentence before the first line that begins a document is one."""
    path = tmp_path / "t.txt"
    path.write_text("a O\n\nb O\n\n-DOCSTART- O\n\n-DOCSTART- O\n\nc O\n\nd O\n")
    assert numbered(sentences(path, TextCounts())) == [0, 1, 2, 2]
    path.write_text("a O\n\n-DOCSTART-x O\n\nc -DOCSTART-\n")
    assert numbered(sentences(path, TextCounts())) == [0, 1, 2]


def test_a_long_word_and_compression(tmp_path: Path) -> None:
    path = tmp_path / "t.txt.gz"
    path.write_bytes(gzip.compress(b"x" * 10**6 + b" O\n"))
    [given] = sentences(path, TextCounts())
    assert len(given.words[0]) == 10**6
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(BertkitError, match=r"t\.txt\.gz cannot be read"):
        sentences(path, TextCounts())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a N O\nb O\n", r"t\.txt:2: 3 columns in the first line, and 2 here"),
        ("a N O\nb N\u00a0O O x\n", r"t\.txt:2: 3 columns in the first line, and 4 here"),
        ("a\nb\n", r"t\.txt:1: 1 columns, but the word is in column 0 and the tag in -1"),
        ("a B-\n", "'B-' in column -1 is not a tag"),
        ("a\t\n", "'' in column -1 is not a tag"),
        ("\n\n", r"t\.txt holds no sentence"),
        ("-DOCSTART- O\n", r"t\.txt holds no sentence"),
    ],
)
def test_bad_lines_are_errors(write: Write, text: str, message: str) -> None:
    with pytest.raises(BertkitError, match=message):
        sentences(write(text), TextCounts())


def test_comments_and_lines_of_conllu_that_are_no_words(write: Write) -> None:
    def row(number: str, word: str, tag: str) -> str:
        return "\t".join([number, word, word, tag, *"______"]) + "\n"

    text = row("1-2", "al", "_") + row("1", "a", "ADP") + row("2", "#", "SYM") + "\n"
    path = write(f"# sent_id = 1\n# text = al #\n{text}# sent_id = 2\n{row('1', 'x', 'X')}")
    counts = TextCounts()
    inputs = sentences(path, counts, word_column=1, tag_column=3)
    assert [(i.words, i.tags) for i in inputs] == [(("a", "#"), ("ADP", "SYM")), (("x",), ("X",))]
    assert counts.skipped == {"comment, range of words or empty node": 4}
    [first, second] = sentences(write("# O\nx O\n\n# B-Y\n"), TextCounts())
    assert (first.words, second.words) == (("#", "x"), ("#",))


# Entities ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tags", "expected"),
    [
        ("O B-X I-X", True),
        ("B-X I-X", True),
        ("O B I", True),
        ("B I", False),
        ("B I E S", False),
        ("O PER LOC-city", True),
        ("B_X I_X O", True),
        ("X-B X-I", True),
        ("O B-X M-X E-X S-X", True),
        ("NOUN VERB-B", False),
    ],
)
def test_one_rule_says_what_tags_of_entities_are(tags: str, expected: bool) -> None:
    """In training; the same rule is asked about a model that another toolkit tuned."""
    words = WordsExample("0", ("w",) * len(tags.split()), tuple(tags.split()), 0, "f:1")
    assert tag_labels([words])[1] == (tag_pattern(tags.split()) is not None) == expected


@pytest.mark.parametrize(
    ("tags", "expected"),
    [
        ("B-X B-X I-X", [("X", 0, 1), ("X", 1, 3)]),
        ("I-X I-Y I-Y", [("X", 0, 1), ("Y", 1, 3)]),
        ("O I-X I-X O I-X", [("X", 1, 3), ("X", 4, 5)]),
        ("I-X B-X I-X", [("X", 0, 1), ("X", 1, 3)]),
        ("B-X I-Y", [("X", 0, 1), ("Y", 1, 2)]),
        ("B-X I-X E-X S-X O", [("X", 0, 3), ("X", 3, 4)]),
        ("E-X E-X I-X", [("X", 0, 1), ("X", 1, 2), ("X", 2, 3)]),
        ("S-X I-X", [("X", 0, 1), ("X", 1, 2)]),
        ("O O", []),
        ("", []),
        ("B-A-B I-A-B", [("A-B", 0, 2)]),
    ],
)
def test_entities_by_hand(tags: str, expected: list[tuple[str, int, int]]) -> None:
    assert find_entities(tags.split()) == expected


def test_to_iob2() -> None:
    assert to_iob2(["I-X", "I-X", "B-X", "O", "I-Y"]) == ["B-X", "I-X", "B-X", "O", "B-Y"]
    assert to_iob2(["B-X", "E-X", "S-X", "O"]) == ["B-X", "I-X", "B-X", "O"]


@given(st.lists(st.sampled_from(TAGS), max_size=12))
@settings(max_examples=200, deadline=None)
def test_to_iob2_keeps_the_entities(tags: list[str]) -> None:
    converted = to_iob2(tags)
    assert find_entities(converted) == find_entities(tags)
    assert to_iob2(converted) == converted
    assert [tag == "O" for tag in converted] == [tag == "O" for tag in tags]


@pytest.mark.parametrize(
    ("gold", "predicted", "right", "given", "wanted"),
    [
        ("B-X I-X O", "B-X I-X O", 1, 1, 1),
        ("B-X B-X", "B-X I-X", 0, 1, 2),  # adjacent entities run together
        ("I-X I-Y", "I-X I-X", 0, 1, 2),  # a change of type begins an entity
        ("O B-X I-X", "O I-X I-X", 1, 1, 1),  # I after O begins one
        ("B-X I-X I-X", "B-X I-X O", 0, 1, 1),  # wrong border
        ("B-X I-X O", "B-Y I-Y O", 0, 1, 1),  # wrong type
        ("B-X O B-Y", "O O O", 0, 0, 2),  # nothing predicted
        ("O O O", "O B-X O", 0, 1, 0),  # nothing to find
        ("O O", "O O", 0, 0, 0),
        ("B-X O B-Y I-Y", "B-X O B-Y I-X", 1, 3, 2),
    ],
)
def test_scores_by_hand(gold: str, predicted: str, right: int, given: int, wanted: int) -> None:
    scores = entity_scores([gold.split()], [predicted.split()])
    assert scores["precision"] == (right / given if given else 0)
    assert scores["recall"] == (right / wanted if wanted else 0)
    assert scores["f1"] == (2 * right / (given + wanted) if given + wanted else 0)


def test_scores_by_type() -> None:
    scores = entity_scores([["B-X", "O", "B-Y"], ["B-X"]], [["B-X", "B-Z", "B-Y"], ["O"]])
    assert scores["precision"] == pytest.approx(2 / 3)
    assert (scores["precision/X"], scores["recall/X"]) == (1.0, 0.5)
    assert scores["f1/X"] == pytest.approx(2 / 3)
    assert (scores["f1/Y"], scores["f1/Z"], scores["recall/Z"]) == (1.0, 0.0, 0.0)


def test_an_entity_ends_with_its_sentence() -> None:
    assert entity_scores([["B-X"], ["I-X"]], [["B-X"], ["I-X"]])["f1"] == 1.0
    assert entity_scores([["B-X", "I-X"]], [["B-X", "B-X"]])["f1"] == 0.0


sentence = st.integers(1, 8).flatmap(
    lambda size: st.tuples(
        *(st.lists(st.sampled_from(TAGS), min_size=size, max_size=size) for _ in range(2))
    )
)


@ORACLES
@pytest.mark.slow
@given(st.lists(sentence, min_size=1, max_size=5))
@settings(max_examples=150, deadline=None)
def test_scores_agree_with_seqeval(pairs: list[tuple[list[str], list[str]]]) -> None:
    metrics = pytest.importorskip("seqeval.metrics")
    labeling = pytest.importorskip("seqeval.metrics.sequence_labeling")
    gold, predicted = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    for tags in gold + predicted:
        found = [(kind, start, end + 1) for kind, start, end in labeling.get_entities(tags)]
        assert find_entities(tags) == found
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns of shares of nothing
        report = metrics.classification_report(gold, predicted, output_dict=True, zero_division=0)
    scores = entity_scores(gold, predicted)
    names = {"micro avg": "", "PER": "/PER", "LOC": "/LOC", "A-B": "/A-B"}
    for name, suffix in names.items():
        for ours, theirs in (("precision",) * 2, ("recall",) * 2, ("f1", "f1-score")):
            expected = report.get(name, {}).get(theirs, 0.0)
            assert scores.get(f"{ours}{suffix}", 0.0) == pytest.approx(float(expected))
