"""Predictions as files: the columns of the input are kept, whatever the format."""

from __future__ import annotations

import csv
import io
import json
import math
import subprocess
import sys
from datetime import date
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Any

import pandas
import pyarrow
import pytest
from bertkit.datasets.columns import TextColumns
from bertkit.datasets.records import as_source
from bertkit.predict.tables import new_rows
from pyarrow import parquet

from bertkit import load
from bertkit.cli.app import main
from bertkit.errors import BertkitError
from bertkit.files import process_namespace
from bertkit.predict.files import predict_file
from bertkit.text.lines import TextCounts
from tests.conftest import run

ROWS = [
    {"ticket": "7", "text": 'river "stone", bridge', "label": "wet"},
    {"ticket": "8", "text": " ", "label": "dry"},
    {"ticket": "9", "text": "candle", "label": ""},
]
"""The second row has no text, so it is left out."""


def write_input(folder: Path, ending: str) -> Path:
    file = folder / f"given.{ending}"
    table = pandas.DataFrame(ROWS)
    if ending == "parquet":
        table.to_parquet(file)
    elif ending == "jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    elif ending == "tsv":
        file.write_text("\n".join("\t".join(row) for row in [[*ROWS[0]], *map(dict.values, ROWS)]))
    else:
        table.to_csv(file, index=False)
    return file


def read_rows(file: Path) -> list[dict[str, Any]]:
    if file.suffix == ".jsonl":
        return [json.loads(line) for line in file.read_text().splitlines()]
    if file.suffix == ".parquet":
        return pandas.read_parquet(file).to_dict("records")
    text = file.read_text()
    if file.suffix == ".tsv":
        names, *rows = (line.split("\t") for line in text.splitlines())
        return [dict(zip(names, row, strict=True)) for row in rows]
    return list(csv.DictReader(io.StringIO(text)))


@pytest.mark.parametrize("ending", ["csv", "tsv", "jsonl", "parquet"])
@pytest.mark.parametrize("given", ["csv", "tsv", "jsonl", "parquet"])
def test_columns_of_the_input_are_kept(
    models: Path, tmp_path: Path, given: str, ending: str
) -> None:
    predictor = load(models / "classify", device="cpu", precision="fp32")
    out = tmp_path / f"found.{ending}"
    predict_file(predictor, str(write_input(tmp_path, given)), out=out)
    found = read_rows(out)
    assert [str(row["id"]) for row in found] == ["0", "2"]
    wanted = predictor([ROWS[0]["text"], ROWS[2]["text"]])
    for row, before, one in zip(found, (ROWS[0], ROWS[2]), wanted, strict=True):
        assert {name: row[name] for name in before} == before
        assert row["predicted_label"] == one.label
        assert float(row["probability"]) == pytest.approx(one.probability, abs=1e-6)
        shares = row.get("probabilities") or {
            label: row[f"probability_{label}"] for label in one.probabilities
        }
        assert {label: float(share) for label, share in shares.items()} == pytest.approx(
            one.probabilities, abs=1e-6
        )


@pytest.mark.parametrize("ending", ["csv", "jsonl", "parquet"])
def test_no_column_of_the_input_is_overwritten(models: Path, tmp_path: Path, ending: str) -> None:
    """What one model wrote is the input of the next; and columns with the names of both."""
    predictor = load(models / "classify", device="cpu", precision="fp32")
    given = {"text": "river stone", "label": "GOLD", "predicted_label": "HUMAN",
             "probability_wet": 7, "probabilities": {"mine": 1}}  # fmt: skip
    files = [tmp_path / f"{number}.{ending if number else 'jsonl'}" for number in range(4)]
    files[0].write_text(json.dumps({"text": "candle"}) + "\n" + json.dumps(given) + "\n")
    rows = []
    for before, after in pairwise(files):
        predict_file(predictor, str(before), out=after)
        rows.append(read_rows(after))
    for before, after in pairwise(rows):
        assert len(after[1]) > len(before[1])
        for name, value in before[1].items():
            assert str(after[1][name]) == str(value), name
    first = rows[0][1]
    assert (first["label"], first["predicted_label"]) == ("GOLD", "HUMAN")
    assert str(first["probability_wet"]).startswith("7")
    [wanted] = predictor(["river stone"])
    assert first["predicted_predicted_label"] == wanted.label
    if ending != "jsonl":
        share = first["predicted_probability_wet"]
        assert float(share) == pytest.approx(wanted.probabilities["wet"], abs=1e-6)


