"""A toy model with every head, and one of its examples."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bertkit.checkpoints.save import save_model
from bertkit.explain.trace import Trace, trace_example
from bertkit.model.encoder import ModelConfig
from bertkit.model.heads import PretrainingModel
from bertkit.tokenizer.wordpiece import Tokenizer

TEXT = "River stone, bridge <script>alert('no')</script> walking quickly & slowly."
PAIR = "The lantern & the \u2603 [bold]harvest[/bold]."


@pytest.fixture(scope="session")
def sizes(tokenizer: Tokenizer) -> ModelConfig:
    return ModelConfig(
        vocab_size=tokenizer.size + 3,  # as models rounded up to a multiple of eight have
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=96,
        initializer_range=0.3,
    )


@pytest.fixture(scope="session")
def directory(
    tokenizer: Tokenizer, sizes: ModelConfig, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("explain") / "model"
    save_model(folder, PretrainingModel(sizes), tokenizer, {"task": "pretraining"})
    return folder


@pytest.fixture(scope="session")
def trace(directory: Path) -> Trace:
    return trace_example(directory, TEXT, PAIR, seed=5)
