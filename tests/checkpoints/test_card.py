"""Model cards: what the hub reads, and whose they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from huggingface_hub.repocard import metadata_load

from bertkit.checkpoints.card import (
    CARD,
    Card,
    Scored,
    derived_card,
    inherited_metadata,
    model_index,
    write_card,
)
from bertkit.checkpoints.save import save_model
from bertkit.model.encoder import Encoder
from bertkit.model.heads import PretrainingModel
from bertkit.model.task_heads import ClassificationModel, SpanModel
from bertkit.tokenizer.wordpiece import Tokenizer
from tests.conftest import tiny_config

TASKS: dict[str, Any] = {
    "classification": lambda config: ClassificationModel(config, 2),
    "question-answering": SpanModel,
    "pretraining": PretrainingModel,
    "features": Encoder,
}


def carded(folder: Path, tokenizer: Tokenizer, task: str, **metadata: Any) -> Path:
    scores = Scored("set", "dev", {"accuracy": 0.9}, "org/set", "a")
    metadata["model-index"] = model_index("A model", "text-classification", [scores])
    card = Card(title="A model", summary="Of rivers.", metadata=metadata, sections={"Data": "X."})
    model = TASKS[task](tiny_config(tokenizer))
    save_model(folder, model, tokenizer, {"task": task}, card=card)
    return folder


@pytest.mark.parametrize("task", TASKS)
def test_a_card_is_what_the_hub_reads(task: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    folder = carded(tmp_path / "model", tokenizer, task, license="mit", language=["no"])
    card = ModelCard.load(folder / CARD)
    pipelines = {"classification": "text-classification", "pretraining": "fill-mask"}
    wanted = {**pipelines, "question-answering": "question-answering"}.get(task)
    assert card.data.pipeline_tag == wanted
    assert (card.data.license, card.data.language) == ("mit", ["no"])
    assert card.data.library_name == "transformers"
    [result] = card.data.eval_results
    assert (result.dataset_type, result.metric_type, result.metric_value) == (
        *("org/set", "accuracy"),
        0.9,
    )
    assert "from bertkit import load" in card.text
    assert "Of rivers." in card.text


def test_values_cannot_break_the_metadata(tmp_path: Path) -> None:
    """Names of files and labels are the user's."""
    odd = 'a: "b"\n---\n# x {} é 😀 \x85'
    index = model_index(odd, "fill-mask", [Scored(odd, "dev", {odd: 0.5})])
    (tmp_path / CARD).write_text(
        Card(title="T", summary="S", metadata={"model-index": index}).text()
    )
    read = metadata_load(tmp_path / CARD)
    assert read is not None
    assert read["model-index"] == index
    assert model_index("BERT", "fill-mask", [Scored("mine", "dev", {})]) is None


def test_an_edited_card_is_kept(tokenizer: Tokenizer, tmp_path: Path) -> None:
    folder = carded(tmp_path / "model", tokenizer, "classification")
    first = (folder / CARD).read_text()
    torch.manual_seed(0)
    assert carded(folder, tokenizer, "classification").joinpath(CARD).read_text() == first
    edited = first.replace("# A model", "# My model")
    (folder / CARD).write_text(edited)
    assert carded(folder, tokenizer, "classification").joinpath(CARD).read_text() == edited


def test_a_derived_card_takes_over_the_license_and_names_the_origin(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    commit = "0123456789" * 4
    folder = tmp_path / f"models--org--name/snapshots/{commit}"
    carded(folder, tokenizer, "classification", license="mit")
    card = derived_card(folder, folder, tiny_config(tokenizer), tokenizer)
    assert dict(card.metadata) == {"license": "mit", "base_model": "org/name"}
    assert commit in card.summary


@pytest.mark.parametrize("text", ["---\na: [\n---\n", "---\nx\n---\n", "", "# Theirs", "---\n"])
def test_cards_of_others_are_never_a_reason_to_fail(
    text: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    folder = carded(tmp_path / "model", tokenizer, "classification")
    (folder / CARD).write_text(text)
    assert inherited_metadata(folder) == {}
    write_card(folder, Card(title="T", summary="S"), replaced=folder)
    assert (folder / CARD).read_text() == text
