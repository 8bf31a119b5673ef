"""A real server over real sockets: clients that are silent, slow, many, gone, or lie."""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from bertkit.serve import connections
from bertkit.serve.app import make_app
from bertkit.serve.limits import Limits
from bertkit.serve.metrics import Metrics
from bertkit.serve.models import load_models
from bertkit.serve.server import make_server, open_socket, socket_url
from bertkit.serve.service import Service

HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
PATIENCE = 30.0


class Running:
    """A server in a thread of this process."""

    def __init__(self, folders: list[Path], limits: Limits, hosts: tuple[str, ...] = ()) -> None:
        metrics = Metrics()
        names = [str(folder) for folder in folders]
        served = load_models(names, limits, metrics, precision="fp32", device="cpu")
        self.serving = Service(served, limits, metrics)
        self.app = make_app(self.serving, hosts=hosts)
        self.server = make_server(self.app, self.serving)
        self.listening = open_socket("127.0.0.1", 0)
        self.address = socket_url(self.listening)
        self.port = self.listening.getsockname()[1]
        self.thread = threading.Thread(target=self.server.run, args=([self.listening],))
        self.thread.start()
        while not self.server.started and self.thread.is_alive():
            time.sleep(0.01)

    def connect(self, *sent: bytes, receiving: int = 0) -> socket.socket:
        """A connection on which something is sent.

        Args:
            sent: by the client.
            receiving: bytes that its kernel takes; as usual where 0.
        """
        own = socket.socket()
        own.settimeout(PATIENCE)
        if receiving:
            own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receiving)
        own.connect(("127.0.0.1", self.port))
        for part in sent:
            own.sendall(part)
        return own

    def ask(self, *sent: bytes) -> bytes:
        """All that comes until the server closes the connection."""
        with self.connect(*sent) as own:
            return rest_of(own)


@contextmanager
def running(*folders: Path, hosts: tuple[str, ...] = (), **limits: Any) -> Iterator[Running]:
    one = Running(list(folders), Limits(grace=0, **limits), hosts)
    try:
        yield one
    finally:
        one.server.should_exit = True
        one.thread.join(60)
        one.listening.close()


def rest_of(own: socket.socket) -> bytes:
    found = b""
    with suppress(ConnectionError):
        while part := own.recv(1 << 16):
            found += part
    return found


def rest_of_one(own: socket.socket) -> bytes:
    """An answer in JSON, on a connection that stays."""
    found = b""
    while not found.endswith(b"}}"):
        found += own.recv(1 << 16)
    return found


def is_open(own: socket.socket) -> bool:
    """Whether the server has not closed a connection on which nothing was sent."""
    own.setblocking(False)
    try:
        return own.recv(1) != b""
    except BlockingIOError:
        return True
    except ConnectionError:
        return False


def until(held: Callable[[], Any]) -> None:
    end = time.monotonic() + PATIENCE
    while not held():
        assert time.monotonic() < end, "it does not come"
        time.sleep(0.01)


def post(path: str, body: Any, *headers: str, length: int | None = None) -> bytes:
    data = json.dumps(body).encode()
    size = f"content-length: {len(data) if length is None else length}"
    lines = [f"POST {path} HTTP/1.1", "host: localhost", "content-type: application/json", size]
    return "\r\n".join([*lines, *headers, "", ""]).encode() + data


CLASSIFY = partial(post, "/v1/classify", {"inputs": [{"text": "river"}]})


@pytest.fixture(scope="module")
def patient(models: Path) -> Iterator[Running]:
    """A server that waits as usual."""
    with running(models / "classify") as one:
        yield one


def test_silence_and_unfinished_heads_are_closed(
    models: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "bertkit.serve")
    begun = b"GET /health HTTP/1.1\r\nhost: local"
    with running(models / "classify", deadline=0.3) as one:
        assert one.ask() == b""
        assert one.ask(begun) == b""
        found = one.ask(HEALTH, begun)
        assert found.count(b"HTTP/1.1 200") == 1
        # a body that nobody asked for comes drop by drop
        with one.connect(HEALTH.replace(b"host", b"content-length: 99\r\nhost")) as own:
            with suppress(ConnectionError):
                for _ in range(60):
                    own.sendall(b"x")
                    time.sleep(0.05)
            assert rest_of(own).count(b"HTTP/1.1 200") <= 1
        until(lambda: sum(found.closed["no request"] for found in closings(caplog)) >= 3)
        assert not one.serving.connections.open
    total = sum(found.closed["no request"] for found in closings(caplog))
    assert total >= 3
    assert len(closings(caplog)) <= total  # one line for all of a second


