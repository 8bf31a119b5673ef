"""Frozen features: layers by hand, one encoder beside another, and the files."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bertkit.checkpoints.pretrained import read_pretrained
from bertkit.errors import BertkitError
from bertkit.files import read_json, write_json
from bertkit.model.cpu import MODES
from bertkit.model.encoder import Encoder, ModelConfig
from bertkit.model.features import (
    HEADS,
    LAYERS,
    FeatureModel,
    check_layers,
    combine,
    encoder_features,
    feature_width,
    load_feature_model,
    save_with_head,
)
from bertkit.model.inference import prepare_encoder
from bertkit.pretraining_data.batch import pack
from bertkit.tokenizer.wordpiece import Tokenizer
from tests.conftest import need_precision, tiny_config


@pytest.fixture
def deep(config: ModelConfig) -> ModelConfig:
    """Five layers, so that the last four are not all."""
    return ModelConfig(**{**vars(config), "num_hidden_layers": 5})


UNITS = 8
"""Of a BiLSTM, instead of 768."""


def test_combine_by_hand() -> None:
    torch.manual_seed(0)
    states = [torch.randn(7, 3) for _ in range(6)]
    mix = torch.tensor([0.5, -1.0, 2.0, 0.0, 1.0, 1.5])
    total = sum(math.exp(x) for x in mix[:5].tolist())
    weights = [math.exp(x) / total for x in mix[:5].tolist()]
    four = mix[1:]
    four_total = sum(math.exp(x) for x in four[:4].tolist())
    expected: dict[str, Any] = {
        "embeddings": states[0],
        "second-to-last": states[4],
        "last": states[5],
        "sum": states[1] + states[2] + states[3] + states[4] + states[5],
        "sum-last-four": states[2] + states[3] + states[4] + states[5],
        "weighted-sum": 1.5 * sum(w * s for w, s in zip(weights, states[1:], strict=True)),
        "weighted-sum-last-four": 1.5
        * sum(math.exp(four[i]) / four_total * states[2 + i] for i in range(4)),
        "concat-last-four": torch.cat(states[2:], dim=1),
    }
    assert set(expected) == set(LAYERS)
    for layers, wanted in expected.items():
        given_mix = four if layers.endswith("last-four") else mix
        found = combine(states, layers, given_mix)
        torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-6)
    with pytest.raises(BertkitError, match="--frozen --layers weighted-sum"):
        combine(states, "weighted-sum")
    rounded = [state.bfloat16() for state in states]  # as a GPU has them
    found = combine(rounded, "weighted-sum", mix)
    torch.testing.assert_close(found, combine([s.float() for s in rounded], "weighted-sum", mix))


def test_layers_are_those_of_transformers(
    deep: ModelConfig, batch: Any, twin: Any, padded: Any
) -> None:
    encoder = Encoder(deep).eval()
    packed = batch(9, 4, 9)
    real = padded(packed)["attention_mask"].bool()
    with torch.no_grad():
        theirs = twin(encoder, "BertModel")(**padded(packed), output_hidden_states=True)
    hidden = [state[real] for state in theirs.hidden_states]
    for layers, wanted in (
        ("embeddings", hidden[0]),
        ("second-to-last", hidden[4]),
        ("last", hidden[5]),
        ("concat-last-four", torch.cat(hidden[2:], dim=-1)),
    ):
        found = encoder_features(encoder, packed, layers)
        assert found.shape == (22, feature_width(layers, deep))
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


def test_layers_that_a_model_lacks(config: ModelConfig) -> None:
    with pytest.raises(BertkitError, match="did you mean 'second-to-last'"):
        check_layers("second-last", config)
    with pytest.raises(BertkitError, match="needs 4 layers and the model has 3"):
        check_layers("sum-last-four", config)
    with pytest.raises(BertkitError, match="needs 2 layers"):
        check_layers("second-to-last", ModelConfig(**{**vars(config), "num_hidden_layers": 1}))
    with pytest.raises(BertkitError, match="did you mean 'bilstm'"):
        FeatureModel(config, 3, head="lstm")


def test_the_papers_head() -> None:
    """Section 5.3: a randomly initialised two-layer 768-dimensional BiLSTM."""
    with torch.device("meta"):
        model = FeatureModel(ModelConfig(vocab_size=100), 9, "concat-last-four", "bilstm")
    assert model.bilstm is not None
    lstm = model.bilstm.lstm
    assert (lstm.num_layers, lstm.hidden_size, lstm.input_size) == (2, 768, 4 * 768)
    assert model.classifier.in_features == 2 * 768
    assert (model.layers, model.head) == ("concat-last-four", "bilstm")


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_only_the_head_is_trained(
    config: ModelConfig, batch: Any, head: str, precision: str
) -> None:
    torch.manual_seed(0)
    config = ModelConfig(**{**vars(config), "hidden_dropout_prob": 0.4})
    model = FeatureModel(config, 5, "weighted-sum", head, units=UNITS).train()
    assert (model.training, model.encoder.training) == (True, False)
    assert not any(layer.training for layer in model.encoder.modules())
    packed = batch(9, 4, 9)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    features = [encoder_features(model.encoder, packed, "last") for _ in range(2)]
    assert torch.equal(*features)  # no dropout inside
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
        one, two = model(packed), model(packed)
    assert not torch.equal(one, two)  # dropout of the head
    one.float().square().sum().backward()
    optimizer.step()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]) == name.startswith("encoder."), name
    assert all(parameter.grad is None for parameter in model.encoder.parameters())
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
        low = model.eval()(packed).float()
    torch.testing.assert_close(low, model(packed), atol=0.05, rtol=0.05)


def test_a_head_learns(config: ModelConfig, batch: Any) -> None:
    """The BiLSTM tells tokens before an id from those after it: its two directions work."""
    torch.manual_seed(0)
    model = FeatureModel(config, 2, "last", "bilstm", units=16).train()
    packed = batch(14, 9, 11, 7)
    wanted = torch.cat([torch.arange(n) < n // 2 for n in packed.lengths]).long()
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.02)
    for _ in range(60):
        loss = torch.nn.functional.cross_entropy(model(packed), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert torch.equal(model.eval()(packed).argmax(-1), wanted)


@pytest.fixture
def saved(tokenizer: Tokenizer, tmp_path: Path) -> tuple[Path, FeatureModel]:
    """A model of the paper's kind, on disk."""
    torch.manual_seed(0)
    config = tiny_config(
        tokenizer,
        hidden_size=16,
        num_hidden_layers=4,
        intermediate_size=20,
        max_position_embeddings=32,
        initializer_range=0.2,
    )
    model = FeatureModel(config, 3, "weighted-sum-last-four", "bilstm", units=UNITS)
    assert model.mix is not None
    torch.nn.init.normal_(model.mix)
    details = {
        "task": "token-classification",
        "labels": ["O", "B-X", "I-X"],
        "settings": {"max_length": 32},
    }
    save_with_head(tmp_path / "model", model.eval(), tokenizer, details)
    return tmp_path / "model", model


