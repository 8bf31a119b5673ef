"""Names of files that are no UTF-8: Linux allows any bytes but "/" and NUL."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from bertkit.corpus.store import TokenStore
from bertkit.text.lines import describe_skipped
from tests.conftest import run

NAME = os.fsdecode(b"caf\xe9")


@pytest.fixture
def folder(tmp_path: Path, corpus_text: str) -> Path:
    """A folder of text, two files of which are only counted."""
    try:
        folder = tmp_path / NAME
        folder.mkdir()
    except OSError:
        pytest.skip("this file system takes names in UTF-8 only")
    (folder / f"{NAME}.txt").write_text(corpus_text)
    (folder / f"{NAME}.bin").write_bytes(b"x")
    (folder / f"empty{NAME}.txt").write_bytes(b"")
    return folder


def test_every_verb_of_text_takes_any_name(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tokenizer, store = tmp_path / f"tokenizer-{NAME}", tmp_path / f"store-{NAME}"
    run("learn", folder, "--out", tokenizer, "--size", "150", "--processes", "1")
    made = json.loads((tokenizer / "vocabulary.json").read_text(encoding="utf-8"))
    assert made["sources"][0]["paths"] == [str(folder)]

    prepare = ["prepare", folder, "--tokenizer", tokenizer, "--out", store, "--processes", "1"]
    run(*prepare)
    content = (store / "manifest.json").read_bytes()
    assert {source["path"] for source in json.loads(content)["sources"]} == {
        str(path) for path in folder.iterdir()
    }
    run(*prepare)  # the settings that were written are those of the same files
    assert (store / "manifest.json").read_bytes() == content
    assert TokenStore(store).documents > 10

    sizes = [f"--model.{name}" for name in ("hidden_size", "num_hidden_layers")]
    steps = ["--phases.lengths", "32", "--phases.steps", "2", "--phases.batch_sizes", "2"]
    trained = tmp_path / f"run-{NAME}"
    run(
        *("pretrain", "two-cores", "--store", store, "--out", trained, sizes[0], "32"),
        *(sizes[1], "1", "--model.num_attention_heads", "2", *steps),
        *("--phases.max_predictions", "5", "--training.warmup_steps", "0"),
    )
    assert (trained / "model" / "model.safetensors").is_file()
    assert r"caf\udce9" in (trained / "model" / "README.md").read_text(encoding="utf-8")
    run("report", trained)

    rows = "".join(f'{{"text": "river {n}", "label": "{n % 2}"}}\n' for n in range(8))
    (folder / "rows.jsonl").write_text(rows)
    data = ["--train", folder / "rows.jsonl", "--dev", folder / "rows.jsonl"]
    tuned = tmp_path / f"tuned-{NAME}"
    run("finetune", "classification", *data, "--model", trained, "--out", tuned, "--epochs", "1")
    run("report", tuned)
    assert (tuned / "report.html").is_file()
    vectors = tmp_path / "e.npy"
    run("predict", "embed", trained, folder / "rows.jsonl", "--out", vectors)
    refused = ["features", trained, folder / "rows.jsonl", "--out", folder / "f.parquet"]
    run(*refused, status=2)

    run("clean", folder, "--out", tmp_path / f"{NAME}.jsonl", "--json", tmp_path / "clean.json")
    assert (tmp_path / f"{NAME}.jsonl").is_file()
    run("vocab", "measure", tokenizer, folder, "--json", tmp_path / "measured.json")
    measured = json.loads((tmp_path / "measured.json").read_text(encoding="utf-8"))
    assert measured["paths"] == [str(folder)]
    assert "(first: " + str(tmp_path) + r"/caf\udce9/emptycaf\udce9.txt)" in capfd.readouterr().err


def test_names_in_counts_are_one_line_that_can_be_printed() -> None:
    [line] = describe_skipped({"empty file": 1}, {"empty file": f"a\nb{NAME}"})
    assert line == r"counted: empty file: 1 (first: a\nbcaf\udce9)"
