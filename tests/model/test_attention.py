"""Every attention kernel against the definition, and what dropout does."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bertkit.model.native import KERNELS, Dropout, attention, choose_kernel
from bertkit.model.native.compiled import keep_mask, keep_scale, step_types
from bertkit.pretraining_data.batch import Packed, pack
from tests.attention import KERNELS_AND_REFERENCE, reference
from tests.conftest import python

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
compiled = pytest.param(
    "compiled",
    marks=pytest.mark.skipif(not step_types(), reason="there is no compiled code"),
)


def lengths_batch(lengths: list[int]) -> Packed:
    return pack([[0] * length for length in lengths])


def projections(tokens: int, heads: int, width: int, **options: object) -> torch.Tensor:
    """Queries, keys and values as the encoder makes them: in one tensor."""
    generator = torch.Generator().manual_seed(tokens)
    together = torch.randn(tokens, 3, heads, width, generator=generator)
    return (2 * together.to(**options)).requires_grad_()  # type: ignore[call-overload]


@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=7),
    heads=st.integers(1, 3),
    width=st.sampled_from([1, 5, 8]),
    causal=st.booleans(),
)
@settings(max_examples=60, deadline=None)
@pytest.mark.parametrize("kernel", [compiled, "grouped", "padded"])
def test_kernels_agree_with_the_definition(
    kernel: str, lengths: list[int], heads: int, width: int, causal: bool
) -> None:
    packed = lengths_batch(lengths)
    projected = projections(sum(lengths), heads, width)
    wanted = reference(projected, packed, causal, 0.0)
    got = KERNELS[kernel](projected, packed, causal, 0.0)
    assert got.shape == wanted.shape
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [[6, 6, 6], [3, 9, 9, 1, 4]])
@pytest.mark.parametrize("kernel", [compiled, "grouped", "padded"])
def test_gradients_agree_with_the_definition(kernel: str, lengths: list[int], causal: bool) -> None:
    packed = lengths_batch(lengths)
    weights = torch.randn(sum(lengths), 2, 4, generator=torch.Generator().manual_seed(3))
    gradients = []
    for name in (kernel, "reference"):
        projected = projections(sum(lengths), 2, 4)
        loss = (KERNELS_AND_REFERENCE[name](projected, packed, causal, 0.0) * weights).sum()
        gradients += torch.autograd.grad(loss, projected)
    torch.testing.assert_close(*gradients, atol=1e-5, rtol=1e-5)


def test_a_causal_token_does_not_see_later_ones() -> None:
    packed = lengths_batch([4, 6])
    projected = projections(10, 2, 4).detach()
    before = attention(projected, packed, causal=True)
    projected[7:10, 1:] += 1  # keys and values
    after = attention(projected, packed, causal=True)
    assert torch.equal(before[:7], after[:7])
    assert not torch.equal(before[7:], after[7:])


@pytest.mark.parametrize("kernel", [compiled, "grouped", "padded", "reference"])
@pytest.mark.parametrize("lengths", [[16, 16, 16, 16], [5, 16, 11]])
def test_dropout_removes_a_tenth_of_the_weights_and_keeps_the_mean(
    kernel: str, lengths: list[int]
) -> None:
    torch.manual_seed(0)
    packed = lengths_batch(lengths)
    tokens = sum(lengths)
    # equal scores: each weight is 1/length; with one-hot values the output shows the weights
    flat = torch.zeros(tokens, 64, 16)
    position = packed.position_ids[:, None].expand(-1, 64)
    value = torch.nn.functional.one_hot(position, 16).float()
    projected = torch.stack([flat, flat, value], dim=1)
    weights = KERNELS_AND_REFERENCE[kernel](projected, packed, False, 0.1)
    length = torch.tensor(packed.lengths).repeat_interleave(torch.tensor(packed.lengths))
    scaled = weights * length[:, None, None]
    real = (torch.arange(16) < length[:, None])[:, None].expand_as(scaled)
    assert not scaled[~real].any()
    kept = scaled[real] != 0
    assert abs(float(kept.float().mean()) - 0.9) < 0.01
    torch.testing.assert_close(
        scaled[real][kept], torch.full((int(kept.sum()),), 1 / 0.9), atol=1e-3, rtol=0
    )
    assert abs(float(scaled[real].mean()) - 1.0) < 0.01


@pytest.mark.slow
def test_gradients_pass_through_the_weights_that_dropout_kept() -> None:
    packed = lengths_batch([3, 3])
    for kernel in ("grouped", "padded"):
        projected = projections(6, 2, 3, dtype=torch.float64)

        def attend(projected: torch.Tensor, name: str = kernel) -> torch.Tensor:
            torch.manual_seed(4)  # the same mask every time
            return KERNELS_AND_REFERENCE[name](projected, packed, False, 0.3)

        assert torch.autograd.gradcheck(attend, projected)


def test_the_kernel_fits_the_device_and_the_dtype() -> None:
    projected = projections(3, 1, 8)
    assert choose_kernel(projected) == ("compiled" if step_types() else "grouped")
    assert choose_kernel(projected.double()) == "grouped"
    assert choose_kernel(torch.empty(3, 1, 8, device="meta")) == "padded"


@pytest.mark.parametrize("probability", [0.1, 0.5])
def test_hidden_dropout_keeps_the_mean_and_the_share(probability: float) -> None:
    torch.manual_seed(0)
    hidden = torch.ones(1001, 257)
    thinned = Dropout(probability)(hidden)
    kept = thinned != 0
    assert abs(float(kept.float().mean()) - (1 - probability)) < 0.004
    assert abs(float(thinned.mean()) - 1) < 0.006
    assert thinned[kept].unique().numel() == 1
    # neighbours and rows are independent
    both = (kept[:, 1:] & kept[:, :-1]).float().mean()
    assert abs(float(both) - (1 - probability) ** 2) < 0.006


def test_hidden_dropout_is_off_outside_training_and_follows_the_seed() -> None:
    layer, hidden = Dropout(0.1), torch.randn(50, 8)
    torch.manual_seed(7)
    first = layer(hidden)
    torch.manual_seed(7)
    assert torch.equal(layer(hidden), first)
    assert not torch.equal(layer(hidden), first)
    assert layer.eval()(hidden) is hidden


def test_mask_probability_is_exact_to_sixteen_bits() -> None:
    assert keep_mask(torch.Size([3, 0]), 0.1, torch.float32).shape == (3, 0)
    assert keep_scale(0.5) == 2.0
    assert abs(keep_scale(0.1) - 1 / 0.9) < 1e-5
    assert keep_scale(0.999999) == 1 << 16, "one element of 65,536 is kept"
    kept = keep_mask(torch.Size([1 << 20]), 0.999999, torch.float32).sum()
    assert 1 <= float(kept) <= 64
    for probability in (0.01, 0.9):
        masks = []
        for dtype in (torch.float32, torch.bfloat16):
            torch.manual_seed(1)
            masks.append(keep_mask(torch.Size([1 << 20]), probability, dtype))
            assert masks[-1].dtype == dtype  # booleans would be converted in every product
            assert set(masks[-1].unique().tolist()) == {0.0, 1.0}
        assert torch.equal(masks[0], masks[1].float())
        assert abs(float(masks[0].mean()) - (1 - probability)) < 0.002


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_flash_agrees_with_the_definition_on_a_gpu(dtype: torch.dtype, causal: bool) -> None:
    packed = lengths_batch([3, 64, 17, 64]).to("cuda")
    projected = projections(148, 4, 32, device="cuda", dtype=dtype)
    assert choose_kernel(projected) in ("triton", "flash")
    got = attention(projected, packed, causal=causal)
    wanted = reference(projected.float(), packed, causal, 0.0)
    torch.testing.assert_close(got.float(), wanted, atol=3e-2, rtol=3e-2)


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [[16, 16], [5, 16, 11]])
def test_padded_agrees_with_the_definition_on_a_gpu(lengths: list[int]) -> None:
    packed = lengths_batch(lengths).to("cuda")
    projected = projections(sum(lengths), 4, 32, device="cuda")
    wanted = reference(projected, packed, False, 0.0)
    got = attention(projected, packed, causal=False)
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)
    half = attention(projected.bfloat16(), packed, causal=False, dropout=0.1)
    assert half.isfinite().all()


INTERPRETED = """
import math, torch
from tests.attention import reference
from bertkit.model.native.triton_kernels import dropout_mask, packed_attention
from bertkit.pretraining_data.batch import pack

