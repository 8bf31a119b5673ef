"""Which reader takes which file of the user's own."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from bertkit.errors import BertkitError
from bertkit.tasks.own_files import Columns, in_rows, read_own, read_unlabelled
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
    assert not in_rows("answer", name, Columns())
    assert in_rows("answer", name, Columns(format="jsonl"))


@pytest.mark.parametrize("name", ["sq.jsonl", "sq.csv.gz", "http://h/sq.parquet", "hf:squad"])
def test_the_others_are_rows(name: str) -> None:
    assert in_rows("answer", name, Columns())


def test_questions_from_a_compressed_file_and_an_address(write: Write) -> None:
    plain = write("sq.json", SQUAD)
    packed = plain.with_name("sq.json.gz")
    packed.write_bytes(gzip.compress(SQUAD.encode()))
    for path in (str(plain), str(packed), plain.as_uri(), packed.as_uri()):
        for found in (
            read_own("answer", path, Columns(), TextCounts()),
            read_unlabelled("answer", path, Columns(), TextCounts()),
        ):
            assert [given.id for given in found] == ["a"]
    with pytest.raises(BertkitError, match=r"cannot reach nosuch://h/sq\.json|nosuch://h/sq\.json"):
        read_own("answer", "nosuch://h/sq.json", Columns(), TextCounts())


def test_json_lines_with_another_name(write: Write) -> None:
    line = json.dumps({"question": "When?", "context": CONTEXT, "answers": "1895"})
    path = str(write("sq.json", f"{line}\n{line}\n"))
    with pytest.raises(BertkitError, match=r"sq\.json is not valid JSON .*--format jsonl"):
        read_own("answer", path, Columns(), TextCounts())
    assert len(read_own("answer", path, Columns(format="jsonl"), TextCounts())) == 2


@pytest.mark.parametrize(
    ("kind", "name"), [("answer", "nosuch.json"), ("tag", "nosuch.txt"), ("classify", "nosuch.csv")]
)
def test_an_absent_file_of_ones_own_is_of_no_official_set(kind: str, name: str) -> None:
    with pytest.raises(BertkitError, match=f"^{name} does not exist; check the path$"):
        read_own(kind, name, Columns(), TextCounts())