@pytest.mark.parametrize("text", ["one\rtwo", "\r", "a\r\nb", 'x\n"y", z\r'])
def test_any_line_end_in_a_field_survives_csv(models: Path, tmp_path: Path, text: str) -> None:
    predictor = load(models / "classify", device="cpu", precision="fp32")
    given, out, again = tmp_path / "a.jsonl", tmp_path / "a.csv", tmp_path / "b.jsonl"
    rows = [{"text": "river", "note\rtoo": text}, {"text": "stone", "note\rtoo": "plain"}]
    given.write_text("".join(json.dumps(row) + "\n" for row in rows))
    predict_file(predictor, str(given), out=out)
    with out.open(newline="") as file:
        found = list(csv.DictReader(file))
    assert [row["note\rtoo"] for row in found] == [text, "plain"]
    predict_file(predictor, str(out), out=again)
    assert [row["text"] for row in read_rows(again)] == ["river", "stone"]


@pytest.mark.parametrize("ending", ["csv", "jsonl", "parquet"])
def test_words_and_entities_are_lists(models: Path, tmp_path: Path, ending: str) -> None:
    given = tmp_path / "given.jsonl"
    given.write_text(
        '{"tokens": ["river", "stone"], "page": 3}\n{"tokens": ["night"], "page": 4}\n'
    )
    out = tmp_path / f"found.{ending}"
    predict_file(load(models / "tag", device="cpu", precision="fp32"), str(given), out=out)
    first = read_rows(out)[0]
    tokens, tags = (
        json.loads(first[name]) if ending == "csv" else list(first[name])
        for name in ("tokens", "tags")
    )
    assert tokens == ["river", "stone"]
    assert len(tags) == 2
    assert int(first["page"]) == 3


def test_an_unknown_ending_is_refused_before_the_model_runs(models: Path, tmp_path: Path) -> None:
    predictor = load(models / "classify", device="cpu", precision="fp32")
    with pytest.raises(BertkitError, match=r"found.xlsx: .*\.jsonl, \.csv, \.tsv, \.parquet"):
        predict_file(predictor, "nothing.csv", out=tmp_path / "found.xlsx")


ODD = {
    "half": "a\ud800",
    "bytes": b"caf\xc3\xa9\xff",
    "day": date(2026, 1, 2),
    "nan": math.nan,
    "deep": {"of": [math.inf], "b": b"x", "half": "\udfff"},
}
"""What a file of Parquet or JSON lines can hold in its other columns."""


DEEP: list[Any] = []
for _ in range(10_000):
    DEEP = [DEEP]


def test_columns_of_any_type_are_written(tmp_path: Path) -> None:
    for ending in ("jsonl", "csv", "tsv", "parquet"):
        with new_rows(tmp_path / f"odd.{ending}") as write:
            write([{**ODD, "name\ud800": 1}, {**ODD, "name\ud800": 2}])

    def refuse(name: str) -> None:
        raise AssertionError(name)  # Python writes and reads NaN, which is not JSON

    lines = (tmp_path / "odd.jsonl").read_text(encoding="utf-8").splitlines()
    found = [json.loads(line, parse_constant=refuse) for line in lines]
    deep = {"of": [None], "b": "x", "half": "\udfff"}
    row = {"half": "a\ud800", "bytes": "café\\xff", "day": "2026-01-02", "nan": None, "deep": deep}
    assert found == [{**row, "name\ud800": 1}, {**row, "name\ud800": 2}]
    for ending in ("csv", "tsv"):
        first = read_rows(tmp_path / f"odd.{ending}")[0]
        assert (first["half"], first["bytes"], first["nan"]) == ("a\\ud800", "café\\xff", "")
    first = read_rows(tmp_path / "odd.parquet")[0]
    assert (first["half"], first["bytes"], first["day"]) == (r"a\ud800", ODD["bytes"], ODD["day"])


