"""SQuAD's files and its metric, against published scores and by hand."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bertkit.errors import BertkitError
from bertkit.tasks.squad import (
    GoldAnswer,
    QuestionColumns,
    QuestionExample,
    answer_f1,
    best_threshold,
    exact_match,
    locate,
    make_question,
    normalize_answer,
    squad_scores,
)
from bertkit.tasks.squad import read_questions as read_squad
from bertkit.text.documents import TextCounts

CONTEXT = "The river froze in 1895. In 1895 the bridge was closed."


def question(question_id: str, *golds: str) -> QuestionExample:
    return QuestionExample(
        question_id, "When?", CONTEXT, tuple(GoldAnswer(g, 0) for g in golds), ""
    )


def qa(**fields: Any) -> dict[str, Any]:
    return {"id": "q1", "question": "When did it freeze?"} | fields


def gold(text: str, start: int) -> dict[str, Any]:
    return {"text": text, "answer_start": start}


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Write questions about CONTEXT as SQuAD-JSON."""

    def write_file(*qas: dict[str, Any]) -> Path:
        path = tmp_path / "questions.json"
        paragraphs = [{"context": CONTEXT, "qas": list(qas)}]
        path.write_text(json.dumps({"data": [{"title": "River", "paragraphs": paragraphs}]}))
        return path

    return write_file


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("wrapped", [False, True])
def test_flat_rows_in_json(tmp_path: Path, indent: int | None, wrapped: bool) -> None:
    rows = [
        {"id": "a", "asked": "When?", "context": CONTEXT, "answers": "1895",
         "source": "Data", "unit": "paragraphs"},
        {"asked": "Where?", "context": CONTEXT, "answers": {"text": [], "answer_start": []}},
    ]  # fmt: skip
    path = tmp_path / "rows.json"
    path.write_text(json.dumps({"data": rows} if wrapped else rows, indent=indent))
    found = list(QuestionColumns(question="asked").read(path, TextCounts()))
    assert [example.answers for example in found] == [(GoldAnswer("1895", 19),), ()]
    with pytest.raises(BertkitError, match="no column 'question'"):
        list(QuestionColumns().read(path, TextCounts()))


def test_reads_both_versions_and_files_without_answers(write: Callable[..., Path]) -> None:
    counts = TextCounts()
    path = write(
        qa(id="a", answers=[gold("1895", 19), gold("in 1895", 16)]),
        qa(id="b", answers=[], is_impossible=True, plausible_answers=[gold("1895", 19)]),
        qa(id="c", answers=[gold("1895", 28)], is_impossible=False),
        qa(id="d"),
        qa(id="e", is_impossible=True),
        qa(id=7, answers=[gold("river", 4)]),
    )
    found = read_squad(path, counts)
    assert [(item.id, item.answers) for item in found] == [
        ("a", (GoldAnswer("1895", 19), GoldAnswer("in 1895", 16))),
        ("b", ()),
        ("c", (GoldAnswer("1895", 28),)),
        ("d", None),
        ("e", ()),
        ("7", (GoldAnswer("river", 4),)),
    ]
    assert {item.context for item in found} == {CONTEXT}
    assert found[0].location == f"{path}, question a"
    assert not counts.skipped


@pytest.mark.parametrize(
    ("text", "start", "found", "reason"),
    [
        ("1895", 19, ("1895", 19), None),
        ("1895", 20, ("1895", 19), "answer_start corrected, kept"),
        ("1895", 26, ("1895", 28), "answer_start corrected, kept"),
        ("1895", -4, ("1895", 19), "answer_start corrected, kept"),
        ("1895", 9999, ("1895", 28), "answer_start corrected, kept"),
        ("1895", None, ("1895", 19), "answer without a start, first occurrence kept"),
        ("in\n1895", 16, ("in 1895", 16), "answer with other white space than its context, kept"),
        ("in\u202f1895", 0, ("in 1895", 16), "answer_start corrected, kept"),
        (" river ", 3, (" river ", 3), None),
    ],
)
def test_answers_are_found_in_the_context(
    text: str, start: int | None, found: tuple[str, int], reason: str | None
) -> None:
    counts = TextCounts()
    made = make_question("q", "When?", CONTEXT, [(text, start)], "here", counts)
    assert made is not None
    assert made.answers == (GoldAnswer(*found),)
    assert counts.skipped == ({reason: 1} if reason else {})


def test_narrow_space_in_the_context_matches_a_space_in_the_answer() -> None:
    made = make_question("q", "What?", "über 5\u202fkm weit", [("5 km", 5)], "", TextCounts())
    assert made is not None
    assert made.answers == (GoldAnswer("5\u202fkm", 5),)


