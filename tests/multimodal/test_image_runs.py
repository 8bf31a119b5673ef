"""Images beside texts from end to end: fine-tuning, files, Python, the server, and refusals."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event, Semaphore
from typing import Any

import numpy as np
import pytest
import torch
from bertkit.datasets.columns import LabelSetColumns, NumberColumns, TextColumns
from bertkit.datasets.records import Records
from bertkit.export.source import read_export_source
from bertkit.multimodal import images
from bertkit.serve.schemas import Choices
from bertkit.serve.service import SHORT_TEXT
from bertkit.tasks.images import ImageChoice
from PIL import Image
from starlette.testclient import TestClient

import bertkit
from bertkit.checkpoints.save import save_model
from bertkit.cli.app import main
from bertkit.errors import BertkitError
from bertkit.finetuning.settings import FinetuneSettings, Grid, HeadSettings
from bertkit.model.heads import PretrainingModel
from bertkit.predict.files import predict_file
from bertkit.serve.app import serving_app
from bertkit.serve.limits import CHARACTERS_OF_TOKEN, Limits, RefusedError
from bertkit.serve.metrics import Metrics
from bertkit.serve.models import load_and_try, load_models
from bertkit.serve.operations import decoded_images
from bertkit.serve.routes import count_pictures
from bertkit.tasks.data import digest_inputs
from bertkit.text.lines import TextCounts
from bertkit.tokenizer.wordpiece import Tokenizer
from tests.conftest import tiny_config

SETTINGS = FinetuneSettings(
    grid=Grid(batch_size=(8,), learning_rate=(2e-3,), epochs=(12,)), device="cpu"
)
ONE_EPOCH = FinetuneSettings(grid=Grid(batch_size=(8,), epochs=(1,)), device="cpu")
COLUMNS = TextColumns(image_column="image", image_size=8, patch_size=4)


@pytest.fixture(scope="module")
def start(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pre-trained model directory with random weights."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("start") / "model"
    config = tiny_config(tokenizer, initializer_range=0.1)
    save_model(folder, PretrainingModel(config), tokenizer, {"task": "pretraining"})
    return folder


def rows(count: int = 48) -> list[dict[str, Any]]:
    """Whether a picture is bright, or whether it is dark: the text says which is asked."""
    found = []
    for number in range(count):
        bright, asked = bool(number & 1), bool(number & 2)
        pixels = np.full((8, 8, 3), 220 if bright else 30, np.uint8)
        pixels[number % 8] = 100
        text = "the stone" if asked else "a river"
        found.append({"text": text, "image": pixels, "label": "yes" if bright == asked else "no"})
    return found


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same rows as a CSV file beside PNG files."""
    folder = tmp_path_factory.mktemp("files")
    lines = ["text,image,label"]
    for number, row in enumerate(rows()):
        Image.fromarray(row["image"]).save(folder / f"{number}.png")
        lines.append(f"{row['text']},{number}.png,{row['label']}")
    (folder / "rows.csv").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="module")