@pytest.mark.parametrize(
    ("name", "chunks", "message"),
    [
        ("a.csv", [[{"a": DEEP}]], "nested too deeply"),
        ("a.jsonl", [[{"a": DEEP}]], "nested too deeply"),
        ("a.parquet", [[{"a": DEEP}]], "nested too deeply"),
        ("a.parquet", [[{"a": 1 << 63}]], "not of one type"),
        ("a.parquet", [[{"a": 1}], [{"a": 1 << 80}]], "not of one type"),
        ("a.tsv", [[{"a": "x\ty"}]], "a tab or a line break"),
        ("a.csv", [[{"a": 1}], [{"a": 1, "b": 2}]], "the column 'b', which the first rows lack"),
        (
            "a.parquet",
            [[{"a": 1}], [{"a": 1, "b": 2}]],
            "the column 'b', which the first rows lack",
        ),
        ("a.parquet", [[{"a": 1}], [{"a": "x"}]], "not of one type"),
    ],
)
def test_rows_that_do_not_fit_leave_no_file(
    tmp_path: Path, name: str, chunks: list[list[dict[str, Any]]], message: str
) -> None:
    def write_all() -> None:
        with new_rows(tmp_path / name) as write:
            for rows in chunks:
                write(rows)

    with pytest.raises(BertkitError, match=message):
        write_all()
    assert not list(tmp_path.iterdir())


def test_a_column_of_nothing_stays_one_in_parquet(tmp_path: Path) -> None:
    with new_rows(tmp_path / "a.parquet") as write:
        write([{"a": None}])
        write([{"a": "x"}])
    assert parquet.read_table(tmp_path / "a.parquet").to_pylist() == [{"a": None}, {"a": "x"}]


def test_labels_of_a_table_are_those_of_its_csv(tmp_path: Path) -> None:
    with new_rows(tmp_path / "a.csv") as write:
        write([{"text": "river", "label": True}, {"text": "stone", "label": False}])
    found = TextColumns().read(tmp_path / "a.csv", TextCounts())
    rows = as_source([("river", True), ("stone", False)], "train")
    assert [one.gold for one in found] == [
        one.gold for one in TextColumns().read(rows, TextCounts())
    ]


@pytest.mark.parametrize(
    "values",
    [
        [1, 2.5],
        [2.5, 1, None],
        [{"a": 1}, {"a": 2, "b": "x"}, {"a": 0.5}],
        [[], [{"start": 1}], []],
        [None, [], ["x"]],
        [None, 3, 4.5],
    ],
)
def test_values_of_later_chunks_are_written_whole(tmp_path: Path, values: list[Any]) -> None:
    with new_rows(tmp_path / "a.parquet") as write:
        for number, value in enumerate(values):
            write([{"row": number, "value": value}])
    table = parquet.read_table(tmp_path / "a.parquet")
    assert table.column("row").to_pylist() == [*range(len(values))]
    for found, value in zip(table.column("value").to_pylist(), values, strict=True):
        kept = (
            {k: v for k, v in found.items() if v is not None} if isinstance(found, dict) else found
        )
        assert kept == value
    assert [path.name for path in tmp_path.iterdir()] == ["a.parquet"]


EXACT_COLUMNS = {
    "moment": pyarrow.array([1704067200123456789, None], pyarrow.timestamp("ns", tz="UTC")),
    "span": pyarrow.array([123456789, 1], pyarrow.duration("ns")),
    "large": pyarrow.array([2**64 - 1, 0], pyarrow.uint64()),
    "small": pyarrow.array([1.5, 0.1], pyarrow.float32()),
    "price": pyarrow.array([Decimal("1.10"), None], pyarrow.decimal128(9, 2)),
    "nested": pyarrow.array([[1704067200123456789], []], pyarrow.list_(pyarrow.timestamp("ns"))),
    "nothing": pyarrow.array([None, None], pyarrow.int16()),
    "kind": pyarrow.array(["a", "b"]).dictionary_encode(),
}
OUT_OF_RANGE = {
    "clock": (pyarrow.array([123456789, 0], pyarrow.time64("ns")), "00:00:00.123456789"),
    "day": (pyarrow.array([10**7, 0], pyarrow.date32()), "29349-01-26"),
}
"""Columns with values that Python cannot represent, and the first of them as text."""


