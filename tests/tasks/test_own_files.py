"""Which reader takes which file of the user's own."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from bertkit.datasets.columns import ChoiceColumns, QuestionColumns, TextColumns, WordColumns
from bertkit.datasets.examples import GoldAnswer
from bertkit.datasets.readers import Columns
from bertkit.datasets.tabular import has_columns

from bertkit.errors import BertkitError
from bertkit.predict.files import end_position
from bertkit.text.lines import TextCounts
from bertkit.text.sources import extension

Write = Callable[[str, str], Path]
CONTEXT = "The river froze in 1895."
QUESTION = {"id": "a", "question": "When?", "answers": [{"text": "1895", "answer_start": 19}]}
SQUAD = json.dumps({"data": [{"paragraphs": [{"context": CONTEXT, "qas": [QUESTION]}]}]})


@pytest.mark.parametrize("name", ["sq.json", "sq.JSON.gz", "sq.json.zst", "http://h/sq.json.xz"])
def test_json_is_squad_also_compressed(name: str) -> None:
    assert extension(name) == ".json"
    assert QuestionColumns(format="jsonl").in_rows(name)


@pytest.mark.parametrize("name", ["sq.jsonl", "sq.csv.gz", "http://h/sq.parquet", "hf:squad"])
def test_the_others_are_rows(name: str) -> None:
    assert QuestionColumns().in_rows(name)


def test_questions_from_a_compressed_file_and_an_address(write: Write) -> None:
    plain = write("sq.json", SQUAD)
    packed = plain.with_name("sq.json.gz")
    packed.write_bytes(gzip.compress(SQUAD.encode()))
    for path in (str(plain), str(packed), plain.as_uri(), packed.as_uri()):
        for found in (
            QuestionColumns().read_labelled(path, TextCounts()),
            QuestionColumns().read(path, TextCounts(), labelled=False),
        ):
            assert [given.id for given in found] == ["a"]
    with pytest.raises(BertkitError, match=r"cannot reach nosuch://h/sq\.json|nosuch://h/sq\.json"):
        QuestionColumns().read_labelled("nosuch://h/sq.json", TextCounts())


def test_json_lines_with_another_name(write: Write) -> None:
    line = json.dumps({"question": "When?", "context": CONTEXT, "answers": "1895"})
    plain = write("sq.json", f"{line}\n{line}\n")
    packed = plain.with_name("sq.json.gz")
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    for path in (plain, packed):
        assert len(QuestionColumns().read_labelled(str(path), TextCounts())) == 2
    path = write("broken.json", f"{{\n{line}\n{line}\n")
    with pytest.raises(BertkitError, match=r"broken\.json is not valid JSON .*--format jsonl"):
        QuestionColumns().read_labelled(str(path), TextCounts())


def test_a_tilde_is_the_home_folder_also_where_a_file_is_looked_at_first(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = json.dumps({"question": "When?", "context": CONTEXT, "answers": "1895"})
    home = write("q.json", f"{line}\n{line}\n").parent
    monkeypatch.setenv("HOME", str(home))
    assert len(QuestionColumns().read_labelled("~/q.json", TextCounts())) == 2
    assert end_position("~/q.json", QuestionColumns()) == 2
    assert end_position("~/none.json", QuestionColumns()) is None


@pytest.mark.parametrize(
    ("columns", "name"),
    [
        (QuestionColumns(), "nosuch.json"),
        (WordColumns(), "nosuch.txt"),
        (TextColumns(), "nosuch.csv"),
    ],
)
def test_an_absent_file_of_ones_own_is_of_no_official_set(columns: Columns, name: str) -> None:
    with pytest.raises(BertkitError, match=f"^{name} does not exist; check the path$"):
        columns.read_labelled(name, TextCounts())


def test_rows_of_json_that_lack_their_label_are_kept_for_prediction(tmp_path: Path) -> None:
    """Of a test file labels may be missing in some rows: as null, as "", or with their key."""
    path = tmp_path / "test.jsonl"
    rows = [{"text": f"river {i}"} for i in range(150)]
    rows += [{"text": "a", "label": "x"}, {"text": "b"}, {"text": "c", "label": None}]
    path.write_text("\n".join(map(json.dumps, rows)))
    counts = TextCounts()
    found = TextColumns().read_labelled(str(path), counts, test=True)
    assert [given.label for given in found] == [*[None] * 150, "x", None, None]
    assert counts.skipped == {"row without label, kept": 152}
    train = TextColumns().read_labelled(str(path), counts)
    assert [given.label for given in train] == ["x"]
    assert counts.skipped


@pytest.mark.parametrize("names", [("a", "b"), ("b", "a")])
@pytest.mark.parametrize("kind", ["csv", "parquet", "jsonl"])
def test_one_file_of_a_folder_may_lack_the_labels(
    tmp_path: Path, kind: str, names: tuple[str, str]
) -> None:
    columns = ({"text": ["a", "b"]}, {"text": ["c"], "label": ["x"]})
    for name, rows in zip(names, columns, strict=True):
        table, file = pd.DataFrame(rows), tmp_path / f"{name}.{kind}"
        if kind == "jsonl":
            table.to_json(file, orient="records", lines=True)
        else:
            table.to_csv(file, index=False) if kind == "csv" else table.to_parquet(file)
    counts = TextCounts()
    found = TextColumns().read_labelled(str(tmp_path), counts, scoring=True, test=True)
    assert {given.text: given.label for given in found} == {"a": None, "b": None, "c": "x"}
    assert counts.skipped == {"row without label, kept": 2}


def test_columns_of_parquet_are_known_without_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pd.DataFrame({"text": ["a"]}).to_parquet(tmp_path / "a.parquet")
    monkeypatch.setattr("bertkit.datasets.tabular.parquet_rows", None)
    assert has_columns(tmp_path / "a.parquet", ["text"])
    assert not has_columns(tmp_path / "a.parquet", ["text", "label"])


def test_questions_that_lack_their_answers_are_kept_for_prediction(tmp_path: Path) -> None:
    """Null says that there is no answer; where the field is absent, nothing is said."""
    path = tmp_path / "test.jsonl"
    about = {"question": "When?", "context": CONTEXT}
    rows = [about, {**about, "answers": "1895"}, {**about, "answers": None}, about]
    path.write_text("\n".join(map(json.dumps, rows)))
    counts = TextCounts()
    found = QuestionColumns().read_labelled(str(path), counts, scoring=True, test=True)
    assert [given.answers for given in found] == [None, (GoldAnswer("1895", 19),), (), None]
    assert counts.examples["row without label, kept"] == f"{path}:1"
    counts = TextCounts()
    assert len(QuestionColumns().read_labelled(str(path), counts)) == 2
    assert counts.skipped["row without column 'answers'"] == 2


@pytest.mark.parametrize(
    ("columns", "label"), [(ChoiceColumns(choices=("x", "y")), 0), (WordColumns(), ("O",))]
)
def test_other_rows_that_lack_their_label_are_kept_for_prediction(
    tmp_path: Path, columns: Columns, label: object
) -> None:
    path = tmp_path / "test.jsonl"
    row = {"text": "a", "x": "b", "y": "c", "tokens": ["a"]}
    rows = [row, {**row, "label": "x", "ner_tags": ["O"]}, row]
    path.write_text("\n".join(map(json.dumps, rows)))
    counts = TextCounts()
    found = columns.read_labelled(str(path), counts, test=True)
    assert [given.gold for given in found] == [None, label, None]
    assert counts.skipped["row without label, kept"] == 2


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        (TextColumns, {"text": ""}),
        (TextColumns, {"label": 1}),
        (TextColumns, {"text": None}),
        (TextColumns, {"id": 0}),
        (ChoiceColumns, {"choices": ("A", "")}),
        (WordColumns, {"tags": ""}),
    ],
)
def test_columns_have_names(kind: type[Columns], named: dict[str, Any]) -> None:
    with pytest.raises(BertkitError, match=f"^--{next(iter(named))} is .*, not the name of a col"):
        kind(**named)


def test_a_column_that_is_not_needed_may_be_without_a_name() -> None:
    assert TextColumns(pair="", id=None).inputs == ("text", "")  # type: ignore[arg-type]


def test_folders_of_rows_are_read_as_rows(tmp_path: Path) -> None:
    """And not as words on lines, or as SQuAD's JSON."""
    (tmp_path / "tags").mkdir()
    (tmp_path / "tags" / "a.jsonl").write_text('{"tokens": ["river"], "ner_tags": ["B-X"]}\n')
    [words] = WordColumns().read(tmp_path / "tags", TextCounts())
    assert (words.words, words.tags) == (("river",), ("B-X",))
    (tmp_path / "answers").mkdir()
    row = '{"question": "What?", "context": "A river.", "answers": "river"}\n'
    (tmp_path / "answers" / "a.jsonl").write_text(row)
    [question] = QuestionColumns().read(tmp_path / "answers", TextCounts())
    assert question.context == "A river."
