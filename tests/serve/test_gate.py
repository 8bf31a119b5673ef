"""Token, size, shutting down; and what a server notes of its requests."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

import bertkit
from bertkit.cli.serve import read_token
from bertkit.cli.serve import serve_command as verb
from bertkit.errors import BertkitError
from bertkit.serve.limits import Limits
from bertkit.serve.metrics import Metrics
from bertkit.serve.models import load_models, split_name
from bertkit.serve.server import (
    LOGGERS,
    JsonLogFormatter,
    finish_log,
    open_socket,
    socket_url,
    write_log,
)
from bertkit.serve.service import Service

ASKED = {"inputs": [{"text": "a secret text"}]}


def test_a_token_is_asked_for_where_work_is_done(serve: Callable[..., TestClient]) -> None:
    own = serve("classify", token="open-sesame")
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "open-sesame"}):
        for answer in (
            own.post("/v1/classify", json=ASKED, headers=headers),
            own.get("/v1/models", headers=headers),
            own.get("/metrics", headers=headers),
        ):
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"] == "Bearer"
            assert answer.json()["error"]["type"] == "authentication_error"
    right = {"authorization": "bearer  open-sesame"}  # the word is of any case
    assert own.post("/v1/classify", json=ASKED, headers=right).status_code == 200
    assert own.get("/metrics", headers=right).status_code == 200
    for path in ("/health", "/ready", "/docs", "/openapi.json"):
        assert own.get(path).status_code == 200
    described = own.get("/openapi.json").json()
    assert described["paths"]["/v1/classify"]["post"]["security"] == [{"token": []}]
    assert described["components"]["securitySchemes"]["token"]["scheme"] == "bearer"


def test_a_token_is_asked_for_in_a_larger_application(models: Path) -> None:
    outer = FastAPI()
    app = bertkit.serving_app(str(models / "classify"), token="open-sesame", device="cpu")
    outer.mount("/bert", app)
    with TestClient(app), TestClient(outer) as own:
        for path in ("/bert/v1/models", "/bert/metrics"):
            assert own.get(path).status_code == 401
            right = {"authorization": "Bearer open-sesame"}
            assert own.get(path, headers=right).status_code == 200
        assert own.post("/bert/v1/classify", json=ASKED).status_code == 401
        assert own.get("/bert/health").status_code == 200
    with TestClient(app, root_path="/bert") as own:
        assert own.get("/bert/v1/models").status_code == 401


def test_a_body_that_is_too_large_is_refused(serve: Callable[..., TestClient]) -> None:
    own = serve("classify", limits=Limits(max_bytes=1000))
    json_type = {"content-type": "application/json"}

    def pieces() -> Iterator[bytes]:  # without a length in the headers
        yield from [b"x" * 100] * 11

    for body in (b"x" * 1001, b"x" * 100_000, pieces()):
        answer = own.post("/v1/classify", content=body, headers=json_type)
        assert answer.status_code == 413
        assert "1,000 bytes" in answer.json()["error"]["message"]
    assert own.post("/v1/classify", json=ASKED).status_code == 200


def test_a_server_that_shuts_down_refuses_new_work(serve: Callable[..., TestClient]) -> None:
    own = serve("classify")
    serving = own.app.state.serving  # type: ignore[attr-defined]
    serving.draining = True
    answer = own.post("/v1/classify", json=ASKED)
    ready = own.get("/ready")
    health = own.get("/health")
    serving.draining = False
    assert answer.status_code == ready.status_code == 503
    assert int(answer.headers["retry-after"]) >= 1
    assert answer.headers["connection"] == "close"
    assert health.status_code == 200
    assert own.get("/ready").status_code == 200


def test_metrics_count_what_happened(serve: Callable[..., TestClient]) -> None:
    own = serve("classify")
    for _ in range(3):
        own.post("/v1/classify", json=ASKED)
    own.post("/v1/classify", json={})
    own.get("/v1/models/some-name")
    own.get("/not/there")
    found = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(own.get("/metrics").text)
        for sample in family.samples
    }
    assert found["bertkit_requests_total", "/v1/classify", "200"] == 3
    assert found["bertkit_requests_total", "/v1/classify", "422"] == 1
    assert found["bertkit_requests_total", "/v1/models/{name}", "404"] == 1
    assert found["bertkit_requests_total", "404", "other"] == 1
    assert found["bertkit_request_seconds_count", "/v1/classify"] == 4
    assert found["bertkit_inputs_total", "classify"] == 3
    assert found["bertkit_batch_requests_sum", "classify"] == 3
    assert found["bertkit_batch_tokens_sum", "classify"] > 0
    assert found["bertkit_queue_tokens", "classify"] == 0
    assert found["bertkit_queue_requests", "classify"] == 0
    assert found["bertkit_requests_in_flight",] == 1  # this one
    assert found["process_resident_memory_bytes",] > 1e6


def test_the_log_has_a_line_for_each_request_and_no_text(
    serve: Callable[..., TestClient], caplog: pytest.LogCaptureFixture
) -> None:
    own = serve("classify")
    with caplog.at_level(logging.INFO, "bertkit.serve"):
        answer = own.post("/v1/classify", json=ASKED, headers={"x-request-id": "mine-1"})
        odd = own.post("/v1/classify", json={"inputs": "secret"}, headers={"x-request-id": "a b"})
    assert answer.headers["x-request-id"] == "mine-1"
    assert odd.headers["x-request-id"] != "a b"
    lines = [
        JsonLogFormatter().format(record) for record in caplog.records if hasattr(record, "fields")
    ]
    first, second = map(json.loads, lines)
    assert {key: first[key] for key in ("event", "id", "route", "status", "model", "inputs")} == {
        "event": "request",
        "id": "mine-1",
        "route": "/v1/classify",
        "status": 200,
        "model": "classify",
        "inputs": 1,
    }
    assert first["milliseconds"] > 0
    assert (second["status"], second["method"]) == (422, "POST")
    assert not any("secret" in line for line in lines)


def test_a_failure_is_500_and_its_reason_stays_in_the_log(
    serve: Callable[..., TestClient],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    own = serve("classify")
    work = own.app.state.serving.models["classify"].operations["classify"]  # type: ignore[attr-defined]

    def fail(many: object) -> None:
        raise RuntimeError("inner workings")

    monkeypatch.setattr(work, "run", fail)
    answer = own.post("/v1/classify", json=ASKED, headers={"x-request-id": "mine"})
    assert answer.status_code == 500
    assert answer.headers["x-request-id"] == "mine"
    assert "inner workings" not in answer.text
    [line] = [
        json.loads(JsonLogFormatter().format(record))
        for record in caplog.records
        if record.exc_info
    ]
    assert line["id"] == "mine"
    assert "inner workings" in line["traceback"]
    monkeypatch.setattr(work, "run", raise_an_error_of_the_package)
    assert own.post("/v1/classify", json=ASKED).status_code == 500  # nothing to mend for a client
    monkeypatch.undo()
    assert own.post("/v1/classify", json=ASKED).status_code == 200


def raise_an_error_of_the_package(many: object) -> None:
    raise BertkitError("/srv/models/secret cannot be read")


def test_log_lines_are_json(capfd: pytest.CaptureFixture[str]) -> None:
    loggers = [logging.getLogger(name) for name in LOGGERS]
    before = [(one, one.handlers, one.propagate, one.level) for one in loggers]
    try:
        write_log()
        loggers[0].info("something", extra={"fields": {"number": 1}})
        loggers[0].info("half a pair: \ud800")
        finish_log()
        write_log(requests=False)
        loggers[0].info("not written")
        finish_log()
    finally:
        for logger, handlers, propagate, level in before:
            logger.handlers, logger.propagate = handlers, propagate
            logger.setLevel(level)
    first, second = capfd.readouterr().err.splitlines()
    assert json.loads(first)["number"] == 1
    assert json.loads(second)["event"] == "half a pair: \ud800"


def test_names_of_models(models: Path, tmp_path: Path) -> None:
    assert split_name("runs/mine/model") == ("mine", Path("runs/mine/model"))
    assert split_name("runs/mine") == ("mine", Path("runs/mine"))
    assert split_name("a=runs/mine") == ("a", Path("runs/mine"))
    assert split_name("runs/mine/model/..") == ("mine", Path("runs/mine/model/.."))
    with pytest.raises(BertkitError, match="cannot be a model's name"):
        split_name("a b=runs/mine")
    (tmp_path / "lr=3e-5" / "model").mkdir(parents=True)
    grid = tmp_path / "lr=3e-5"
    assert split_name(f"mine={grid}") == ("mine", grid)
    with pytest.raises(BertkitError, match=f"use letters, .* as in mine={grid}"):
        split_name(str(grid))
    metrics = Metrics()
    one = str(models / "tag")
    for given, message in (
        ([], "no model to serve"),
        ([one, one], "two models are called 'tag'.*tag-2="),
        ([str(tmp_path)], "holds no model"),
    ):
        with pytest.raises(BertkitError, match=message):
            load_models(given, Limits(), metrics, device="cpu")


def test_tokens_come_from_a_file_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("BERTKIT_TOKEN", raising=False)
    assert read_token(None) == ""
    file = tmp_path / "token"
    with pytest.raises(BertkitError, match="cannot be read"):
        read_token(file)
    with pytest.raises(BertkitError, match="ASCII"):
        read_token(Path("/dev/zero"))  # which never ends
    file.write_text("a" * 70_000)
    with pytest.raises(BertkitError, match="more than"):
        read_token(file)
    file.write_text("\n")
    with pytest.raises(BertkitError, match="is empty"):
        read_token(file)
    file.write_text("abc\n")
    assert read_token(file) == "abc"
    monkeypatch.setenv("BERTKIT_TOKEN", "from-there")
    assert (read_token(None), read_token(file)) == ("from-there", "abc")
    monkeypatch.setenv("BERTKIT_TOKEN", " ")  # nobody means an open server with that
    with pytest.raises(BertkitError, match="BERTKIT_TOKEN is set but blank"):
        read_token(None)
    assert read_token(file) == "abc"
    monkeypatch.setenv("BERTKIT_TOKEN", "größe")
    with pytest.raises(BertkitError, match="ASCII"):
        read_token(None)


@pytest.mark.parametrize("place", [("127.0.0.1", 70_000), ("127.0.0.1", -1), ("a..b", 0), (".", 0)])
def test_an_impossible_address_is_refused(place: tuple[str, int]) -> None:
    """A port beyond 65,535 would be another one."""
    with pytest.raises(BertkitError, match="--port"):
        open_socket(*place)


def test_an_address_that_is_taken_is_named() -> None:
    with open_socket("127.0.0.1", 0) as own:
        port = own.getsockname()[1]
        assert socket_url(own) == f"http://127.0.0.1:{port}"
        with pytest.raises(BertkitError, match=f"cannot listen at 127.0.0.1:{port}: .*--port"):
            open_socket("127.0.0.1", port)
    with pytest.raises(BertkitError, match="cannot listen"):
        open_socket("no.such.host.invalid", 80)


@pytest.mark.parametrize(("host", "warned"), [("127.0.0.1", False), ("0.0.0.0", True)])
def test_an_open_server_says_so(
    models: Path,
    host: str,
    warned: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def stop(app: object, serving: Service, listening: socket.socket) -> None:
        serving.close()
        listening.close()

    monkeypatch.delenv("BERTKIT_TOKEN", raising=False)
    monkeypatch.setattr("bertkit.serve.server.serve_until_stopped", stop)
    monkeypatch.setattr("bertkit.serve.server.write_log", lambda requests: None)
    assert verb(str(models / "classify"), host=host, port=0, device="cpu") == 0
    assert ("no token is required" in capsys.readouterr().out) == warned
    monkeypatch.setenv("BERTKIT_TOKEN", "secret")
    assert verb(str(models / "classify"), host=host, port=0, device="cpu") == 0
    assert "no token" not in capsys.readouterr().out
