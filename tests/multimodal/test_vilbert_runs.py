"""ViLBERT from end to end: pre-training, tuning, retrieval, files, the server, and refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from starlette.testclient import TestClient

import bertkit
from bertkit.checkpoints.save import save_model
from bertkit.datasets.columns import ChoiceColumns, NumberColumns, TextColumns
from bertkit.datasets.examples import ChoiceExample
from bertkit.errors import BertkitError
from bertkit.finetuning.settings import FinetuneSettings, Grid, TrainingSettings
from bertkit.model.heads import PretrainingModel
from bertkit.serve.app import serving_app
from bertkit.tasks.multiple_choice import MultipleChoice
from bertkit.tokenizer.wordpiece import Tokenizer
from tests.conftest import WORDS, run, tiny_config
from tests.export.test_card import run_snippets

ONE_EPOCH = FinetuneSettings(grid=Grid(batch_size=(8,), epochs=(1,)), device="cpu")
COLUMNS = TextColumns(image_column="image", image_boxes=True, image_network="vilbert")
NAMES = WORDS[:6]


@pytest.fixture(scope="module")
def bert(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pre-trained BERT with random weights."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("bert") / "model"
    config = tiny_config(tokenizer, initializer_range=0.1)
    save_model(folder, PretrainingModel(config), tokenizer, {"task": "pretraining"})
    return folder


def scenes(count: int = 60) -> list[dict[str, Any]]:
    """Two of six things with a place each, and a text that names both."""
    rng, found = np.random.default_rng(0), []
    for _ in range(count):
        things = rng.choice(len(NAMES), 2, replace=False)
        features = np.eye(len(NAMES))[things] + 0.1 * rng.normal(size=(2, len(NAMES)))
        boxes = np.array([[0, 0, 0.5, 1], [0.5, 0, 1, 1]])
        image = np.concatenate([features, boxes], axis=1).astype(np.float32)
        text = " ".join(NAMES[thing] for thing in things)
        found.append({"text": text, "image": image.tolist(), "label": NAMES[things[0]]})
    return found


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scenes as captions without labels, beside a file of features."""
    folder = tmp_path_factory.mktemp("files")
    rows = scenes()
    np.save(folder / "f.npy", np.array([row["image"] for row in rows], np.float32))
    lines = [f"{row['text']},{number}" for number, row in enumerate(rows)]
    (folder / "captions.csv").write_text("text,key\n" + "\n".join(lines) + "\n")
    return folder


TUNE = ("finetune", "classification", "--device", "cpu", "--batch-size", 8, "--learning-rate", 2e-3)


def on_captions(files: Path) -> tuple[object, ...]:
    """The flags that name the captions and their features."""
    data = ("--train", files / "captions.csv", "--dev", files / "captions.csv")
    return *data, "--image-column", "key", "--image-features", files / "f.npy", "--image-boxes"