def test_round_trip(saved: tuple[Path, FeatureModel]) -> None:
    folder, model = saved
    packed = pack([[2, 7, 9, 8, 3], [2, 11, 3], [2, 5, 6, 3]])
    loaded = load_feature_model(folder)
    assert (loaded.layers, loaded.head) == ("weighted-sum-last-four", "bilstm")
    assert not loaded.training
    assert not any(p.requires_grad for p in loaded.encoder.parameters())
    assert all(p.requires_grad for n, p in loaded.named_parameters() if n[:7] != "encoder")
    with torch.no_grad():
        assert torch.equal(loaded(packed), model(packed))
    assert loaded.train().encoder.training is False
    again = folder.with_name("again")
    save_with_head(again, loaded, tokenizer=Tokenizer.load(folder), details={})
    for name in ("model.safetensors", "head.safetensors"):
        assert (again / name).read_bytes() == (folder / name).read_bytes()
    assert read_json(again / "bertkit.json") == {
        "layers": "weighted-sum-last-four",
        "head": "bilstm",
    }


def test_transformers_loads_the_encoder(saved: tuple[Path, FeatureModel]) -> None:
    transformers = pytest.importorskip("transformers")
    folder, model = saved
    other = transformers.BertModel.from_pretrained(folder).eval()
    assert read_json(folder / "config.json")["architectures"] == ["BertModel"]
    ids = [2, 7, 9, 8, 3]
    with torch.no_grad():
        ours = model.encoder(pack([ids]))
        theirs = other(torch.tensor([ids])).last_hidden_state[0]
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_a_start_makes_the_model(saved: tuple[Path, FeatureModel]) -> None:
    """As fine-tuning does: the encoder's weights, and a head drawn by the seed."""
    folder, model = saved
    start = read_pretrained(folder)

    def build(seed: int) -> FeatureModel:
        torch.manual_seed(seed)
        make = start.build(
            lambda config: FeatureModel(config, 3, "last", "bilstm", units=UNITS), keep_head=True
        )
        assert all(not name.startswith("bert.") for name in make.missing_keys)
        return make.model

    one, same, other = build(1), build(1), build(2)
    for name, tensor in one.state_dict().items():
        assert torch.equal(tensor, same.state_dict()[name]), name
        if name.startswith("encoder."):
            assert torch.equal(tensor, model.state_dict()[name])
        elif name != "classifier.bias":
            assert not torch.equal(tensor, other.state_dict()[name]), name
    assert not any(p.requires_grad for p in one.encoder.parameters())


