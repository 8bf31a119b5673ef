"""Predictions for files: each format in and out gives what Python gives."""

from __future__ import annotations

import csv
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest

from bertkit import load
from bertkit.errors import BertkitError, InputTypeError
from bertkit.predict.embeddings import load_embedder
from bertkit.predict.features import Extraction, embed_file, extract_file
from bertkit.predict.files import predict_file
from tests.conftest import run

Write = Callable[[str, str], Path]
TEXTS = ["river stone", 'meadow, "walking"', "the\u2028forest", "candle"]


@pytest.fixture(scope="module")
def classify(models: Path) -> Any:
    return load(models / "classify", precision="fp32")


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


@pytest.mark.parametrize("ending", ["csv", "jsonl", "parquet", "txt"])
def test_each_format_gives_what_python_gives(
    ending: str, classify: Any, tmp_path: Path, write: Write
) -> None:
    file, out = tmp_path / f"in.{ending}", tmp_path / "out.jsonl"
    if ending == "csv":
        with file.open("w", newline="") as stream:
            csv.writer(stream).writerows([["n", "text"], *enumerate(TEXTS)])
    elif ending == "jsonl":
        file.write_text(
            "".join(json.dumps({"n": i, "text": t}) + "\n" for i, t in enumerate(TEXTS))
        )
    elif ending == "parquet":
        table = pyarrow.table({"n": range(len(TEXTS)), "text": TEXTS})
        pyarrow.parquet.write_table(table, file)
    else:
        file.write_text("\n".join(TEXTS) + "\n", encoding="utf-8")
    predict_file(classify, file, out=out)
    rows = lines(out)
    assert [row["text"] for row in rows] == TEXTS
    assert ("n" in rows[0]) == (ending != "txt")
    for row, result in zip(rows, classify(TEXTS), strict=True):
        assert row["label"] == result.label
        assert row["probabilities"] == pytest.approx(result.probabilities)


@pytest.mark.parametrize("ending", ["csv", "tsv", "parquet"])
def test_flat_files_have_a_column_for_each_label(
    ending: str, classify: Any, tmp_path: Path, write: Write
) -> None:
    file = write("in.jsonl", "".join(json.dumps({"text": t, "label": "x"}) + "\n" for t in TEXTS))
    out = tmp_path / f"out.{ending}"
    predict_file(classify, file, out=out)
    if ending == "parquet":
        rows = pyarrow.parquet.read_table(out).to_pylist()
    else:
        with out.open(newline="", encoding="utf-8") as stream:
            rows = list(csv.DictReader(stream, delimiter="," if ending == "csv" else "\t"))
    assert [row["text"] for row in rows] == TEXTS
    assert {row["input_label"] for row in rows} == {"x"}, "a column that the result has, too"
    for row, result in zip(rows, classify(TEXTS), strict=True):
        assert row["label"] == result.label
        shares = [float(row[f"probability_{label}"]) for label in result.probabilities]
        assert shares == pytest.approx(list(result.probabilities.values()))


