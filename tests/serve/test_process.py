"""A server as a process of its own: OpenAI's client, many clients at once, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from benchmarks import container
from bertkit.predict.embeddings import load_embedder
from bertkit.predict.load import load
from bertkit.serve.limits import Limits

TEXTS = ["river stone", "The harbour in the evening.", "a letter " * 30, "kettle", ""]
CODE = """
import sys
from bertkit.serve.limits import Limits
from bertkit.cli.serve import serve_command
limits = Limits(max_queue_tokens=int(sys.argv[1]))
serve_command(*sys.argv[2:], port=0, precision="fp32", device="cpu", limits=limits)
"""


class Running:
    """A server that runs."""

    def __init__(
        self,
        *models: str,
        queue: int = Limits().max_queue_tokens,
        errors: int = subprocess.DEVNULL,
        files: int = 0,
    ) -> None:
        command = [sys.executable, "-c", CODE, str(queue), *models]
        if files:
            command = ["/bin/sh", "-c", f'ulimit -n {files}; exec "$0" "$@"', *command]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        assert self.process.stdout is not None
        lines = iter(self.process.stdout.readline, "")
        self.address = next(line.split()[2].rstrip(",") for line in lines if "serving at" in line)
        assert httpx.get(f"{self.address}/ready", timeout=60).status_code == 200

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        status = self.process.wait(60)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return status


WITHOUT = """
import sys
sys.modules.update(dict.fromkeys(sys.argv[1].split()))
from starlette.testclient import TestClient
from bertkit.serve.app import serving_app
with TestClient(serving_app(*sys.argv[2:], precision="fp32", device="cpu")) as client:
    body = {"inputs": [{"text": "a"}]}
    asked = [client.post("/v1/classify", json=body), client.get("/"), client.get("/docs")]
