"""Model cards: what the hub reads of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from bertkit.checkpoints.publish import CARD, new_card, published_files
from bertkit.checkpoints.save import save_model
from bertkit.files import read_json
from bertkit.model.encoder import Encoder
from bertkit.model.heads import PretrainingModel
from bertkit.model.outputs import ClassificationModel, SpanModel
from bertkit.tokenizer.wordpiece import Tokenizer
from tests.conftest import tiny_config

TASKS: dict[str, Any] = {
    "classification": lambda config: ClassificationModel(config, 2),
    "question-answering": SpanModel,
    "pretraining": PretrainingModel,
    "features": Encoder,
}
CLASSES = {
    "classification": "BertForSequenceClassification",
    "question-answering": "BertForQuestionAnswering",
    "pretraining": "BertForPreTraining",
    "features": "BertModel",
}


def model_of(folder: Path, tokenizer: Tokenizer, task: str, **details: Any) -> Path:
    save_model(folder, TASKS[task](tiny_config(tokenizer)), tokenizer, {"task": task, **details})
    return folder


@pytest.mark.parametrize("task", TASKS)
def test_a_card_is_what_the_hub_reads(task: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    labels = {"labels": ["dry", "a|b"]} if task == "classification" else {}
    folder = model_of(
        *(tmp_path / "model", tokenizer, task),
        scores={"dev": {"accuracy": 0.9}},
        data="org/set",
        start="org/base@" + "0123456789" * 4,
        **labels,
    )
    card = ModelCard(new_card(folder, "org/mine"))
    assert card.data.base_model == "org/base"
    assert card.data.library_name == "transformers"
    assert "| dev.accuracy | 0.9 |" in card.text
    assert 'load("org/mine")' in card.text
    assert not (folder / CARD).exists()
    assert read_json(folder / "config.json")["architectures"] == [CLASSES[task]]


def test_values_cannot_break_the_metadata(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Names of files and labels are the user's."""
    odd = 'a: "b"\n---\n# x {} é 😀 \x85'
    folder = model_of(
        tmp_path / "m", tokenizer, "classification", labels=[odd, "b"], data=odd,
        scores={odd: {odd: 0.5}},
    )  # fmt: skip
    card = ModelCard(new_card(folder, "org/mine"))
    assert card.data.library_name == "transformers"


def test_the_card_of_a_user_is_uploaded(tokenizer: Tokenizer, tmp_path: Path) -> None:
    folder = model_of(tmp_path / "model", tokenizer, "classification")
    (folder / CARD).write_text("# Mine")
    assert CARD in published_files(folder)
