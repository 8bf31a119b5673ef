"""Layers in compiled code beside the layers that torch trains."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from bertkit.errors import BertkitError
from bertkit.model.encoder import DIRECTIONS, Encoder, Layer, ModelConfig
from bertkit.model.native import compiled, prepare_encoder
from bertkit.model.native.compiled import AddNorm, CompiledAttention, step_types, uses_tiles
from bertkit.model.native.layers import MOST_INPUTS, NativeLayer, element_type, is_supported
from bertkit.pretraining_data.batch import Packed, from_arrays
from tests.attention import reference
from tests.conftest import tiny_config

LENGTHS = (1, 2, 5, 64, 65, 130, 7, 384, 63)
TOLERANCES = {
    torch.float32: 2e-5,
    torch.bfloat16: 0.03,
    torch.int8: 0.12,
    torch.int16: 0.02,
}
CONFIG = tiny_config(
    50,
    hidden_size=96,
    num_hidden_layers=1,
    num_attention_heads=3,
    intermediate_size=208,
    max_position_embeddings=512,
)
MODES = (
    "avx512 fp32",
    "avx512 bf16",
    "avx512 int8",
    "avx2 fp32",
    "avx2 int8",
    "amx bf16",
    "amx int8",
)


def clear_caches() -> None:
    compiled.library.cache_clear()
    step_types.cache_clear()


@pytest.fixture
def choose(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """A function that chooses the set of instructions for a test."""

    def chosen(instructions: str) -> None:
        monkeypatch.setenv("BERTKIT_NATIVE", "1" if instructions == "amx" else instructions)
        clear_caches()
        if instructions == "amx" and not uses_tiles():
            pytest.skip("the processor has no AMX, or the compiled code does not use it")

    yield chosen
    clear_caches()


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest, choose: Callable[[str], None]) -> str:
    """A precision, computed with one of the sets of instructions."""
    instructions, precision = request.param.split()
    choose(instructions)
    if not is_supported(CONFIG, precision):
        pytest.skip("the compiled code or the processor's instructions are missing")
    return str(precision)


def tolerance(mode: str) -> float:
    kind = element_type(mode)
    assert kind is not None
    return TOLERANCES[kind]


STEPS = (
    "avx512 float32 float32",
    "avx512 bfloat16 float32",
    "avx512 bfloat16 bfloat16",
    "avx2 float32 float32",
)


@pytest.fixture(params=STEPS)
def step(
    request: pytest.FixtureRequest, choose: Callable[[str], None]
) -> tuple[torch.dtype, torch.dtype]:
    """The types of activations and residual sums of a step with a set of instructions."""
    instructions, *names = request.param.split()
    choose(instructions)
    types = getattr(torch, names[0]), getattr(torch, names[1])
    if types not in step_types():
        pytest.skip("the compiled code or the processor's instructions are missing")
    return types


@pytest.fixture(params=["avx512 float32", "avx512 bfloat16", "amx bfloat16", "avx2 float32"])
def dtype(request: pytest.FixtureRequest, choose: Callable[[str], None]) -> torch.dtype:
    """The type of queries, keys and values, with one of the sets of instructions."""
    instructions, name = request.param.split()
    choose(instructions)
    found: torch.dtype = getattr(torch, name)
    if (found, found) not in step_types():
        pytest.skip("the compiled code or the processor's instructions are missing")
    return found


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def batch(*lengths: int) -> Packed:
    tokens = sum(lengths)
    return from_arrays(*np.zeros((2, tokens), dtype=np.int64), np.array(lengths, dtype=np.int64))


def make_layer(config: ModelConfig) -> Layer:
    layer = Layer(config).eval().requires_grad_(False)
    for parameter in layer.parameters():
        parameter.add_(torch.randn_like(parameter), alpha=0.08)
    return layer


@pytest.mark.parametrize("heads", [1, 2, 3, 6], ids=lambda heads: f"{96 // heads}-wide")
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_outputs_are_those_of_the_trained_layer(mode: str, heads: int, direction: str) -> None:
    activation = "gelu_tanh" if heads == 2 else "gelu"
    config = replace(CONFIG, num_attention_heads=heads, direction=direction, hidden_act=activation)
    layer, packed = make_layer(config), batch(*LENGTHS)
    hidden = torch.randn(sum(LENGTHS), 96)
    expected, prepared = layer(hidden, packed), NativeLayer(layer, mode)
    found = prepared(hidden, packed)
    assert (found - expected).abs().max() < tolerance(mode)
    rows = torch.tensor([400, 0, 3, 3, 720, 2, 1])
    assert torch.equal(prepared(hidden, packed, rows), found[rows])
    assert torch.equal(prepared(hidden, packed, rows.to(torch.int32)[::2]), found[rows[::2]])


TILED = replace(CONFIG, hidden_size=192, intermediate_size=320)
"""Sizes that tiles divide in 8 bits, too."""


@pytest.mark.parametrize("heads", [2, 3, 6, 12], ids=lambda heads: f"{192 // heads}-wide")
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_tiles_compute_what_vectors_do(
    choose: Callable[[str], None], precision: str, direction: str, heads: int
) -> None:
    """Sums of integers are the same; those of bf16 are added in another order."""
    activation = "gelu_tanh" if heads == 2 else "gelu"
    sizes = replace(TILED, num_attention_heads=heads, direction=direction, hidden_act=activation)
    layer, packed = make_layer(sizes), batch(*LENGTHS)
    hidden = torch.randn(sum(LENGTHS), 192)
    found = []
    for instructions in ("amx", "avx512"):
        choose(instructions)
        if element_type(precision) is None:
            pytest.skip("the compiled code or the processor's instructions are missing")
        prepared = NativeLayer(layer, precision)
        parts = prepared.project(hidden).float(), prepared.complete(hidden, hidden.flip(0))
        found.append((*parts, prepared(hidden, packed)))
    (*parts, whole), (*other_parts, other_whole) = found
    for own, other in zip(parts, other_parts, strict=True):
        if precision == "int8":
            assert torch.equal(own, other)
        torch.testing.assert_close(own, other, atol=0.02, rtol=0.01)
    torch.testing.assert_close(
        whole, other_whole, atol=0.1 if precision == "int8" else 0.03, rtol=0
    )
    exact = layer(hidden, packed)
    assert (whole - exact).abs().max() < TOLERANCES[
        torch.int8 if precision == "int8" else torch.bfloat16
    ]


def test_parts_make_the_whole(mode: str) -> None:
    layer, packed = make_layer(CONFIG), batch(9, 9, 9)
    hidden = torch.randn(27, 96)
    prepared = NativeLayer(layer, mode)
    whole = prepared(hidden, packed)
    assert torch.equal(prepared.attend(prepared.project(hidden), hidden, packed, None), whole)
    rows = torch.tensor([0, 9, 18])
    assert torch.equal(prepared(hidden, packed, rows), whole[rows])


def test_a_result_depends_neither_on_the_batch_nor_on_threads(mode: str) -> None:
    prepared = NativeLayer(make_layer(CONFIG), mode)
    hidden = torch.randn(sum(LENGTHS), 96)
    together = prepared(hidden, batch(*LENGTHS))
    ends = np.cumsum(LENGTHS)
    for length, end in zip(LENGTHS, ends, strict=True):
        alone = prepared(hidden[end - length : end], batch(length))
        assert torch.equal(alone, together[end - length : end])
    try:
        for threads in (2, 3):
            torch.set_num_threads(threads)
            assert torch.equal(prepared(hidden, batch(*LENGTHS)), together)
            rows = torch.arange(0, len(hidden), 7)
            assert torch.equal(prepared(hidden, batch(*LENGTHS), rows), together[rows])
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_no_numbers_stay_visible(mode: str, value: float) -> None:
    hidden = torch.randn(40, 96)
    hidden[13, 5] = value
    found = NativeLayer(make_layer(CONFIG), mode)(hidden, batch(10, 10, 20))
    assert found[10:20].isnan().any(dim=1).all()
    assert found[:10].isfinite().all()
    assert found[20:].isfinite().all()


def test_large_and_small_values(mode: str) -> None:
    layer = make_layer(CONFIG)
    small, large = torch.randn(50, 96) * 1e-6, torch.randn(50, 96) * 1e4
    prepared, packed = NativeLayer(layer, mode), batch(20, 30)
    assert torch.cosine_similarity(prepared(small, packed), layer(small, packed)).min() > 0.999
    assert prepared(large, packed).isfinite().all()


def test_the_largest_sums_of_integers_are_exact(mode: str) -> None:
    config = replace(CONFIG, intermediate_size=MOST_INPUTS)
    assert is_supported(config, mode)
    wider = replace(config, intermediate_size=MOST_INPUTS + 16)
    assert is_supported(wider, mode) == (element_type(mode) != torch.int16)
    layer = make_layer(config)
    layer.intermediate.weight.zero_()
    layer.intermediate.bias.fill_(5)  # so that all inputs of the next product are the largest there
    signs = torch.tensor([1.0, -1.0]).repeat(48)
    layer.output.weight.copy_(signs[:, None].expand(-1, MOST_INPUTS))
    hidden = torch.randn(7, 96)
    found = NativeLayer(layer, mode)(hidden, batch(7))
    torch.testing.assert_close(found, layer(hidden, batch(7)), atol=0.01, rtol=0)


def test_no_row_can_be_asked_for(mode: str) -> None:
    prepared = NativeLayer(make_layer(CONFIG), mode)
    nothing = torch.empty(0, dtype=torch.int64)
    assert prepared(torch.randn(5, 96), batch(5), nothing).shape == (0, 96)


def test_other_shapes_are_left_to_torch() -> None:
    odd = replace(CONFIG, num_attention_heads=12)  # heads of 8
    assert not is_supported(odd, "fp32")
    encoder = Encoder(odd).eval()
    prepare_encoder(encoder, "fp32")
    assert isinstance(encoder.layers[0], Layer)
    with pytest.raises(BertkitError, match="int8 needs"):
        prepare_encoder(encoder, "int8")


@pytest.mark.parametrize("mode", MODES[-1:], indirect=True)
def test_the_code_can_be_switched_off_and_must_fit_its_source(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for value, is_off in (("0", True), ("avx2", False), ("1", False)):
        monkeypatch.setenv("BERTKIT_NATIVE", value)
        assert (compiled.library.__wrapped__() is None) == is_off
    monkeypatch.setattr(compiled, "SOURCE", compiled.SOURCE.with_name("compiled.py"))
    assert compiled.library.__wrapped__() is None


# The steps of training.


def gradients(outputs: torch.Tensor, given: torch.Tensor, *inputs: torch.Tensor) -> list[Any]:
    """An output and the gradients of its inputs, in double precision."""
    found = torch.autograd.grad(outputs, inputs, given.to(outputs.dtype))
    return [one.detach().double() for one in (outputs, *found)]


@pytest.mark.parametrize(("rows", "width"), [(5, 24), (200, 256), (130, 100)])
def test_add_norm_is_that_of_torch(
    step: tuple[torch.dtype, torch.dtype], rows: int, width: int
) -> None:
    x, residual = (torch.randn(rows, width).to(one).requires_grad_() for one in step)
    weight, bias = torch.randn(2, width).unbind()
    inputs = x, residual, weight.requires_grad_(), bias.requires_grad_()
    given = torch.randn(rows, width).to(step[1])
    found = gradients(AddNorm.apply(*inputs, 1e-5, 0.0), given, *inputs)
    plain = [one.detach().double().requires_grad_() for one in inputs]
    norm = torch.nn.functional.layer_norm(plain[0] + plain[1], (width,), *plain[2:], 1e-5)
    for one, expected in zip(found, gradients(norm, given, *plain), strict=True):
        assert (one - expected).abs().max() < {2: 1e-2, 4: 1e-6}[step[0].itemsize] * max(
            1, expected.abs().max()
        )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("width", [1, 16, 26, 32, 64, 80, 256])
def test_attention_is_its_definition(dtype: torch.dtype, width: int, causal: bool) -> None:
    packed = batch(130, 64, 49, 48, 33, 5, 2, 1)
    projected = torch.randn(len(packed.ids), 3, 2, width).to(dtype).requires_grad_()
    given = torch.randn(len(packed.ids), 2, width).to(dtype)
    found = gradients(CompiledAttention.apply(projected, packed, causal, 0.0), given, projected)
    plain = projected.detach().double().requires_grad_()
    wanted = reference(plain, packed, causal, 0.0)
    for one, expected in zip(found, gradients(wanted, given, plain), strict=True):
        tolerance = {2: 1.2e-2, 4: 3e-6}[dtype.itemsize] * max(1, expected.abs().max())
        assert (one - expected).abs().max() < tolerance


def test_attention_drops_a_share_and_the_same_in_both_directions(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values that are unit vectors show the weights, whose gradients torch then computes."""
    packed, length = batch(70, 70), 70
    projected = torch.randn(140, 3, 2, 80)
    projected[:, 2] = torch.eye(length, 80).repeat(2, 1)[:, None]
    projected = projected.to(dtype).requires_grad_()
    given = torch.randn(140, 2, 80).to(dtype)

    def attend() -> list[torch.Tensor]:
        torch.manual_seed(7)
        output = CompiledAttention.apply(projected, packed, False, 0.25)
        return gradients(output, given, projected)

    found = attend()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert all(map(torch.equal, attend(), found)), "the same on one thread"
    kept = (found[0][..., :length] != 0).view(2, length, 2, length)
    assert 0.74 < kept.double().mean() < 0.76
    assert 0.55 < (kept[0] & kept[1]).double().mean() < 0.575, "sequences differ"
    assert 0.55 < (kept[:, :, 0] & kept[:, :, 1]).double().mean() < 0.575, "heads differ"
    plain = projected.detach().double().requires_grad_()
    q, k, v = plain.view(2, length, 3, 2, 80).unbind(2)
    weights = torch.einsum("sqhd,skhd->sqhk", q, k).div(80**0.5).softmax(-1) * kept / 0.75
    expected = gradients(torch.einsum("sqhk,skhd->sqhd", weights, v).flatten(0, 1), given, plain)
    for one, other in zip(found, expected, strict=True):
        assert (one - other).abs().max() < {2: 3e-2, 4: 1e-5}[dtype.itemsize]


