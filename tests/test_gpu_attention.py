"""The attention kernels on a CUDA device, above all flash attention's dropout.

Like `tests.test_gpu`, this may run on a machine with little else than torch.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bertkit.model.native.attention import KERNELS, choose_kernel
from bertkit.pretraining_data.batch import pack
from tests.attention import KERNELS_AND_REFERENCE
from tests.test_gpu import distance, gpu

pytestmark = pytest.mark.filterwarnings("default")


@gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kernel", ["triton", "flash", "padded"])
def test_kernels_agree_forward_and_backward(kernel: str, causal: bool) -> None:
    """In bf16, against the definition in fp32."""
    packed = pack([[0] * length for length in (128, 64, 64, 17, 3, 1)]).to("cuda")
    generator = torch.Generator().manual_seed(0)
    together = torch.randn(277, 3, 4, 64, generator=generator).to("cuda", torch.bfloat16)
    weights = torch.randn(277, 4, 64, generator=generator).to("cuda")
    found: list[tuple[Any, Any]] = []
    for name, dtype in ((kernel, torch.bfloat16), ("reference", torch.float32)):
        own = together.to(dtype).clone().requires_grad_()
        output = KERNELS_AND_REFERENCE[name](own, packed, causal, 0.0)
        torch.autograd.backward((output.float() * weights).sum())
        found.append((output, own.grad))
    for got, wanted in zip(*found, strict=True):
        assert got.isfinite().all()
        assert distance(got, wanted) < 1e-2


def attend(
    lengths: list[int], kernel: str, dropout: float = 0.0, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Output, values and their gradients of one attention in bf16, of the same random tokens.

    The output is its own upstream gradient. The seed is that of dropout.
    """
    packed = pack([[0] * length for length in lengths]).to("cuda")
    generator = torch.Generator().manual_seed(0)
    together = torch.randn(sum(lengths), 3, 4, 64, generator=generator)
    together = together.to("cuda", torch.bfloat16).requires_grad_()
    torch.manual_seed(seed)
    output = KERNELS[kernel](together, packed, False, dropout)
    torch.autograd.backward(output, output.detach())
    assert together.grad is not None
    return output.detach(), together.detach()[:, 2], together.grad


RAGGED = [512, 300, 129, 128, 127, 64, 64, 17, 8, 3, 1]

each_kernel = pytest.mark.parametrize("kernel", ["triton", "flash"])


@gpu
@each_kernel
def test_attention_equals_padded_attention_on_ragged_lengths(kernel: str) -> None:
    for got, wanted in zip(attend(RAGGED, kernel), attend(RAGGED, "padded"), strict=True):
        assert got.isfinite().all()
        assert distance(got, wanted) < 1e-2


@gpu
def test_triton_is_chosen() -> None:
    query = torch.zeros(8, 4, 64, device="cuda", dtype=torch.bfloat16)
    hopper = torch.cuda.get_device_capability()[0] == 9
    assert choose_kernel(query) == ("triton" if hopper else "flash")
    assert choose_kernel(query[:, :, :40]) == "flash"
    assert choose_kernel(query.float()) == "padded"


@gpu
@each_kernel
def test_the_seed_decides_what_is_dropped(kernel: str) -> None:
    first, again, other = (attend(RAGGED, kernel, 0.1, seed) for seed in (1, 1, 2))
    assert torch.equal(first[0], again[0])
    assert distance(other[0], first[0]) > 0.1
    assert first[2].isfinite().all()
    assert distance(again[2], first[2]) < 1e-3  # flash adds in another order
    assert kernel == "flash" or torch.equal(again[2], first[2])


@gpu
@each_kernel
def test_the_gradient_is_that_of_what_was_kept(kernel: str) -> None:
    """The output is linear in the values: <output, output> = <gradient of the values, values>."""
    for seed in range(3):
        output, value, gradient = attend(RAGGED, kernel, 0.3, seed)
        wanted = output.double().square().sum()
        got = (gradient[:, 2].double() * value.double()).sum()
        assert float(got / wanted) == pytest.approx(1.0, abs=0.02)


@gpu
@each_kernel
def test_the_mean_over_dropout_is_attention_without_dropout(kernel: str) -> None:
    """300 seeds leave about 0.33 / sqrt(300) = 0.02 of noise; a wrong scale would be 0.1 off."""
    lengths = [200, 128, 90, 17]
    plain = attend(lengths, kernel)[0].double()
    total = sum(attend(lengths, kernel, 0.1, seed)[0].double() for seed in range(300))
    assert distance(total / 300, plain) < 0.05
    assert distance(attend(lengths, kernel, 0.1, 0)[0], plain) > 0.1


@gpu
def test_dropping_nearly_nothing_is_near_to_plain_attention() -> None:
    """Flash knows probabilities in steps of 1/256, which is a noise of 1/16."""
    wanted = attend(RAGGED, "padded")[0]
    for kernel, most in (("triton", 0.06), ("flash", 0.12)):
        assert distance(attend(RAGGED, kernel, 1e-3)[0], wanted) < most
