"""Models that are read again while the server runs, and answers that no model should give."""

from __future__ import annotations

import json
import math
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from starlette.testclient import TestClient

from bertkit.checkpoints.save import save_model
from bertkit.serve.admission import Limits, Metrics
from bertkit.serve.app import make_app
from bertkit.serve.models import Service, load_models
from bertkit.serve.operations import AttentionMaps
from bertkit.tokenizer.wordpiece import Tokenizer
from tests.predict.conftest import TASKS
from tests.serve.conftest import CONFIG, NAMES

TOKEN = {"authorization": "Bearer secret"}
ASKED = {"inputs": ["a river stone"]}


@pytest.fixture
def own(models: Path, tmp_path: Path) -> Iterator[tuple[TestClient, Path]]:
    """A server of a model in a folder of its own."""
    folder = tmp_path / "live"
    shutil.copytree(models / "classify", folder)
    limits, metrics = Limits(), Metrics()
    served = load_models([str(folder)], limits, metrics, precision="fp32", device="cpu")
    app = make_app(Service(served, limits, metrics), token="secret")
    with TestClient(app, raise_server_exceptions=False, headers=TOKEN) as client:
        yield client, folder


def write_other(
    folder: Path, tokenizer: Tokenizer, task: str = "classify", **recorded: Any
) -> None:
    """Another model in the place of one."""
    made = TASKS[task]
    details = {"task": made.task_type, "labels": list(made.labels), "settings": made.settings()}
    details |= recorded
    torch.manual_seed(7)
    save_model(folder, made.build(replace(CONFIG, vocab_size=tokenizer.size)), tokenizer, details)


def probabilities(client: TestClient) -> Any:
    answer = client.post("/v1/classification", json=ASKED)
    assert answer.status_code == 200, answer.text
    return answer.json()["predictions"][0]["probabilities"]


def reload(client: TestClient) -> Any:
    return client.post("/v1/models/live/reload")


def test_a_model_changes_when_asked_and_not_before(
    own: tuple[TestClient, Path], tokenizer: Tokenizer
) -> None:
    client, folder = own
    before = probabilities(client)
    write_other(folder, tokenizer)
    assert probabilities(client) == before
    answer = reload(client)
    assert answer.status_code == 200
    assert answer.json()["id"] == "live"
    after = probabilities(client)
    assert after != before
    assert reload(client).status_code == 200  # as often as one likes
    assert probabilities(client) == after


