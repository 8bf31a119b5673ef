"""Models by their names on the hub, against a server that speaks its protocol."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bertkit.checkpoints.hub import HubName, parse_hub_name
from bertkit.checkpoints.pretrained import hub_commit
from bertkit.checkpoints.save import save_model
from bertkit.errors import BertkitError
from bertkit.model.heads import PretrainingModel
from bertkit.tokenizer.wordpiece import Tokenizer
from tests.conftest import tiny_config
from tests.hub_server import Hub, Repository, forked_answers, running_hub

ANSWER = """
from pathlib import Path
from bertkit.checkpoints.pretrained import hub_commit, read_pretrained, model_folder

def answer(name):
    start = read_pretrained(Path(name))
    folder = model_folder(start.path)
    names = sorted(path.name for path in folder.iterdir())
    return {"digest": start.digest, "files": names, "commit": hub_commit(folder)}
"""

Ask = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def model(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a model directory."""
    torch.manual_seed(0)
    config = tiny_config(tokenizer, num_hidden_layers=1, max_position_embeddings=64)
    folder = tmp_path_factory.mktemp("hub") / "model"
    save_model(folder, PretrainingModel(config), tokenizer, {"task": "pretraining"})
    (folder / "README.md").write_text("# A model")
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with running_hub() as found:
        yield found


@pytest.fixture(scope="module")
def ask(hub: Hub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ask]:
    """Read a model by its name, in another process: {"digest": ...}, or {"code": ...}."""
    settings = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path_factory.mktemp("home"))}
    with forked_answers(ANSWER) as answers:
        yield lambda name, **environment: answers({**settings, **environment}, name)


def test_names_of_the_hub() -> None:
    assert parse_hub_name("org/name") == HubName("org/name")
    assert parse_hub_name("hf:org/name@v1.0") == HubName("org/name", "v1.0")
    assert parse_hub_name("hf:org/name@refs/pr/1") == HubName("org/name", "refs/pr/1")
    assert parse_hub_name("bert-base-uncased") == HubName("bert-base-uncased")
    for local in ("/a/b", "./a", "../a/b", "~/a", "a/b/c", "a b", ""):
        assert parse_hub_name(local) is None
    with pytest.raises(BertkitError, match="not a hub name"):
        parse_hub_name("hf:a/b/c")
    commit = "0123456789" * 4
    folder = Path(f"/cache/hub/models--org--a--b/snapshots/{commit}")
    assert hub_commit(folder) == f"org/a--b@{commit}"
    assert hub_commit(Path("/runs/model")) == ""


@pytest.mark.slow
def test_download_cache_and_offline(hub: Hub, ask: Ask, model: dict[str, bytes]) -> None:
    unwanted = {"pytorch_model.bin": b"pickle", "onnx/model.onnx": b"graph", "flax.msgpack": b"f"}
    hub.repositories = {"org/bert": Repository({**model, **unwanted}), "short": Repository(model)}
    found = ask("org/bert")
    assert found["commit"] == f"org/bert@{'a' * 40}"
    assert set(found["files"]) <= set(model)
    assert not [line for line in hub.asked if "pytorch_model" in line or "onnx" in line]
    assert ask("hf:short")["digest"] == found["digest"]
    assert ask("org/bert@main")["digest"] == found["digest"]
    before = len(hub.asked)
    offline = ask("org/bert", HF_HUB_OFFLINE="1")
    assert offline == found
    assert len(hub.asked) == before
    missing = ask("org/other", HF_HUB_OFFLINE="1")
    assert missing["code"] == "hub-offline"
    assert "hf download org/other --local-dir other" in missing["message"]
    assert ask("org/bert", HF_ENDPOINT="http://127.0.0.1:9")["digest"] == found["digest"]


@pytest.mark.slow
def test_a_part_of_a_model_is_not_taken_for_all_of_it(
    hub: Hub, ask: Ask, model: dict[str, bytes], tmp_path: Path
) -> None:
    hub.repositories, home = {"org/part": Repository(model)}, {"HF_HOME": str(tmp_path)}
    found = ask("org/part", **home)
    for name in ("README.md", "bertkit.json"):  # as if the download had ended before it
        for path in tmp_path.rglob(f"snapshots/*/{name}"):
            path.unlink()
        part = ask("org/part", HF_HUB_OFFLINE="1", **home)
        assert part.get("digest") == (found["digest"] if name == "README.md" else None)
    assert part["code"] == "hub-offline"


@pytest.mark.slow
def test_revisions(hub: Hub, ask: Ask, model: dict[str, bytes]) -> None:
    hub.repositories = {"org/two": Repository(model, {"main": "b" * 40, "v1": "c" * 40})}
    assert ask("org/two@v1")["commit"] == f"org/two@{'c' * 40}"
    assert ask(f"org/two@{'c' * 40}")["commit"] == f"org/two@{'c' * 40}"
    assert ask("org/two")["commit"] == f"org/two@{'b' * 40}"
    assert ask("org/two@v2")["code"] == "hub-revision"


@pytest.mark.slow
def test_what_the_hub_refuses(hub: Hub, ask: Ask, model: dict[str, bytes]) -> None:
    hub.repositories = {
        "org/gated": Repository(model, gated=True),
        "org/private": Repository(model, private=True),
        "org/pickle": Repository({"config.json": model["config.json"], "pytorch_model.bin": b""}),
        "org/poisoned": Repository({**model, "config.json": b'{"model_type": "bert", "x": [[['}),
        "org/gpt2": Repository({**model, "config.json": b'{"model_type": "gpt2"}'}),
        "org/outside": Repository({**model, "../../outside.json": b"{}"}),
    }
    gated = ask("org/gated")
    assert gated["code"] == "hub-gated"
    assert "org/gated" in gated["message"]
    assert ask("org/private")["code"] == ask("org/absent")["code"] == "hub-not-found"
    assert ask("org/private", HF_TOKEN=hub.token)["commit"]
    assert ask("org/gated", HF_TOKEN=hub.token)["commit"]
    assert ask("org/pickle")["code"] == "hub-safetensors"
    outside = ask("org/outside")
    assert (outside["code"], "outside.json" in outside["message"]) == ("hub", True)
    for name in ("org/poisoned", "org/gpt2"):
        assert "config.json" in ask(name)["message"]


@pytest.mark.slow
def test_a_download_that_breaks_is_never_taken_for_whole(
    hub: Hub, ask: Ask, model: dict[str, bytes]
) -> None:
    hub.repositories = {"org/big": Repository(model)}
    hub.break_after = 5000
    found = ask("org/big")
    if "code" in found:  # the library may try again by itself
        assert found["code"] in {"hub", "hub-cache", "hub-offline"}
        found = ask("org/big")
    assert hub.break_after == 0, "it broke"
    hub.repositories = {"org/whole": Repository(model)}
    assert ask("org/whole")["digest"] == found["digest"]


@pytest.mark.slow
def test_a_cache_that_cannot_be_written(hub: Hub, ask: Ask, model: dict[str, bytes]) -> None:
    hub.repositories = {"org/bert": Repository(model)}
    found = ask("org/bert", HF_HOME="/dev/null/cache")
    assert found["code"] == "hub-cache"
    assert "HF_HOME" in found["message"]
