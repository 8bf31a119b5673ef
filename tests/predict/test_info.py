"""`bertkit info`: what the files of a model say."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from bertkit.checkpoints.pretrained import read_pretrained
from bertkit.explain.steps import recorded_masking
from bertkit.predict.load import model_info
from bertkit.pretraining_data.masking import MaskingOptions
from tests.conftest import run


def test_a_tuned_model_names_its_task_and_labels(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "facts.json"
    run("info", models / "classify", "--json", file)
    facts = json.loads(file.read_text())
    assert facts == json.loads(json.dumps(model_info(models / "classify")))
    saved = json.loads((models / "classify" / "bertkit.json").read_text())
    assert (facts["task"], facts["labels"]) == (saved["task"], saved["labels"])
    assert facts["network"]["layers"] == 2
    tensors = read_pretrained(models / "classify").tensors.values()
    assert facts["parameters"] == sum(tensor.numel() for tensor in tensors)
    printed = capsys.readouterr().out
    assert all(label in printed for label in saved["labels"])


def test_other_models_are_known(minilm: Path, tmp_path: Path) -> None:
    facts = model_info(minilm)
    assert (facts["network"]["hidden_size"], facts["vocabulary"]["tokens"]) == (384, 30522)
    assert facts["task"] == ("embedding" if (minilm / "modules.json").is_file() else "encoder")
    run("info", tmp_path / "nothing", status=2)


@pytest.mark.parametrize("recipe", ["base", {"objectives": "nsp"}, [1], None])
def test_records_of_others_are_not_believed(models: Path, tmp_path: Path, recipe: object) -> None:
    folder = tmp_path / "model"
    shutil.copytree(models / "classify", folder)
    details = json.loads((folder / "bertkit.json").read_text())
    (folder / "bertkit.json").write_text(json.dumps({**details, "recipe": recipe}))
    assert model_info(folder)["objectives"] == {}
    start = read_pretrained(folder)
    assert start.pair in {"nsp", "sop"}
    assert recorded_masking(start.details) == MaskingOptions()
