"""Tags in every spelling, tables of one word a row, and text with spans of characters."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bertkit.errors import BertkitError
from bertkit.tasks.columns import as_source
from bertkit.tasks.entities import WordColumns, WordsExample, standard_tag
from bertkit.tasks.token_classification import TokenClassification, tag_labels
from bertkit.tasks.types import DataFiles, TaskData, load_dataset, model_columns
from bertkit.text.documents import TextCounts
from bertkit.tokenizer.wordpiece import Tokenizer

Write = Callable[[str, str], Path]


def dataset(train: Any, **columns: Any) -> TaskData:
    return load_dataset("token-classification", DataFiles(train=train), columns, whole=True)


# Spellings of tags --------------------------------------------------------------------------------

SPELLINGS = {
    "B_PER I_PER O B_LOC": ("O", "B_LOC", "B_PER", "I_LOC", "I_PER"),
    "B:PER I:PER O B:LOC": ("O", "B:LOC", "B:PER", "I:LOC", "I:PER"),
    "PER/B PER/I O LOC/B": ("O", "LOC/B", "LOC/I", "PER/B", "PER/I"),
    "PER-B PER-I O LOC-B": ("O", "LOC-B", "LOC-I", "PER-B", "PER-I"),
    "PER_B PER_E O LOC_S O PER_B PER_I PER_E": ("O", "LOC_B", "LOC_I", "PER_B", "PER_I"),
    "B-PER M-PER O S-LOC": ("O", "B-LOC", "B-PER", "I-LOC", "I-PER"),
    "PER PER O LOC": ("O", "LOC", "PER"),
    "per-son per-son O LOC": ("O", "LOC", "per-son"),
}


@pytest.mark.parametrize("tags", SPELLINGS)
def test_spellings_are_read_scored_and_trained(tags: str, tokenizer: Tokenizer) -> None:
    """They form the same entities as B-PER I-PER O B-LOC."""
    names = tuple(tags.split())
    example = WordsExample("0", ("river",) * len(names), names, "a", "a:1")
    labels, entities = tag_labels([example])
    assert (labels, entities) == (SPELLINGS[tags], True)
    task = TokenClassification(labels)
    result = task.tagged(example, names, [1.0] * len(names))
    kind = "per-son" if "per-son" in tags else "PER"
    found = [(entity.type, entity.word_start, entity.word_end) for entity in result.entities]
    assert found[:2] == [(kind, 0, 2), ("LOC", 3, 4)]
    assert task.score([example], [result])["f1"] == 1.0
    wanted = [f"B-{kind}", f"I-{kind}", "O", "B-LOC"]
    assert list(task.gold_value(example))[:4] == wanted
    [part] = task.items([example], tokenizer).items[0].parts
    trained = [standard_tag(labels[i], task.pattern) for i in part.target.labels[:4]]
    assert trained == ([f"I{tag[1:]}" if tag != "O" else tag for tag in wanted]
                       if "LOC" in labels else wanted)  # fmt: skip


@given(st.lists(st.sampled_from(["O", "PER", "LOC", "B-PER", "I-PER", "I-LOC"]), max_size=8))
@settings(max_examples=100, deadline=None)
def test_unmarked_tags_are_grouped_as_by_transformers(tags: list[str]) -> None:
    """As by `TokenClassificationPipeline.group_entities` with its `get_tag`."""
    wanted: list[tuple[str, int, int]] = []
    for i, tag in enumerate(tags):
        mark, kind = tag.split("-") if "-" in tag else ("I", tag)
        if wanted and wanted[-1][0] == kind and mark != "B":
            wanted[-1] = (kind, wanted[-1][1], i + 1)
        else:
            wanted.append((kind, i, i + 1))
    task = TokenClassification(("O", "PER", "LOC"))
    words = WordsExample("0", ("x",) * len(tags), None, "a", "a:1")
    found = task.tagged(words, tags, [1.0] * len(tags)).entities
    assert [(entity.type, entity.word_start, entity.word_end) for entity in found] == [
        group for group in wanted if group[0] != "O"
    ]


def test_tags_without_o_are_no_entities_which_is_said(write: Write) -> None:
    data = dataset(write("t.txt", "a DET\nb NOUN\n\nc VERB\nd NOUN\n"))
    assert data.task == TokenClassification(("DET", "NOUN", "VERB"), entities=False)
    assert sum("no entities" in reason for reason in data.counts.skipped) == 1
    data = dataset(write("t.txt", "a DET\nb O\n\nc DET\nd O\n"))
    assert not data.counts.skipped


# One word a row -----------------------------------------------------------------------------------

SENTENCES = "my O\nMara B-PER\nLind I-PER\n\nwe O\nleft O\n\nOslo B-LOC\n, O\nnull O\n"
ROWS = [line.split() for line in SENTENCES.split("\n") if line]
NUMBERS = {
    "filled": ["0", "0", "0", "1", "1", "2", "2", "2"],
    "first": ["Sentence: 1", "", "", "Sentence: 2", "", "Sentence: 3", "", ""],
}


@pytest.mark.parametrize("numbers", NUMBERS)
@pytest.mark.parametrize("ending", ["csv", "tsv", "jsonl", "memory"])
def test_a_column_groups_words_into_sentences(ending: str, numbers: str, write: Write) -> None:
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame(ROWS, columns=["word", "tag"])
    table["sentence"] = NUMBERS[numbers]
    names = {"words": "word", "tags": "tag", "sentence": "sentence"}
    if ending == "memory":
        table["sentence"] = table["sentence"].replace("", float("nan"))
        source: Any = table
    else:
        source = str(write(f"rows.{ending}", ""))
        if ending == "jsonl":
            table.to_json(source, orient="records", lines=True)
        else:
            table.to_csv(source, index=False, sep="," if ending == "csv" else "\t")
    data = dataset(source, **names)
    wanted = dataset(str(write("rows.txt", SENTENCES)))
    assert [(e.words, e.tags) for e in data.train] == [(e.words, e.tags) for e in wanted.train]
    assert [e.id for e in data.train] == ["0", "1", "2"]
    assert (data.task, data.columns["sentence"]) == (wanted.task, "sentence")
    assert not data.counts.skipped
    del names["sentence"]
    if ending != "tsv":  # which is then a file of CoNLL's
        with pytest.raises(BertkitError, match="--sentence"):
            dataset(source, **names)


def test_odd_tables_of_words(write: Write) -> None:
    rows = "word,tag,s\na,O,1\n,O,1\nb,B-X,1\nc,O,2\nd,O,2\ne,O,1\n"  # 1 of another document
    columns = {"words": "word", "tags": "tag", "sentence": "s"}
    data = dataset(write("a.csv", rows), **columns)
    assert [example.words for example in data.train] == [("a", "b"), ("c", "d"), ("e",)]
    assert data.counts.skipped == {"empty 'word'": 1}
    for bad in ("word,tag,s\na,O,1\nb,,1\n", "word,tag\na,O\nb,B-X\n"):
        with pytest.raises(BertkitError):
            dataset(write("a.csv", bad), **columns)
    columns_of_model = WordColumns(**columns)
    [example] = columns_of_model.read(
        str(write("p.csv", "s,word\n1,a\n1,b\n")), TextCounts(), "predict"
    )
    assert (example.words, example.tags) == (("a", "b"), None)


# Spans of characters ------------------------------------------------------------------------------

TEXT = "Mara  Lind's boat 🚤 left Bergen-Nord."
SPANS = [(0, 10, "PER"), (25, 36, "LOC")]
FORMS: dict[str, Any] = {
    "lists": {"label": [list(span) for span in SPANS]},
    "doccano": {"entities": [{"id": 1, "start_offset": a, "end_offset": b, "label": kind}
                             for a, b, kind in SPANS]},
    "prodigy": {"tokens": [{"text": "x"}], "spans": [{"start": a, "end": b, "label": kind}
                                                     for a, b, kind in SPANS]},
    "label studio": {"label": [{"start": a, "end": b, "labels": [kind], "text": TEXT[a:b]}
                               for a, b, kind in SPANS]},
    "spacy": {"label": {"entities": [list(span) for span in SPANS]}},
    "label studio, full": {
        "data": {"text": TEXT},
        "annotations": [{"result": [{"value": {"start": a, "end": b, "labels": [kind]},
                                     "from_name": "ner", "type": "labels"} for a, b, kind in SPANS]
                         + [{"type": "relation", "from_id": "x"}]}],
    },
    "ours": {"entities": [{"type": kind, "start": a, "end": b} for a, b, kind in SPANS]},
}  # fmt: skip
WORDS = ("Mara", "Lind", "'s", "boat", "🚤", "left", "Bergen-Nord", ".")
TAGS = ("B-PER", "I-PER", "O", "O", "O", "O", "B-LOC", "O")


@pytest.mark.parametrize("form", FORMS)
def test_text_with_spans_is_read(form: str, write: Write) -> None:
    rows: list[Any] = [{"id": 1, "text": TEXT, **FORMS[form]}, {"id": 2, "text": "No name."}]
    named = next(iter(FORMS[form].keys() - {"tokens"}))
    if "data" in FORMS[form]:
        del rows[0]["text"]
        rows[1] = {"data": {"text": "No name."}, "annotations": [{"result": []}]}
        named = "spans"
    else:
        rows[1] |= {named: []}
    file = str(write("spans.jsonl", "".join(json.dumps(row) + "\n" for row in rows)))
    pandas = pytest.importorskip("pandas")
    for source in (file, rows, pandas.DataFrame(rows)):
        data = dataset(source)
        assert [(e.words, e.tags) for e in data.train] == [
            (WORDS, TAGS), (("No", "name", "."), ("O", "O", "O")),
        ]  # fmt: skip
        assert data.columns["text"] == "text"
        assert not data.counts.skipped
    assert dataset(file, words="text", tags=named).train == dataset(file).train
    assert dataset(file, text="text", tags=named).train == dataset(file).train


def test_spans_that_do_not_fit_are_counted(write: Write) -> None:
    spans = [
        [25, 31, "LOC"],
        [32, 36, "LOC"],
        [0, 4, "A"],
        [0, 10, "PER"],
        [4, 6, "X"],
        [30, 99, "X"],
    ]
    row = {"text": TEXT, "label": spans}
    data = dataset(str(write("a.jsonl", json.dumps(row))))
    assert data.train[0].tags == TAGS
    assert sorted(data.counts.skipped.values()) == [1, 2, 2]


@pytest.mark.parametrize("label", [[[0, 4]], [[0, 4, 5]], [["0", "4", "X"]], "pos", [1, 2]])
def test_what_is_no_span_is_an_error(label: Any, write: Write) -> None:
    file = write("a.jsonl", json.dumps({"text": TEXT, "label": label}) + "\n")
    with pytest.raises(BertkitError, match=r"column|spans"):
        dataset(file)
    with pytest.raises(BertkitError, match="spans"):
        dataset(file, text="text", tags="label")


def test_spans_may_begin_later_and_lower_case_marks_are_refused(write: Write) -> None:
    rows = [{"text": "No name.", "label": None}, {"text": TEXT, "label": [list(SPANS[0])]}]
    data = dataset(str(write("a.jsonl", "".join(json.dumps(row) + "\n" for row in rows))))
    assert [e.text for e in data.train] == [TEXT]
    assert data.counts.skipped["row without label"] == 1
    with pytest.raises(BertkitError, match="write B-per"):
        dataset([(["a", "b", "c"], ["b-per", "i-per", "O"])])


def test_columns_that_are_named_stay(write: Write) -> None:
    rows = [{"tokens": ["a", "b"], "ner_tags": ["B-X", "O"], "text": "a b", "label": []}] * 2
    columns = WordColumns()
    assert columns.fitted(as_source(rows, "train")) == columns
    assert columns.fitted(str(write("a.txt", "a O\n"))) == columns


def test_spans_in_python_notation_name_their_row(write: Write) -> None:
    rows = [{"text": TEXT, "entities": None}, {"text": TEXT, "entities": str([{"start": 0}])}]
    file = write("a.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(BertkitError, match=r"a\.jsonl:2: .*Python"):
        dataset(file)
    with pytest.raises(BertkitError, match=r"train\[1\]: .*Python"):
        dataset(rows)


def test_spans_are_seen_behind_a_row_that_was_rejected_in_prodigy() -> None:
    rows: list[Any] = [{"text": "x", "answer": "ignore", "_task_hash": 1}]
    data = dataset([*rows, {"text": TEXT, "spans": SPANS}])
    assert [example.tags for example in data.train] == [TAGS]
    assert list(data.counts.skipped.values()) == [1]


def test_a_model_keeps_columns_that_count_from_the_end() -> None:
    saved = {"tag_column": -2, "word_column": -3}
    columns = model_columns(TokenClassification, {}, {"columns": saved})
    assert isinstance(columns, WordColumns)
    assert (columns.tag_column, columns.word_column) == (-2, -3)
    with pytest.raises(BertkitError, match=r"bertkit\.json"):
        model_columns(TokenClassification, {}, {"columns": {"tag_column": "x"}})
