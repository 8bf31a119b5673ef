"""A small model to begin with, and small files of every kind."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bertkit.checkpoints.pretrained import PretrainedWeights, read_pretrained
from bertkit.checkpoints.save import save_model
from bertkit.model.encoder import ModelConfig
from bertkit.model.heads import PretrainingModel
from bertkit.tokenizer.wordpiece import Tokenizer


@pytest.fixture(scope="session")
def pretrained(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory of a network with random weights, 40 positions long."""
    torch.manual_seed(0)
    config = ModelConfig(
        vocab_size=tokenizer.size,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=40,
        initializer_range=0.1,
    )
    folder = tmp_path_factory.mktemp("pretrained") / "model"
    save_model(folder, PretrainingModel(config), tokenizer, {"task": "pretraining"})
    return folder


@pytest.fixture(scope="session")
def start(pretrained: Path) -> PretrainedWeights:
    return read_pretrained(pretrained)
