"""SWAG's csv files."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pandas
import pytest

from bertkit.cli.options import ColumnFlags
from bertkit.cli.predict import predict_command
from bertkit.errors import BertkitError
from bertkit.predict.evaluate import evaluate
from bertkit.tasks.multiple_choice import ChoiceExample
from bertkit.tasks.official import read_swag, write_swag_predictions
from bertkit.text.lines import TextCounts
from tests.conftest import run

HEADER = ",video-id,fold-ind,startphrase,sent1,sent2,gold-source,ending0,ending1,ending2,ending3"
ROW = 'v-1,7,He sits. He,He sits.,He,gold,"stands, then runs",b,c,d'


def test_the_official_sample(data: Path) -> None:
    counts = TextCounts()
    inputs = read_swag(data / "swag" / "sample.csv", counts)
    assert [given.id for given in inputs] == [str(number) for number in range(11)]
    assert not counts.skipped
    for given in inputs:
        assert len(given.choices) == 4
        assert given.label in range(4)
    assert inputs[0].text == "Students lower their eyes nervously."
    assert inputs[0].choices[2] == "She walks slowly towards someone."
    assert inputs[0].label == 2


def test_a_file_with_and_without_labels(tmp_path: Path) -> None:
    path = tmp_path / "val.csv"
    path.write_text(f"{HEADER},label\n0,{ROW},3\n1,{ROW},0\n")
    counts = TextCounts()
    inputs = read_swag(path, counts)
    expected = ("He stands, then runs", "He b", "He c", "He d")
    assert inputs[0] == ChoiceExample("0", "He sits.", expected, 3, f"{path}:2")
    assert not counts.skipped
    assert [given.label for given in read_swag(path, counts, labelled=True)] == [3, 0]
    assert [given.label for given in read_swag(path, counts, labelled=False)] == [None, None]
    path.write_text(f"{HEADER}\n0,{ROW}\n1,{ROW.replace('He sits.,He,', ',,')}\n")
    counts = TextCounts()
    assert [given.label for given in read_swag(path, counts)] == [None, None]
    assert counts.skipped == {"empty text, kept": 1}
    assert len(read_swag(path, counts, labelled=False)) == 2
    with pytest.raises(BertkitError, match=r"val\.csv has no column 'label', like test\.csv"):
        read_swag(path, counts, labelled=True)


def test_an_ending_that_is_null_is_empty(tmp_path: Path) -> None:
    row = {"sent1": "He sits.", "sent2": "He", "ending0": "a", "ending1": None}
    path = tmp_path / "val.jsonl"
    path.write_text(json.dumps({**row, "ending2": "c", "ending3": "d"}))
    counts = TextCounts()
    assert read_swag(path, counts)[0].choices == ("He a", "He", "He c", "He d")
    assert counts.skipped == {"empty text, kept": 1}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"{HEADER}\n0,{ROW}\n1,{ROW}\n2,x\n", r"t\.csv:4: row with fewer fields .*every row"),
        (f"{HEADER},label\n0,{ROW},1\n1,x\n2,{ROW},0\n", r"t\.csv:3: row with fewer.*get the file"),
        (f"{HEADER},label\n0,{ROW},4\n", r"t\.csv:2: the label is '4', not 0, 1, 2 or 3"),
        ("text,label\na,b\n", r"t\.csv has no column 'sent1' \(columns: text, label\)"),
        (f"{HEADER},label\n", r"t\.csv has no rows; get it again from https://github"),
    ],
)
def test_bad_files(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(text)
    with pytest.raises(BertkitError, match=message):
        read_swag(path, TextCounts())


def test_an_absent_file(tmp_path: Path) -> None:
    with pytest.raises(BertkitError, match=r"val\.csv does not exist; check the path"):
        read_swag(tmp_path / "val.csv", TextCounts())


def test_predictions(tmp_path: Path) -> None:
    path = tmp_path / "predictions.csv"
    write_swag_predictions(path, ["0", "1", "2"], [3, 0, 1])
    assert path.read_text() == "pred\n3\n0\n1\n"
    for ids, chosen, message in (
        (["0", "2"], [1, 1], "row 1 of the predictions has the ID '2'"),
        (["0"], [4], "prediction for row 0 is 4"),
        (["0"], [1, 2], "2 predictions for 1 rows"),
    ):
        with pytest.raises(BertkitError, match=message):
            write_swag_predictions(path, ids, chosen)
    assert path.read_text() == "pred\n3\n0\n1\n"


def test_a_model_of_swag_reads_swags_rows_alike_everywhere(
    pretrained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The start of each ending, `sent2`, is read wherever the file has it."""
    row = "v,7,x,A river.,The stone,gold,stands,runs,sings,is"
    for name in ("train", "val"):
        text = f"{HEADER},label\n0,{row},3\n1,{row.replace('stone', 'bridge')},0\n"
        (tmp_path / f"{name}.csv").write_text(text)
    model, val, out = tmp_path / "run", tmp_path / "val.csv", tmp_path / "found.jsonl"
    for command in (
        ["finetune", "swag", "--data", tmp_path, "--model", pretrained, "--out", model,
         "--epochs", "1"],
        ["evaluate", model, "--data", tmp_path, "--out", tmp_path / "s"],
        ["predict", model, val, "--out", out],
    ):  # fmt: skip
        run(*command)
    found, scored = (
        [json.loads(line) for line in path.read_text().splitlines()]
        for path in (out, tmp_path / "s/dev.jsonl")
    )
    assert [{name: row[name] for name in one} for row, one in zip(found, scored, strict=True)] == (
        scored
    )
    assert (found[0]["text"].startswith("The stone "), found[0]["sent2"]) == (True, "The stone")
    rows = tmp_path / "val.jsonl"
    with val.open() as lines:
        rows.write_text("".join(json.dumps(line) + "\n" for line in csv.DictReader(lines)))
    pandas.read_json(rows, lines=True, dtype=str).to_parquet(tmp_path / "val.parquet")
    for file in (rows, tmp_path / "val.parquet"):
        assert evaluate(model, file).scores == evaluate(model, val).scores
    columns = ColumnFlags(text="sent1", choices=("ending0", "ending1"))
    with pytest.raises(BertkitError, match="model knows; leave out --choices and --text"):
        predict_command(model, str(val), out=out, columns=columns)
    assert evaluate(model, val).scores == json.loads((tmp_path / "s/dev-scores.json").read_text())
    own = tmp_path / "own.csv"
    own.write_text("a,b,c\nriver,stone,bridge\n")
    predict_command(model, str(own), out=out, columns=ColumnFlags(text="a", choices=("b", "c")))
    assert json.loads(out.read_text())["text"] in {"stone", "bridge"}
