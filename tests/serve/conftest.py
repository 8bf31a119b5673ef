"""Tiny models of every kind, and a server of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from starlette.testclient import TestClient

from bertkit.checkpoints.save import save_model
from bertkit.model.encoder import Encoder
from bertkit.model.heads import PretrainingModel
from bertkit.serve.admission import DEFAULT_LIMITS, Limits
from bertkit.serve.app import serving_app
from bertkit.tokenizer.wordpiece import Tokenizer
from tests.conftest import tiny_config
from tests.networks import save_task
from tests.predict.conftest import TASKS

CONFIG = tiny_config(80, initializer_range=0.2)


@pytest.fixture(scope="session")
def models(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model of random weights for every task, a pre-trained one and an encoder."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("served")
    config = replace(CONFIG, vocab_size=tokenizer.size)
    for name, task in TASKS.items():
        save_task(folder / name, task, config, tokenizer)
    save_model(folder / "pretrained", PretrainingModel(config), tokenizer, {})
    save_model(folder / "encoder", Encoder(config), tokenizer, {})
    return folder


NAMES = [*TASKS, "pretrained", "encoder"]


@pytest.fixture(scope="session")
def serve(models: Path) -> Iterator[Callable[..., TestClient]]:
    """Makes clients of servers; each gets names of models, limits and a token."""
    clients = []

    def make(*names: str, limits: Limits = DEFAULT_LIMITS, **options: Any) -> TestClient:
        folders = [str(models / name) for name in names]
        app = serving_app(*folders, precision="fp32", device="cpu", limits=limits, **options)
        client = TestClient(app, raise_server_exceptions=False)
        client.__enter__()
        clients.append(client)
        return client

    yield make
    for client in clients:
        client.__exit__(None, None, None)


@pytest.fixture(scope="session")
def client(serve: Callable[..., TestClient]) -> TestClient:
    """Of a server with all models."""
    return serve(*NAMES)