def test_damaged_files(saved: tuple[Path, FeatureModel]) -> None:
    folder, _ = saved
    details = read_json(folder / "bertkit.json")

    def fails(change: dict[str, Any], message: str) -> None:
        write_json(folder / "bertkit.json", {**details, **change})
        with pytest.raises(BertkitError, match=message):
            load_feature_model(folder)

    fails({"head": "linear"}, "bilstm.lstm.bias_hh_l0.* 'weighted-sum-last-four' with 'linear'")
    fails({"layers": "last"}, "mix missing, unknown or of another shape")
    fails({"layers": "lost"}, "no choice of layers is called 'lost'; did you mean 'last'")
    (folder / "head.safetensors").write_bytes(b"nothing")
    fails({}, "head.safetensors is damaged")
    (folder / "head.safetensors").unlink()
    fails({}, "head.safetensors is missing")


@pytest.mark.parametrize("head", HEADS)
def test_an_encoder_beside(head: str, tokenizer: Tokenizer, tmp_path: Path, batch: Any) -> None:
    """ELMo: states of a model from left to right and of one from right to left, side by side."""
    torch.manual_seed(0)
    sizes = {
        "vocab_size": tokenizer.size, "hidden_size": 16, "num_hidden_layers": 2,
        "num_attention_heads": 2, "intermediate_size": 20, "max_position_embeddings": 32,
        "initializer_range": 0.2,
    }  # fmt: skip
    one = ModelConfig(**sizes, direction="left_to_right")
    other = ModelConfig(**{**sizes, "hidden_size": 12}, direction="right_to_left")
    beside = Encoder(other)
    model = FeatureModel(one, 3, "last", head, beside, UNITS).train()
    assert not beside.training
    assert not any(p.requires_grad for p in beside.parameters())
    packed = batch(9, 4, 9)
    with torch.no_grad():
        states = torch.cat([model.encoder(packed), beside(packed)], dim=-1)
        model.eval()
        wanted = states if model.bilstm is None else model.bilstm(states, packed)
        torch.testing.assert_close(model(packed), model.classifier(wanted))
    model.train()(packed).square().sum().backward()
    assert all(p.grad is None for p in (*beside.parameters(), *model.encoder.parameters()))
    assert model.classifier.weight.grad is not None

    details = {
        "task": "token-classification",
        "labels": ["O", "B-X", "I-X"],
        "settings": {"max_length": 32},
    }
    save_with_head(tmp_path / "m", model.eval(), tokenizer, details)
    assert read_json(tmp_path / "m" / "config.json")["architectures"] == ["BertModel"]
    assert read_json(tmp_path / "m" / "beside" / "config.json")["direction"] == "right_to_left"
    loaded = load_feature_model(tmp_path / "m")
    assert loaded.beside is not None
    assert not any(p.requires_grad for p in loaded.beside.parameters())
    with torch.no_grad():
        torch.testing.assert_close(loaded(packed), model(packed))
    with pytest.raises(BertkitError, match="'weighted-sum' is for one encoder"):
        FeatureModel(one, 3, "weighted-sum", head, Encoder(other))
    deeper = ModelConfig(**{**sizes, "num_hidden_layers": 4})
    with pytest.raises(BertkitError, match="needs 4 layers"):
        FeatureModel(deeper, 3, "sum-last-four", head, Encoder(other))


@pytest.mark.parametrize("fields", [{"embedding_size": 8}, {"share_layers": True}])
def test_other_networks_give_features_too(
    fields: dict[str, Any], config: ModelConfig, tokenizer: Tokenizer, tmp_path: Path, batch: Any
) -> None:
    config = ModelConfig(**{**vars(config), "vocab_size": tokenizer.size, **fields})
    model = FeatureModel(config, 3, "weighted-sum", "bilstm", units=UNITS).eval()
    assert model.mix is not None
    assert len(model.mix) == 4, "three layers, be they shared, and the scale"
    save_with_head(tmp_path / "m", model, tokenizer, {})
    with torch.no_grad():
        packed = batch(9, 4)
        torch.testing.assert_close(load_feature_model(tmp_path / "m")(packed), model(packed))


def test_weights_begin_equal(deep: ModelConfig, batch: Any) -> None:
    model = FeatureModel(deep, 2, "weighted-sum")
    states: list[Tensor] = model.encoder.layers_of(batch(5, 3))
    mean = torch.stack(states[1:]).mean(0)
    torch.testing.assert_close(combine(states, "weighted-sum", model.mix), mean)


@pytest.mark.parametrize("mode", MODES)
def test_every_layer_in_every_precision(mode: str, deep: ModelConfig) -> None:
    need_precision(mode, deep)
    packed = pack([[2, 7, 9, 8, 3], [2, 11, 3]])
    for layers, head in itertools.product(LAYERS, HEADS):
        torch.manual_seed(0)
        model = FeatureModel(deep, 3, layers, head, units=UNITS).eval()
        with torch.inference_mode():
            wanted = model(packed)
            prepare_encoder(model.encoder, mode)
            found = model(packed)
        assert found.dtype == torch.float32
        assert (found - wanted).abs().max() <= 0.1, (layers, head)