class Closing:
    """A line of the log about closed connections."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self.closed = fields["closed"]


def closings(caplog: pytest.LogCaptureFixture) -> list[Closing]:
    told = [one for one in caplog.records if one.getMessage() == "connections closed"]
    return [Closing(one.fields) for one in told]  # type: ignore[attr-defined]


def test_idle_connections_make_room(models: Path) -> None:
    with running(models / "classify", max_connections=8) as one, ExitStack() as stack:
        idle = [stack.enter_context(one.connect()) for _ in range(40)]
        until(lambda: sum(map(is_open, idle)) <= 8)
        assert httpx.get(f"{one.address}/health", timeout=PATIENCE).status_code == 200
        assert [is_open(own) for own in idle[:32]] == [False] * 32, "the oldest go first"
        assert any(map(is_open, idle[33:]))


def test_health_is_answered_where_all_connections_are_at_work(models: Path) -> None:
    with running(models / "classify", max_connections=8) as one, ExitStack() as stack:
        for _ in range(8):  # bodies that do not come
            stack.enter_context(one.connect(CLASSIFY(length=1000)))
        until(lambda: one.serving.in_flight == 8)
        for path in ("/health", "/ready"):
            assert httpx.get(f"{one.address}{path}", timeout=PATIENCE).status_code == 200
        refused = httpx.get(f"{one.address}/v1/models", timeout=PATIENCE)
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "1"
        assert refused.headers["connection"] == "close"
        for _ in range(100):
            stack.enter_context(one.connect())
        assert httpx.get(f"{one.address}/health", timeout=PATIENCE).status_code == 200
        until(lambda: len(one.serving.connections.open) <= 8 + connections.RESERVE)
    assert not one.thread.is_alive()


def test_answers_that_nobody_reads_are_given_up(models: Path) -> None:
    long = {"input": ["river"] * 2048, "encoding_format": "float"}
    with (
        running(models / "encoder", deadline=3, max_queue_tokens=10**6) as one,
        ExitStack() as stack,
    ):
        asked = post("/v1/embeddings", long)
        own = stack.enter_context(one.connect(asked, receiving=4096))
        until(lambda: one.serving.unread)
        until(lambda: not one.serving.connections.open)
        until(lambda: one.serving.unread == 0)
        assert not rest_of(own).endswith(b"}")
        # a client that reads slowly gets everything
        slow = stack.enter_context(one.connect(asked, receiving=4096))
        assert json.loads(rest_of_one(slow).split(b"\r\n\r\n")[1])["data"][2047]


def test_answers_are_bounded(models: Path) -> None:
    def texts(number: int, **more: str) -> dict[str, Any]:
        return {"input": ["river"] * number, **more}

    with running(models / "encoder", models / "classify", max_answer=10_000) as one:
        work = one.serving.models["encoder"].operations["embeddings"]
        with httpx.Client(base_url=one.address, timeout=PATIENCE) as client:
            for asked in (texts(2048), texts(60, encoding_format="base64")):
                refused = client.post("/v1/embeddings", json=asked)
                assert refused.status_code == 413
                assert "10,000 bytes" in refused.json()["error"]["message"]
                work = one.serving.models["encoder"].operations["embeddings"]
            assert client.post("/v1/embeddings", json=texts(5)).status_code == 200
            work.prepare = None  # nothing is computed for what would be too large
            assert client.post("/v1/embeddings", json=texts(2048)).status_code == 413
            many = {"model": "classify", "inputs": [{"text": "a"}] * 500}
            assert client.post("/v1/classify", json=many).status_code == 413
            assert client.get("/v1/models").status_code == 200


@pytest.mark.slow
def test_unread_answers_together_are_bounded(models: Path) -> None:
    """What would go beyond is refused; small answers are given all the same."""
    long = post("/v1/embeddings", {"input": ["river"] * 2048, "encoding_format": "float"})
    limits = {"max_queue_tokens": 10**6, "max_answer": 2_000_000}
    with running(models / "encoder", **limits) as one, ExitStack() as stack:
        asking = [stack.enter_context(one.connect(long, receiving=4096)) for _ in range(8)]
        until(lambda: b'status="503"' in one.serving.metrics.text())
        until(lambda: one.serving.in_flight <= 3)
        assert 2**20 < one.serving.unread <= one.serving.limits.max_unread
        found = [rest_of_one(own) for own in asking]
        assert {one[:12] for one in found} == {b"HTTP/1.1 200", b"HTTP/1.1 503"}
        assert httpx.get(f"{one.address}/health", timeout=PATIENCE).status_code == 200


def test_a_client_that_closed_its_side_is_let_go(patient: Running) -> None:
    for sent in (b"", HEALTH[:20], CLASSIFY(length=1000)):
        with patient.connect(sent) as own:
            own.shutdown(socket.SHUT_WR)
            assert rest_of(own) == b""
    until(lambda: not patient.serving.in_flight)


def test_two_lengths_of_one_body_are_refused(patient: Running) -> None:
    smuggled = b"0\r\n\r\nGET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n"
    head = b"POST /v1/classify HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n" % len(
        smuggled
    )
    for path in (b"/v1/classify", b"/health"):
        sent = head.replace(b"/v1/classify", path) + b"transfer-encoding: chunked\r\n\r\n"
        found = patient.ask(sent, smuggled)
        assert found.startswith(b"HTTP/1.1 400")
        assert found.count(b"HTTP/1.1") == 1
        assert b"connection: close" in found


def test_head_is_answered_wherever_get_is(patient: Running) -> None:
    for path in ("/health", "/ready", "/v1/models", "/metrics", "/", "/docs"):
        found = httpx.head(f"{patient.address}{path}")
        assert (found.status_code, found.content) == (200, b""), path
    assert httpx.head(f"{patient.address}/v1/classify").status_code == 405


def test_host_names_of_others_are_not_answered(models: Path) -> None:
    with running(models / "classify", hosts=("localhost", "Bert.example")) as one:
        for host, status in {
            "evil.example": 421,
            f"evil.example:{one.port}": 421,
            "127.0.0.1.evil.example": 421,
            "[::1": 421,
            "evil.example@localhost": 421,
            "localhost/evil.example": 421,
            "": 200,
            "127.0.0.1": 200,
            "[::1]:8000": 200,
            f"LOCALHOST:{one.port}": 200,
            "bert.example": 200,
        }.items():
            line = f"GET /v1/models HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n"
            assert one.ask(line.encode()).startswith(f"HTTP/1.1 {status}".encode()), host
            health = one.ask(line.replace("/v1/models", "/health").encode())
            assert health.startswith(b"HTTP/1.1 200")


def test_no_answer_repeats_the_host(patient: Running) -> None:
    for path in ("/v1/models/", "/health/", "/docs/", "//evil.example/", "/v1/classify/"):
        line = f"GET {path} HTTP/1.1\r\nhost: evil.example\r\nconnection: close\r\n\r\n"
        found = patient.ask(line.encode())
        assert found.startswith(b"HTTP/1.1 404"), path
        assert b"evil" not in found


def test_a_wave_of_requests_does_not_hold_up_a_new_connection(
    patient: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted, not timed: how many others are answered before /health."""
    answered: list[str] = []
    monkeypatch.setattr(
        patient.serving.metrics, "answered", lambda route, *_: answered.append(route)
    )
    held, free, loop = threading.Event(), threading.Event(), patient.server.servers[0].get_loop()

    def hold() -> None:
        held.set()
        free.wait(PATIENCE)

    sent = post("/v1/tokens", {"text": "a river"})
    with ExitStack() as stack:
        clients = [stack.enter_context(patient.connect()) for _ in range(200)]
        until(lambda: len(patient.serving.connections.open) >= 200)
        loop.call_soon_threadsafe(hold)
        assert held.wait(PATIENCE)
        for own in clients:
            own.sendall(sent)
        late = stack.enter_context(patient.connect(HEALTH))
        free.set()
        assert late.recv(100).startswith(b"HTTP/1.1 200")
        until(lambda: len(answered) == 201)
    assert answered.index("/health") < 100


def test_connections_are_accepted_several_at_a_time(patient: Running) -> None:
    """uvloop accepts one in each iteration of the loop; uvicorn would take it where it is there."""
    factory = patient.server.config.get_loop_factory()
    assert factory is not None
    loop = factory()
    loop.close()
    assert type(loop).__module__.startswith("asyncio.")
