"""A small model to begin with, and small files of every kind."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bertkit.checkpoints.pretrained import PretrainedWeights, read_pretrained
from bertkit.checkpoints.save import save_model
from bertkit.model.heads import PretrainingModel
from bertkit.tokenizer.wordpiece import Tokenizer
from tests.conftest import tiny_config


@pytest.fixture(scope="session")
def pretrained(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory of a network with random weights, 40 positions long."""
    torch.manual_seed(0)
    config = tiny_config(tokenizer, initializer_range=0.1)
    folder = tmp_path_factory.mktemp("pretrained") / "model"
    save_model(folder, PretrainingModel(config), tokenizer, {"task": "pretraining"})
    return folder


@pytest.fixture(scope="session")
def start(pretrained: Path) -> PretrainedWeights:
    return read_pretrained(pretrained)
