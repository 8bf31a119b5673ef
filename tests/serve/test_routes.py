"""Every route end to end on tiny models: the answers are those of the predictors."""

from __future__ import annotations

import base64
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from starlette.testclient import TestClient

from bertkit.checkpoints.pretrained import read_pretrained
from bertkit.checkpoints.save import save_model
from bertkit.model.encoder import Encoder
from bertkit.predict.embeddings import load_embedder
from bertkit.predict.load import load
from bertkit.predict.pretrained import load_pretrained
from bertkit.serve.app import serving_app
from bertkit.tokenizer.wordpiece import Tokenizer
from tests.serve.conftest import NAMES

LONG = "The sailor walking slowly over the bridge. " * 12
ROUTES = {
    "classify": "classification",
    "multi-label": "multi-label-classification",
    "regress": "regression",
}
TEXTS = ["river stone", "", LONG, "Évening, the harbour!", "x"]


def post(client: TestClient, route: str, **body: Any) -> Any:
    answer = client.post(f"/v1/{route}", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def predictor(models: Path, name: str) -> Any:
    return load(models / name, device="cpu", precision="fp32")


def close_to(found: Any, wanted: Any) -> bool:
    """Equal, numbers to 1e-5: batches of other sizes sum in another order."""
    if isinstance(wanted, dict):
        return found.keys() == wanted.keys() and all(close_to(found[k], wanted[k]) for k in wanted)
    if isinstance(wanted, list | tuple):
        return len(found) == len(wanted) and all(map(close_to, found, wanted))
    if isinstance(wanted, float):
        return found == pytest.approx(wanted, abs=1e-5)
    return bool(found == wanted)


@pytest.mark.parametrize("name", ["classify", "multi-label", "regress"])
@pytest.mark.parametrize("pair", [None, "silver thread", LONG])
def test_texts(client: TestClient, models: Path, name: str, pair: str | None) -> None:
    inputs = [[text, pair] if pair else text for text in TEXTS]
    found = post(client, ROUTES[name], model=name, inputs=inputs)
    direct = predictor(models, name)
    assert found["model"] == name
    assert close_to(found["predictions"], [direct([given])[0].to_dict() for given in inputs])
    assert found["usage"]["inputs"] == len(TEXTS)
    assert found["usage"]["windowed"] == (5 if pair == LONG else 1)
    if pair:
        named = [{"text": text, "pair": pair} for text in TEXTS]
        assert close_to(post(client, ROUTES[name], model=name, inputs=named), found)


def test_choices(client: TestClient, models: Path) -> None:
    inputs = [[text, ["the river", LONG, "stone"][: 1 + i % 3]] for i, text in enumerate(TEXTS)]
    found = post(client, "multiple-choice", inputs=inputs)["predictions"]
    direct = predictor(models, "choose")
    assert close_to(found, [direct(text, choices).to_dict() for text, choices in inputs])
    named = [{"text": text, "choices": choices} for text, choices in inputs]
    assert close_to(post(client, "multiple-choice", inputs=named)["predictions"], found)


def test_tags(client: TestClient, models: Path) -> None:
    direct = predictor(models, "tag")
    inputs: list[Any] = [*TEXTS, LONG.split(), [], ["", "\u200b", "two words"]]
    found = post(client, "token-classification", model="tag", inputs=inputs)["predictions"]
    assert close_to(found, [direct([one])[0].to_dict() for one in inputs])
    for entity in found[2]["entities"]:
        assert LONG[entity["start"] : entity["end"]] == entity["text"]
    assert any(own["entities"] for own in found)


def test_answers(client: TestClient, models: Path) -> None:
    direct = predictor(models, "answer")
    inputs = [["who", LONG], ["where is the bridge", "river"], ["what", "a letter from a sailor"]]
    found = post(client, "question-answering", inputs=inputs)
    assert close_to(found["predictions"], [direct(*pair).to_dict() for pair in inputs])
    assert found["usage"]["windowed"] == 1
    assert found["usage"]["cut"] == {}
    cut = post(client, "question-answering", inputs=[[LONG, "river"]])["usage"]["cut"]
    assert cut == {"questions cut at 16 tokens": 1}


def test_masks(client: TestClient, models: Path) -> None:
    direct = load_pretrained(models / "pretrained", device="cpu", precision="fp32")
    texts = ["river [MASK] stone", f"[MASK] {LONG} [MASK]", "[MASK]"]
    inputs = [{"text": text, "top": 3 + i} for i, text in enumerate(texts)]
    answer = post(client, "fill-mask", inputs=inputs)
    found = answer["predictions"]
    assert answer["usage"]["windowed"] == 1  # each mask has a copy, but short texts one window
    assert post(client, "fill-mask", inputs=[{"text": "[MASK] [MASK]"}])["usage"]["windowed"] == 0
    wanted = [
        [[guess._asdict() for guess in mask] for mask in direct.fill_mask(text, 3 + i)]
        for i, text in enumerate(texts)
    ]
    assert close_to(found, wanted)


def test_next_sentences(client: TestClient, models: Path) -> None:
    direct = load_pretrained(models / "pretrained", device="cpu", precision="fp32")
    pairs = [("river", "stone"), (LONG, LONG), ("river", LONG)]
    inputs = [{"text": text, "following": following} for text, following in pairs]
    found = post(client, "next-sentence", inputs=inputs)
    with pytest.warns(UserWarning, match="pairs cut to the tokens around their boundary: 2"):
        wanted = direct.next_sentence(pairs)
    assert close_to(found["predictions"], [{"probability": chance} for chance in wanted])
    assert found["usage"]["cut"] == {"pairs cut to the tokens around their boundary": 2}


def test_a_pretrained_model_is_in_memory_once(client: TestClient, models: Path) -> None:
    operations = client.app.state.service.models["pretrained"].operations  # type: ignore[attr-defined]
    embedder, masks = operations["embeddings"].embedder, operations["fill-mask"].predictor
    assert embedder.encoder is masks.model.encoder
    wanted = load_embedder(models / "pretrained", device="cpu", precision="fp32").encode(TEXTS)
    found = post(client, "embeddings", model="pretrained", input=TEXTS)["data"]
    np.testing.assert_allclose([one["embedding"] for one in found], wanted, atol=1e-5)


def test_embeddings(client: TestClient, models: Path) -> None:
    wanted = load_embedder(models / "encoder", device="cpu", precision="fp32").encode(TEXTS)
    found = post(client, "embeddings", model="encoder", input=TEXTS)
    assert [item["index"] for item in found["data"]] == list(range(5))
    vectors = np.array([item["embedding"] for item in found["data"]])
    np.testing.assert_allclose(vectors, wanted, atol=1e-5)
    assert found["usage"]["prompt_tokens"] == found["usage"]["total_tokens"] > 100

    plain = post(client, "embeddings", model="encoder", input=TEXTS[0], encoding_format=None)
    assert plain["data"][0]["embedding"] == pytest.approx(wanted[0], abs=1e-5)
    coded = post(client, "embeddings", model="encoder", input=TEXTS, encoding_format="base64")
    raw = [base64.b64decode(item["embedding"]) for item in coded["data"]]
    decoded = np.stack([np.frombuffer(one, "<f4") for one in raw])
    np.testing.assert_allclose(decoded, wanted, atol=1e-5)

    post(client, "embeddings", model="encoder", input=TEXTS, dimensions=vectors.shape[1])


def test_pieces(client: TestClient, tokenizer: Tokenizer) -> None:
    found = post(client, "tokens", model="tag", text="Évening kettle", pair="stone")["tokens"]
    encoded = tokenizer.encode_pair("Évening kettle", "stone")
    assert [piece["id"] for piece in found] == encoded.ids
    assert [piece["token"] for piece in found] == [tokenizer.vocabulary[i] for i in encoded.ids]
    assert [(piece["start"], piece["end"]) for piece in found] == encoded.offsets
    assert [piece["part"] for piece in found] == [None, 0, 0, 0, None, 1, None]
    assert [piece["segment"] for piece in found] == encoded.segment_ids


@pytest.mark.parametrize("name", ["classify", "pretrained", "encoder"])
def test_attention(
    client: TestClient, models: Path, tokenizer: Tokenizer, name: str, transformers: Any
) -> None:
    wanted = attention_of(transformers, models / name, tokenizer, "river kettle", "stone")
    maps = post(client, "attention-maps", model=name, text="river kettle", pair="stone")
    coded = np.frombuffer(base64.b64decode(maps["weights"]), np.uint8).reshape(wanted.shape)
    np.testing.assert_allclose((coded / 255) ** 2, wanted, atol=4e-3)
    tokens = post(client, "tokens", model=name, text="river kettle", pair="stone")["tokens"]
    assert maps["tokens"] == tokens
    assert (maps["layers"], maps["heads"]) == wanted.shape[:2]


def attention_of(
    transformers: Any, folder: Path, tokenizer: Tokenizer, text: str, pair: str | None = None
) -> Any:
    """(layers, heads, tokens, tokens) of a model, computed by transformers."""
    model = transformers.BertModel.from_pretrained(folder, attn_implementation="eager").eval()
    encoded = tokenizer.encode_pair(text, pair)
    with torch.inference_mode():
        found = model(
            torch.tensor([encoded.ids]),
            token_type_ids=torch.tensor([encoded.segment_ids]),
            output_attentions=True,
        )
    return torch.cat(found.attentions).numpy()


def test_attention_is_that_of_the_model_that_was_loaded(
    models: Path, tokenizer: Tokenizer, tmp_path: Path, transformers: Any
) -> None:
    """Whatever has become of its folder since."""
    folder = tmp_path / "model"
    shutil.copytree(models / "encoder", folder)
    app = serving_app(str(folder), precision="fp32", device="cpu")
    start = read_pretrained(models / "tag")
    save_model(folder, start.build(Encoder, keep_head=False).model, start.tokenizer, {})
    shutil.rmtree(folder)
    with TestClient(app) as own:
        found = post(own, "attention-maps", text="river kettle")["weights"]
    wanted = attention_of(transformers, models / "encoder", tokenizer, "river kettle")
    coded = np.frombuffer(base64.b64decode(found), np.uint8).reshape(wanted.shape)
    np.testing.assert_allclose((coded / 255) ** 2, wanted, atol=4e-3)


def test_models_are_listed_with_what_they_can_do(client: TestClient) -> None:
    cards = {card["id"]: card for card in client.get("/v1/models").json()["data"]}
    assert sorted(cards) == sorted(NAMES)
    assert cards["classify"]["labels"] == ["dry", "damp", "wet"]
    assert "fill-mask" in cards["pretrained"]["routes"]
    assert cards["encoder"]["routes"] == ["attention-maps", "embeddings", "tokens"]
    assert client.get("/v1/models/tag").json() == cards["tag"]


def test_the_description_needs_no_network(client: TestClient) -> None:
    for path in ("/docs", "/redoc"):
        page = client.get(path)
        assert page.status_code == 200
        assert "cdn" not in page.text
        assert "//fonts" not in page.text
    script = client.get("/static-offline-docs/swagger-ui-bundle.js")
    assert script.status_code == 200
    routes = client.get("/openapi.json").json()["paths"]
    assert {"/v1/classification", "/v1/embeddings", "/v1/attention-maps", "/ready"} <= set(routes)


def test_the_most_probable_labels_alone(serve: Callable[..., TestClient]) -> None:
    client = serve("classify", "multi-label", "regress", top=1)
    for route in ("classification", "multi-label-classification"):
        answer = client.post(f"/v1/{route}", json={"inputs": ["river", "a stone"]}).json()
        assert [len(row["probabilities"]) for row in answer["predictions"]] == [1, 1]
    assert client.post("/v1/regression", json={"inputs": ["river"]}).status_code == 200
