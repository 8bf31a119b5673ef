"""Which reader takes which file of the user's own."""

from __future__ import annotations

import copy
import gzip
import inspect
import json
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest

from bertkit.datasets.examples import GoldAnswer
from bertkit.datasets.user_files import (
    Columns,
    end_position,
    has_rows,
    is_json,
    read_unlabelled,
    read_user_file,
)
from bertkit.errors import BertkitError
from bertkit.text.lines import TextCounts

Write = Callable[[str, str], Path]
CONTEXT = "The river froze in 1895."
QUESTION = {
    "id": "a",
    "question": "When?",
    "answers": [{"text": "1895", "answer_start": 19}],
}
SQUAD = json.dumps({"data": [{"paragraphs": [{"context": CONTEXT, "qas": [QUESTION]}]}]})


@pytest.mark.parametrize("name", ["sq.json", "sq.JSON.gz", "sq.json.zst", "http://h/sq.json.xz"])
def test_json_is_squad_also_compressed(name: str) -> None:
    assert is_json(name)
    assert has_rows("question-answering", name, Columns(format="jsonl"))


@pytest.mark.parametrize("name", ["sq.jsonl", "sq.csv.gz", "http://h/sq.parquet", "hf:squad"])
def test_the_others_are_rows(name: str) -> None:
    assert has_rows("question-answering", name, Columns())


def test_questions_from_a_compressed_file_and_an_address(write: Write) -> None:
    plain = write("sq.json", SQUAD)
    packed = plain.with_name("sq.json.gz")
    packed.write_bytes(gzip.compress(SQUAD.encode()))
    for path in (str(plain), str(packed), plain.as_uri(), packed.as_uri()):
        for found in (
            read_user_file("question-answering", path, Columns(), TextCounts()),
            read_unlabelled("question-answering", path, Columns(), TextCounts()),
        ):
            assert [given.id for given in found] == ["a"]
    with pytest.raises(BertkitError, match=r"cannot reach nosuch://h/sq\.json|nosuch://h/sq\.json"):
        read_user_file("question-answering", "nosuch://h/sq.json", Columns(), TextCounts())


def test_json_lines_with_another_name(write: Write) -> None:
    line = json.dumps({"question": "When?", "context": CONTEXT, "answers": "1895"})
    plain = write("sq.json", f"{line}\n{line}\n")
    packed = plain.with_name("sq.json.gz")
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    for path in (plain, packed):
        assert len(read_user_file("question-answering", str(path), Columns(), TextCounts())) == 2
    path = write("broken.json", f"{{\n{line}\n{line}\n")
    with pytest.raises(BertkitError, match=r"broken\.json is not valid JSON .*--format jsonl"):
        read_user_file("question-answering", str(path), Columns(), TextCounts())


def test_a_tilde_is_the_home_folder_also_where_a_file_is_looked_at_first(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = json.dumps({"question": "When?", "context": CONTEXT, "answers": "1895"})
    home = write("q.json", f"{line}\n{line}\n").parent
    monkeypatch.setenv("HOME", str(home))
    assert len(read_user_file("question-answering", "~/q.json", Columns(), TextCounts())) == 2
    assert end_position("~/q.json", Columns()) == 2
    assert end_position("~/none.json", Columns()) is None


def test_columns_know_what_was_given() -> None:
    columns = Columns(text="text", header=True)
    assert columns == Columns()
    assert (columns.given, Columns().given) == ({"text", "header"}, set())
    assert (
        copy.deepcopy(columns).given == pickle.loads(pickle.dumps(columns)).given == columns.given
    )
    assert list(inspect.signature(Columns).parameters)[:2] == ["text", "pair"]
    with pytest.raises(TypeError, match="nothing"):
        Columns(nothing=1)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("question-answering", "nosuch.json"),
        ("token-classification", "nosuch.txt"),
        ("classification", "nosuch.csv"),
    ],
)
def test_an_absent_file_of_ones_own_is_of_no_official_set(kind: str, name: str) -> None:
    with pytest.raises(BertkitError, match=f"^{name} does not exist; check the path$"):
        read_user_file(kind, name, Columns(), TextCounts())


def test_rows_of_json_that_lack_their_label_are_kept_for_prediction(tmp_path: Path) -> None:
    """Of a test file labels may be missing in some rows: as null, as "", or with their key."""
    path = tmp_path / "test.jsonl"
    rows = [{"text": f"river {i}"} for i in range(150)]
    rows += [{"text": "a", "label": "x"}, {"text": "b"}, {"text": "c", "label": None}]
    path.write_text("\n".join(map(json.dumps, rows)))
    counts = TextCounts()
    found = read_user_file("classification", str(path), Columns(), counts, test=True)
    assert [given.label for given in found] == [*[None] * 150, "x", None, None]
    assert counts.skipped == {"row without label, kept": 152}
    train = read_user_file("classification", str(path), Columns(), counts)
    assert [given.label for given in train] == ["x"]
    assert counts.skipped


def test_questions_that_lack_their_answers_are_kept_for_prediction(tmp_path: Path) -> None:
    """Null says that there is no answer; where the field is absent, nothing is said."""
    path = tmp_path / "test.jsonl"
    about = {"question": "When?", "context": CONTEXT}
    rows = [about, {**about, "answers": "1895"}, {**about, "answers": None}, about]
    path.write_text("\n".join(map(json.dumps, rows)))
    counts = TextCounts()
    found = read_user_file(
        "question-answering", str(path), Columns(), counts, scoring=True, test=True
    )
    assert [given.answers for given in found] == [None, (GoldAnswer("1895", 19),), (), None]
    assert counts.examples["row without label, kept"] == f"{path}:1"
    counts = TextCounts()
    assert len(read_user_file("question-answering", str(path), Columns(), counts)) == 2
    assert counts.skipped["row without column 'answers'"] == 2


@pytest.mark.parametrize("kind", ["multiple-choice", "token-classification"])
def test_other_rows_that_lack_their_label_are_kept_for_prediction(
    tmp_path: Path, kind: str
) -> None:
    path = tmp_path / "test.jsonl"
    row = {"text": "a", "x": "b", "y": "c", "tokens": ["a"]}
    rows = [row, {**row, "label": "x", "ner_tags": ["O"]}, row]
    path.write_text("\n".join(map(json.dumps, rows)))
    columns, counts = Columns(choices=("x", "y")), TextCounts()
    found = read_user_file(kind, str(path), columns, counts, test=True)
    labels = [given.tags if kind == "token-classification" else given.label for given in found]
    assert labels == [None, ("O",) if kind == "token-classification" else 0, None]
    assert counts.skipped["row without label, kept"] == 2