def test_a_model_that_cannot_be_read_leaves_the_old_one(
    own: tuple[TestClient, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, folder = own
    before = probabilities(client)
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    for wrong in (whole[:-100], b"", None):
        weights.unlink()
        if wrong is not None:
            weights.write_bytes(wrong)
        answer = reload(client)
        assert answer.status_code == 409
        assert answer.json()["error"]["type"] == "conflict_error"
        assert "\n" not in answer.json()["error"]["message"]
        weights.touch()
    weights.write_bytes(whole)
    assert probabilities(client) == before
    assert client.get("/ready").status_code == 200
    threads = [one.name for one in threading.enumerate() if one.name == "model live"]
    count = len(client.app.state.service.models["live"].worker.threads)  # type: ignore[attr-defined]
    assert len(threads) == count, "nothing is left of those that failed"


def test_a_folder_that_is_gone_is_not_looked_up_on_the_hub(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relative folder such as runs/live could be the name of somebody's model there."""
    shutil.copytree(models / "classify", tmp_path / "runs" / "live")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("bertkit.checkpoints.hub.download_model", lambda name: models / "tag")
    limits, metrics = Limits(), Metrics()
    served = load_models(["runs/live"], limits, metrics, precision="fp32", device="cpu")
    app = make_app(Service(served, limits, metrics), token="secret")
    with TestClient(app, headers=TOKEN) as client:
        before = probabilities(client)
        shutil.rmtree(tmp_path / "runs")
        assert reload(client).status_code == 409
        assert probabilities(client) == before


def test_reloading_asks_for_a_token(
    own: tuple[TestClient, Path], client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    guarded, _ = own
    assert guarded.post("/v1/models/live/reload", headers={"authorization": ""}).status_code == 401
    assert guarded.post("/v1/models/other/reload").status_code == 404
    assert guarded.get("/v1/models/live/reload").status_code == 405
    assert client.post("/v1/models/classify/reload").status_code == 403  # where none is asked for


def test_the_old_model_answers_until_the_new_one_is_there(
    own: tuple[TestClient, Path], tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, folder = own
    serving: Any = client.app.state.service  # type: ignore[attr-defined]
    before, old = probabilities(client), serving.models["live"]
    write_other(folder, tokenizer)
    loaded, allowed = threading.Event(), threading.Event()

    def slow() -> Any:
        new = load()
        loaded.set()
        assert allowed.wait(30)
        return new

    load = old.load_again
    serving.models["live"] = replace(old, load_again=slow)
    found: list[Any] = []
    reloading = threading.Thread(target=lambda: found.append(reload(client)))
    reloading.start()
    assert loaded.wait(30)
    assert probabilities(client) == before
    assert reload(client).status_code == 409  # one at a time
    # a request that the old model has begun is answered by it, whatever comes in the meantime
    begun, go_on, run = threading.Event(), threading.Event(), old.operations["classification"].run

    def waiting(many: Any) -> Any:
        begun.set()
        assert go_on.wait(30)
        return run(many)

    monkeypatch.setattr(old.operations["classification"], "run", waiting)
    late: list[Any] = []
    asking = threading.Thread(target=lambda: late.append(probabilities(client)))
    asking.start()
    assert begun.wait(30)
    allowed.set()
    reloading.join(30)
    assert found[0].status_code == 200
    assert probabilities(client) != before
    gauges = client.get("/metrics").text  # of the new model's queue, not of the old one's
    assert 'bertkit_queue_tokens{model="live"} 0.0' in gauges
    go_on.set()
    asking.join(30)
    assert late == [before]
    end = time.monotonic() + 30
    while old.worker.alive and time.monotonic() < end:
        time.sleep(0.01)
    assert not any(thread.is_alive() for thread in old.worker.threads)


@pytest.fixture
def changed(client: TestClient) -> Iterator[Callable[..., None]]:
    """Changes fields of a served model for a test."""
    serving: Any = client.app.state.service  # type: ignore[attr-defined]
    before = dict(serving.models)

    def change(name: str, **fields: Any) -> None:
        serving.models[name] = replace(serving.models[name], **fields)

    yield change
    serving.models.update(before)


def test_half_a_surrogate_pair_in_a_label_harms_no_other_model(
    client: TestClient, changed: Callable[..., None]
) -> None:
    changed("classify", details={"labels": ["x\ud800", "fine"]})
    answer = client.get("/v1/models")
    assert answer.status_code == 200
    cards = {card["id"]: card for card in json.loads(answer.content)["data"]}
    assert sorted(cards) == sorted(NAMES)
    assert cards["classify"]["labels"] == ["x\ud800", "fine"]
    assert client.get("/v1/models/classify").json()["labels"] == ["x\ud800", "fine"]


INPUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "classify": ("classification", {"inputs": ["a"]}),
    "multi-label": ("multi-label-classification", {"inputs": ["a"]}),
    "regress": ("regression", {"inputs": ["a"]}),
    "choose": ("multiple-choice", {"inputs": [["a", ["b", "c"]]]}),
    "tag": ("token-classification", {"inputs": ["a river"]}),
    "answer": ("question-answering", {"inputs": [["a", "river"]]}),
    "pretrained": ("fill-mask", {"inputs": [{"text": "a [MASK]"}]}),
    "encoder": ("embeddings", {"input": "a", "encoding_format": "float"}),
}


@pytest.mark.parametrize("name", INPUTS)
def test_numbers_that_are_not_finite_are_never_sent(models: Path, name: str) -> None:
    """Weights that became NaN behind the loader's back: an error, and no answer of 200."""
    limits, metrics = Limits(), Metrics()
    served = load_models([str(models / name)], limits, metrics, precision="fp32", device="cpu")
    [model] = served.values()
    with TestClient(
        make_app(Service(served, limits, metrics)), raise_server_exceptions=False
    ) as client:
        for work in model.operations.values():
            for module in modules_of(work):
                with torch.no_grad():
                    for parameter in [*module.parameters(), *module.buffers()]:
                        if parameter.is_floating_point():
                            parameter.fill_(math.nan)
        route, body = INPUTS[name]
        asked = [(route, body), ("attention-maps", {"text": "a"})]
        if name == "pretrained":
            asked.append(("next-sentence", {"inputs": [{"text": "a", "following": "b"}]}))
        if name == "encoder":
            asked.append(("embeddings", {"input": "a", "encoding_format": "base64"}))
        for path, given in asked:
            answer = client.post(f"/v1/{path}", json=given)
            assert answer.status_code == 500, (path, answer.text)
            error = json.loads(answer.content, parse_constant=refuse)["error"]
            assert error["type"] == "server_error"


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


def modules_of(work: Any) -> list[torch.nn.Module]:
    """All networks behind a work."""
    found, seen, open_ = [], set[int](), [work]
    if isinstance(work, AttentionMaps):
        found.append(work.encoder)
    while open_:
        one = open_.pop()
        if id(one) in seen or isinstance(one, torch.Tensor | np.ndarray | str | type):
            continue
        seen.add(id(one))
        if isinstance(one, torch.nn.Module):
            found.append(one)
        elif isinstance(one, list | tuple):
            open_ += one
        elif hasattr(one, "__dict__"):
            open_ += vars(one).values()
    return found
