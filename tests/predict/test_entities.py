"""Entities of files: rows of inputs or of entities, tables of words, and positions in raw text."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import torch
from starlette.testclient import TestClient

from bertkit import load, serving_app
from bertkit.errors import BertkitError
from bertkit.predict.files import predict_file
from bertkit.tasks.token_classification import TokenClassification
from bertkit.tokenizer.wordpiece import Tokenizer
from tests.conftest import run, tiny_config
from tests.networks import save_task

Write = Callable[[str, str], Path]
TEXTS = ["River 🚤  stone's \tgarden, Bergen-Nord.", "", "winter\u00a0letter"]
SAVED = {
    "spans": {"text": "body", "tags": "label"},
    "table": {"words": "word", "tags": "tag", "sentence": "s"},
}


@pytest.fixture(scope="module")
def taggers(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models of random weights whose tags have no marks, with the columns of their data."""
    torch.manual_seed(1)
    folder = tmp_path_factory.mktemp("taggers")
    config = tiny_config(tokenizer, initializer_range=0.2)
    for name, columns in SAVED.items():
        task = TokenClassification(("O", "LOC", "person-actor"), max_length=40)
        save_task(folder / name, task, config, tokenizer, columns=columns)
    task = TokenClassification(("DET", "NOUN"), max_length=40, entities=False)
    save_task(folder / "plain", task, config, tokenizer)
    return folder


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


@pytest.mark.parametrize("ending", ["csv", "jsonl", "parquet"])
def test_positions_are_those_of_the_raw_text(
    ending: str, taggers: Path, tmp_path: Path, write: Write
) -> None:
    model: Any = load(taggers / "spans", precision="fp32")
    file = write("in.jsonl", "".join(json.dumps({"body": text}) + "\n" for text in TEXTS))
    predict_file(model, file, out=tmp_path / "out.jsonl")
    rows = lines(tmp_path / "out.jsonl")
    assert [row["body"] for row in rows] == [TEXTS[0], TEXTS[2]], "the blank text is counted"
    entities = []
    for row in rows:
        assert row["entities"] == [e.to_dict() for e in model(row["body"]).entities]
        for part in (*row["words"], *row["entities"]):
            assert row["body"][part["start"] : part["end"]] == part.get("text", part.get("word"))
        entities += [{"input": row["id"], **entity} for entity in row["entities"]]
    assert entities
    out = tmp_path / f"entities.{ending}"
    run(
        "predict",
        taggers / "spans",
        file,
        "--rows",
        "entities",
        "--out",
        out,
        "--precision",
        "fp32",
    )
    if ending == "csv":
        with out.open(newline="", encoding="utf-8") as stream:
            found: list[Any] = list(csv.DictReader(stream))
        found = [{k: int(v) if v.isdigit() and k != "input" else v for k, v in row.items()}
                 for row in found]  # fmt: skip
    else:
        found = lines(out) if ending == "jsonl" else pyarrow.parquet.read_table(out).to_pylist()
    assert found == entities


def test_a_table_without_entities_has_its_columns(
    taggers: Path, tmp_path: Path, write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    model: Any = load(taggers / "spans", precision="fp32")
    model.model.classifier.bias.data[0] = 1e3  # O
    file = write("in.jsonl", json.dumps({"body": TEXTS[0]}))
    for ending in ("csv", "parquet", "jsonl"):
        predict_file(model, file, out=tmp_path / f"out.{ending}", rows="entities")
    names = ["input", "type", "start", "end", "text", "word_start", "word_end"]
    assert (tmp_path / "out.csv").read_text() == ",".join(names) + "\n"
    assert pyarrow.parquet.read_table(tmp_path / "out.parquet").column_names == names
    assert (tmp_path / "out.jsonl").read_text() == ""
    run("predict", taggers / "spans", "--text", "river stone", "--rows", "entities")
    for line in capsys.readouterr().out.splitlines():
        assert list(json.loads(line)) == names
    plain: Any = load(taggers / "plain", precision="fp32")
    for rows, predictor in (("entities", plain), ("words", model)):
        with pytest.raises(BertkitError):
            predict_file(predictor, file, rows=rows, out=tmp_path / "out.csv")


def test_a_table_of_words_gives_sentences(taggers: Path, tmp_path: Path, write: Write) -> None:
    model: Any = load(taggers / "table", precision="fp32")
    rows = [("1", "river"), ("", "stone"), ("2", "winter")]
    file = write("in.csv", "s,word\n" + "".join(f"{s},{word}\n" for s, word in rows))
    predict_file(model, file, out=tmp_path / "out.jsonl")
    wanted = [result.to_dict() for result in model([["river", "stone"], ["winter"]])]
    found = lines(tmp_path / "out.jsonl")
    assert [(row["id"], row["s"], row["words"], row["entities"]) for row in found] == [
        (str(n), str(n + 1), row["words"], row["entities"]) for n, row in enumerate(wanted)
    ]
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame(rows, columns=["s", "word"]).replace("", None)
    assert [result.to_dict() for result in model(table)] == wanted


def test_objects_over_http(taggers: Path) -> None:
    folders = [str(taggers / name) for name in ("spans", "plain")]
    model: Any = load(folders[0], precision="fp32", device="cpu")
    with TestClient(serving_app(*folders, precision="fp32", device="cpu")) as client:
        for name, field in (("spans", "body"), ("spans", "text"), ("plain", "text")):
            inputs = [{field: TEXTS[0]}, {"words": ["river", "stone"]}]
            answer = client.post(
                "/v1/token-classification", json={"model": name, "inputs": inputs}
            ).json()["predictions"]
            assert [word["word"] for word in answer[1]["words"]] == ["river", "stone"]
            if name == "spans":
                assert answer[0]["entities"] == [e.to_dict() for e in model(TEXTS[0]).entities]
