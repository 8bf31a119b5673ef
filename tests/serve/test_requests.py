"""What a server refuses, with which status, and what it counts."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fastapi import FastAPI
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

import bertkit
from bertkit.errors import BertkitError
from bertkit.model.encoder import Encoder
from bertkit.serve.admission import Limits, Metrics
from bertkit.serve.app import make_app
from bertkit.serve.models import SHORT_TOKENS, Service, load_models

ASKED = {"inputs": ["a secret text"]}
LONG = "The sailor walking slowly over the bridge. " * 12
TASK = "classification"
QUESTIONS = "question-answering"


def service_of(client: TestClient) -> Service:
    service: Service = client.app.state.service  # type: ignore[attr-defined]
    return service


def test_a_token_is_required_where_work_is_done(serve: Callable[..., TestClient]) -> None:
    own = serve("classify", token="open-sesame")
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "open-sesame"}):
        for answer in (
            own.post(f"/v1/{TASK}", json=ASKED, headers=headers),
            own.get("/v1/models", headers=headers),
            own.get("/metrics", headers=headers),
        ):
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"] == "Bearer"
            assert answer.json()["error"]["type"] == "authentication_error"
    right = {"authorization": "bearer  open-sesame"}  # the scheme is of any case
    assert own.post(f"/v1/{TASK}", json=ASKED, headers=right).status_code == 200
    assert own.get("/metrics", headers=right).status_code == 200
    for path in ("/", "/page.js", "/health", "/ready", "/docs", "/openapi.json"):
        assert own.get(path).status_code == 200
    described = own.get("/openapi.json").json()
    assert described["paths"][f"/v1/{TASK}"]["post"]["security"] == [{"HTTPBearer": []}]


def test_a_token_is_required_in_a_larger_application(models: Path) -> None:
    outer = FastAPI()
    app = bertkit.serving_app(str(models / "classify"), token="open-sesame", device="cpu")
    outer.mount("/bert", app)
    with TestClient(app), TestClient(outer) as own:
        for path in ("/bert/v1/models", "/bert/metrics"):
            assert own.get(path).status_code == 401
            right = {"authorization": "Bearer open-sesame"}
            assert own.get(path, headers=right).status_code == 200
        assert own.post(f"/bert/v1/{TASK}", json=ASKED).status_code == 401
        assert own.get("/bert/health").status_code == 200


def test_other_host_names_are_refused(client: TestClient) -> None:
    app = make_app(service_of(client), hosts=("localhost", "Bert.example"))
    own = TestClient(app)
    for host, status in {
        "evil.example": 421,
        "evil.example:8000": 421,
        "127.0.0.1.evil.example": 421,
        "[::1": 421,
        "evil.example@localhost": 421,
        "localhost/evil.example": 421,
        "127.0.0.1": 200,
        "[::1]:8000": 200,
        "LOCALHOST:8000": 200,
        "bert.example": 200,
    }.items():
        assert own.get("/v1/models", headers={"host": host}).status_code == status, host
        assert own.get("/health", headers={"host": host}).status_code == 200


def test_a_large_body_is_refused(serve: Callable[..., TestClient]) -> None:
    own = serve("classify", limits=Limits(max_bytes=1000))
    json_type = {"content-type": "application/json"}

    def pieces() -> Iterator[bytes]:  # without a length in the headers
        yield from [b"x" * 100] * 11

    for body in (b"x" * 1001, b"x" * 100_000, pieces()):
        answer = own.post(f"/v1/{TASK}", content=body, headers=json_type)
        assert answer.status_code == 413
        assert answer.json()["error"]["type"] == "too_large_error"
    assert own.post(f"/v1/{TASK}", json=ASKED).status_code == 200


REFUSED: dict[str, tuple[str, Any, int, str | None]] = {
    "no JSON": (TASK, b'{"inputs": [', 400, None),
    "too deep": (TASK, b"[" * 100_000, 400, None),
    "a list": (TASK, b"[]", 422, None),
    "no inputs": (TASK, {"model": "classify"}, 422, "inputs"),
    "empty": (TASK, {"model": "classify", "inputs": []}, 422, "inputs"),
    "too many": (TASK, {"inputs": ["a"] * 2049}, 422, "inputs"),
    "number": (TASK, {"inputs": ["a", 5]}, 422, "inputs.1"),
    "number of a list": (TASK, {"model": "classify", "inputs": ["a", ["b", 5]]}, 422, "inputs.1"),
    "nested": (TASK, {"model": "classify", "inputs": [[["a"]]]}, 422, "inputs.0"),
    "unknown field": (TASK, {"inputs": ["a"], "modle": "a"}, 422, "modle"),
    "half a pair": ("regression", b'{"inputs": ["\\ud800"]}', 422, None),
    "which": ("tokens", {"text": "a"}, 422, "model"),
    "nobody": (TASK, {"model": "clasify", "inputs": ["a"]}, 404, "model"),
    "cannot": ("regression", {"model": "tag", "inputs": ["a"]}, 422, "model"),
    "no choice": ("multiple-choice", {"inputs": [["", []]]}, 422, "inputs.0"),
    "blank": (QUESTIONS, {"inputs": [[" ", "a"]]}, 422, "inputs.0"),
    "odd blank": (QUESTIONS, {"inputs": [["a", "\x1c"]]}, 422, "inputs.0"),
    "no context": (QUESTIONS, {"inputs": ["who"]}, 422, "inputs.0"),
    "no mask": ("fill-mask", {"inputs": [{"text": "a"}]}, 422, "inputs.0.text"),
    "top": ("fill-mask", {"inputs": [{"text": "[MASK]", "top": 500}]}, 422, "inputs.0.top"),
    "no token": (
        *("next-sentence", {"inputs": [{"text": "a", "following": "\u200b"}]}),
        *(422, "inputs.0.following"),
    ),
    "ids": ("embeddings", {"model": "encoder", "input": [[1], [111]]}, 422, "input"),
    "dimensions": (
        *("embeddings", {"model": "encoder", "input": "a", "dimensions": 8}),
        *(422, "dimensions"),
    ),
    "no input": ("embeddings", {"model": "encoder", "input": []}, 422, "input"),
    "mixed": ("embeddings", {"model": "encoder", "input": ["a", 1]}, 422, "input"),
    "long maps": ("attention-maps", {"model": "tag", "text": LONG}, 422, "text"),
    "tokens": ("tokens", {"model": "tag", "text": "a" * 60_010}, 413, None),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_names_the_field(client: TestClient, name: str) -> None:
    route, body, status, param = REFUSED[name]
    sent = {"content": body} if isinstance(body, bytes) else {"json": body}
    headers = {"content-type": "application/json"}
    answer = client.post(f"/v1/{route}", headers=headers, **sent)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, param), error
    assert "\n" not in error["message"]


TOO_LONG: dict[str, tuple[str, dict[str, Any]]] = {
    "choices": ("multiple-choice", {"inputs": [["a " * 500, ["b"] * 256]]}),
    "blank choices": ("multiple-choice", {"inputs": [["", [""] * 1000]] * 3}),
    "blank words": ("token-classification", {"inputs": [["", [""] * 2049]]}),
    "context": (QUESTIONS, {"inputs": [["who", "a " * 10_000]]}),
    "masks": ("fill-mask", {"inputs": [{"text": "[MASK]" * 900}]}),
    "candidates": ("fill-mask", {"inputs": [{"text": "[MASK]", "top": 60}] * 900}),
    "texts": ("embeddings", {"input": ["a " * 10_000]}),
}


@pytest.mark.parametrize("name", TOO_LONG)
def test_long_requests_are_refused_before_they_are_tokenized(
    serve: Callable[..., TestClient], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = serve("choose", "tag", "answer", "pretrained", limits=Limits(max_queue_tokens=2048))
    for model in service_of(own).models.values():
        for method in ("encode_batch", "encode", "encode_pair"):
            monkeypatch.setattr(model.operations["tokens"].tokenizer, method, None)
    route, body = TOO_LONG[name]
    answer = own.post(f"/v1/{route}", json=body)
    assert answer.status_code == 413, answer.text
    assert answer.json()["error"]["type"] == "too_large_error"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda values: (
        st.lists(values, max_size=3)
        | st.dictionaries(st.sampled_from(["text", "pair", "words", "top", "x"]), values)
    ),
    max_leaves=8,
)


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(inputs=JSON, number=st.integers(0, 8))
def test_no_body_makes_the_server_fail(client: TestClient, inputs: Any, number: int) -> None:
    model = ["classify", "regress", "choose", "tag", "answer", "pretrained", "encoder"][number % 7]
    for route in service_of(client).models[model].operations:
        field = "input" if route == "embeddings" else "inputs"
        wrapped = {"text": inputs} if route in ("tokens", "attention-maps") else {field: inputs}
        answer = client.post(f"/v1/{route}", content=json.dumps({"model": model, **wrapped}))
        assert answer.status_code < 500
        assert answer.status_code == 200 or answer.json()["error"]["message"]


def test_a_body_must_be_marked_as_json(client: TestClient) -> None:
    """curl -d marks it as a form."""
    for headers in ({"content-type": "application/x-www-form-urlencoded"}, {}):
        answer = client.post(f"/v1/{TASK}", content=b'{"inputs": []}', headers=headers)
        assert answer.status_code == 422
        assert "send content-type: application/json" in answer.json()["error"]["message"]


def test_other_methods_and_paths(client: TestClient) -> None:
    for answer, status in ((client.get(f"/v1/{TASK}"), 405), (client.post("/v2"), 404)):
        assert answer.status_code == status
        assert answer.json()["error"]["type"]
    assert client.put(f"/v1/{TASK}").headers["allow"] == "POST"
    assert client.get("/v1/models/nobody").status_code == 404
    for path in ("/health", "/ready", "/v1/models", "/metrics", "/", "/docs"):
        assert client.head(path).status_code == 200
    for path in ("/v1/models/", "/health/"):  # no redirect
        assert client.get(path, follow_redirects=False).status_code == 404


@pytest.mark.slow
def test_a_full_queue_and_a_passed_deadline_say_when_to_try_again(
    serve: Callable[..., TestClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = serve("classify", limits=Limits(max_queue_tokens=50, deadline=0.5))
    assert own.post(f"/v1/{TASK}", json={"inputs": ["river"] * 20}).status_code == 413
    model = service_of(own).models["classify"]
    operation, begun, slow = model.operations[TASK], threading.Event(), threading.Event()
    run = operation.run

    def wait(many: Any) -> Any:
        begun.set()
        slow.wait(20)
        return run(many)

    monkeypatch.setattr(operation, "run", wait)
    answers: list[Any] = []
    body = {"inputs": ["river stone kettle"] * 6}
    first = threading.Thread(target=lambda: answers.append(own.post(f"/v1/{TASK}", json=body)))
    first.start()
    assert begun.wait(20)
    for route in (TASK, "tokens", "attention-maps"):  # which the same limit covers
        sent = {"inputs": ["river " * 30]} if route == TASK else {"text": "river " * 30}
        full = own.post(f"/v1/{route}", json=sent)
        assert full.status_code == 429
        assert int(full.headers["retry-after"]) >= 1
    first.join(20)
    slow.set()
    assert answers[0].status_code == 503
    assert int(answers[0].headers["retry-after"]) >= 1
    assert model.worker.admitted == 0


@pytest.mark.parametrize("route", ["tokens", "attention-maps"])
def test_looking_into_a_model_has_the_same_deadline(
    route: str, serve: Callable[..., TestClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = serve("classify", limits=Limits(deadline=0.2))
    operation, allowed = service_of(own).models["classify"].operations[route], threading.Event()
    monkeypatch.setattr(operation, "run", lambda many: allowed.wait(20))
    answer = own.post(f"/v1/{route}", json={"text": "river stone"})
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) >= 1
    allowed.set()


@pytest.mark.slow
def test_long_texts_do_not_hold_up_others(
    serve: Callable[..., TestClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = serve("classify", limits=Limits(deadline=0.5))
    operation = service_of(own).models["classify"].operations[TASK]
    allowed, prepare = threading.Event(), operation.prepare

    def slow(inputs: list[Any]) -> Any:
        if len(inputs[0]) > 100:
            assert allowed.wait(20)
        return prepare(inputs)

    monkeypatch.setattr(operation, "prepare", slow)
    long = {"inputs": ["a " * 6 * SHORT_TOKENS]}
    answers: list[Any] = []
    first = threading.Thread(target=lambda: answers.append(own.post(f"/v1/{TASK}", json=long)))
    first.start()
    assert own.post(f"/v1/{TASK}", json={"inputs": ["a"]}).status_code == 200
    first.join(20)
    assert answers[0].status_code == 503
    allowed.set()


def test_a_device_without_room_asks_to_try_again(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def embed(*_: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(Encoder, "embed", embed)
    answer = client.post(f"/v1/{TASK}", json={"model": "classify", "inputs": ["a river"]})
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "1"


def test_a_failure_is_500_and_its_reason_stays_in_the_log(
    serve: Callable[..., TestClient],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    own = serve("classify")
    operation = service_of(own).models["classify"].operations[TASK]

    def fail(many: object) -> None:
        raise RuntimeError("inner workings")

    monkeypatch.setattr(operation, "run", fail)
    answer = own.post(f"/v1/{TASK}", json=ASKED)
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "server_error"
    assert "inner workings" not in answer.text
    assert "inner workings" in caplog.text
    assert "secret" not in caplog.text
    monkeypatch.undo()
    assert own.post(f"/v1/{TASK}", json=ASKED).status_code == 200


def call(app: Any, route: str, body: bytes, leave: asyncio.Event | None) -> Any:
    """Return the statuses sent to a client that sends a body, and leaves when the event is set."""
    sent: list[int] = []
    parts = iter([{"type": "http.request", "body": body, "more_body": leave is None}])

    async def receive() -> Any:
        if (part := next(parts, None)) is None and leave is not None:
            await leave.wait()
        return part or {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.extend([message["status"]] if "status" in message else [])

    async def run() -> list[int]:
        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": f"/v1/{route}", "headers": headers}
        await app({**scope, "query_string": b"", "app": app}, receive, send)
        return sent

    return run()


def test_nothing_is_computed_for_clients_that_left(
    serve: Callable[..., TestClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = serve("classify")
    model = service_of(own).models["classify"]
    operation, allowed, batches = model.operations[TASK], threading.Event(), []
    begun, run = threading.Semaphore(0), operation.run

    def slow(many: list[Any]) -> Any:
        begun.release()
        assert allowed.wait(20)
        batches.append(len(many))
        return run(many)

    monkeypatch.setattr(operation, "run", slow)
    body = json.dumps(ASKED).encode()

    async def ask() -> list[list[int]]:
        stays, leaves, staying = asyncio.Event(), asyncio.Event(), []
        for _ in model.worker.threads:
            staying.append(asyncio.create_task(call(own.app, TASK, body, stays)))
            assert await asyncio.to_thread(begun.acquire, timeout=20)
        leaving = asyncio.create_task(call(own.app, TASK, body, leaves))
        while not model.worker.waiting:
            await asyncio.sleep(0.001)
        leaves.set()
        left = await leaving
        assert not model.worker.waiting
        allowed.set()
        return [left, *await asyncio.gather(*staying)]

    assert asyncio.run(ask()) == [[], *[[200]] * len(model.worker.threads)]
    assert batches == [1] * len(model.worker.threads)
    assert asyncio.run(call(own.app, TASK, body[:9], None)) == []  # it leaves within its body
    lines = [line for line in own.get("/metrics").text.splitlines() if 'status="499"' in line]
    assert sum(float(line.split()[1]) for line in lines if "_total" in line) == 2


def test_metrics_count_what_happened(serve: Callable[..., TestClient]) -> None:
    own = serve("classify")
    for _ in range(3):
        own.post(f"/v1/{TASK}", json=ASKED)
    own.post(f"/v1/{TASK}", json={})
    own.get("/v1/models/some-name")
    own.get("/not/there")
    found = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(own.get("/metrics").text)
        for sample in family.samples
    }
    assert found["bertkit_requests_total", f"/v1/{TASK}", "200"] == 3
    assert found["bertkit_requests_total", f"/v1/{TASK}", "422"] == 1
    assert found["bertkit_requests_total", "/v1/models/{name}", "404"] == 1
    assert found["bertkit_requests_total", "404", "other"] == 1
    assert found["bertkit_request_seconds_count", f"/v1/{TASK}"] == 4
    assert found["bertkit_inputs_total", "classify"] == 3
    assert found["bertkit_batch_requests_sum", "classify"] == 3
    assert found["bertkit_batch_tokens_sum", "classify"] > 0
    assert found["bertkit_queue_tokens", "classify"] == 0
    assert found["bertkit_queue_requests", "classify"] == 0
    assert found["bertkit_requests_in_flight",] == 1  # this one
    assert found["process_resident_memory_bytes",] > 1e6


def test_models_loaded_before_a_missing_one_are_closed(models: Path, tmp_path: Path) -> None:
    names = [f"lone={models / 'classify'}", f"missing={tmp_path}"]
    with pytest.raises(BertkitError, match="holds no model"):
        load_models(names, Limits(), Metrics(), device="cpu")
    end = time.monotonic() + 20
    while any(thread.name == "model lone" for thread in threading.enumerate()):
        assert time.monotonic() < end
        time.sleep(0.01)
