"""A tuned model of every kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bertkit.tasks.classification import Classification, MultiLabelClassification
from bertkit.tasks.multiple_choice import MultipleChoice
from bertkit.tasks.question_answering import QuestionAnswering
from bertkit.tasks.regression import Regression
from bertkit.tasks.token_classification import TokenClassification
from bertkit.tokenizer.wordpiece import Tokenizer
from tests.conftest import tiny_config
from tests.networks import minilm, save_task

__all__ = ["minilm"]

TASKS: dict[str, Any] = {
    "classify": Classification(("dry", "damp", "wet"), max_length=40),
    "multi-label": MultiLabelClassification(("a", "b"), max_length=40),
    "regress": Regression(max_length=40),
    "choose": MultipleChoice(max_length=40),
    "tag": TokenClassification(("O", "B-X", "I-X"), max_length=40),
    "documents": TokenClassification(("O", "B-X", "I-X"), max_length=40, context="document"),
    "answer": QuestionAnswering(null=True, max_length=40, stride=8, max_question_length=16),
}


@pytest.fixture(scope="session")
def models(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model of random weights for every task."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("tuned")
    config = tiny_config(tokenizer, initializer_range=0.2)
    for name, task in TASKS.items():
        save_task(folder / name, task, config, tokenizer)
    return folder
