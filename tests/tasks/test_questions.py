"""Questions with answers and words with tags, from the columns of every kind of file."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bertkit.datasets.columns import QuestionColumns, WordColumns
from bertkit.datasets.examples import GoldAnswer, QuestionExample, WordsExample
from bertkit.datasets.fields import from_json
from bertkit.datasets.readers import Columns
from bertkit.datasets.squad import read_squad
from hypothesis import given, settings
from hypothesis import strategies as st

from bertkit.errors import BertkitError
from bertkit.text.lines import TextCounts

CONTEXT = "The river froze in 1895. In 1895 the bridge was closed."
FIRST = GoldAnswer("1895", 19)
SECOND = GoldAnswer("1895", 28)
BOTH = (SECOND, FIRST)
NO_START = "answer without a start, first occurrence kept"
Write = Callable[[str, str], Path]


def read(columns: Columns, path: Path | str, **kept: bool) -> tuple[list[Any], TextCounts]:
    counts = TextCounts()
    return list(columns.read(path, counts, **kept)), counts


READING = {"labelled", "keep_unlabelled", "scoring"}


def questions(path: Path | str, **options: Any) -> tuple[list[QuestionExample], TextCounts]:
    kept = {name: options.pop(name) for name in READING & options.keys()}
    return read(QuestionColumns(**options), path, **kept)


def words(path: Path | str, **options: Any) -> tuple[list[WordsExample], TextCounts]:
    kept = {name: options.pop(name) for name in READING & options.keys()}
    return read(WordColumns(**options), path, **kept)


def lines(*rows: dict[str, Any]) -> str:
    return "".join(f"{json.dumps(row)}\n" for row in rows)


def table(*rows: list[str]) -> str:
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows(rows)
    return file.getvalue()


ANSWERS: list[tuple[Any, tuple[GoldAnswer, ...], int]] = [
    ("1895", (FIRST,), 1),
    ({"text": ["1895"], "answer_start": [28]}, (SECOND,), 0),
    ({"text": ["1895", "1895"], "answer_start": [28, 19]}, BOTH, 0),
    ({"text": "1895", "answer_start": 28}, (SECOND,), 0),
    ({"text": "1895", "answer_start": 28.0}, (SECOND,), 0),
    ({"text": ["1895"]}, (FIRST,), 1),
    ({"text": ["1895"], "answer_start": None}, (FIRST,), 1),
    ({"text": ["1895", "river"], "answer_start": [28, None]}, (SECOND, GoldAnswer("river", 4)), 1),
    (["1895", "river"], (FIRST, GoldAnswer("river", 4)), 2),
    ([{"text": "1895", "answer_start": 28}, {"text": "1895", "answer_start": 19}], BOTH, 0),
    ("", (), 0),
    (" ", (), 0),
    ([], (), 0),
    ([""], (), 0),
    (None, (), 0),
    ({"text": [], "answer_start": []}, (), 0),
    ({"text": None, "answer_start": None}, (), 0),
    ({"text": [""], "answer_start": [-1]}, (), 0),
]


@pytest.mark.parametrize(("value", "expected", "no_start"), ANSWERS)
def test_answers_in_json_lines_and_as_json_in_csv(
    write: Write, value: Any, expected: tuple[GoldAnswer, ...], no_start: int
) -> None:
    row = {"question": "When?", "context": CONTEXT, "answers": value}
    text = value if isinstance(value, str) else "" if value is None else json.dumps(value)
    for path in (
        write("a.jsonl", lines(row)),
        write("a.csv", table(list(row), ["When?", CONTEXT, text])),
    ):
        [found], counts = questions(path)
        place = f"{path}:{1 if path.suffix == '.jsonl' else 2}"
        assert found == QuestionExample("0", "When?", CONTEXT, expected, place)
        assert counts.skipped == ({NO_START: no_start} if no_start else {})


def test_texts_with_brackets_are_texts(write: Write) -> None:
    for text in ("[1]", "[sic] he", "{x}", '{"a": 1}', "[[", "[" * 100_000, "a [1]"):
        context = f"so {text} is"
        path = write("a.csv", table(["question", "context", "answers"], ["What?", context, text]))
        assert questions(path)[0][0].answers == (GoldAnswer(text, 3),)


def test_answers_that_pandas_wrote_are_refused(write: Write) -> None:
    for text in (
        "{'text': ['1895'], 'answer_start': [19]}",
        "{'text': array(['1895'], dtype=object), 'answer_start': array([19], dtype=int32)}",
        "['1895']",
        "['18\n95' '19']",
    ):
        path = write("a.csv", table(["question", "context", "answers"], ["When?", CONTEXT, text]))
        with pytest.raises(
            BertkitError, match=r"a\.csv:2: .* in Python's notation; write it as JSON"
        ):
            questions(path)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (1895, r"a\.jsonl:1: 'answers' is 1895, neither text nor a list nor an object"),
        ([1895], r"a\.jsonl:1: 'answers' is 1895, neither"),
        ({"texts": ["x"]}, r"the object in 'answers' has no field 'text'; did you mean 'texts'"),
        ({"text": ["1895"], "answer_start": [1, 2]}, "'answers' has 1 texts and 2 starts"),
        ({"text": ["1895"], "answer_start": ["19"]}, "the start '19'; they must be text and a who"),
        ({"text": ["1895"], "answer_start": [True]}, "the start True"),
        ({"text": [1895], "answer_start": [19]}, "holds the text 1895 with the start 19"),
    ],
)
def test_malformed_answers_name_the_place(write: Write, value: Any, message: str) -> None:
    path = write("a.jsonl", lines({"question": "When?", "context": CONTEXT, "answers": value}))
    with pytest.raises(BertkitError, match=message) as caught:
        questions(path)
    assert "\n" not in str(caught.value)


def test_rows_left_out_and_answers_for_scoring(write: Write) -> None:
    rows = f"a,When?,{CONTEXT},1895\nb, ,{CONTEXT},1895\nc,When?,,x\nd,When?,{CONTEXT},1896\n"
    path = write("a.csv", f"key,q,c,gold\n{rows}e,When?\nf,Why?,{CONTEXT},\n")
    options = {"question": "q", "passage": "c", "answers": "gold", "id": "key"}
    inputs, counts = questions(path, **options)
    assert [(i.id, i.answers) for i in inputs] == [("a", (FIRST,)), ("f", ())]
    assert counts.skipped == {
        NO_START: 1,
        "empty 'q'": 1,
        "empty 'c'": 1,
        "row with fewer fields than the first line": 1,
        "answer not in its context": 1,
        "question left without an answer": 1,
    }
    assert counts.examples["question left without an answer"] == f"{path}:5"
    inputs, _ = questions(path, scoring=True, **options)
    assert [(i.id, i.answers) for i in inputs][1] == ("d", (GoldAnswer("1896", -1),))
    inputs, _ = questions(path, labelled=False, **options)
    assert [(i.id, i.answers) for i in inputs] == [("a", None), ("d", None), ("f", None)]


def test_question_ids_and_columns(write: Write) -> None:
    row = {"question": "When?", "context": CONTEXT}
    path = write("a.jsonl", lines({"id": 1, **row}, {"id": 2, **row}, {"id": "1", **row}))
    assert [i.id for i in questions(path, labelled=False)[0]] == ["0", "1", "2"]
    with pytest.raises(BertkitError, match=r"a\.jsonl:3: ID '1' is already used at .*a\.jsonl:1"):
        questions(path, labelled=False, id="id")
    for empty in (None, "", " "):
        path = write("b.jsonl", lines({"id": empty, **row}))
        with pytest.raises(BertkitError, match=r"b\.jsonl:1: no ID in column 'id'"):
            questions(path, labelled=False, id="id")
    with pytest.raises(
        BertkitError, match=r"b\.jsonl has no column 'answers' \(columns: id, quest"
    ):
        questions(path)
    with pytest.raises(BertkitError, match="no row that can be used; the first: empty 'question'"):
        questions(write("c.jsonl", lines({**row, "question": None})), labelled=False)
    cleaned = {**row, "question": "Wh\ud800en?", "answers": "1896"}
    with pytest.raises(BertkitError, match="can be used; the first: answer not in its context at"):
        questions(write("d.jsonl", lines(cleaned)))


def test_parquet_and_data_sets_hold_answers_as_squad_does(data: Path, tmp_path: Path) -> None:
    """The official questions, written as the Hugging Face copies of SQuAD are."""
    datasets = pytest.importorskip("datasets")
    official = read_squad(data / "squad" / "dev-v2.0.json", TextCounts(), scoring=True)[:200]
    assert {bool(given.answers) for given in official} == {True, False}
    answers = datasets.Sequence(
        {"text": datasets.Value("string"), "answer_start": datasets.Value("int32")}
    )
    text = datasets.Value("string")
    features = {"id": text, "context": text, "question": text, "answers": answers}
    columns = {
        "id": [given.id for given in official],
        "context": [given.context for given in official],
        "question": [given.question for given in official],
        "answers": [
            {
                "text": [answer.text for answer in given.answers or ()],
                "answer_start": [answer.start for answer in given.answers or ()],
            }
            for given in official
        ],
    }
    made = datasets.Dataset.from_dict(columns, features=datasets.Features(features))
    made.to_parquet(str(tmp_path / "train.parquet"))
    made.to_json(str(tmp_path / "a.jsonl"))
    for name in (f"hf:{tmp_path}::train", tmp_path / "train.parquet", tmp_path / "a.jsonl"):
        inputs, counts = questions(name, id="id")
        assert [i[:4] for i in inputs] == [i[:4] for i in official]
        assert not counts.skipped


# Words -------------------------------------------------------------------------------------------


def test_words_and_tags_as_lists_and_between_spaces(write: Write) -> None:
    expected = [(("New York", "is", "big"), ("B-LOC", "O", "O")), (("No",), ("O",))]
    rows = [{"tokens": list(found), "ner_tags": list(tags)} for found, tags in expected]
    inputs, counts = words(path := write("a.jsonl", lines(*rows)))
    assert inputs[1] == WordsExample("1", ("No",), ("O",), 1, f"{path}:2")
    assert [(i.words, i.tags) for i in inputs] == expected
    as_json = [[json.dumps(value) for value in row.values()] for row in rows]
    inputs, _ = words(write("a.csv", table(["tokens", "ner_tags"], *as_json)))
    assert [(i.words, i.tags) for i in inputs] == expected
    path = write("b.tsv", "w\tt\n \u200b  \u00a0 [1] [ \tO B-X  I-X O\n[ 1 ]\tO O O\n[1]\t[\n")
    inputs, _ = words(path, words="w", tags="t", format="tsv")
    assert [i.words for i in inputs] == [
        ("\u200b", "\u00a0", "[1]", "["),
        ("[", "1", "]"),
        ("[1]",),
    ]
    assert [i.tags for i in inputs] == [("O", "B-X", "I-X", "O"), ("O", "O", "O"), ("[",)]
    assert not counts.skipped
    assert {i.tags for i in words(path, words="w", labelled=False, format="tsv")[0]} == {None}


def test_documents_are_rows_that_follow_each_other(write: Write) -> None:
    names: list[Any] = ["a", "a", "b", None, None, "b", 7, 7.0, "a", "a"]
    rows = [{"tokens": ["x"], "ner_tags": ["O"], "doc": name} for name in names]
    rows[8]["tokens"] = rows[8]["ner_tags"] = []  # left out: it parts nothing
    path = write("a.jsonl", lines(*rows))
    inputs, counts = words(path, document="doc")
    assert [i.document for i in inputs] == [0, 0, 1, 2, 3, 4, 5, 5, 6]
    assert counts.skipped == {"empty 'tokens'": 1}
    assert [i.document for i in words(path)[0]] == [0, 1, 2, 3, 4, 5, 6, 7, 9]


def test_documents_of_two_files_are_two(write: Write) -> None:
    """Both may call theirs the first."""
    row = {"tokens": ["x"], "ner_tags": ["O"], "doc": "1"}
    for name in ("a.jsonl", "b.jsonl"):
        path = write(name, lines(row, row))
    inputs, _ = words(path.parent, document="doc", format="jsonl")
    assert [given.document for given in inputs] == [0, 0, 1, 1]


def test_rows_without_tags(write: Write) -> None:
    rows = [{"tokens": ["a", "b"], "ner_tags": value} for value in (["O", "O"], None, "")]
    path = write("a.jsonl", lines(*rows))
    inputs, counts = words(path)
    assert [(i.id, i.tags) for i in inputs] == [("0", ("O", "O"))]
    assert counts.skipped == {"row without label": 2}
    inputs, counts = words(path, keep_unlabelled=True)
    assert [i.tags for i in inputs] == [("O", "O"), None, None]
    assert counts.skipped == {"row without label, kept": 2}


@pytest.mark.parametrize(
    ("tokens", "tags", "message"),
    [
        (["a", "b"], ["O"], r"a\.jsonl:1: 2 words in 'tokens' and 1 tags in 'ner_tags'"),
        ("a b", [], "2 words in 'tokens' and 0 tags"),
        (None, "O", "0 words in 'tokens' and 1 tags"),
        (["a", 1895], ["O", "O"], r"a\.jsonl:1: word 2 in 'tokens' is 1895, not text"),
        (["a", None], ["O", "O"], "word 2 in 'tokens' is None"),
        ('["a", 1895]', ["O", "O"], "word 2 in 'tokens' is 1895, not text"),  # as in CSV
        ('["a", null]', ["O", "O"], "word 2 in 'tokens' is None"),
        ("['a', None]", ["O", "O"], "is a list or object in Python's notation"),
        ({"a": 1}, ["O"], "'tokens' is {'a': 1}, neither a list nor text"),
        (["a", "b"], ["O", None], "tag 2 in 'ner_tags' is None, not a tag such as O"),
        (["a", "b"], [0, -100], "tag 2 in 'ner_tags' is -100, which marks a token without a tag"),
        (["a"], ["B-"], "tag 1 in 'ner_tags' is 'B-', not a tag"),
        (["a"], ["B PER"], "tag 1 in 'ner_tags' is 'B PER', not a tag"),
        ("a b", "[0 1]", r"tag 1 in 'ner_tags' is '\[0', not a tag"),
        ("a b", "['O', 'O']", r"\"\['O', 'O'\]\" is a list or object in Python's notation"),
        ("['a', \"b's\"]", "O O", "is a list or object in Python's notation"),
    ],
)
def test_malformed_words_name_the_place(write: Write, tokens: Any, tags: Any, message: str) -> None:
    path = write("a.jsonl", lines({"tokens": tokens, "ner_tags": tags}))
    with pytest.raises(BertkitError, match=message) as caught:
        words(path)
    assert "\n" not in str(caught.value)


def test_word_ids_surrogates_and_numbers(write: Write) -> None:
    row = {"tokens": ["a\ud800"], "ner_tags": [3]}
    path = write("a.jsonl", lines({"n": "x", **row}, {"n": "y", **row}, {"n": "x", **row}))
    inputs, counts = words(path)
    assert [(i.words, i.tags) for i in inputs] == [(("a\ufffd",), ("3",))] * 3
    assert counts.skipped == {"lone surrogate replaced, kept": 3, "tag that is a number, kept": 3}
    with pytest.raises(BertkitError, match=r"a\.jsonl:3: ID 'x' is already used at .*a\.jsonl:1"):
        words(path, id="n")
    path = write("a.jsonl", lines({"tokens": ["a"], "ner_tags": ["B-\ud800"]}))
    with pytest.raises(BertkitError, match=r"a\.jsonl:1: the label 'B-\\ud800' holds half of"):
        words(path)
    path = write("a.csv", table(["tokens", "ner_tags"], ["a b", "[3, 0]"]))
    assert words(path)[0][0].tags == ("3", "0")
    with pytest.raises(
        BertkitError, match=r"a\.csv has no column 'tags' .*did you mean 'ner_tags'"
    ):
        words(path, tags="tags")


def test_data_sets_name_their_tags(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    kind = datasets.ClassLabel(names=["O", "B-PER", "I-PER"])
    features = datasets.Features(
        {"tokens": datasets.Sequence(datasets.Value("string")), "ner_tags": datasets.Sequence(kind)}
    )
    rows = {"tokens": [["Nils", "Okafor", "left"], [], ["No"]], "ner_tags": [[1, 2, 0], [], [0]]}
    datasets.Dataset.from_dict(rows, features=features).to_parquet(str(tmp_path / "train.parquet"))
    inputs, counts = words(f"hf:{tmp_path}::train")
    assert [(i.id, i.tags) for i in inputs] == [("0", ("B-PER", "I-PER", "O")), ("2", ("O",))]
    assert counts.skipped == {"empty 'tokens'": 1}


@given(st.lists(st.text(max_size=8), max_size=5))
@settings(max_examples=60, deadline=None)
def test_json_lists_survive(found: list[str]) -> None:
    assert from_json(json.dumps(found), str, "") == found


def test_answers_in_lists_of_lists(write: Write) -> None:
    deep: Any = "river"
    for _ in range(900):
        deep = [deep]
    row = {"question": "What?", "context": "the river", "answers": [deep, [None, "the"]]}
    [found], _ = questions(write("a.jsonl", lines(row)))
    assert [answer.text for answer in found.answers or ()] == ["river", "the"]
