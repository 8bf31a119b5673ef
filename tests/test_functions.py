"""The functions behind the commands, called from Python one after the other, as a user would."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from starlette.testclient import TestClient

import bertkit
from bertkit.checkpoints.save import save_model
from bertkit.config import read_recipe
from bertkit.model.encoder import ModelConfig
from bertkit.model.task_heads import ClassificationModel
from tests.conftest import python

SMALL = [
    *("--model.hidden-size", "16", "--model.num-hidden-layers", "1"),
    *("--model.num-attention-heads", "2", "--model.max-position-embeddings", "32"),
    *("--phases.lengths", "32", "--phases.steps", "3", "--phases.batch-sizes", "4"),
    *("--phases.max-predictions", "4", "--training.warmup-steps", "1"),
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, corpus_text: str) -> Path:
    """A run directory: a vocabulary, a store and a pre-trained model, made by functions."""
    folder = tmp_path_factory.mktemp("functions")
    text = folder / "corpus.txt"
    text.write_text(corpus_text)
    store = bertkit.store_from_text([text], folder / "run", vocabulary_size=150)
    recipe = read_recipe(bertkit.PretrainRecipe, "two-cores", SMALL)
    assert bertkit.pretrain(recipe, store, folder / "run") is None
    return folder / "run"


def test_a_store_from_text_is_made_once(run: Path) -> None:
    text: Any = [run.parent / "corpus.txt"]
    before = (run / "store" / "manifest.json").stat().st_mtime_ns
    store = bertkit.store_from_text(text, run, vocabulary_size=150)
    assert store.tokenizer.size == 150
    assert (run / "store" / "manifest.json").stat().st_mtime_ns == before
    with pytest.raises(bertkit.BertkitError, match="vocabulary_size"):
        bertkit.store_from_text(text, run, vocabulary_size=160)


def test_another_text_gets_a_vocabulary_of_its_own(corpus_text: str, tmp_path: Path) -> None:
    text, out = tmp_path / "corpus.txt", tmp_path / "run"
    text.write_text("one document")
    with pytest.raises(bertkit.BertkitError, match="blank line"):
        bertkit.store_from_text([text], out, vocabulary_size=150)
    text.write_text(corpus_text)
    with pytest.raises(bertkit.BertkitError, match="other sources"):
        bertkit.store_from_text([text], out, vocabulary_size=150)
    shutil.rmtree(out / "store")
    assert bertkit.store_from_text([text], out, vocabulary_size=150).tokenizer.size == 150


def test_a_text_edited_before_the_first_shard_gets_a_vocabulary_of_its_own(
    corpus_text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, out = tmp_path / "corpus.txt", tmp_path / "run"
    text.write_text("kangaroo jump.\n\nkangaroo jumped.\n\n" * 20)

    def stopped(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("bertkit.corpus.prepare.prepare", stopped)
        with pytest.raises(KeyboardInterrupt):
            bertkit.store_from_text([text], out, vocabulary_size=150)
    assert "kangaroo" in bertkit.Tokenizer.load(out / "tokenizer").vocabulary
    text.write_text(corpus_text)
    resumed = bertkit.store_from_text([text], out, vocabulary_size=150)
    fresh = bertkit.store_from_text([text], tmp_path / "fresh", vocabulary_size=150)
    assert resumed.tokenizer.vocabulary == fresh.tokenizer.vocabulary
    assert resumed.content_hash == fresh.content_hash


def test_a_tilde_is_the_home_folder_of_everything_that_is_written(
    corpus_text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    home.mkdir()
    elsewhere.mkdir()
    (home / "corpus.txt").write_text(corpus_text)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(elsewhere)
    tokenizer = bertkit.learn_tokenizer(["~/corpus.txt"], "~/tokenizer", 150)
    store = bertkit.prepare(["~/corpus.txt"], "~/tokenizer", "~/store")
    assert bertkit.TokenStore("~/store").content_hash == store.content_hash
    tokenizer.save("~/copy")
    bertkit.store_from_text(["~/corpus.txt"], "~/run", vocabulary_size=150)
    bertkit.pretrain(read_recipe(bertkit.PretrainRecipe, "two-cores", SMALL), "~/store", "~/run")
    assert bertkit.diagnose("~/run")
    assert bertkit.write_report("~/run") == home / "run" / "report.html"
    bertkit.extend_vocabulary("~/run", "~/larger", words=["zygote"])
    bertkit.export_model("~/run", "~/exported", "huggingface")
    written = {"tokenizer", "store", "copy", "run", "larger", "exported"}
    assert written <= {path.name for path in home.iterdir()}
    assert not [*elsewhere.iterdir()]


def test_text_that_has_changed_is_said(
    run: Path, corpus_text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, said = tmp_path / "corpus.txt", "choose another --out"
    text.write_text(corpus_text)
    options: Any = {"tokenizer": run / "tokenizer"}
    store = bertkit.store_from_text([text], tmp_path / "run", **options)
    bertkit.store_from_text([text], tmp_path / "run", **options)
    assert said not in capsys.readouterr().err
    text.write_text(f"{corpus_text} More.")
    assert (
        bertkit.store_from_text([text], tmp_path / "run", **options).content_hash
        == store.content_hash
    )
    assert said in capsys.readouterr().err
    text.unlink()  # a finished store needs it no more
    bertkit.store_from_text([text], tmp_path / "run", **options)
    assert said not in capsys.readouterr().err


def test_what_is_in_a_run(run: Path) -> None:
    (title, findings), (about, _) = bertkit.diagnose(run)
    assert title == f"run {run}"
    assert str(run / "store") in about
    assert {finding.severity for finding in findings} <= {"ok", "notice", "problem"}
    assert bertkit.model_info(run)["network"]["layers"] == 1


def test_a_tokenizer_is_learned_and_measured(run: Path, tmp_path: Path) -> None:
    text = run.parent / "corpus.txt"
    learned = bertkit.learn_tokenizer([str(text)], tmp_path / "t", 150)
    assert learned.vocabulary == bertkit.Tokenizer.load(run / "tokenizer").vocabulary
    assert bertkit.measure_vocabulary(learned, [text.read_text()]).words > 1000


def test_words_are_added(run: Path, tmp_path: Path) -> None:
    made = bertkit.extend_vocabulary(run, tmp_path / "more", words=["gearbox", "##ubricant"])
    assert made.words == ["gearbox", "##ubricant"]
    loaded = bertkit.load(tmp_path / "more")
    assert loaded.tokenizer.encode("gearbox").tokens == ["gearbox"]
    with pytest.raises(bertkit.BertkitError, match="nothing to add"):
        bertkit.extend_vocabulary(run, tmp_path / "none", words=["two words"])


def test_words_are_added_to_an_electra(run: Path, tmp_path: Path) -> None:
    tokenizer = bertkit.Tokenizer.load(run / "tokenizer")
    config = ModelConfig(
        vocab_size=tokenizer.size, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16, pooler_act="gelu",
    )  # fmt: skip
    details = {"task": "classification", "labels": ["x", "y"]}
    save_model(tmp_path / "electra", ClassificationModel(config, 2), tokenizer, details)
    bertkit.extend_vocabulary(tmp_path / "electra", tmp_path / "more", words=["gearbox"])
    with (
        safe_open(tmp_path / "electra" / "model.safetensors", "pt") as before,
        safe_open(tmp_path / "more" / "model.safetensors", "pt") as after,
    ):
        assert set(after.keys()) == set(before.keys())


def test_a_plan_without_measuring() -> None:
    corpus = bertkit.CorpusSize(tokens=1_000_000)
    made = bertkit.plan("base", corpus, machine="h100", hours=2)
    assert made.machine.device == "cuda"
    assert [estimate.title for estimate in made.answers][-1] == "2 hours"


def test_a_model_is_exported_and_served(run: Path, tmp_path: Path) -> None:
    manifest = bertkit.export_model(run, tmp_path / "out", "huggingface")
    assert manifest["check"]["outputs"]
    app = bertkit.serving_app(f"exported={tmp_path / 'out'}", token="secret")
    with TestClient(app) as client:
        assert client.get("/v1/models").status_code == 401
        client.headers["authorization"] = "Bearer secret"
        assert [one["id"] for one in client.get("/v1/models").json()["data"]] == ["exported"]
        found = client.post("/v1/fill-mask", json={"inputs": [{"text": "the [MASK]"}]})
        assert found.status_code == 200


WRONG_ARGUMENTS = """
import bertkit
for model, options in ((["run"], {}), ("run", {"hosts": "my.server"}), ("run", {"token": None})):
    try:
        bertkit.serving_app(model, **options)
    except bertkit.BertkitError as error:
        print(error)
