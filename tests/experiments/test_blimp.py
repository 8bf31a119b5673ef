"""Accuracy on minimal pairs, on made-up ones."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import bertkit
from bertkit.checkpoints.save import save_model
from bertkit.model.heads import PretrainingModel
from experiments.blimp import DEV, evaluate, main, read_pairs
from tests.conftest import tiny_config

ROWS = [
    ("adjunct_island", "syntax", "a b c", "a"),
    ("adjunct_island", "syntax", "a", "a b c"),
    ("principle_a", "syntax/semantics", "a b", "b a"),
    ("agreement", "syntax", "a b c", "b"),
]


@pytest.fixture
def blimp(tmp_path: Path) -> Path:
    """Three sets; one of them is in BLiMP's dev split."""
    folder = tmp_path / "blimp"
    folder.mkdir()
    for name, field, good, bad in ROWS:
        row = {"sentence_good": good, "sentence_bad": bad, "UID": name, "field": field}
        with (folder / f"{name}.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
    return folder


class Lengths:
    """Scores a sentence by its length."""

    def score(self, texts: list[str]) -> list[Any]:
        return [SimpleNamespace(score=float(len(text))) for text in texts]


def test_accuracies_are_means_over_sets(blimp: Path) -> None:
    found = evaluate(Lengths(), read_pairs(blimp))
    assert found["sets"] == {"adjunct_island": 0.5, "agreement": 1.0, "principle_a": 0.5}
    assert found["fields"] == {"syntax": 0.75, "syntax_semantics": 0.5}
    assert found["accuracy"] == pytest.approx(2 / 3)
    assert found["pairs"] == 4


def test_splits(blimp: Path) -> None:
    assert {pair.set for pair in read_pairs(blimp, "dev")} == {"adjunct_island"} <= set(DEV)
    assert {pair.set for pair in read_pairs(blimp, "test")} == {"agreement", "principle_a"}
    with pytest.raises(SystemExit, match="no pairs"):
        read_pairs(blimp / "agreement.jsonl", "dev")


def test_a_model_from_the_command_line(
    blimp: Path, tmp_path: Path, tokenizer: bertkit.Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model, out = PretrainingModel(tiny_config(tokenizer)), tmp_path / "found.json"
    save_model(tmp_path / "model", model, tokenizer, {"task": "pretraining"})
    words = ["blimp", str(tmp_path / "model"), str(blimp), "--out", str(out), "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", words)
    main()
    found = json.loads(out.read_text())
    pairs = read_pairs(blimp)
    scorer = bertkit.load(tmp_path / "model", precision="fp32", device="cpu")
    assert found == evaluate(scorer, pairs)
    assert set(found["sets"].values()) <= {0.0, 0.5, 1.0}
