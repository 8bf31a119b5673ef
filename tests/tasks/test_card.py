"""The card of a fine-tuned model: its data, its scores with their spread, and where it is from."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from bertkit.finetuning.grid import all_results, model_problem
from huggingface_hub import ModelCard

from bertkit import FinetuneSettings, Grid, TrainingSettings, finetune
from bertkit.checkpoints.card import CARD
from tests.markdown import blocks, section, table_rows

ROWS = [("river stone", "dry"), ("bridge lantern", "wet"), ("", "wet"), ("stone", "dry")] * 4
COMMIT = "0123456789" * 4
TRAINING = TrainingSettings(max_tokens=512)


def settings(seeds: int = 1) -> FinetuneSettings:
    grid = Grid(batch_size=(8,), learning_rate=(1e-3,), epochs=(1,), seeds=seeds)
    return FinetuneSettings(grid=grid, training=TRAINING, device="cpu", track=())


@pytest.fixture(scope="module")
def tuned(pretrained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A grid of two seeds, on files, from a model in the hub's cache."""
    folder = tmp_path_factory.mktemp("cards")
    start = folder / f"models--org--start/snapshots/{COMMIT}"
    shutil.copytree(pretrained, start)
    (start / CARD).write_text(
        "---\nlicense: cc-by-4.0\nlanguage: [de]\ndatasets: [a/b]\n---\n# S\n"
    )
    for name, rows in (("train", ROWS), ("dev", ROWS[:4]), ("test", ROWS[1:5])):
        lines = [f"{text},{label}" for text, label in rows]
        (folder / f"{name}.csv").write_text("\n".join(["text,label", *lines, ""]))
    files = {name: str(folder / f"{name}.csv") for name in ("train", "dev", "test")}
    finetune("classification", start, folder / "run", settings=settings(2), **files)
    return folder


def test_metadata_and_sections_of_a_grid(tuned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    card = ModelCard.load(tuned / "run" / "model" / CARD)
    data, text = card.data, card.content
    assert (data.base_model, data.license, data.language) == ("org/start", "cc-by-4.0", ["de"])
    assert data.datasets is None, "the data of the start are not those of this model"
    assert data.pipeline_tag == "text-classification"
    written = json.loads((tuned / "run" / "results.json").read_text())
    found = {
        (result.dataset_name, result.metric_name): result.metric_value
        for result in data.eval_results
    }
    for split in ("dev", "test"):
        assert found[f"{split}.csv", "accuracy"] == written["scores"][split]["accuracy"]
    rows = table_rows(section(text, "Scores"))
    [row] = written["settings"]
    spread = row["scores"]["dev"]["accuracy"]
    wanted = [f"{spread[kind]:.1%}" for kind in ("median", "lowest", "highest", "deviation")]
    assert [row["setting"], "2", *wanted] in [found[:6] for found in rows]
    assert COMMIT in section(text, "Initial weights")
    assert "train: 12 inputs" in section(text, "Data")
    assert ["empty 'text'", "6"] in table_rows(section(text, "Data"))
    assert str(tuned) not in text
    monkeypatch.chdir(tuned / "run" / "model")
    exec(blocks(text, "python")[0], {})


def test_every_run_has_a_card_which_is_no_part_of_its_digest(tuned: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(tuned / "run", folder)
    for result in all_results(folder):
        model = folder / "runs" / result.name / "model"
        if not model.is_dir():
            continue
        assert ModelCard.load(model / CARD).data.eval_results
        (model / CARD).write_text("# Mine\n")
        assert model_problem(model, result) == ""


def test_the_same_data_and_settings_give_the_same_card(tuned: Path, tmp_path: Path) -> None:
    start = tuned / f"models--org--start/snapshots/{COMMIT}"
    files = {name: str(tuned / f"{name}.csv") for name in ("train", "dev", "test")}
    finetune("classification", start, tmp_path / "other", settings=settings(1), **files)
    finetune("classification", start, tmp_path / "other", settings=settings(2), **files)
    again = (tmp_path / "other" / "model" / CARD).read_bytes()
    assert again == (tuned / "run" / "model" / CARD).read_bytes()


def test_an_edited_card_outlives_a_larger_grid(pretrained: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    own = {"train": ROWS, "dev": ROWS[:4]}
    finetune("classification", pretrained, out, settings=settings(1), **own)
    card = out / "model" / CARD
    assert "single run" in card.read_text()
    card.write_text("# Mine\n")
    finetune("classification", pretrained, out, settings=settings(1), **own)
    assert card.read_text() == "# Mine\n", "nothing is done again"
    finetune("classification", pretrained, out, settings=settings(2), **own)
    assert card.read_text() == "# Mine\n"
    card.unlink()
    finetune("classification", pretrained, out, settings=settings(2), **own)
    assert "optimistic" in card.read_text()
    data = ModelCard.load(card).data
    assert data.license is None
    assert data.language is None
    assert data.base_model is None