def test_an_answer_outside_of_the_context_is_dropped_for_training_and_kept_for_scoring() -> None:
    counts = TextCounts()
    some = make_question("q", "When?", CONTEXT, [("1896", 19), ("1895", 19)], "a", counts)
    assert some is not None
    assert some.answers == (GoldAnswer("1895", 19),)
    assert make_question("q", "When?", CONTEXT, [("1896", 19), (" ", 0)], "b", counts) is None
    assert counts.skipped == {"answer not in its context": 3, "question left without an answer": 1}
    assert counts.examples["question left without an answer"] == "b"

    counts = TextCounts()
    kept = make_question("q", "When?", CONTEXT, [("1896", 19)], "", counts, purpose="dev")
    assert kept is not None
    assert kept.answers == (GoldAnswer("1896", -1),)
    assert counts.skipped == {"answer not in its context, for scoring kept": 1}


def test_empty_texts_and_contradictions_are_counted(write: Callable[..., Path]) -> None:
    counts = TextCounts()
    assert make_question("q", " \n", CONTEXT, (), "", counts) is None
    assert make_question("q", "When?", "\u202f", None, "", counts) is None
    path = write(qa(answers=[gold("1895", 19)], is_impossible=True))
    assert read_squad(path, counts)[0].answers == ()
    assert counts.skipped == {
        "empty question": 1,
        "empty context": 1,
        "answers of a question marked is_impossible": 1,
    }
    [said] = read_squad(write(qa(answers=[])), counts)
    assert said.answers == ()
    [said] = read_squad(write(qa(answers=[], is_impossible=False)), counts)
    assert said.answers is None, "not yet annotated"
    assert read_squad(write(qa(answers=[], is_impossible=True)), counts)[0].answers == ()


@pytest.mark.parametrize("purpose", ["train", "dev"])
def test_an_empty_answer_says_that_there_is_none(write: Callable[..., Path], purpose: Any) -> None:
    """As in the rows of `read_questions`."""
    none, counts = [gold("", -1)], TextCounts()
    path = write(
        qa(id="a", answers=none),
        qa(id="b", answers=[gold(" \n", 0)], is_impossible=True),
        qa(id="c", answers=[*none, gold("1895", 19)]),
        qa(id="d", answers=none, is_impossible=False),
    )
    found = read_squad(path, counts, purpose=purpose)
    assert [given.answers for given in found] == [(), (), (GoldAnswer("1895", 19),), None]


@pytest.mark.parametrize(
    ("qas", "message"),
    [
        ([qa(), qa()], "question q1 occurs twice"),
        ([{"id": "a", "qestion": "x"}], "no field 'question'"),
        ([{"question": "x"}], "no field 'id'"),
        ([qa(answers={"text": ["x"]})], "is not as SQuAD's JSON"),
        ([qa(answers=[{"text": "x"}])], "no field 'answer_start'"),
        (["x"], "is not as SQuAD's JSON"),
        ([], "holds no usable question"),
        (
            [qa(answers=[gold("1896", 3)])],
            "the first: answer not in its context at .*, question q1",
        ),
    ],
)
def test_malformed_files_are_one_line(
    write: Callable[..., Path], qas: list[Any], message: str
) -> None:
    with pytest.raises(BertkitError, match=message) as caught:
        read_squad(write(*qas), TextCounts())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not valid JSON"),
        ('{"question": "a"}\n{"question": "b"}\n', "--format jsonl if it has an obj"),
        ("[]", "no usable question"),
        ('{"data": [{"title": "x"}]}', "no field 'paragraphs'"),
        ('{"data": [{"paragraphs": [{"qas": [{"id": "a", "question": "b"}]}]}]}', "no field 'con"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(content)
    with pytest.raises(BertkitError, match=message):
        read_squad(path, TextCounts())


def test_compressed_files_and_others_are_read_or_refused(
    write: Callable[..., Path], tmp_path: Path
) -> None:
    path = write(qa(answers=[gold("1895", 19)]))
    plain = [found[:4] for found in read_squad(path, TextCounts())]
    packed = tmp_path / "questions.json.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert [found[:4] for found in read_squad(packed, TextCounts())] == plain
    with pytest.raises(BertkitError, match="is remote"):
        read_squad(path.as_uri(), TextCounts())
    packed.write_bytes(packed.read_bytes()[:-9])
    with pytest.raises(BertkitError, match=r"questions\.json\.gz is not valid JSON .*; restore it"):
        read_squad(packed, TextCounts())
    with pytest.raises(BertkitError, match=r"does not exist; check the path"):
        read_squad(tmp_path / "x.json", TextCounts())
    with pytest.raises(BertkitError, match=r"is 2 files; name one of them"):
        read_squad(tmp_path, TextCounts())


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("The  Battle\u00a0of an   A-team!", "battle of ateam"),
        ("a", ""),
        ("Theatre, another", "theatre another"),
        ("U.S.", "us"),
        ("l’été «à»", "l’été «à»"),  # only ASCII punctuation goes
        ("Bob's (the) 1,000", "bobs 1000"),
    ],
)
def test_normalisation(text: str, normal: str) -> None:
    assert normalize_answer(text) == normal