@pytest.fixture(scope="module")
def pretrained(bert: Path, files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ViLBERT that was pre-trained on the captions by the command line."""
    out = tmp_path_factory.mktemp("runs") / "run"
    network = ("--image-network", "vilbert", "--co-layers", 0, 1, "--image-task", "pretraining")
    run(*TUNE, "--model", bert, "--out", out, *on_captions(files), *network, "--epochs", 20)
    return out


def code_of(call: Callable[[], Any]) -> str:
    with pytest.raises(BertkitError) as found:
        call()
    return found.value.code


@pytest.mark.slow
def test_pretraining_and_retrieval_tuning_learn(
    pretrained: Path, files: Path, tmp_path: Path
) -> None:
    [journal] = (pretrained / "runs").glob("*/journal.jsonl")
    steps = [json.loads(line) for line in journal.read_text().splitlines()]
    steps = [step for step in steps if step["kind"] == "step"]
    assert steps[-1]["mlm_accuracy"] > 0.4  # the text alone leaves five of the six names
    assert steps[-1]["region_loss"] < 0.8 * steps[0]["region_loss"]

    out, file, features = tmp_path / "run", str(files / "captions.csv"), files / "f.npy"
    flags = ("--image-task", "alignment", "--epochs", 15)
    run(*TUNE, "--model", pretrained, "--out", out, *on_captions(files), *flags)
    columns = {"image_features": str(features)}
    found = bertkit.evaluate(out, file, columns=columns, device="cpu")
    assert found.items.inputs == 120
    assert found.scores["accuracy"] > 0.8

    run(
        *("evaluate", "retrieval", out, file, "--image-features", features),
        *("--candidates", 20, "--out", tmp_path / "found", "--device", "cpu"),
    )
    record = json.loads((tmp_path / "found/retrieval.json").read_text())
    assert (record["texts"], record["images"], record["chance"]["5"]) == (60, 60, 0.25)
    assert record["image_recall"]["5"] > 0.6
    assert record["text_recall"]["5"] > 0.6
    assert len((tmp_path / "found/retrieval.jsonl").read_text().splitlines()) == 60


@pytest.mark.slow
def test_retrieval_ranks_by_the_scores_of_single_pairs(pretrained: Path) -> None:
    rows = scenes(7)
    rows.append({"text": "a long " * 20, "image": rows[0]["image"]})  # another text of an image
    found = bertkit.evaluate_retrieval(
        pretrained, rows, columns={"image_column": "image"}, device="cpu", precision="fp32"
    )
    assert (found.images, len(found.ranks), found.chance[5]) == (7, 8, 5 / 7)
    predictor = bertkit.load(pretrained, device="cpu", precision="fp32")
    for number, row in enumerate(rows):
        pairs = predictor([(row["text"], other["image"]) for other in rows[:7]])
        odds = [pair.probabilities["aligned"] for pair in pairs]
        own = number % 7
        assert found.ranks[number].rank == sum(one >= odds[own] for one in odds)
    grouped = bertkit.evaluate_retrieval(
        pretrained, rows, columns={"image_column": "image"}, candidates=4, device="cpu"
    )
    assert (grouped.images, grouped.chance[1]) == (8, 0.25)
    retrieve = bertkit.evaluate_retrieval
    assert code_of(lambda: retrieve(pretrained, rows, candidates=1)) == "number"
    assert code_of(lambda: retrieve(pretrained, [{"text": "a"}])) == "column"


@pytest.mark.slow
def test_a_tuned_model_keeps_the_streams(pretrained: Path, tmp_path: Path) -> None:
    rows = scenes(40)
    for row in rows:
        row["text"] = "the"  # the label is what stands on the left of the image
    settings = replace(ONE_EPOCH, grid=Grid(batch_size=(8,), learning_rate=(2e-3,), epochs=(25,)))
    columns = replace(COLUMNS, image_network="")
    done = bertkit.finetune(
        *("classification", pretrained, tmp_path / "run"),
        train=rows,
        dev=rows,
        columns=columns,
        settings=settings,
    )
    assert done.scores["dev"]["accuracy"] > 0.9
    details = json.loads((tmp_path / "run/model/bertkit.json").read_text())
    assert (details["settings"]["network"], details["settings"]["co_layers"]) == ("vilbert", [0, 1])
    predictor = bertkit.load(tmp_path / "run", device="cpu")
    found = predictor([{"text": row["text"], "image": row["image"]} for row in rows])
    assert sum(one.label == row["label"] for one, row in zip(found, rows, strict=True)) > 36
    body = {"inputs": [{"text": "the", "image": rows[0]["image"]}]}
    with TestClient(serving_app(str(tmp_path / "run"), device="cpu")) as client:
        answer = client.post("/v1/classify", json=body)
        assert answer.json()["predictions"][0]["label"] == found[0].label
        body["inputs"][0]["image"] = [[0.0] * 9 + [2.0]]
        assert client.post("/v1/classify", json=body).status_code == 422
    assert code_of(lambda: bertkit.evaluate_retrieval(tmp_path / "run", rows)) == "image-task"


@pytest.mark.slow
def test_choices_about_an_image(
    bert: Path, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        {**row, "text": "the", "choices": NAMES[:3], "label": NAMES.index(row["label"])}
        for row in scenes(150)
        if row["label"] in NAMES[:3]
    ]
    columns = ChoiceColumns(
        choices=("choices",),
        first_choice=0,
        **{name: getattr(COLUMNS, name) for name in ("image_column", "image_boxes")},
        image_network="vilbert",
        co_layers=(0, 1),
    )
    grid = Grid(batch_size=(8,), learning_rate=(2e-3,), epochs=(12,))
    given = {"train": rows, "dev": rows, "settings": replace(ONE_EPOCH, grid=grid)}
    out = tmp_path / "run"
    done = bertkit.finetune("multiple-choice", bert, out, columns=columns, **given)
    assert done.scores["dev"]["accuracy"] > 0.8  # by chance a third
    assert bertkit.evaluate(out, rows, device="cpu").scores == done.scores["dev"]
    choose = bertkit.load(out, device="cpu", precision="fp32")
    found = choose([{name: row[name] for name in ("text", "choices", "image")} for row in rows])
    alone = choose("the", NAMES[:3], rows[0]["image"])
    assert alone.choice == found[0].choice
    np.testing.assert_allclose(alone.probabilities, found[0].probabilities, atol=1e-5)
    swapped = choose([("the", NAMES[2::-1], rows[0]["image"])])[0]
    np.testing.assert_allclose(swapped.probabilities[::-1], alone.probabilities, atol=1e-5)
    assert code_of(lambda: choose("the", NAMES[:3])) == "image-missing"
    asked = {"text": "the", "choices": NAMES[:3], "image": rows[0]["image"]}
    with TestClient(serving_app(str(out), precision="fp32", device="cpu")) as client:
        answer = client.post("/v1/choose", json={"inputs": [asked]}).json()["predictions"][0]
        np.testing.assert_allclose(answer["probabilities"], alone.probabilities, atol=1e-5)
    assert run_snippets(out / "model", monkeypatch) == 1
    for change, code in (
        ({"image_network": "mmbt", "co_layers": ()}, "image-network"),
        ({"image_column": "absent"}, "column"),
    ):
        wrong = replace(columns, **change)
        call = lambda wrong=wrong: bertkit.finetune(  # noqa: E731
            "multiple-choice", bert, tmp_path / "b", columns=wrong, **given
        )
        assert code_of(call) == code


def test_a_model_of_texts_refuses_images_with_choices(tokenizer: Tokenizer) -> None:
    given = ChoiceExample("0", "the", ("river", "stone"), 0, "t:1", np.zeros((1, 5), np.float32))
    with pytest.raises(BertkitError) as found:
        MultipleChoice().items([given], tokenizer)
    assert found.value.code == "image-unexpected"


def test_a_stopped_pretraining_ends_with_the_same_bytes(bert: Path, tmp_path: Path) -> None:
    columns = replace(COLUMNS, image_task="pretraining")
    grid = Grid(batch_size=(8,), epochs=(3,))
    settings = replace(ONE_EPOCH, grid=grid, training=TrainingSettings(eval_every=4))

    class StopError(Exception):
        pass

    def stop(record: dict[str, Any]) -> None:
        if record["kind"] == "evaluation" and record["step"] == 8:
            raise StopError

    def run(out: Path, on_record: Any = None) -> bytes:
        rows = scenes(24)
        given = {"train": rows, "dev": rows, "columns": columns, "settings": settings}
        bertkit.finetune("classification", bert, out, **given, on_record=on_record)
        return (out / "model/model.safetensors").read_bytes()

    with pytest.raises(StopError):
        run(tmp_path / "stopped", stop)
    assert run(tmp_path / "stopped") == run(tmp_path / "whole")


def test_bad_input_names_the_row(bert: Path, tmp_path: Path) -> None:
    def tune(columns: Any = COLUMNS, **changes: Any) -> str:
        rows = scenes(8)
        rows[3] = {**rows[3], **changes}
        call = lambda: bertkit.finetune(  # noqa: E731
            "classification", bert, tmp_path / "run", train=rows, dev=rows, columns=columns
        )
        with pytest.raises(BertkitError) as found:
            call()
        assert "train[3]: " in str(found.value) or not changes
        return found.value.code

    width = len(NAMES)
    for box in ([0, 0, 1.1, 1], [-0.1, 0, 1, 1], [0.5, 0, 0.4, 1], [0, 0.5, 1, 0.4]):
        assert tune(image=[[0.0] * width + box]) == "image-box"
    assert tune(image=[[0.0] * (width + 3)]) == "image-shape"
    assert tune(image=[[float("nan")] * (width + 4)]) == "image-nan"
    assert tune(image=np.zeros((8, 8, 3), np.uint8)) == "image-kind"
    narrow = [{"text": row["text"], "image": [[1.0] * 4], "label": "a"} for row in scenes(2)]
    call = lambda columns: bertkit.finetune(  # noqa: E731
        "classification", bert, tmp_path / "run", train=narrow, dev=narrow, columns=columns
    )
    assert code_of(lambda: call(replace(COLUMNS, image_task="alignment"))) == "image-box"
    for columns, code in (
        (TextColumns(image_column="image", image_task="alignment"), "image-task"),
        (replace(COLUMNS, co_layers=(5,)), "image-network"),
    ):
        assert tune(columns) == code


def test_options_that_cannot_be_combined() -> None:
    for change, code in (
        ({"image_network": "resnet"}, "image-network"),
        ({"image_network": "mmbt", "co_layers": (1,)}, "image-network"),
        ({"image_network": "mmbt", "image_task": "alignment"}, "image-task"),
        ({"image_task": "retrieval"}, "image-task"),
    ):
        assert code_of(lambda change=change: replace(COLUMNS, **change)) == code
    for kind in (NumberColumns, ChoiceColumns):
        assert code_of(lambda kind=kind: kind(image_column="i", image_task="alignment")) == (
            "image-task"
        )


def test_captions_without_an_image_or_text_are_counted(
    bert: Path, files: Path, tmp_path: Path
) -> None:
    lines = (files / "captions.csv").read_text().splitlines()
    file = tmp_path / "t.csv"
    file.write_text("\n".join([*lines[:9], "the,", ",3"]))
    features = str(files / "f.npy")
    columns = TextColumns(
        image_column="key",
        image_features=features,
        image_boxes=True,
        image_network="vilbert",
        image_task="alignment",
    )
    bertkit.finetune(
        *("classification", bert, tmp_path / "run"),
        train=str(file),
        dev=str(file),
        columns=columns,
        settings=ONE_EPOCH,
    )
    found = bertkit.evaluate_retrieval(
        tmp_path / "run", str(file), columns={"image_features": features}, device="cpu"
    )
    assert found.skipped == {"empty 'key'": 1, "empty 'text'": 1}
    assert len(found.ranks) == 8
