"""A small model directory to be damaged, and the limit on memory under which it is read."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import jaxtyping
import pytest
import torch

from bertkit.checkpoints.save import save_model
from bertkit.model.encoder import ModelConfig
from bertkit.model.heads import PretrainingModel
from bertkit.model.outputs import ClassificationModel
from bertkit.tokenizer.wordpiece import Tokenizer
from tests.conftest import tiny_config

ROOM = 1 << 31
"""Bytes that a test may take at most; hostile files ask for thousands of times as much."""


@pytest.fixture(autouse=True)
def little_memory() -> Iterator[None]:
    """Whoever asks for terabytes gets a MemoryError, and the test fails with it."""
    status = Path("/proc/self/status")
    if not status.exists():  # not Linux
        yield
        return
    import resource

    before = resource.getrlimit(resource.RLIMIT_AS)
    lines = status.read_text().splitlines()
    size = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmSize"))
    resource.setrlimit(resource.RLIMIT_AS, (size + ROOM, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.fixture(autouse=True)
def no_shape_checks() -> Iterator[None]:
    """As users run it: beartype, which only tests have, must not be what refuses a file."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(scope="session")
def config(tokenizer: Tokenizer) -> ModelConfig:
    return tiny_config(tokenizer, hidden_size=16, intermediate_size=32)


@pytest.fixture(scope="session")
def original(
    config: ModelConfig, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp("original") / "model"
    torch.manual_seed(0)
    save_model(folder, PretrainingModel(config), tokenizer, {"task": "pretraining"})
    return folder


@pytest.fixture
def model(original: Path, tmp_path: Path) -> Path:
    """A copy of a whole model directory."""
    return shutil.copytree(original, tmp_path / "model")


@pytest.fixture
def tuned(config: ModelConfig, tokenizer: Tokenizer, tmp_path: Path) -> Path:
    """A classifier's directory."""
    torch.manual_seed(0)
    details = {"task": "classification", "labels": ["a", "b", "c"], "settings": {"max_length": 40}}
    save_model(tmp_path / "tuned", ClassificationModel(config, 3), tokenizer, details)
    return tmp_path / "tuned"
