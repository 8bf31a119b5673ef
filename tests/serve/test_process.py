"""A server as a process: OpenAI's client, many clients at once, slow ones, and its end."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from bertkit.cli.serve import read_token
from bertkit.errors import BertkitError
from bertkit.predict.embeddings import load_embedder
from bertkit.predict.load import load
from bertkit.serve.admission import Limits, Metrics
from bertkit.serve.app import open_socket, socket_url
from bertkit.serve.models import load_models, split_name

TEXTS = ["river stone", "The harbour in the evening.", "a letter " * 30, "kettle", ""]
ROUTE = "/v1/classification"


class Running:
    """A server that runs."""

    def __init__(self, *arguments: str, **environment: str) -> None:
        command = [sys.executable, "-m", "bertkit", "serve", "--port", "0", "--device", "cpu"]
        self.process = subprocess.Popen(
            [*command, "--precision", "fp32", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, **environment},
        )
        assert self.process.stdout is not None
        lines = iter(self.process.stdout.readline, "")
        self.address = next(line.split()[2].rstrip(",") for line in lines if "serving at" in line)
        self.port = int(self.address.rpartition(":")[2])

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        status = self.process.wait(60)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return status


@pytest.fixture(scope="module")
def own(models: Path) -> Iterator[Running]:
    """One process for most tests, since it takes seconds to start."""
    limits = ("--max-queue-tokens", "10000000", "--max-connections", "60", "--no-log-requests")
    running = Running(f"vectors={models / 'encoder'}", str(models / "classify"), *limits)
    yield running
    assert running.stop() == -signal.SIGTERM


@pytest.mark.slow
def test_openais_client(own: Running, models: Path) -> None:
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{own.address}/v1", api_key="none", max_retries=0) as client:
        wanted = load_embedder(models / "encoder", device="cpu", precision="fp32").encode(TEXTS)
        found = client.embeddings.create(model="vectors", input=TEXTS)  # in base64
        np.testing.assert_allclose([d.embedding for d in found.data], wanted, atol=1e-5)
        assert found.usage.total_tokens > 5
        plain = client.embeddings.create(model="vectors", input=TEXTS[0], encoding_format="float")
        np.testing.assert_allclose(plain.data[0].embedding, wanted[0], atol=1e-5)
        assert [model.id for model in client.models.list()] == ["vectors", "classify"]
        assert client.models.retrieve("vectors").owned_by == "bertkit"
        with pytest.raises(openai.NotFoundError):
            client.embeddings.create(model="vector", input="a")
        with pytest.raises(openai.UnprocessableEntityError):
            client.embeddings.create(model="vectors", input="a", dimensions=3)


@pytest.mark.slow
def test_many_clients_get_their_own_answers_in_order(own: Running, models: Path) -> None:
    """Forty clients, each with its own texts; the answers are those of the predictor."""
    direct: Any = load(models / "classify", device="cpu", precision="fp32")
    texts = [f"{text} {word}" for text in TEXTS for word in ("stone", "a", "sailor", "x y z")]
    wanted = {text: direct(text).probabilities for text in texts}

    async def ask_all() -> None:
        async with httpx.AsyncClient(base_url=own.address, timeout=60) as client:
            await asyncio.gather(*(ask(client, number) for number in range(40)))

    async def ask(client: httpx.AsyncClient, number: int) -> None:
        for turn in range(4):
            inputs = [texts[(number * 7 + turn * 3 + i) % len(texts)] for i in range(1 + turn)]
            answer = await client.post(ROUTE, json={"model": "classify", "inputs": inputs})
            assert answer.status_code == 200
            for text, found in zip(inputs, answer.json()["predictions"], strict=True):
                assert found["probabilities"] == pytest.approx(wanted[text], abs=1e-5)

    asyncio.run(ask_all())


@pytest.mark.slow
def test_too_many_connections_are_refused_until_some_close(own: Running) -> None:
    with ExitStack() as stack:
        for _ in range(60):
            stack.enter_context(socket.create_connection(("127.0.0.1", own.port), timeout=30))
        assert httpx.get(f"{own.address}/v1/models", timeout=30).status_code == 503
    status = 503
    while status == 503:
        status = httpx.get(f"{own.address}/v1/models", timeout=30).status_code
    assert status == 200


@pytest.mark.slow
def test_a_signal_loses_no_accepted_request(models: Path) -> None:
    own = Running(str(models / "classify"), "--max-queue-tokens", "1000000", BERTKIT_TOKEN="secret")
    assert asyncio.run(end_under_load(own)) == {200: 12}
    assert own.process.wait(60) == -signal.SIGTERM
    assert own.process.stdout is not None
    own.process.stdout.close()


async def end_under_load(own: Running) -> Counter[int]:
    """Statuses of requests that had been accepted before the signal."""
    body = {"inputs": ["stone river " * 100] * 20}
    token = {"authorization": "Bearer secret"}
    async with httpx.AsyncClient(base_url=own.address, timeout=60, headers=token) as client:
        tasks = [asyncio.create_task(client.post(ROUTE, json=body)) for _ in range(12)]
        while "bertkit_requests_in_flight 13" not in (await client.get("/metrics")).text:
            if all(task.done() for task in tasks):
                break
            await asyncio.sleep(0.001)
        own.process.send_signal(signal.SIGTERM)
        answers = await asyncio.gather(*tasks)
        with pytest.raises(httpx.TransportError):
            await client.get("/health")
    return Counter(answer.status_code for answer in answers)


def test_names_of_models(models: Path, tmp_path: Path) -> None:
    assert split_name("runs/mine/model") == ("mine", "runs/mine/model")
    assert split_name("runs/mine") == ("mine", "runs/mine")
    assert split_name("a=runs/mine") == ("a", "runs/mine")
    with pytest.raises(BertkitError, match="cannot be a model's name"):
        split_name("a b=runs/mine")
    (tmp_path / "lr=3e-5" / "model").mkdir(parents=True)
    grid = tmp_path / "lr=3e-5"
    assert split_name(f"mine={grid}") == ("mine", str(grid))
    one = str(models / "tag")
    for names in ([], [one, one], [str(tmp_path)]):
        with pytest.raises(BertkitError):
            load_models(names, Limits(), Metrics(), device="cpu")


def test_the_token_is_read_from_a_file_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("BERTKIT_TOKEN", raising=False)
    assert read_token(None) == ""
    file = tmp_path / "token"
    with pytest.raises(BertkitError, match="cannot be read"):
        read_token(file)
    file.write_text("abc\n")
    assert read_token(file) == "abc"
    monkeypatch.setenv("BERTKIT_TOKEN", "from-there")
    assert (read_token(None), read_token(file)) == ("from-there", "abc")
    for wrong in (" ", "größe"):  # a blank token does not mean an open server
        monkeypatch.setenv("BERTKIT_TOKEN", wrong)
        with pytest.raises(BertkitError):
            read_token(None)
        file.write_text(wrong)
        with pytest.raises(BertkitError):
            read_token(file)


def test_an_impossible_or_taken_address_is_an_error() -> None:
    for address in (("127.0.0.1", 70_000), ("127.0.0.1", -1), ("a..b", 0), ("no.such.invalid", 80)):
        with pytest.raises(BertkitError, match="cannot listen"):
            open_socket(*address)
    with open_socket("127.0.0.1", 0) as own:
        port = own.getsockname()[1]
        assert socket_url(own) == f"http://127.0.0.1:{port}"
        with pytest.raises(BertkitError, match="cannot listen"):
            open_socket("127.0.0.1", port)