def learn(attend, projected, upward):
    own = projected.clone().requires_grad_()
    output = attend(own)
    (output * upward).sum().backward()
    return output.detach(), own.grad

torch.manual_seed(0)
lengths = [130, 64, 65, 17, 3, 1]
packed = pack([[0] * n for n in lengths])
projected, upward = torch.randn(sum(lengths), 3, 2, 32), torch.randn(sum(lengths), 2, 32)
for causal in (False, True):
    place = packed.cu_seqlens, packed.max_seqlen, causal, 0.0
    got = learn(lambda own: packed_attention(own, *place)[0], projected, upward)
    wanted = learn(lambda own: reference(own, packed, causal, 0.0), projected, upward)
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)

packed = pack([[0] * 100])  # one-hot values show the weights
projected, upward = torch.randn(100, 3, 1, 128), torch.randn(100, 1, 128)
projected[:, 2, 0] = torch.eye(100, 128)

def weights(own):
    return (own[:, 0, 0] @ own[:, 1, 0].T / math.sqrt(128)).softmax(-1)

def dropped(own):
    torch.manual_seed(5)
    return packed_attention(own, packed.cu_seqlens, 100, False, 0.3)[0]

output, gradient = learn(dropped, projected, upward)
scale = output[:, 0, :100] / weights(projected)
kept = scale > 0
assert abs(kept.float().mean() - 0.7) < 0.02
torch.testing.assert_close(scale[kept], torch.full_like(scale[kept], 1 / 0.7))
wanted = learn(
    lambda own: (weights(own) * kept / 0.7 @ own[:, 2, 0])[:, None], projected, upward
)
torch.testing.assert_close((output, gradient), wanted, atol=1e-5, rtol=1e-5)

def mask(seed, probability=0.1):
    torch.manual_seed(seed)
    return dropout_mask(torch.empty(1000, 63), probability)

assert mask(0).shape == (1000, 63)
assert mask(0).dtype == torch.bool
assert torch.equal(mask(0), mask(0))
for probability in (0.1, 0.5):  # of 63,000 elements, in rows, columns, and pairs of seeds
    one, other = 1.0 - mask(1, probability).double(), 1.0 - mask(2, probability).double()
    assert abs(one.mean() - probability) < 0.006
    assert (one.mean(0) - probability).abs().max() < 0.07
    assert (one.mean(1) - probability).abs().max() < 0.3
    assert abs((one * other).mean() - probability**2) < 0.006
    for shift in (1, 63, 64, 1024):
        both = one.flatten() * one.flatten().roll(shift)
        assert abs(both.mean() - probability**2) < 0.006
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_tritons_kernels_agree_with_the_definition() -> None:
    """In Triton's interpreter, which needs no GPU; also which weights dropout keeps."""
    environment = {k: v for k, v in os.environ.items() if k != "BERTKIT_CHECK_SHAPES"}
    done = python("-c", INTERPRETED, env={**environment, "TRITON_INTERPRET": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