def run(start: Path, files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on pictures, which learns the rows; made by the command line."""
    out = tmp_path_factory.mktemp("runs") / "run"
    flags = "--image-column image --image-size 8 --patch-size 4 --batch-size 8 --epochs 12"
    data = ["--train", str(files / "rows.csv"), "--dev", str(files / "rows.csv")]
    command = ["finetune", "classification", "--model", str(start), "--out", str(out), *data]
    with pytest.raises(SystemExit) as ended:
        main([*command, *flags.split(), "--learning-rate", "2e-3", "--device", "cpu"])
    assert ended.value.code == 0
    return out


def code_of(call: Callable[[], Any]) -> str:
    with pytest.raises(BertkitError) as found:
        call()
    return found.value.code


def test_one_directory_serves_every_use(run: Path, files: Path, tmp_path: Path) -> None:
    file, given = str(files / "rows.csv"), rows()
    wanted = [row["label"] for row in given]
    assert bertkit.evaluate(run, file, device="cpu").scores["accuracy"] == 1.0

    predictor = bertkit.load(run, device="cpu", precision="fp32")
    predict_file(predictor, file, out=tmp_path / "out.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [line["predicted_label"] for line in lines] == wanted

    found = predictor([{"text": row["text"], "image": row["image"]} for row in given])
    assert [one.label for one in found] == wanted
    for one, line in zip(found, lines, strict=True):
        assert one.probability == pytest.approx(line["probability"], abs=1e-5)
    assert predictor(given[0]["text"], files / "0.png").label == wanted[0]
    assert predictor([(given[1]["text"], str(files / "1.png"))])[0].label == wanted[1]

    bodies = []
    for row in given[:4]:
        content = io.BytesIO()
        Image.fromarray(row["image"]).save(content, "png")
        picture = base64.b64encode(content.getvalue()).decode()
        bodies.append({"text": row["text"], "image": picture})
    with TestClient(serving_app(str(run), precision="fp32", device="cpu")) as client:
        answer = client.post("/v1/classify", json={"inputs": bodies})
        assert answer.status_code == 200, answer.text
        served = answer.json()["predictions"]
        assert [one["label"] for one in served] == wanted[:4]
        for sent, field in (
            ({"text": "a"}, "inputs.0"),
            ({"text": "a", "image": "%"}, "inputs.0.image"),
            ({"text": "a", "image": "AAAA"}, "inputs.0.image"),
            ({"text": "a", "image": [[1.0]]}, "inputs.0"),
        ):
            answer = client.post("/v1/classify", json={"inputs": [sent]})
            assert (answer.status_code, answer.json()["error"]["param"]) == (422, field)
        answer = client.post("/v1/attention-maps", json={"text": "a"})
        assert answer.status_code == 422


def input_with_picture() -> dict[str, str]:
    """An input of a request whose picture has 64 pixels."""
    content = io.BytesIO()
    Image.fromarray(rows(1)[0]["image"]).save(content, "PNG")
    return {"text": "a", "image": base64.b64encode(content.getvalue()).decode()}


def test_pictures_with_too_many_pixels_are_refused(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(images, "MOST_PIXELS", 2 * 64)
    with TestClient(serving_app(str(run), precision="fp32", device="cpu")) as client:
        for count, status in ((2, 200), (3, 413)):
            body = {"inputs": [input_with_picture()] * count}
            assert client.post("/v1/classify", json=body).status_code == status


def test_images_with_choices_are_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    task = ImageChoice(image_width=48, image_size=8, patch_size=4, network="vilbert")
    picture = Choices(text="a", choices=["b", "c"], image=input_with_picture()["image"])
    assert count_pictures([picture] * 3) == 3
    read = decoded_images([picture.example(number) for number in range(2)], task)
    assert [given.image.shape for given in read] == [(4, 48)] * 2
    monkeypatch.setattr(images, "MOST_PIXELS", 2 * 64)
    with pytest.raises(RefusedError) as refused:
        decoded_images([picture.example(number) for number in range(3)], task)
    assert refused.value.status == 413
    features = Choices(text="a", choices=["b", "c"], image=[[0.5]] * 5)
    text = Choices(text="a", choices=["b", "c"])
    assert count_pictures([features, text]) == 0
    assert features.size - text.size == 2 * 5 * CHARACTERS_OF_TOKEN


def test_texts_do_not_wait_for_pictures(
    run: Path, start: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = serving_app(f"pictures={run}", f"texts={start}", precision="fp32", device="cpu")
    work = app.state.serving.models["pictures"].operations["classify"]
    prepare, waiting, allowed = work.prepare, Semaphore(0), Event()

    def slow(inputs: list[Any]) -> Any:
        waiting.release()
        assert allowed.wait(60)
        return prepare(inputs)

    monkeypatch.setattr(work, "prepare", slow)
    with TestClient(app) as client, ThreadPoolExecutor(3) as clients:
        body = {"model": "pictures", "inputs": [input_with_picture()]}
        asked = [clients.submit(client.post, "/v1/classify", json=body) for _ in range(3)]
        waiting.acquire()
        text = "[MASK] " + "a " * SHORT_TEXT
        answer = client.post("/v1/fill-mask", json={"inputs": [{"text": text}]})
        assert not any(one.done() for one in asked)
        allowed.set()
        assert answer.status_code == 200, answer.text
        assert [one.result().status_code for one in asked] == [200] * 3


def test_uses_without_images_are_refused(run: Path, start: Path, tmp_path: Path) -> None:
    model = run / "model"
    data = [{"text": "a", "label": "yes"}, {"text": "b", "label": "no"}] * 4
    for call in (
        lambda: read_export_source(model),
        lambda: read_export_source(model, head="encoder"),
        lambda: bertkit.load_embedder(model),
        lambda: bertkit.finetune(
            "classification", model, tmp_path / "a", train=data, dev=data, settings=ONE_EPOCH
        ),
    ):
        assert code_of(call) == "image-model"
    assert json.loads((model / "config.json").read_text())["architectures"] == ["bertkit"]
    predictor = bertkit.load(run, device="cpu")
    assert code_of(lambda: predictor("the stone")) == "image-missing"
    assert code_of(lambda: predictor([("the stone", [[1.0, 2.0]])])) == "image-kind"
    head = FinetuneSettings(grid=ONE_EPOCH.grid, head=HeadSettings(head="bilstm"))
    assert (
        code_of(
            lambda: bertkit.finetune(
                *("classification", start, tmp_path / "b"),
                train=rows(8),
                dev=rows(8),
                columns=COLUMNS,
                settings=head,
            )
        )
        == "image-head"
    )


def test_a_text_model_refuses_images(start: Path, tmp_path: Path) -> None:
    data = [{"text": "a", "label": "yes"}, {"text": "b", "label": "no"}] * 4
    bertkit.finetune(
        "classification", start, tmp_path / "run", train=data, dev=data, settings=ONE_EPOCH
    )
    details = json.loads((tmp_path / "run/model/bertkit.json").read_text())
    assert not [name for name in (*details["columns"], *details["settings"]) if "image" in name]
    given = {"columns": {"image_column": "image"}}
    call = lambda: bertkit.evaluate(tmp_path / "run", rows(8), device="cpu", **given)  # noqa: E731
    assert code_of(call) == "image-unexpected"
    with TestClient(serving_app(str(tmp_path / "run"), device="cpu")) as client:
        body = {"inputs": [{"text": "a", "image": [[1.0]]}]}
        assert client.post("/v1/classify", json=body).status_code == 422


@pytest.mark.parametrize(
    ("task", "columns", "label"),
    [
        ("regression", NumberColumns(image_column="image"), lambda row: row["image"][0][0]),
        (
            "multi-label-classification",
            LabelSetColumns(image_column="image"),
            lambda row: ["bright"] if row["image"][0][0] > 1 else [],
        ),
    ],
)
def test_other_task_types_read_features(
    task: str, columns: Any, label: Any, start: Path, tmp_path: Path
) -> None:
    data = [
        {"text": row["text"], "image": (row["image"][1:3, :2, 0] / 100).tolist()} for row in rows()
    ]
    data = [{**row, "label": label(row)} for row in data]
    bertkit.finetune(
        task, start, tmp_path / "run", train=data, dev=data, columns=columns, settings=SETTINGS
    )
    scores = bertkit.evaluate(tmp_path / "run", data, device="cpu").scores
    assert scores[next(iter(scores))] > 0.8
    found = bertkit.load(tmp_path / "run", device="cpu")(data)
    assert len(found) == len(data)
    again = bertkit.finetune(
        *(task, tmp_path / "run", tmp_path / "again"),
        train=data,
        dev=data,
        columns=columns,
        settings=ONE_EPOCH,
    )
    assert again.scores["dev"][next(iter(scores))] > 0.8  # the image's weights are kept


def test_features_are_given_with_each_file(start: Path, tmp_path: Path) -> None:
    features = np.random.default_rng(0).normal(size=(8, 2, 3)).astype(np.float32)
    np.save(tmp_path / "f.npy", features)
    lines = [f"the stone,{number},{'ab'[number % 2]}" for number in range(8)]
    (tmp_path / "t.csv").write_text("text,key,label\n" + "\n".join(lines))
    file, path = str(tmp_path / "t.csv"), str(tmp_path / "f.npy")
    columns = TextColumns(image_column="key", image_features=path)
    bertkit.finetune(
        *("classification", start, tmp_path / "run"),
        train=file,
        dev=file,
        columns=columns,
        settings=ONE_EPOCH,
    )
    found = bertkit.evaluate(tmp_path / "run", file, columns={"image_features": path}, device="cpu")
    assert found.items.inputs == 8
    assert code_of(lambda: bertkit.evaluate(tmp_path / "run", file, device="cpu")) == "image-file"
    details = (tmp_path / "run/model/bertkit.json").read_text()
    assert path not in details
    in_memory = bertkit.load(tmp_path / "run", device="cpu", precision="fp32")
    [alone] = in_memory([{"text": "the stone", "key": features[3]}])
    assert alone.label == found.done.predictions[3].label


def test_the_digest_of_data_covers_images() -> None:
    rows_of = [list(COLUMNS.read(Records(rows(4), "train"), TextCounts())) for _ in range(2)]
    assert digest_inputs(rows_of[:1]) == digest_inputs(rows_of[1:])
    rows_of[1][2].image[0, 0] += 1
    assert digest_inputs(rows_of[:1]) != digest_inputs(rows_of[1:])


def test_a_served_model_is_tried_with_an_image(run: Path) -> None:
    [old] = load_models([f"pictures={run}"], Limits(grace=0.2), Metrics(), device="cpu").values()
    new = load_and_try(old)
    assert new.routes == old.routes
    for model in (old, new):
        model.worker.close(0)
