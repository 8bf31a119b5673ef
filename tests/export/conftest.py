"""A small model for every head, and families of networks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bertkit.checkpoints.save import save_model
from bertkit.checkpoints.sentence_transformers import TextPooling
from bertkit.model.encoder import Encoder, ModelConfig
from bertkit.model.heads import PretrainingModel, ReplacedTokenModel
from bertkit.tokenizer.wordpiece import Tokenizer
from tests.conftest import tiny_config
from tests.networks import save_task, write_pooling
from tests.predict.conftest import TASKS


def sizes(tokenizer: Tokenizer, **changes: Any) -> ModelConfig:
    return tiny_config(tokenizer, **{"num_hidden_layers": 1, "initializer_range": 0.2, **changes})


@pytest.fixture(scope="session")
def models(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with models of random weights."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("models")
    plain = sizes(tokenizer)
    for name, task in TASKS.items():
        save_task(folder / name, task, plain, tokenizer)
    pretraining = {"task": "pretraining"}
    save_model(folder / "pretraining", PretrainingModel(plain), tokenizer, pretraining)
    albert = sizes(tokenizer, num_hidden_layers=2, share_layers=True, embedding_size=16)
    save_model(folder / "albert", PretrainingModel(albert), tokenizer, pretraining)
    model = PretrainingModel(sizes(tokenizer, direction="left_to_right"), pairs=False)
    save_model(folder / "left_to_right", model, tokenizer, pretraining)
    for name in ("classify", "choose"):
        narrow = sizes(tokenizer, embedding_size=16, pooler_act="gelu")
        save_task(folder / f"electra-{name}", TASKS[name], narrow, tokenizer)
    electra = ReplacedTokenModel(sizes(tokenizer, embedding_size=16), 0.5)
    save_model(folder / "electra", electra, tokenizer, pretraining)
    save_model(folder / "words", PretrainingModel(plain, pairs=False), tokenizer, pretraining)
    encoder = Encoder(plain)
    save_model(folder / "encoder", encoder, tokenizer, {"task": "features"})
    save_model(folder / "embedding", encoder, tokenizer, {"task": "embedding"})
    write_pooling(folder / "embedding", TextPooling("mean", max_length=24), plain)
    return folder
