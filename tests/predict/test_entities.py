"""Entities of files: rows of inputs or of entities, tables of words, and positions in raw text."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas
import pytest
import torch
from starlette.testclient import TestClient

from bertkit import load, serving_app
from bertkit.checkpoints.save import save_model
from bertkit.predict.files import predict_file
from bertkit.tasks.token_classification import TokenClassification
from bertkit.tokenizer.wordpiece import Tokenizer
from tests.conftest import tiny_config

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
        details = {"task": task.task_type, "labels": list(task.labels), "settings": task.settings()}
        save_model(folder / name, task.build(config), tokenizer, {**details, "columns": columns})
    task = TokenClassification(("DET", "NOUN"), max_length=40, entities=False)
    details = {"task": task.task_type, "labels": list(task.labels), "settings": task.settings()}
    save_model(folder / "plain", task.build(config), tokenizer, details)
    return folder


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def test_positions_are_those_of_the_raw_text(taggers: Path, tmp_path: Path, write: Write) -> None:
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
