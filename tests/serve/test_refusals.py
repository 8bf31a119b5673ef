"""What is refused, with which status, and how the message names what to change."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from starlette.testclient import TestClient

from bertkit.errors import BertkitError
from bertkit.model.encoder import Encoder
from bertkit.serve import models
from bertkit.serve.app import invalid_body
from bertkit.serve.limits import Limits
from bertkit.serve.metrics import Metrics
from tests.serve.test_routes import LONG, post

REFUSED: dict[str, tuple[str, Any, int, str | None]] = {
    "no JSON": ("classify", b'{"inputs": [', 400, None),
    "too deep": ("classify", b"[" * 100_000, 400, None),
    "a list": ("classify", b"[]", 422, None),
    "no inputs": ("classify", {"model": "classify"}, 422, "inputs"),
    "empty": ("classify", {"model": "classify", "inputs": []}, 422, "inputs"),
    "too many": ("classify", {"inputs": [{"text": "a"}] * 2049}, 422, "inputs"),
    "number": ("classify", {"inputs": [{"text": "a"}, {"text": 5}]}, 422, "inputs.1.text"),
    "unknown field": ("classify", {"inputs": [{"text": "", "txet": ""}]}, 422, "inputs.0.txet"),
    "half a pair": ("regress", b'{"inputs": [{"text": "\\ud800"}]}', 422, "inputs.0.text"),
    "odd field": ("regress", b'{"inputs": [{"text": "", "\\ud800": 1}]}', 422, "inputs.0"),
    "which": ("classify", {"inputs": [{"text": "a"}]}, 422, "model"),
    "nobody": ("classify", {"model": "clasify", "inputs": [{"text": "a"}]}, 404, "model"),
    "cannot": ("regress", {"model": "tag", "inputs": [{"text": "a"}]}, 422, "model"),
    "no choice": ("choose", {"inputs": [{"text": "", "choices": []}]}, 422, "inputs.0.choices"),
    "neither": ("tag", {"model": "tag", "inputs": [{}]}, 422, "inputs.0"),
    "both": ("tag", {"model": "tag", "inputs": [{"text": "a", "words": ["a"]}]}, 422, "inputs.0"),
    "blank": ("answer", {"inputs": [{"question": " ", "context": "a"}]}, 422, "inputs.0.question"),
    "odd blank": (
        *("answer", {"inputs": [{"question": "a", "context": "\x1c"}]}),
        *(422, "inputs.0.context"),
    ),
    "no mask": ("fill-mask", {"inputs": [{"text": "a"}]}, 422, "inputs.0.text"),
    "top": ("fill-mask", {"inputs": [{"text": "[MASK]", "top": 500}]}, 422, "inputs.0.top"),
    "no token": (
        *("next-sentence", {"inputs": [{"text": "a", "following": "\u200b"}]}),
        *(422, "inputs.0.following"),
    ),
    "id": ("embeddings", {"model": "encoder", "input": [[1], [111]]}, 422, "input.1"),
    "dimensions": (
        *("embeddings", {"model": "encoder", "input": "a", "dimensions": 8}),
        *(422, "dimensions"),
    ),
    "mixed": ("embeddings", {"model": "encoder", "input": ["a", 1]}, 422, "input"),
    "long maps": ("attention-maps", {"model": "tag", "text": LONG}, 422, "text"),
}


def test_a_device_without_room_asks_to_come_again(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def embed(*_: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(Encoder, "embed", embed)
    sent = {"model": "classify", "inputs": [{"text": "a river"}]}
    answer = client.post("/v1/classify", json=sent)
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "1"
    assert "memory" in answer.json()["error"]["message"]


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_names_the_field(client: TestClient, name: str) -> None:
    route, body, status, param = REFUSED[name]
    sent = {"content": body} if isinstance(body, bytes) else {"json": body}
    headers = {"content-type": "application/json"}
    answer = client.post(f"/v1/{route}", headers=headers, **sent)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, param), error
    assert "\n" not in error["message"]
    assert error["message"].startswith(param or "")


def test_a_body_must_be_marked_as_json(client: TestClient) -> None:
    """curl -d marks it as a form."""
    for headers in ({"content-type": "application/x-www-form-urlencoded"}, {}):
        answer = client.post("/v1/classify", content=b'{"inputs": []}', headers=headers)
        assert answer.status_code == 422
        assert "send content-type: application/json" in answer.json()["error"]["message"]


def test_other_methods_and_paths(client: TestClient) -> None:
    for answer, status in ((client.get("/v1/classify"), 405), (client.post("/v2"), 404)):
        assert answer.status_code == status
        assert answer.json()["error"]["type"]
    assert client.put("/v1/classify").headers["allow"] == "POST"
    assert client.get("/v1/models/nobody").status_code == 404


def test_overload_is_answered_with_429(serve: Callable[..., TestClient]) -> None:
    own = serve("classify", limits=Limits(max_queue_tokens=50))
    assert own.post("/v1/classify", json={"inputs": [{"text": "river"}]}).status_code == 200
    answer = own.post("/v1/classify", json={"inputs": [{"text": "river"}] * 20})
    assert answer.status_code == 413
    worker = own.app.state.serving.models["classify"].worker  # type: ignore[attr-defined]
    worker.tokens = 50  # as if so many waited
    answer = own.post("/v1/classify", json={"inputs": [{"text": "river"}]})
    worker.tokens = 0
    assert answer.status_code == 429
    assert int(answer.headers["retry-after"]) >= 1


def test_a_deadline_is_answered_with_503(
    serve: Callable[..., TestClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = serve("classify", limits=Limits(deadline=0.05))
    work = own.app.state.serving.models["classify"].operations["classify"]  # type: ignore[attr-defined]
    slow = threading.Event()
    run = work.run
    monkeypatch.setattr(work, "run", lambda many: slow.wait(20) and run(many))
    answer = own.post("/v1/classify", json={"inputs": [{"text": "river"}]})
    slow.set()
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) >= 1
    assert "0.05 s" in answer.json()["error"]["message"]


def test_maps_of_large_models_are_for_short_texts(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bertkit.serve.attention.MAX_WEIGHTS", 4 * 9**2)
    asked = {"model": "tag", "text": "a " * 7}
    assert len(post(client, "attention-maps", **asked)["tokens"]) == 9
    answer = client.post("/v1/attention-maps", json={**asked, "pair": "a"})
    assert answer.status_code == 422
    assert "11 tokens" in answer.json()["error"]["message"]
    assert "up to 9;" in answer.json()["error"]["message"]


def test_a_field_that_is_called_like_a_type_is_named() -> None:
    for place in (("str",), ("inputs", 0, "int")):
        first = {"type": "extra_forbidden", "loc": ("body", *place), "msg": "not permitted"}
        error = invalid_body(first, "application/json")
        assert error.param == ".".join(map(str, place))


def test_models_loaded_before_one_that_is_missing_are_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closed: list[float] = []

    def load(name: str, *_: object) -> Any:
        if name == "missing":
            raise BertkitError("no such model")
        return SimpleNamespace(worker=SimpleNamespace(close=closed.append))

    monkeypatch.setattr(models, "load_served_model", load)
    with pytest.raises(BertkitError, match="no such model"):
        models.load_models(["a=x", "b=y", "missing=z"], Limits(), Metrics())
    assert closed == [0, 0]