"""


def test_an_app_with_arguments_of_the_wrong_type() -> None:
    """In a process where beartype does not check them first."""
    environment = {k: v for k, v in os.environ.items() if k != "BERTKIT_CHECK_SHAPES"}
    done = python("-c", WRONG_ARGUMENTS, env=environment, check=True)
    model, hosts, token = done.stdout.splitlines()
    assert "give each model as a path or a name" in model
    assert "hosts must be a list" in hosts
    assert "the token must be" in token


def test_paths_may_be_text_and_lists_must_be_lists(run: Path, tmp_path: Path) -> None:
    text = run.parent / "corpus.txt"
    tokenizer = bertkit.learn_tokenizer([text], str(tmp_path / "t"), 150)
    assert bertkit.prepare([text], tokenizer, str(tmp_path / "s")).documents > 1
    bertkit.clean([text], str(tmp_path / "clean.jsonl"))
    bertkit.embed_file(str(run), text, str(tmp_path / "e.npy"))
    assert bertkit.write_report(str(run)).is_file()
    for wrong in (
        lambda: bertkit.prepare(str(text), tokenizer, tmp_path / "s2"),
        lambda: bertkit.measure_vocabulary(tokenizer, "the river"),
        lambda: tokenizer.encode_batch("the river"),
    ):
        with pytest.raises(TypeError, match="in brackets"):
            wrong()
