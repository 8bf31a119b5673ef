"""What one request may cost the others: bodies that do not come, long texts, wrong lists."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from pydantic import TypeAdapter, ValidationError
from starlette.testclient import TestClient

from benchmarks.screenshots import served
from bertkit.serve import schemas as bodies
from bertkit.serve.limits import CHARACTERS_OF_TOKEN, Limits
from bertkit.serve.server import Server
from bertkit.serve.service import SHORT_TEXT

BODY = b'{"inputs": [{"text": "river"}]}'
MOST = 2048
"""Tokens that servers of these tests take."""


def half_a_body(address: str, *headers: str, length: int = 100) -> bytes:
    """The answer to a request whose body never comes to its end, once the server hangs up."""
    lines = ["POST /v1/classify HTTP/1.1", "host: x", "content-type: application/json", *headers]
    with socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])), 20) as own:
        own.sendall("\r\n".join([*lines, f"content-length: {length}", "", "{"]).encode())
        found = b""
        while part := own.recv(4096):
            found += part
        return found


def test_a_body_must_come_in_time(models: Path) -> None:
    limits = Limits(deadline=0.3, max_bytes=1000)
    with served([str(models / "classify")], limits, token="secret") as address:
        right = "authorization: Bearer secret"
        assert b" 408 " in half_a_body(address, right).splitlines()[0]
        assert b" 401 " in half_a_body(address).splitlines()[0]
        assert b" 413 " in half_a_body(address, right, length=2000).splitlines()[0]
        assert httpx.get(f"{address}/ready").status_code == 200


def test_the_end_comes_even_if_a_request_does_not_end(client: TestClient) -> None:
    serving: Any = type("Serving", (), {"limits": Limits(grace=1, deadline=5), "in_flight": 1})()
    serving.draining = False
    server = Server(uvicorn.Config(client.app), serving)
    server.handle_exit(signal.SIGTERM, None)
    for seconds, over in ((0.0, False), (3.0, False), (6.5, True)):
        server.since = time.monotonic() - seconds
        asyncio.run(server.on_tick(1))
        assert server.should_exit == over
    assert not server.force_exit
    server.handle_exit(signal.SIGTERM, None)
    assert server.force_exit


def test_a_client_that_leaves_within_its_body_is_counted_so(
    serve: Callable[..., TestClient],
) -> None:
    own = serve("classify")
    parts = iter([{"type": "http.request", "body": BODY[:9], "more_body": True}])
    sent: list[Any] = []

    async def receive() -> Any:
        return next(parts, {"type": "http.disconnect"})

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/v1/classify", "headers": headers}
    asyncio.run(own.app({**scope, "query_string": b"", "app": own.app}, receive, send))
    assert sent == []
    lines = [line for line in own.get("/metrics").text.splitlines() if 'status="499"' in line]
    assert any(line.endswith(" 1.0") for line in lines), lines


def test_nothing_is_computed_for_clients_that_left(
    serve: Callable[..., TestClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    app: Any = serve("classify").app
    model = app.state.serving.models["classify"]
    begun, allowed = threading.Semaphore(0), threading.Event()
    batches, run = [], model.operations["classify"].run

    def slow(many: list[Any]) -> Any:
        begun.release()
        assert allowed.wait(20)
        batches.append(len(many))
        return run(many)

    monkeypatch.setattr(model.operations["classify"], "run", slow)

    async def ask(leaving: asyncio.Event) -> list[int]:
        statuses: list[int] = []
        parts = iter([{"type": "http.request", "body": BODY, "more_body": False}])

        async def receive() -> Any:
            if (part := next(parts, None)) is None:
                await leaving.wait()
            return part or {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            statuses.extend([message["status"]] if "status" in message else [])

        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": "/v1/classify", "headers": headers}
        await app({**scope, "query_string": b"", "app": app}, receive, send)
        return statuses

    async def both() -> list[list[int]]:
        stays, leaves = asyncio.Event(), asyncio.Event()
        at_work = []
        for _ in model.worker.threads:
            at_work.append(asyncio.create_task(ask(stays)))
            assert await asyncio.to_thread(begun.acquire, timeout=20)
        leaving = asyncio.create_task(ask(leaves))
        while not model.worker.waiting:
            await asyncio.sleep(0.001)
        leaves.set()
        left = await leaving
        assert not model.worker.waiting
        assert model.worker.tokens == 0
        allowed.set()
        return [left, *await asyncio.gather(*at_work)]

    lanes = len(model.worker.threads)
    assert asyncio.run(both()) == [[], *[[200]] * lanes]
    assert batches == [1] * lanes


LONG: dict[str, tuple[str, dict[str, Any]]] = {
    "choices": ("choose", {"inputs": [{"text": "a " * 500, "choices": ["b"] * 256}]}),
    "blank choices": ("choose", {"inputs": [{"text": "", "choices": [""] * 256}] * 3}),
    "blank words": ("tag", {"inputs": [{"text": "", "words": [""] * (MOST + 1)}]}),
    "context": ("answer", {"inputs": [{"question": "who", "context": "a " * 10_000}]}),
    "masks": ("fill-mask", {"inputs": [{"text": "[MASK]" * 100}]}),
    "guesses": ("fill-mask", {"inputs": [{"text": "[MASK]", "top": 60}] * 900}),
    "ids": ("embeddings", {"input": [[1] * 3000]}),
    "tokens": ("tokens", {"model": "choose", "text": "a" * 60_010}),
}


@pytest.mark.parametrize("name", LONG)
def test_what_is_too_long_is_refused_before_it_is_cut(
    serve: Callable[..., TestClient], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = serve("choose", "tag", "answer", "pretrained", limits=Limits(max_queue_tokens=MOST))
    serving: Any = own.app.state.serving  # type: ignore[attr-defined]
    for model in serving.models.values():
        for route in ("encode_batch", "encode", "encode_pair"):
            monkeypatch.setattr(model.tokenizer, route, None)
    route, body = LONG[name]
    if name == "guesses":
        serving.models["pretrained"].operations["fill-mask"].most_tokens = 10**6
    answer = own.post(f"/v1/{route}", json=body)
    assert answer.status_code == 413, answer.text
    assert answer.json()["error"]["type"] == "too_large_error"


def test_tokenizing_is_bounded_and_within_the_deadline(
    serve: Callable[..., TestClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = Limits(max_queue_tokens=MOST, deadline=0.3)
    own = serve("classify", limits=limits)
    work = own.app.state.serving.models["classify"].operations["classify"]  # type: ignore[attr-defined]
    allowed, prepare = threading.Event(), work.prepare

    def slow(inputs: list[Any]) -> Any:
        if len(inputs[0].text) > SHORT_TEXT:
            assert allowed.wait(20)
        return prepare(inputs)

    def ask(characters: int) -> Any:
        return own.post("/v1/classify", json={"inputs": [{"text": "a" * characters}]})

    monkeypatch.setattr(work, "prepare", slow)
    most = CHARACTERS_OF_TOKEN * MOST
    assert ask(most).status_code == 503
    refused = ask(SHORT_TEXT + 1)  # the long text is still being cut, though nobody waits for it
    assert refused.status_code == 429
    assert refused.headers["retry-after"]
    assert ask(10).status_code == 200
    allowed.set()
    while not own.app.state.serving.tokenizing.jobs[0][0].done():  # type: ignore[attr-defined]
        time.sleep(0.001)
    assert ask(SHORT_TEXT + 1).status_code == 200


WRONG: dict[str, tuple[Any, Any]] = {
    "inputs": (bodies.PredictionRequest[bodies.Text], {"inputs": [1] * 2000}),
    "many inputs": (bodies.PredictionRequest[bodies.Text], {"inputs": [1] * 10**5}),
    "words": (bodies.PredictionRequest[bodies.Words], {"inputs": [{"words": [1] * 10**5}]}),
    "right words": (bodies.PredictionRequest[bodies.Words], {"inputs": [{"words": ["a"] * 10**5}]}),
    "choices": (
        bodies.PredictionRequest[bodies.Choices],
        {"inputs": [{"text": "", "choices": [1] * 10**5}]},
    ),
    "texts": (bodies.EmbeddingRequest, {"input": [None] * 10**5}),
    "ids": (bodies.EmbeddingRequest, {"input": [[None] * 10**5] * 3}),
    "right ids": (bodies.EmbeddingRequest, {"input": [1] * 10**5}),
    "fields": (bodies.PredictionRequest[bodies.Text], dict.fromkeys(map(str, range(10**5)))),
    "more fields": (
        *(bodies.PredictionRequest[bodies.Text],),
        {"inputs": [dict.fromkeys(map(str, range(10**5)))]},
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_body_ends_at_its_first_mistakes(name: str) -> None:
    form, body = WRONG[name]
    with pytest.raises(ValidationError) as found:
        TypeAdapter(form).validate_python(body)
    assert found.value.error_count() <= 6  # at most one or two for each type of a union