def test_layer_norm_drops_a_share_and_the_same_in_both_directions(
    step: tuple[torch.dtype, torch.dtype], monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.ones(3000, 80).to(step[0]).requires_grad_()
    parameters = torch.ones(80), torch.zeros(80)

    def kept() -> tuple[torch.Tensor, torch.Tensor]:
        noise = torch.randn(3000, 80, generator=torch.Generator().manual_seed(0)).to(step[1])
        y = AddNorm.apply(x, noise, *parameters, 1e-5, 0.25)
        [gradient] = torch.autograd.grad((y.float() ** 3).sum(), x)
        again = AddNorm.apply(x, torch.zeros_like(noise), *parameters, 1e-5, 0.25)
        return gradient != 0, again > 0

    torch.manual_seed(7)
    backward, other = kept()
    torch.manual_seed(7)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    again, _ = kept()
    assert torch.equal(backward, again), "the same on one thread"
    for found in (backward, other):
        assert 0.745 < found.float().mean() < 0.755
    assert 0.55 < (backward & other).float().mean() < 0.57, "each call draws anew"


def test_gradients_of_kept_elements_are_those_of_torch(
    step: tuple[torch.dtype, torch.dtype],
) -> None:
    """What is kept is seen in the result; torch gets it as a mask."""
    tolerance = {2: 1e-2, 4: 1e-5}[step[0].itemsize]
    x = torch.randn(150, 40).add_(5).to(step[0]).requires_grad_()
    residual = torch.zeros(150, 40).to(step[1]).requires_grad_()
    weight, bias = torch.ones(40), torch.zeros(40)
    given = torch.randn(150, 40).to(step[1])
    found = gradients(AddNorm.apply(x, residual, weight, bias, 1e-5, 0.25), given, x, residual)
    mask = (found[1] != 0).double() / 0.75
    plain = [one.detach().double().requires_grad_() for one in (x, residual)]
    norm = torch.nn.functional.layer_norm(plain[0] * mask + plain[1], (40,), eps=1e-5)
    for one, expected in zip(found, gradients(norm, given, *plain), strict=True):
        assert (one - expected).abs().max() < tolerance


def training_layer() -> tuple[Layer, torch.Tensor, Packed]:
    config = replace(CONFIG, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    layer, packed = make_layer(config).requires_grad_().train(), batch(9, 5)
    return layer, torch.randn(14, 96, requires_grad=True), packed


@pytest.mark.skipif(not step_types(), reason="there are no compiled steps")
def test_layers_with_compiled_steps_keep_what_torch_offers() -> None:
    from torch.utils.checkpoint import checkpoint

    layer, hidden, packed = training_layer()
    expected = layer.eval()(hidden, packed)
    wanted = torch.autograd.grad(expected.square().sum(), hidden)[0]
    layer.train()
    again = checkpoint(layer, hidden, packed, use_reentrant=False)
    torch.testing.assert_close(again, expected, atol=1e-5, rtol=1e-5)
    [found] = torch.autograd.grad(again.square().sum(), hidden)
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    norm = layer.output_norm
    y = AddNorm.apply(hidden, hidden.detach(), norm.weight, norm.bias, 1e-5, 0.0)
    [found] = torch.autograd.grad(y.square().sum(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        found.square().sum().backward()

    seen = []
    hook = layer.attention_norm.register_forward_hook(lambda *given: seen.append(given))
    layer(hidden, packed)
    assert len(seen) == 1
    hook.remove()
    layer.dropout.probability = 0.5
    layer.dropout.eval()
    assert torch.equal(layer(hidden, packed), layer(hidden, packed))
    layer.dropout = torch.nn.Dropout(1.0)
    assert not torch.equal(layer(hidden, packed), layer.eval()(hidden, packed))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_layers_whose_weights_are_of_another_type_are_trained(dtype: torch.dtype) -> None:
    layer, hidden, packed = training_layer()
    expected = layer.eval()(hidden, packed)
    found = layer.to(dtype).train()(hidden.to(dtype), packed)
    assert (found.float() - expected).abs().max() < 0.1
    found.float().square().sum().backward()
    assert all(one.grad is not None for one in layer.parameters())
