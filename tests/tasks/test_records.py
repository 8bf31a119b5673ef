"""Labelled data in memory is read as the same data in a file."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from bertkit.datasets.benchmarks import read_split
from bertkit.datasets.columns import (
    ChoiceColumns,
    LabelSetColumns,
    NumberColumns,
    QuestionColumns,
    TextColumns,
    WordColumns,
)
from bertkit.datasets.readers import Columns
from bertkit.datasets.records import Records, as_source

import bertkit
from bertkit.errors import BertkitError
from bertkit.finetuning.settings import FinetuneSettings, Grid
from bertkit.text.lines import TextCounts

ROWS: dict[str, tuple[Columns, list[dict[str, Any]]]] = {
    "classification": (
        TextColumns(pair="pair"),
        [
            {"text": "a river", "pair": "a stone", "label": "wet"},
            {"text": "dust", "pair": "sand", "label": 1},
            {"text": " ", "pair": "left out", "label": "wet"},
            {"text": "no label", "pair": "left out", "label": None},
        ],
    ),
    "multi-label-classification": (
        LabelSetColumns(),
        [{"text": "a", "label": ["x", "y"]}, {"text": "b", "label": "x|z"}],
    ),
    "regression": (NumberColumns(), [{"text": "a", "label": 1.5}, {"text": "b", "label": "2"}]),
    "multiple-choice": (
        ChoiceColumns(choices=("one", "two")),
        [
            {"text": "a", "one": "b", "two": "c", "label": "two"},
            {"text": "d", "one": "e", "two": "f", "label": 0},
        ],
    ),
    "token-classification": (
        WordColumns(),
        [{"tokens": ["In", "Rome"], "ner_tags": ["O", "B-LOC"]}, {"tokens": [], "ner_tags": []}],
    ),
    "question-answering": (
        QuestionColumns(),
        [
            {
                "question": "What?",
                "context": "A river.",
                "answers": {"text": ["river"], "answer_start": [2]},
            }
        ],
    ),
}


def read(columns: Columns, source: str | Records) -> tuple[list[Any], dict[str, int]]:
    """Examples without their places, and the counts."""
    counts = TextCounts()
    found = list(columns.fitted(source, TextCounts()).read(source, counts))
    return [one._replace(place="") for one in found], dict(counts.skipped)


@pytest.mark.parametrize("task_type", ROWS)
def test_rows_in_memory_are_those_of_a_file(task_type: str, tmp_path: Path) -> None:
    columns, rows = ROWS[task_type]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    expected = read(columns, str(path))
    assert expected[0]
    assert read(columns, as_source(rows, "train")) == expected
    assert read(columns, as_source(iter(rows), "train")) == expected


@pytest.mark.parametrize("task_type", ["classification", "regression", "multiple-choice"])
def test_data_frames(task_type: str, tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    columns, rows = ROWS[task_type]
    frame = pandas.DataFrame(rows, index=[7] * len(rows))  # an index that says nothing
    assert read(columns, as_source(frame, "train")) == read(columns, as_source(rows, "train"))


def test_boolean_labels_are_those_of_any_file_that_pandas_writes(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"text": ["a", "b"], "label": [True, False]})
    frame.to_csv(tmp_path / "a.csv", index=False)
    frame.to_json(tmp_path / "a.jsonl", orient="records", lines=True)
    frame.to_parquet(tmp_path / "a.parquet")
    expected = read(TextColumns(), as_source(frame, "train"))
    assert [one.label for one in expected[0]] == ["True", "False"]
    for name in ("a.csv", "a.jsonl", "a.parquet"):
        assert read(TextColumns(), str(tmp_path / name)) == expected


def test_lists_that_pandas_reads_from_parquet(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    columns, rows = WordColumns(), [{"tokens": ["river", "stone"], "ner_tags": ["B-X", "O"]}]
    pandas.DataFrame(rows).to_parquet(tmp_path / "a.parquet")
    frame = pandas.read_parquet(tmp_path / "a.parquet")
    assert read(columns, as_source(frame, "train")) == read(columns, as_source(rows, "train"))


def test_questions_that_pandas_reads_from_parquet(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    answers = {"text": ["river"], "answer_start": [4]}
    rows = [{"id": "1", "question": "What?", "context": "The river runs.", "answers": answers}]
    pandas.DataFrame(rows).to_parquet(tmp_path / "a.parquet")
    columns = QuestionColumns()
    found = read(columns, as_source(pandas.read_parquet(tmp_path / "a.parquet"), "train"))
    assert found == read(columns, as_source(rows, "train"))
    assert found == read(columns, str(tmp_path / "a.parquet"))


@pytest.mark.parametrize(
    ("columns", "rows", "like"),
    [
        (TextColumns(), {"text": np.str_("a"), "label": np.float32(1)}, {"text": "a", "label": 1}),
        (TextColumns(), {"text": "a", "label": np.bool_(True)}, {"text": "a", "label": True}),
        (TextColumns(), {"text": "a", "label": torch.tensor(2)}, {"text": "a", "label": 2}),
        (NumberColumns(), {"text": "a", "label": np.int64(3)}, {"text": "a", "label": 3}),
        (WordColumns(), {"tokens": np.array(["a", "b"]), "ner_tags": np.array(["O", "X"])},
         {"tokens": ["a", "b"], "ner_tags": ["O", "X"]}),
        (ChoiceColumns(choices=("c",)), {"text": "a", "c": np.array(["x", "y"]), "label": 1},
         {"text": "a", "c": ["x", "y"], "label": 1}),
    ],
)  # fmt: skip
def test_values_of_numpy_and_torch_are_those_of_python(
    columns: Columns, rows: dict[str, Any], like: dict[str, Any]
) -> None:
    found = read(columns, as_source([rows], "train"))
    assert found == read(columns, as_source([like], "train"))
    assert found[0]


@pytest.mark.parametrize("columns", [TextColumns(), LabelSetColumns(), NumberColumns()])
def test_what_stands_for_null_is_null(columns: Columns, tmp_path: Path) -> None:
    pandas, pyarrow = pytest.importorskip("pandas"), pytest.importorskip("pyarrow")
    row = {"text": "a", "label": "1"}
    nulls = (float("nan"), np.float32("nan"), pandas.NA, pandas.NaT, Decimal("nan"))
    for null in nulls:
        expected = read(columns, as_source([row, {**row, "label": None}], "train"))
        assert read(columns, as_source([row, {**row, "label": null}], "train")) == expected
        texts, skipped = read(columns, as_source([(null, "1"), ("a", "1")], "train"))
        assert (len(texts), skipped) == (1, {"empty 'text'": 1})
    (tmp_path / "a.jsonl").write_text('{"text": "a", "label": "1"}\n{"text": "a", "label": NaN}\n')
    table = pyarrow.table({"text": ["a", "a"], "label": [1.0, float("nan")]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert read(columns, str(tmp_path / "a.jsonl")) == expected
    assert [one.gold for one in read(columns, str(tmp_path / "a.parquet"))[0][1:]] == [
        one.gold for one in expected[0][1:]
    ]


def test_starts_with_null_among_them_are_those_of_a_file(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    answers = [{"text": ["river", "A"], "answer_start": [2, None]}]
    rows = {"question": ["What?"], "context": ["A river."], "answers": answers}
    pandas.DataFrame(rows).to_parquet(tmp_path / "a.parquet")
    frame = pandas.read_parquet(tmp_path / "a.parquet")  # as an array of floats
    found = read(QuestionColumns(), as_source(frame, "train"))
    assert found == read(QuestionColumns(), str(tmp_path / "a.parquet"))


@pytest.mark.parametrize("value", [b"x", ("a",), {"a"}])
def test_labels_that_are_no_names_are_refused(value: Any) -> None:
    with pytest.raises(BertkitError, match="not one name"):
        read(TextColumns(), as_source([{"text": "a", "label": value}], "train"))


def test_an_array_of_arrays_is_no_set_of_labels() -> None:
    with pytest.raises(BertkitError, match="write a list of names"):
        read(LabelSetColumns(), as_source([{"text": "a", "label": np.eye(2)}], "train"))
    with pytest.raises(BertkitError, match="neither a list nor text"):
        read(WordColumns(), as_source([{"tokens": ["a", "b"], "ner_tags": np.eye(2)}], "train"))


def test_one_name_may_stand_for_a_list_of_names_but_not_the_other_way() -> None:
    assert ChoiceColumns(choices="endings").choices == ("endings",)  # type: ignore[arg-type]
    with pytest.raises(BertkitError, match="not the name of a column"):
        TextColumns(text=["text"])  # type: ignore[arg-type]


def test_labels_in_sets_and_rows_with_tuples() -> None:
    sets = [{"text": "a", "label": {"y", "x"}}, {"text": "b", "label": frozenset({"z"})}]
    found, _ = read(LabelSetColumns(), as_source(sets, "train"))
    assert [one.label for one in found] == [("x", "y"), ("z",)]
    with pytest.raises(BertkitError, match="list of names"):
        read(LabelSetColumns(), as_source([{"text": "a", "label": b"x"}], "train"))
    for task_type in ("token-classification", "question-answering"):
        columns, rows = ROWS[task_type]
        assert read(columns, as_source([as_tuples(row) for row in rows], "train")) == read(
            columns, as_source(rows, "train")
        )


def as_tuples(value: Any) -> Any:
    """Tuples in place of the lists in a row."""
    if isinstance(value, dict):
        return {name: as_tuples(item) for name, item in value.items()}
    return tuple(value) if isinstance(value, list) else value


@pytest.mark.parametrize(
    ("choices", "row"), [(("a", "b"), ("c", "x", "y", 1)), (("a",), ("c", ("x", "y"), 1))]
)
def test_choices_in_tuples(choices: tuple[str, ...], row: tuple[Any, ...]) -> None:
    [found], _ = read(ChoiceColumns(choices=choices), as_source([row], "train"))
    assert (found.text, found.choices, found.label) == ("c", ("x", "y"), 1)


def test_a_tuple_that_is_too_short_is_told_from_a_missing_column() -> None:
    with pytest.raises(BertkitError, match=r"has 2 values for \(text, p, label\), so .* 'label'"):
        read(TextColumns(pair="p"), as_source([("river", "x")] * 2, "train"))


def test_a_series_is_a_list_and_no_table() -> None:
    pandas = pytest.importorskip("pandas")
    with pytest.raises(BertkitError, match="neither a dict nor a tuple"):
        read(TextColumns(), as_source(pandas.Series(["a", "b"]), "train"))


def test_data_sets_that_are_streams() -> None:
    datasets = pytest.importorskip("datasets")
    rows = [{"text": "a", "label": "x"}, {"text": "b", "label": "y"}]
    stream = datasets.IterableDataset.from_generator(lambda: iter(rows))
    assert stream.features is None
    found = read(TextColumns(), as_source(stream, "train"))
    assert found == read(TextColumns(), as_source(rows, "train"))


def test_data_sets_name_their_classes() -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["dry", "wet"])}
    )
    rows = {"text": ["a", "b", "c"], "label": [1, 0, -1]}
    made = datasets.Dataset.from_dict(rows, features=features)
    for kind in (None, "numpy", "torch", "pandas", "arrow"):
        found, _ = read(TextColumns(), as_source(made.with_format(kind), "train"))
        assert [one.gold for one in found if one.gold is not None] == ["wet", "dry"], kind


def test_columns_of_a_data_set_keep_their_values() -> None:
    """A column of JSON holds values, not their text."""
    datasets = pytest.importorskip("datasets")
    made = datasets.Dataset.from_dict({"text": ["a"], "label": ["x"]})
    if hasattr(datasets, "Json"):
        made = made.cast_column("label", datasets.Json())
        made = made.map(lambda row: {"label": "y"})
        assert [one.gold for one in read(TextColumns(), as_source(made, "train"))[0]] == ["y"]


def test_tuples_are_columns_in_order() -> None:
    found, skipped = read(TextColumns(pair="pair"), as_source([("a", "b", "x"), ("c",)], "train"))
    assert [(one.text, one.pair, one.gold) for one in found] == [("a", "b", "x")]
    assert skipped == {"row without column 'pair'": 1}


def test_named_tuples_are_columns_by_name() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"label": ["x", "y"], "text": ["a", "b"]})
    by_row = [row for _, row in frame.iterrows()]
    records = frame.to_records(index=False)
    for rows in (frame.itertuples(), frame.itertuples(index=False), by_row, records):
        assert read(TextColumns(), as_source(rows, "train")) == read(
            TextColumns(), as_source(frame, "train")
        )


def test_named_tuples_of_other_names_are_tuples() -> None:
    class Row(NamedTuple):
        premise: str
        gold: str

    found = read(TextColumns(), as_source([Row("a", "x"), Row("b", "y")], "train"))
    assert found == read(TextColumns(), as_source([("a", "x"), ("b", "y")], "train"))
    tested = TextColumns().read_labelled(
        as_source([Row("a", "x")], "test"), TextCounts(), scoring=True, test=True
    )
    assert [(one.text, one.gold) for one in tested] == [("a", "x")]


def test_dicts_whose_items_are_attributes_are_dicts() -> None:
    class Row(dict[str, str]):
        __getattr__ = dict.get

    found = read(TextColumns(), as_source([Row(text="a", label="x")], "train"))
    assert found == read(TextColumns(), as_source([{"text": "a", "label": "x"}], "train"))


@pytest.mark.parametrize("name", ["squad-2.0", "swag", "conll-2003"])
def test_the_folder_of_an_official_set_is_a_path(name: str) -> None:
    files = bertkit.DataFiles(data="nowhere")  # type: ignore[arg-type]
    with pytest.raises(BertkitError, match="nowhere"):
        read_split(name, "dev", files, None, TextCounts())


@pytest.mark.parametrize("name", ["squad-2.0", "swag", "conll-2003"])
def test_official_sets_are_files(name: str) -> None:
    files = bertkit.DataFiles(dev=[("a", "b")])  # type: ignore[arg-type]
    with pytest.raises(BertkitError, match=f"{name} is read from its official files; data in mem"):
        read_split(name, "dev", files, None, TextCounts())


@pytest.mark.parametrize(
    ("data", "code"), [(3, "record"), ({"text": []}, "record"), (["a text"], "record")]
)
def test_what_is_not_rows(data: Any, code: str) -> None:
    with pytest.raises(BertkitError) as refused:
        read(TextColumns(), as_source(data, "train"))
    assert refused.value.code == code


def test_a_column_that_no_row_has() -> None:
    with pytest.raises(BertkitError, match="train has no column 'label'") as refused:
        read(TextColumns(), as_source([{"text": "a", "target": "x"}], "train"))
    assert refused.value.code == "column"


def test_finetune_from_a_data_frame(pretrained: Path, tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    rows = [{"text": f"river {i}", "label": "wet"} for i in range(8)]
    rows += [{"text": f"stone {i}", "label": "dry"} for i in range(8)]
    frame = pandas.DataFrame(rows)
    settings = FinetuneSettings(grid=Grid(batch_size=(4,), learning_rate=(1e-3,), epochs=(1,)))
    best = bertkit.finetune(
        "classification", pretrained, tmp_path / "run", train=frame, dev=rows, settings=settings
    )
    assert 0 <= best.scores["dev"]["accuracy"] <= 1
    recorded = json.loads((tmp_path / "run" / "finetune.json").read_text())
    assert recorded["files"] == {"train": "16 rows in memory", "dev": "16 rows in memory"}
    files = bertkit.DataFiles(train=rows, dev=frame)
    again = bertkit.finetune(
        "classification", pretrained, tmp_path / "run", files=files, settings=settings
    )
    assert again == best  # the same data: nothing is repeated
    with pytest.raises(BertkitError, match="mrpc is read from --data FOLDER"):
        bertkit.finetune("mrpc", pretrained, tmp_path / "other", train=frame)
