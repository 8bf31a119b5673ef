"""A tuned model of every kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bertkit.model.encoder import ModelConfig
from bertkit.model.saving import save_model
from bertkit.tasks.answer import Answer
from bertkit.tasks.choose import Choose
from bertkit.tasks.classify import Classify, ClassifyMany
from bertkit.tasks.regress import Regress
from bertkit.tasks.tag import Tag
from bertkit.tokens.tokenizer import Tokenizer

TASKS: dict[str, Any] = {
    "classify": Classify(("dry", "damp", "wet"), longest=40),
    "multi-label": ClassifyMany(("a", "b"), longest=40),
    "regress": Regress(longest=40),
    "choose": Choose(longest=40),
    "tag": Tag(("O", "B-X", "I-X"), longest=40),
    "documents": Tag(("O", "B-X", "I-X"), longest=40, context="document"),
    "answer": Answer(null=True, longest=40, stride=8, question_length=16),
}


@pytest.fixture(scope="session")
def models(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model of random weights for every task."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("tuned")
    config = ModelConfig(
        vocab_size=tokenizer.size,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=40,
        initializer_range=0.2,
    )
    for name, task in TASKS.items():
        details = {"task": task.kind, "labels": list(task.labels), "settings": task.settings()}
        save_model(folder / name, task.build(config), tokenizer, details)
    return folder
