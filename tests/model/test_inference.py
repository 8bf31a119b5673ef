"""Layers prepared for prediction: the same results as the encoder's own, in every mode."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bertkit.errors import BertkitError
from bertkit.model import inference
from bertkit.model.encoder import Encoder, Layer, ModelConfig
from bertkit.model.native import (
    FloatProduct,
    InferenceLayer,
    Int8Product,
    SingleQuery,
    prepare_encoder,
    quantize,
)
from bertkit.pretraining_data.batch import pack
from tests.conftest import load_encoder, need_precision
from tests.model.test_encoder import spread

VNNI = torch.cpu.get_capabilities().get("avx512_vnni", False)
MODES = ["fp32", "bf16", "int8"]
CLOSE = {"fp32": 1e-5, "bf16": 0.05, "int8": 0.25}
"""The largest difference of a normalised state, for networks of random weights."""


def prepared(encoder: Encoder, mode: str) -> Encoder:
    twin = copy.deepcopy(encoder).eval()
    prepare_encoder(twin, mode)
    return twin


@pytest.mark.parametrize("act", ["gelu", "gelu_tanh"])
@pytest.mark.parametrize("mode", MODES)
def test_prepared_layers_equal_the_encoders(
    mode: str, act: str, config: ModelConfig, batch: Any
) -> None:
    config = ModelConfig(**{**vars(config), "hidden_act": act})
    need_precision(mode, config)
    encoder = spread(Encoder(config)).eval()
    packed = batch(9, 1, 32, 9, 9, 4)
    with torch.inference_mode():
        exact, fast = encoder(packed), prepared(encoder, mode)(packed)
        assert fast.dtype == torch.float32
        assert (fast - exact).abs().max() < CLOSE[mode]
        rows = torch.tensor([0, 40, 7])
        chosen = prepared(encoder, mode)(packed, rows)
        assert (chosen - fast[rows]).abs().max() < (1e-5 if mode == "fp32" else 0.05)


@pytest.mark.parametrize(
    ("mode", "cosine"),
    [("fp32", 0.99999), ("bf16", 0.9998), ("int8", 0.99 if VNNI else 0.999)],
)
@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "torch"])
def test_genuine_weights_stay_close(
    mode: str, cosine: float, compiled: bool, minilm: Path, batch: Any, monkeypatch: Any
) -> None:
    if not compiled:
        monkeypatch.setattr(inference, "is_supported", lambda config, mode: False)
    encoder = load_encoder(minilm).eval()
    need_precision(mode, encoder.config)
    torch.manual_seed(0)
    packed = batch(60, 31, 31, 12, 3)
    packed = type(packed)(
        torch.randint(1000, 20000, packed.ids.shape), *list(vars(packed).values())[1:5]
    )
    with torch.inference_mode():
        exact, fast = encoder(packed), prepared(encoder, mode)(packed)
    assert torch.cosine_similarity(exact, fast).min() > cosine


def test_more_rows_than_a_block(config: ModelConfig, batch: Any, monkeypatch: Any) -> None:
    encoder = spread(Encoder(config)).eval()
    packed = batch(9, 9, 30, 4)
    with torch.inference_mode():
        whole = prepared(encoder, "fp32")(packed)
        monkeypatch.setattr(inference, "BLOCK", 7)
        torch.testing.assert_close(prepared(encoder, "fp32")(packed), whole, atol=1e-6, rtol=0)


def test_without_onednn_products_are_plain_ones(
    config: ModelConfig, batch: Any, monkeypatch: Any
) -> None:
    encoder = spread(Encoder(config)).eval()
    packed = batch(9, 30, 4)
    monkeypatch.setattr(inference, "has_products", lambda dtype=None: False)
    with torch.inference_mode():
        torch.testing.assert_close(
            prepared(encoder, "fp32")(packed), encoder(packed), atol=1e-5, rtol=1e-5
        )
    monkeypatch.setattr(inference, "is_supported", lambda config, mode: False)
    with pytest.raises(BertkitError, match=r"int8 needs a processor with AVX512-VNNI .* bf16"):
        prepare_encoder(encoder, "int8")


def test_an_encoder_is_not_prepared_twice(config: ModelConfig) -> None:
    encoder = prepared(Encoder(config), "fp32")
    with pytest.raises(AssertionError, match="prepared already"):
        prepare_encoder(encoder, "fp32")
    assert len(encoder.layers) == config.num_hidden_layers, "it can still be used"


def test_an_unknown_mode_is_named(config: ModelConfig) -> None:
    with pytest.raises(BertkitError, match=r"no precision is called 'int4'.*int8"):
        prepare_encoder(Encoder(config), "int4")


@pytest.mark.parametrize("after_gelu", [False, True])
def test_quantized_rows_are_within_half_a_step(after_gelu: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(50, 64) * torch.logspace(-3, 3, 50)[:, None]
    x[3] = 0
    x[4, 7] = 1e4  # one value far outside
    x = torch.nn.functional.gelu(x) if after_gelu else x
    integers, scales, zero = quantize(x, after_gelu=after_gelu)
    assert integers.dtype == torch.uint8
    error = ((integers.float() - zero) * scales - x).abs() / scales
    assert error.max() <= 0.501
    assert integers[0].unique().numel() > 20  # small rows keep their digits


@pytest.mark.skipif(not VNNI, reason="needs a processor with AVX512-VNNI")
@pytest.mark.parametrize("after_gelu", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 16, 100])
def test_int8_products_are_exact_on_their_integers(rows: int, after_gelu: bool) -> None:
    torch.manual_seed(rows)
    linear = nn.Linear(48, 20)
    product = Int8Product(linear, after_gelu=after_gelu)
    x = torch.randn(rows, 48)
    x = torch.nn.functional.gelu(x) if after_gelu else x
    residual = torch.randn(rows, 20)
    with torch.inference_mode():
        integers, scales, zero = quantize(x, after_gelu=after_gelu)
        weights = (linear.weight.double() / product.scales.double()[:, None]).round()
        weights = weights * product.scales.double()[:, None]
        wanted = (integers.double() - zero) * scales.double() @ weights.T + linear.bias
        torch.testing.assert_close(product(x).double(), wanted, atol=1e-5, rtol=1e-5)
        summed = product(x, residual=residual).double()
        torch.testing.assert_close(summed, wanted + residual, atol=1e-5, rtol=1e-5)
        alone = torch.cat([product(row[None]) for row in x])
        torch.testing.assert_close(alone, product(x), atol=1e-6, rtol=1e-6)  # whatever the batch


def test_float_products_leave_their_inputs_alone() -> None:
    linear = nn.Linear(8, 8)
    x, residual = torch.randn(3, 8), torch.randn(3, 8)
    before = x.clone(), residual.clone()
    with torch.inference_mode():
        wanted = linear(x) + residual
        found = FloatProduct(linear, torch.float32)(x, residual=residual)
    torch.testing.assert_close(found, wanted)
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])


@pytest.mark.parametrize("mode", MODES)
def test_few_numbers_of_rows_reach_the_products(
    mode: str, config: ModelConfig, batch: Any, monkeypatch: Any
) -> None:
    """For each new number of rows oneDNN compiles code and keeps it: a server would grow."""
    seen: set[int] = set()
    for kind in (FloatProduct, Int8Product):
        call = kind.__call__

        def noted(self: Any, x: torch.Tensor, *, call: Any = call, **options: Any) -> torch.Tensor:
            seen.add(len(x))
            return call(self, x, **options)

        monkeypatch.setattr(kind, "__call__", noted)
    need_precision(mode, config)
    encoder = prepared(spread(Encoder(config)).eval(), mode)
    with torch.inference_mode():
        for tokens in range(1, 200):
            lengths = [30] * (tokens // 30) + [tokens % 30] * (tokens % 30 > 0)
            packed = batch(*lengths)
            assert len(encoder(packed, torch.arange(0, tokens, 3))) == -(-tokens // 3)
    assert seen <= {*range(8, 65, 8), *range(96, 225, 32)}
    assert inference.BLOCK % inference.ROW_STEP == 0


def test_a_single_query_is_the_row_of_the_whole_attention() -> None:
    torch.manual_seed(0)
    config = ModelConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=1, num_attention_heads=4,
        intermediate_size=64, initializer_range=0.5,
    )  # fmt: skip
    layer = Layer(config).eval()
    torch.nn.init.normal_(layer.query_key_value.bias)
    packed = pack([[1] * 7] * 3)
    hidden = torch.randn(21, 32)
    rows = torch.tensor([0, 10, 20])
    with torch.inference_mode():
        wanted = layer.attend(hidden, packed)[rows]
        found = SingleQuery(layer)(hidden.view(3, 7, 32), hidden[rows])
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
        whole = InferenceLayer(layer, "fp32", None)
        done = whole.complete(found, hidden[rows])
        torch.testing.assert_close(done, whole(hidden, packed, rows), atol=1e-5, rtol=1e-5)
