"""Layers prepared for prediction: the same results as the encoder's own, in every mode."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bertkit.errors import BertkitError
from bertkit.model.encoder import Encoder, ModelConfig
from bertkit.model.native import prepare_encoder
from tests.conftest import load_encoder, need_precision, tiny_config

VNNI = torch.cpu.get_capabilities().get("avx512_vnni", False)
MODES = ["fp32", "bf16", "int8"]
NETWORKS: dict[str, dict[str, Any]] = {
    "bert": {},
    "tanh": {"hidden_act": "gelu_tanh"},
    "albert": {"share_layers": True, "embedding_size": 8},
    "electra": {"embedding_size": 8, "pooler_act": "gelu"},
    "left_to_right": {"direction": "left_to_right"},
    "odd heads": {"num_attention_heads": 8},  # which compiled code does not compute
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("network", NETWORKS)
def test_prepared_encoders_agree(mode: str, network: str, batch: Any) -> None:
    torch.manual_seed(0)
    config = replace(
        tiny_config(50, hidden_size=64, num_hidden_layers=3, initializer_range=0.1),
        **NETWORKS[network],
    )
    need_precision(mode, config)
    encoder = Encoder(config).eval()
    packed, rows = batch(9, 4, 12, 1), torch.tensor([3, 0, 20])
    with torch.no_grad():
        before = encoder(packed)
        prepare_encoder(encoder, mode)
        after, some, states = encoder(packed), encoder(packed, rows), encoder.layers_of(packed)
    assert len(encoder.stack) == 3
    assert after.dtype == torch.float32
    tolerance = {"fp32": 1e-5, "bf16": 0.06, "int8": 0.1}[mode]
    torch.testing.assert_close(after, before, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(some, after[rows], atol=tolerance / 2, rtol=tolerance / 2)
    torch.testing.assert_close(states[-1], after)
    cosine = torch.nn.functional.cosine_similarity(after, before)
    assert cosine.min() > {"fp32": 1 - 1e-6, "bf16": 0.999, "int8": 0.998}[mode]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "cosine"),
    [("fp32", 0.99999), ("bf16", 0.9998), ("int8", 0.99 if VNNI else 0.999)],
)
def test_genuine_weights_stay_close(mode: str, cosine: float, minilm: Path, batch: Any) -> None:
    encoder = load_encoder(minilm).eval()
    need_precision(mode, encoder.config)
    fast = copy.deepcopy(encoder)
    prepare_encoder(fast, mode)
    torch.manual_seed(0)
    packed = batch(60, 31, 31, 12, 3)
    packed = replace(packed, ids=torch.randint(1000, 20000, packed.ids.shape))
    with torch.inference_mode():
        assert torch.cosine_similarity(encoder(packed), fast(packed)).min() > cosine


def test_a_prepared_encoder_cannot_be_copied_and_an_unknown_mode_is_named() -> None:
    encoder = Encoder(tiny_config(50)).eval()
    with pytest.raises(BertkitError, match="precision"):
        prepare_encoder(encoder, "int4")
    need_precision("int8", encoder.config)
    prepare_encoder(encoder, "int8")
    with pytest.raises(TypeError, match="load it in each process"):
        pickle.dumps(encoder)


@pytest.mark.parametrize("direction", ["bidirectional", "left_to_right"])
def test_a_token_sees_one_side_alone(direction: str, config: ModelConfig, batch: Any) -> None:
    torch.manual_seed(0)
    encoder = Encoder(replace(config, direction=direction)).eval()
    packed = batch(5, 2)
    changed = replace(packed, ids=packed.ids.clone())
    changed.ids[2] = (changed.ids[2] + 1) % 50
    with torch.no_grad():
        differs = (encoder(packed) != encoder(changed)).any(1).tolist()
    causal = direction == "left_to_right"
    assert differs == [not causal, not causal, True, True, True, False, False]
    assert encoder.summary_tokens(packed).tolist() == ([4, 6] if causal else [0, 5])