def test_parquet_columns_keep_their_types_and_digits(models: Path, tmp_path: Path) -> None:
    predictor = load(models / "classify", device="cpu", precision="fp32")
    odd = {name: column for name, (column, _) in OUT_OF_RANGE.items()}
    columns = {"text": ["river", "stone"], **EXACT_COLUMNS, **odd}
    parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
    for out in ("b.parquet", "b.csv"):
        predict_file(predictor, str(tmp_path / "a.parquet"), out=tmp_path / out)
    found = parquet.read_table(tmp_path / "b.parquet")
    for name, column in EXACT_COLUMNS.items():
        assert found.schema.field(name).type == column.type, name
        assert found.column(name).combine_chunks() == column, name
    as_text = read_rows(tmp_path / "b.csv")[0]
    assert as_text["moment"].startswith("2024-01-01 00:00:00.123456789")
    for name, (_, text) in OUT_OF_RANGE.items():
        assert found.column(name)[0].as_py() == as_text[name] == text


def predicted(*arguments: str | Path) -> int:
    with pytest.raises(SystemExit) as end:
        main(["predict", *map(str, arguments), "--device", "cpu", "--precision", "fp32"])
    return int(end.value.code or 0)


def test_texts_are_predicted_at_once(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A text, a question with its context, a text with its choices; and lines from a pipe."""
    assert predicted(models / "classify", "river stone") == 0
    assert json.loads(capsys.readouterr().out)["text"] == "river stone"
    assert predicted(models / "answer", "what runs", "the river runs") == 0
    assert "null_odds" in json.loads(capsys.readouterr().out)
    assert predicted(models / "choose", "river", "stone", "night", "candle") == 0
    assert len(json.loads(capsys.readouterr().out)["probabilities"]) == 3
    assert predicted(models / "tag", "river stone") == 0
    assert json.loads(capsys.readouterr().out)["words"] == ["river", "stone"]


LINES = '{"text": "river"}\n{"text": "stone"}\n'


@pytest.mark.parametrize("text", ["river\n\nstone\n", LINES, f"\ufeff{LINES}"])
def test_the_standard_input_is_a_file(
    models: Path, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    assert predicted(models / "classify", "-") == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["text"] for row in found] == ["river", "stone"]


def test_a_copy_of_the_standard_input_is_removed_by_the_next_command(
    models: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A killed command cannot remove its own."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    left = tmp_path / f".bertkit-stdin.tmp-{process_namespace()}-{ended.pid}-0"
    left.mkdir()
    (left / "stdin.txt").write_text("river\n")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"stone\n")))
    assert predicted(models / "classify", "-") == 0
    assert list(tmp_path.iterdir()) == []


def test_an_array_of_rows_on_the_standard_input_is_not_one_text(
    models: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = io.BytesIO(b'[\n {"text": "river"},\n {"text": "stone"}]\n')
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(given))
    assert predicted(models / "classify", "-") == 2
    said = capsys.readouterr()
    assert "JSON array" in said.err
    assert "the standard input" in said.err  # and not the copy, which is gone
    assert "bertkit-stdin" not in said.err
    assert not said.out


def test_the_json_of_squad_on_the_standard_input(
    models: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    question = {"id": "q", "question": "what runs", "answers": []}
    paragraph = {"context": "the river runs", "qas": [question]}
    given = {"version": "1.1", "data": [{"title": "", "paragraphs": [paragraph]}]}
    text = io.BytesIO(json.dumps(given, indent=1).encode())
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(text))
    assert predicted(models / "answer", "-") == 0
    assert json.loads(capsys.readouterr().out)["id"] == "q"


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ([], "there is nothing to predict"),
        (["river", "--separator", ";"], "--separator is for files"),
        (["missing.csv"], "missing.csv"),
        (["folder/missing"], "folder/missing"),
        (["river", "missing.csv"], "missing.csv names a file, and there are 2 inputs"),
        (["river", "stone", "night"], "3 texts"),
    ],
)
def test_arguments_that_are_no_input_are_refused(
    models: Path, inputs: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert predicted(models / "classify", *inputs) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert not said.out


def test_only_predict_reads_the_standard_input(
    models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Elsewhere a lone hyphen stays an error instead of becoming the text "/dev/stdin"."""
    model = str(models / "classify")
    for words in (["predict", "next-sentence", model, "-", "a"], ["explain", model, "-"]):
        run(*words, status=2)
        said = capsys.readouterr()
        assert "-" in said.err
        assert "/dev/stdin" not in said.err + said.out


def test_a_predictor_takes_a_column_of_a_data_frame(models: Path) -> None:
    predictor = load(models / "classify", device="cpu", precision="fp32")
    frame = pandas.DataFrame({"text": ["river stone", "candle"]}, index=[7, 7])
    assert predictor(frame["text"]) == predictor(["river stone", "candle"])
