"""TriviaQA's own files, made up here in the layout of its archive."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from bertkit.errors import BertkitError
from bertkit.tasks.question_answering import QuestionColumns
from bertkit.tasks.squad import GoldAnswer, QuestionExample, golds_in_context
from bertkit.text.documents import TextCounts

FIRST = "The Rhine\nrises in the Alps. The river RHINE ends in the North Sea."
LATE = "word " * 399 + "Ister " + "Danube after the first words."
RECORD: dict[str, Any] = {
    "QuestionId": "q_1",
    "Question": "Which river passes Basel?",
    "Answer": {"Value": "the Rhine", "Aliases": ["Rhine", "River  Rhine", "Ister", "Rh"]},
    "EntityPages": [{"Filename": "Rhine.txt", "Title": "Rhine"}, {"Filename": "Danube.txt"}],
    "SearchResults": [{"Filename": "12/12_34.txt"}, {"Filename": "12/none.txt"}],
}


def archive(folder: Path, *records: dict[str, Any]) -> Path:
    """A file of questions, with the documents in the folder beside that of the file."""
    texts = {
        "wikipedia/Rhine.txt": FIRST,
        "wikipedia/Danube.txt": LATE,
        "web/12/12_34.txt": "Rhineland is not the river.",
    }
    for name, text in texts.items():
        path = folder / "evidence" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    path = folder / "qa" / "web-train.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"Data": list(records), "Domain": "Web", "Version": 1.0}))
    return path


def read(path: Path | str, **options: Any) -> tuple[list[QuestionExample], TextCounts]:
    counts = TextCounts()
    return list(QuestionColumns().read(path, counts, **options)), counts


def test_contexts_are_beginnings_of_documents_with_an_answer(tmp_path: Path) -> None:
    path = archive(tmp_path, RECORD)
    (rhine, danube), counts = read(path)
    assert (rhine.id, rhine.question) == ("q_1--Rhine.txt", RECORD["Question"])
    assert (rhine.context, rhine.answers) == (FIRST, (GoldAnswer("The Rhine", 0),))
    assert danube.context == "word " * 399 + "Ister"
    assert danube.answers == (GoldAnswer("Ister", 1995),)
    assert not rhine.version2
    assert counts.skipped == {
        "document cut to its first 400 words": 1,
        "document without an answer in the words that are read": 1,
        "document missing": 1,
    }
    assert counts.examples["document missing"] == f"{path}, question q_1, web/12/none.txt"


def test_every_name_of_an_answer_counts_in_the_score(tmp_path: Path) -> None:
    [rhine, _], _ = read(archive(tmp_path, RECORD), purpose="dev")
    assert rhine.answers is not None
    assert [(one.text, one.start) for one in rhine.answers] == [
        ("The Rhine", 0),
        ("the Rhine", -1),
        ("Rhine", -1),
        ("River  Rhine", -1),
        ("Ister", -1),
        ("Rh", -1),
    ]


def test_a_name_that_begins_a_longer_word_is_no_answer() -> None:
    text = "भारतीय टीम जीती। भारत में खुशी है।"  # a vowel sign follows the name in the first word
    assert golds_in_context(text, ["भारत"], purpose="train") == (GoldAnswer("भारत", 17),)
    assert golds_in_context(text[:16], ["भारत"], purpose="train") == ()
    assert golds_in_context(text, [], purpose="dev") == ()


def test_documents_without_labels_are_whole(tmp_path: Path) -> None:
    unlabelled = {name: value for name, value in RECORD.items() if name != "Answer"}
    found, _ = read(archive(tmp_path, unlabelled), purpose="predict")
    assert [(one.answers, len(one.context)) for one in found[:2]] == [
        (None, len(FIRST)),
        (None, len(LATE)),
    ]
    assert len(found) == 3


def test_what_is_no_file_is_a_missing_document(tmp_path: Path) -> None:
    names = ["none\0.txt", "../../secret", "/etc/passwd", "pipe", "none.txt", "Rhine.txt"]
    record = RECORD | {"EntityPages": [{"Filename": name} for name in names]}
    path = archive(tmp_path, record, {"QuestionId": "q_2", "Question": "Where?"})
    os.mkfifo(tmp_path / "evidence/wikipedia/pipe")
    [rhine], counts = read(path)
    assert rhine.id == "q_1--Rhine.txt"
    assert counts.skipped["document missing"] == 6


def test_invalid_bytes_of_a_document_are_counted(tmp_path: Path) -> None:
    path = archive(tmp_path, RECORD)
    (tmp_path / "evidence/wikipedia/Rhine.txt").write_bytes(b"The Rhine \xff ends.")
    [rhine, _], counts = read(path)
    assert rhine.context == "The Rhine \ufffd ends."
    assert counts.skipped["invalid UTF-8 replaced, kept"] == 1


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"EntityPages": [{}]}, "no field 'Filename'"),
        ({"Answer": {"Aliases": []}}, "no field 'Value'"),
        ({"Answer": {"Value": "Po"}}, "no usable question; the first: document without"),
    ],
)
def test_what_cannot_be_read_is_refused(
    change: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    with pytest.raises(BertkitError, match=problem):
        read(archive(tmp_path, RECORD | change))


def test_the_folder_of_documents_is_named_if_it_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "qa.json"
    path.write_text(json.dumps({"Data": [RECORD]}))
    with pytest.raises(BertkitError, match="documents are missing; unpack its whole archive"):
        read(path)