def test_f1_by_hand() -> None:
    assert exact_match("The Cat!", "cat") == 1.0
    assert answer_f1("the black cat", "a black dog") == 0.5
    assert answer_f1("cat cat dog", "cat cat") == pytest.approx(0.8)
    assert answer_f1("", "cat") == answer_f1("cat", "the") == 0.0
    assert answer_f1("the", "a") == 0.0
    assert answer_f1("the", "a", version2=True) == 1.0
    assert answer_f1("", "cat", version2=True) == 0.0


def test_scores_of_version_1_by_hand() -> None:
    inputs = [question("a", "black cat", "dog"), question("b", "cat"), question("c", "the")]
    assert squad_scores(inputs, ["a black dog", "dog", "an"]) == {
        "f1": pytest.approx((2 / 3) / 3),
        "exact_match": pytest.approx(1 / 3),  # c: both are empty, which 1.1 gives no F1
    }


def test_scores_of_version_2_by_hand() -> None:
    inputs = [question("a", "black cat"), question("b"), question("c", "the"), question("d")]
    assert squad_scores(inputs, ["cat", "", "", "cat"]) == {
        "f1": pytest.approx((2 / 3 + 1 + 1) / 4),
        "exact_match": 0.5,
        "answerable_f1": pytest.approx((2 / 3 + 1) / 2),
        "answerable_exact_match": 0.5,
        "unanswerable_accuracy": 0.5,
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "version", "exact", "overlap"),
    [
        ("v1.1_bert_ensemble_google.json", "1.1", 86.206, 92.196),
        ("v1.1_rnet_plus_ensemble.json", "1.1", 82.469, 88.478),
        ("v2.0_bert_single_google.json", "2.0", 78.742, 81.775),
        ("v2.0_nlnet_single.json", "2.0", 75.828, 78.778),
    ],
)
def test_published_predictions_get_their_published_scores(
    data: Path, file: str, version: str, exact: float, overlap: float
) -> None:
    counts = TextCounts()
    inputs = read_squad(data / "squad" / f"dev-v{version}.json", counts, purpose="dev")
    predictions = json.loads((data / "squad" / "published-predictions" / file).read_text())
    scores = squad_scores(inputs, [predictions[given.id] for given in inputs])
    percent = [round(100 * scores[name], 3) for name in ("exact_match", "f1")]
    assert percent == [exact, overlap]
    assert {given.id for given in inputs} == set(predictions)
    assert not counts.skipped


ROWS = st.lists(
    st.tuples(st.booleans(), st.sampled_from(["black cat", "cat", "dog", ""]), st.integers(-3, 3)),
    min_size=1,
    max_size=12,
)


def f1_at(
    inputs: list[QuestionExample], texts: list[str], odds: list[float], threshold: float
) -> float:
    """The F1 by a threshold for the odds of no answer."""
    answers = ["" if odd > threshold else text for text, odd in zip(texts, odds, strict=True)]
    return squad_scores(inputs, answers)["f1"]


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(rows=ROWS)
def test_best_threshold_is_the_best_of_all_thresholds(rows: list[tuple[bool, str, int]]) -> None:
    inputs, texts, odds = [question("none")], [""], [0.5]
    for index, (answerable, text, value) in enumerate(rows):
        inputs.append(question(str(index), *(["black cat"] if answerable else [])))
        texts.append(text)
        odds.append(float(value))
    best = best_threshold(inputs, texts, odds)
    highest = max(f1_at(inputs, texts, odds, threshold) for threshold in [-9.0, *odds])
    assert f1_at(inputs, texts, odds, best) == pytest.approx(highest)


def test_best_threshold_by_hand() -> None:
    inputs = [question("a", "cat"), question("b", "black cat"), question("c"), question("d", "x")]
    texts, odds = ["cat", "cat", "dog", "x"], [-5.0, -1.0, 0.0, 4.0]
    best = best_threshold(inputs, texts, odds)
    assert best == -1.0
    assert f1_at(inputs, texts, odds, best) == pytest.approx((1 + 2 / 3 + 1) / 4)
    assert best_threshold([question("a"), question("b")], ["x", "y"], [1.0, 2.0]) == 0.0


def test_an_answer_without_a_start_is_found_at_the_borders_of_words() -> None:
    def start(text: str, context: str) -> int:
        found = locate(text, None, context, "f", TextCounts())
        assert found is not None
        return found.start

    assert start("he", "The man said he left") == 13
    assert start("he", "The theme") == 1  # no word, so the first occurrence
    assert start("\u6cb3", "\u5927\u6cb3") == 1
    hindi = "हमारी भारतीय टीम जीती। भारत में खुशी है।"  # a vowel sign follows in the longer word
    assert start("भारत", hindi) == hindi.rindex("भारत")
