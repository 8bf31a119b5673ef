"""Predictions for files: each format in and out gives what Python gives."""

from __future__ import annotations

import csv
import gc
import itertools
import json
import pickle
import weakref
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
from bertkit.tasks.columns import read_rows
from bertkit.text.documents import TextCounts
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
    first = int(ending == "txt")  # lines have the numbers of an editor
    assert [row["id"] for row in rows] == [str(first + n) for n in range(len(TEXTS))]
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
    rows = flat_rows(out)
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


def flat_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a flat file, as its usual reader sees them."""
    if path.suffix == ".parquet":
        return list(pyarrow.parquet.read_table(path).to_pylist())
    with path.open(newline="", encoding="utf-8") as stream:
        if path.suffix == ".tsv":
            return list(csv.DictReader(stream, delimiter="\t", quoting=csv.QUOTE_NONE))
        return list(csv.DictReader(stream))


@pytest.mark.parametrize("ending", ["csv", "tsv", "parquet"])
def test_columns_and_types_that_come_late_are_kept(
    ending: str, classify: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long file whose last rows differ is not predicted in vain."""
    monkeypatch.setattr("bertkit.predict.load.CHUNK_INPUTS", 2)
    late = {"label": "wet", "input_label": "dry", "n": "three", "about": {"of": [1]}, "none": {}}
    rows = [*({"text": "river", "n": n, "share": 2**60 + 1} for n in range(4))]
    rows += [{"text": "stone", "share": 0.5}, {"text": "candle", "share": None, **late}]
    file, out = tmp_path / "in.jsonl", tmp_path / f"out.{ending}"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    predict_file(classify, file, out=out)
    first, *_, last = flat_rows(out)
    assert len(flat_rows(out)) == len(rows)
    assert [first["text"], first["n"], first["share"]] == ["river", "0", str(2**60 + 1)]
    assert not first["input_label"]
    assert [last["input_label"], last["input_input_label"], last["n"]] == ["wet", "dry", "three"]
    assert json.loads(str(last["about"]).replace("'", '"')) == {"of": [1]}
    assert {first["label"], last["label"]} <= {"dry", "damp", "wet"}


BROKEN = ['a\ttab, a "quote"\nand\r\nlines', "a lone\rreturn", '"quoted" text', "plain"]


@pytest.mark.parametrize("ending", ["csv", "tsv", "parquet"])
def test_texts_with_tabs_and_line_breaks_are_read_again(
    ending: str, classify: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pandas = pytest.importorskip("pandas")
    file, out = tmp_path / "in.jsonl", tmp_path / f"out.{ending}"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in BROKEN))
    predict_file(classify, file, out=out)
    escapes = str.maketrans({"\t": "\\t", "\n": "\\n", "\r": "\\r"} if ending == "tsv" else {})
    texts = [text.translate(escapes) for text in BROKEN]
    assert ("backslash (.csv keeps them): 2" in capsys.readouterr().err) == (ending == "tsv")
    assert [row["text"] for _, _, row in read_rows(out, TextCounts(), whole=True)] == texts
    if ending != "parquet":
        options: Any = {"sep": "\t", "quoting": csv.QUOTE_NONE} if ending == "tsv" else {}
        assert pandas.read_csv(out, **options)["text"].tolist() == texts
    predict_file(classify, out, out=tmp_path / "again.csv")
    assert [row["text"] for row in flat_rows(tmp_path / "again.csv")] == texts


@pytest.mark.slow
def test_progress_is_shown_by_time(
    models: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Also within one chunk, and for all that is predicted for files."""
    seconds = itertools.count(step=6.0)
    monkeypatch.setattr("bertkit.progress.monotonic", lambda: next(seconds))
    monkeypatch.setattr("bertkit.tasks.sequences.CPU_TOKENS", 64)
    file = tmp_path / "in.txt"
    file.write_text("the river and the stone\n" * 100)
    run("predict", models / "classify", file, "--out", tmp_path / "out.jsonl")
    run("predict", "embed", models / "classify", file, "--out", tmp_path / "out.npy")
    run("predict", "features", models / "classify", file, "--out", tmp_path / "out.parquet")
    told = capsys.readouterr().err.splitlines()
    for title, unit in (("predicting", "inputs"), ("embedding", "texts"), ("features", "texts")):
        shown = [line.split()[1] for line in told if line.startswith(f"{title}: ")]
        assert 3 <= len(shown) <= 12, told
        assert sorted(shown, key=int) == shown
        assert shown[-1] == "100"
        assert f" {unit}" in "".join(told)


def test_a_folder_is_not_taken_for_a_file(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A word may be the name of a folder that happens to be there."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/rows.csv").write_text("text\nriver\n")
    run("predict", models / "classify", tmp_path / "tests", status=2)
    assert "--text" in capsys.readouterr().err
    run("predict", models / "classify", f"{tmp_path}/tests/*.csv")
    assert json.loads(capsys.readouterr().out)["text"] == "river"


@pytest.mark.slow
def test_no_text_outlives_its_answer(models: Path) -> None:
    """The process holds the texts of clients, which may be secret and large, no longer."""

    class Text(str):
        __slots__ = ("__weakref__",)

    for name, first in (("answer", "Where?"), ("classify", "The river."), ("tag", "Anna lives.")):
        predictor: Any = load(models / name, precision="fp32")
        texts = [Text(first), *([Text("by the river")] if name == "answer" else [])]
        predictor(*texts)
        known = [weakref.ref(text) for text in texts]
        del texts
        gc.collect()
        assert [ref() for ref in known] == [None] * len(known), name


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
    assert [row["token"] for row in rows if row["text"] == 3] == ["[CLS]", "[SEP]"]
    assert len(rows[0]["vector"]) == 32
    with pytest.raises(BertkitError, match="parquet"):
        extract_file(models / "classify", file, tmp_path / "t.npy")


def test_the_id_of_a_line_is_its_number(
    models: Path, tmp_path: Path, write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = write("s.txt", "good\n\nbad\n\nx\ry\n"), tmp_path / "out.jsonl"
    run("predict", models / "classify", file, "--out", out)
    assert [(row["id"], row["text"]) for row in lines(out)] == (
        [("1", "good"), ("3", "bad"), ("5", "x"), ("6", "y")]
    )
    assert f"CR, unlike others of its file, kept: 1 (first: {file}:5)" in capsys.readouterr().err