print(*[answer.status_code for answer in asked])
"""


@pytest.mark.slow
def test_the_server_needs_no_package_that_its_image_leaves_out(models: Path) -> None:
    given = container.arguments((container.ROOT / "Dockerfile").read_text())
    packages = packages_distributions().items()
    unused = {*given["UNUSED_PACKAGES"]}
    modules = " ".join(name for name, own in packages if {*own} & unused)
    assert {"sklearn", "scipy", "matplotlib"} <= {*modules.split()}
    command = [sys.executable, "-c", WITHOUT, modules, str(models / "classify")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == "200 200 200\n", done.stderr


@pytest.fixture(scope="module")
def own(models: Path) -> Iterator[Running]:
    """One process for most tests, since each takes seconds to start."""
    running = Running(f"vectors={models / 'encoder'}", str(models / "classify"))
    yield running
    assert running.stop() == -signal.SIGTERM


@pytest.mark.slow
def test_openais_client(own: Running, models: Path) -> None:
    with openai.OpenAI(base_url=f"{own.address}/v1", api_key="none", max_retries=0) as client:
        wanted = load_embedder(models / "encoder", device="cpu", precision="fp32").encode(TEXTS)
        found = client.embeddings.create(model="vectors", input=TEXTS)  # in base64
        np.testing.assert_allclose([d.embedding for d in found.data], wanted, atol=1e-5)
        assert found.usage.total_tokens > 5
        plain = client.embeddings.create(model="vectors", input=TEXTS[0], encoding_format="float")
        np.testing.assert_allclose(plain.data[0].embedding, wanted[0], atol=1e-5)
        assert [model.id for model in client.models.list()] == ["vectors", "classify"]
        assert client.models.retrieve("vectors").owned_by == "bertkit"
        with pytest.raises(openai.NotFoundError, match="did you mean 'vectors'"):
            client.embeddings.create(model="vector", input="a")
        with pytest.raises(openai.UnprocessableEntityError, match="dimensions"):
            client.embeddings.create(model="vectors", input="a", dimensions=3)


@pytest.mark.slow
def test_many_clients_get_their_own_answers_in_order(own: Running, models: Path) -> None:
    asyncio.run(ask_at_once(own.address, models))


async def ask_at_once(address: str, models: Path) -> None:
    """Forty clients, each with its own texts; the answers are those of the predictor."""
    direct: Any = load(models / "classify", device="cpu", precision="fp32")
    texts = [f"{text} {word}" for text in TEXTS for word in ("stone", "a", "sailor", "x y z")]
    wanted = {text: direct(text).probabilities for text in texts}

    async with httpx.AsyncClient(base_url=address, timeout=60) as client:

        async def ask(number: int) -> None:
            for turn in range(5):
                own = [texts[(number * 7 + turn * 3 + i) % len(texts)] for i in range(1 + turn)]
                body = {"model": "classify", "inputs": [{"text": text} for text in own]}
                answer = await client.post("/v1/classify", json=body)
                assert answer.status_code == 200
                for text, found in zip(own, answer.json()["predictions"], strict=True):
                    assert found["probabilities"] == pytest.approx(wanted[text], abs=1e-5)

        await asyncio.gather(*map(ask, range(40)))
        metrics = (await client.get("/metrics")).text
    batches = number_of(metrics, 'bertkit_batch_requests_count{model="classify"}')
    assert batches < 200, "no requests were computed together"


def number_of(metrics: str, name: str) -> float:
    return float(metrics.split(f"{name} ")[1].split(maxsplit=1)[0])


@pytest.mark.slow
def test_a_head_without_end_is_refused(own: Running) -> None:
    """What is kept of it before anyone has looked at it has a bound."""
    with socket.create_connection(("127.0.0.1", own.port), timeout=30) as stream:
        stream.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\nX-Long: ")
        answer = b""
        with contextlib.suppress(ConnectionError):
            for _ in range(64):
                stream.sendall(b"a" * 16384)
        with contextlib.suppress(ConnectionError):
            answer = stream.recv(4096)
    assert answer == b"" or b" 400 " in answer.splitlines()[0]
    assert httpx.get(f"{own.address}/health", timeout=30).status_code == 200


@pytest.mark.slow
def test_a_log_that_nobody_reads_blocks_nothing(models: Path) -> None:
    own = Running(str(models / "classify"), errors=subprocess.PIPE)
    assert own.process.stderr is not None
    with httpx.Client(base_url=own.address, timeout=30) as client:
        for number in range(1500):  # some 200 bytes of log each; a pipe holds 65,536
            name = {"x-request-id": f"{number}" + "a" * 100}
            assert client.get("/health", headers=name).status_code == 200
    lines = read_some(own.process.stderr.fileno(), 1000)  # read at last, it goes on
    assert {"time", "level", "event"} <= json.loads(lines[0]).keys()
    assert httpx.get(f"{own.address}/health", timeout=30).status_code == 200
    assert own.stop() == -signal.SIGTERM  # though there is more that nobody reads
    own.process.stderr.close()


def read_some(pipe: int, lines: int) -> list[bytes]:
    """The first lines of a pipe."""
    found = b""
    while found.count(b"\n") < lines:
        found += os.read(pipe, 65536)
    return found.splitlines()[:lines]


@pytest.mark.slow
def test_idle_sockets_lock_nobody_out_where_files_are_few(models: Path) -> None:
    own = Running(str(models / "classify"), files=128)
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            for _ in range(150):
                one = socket.create_connection(("127.0.0.1", own.port), timeout=30)
                stack.enter_context(one).sendall(b"GET / HTTP/1.1\r\n")
            for path in ("health", "ready", "v1/models"):
                assert httpx.get(f"{own.address}/{path}", timeout=30).status_code == 200
    assert own.stop() == -signal.SIGTERM


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_loses_no_accepted_request(models: Path, number: signal.Signals) -> None:
    if signal.getsignal(number) == signal.SIG_IGN:
        pytest.skip("the tests run under nohup, so the server ignores SIGHUP, too")
    own = Running(str(models / "classify"), queue=10**7)
    statuses, refused = asyncio.run(end_under_load(own, number))
    assert statuses == {200: 12}
    assert refused.status_code == 503
    assert refused.headers["retry-after"]
    assert own.process.wait(60) == -number
    assert own.process.stdout is not None
    own.process.stdout.close()


async def end_under_load(own: Running, number: int) -> tuple[Counter[int], httpx.Response]:
    """Statuses of requests that had been accepted before the signal, and an answer after it."""
    body = {"inputs": [{"text": "stone river " * 200}] * 30}
    limits = httpx.Limits(max_connections=40)
    async with httpx.AsyncClient(base_url=own.address, timeout=60, limits=limits) as client:
        tasks = [asyncio.create_task(client.post("/v1/classify", json=body)) for _ in range(12)]
        accepted = 0.0
        while accepted < 12:
            await asyncio.sleep(0.005)
            text = (await client.get("/metrics")).text
            waiting = number_of(text, 'bertkit_queue_requests{model="classify"}')
            begun = number_of(text, 'bertkit_batch_requests_sum{model="classify"}')
            accepted = waiting + begun + (waiting > 0)  # one of them is at work
        own.process.send_signal(number)
        refused = await client.get("/ready")
        while refused.status_code == 200:  # the signal is on its way
            refused = await client.get("/ready")
        refused = await client.post("/v1/classify", json={"inputs": [{"text": "river"}]})
        answers = await asyncio.gather(*tasks)
    return Counter(answer.status_code for answer in answers), refused
