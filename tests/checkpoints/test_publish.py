"""Publishing: a model goes to a server that speaks the hub's protocol, and comes back from it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard

from bertkit.checkpoints.publish import CARD, published_files, published_folder
from bertkit.checkpoints.save import save_model
from bertkit.errors import BertkitError
from bertkit.model.outputs import ClassificationModel
from bertkit.tokenizer.wordpiece import Tokenizer
from tests.conftest import tiny_config
from tests.hub_server import LARGE, Hub, Repository, forked_answers, running_hub, without_hub

ANSWER = """
from pathlib import Path
import bertkit
from bertkit.checkpoints.publish import push
from bertkit.checkpoints.pretrained import read_pretrained

def answer(model, name, options, read):
    done = push(model, name, **options)
    found = done._asdict()
    if read:
        start = read_pretrained(Path(f"{name}@{done.commit}"))
        found |= {"origin": start.origin, "label": bertkit.load(name)("river stone").label}
    return found
"""

Push = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def run(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with all that must not leave the machine."""
    torch.manual_seed(0)
    config = tiny_config(tokenizer, num_hidden_layers=1, max_position_embeddings=64)
    folder = tmp_path_factory.mktemp("runs") / "topics"
    details = {"task": "classification", "labels": ["dry", "wet"], "settings": {"max_length": 64}}
    save_model(folder / "model", ClassificationModel(config, 2), tokenizer, details)
    for name in ("journal.jsonl", "recipe.json", "checkpoints/step-00000001/optimizer.safetensors"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("private")
    for name in ("train.csv", "optimizer.safetensors", "pytorch_model.bin", ".env"):
        (folder / "model" / name).write_text("private")
    return folder


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with running_hub() as found:
        yield found


@pytest.fixture(scope="module")
def pushed(hub: Hub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Push]:
    """Push in another process; `environ` changes its environment."""
    home = str(tmp_path_factory.mktemp("home"))
    with forked_answers(ANSWER) as answers:

        def push(
            model: Path,
            name: str,
            *,
            environ: dict[str, str] | None = None,
            read: bool = False,
            token: str = hub.token,
            **options: Any,
        ) -> dict[str, Any]:
            settings = {"HF_ENDPOINT": hub.url, "HF_HOME": home, "HF_TOKEN": token}
            return answers({**settings, **(environ or {})}, str(model), name, options, read)

        yield push


@pytest.mark.slow
def test_a_pushed_model_comes_back(hub: Hub, pushed: Push, run: Path) -> None:
    found = pushed(run, "org/topics", read=True)
    repository = hub.repositories["org/topics"]
    assert found["url"] == f"{hub.url}/org/topics"
    assert found["commit"] == repository.revisions["main"]
    assert found["origin"] == f"org/topics@{found['commit']}"
    assert found["label"] in {"dry", "wet"}
    assert len(repository.messages) == 1
    assert not repository.private
    assert set(found["files"]) == set(repository.files)
    for name, content in repository.files.items():
        if name != CARD:
            assert content == (run / "model" / name).read_bytes()
    assert len(repository.files["model.safetensors"]) > LARGE, "an LFS file"
    assert not [name for name, content in repository.files.items() if content == b"private"]
    card = ModelCard(repository.files[CARD].decode())
    assert 'load("org/topics")' in card.text
    assert not (run / "model" / CARD).exists(), "the folder is not changed"


@pytest.mark.slow
def test_files_of_an_earlier_model_are_removed(hub: Hub, pushed: Push, run: Path) -> None:
    earlier = {"modules.json": b"[]", "1_Pooling/config.json": b"{}", "model.onnx": b"graph"}
    others = {"LICENSE": b"mine", "notes.txt": b"mine", "data/a.csv": b"mine"}
    hub.repositories["org/again"] = Repository({**earlier, **others}, {"main": "1" * 40})
    found = pushed(run, "org/again")
    files = hub.repositories["org/again"].files
    assert set(files) == {*found["files"], *others}


@pytest.mark.slow
def test_a_commit_of_somebody_else_is_not_mixed_with_ours(
    hub: Hub, pushed: Push, run: Path
) -> None:
    assert pushed(run, "org/shared")["commit"]
    hub.meanwhile = b"theirs"
    assert pushed(run, "org/shared")["code"] == "hub"
    assert len(hub.repositories["org/shared"].messages) == 1
    assert pushed(run, "org/shared")["commit"]


@pytest.mark.slow
def test_a_private_model(hub: Hub, pushed: Push, run: Path) -> None:
    first = pushed(run / "model", "org/secret", private=True)
    repository = hub.repositories["org/secret"]
    assert repository.private
    assert repository.revisions == {"main": first["commit"]}
    hub.repositories["org/public"] = Repository({}, {"main": "0" * 40})
    assert pushed(run, "org/public", private=True)["code"] == "hub-public"
    assert hub.repositories["org/public"].files == {}, "nothing was shown to everybody"


@pytest.mark.slow
def test_what_the_hub_does_not_take(hub: Hub, pushed: Push, run: Path) -> None:
    for token in (hub.reader, "hf_wrong"):
        assert pushed(run, "org/no", token=token)["code"] == "hub-forbidden"
    asked = len(hub.asked)
    assert pushed(run, "org/no", token="")["code"] == "hub-login"
    assert len(hub.asked) == asked, "the hub is not asked"
    for changes in ({"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}):
        assert pushed(run, "org/no", environ=changes)["code"] == "hub"
    assert hub.repositories.get("org/no", Repository({})).files == {}


def test_what_is_refused_before_the_hub_is_asked(run: Path, tmp_path: Path) -> None:
    from bertkit.checkpoints.publish import push

    (tmp_path / "config.json").write_text("{}")
    for model, name, options, said in (
        (run, "topics", {}, "ORG/NAME"),
        (run, "org/na me", {}, "ORG/NAME"),
        (run / "absent", "org/topics", {}, "no model"),
        (tmp_path, "org/topics", {}, "no model"),
    ):
        with pytest.raises(BertkitError, match=said):
            push(model, name, **options)


def test_the_files_of_a_model(run: Path, tmp_path: Path) -> None:
    assert published_folder(run) == run / "model" == published_folder(run / "model")
    part = "model-00001-of-00001.safetensors"
    known = ("1_Pooling/config.json", "2_Dense/model.safetensors")
    for name in (*known, "x/config.json", "a/b/c.png", part):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    assert published_files(tmp_path) == ["1_Pooling/config.json", "2_Dense/model.safetensors"]


def test_a_link_to_a_file_of_another_folder_stays_here(run: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(run / "model", model)
    assert "config.json" in published_files(model)
    (tmp_path / "secret").write_text("private")
    (model / "config.json").unlink()
    (model / "config.json").symlink_to(tmp_path / "secret")
    assert "config.json" not in published_files(model)


@pytest.mark.slow
def test_the_command_prints_the_page_and_the_commit(hub: Hub, run: Path, tmp_path: Path) -> None:
    settings = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), "HF_TOKEN": hub.token}
    command = [sys.executable, "-m", "bertkit", "push", str(run), "org/command"]
    environment = {**without_hub(), **settings}
    done = subprocess.run(command, check=True, env=environment, capture_output=True, text=True)
    commit = hub.repositories["org/command"].revisions["main"]
    assert done.stdout.split() == [f"{hub.url}/org/command", commit]
    assert "model.safetensors" in done.stderr