@pytest.mark.parametrize("model", ["classify", "multi-label"])
def test_the_most_probable_labels_alone(
    model: str, models: Path, tmp_path: Path, write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    some: Any = load(models / model, precision="fp32", top=1)
    every: Any = load(models / model, precision="fp32")
    text = TEXTS[0]
    [(label, share)] = some(text).probabilities.items()
    assert share == max(every(text).probabilities.values())
    assert pickle.loads(pickle.dumps(some))(text).to_dict() == some(text).to_dict()
    file, out = write("in.csv", f"text\n{text}\n"), tmp_path / "out.csv"
    run("predict", models / model, file, "--top", "1", "--out", out, "--precision", "fp32")
    with out.open(newline="") as stream:
        [row] = csv.DictReader(stream)
    assert (row["label_1"], float(row["probability_1"])) == (label, pytest.approx(share))
    run("predict", models / model, file, "--top", "1", "--precision", "fp32")
    assert list(json.loads(capsys.readouterr().out)["probabilities"]) == [label]
    for other in ("regress", "tag"):
        with pytest.raises(BertkitError, match="top"):
            load(models / other, top=2)


def test_inputs_in_memory(models: Path) -> None:
    pandas = pytest.importorskip("pandas")
    answer: Any = load(models / "answer", precision="fp32")
    pairs = [("Where?", "the river by the stone"), ("What?", "a garden")]
    dicts = [{"question": q, "context": c} for q, c in pairs]
    expected = [answer(*pair).to_dict() for pair in pairs]
    for inputs in (pairs, dicts, pandas.DataFrame(dicts)):
        assert [r.to_dict() for r in answer(inputs)] == [pytest.approx(e) for e in expected]
    assert set(expected[0]) == {
        "answer", "start", "end", "probability", "no_answer_probability", "null_odds"
    }  # fmt: skip
    tag: Any = load(models / "tag", precision="fp32")
    assert [word.word for word in tag("Anna lives here.").words] == ["Anna", "lives", "here", "."]
    assert tag([["Anna", "lives"]])[0].tags == tag("Anna lives").tags
    choose: Any = load(models / "choose", precision="fp32")
    result = choose("the", ["river", "stone", "garden"])
    assert result.text == ["river", "stone", "garden"][result.choice]
    assert sum(result.probabilities) == pytest.approx(1.0)


def test_a_long_text_is_the_mean_of_its_windows(models: Path) -> None:
    regress: Any = load(models / "regress", precision="fp32")
    text = " ".join(["river stone garden"] * 60)
    assert regress(text).value == pytest.approx(regress([text])[0].value)
    assert regress.items([*regress.examples([text])]).windowed == 1


def test_a_model_pickles_by_its_directory(classify: Any) -> None:
    again = pickle.loads(pickle.dumps(classify))
    assert again(TEXTS[0]).to_dict() == classify(TEXTS[0]).to_dict()


def test_the_command_line(
    models: Path, tmp_path: Path, write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    run("predict", models / "classify", "--text", "river", "--precision", "fp32")
    assert set(json.loads(capsys.readouterr().out)) == {"label", "probability", "probabilities"}
    file = write("in.csv", "title,other\nriver,1\nstone,2\n")
    out = tmp_path / "out.csv"
    run("predict", models / "classify", file, "--text", "river", status=2)
    run("predict", models / "classify", file, "--out", out, status=2)
    assert "no column 'text'" in capsys.readouterr().err
    run("predict", models / "classify", file, "--out", tmp_path / "out.doc", status=2)


@pytest.mark.parametrize(
    "wrong", [7, [7], [None], {"text": "x"}, [{"texts": "x"}], [("a", "b", "c")]]
)
def test_wrong_inputs_are_refused(wrong: Any, classify: Any) -> None:
    with pytest.raises((InputTypeError, BertkitError)):
        classify(wrong)


def test_files_of_vectors(models: Path, tmp_path: Path, write: Write) -> None:
    file = write("texts.txt", "\n".join(TEXTS[:2]) + "\n\ncandle\n")
    embed_file(models / "classify", file, tmp_path / "v.npy", precision="fp32")
    vectors = np.load(tmp_path / "v.npy")
    expected = load_embedder(models / "classify", precision="fp32").encode(
        [*TEXTS[:2], "", "candle"]
    )
    assert vectors == pytest.approx(expected, abs=1e-6)
    extract_file(models / "classify", file, tmp_path / "t.parquet", Extraction(layers="sum"))
    rows = pyarrow.parquet.read_table(tmp_path / "t.parquet").to_pylist()
    assert [row["token"] for row in rows if row["text"] == 2] == ["[CLS]", "[SEP]"]
    assert len(rows[0]["vector"]) == 32
    extract_file(models / "classify", file, tmp_path / "m.npy", Extraction(pooling="mean"))
    last = extract_rows(rows_of=models / "classify", file=file, out=tmp_path / "l.parquet")
    assert np.load(tmp_path / "m.npy")[0] == pytest.approx(last.mean(axis=0), abs=1e-5)
    with pytest.raises(BertkitError, match="parquet"):
        extract_file(models / "classify", file, tmp_path / "t.npy")


def extract_rows(rows_of: Path, file: Path, out: Path) -> np.ndarray:
    """The states of the tokens of the first text."""
    extract_file(rows_of, file, out)
    rows = pyarrow.parquet.read_table(out).to_pylist()
    return np.array([row["vector"] for row in rows if row["text"] == 0])
