"""Features: chosen layers by hand, and as transformers computes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bertkit.errors import BertkitError
from bertkit.model.encoder import Encoder, ModelConfig
from bertkit.model.native import prepare_encoder
from bertkit.model.native.compiled import MODES
from bertkit.model.outputs import LAYERS, check_layers, combine, encoder_features
from bertkit.pretraining_data.batch import pack
from tests.conftest import need_precision


@pytest.fixture
def deep(config: ModelConfig) -> ModelConfig:
    """Five layers, so that the last four are not all."""
    return ModelConfig(**{**vars(config), "num_hidden_layers": 5})


def test_combine_by_hand() -> None:
    torch.manual_seed(0)
    states = [torch.randn(7, 3) for _ in range(6)]
    expected: dict[str, Any] = {
        "embeddings": states[0],
        "second-to-last": states[4],
        "last": states[5],
        "sum": states[1] + states[2] + states[3] + states[4] + states[5],
        "sum-last-four": states[2] + states[3] + states[4] + states[5],
        "concat-last-four": torch.cat(states[2:], dim=1),
    }
    assert set(expected) == set(LAYERS)
    for layers, wanted in expected.items():
        torch.testing.assert_close(combine(states, layers), wanted, atol=1e-6, rtol=1e-6)


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
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


def test_layers_that_a_model_lacks(config: ModelConfig) -> None:
    with pytest.raises(BertkitError, match="did you mean 'second-to-last'"):
        check_layers("second-last", config)
    with pytest.raises(BertkitError, match="needs 4 layers and the model has 3"):
        check_layers("sum-last-four", config)
    with pytest.raises(BertkitError, match="needs 2 layers"):
        check_layers("second-to-last", ModelConfig(**{**vars(config), "num_hidden_layers": 1}))


@pytest.mark.parametrize("mode", MODES)
def test_every_layer_in_every_precision(mode: str, deep: ModelConfig) -> None:
    need_precision(mode, deep)
    packed = pack([[2, 7, 9, 8, 3], [2, 11, 3]])
    for layers in LAYERS:
        torch.manual_seed(0)
        encoder = Encoder(deep).eval()
        with torch.inference_mode():
            wanted = encoder_features(encoder, packed, layers)
            prepare_encoder(encoder, mode)
            found = encoder_features(encoder, packed, layers)
        assert (found - wanted).abs().max() <= (1.0 if "sum" in layers else 0.5), layers
