"""Training steps on a CPU: attention and LayerNorm in compiled code, and cheap dropout.

Attention with its dropout, and LayerNorm of a residual sum with dropout, are a dozen operators of
torch each, forward and backward, each of which reads and writes all activations. On x86-64 native.c
does them in one pass.

Dropout (Srivastava et al. 2014; paper section A.2): on a CPU torch draws one double per element,
one after the other, which takes longer than the matrix product before it. Sixteen random bits per
element are as good and four times as fast: the probability is rounded to a multiple of 1/65536
(0.1 becomes 0.100006), and the scale of the kept values uses the rounded probability, so the mean
is preserved.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from bertkit.model.native.library import call_compiled, compiled, step_types, threads_for
from bertkit.pretraining_data.batch import Packed

WIDEST_HEAD = 256


def has_compiled_steps(x: Tensor, residual: Tensor) -> bool:
    """Return whether a training step on these activations and residual sums is compiled code."""
    plain = x.device.type == "cpu" and not torch.compiler.is_compiling()
    return plain and (x.dtype, residual.dtype) in step_types()


def draw_seed(probability: float) -> int:
    """Return the seed of a step's dropout: 64 bits of torch's default generator."""
    if not probability:
        return 0
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_(-(1 << 63), None))


def has_compiled_attention(query: Tensor) -> bool:
    """Return whether attention on (tokens, heads, head width) queries is compiled code."""
    return query.shape[-1] <= WIDEST_HEAD and has_compiled_steps(query, query)


class CompiledAttention(torch.autograd.Function):
    """Attention within each sequence of a packed batch, with dropout, in compiled code."""

    @staticmethod
    def forward(
        ctx: Any, projected: Tensor, packed: Packed, causal: bool, dropout: float
    ) -> Tensor:
        """Return (tokens, heads, head width) the weighted sums of values; see `attention`."""
        tokens, _, heads, width = projected.shape
        attended = projected.new_empty(tokens, heads, width)
        logarithms = projected.new_empty(tokens, heads, dtype=torch.float32)
        kind = step_types()[projected.dtype, projected.dtype][0]
        boundaries, longest = packed.cu_seqlens, packed.max_seqlen
        sequences = len(boundaries) - 1
        ctx.sizes = kind, heads, width, -int(causal), boundaries, sequences, longest
        ctx.dropout = draw_seed(dropout), float(dropout)
        attend_compiled(ctx, projected.contiguous(), attended, logarithms, None, None)
        ctx.save_for_backward(projected, attended, logarithms)
        return attended

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        """Return the gradient of queries, keys and values."""
        projected, attended, logarithms = ctx.saved_tensors
        projected, gradient = projected.contiguous(), torch.empty_like(projected)
        upstream = gradients[0].contiguous()
        attend_compiled(ctx, projected, attended, logarithms, upstream, gradient)
        return gradient, None, None, None


def attend_compiled(ctx: Any, projected: Tensor, *others: Tensor | None) -> None:
    """Call the compiled attention, forward or backward, with memory for its threads."""
    _, _, width, *_, longest = ctx.sizes
    bytes_of_a_thread = compiled().bertkit_attention_bytes(*map(ctypes.c_int64, (width, longest)))
    threads = threads_for(projected.numel())
    memory = projected.new_empty(threads * bytes_of_a_thread, dtype=torch.uint8)
    call_compiled("attention", *ctx.sizes, projected, *others, *ctx.dropout, memory, threads)


class AddNorm(torch.autograd.Function):
    """LayerNorm(dropout(x) + residual) in compiled code."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float, drop: float
    ) -> Tensor:
        """Return (rows, width) in the dtype of the residual.

        Args:
            ctx: what the backward pass needs.
            x: (rows, width) what is added.
            residual: (rows, width), of a dtype that `step_types` has with that of x.
            weight: (width,) fp32, of the LayerNorm.
            bias: (width,) fp32, of the LayerNorm.
            eps: the constant added to the variance.
            drop: the probability of setting an element of x to 0.
        """
        x, residual = x.contiguous(), residual.contiguous()
        y, normalized = torch.empty_like(residual), torch.empty_like(residual)
        deviations = weight.new_empty(len(x))
        ctx.sizes = *step_types()[x.dtype, residual.dtype], *x.shape
        ctx.dropout = draw_seed(drop), float(drop), threads_for(x.numel())
        ctx.dtype = x.dtype
        read, written = (x, residual, weight, bias), (y, normalized, deviations)
        call_compiled("add_norm", *ctx.sizes, *read, *written, float(eps), *ctx.dropout)
        ctx.save_for_backward(weight, normalized, deviations)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, None, None]:
        """Return the gradients of x, the residual, the weight and the bias."""
        weight, normalized, deviations = ctx.saved_tensors
        upstream, own = gradients[0].contiguous(), torch.empty_like(normalized)
        gradient = torch.empty_like(normalized, dtype=ctx.dtype)
        parts = -(-len(upstream) // compiled().bertkit_rows_of_a_part())
        sums = weight.new_empty(parts, 2, len(weight))
        read, written = (upstream, weight, normalized, deviations), (gradient, own, sums)
        call_compiled("add_norm_gradients", *ctx.sizes, *read, *written, *ctx.dropout)
        return gradient, own, *sums.sum(dim=0), None, None


UNIFORM_STEPS = 1 << 16


def keep_mask(shape: torch.Size, probability: float, dtype: torch.dtype) -> Tensor:
    """Return a CPU tensor of ones, with zeros at `probability`, from torch's default generator.

    It has the `dtype` of the tensor it multiplies: converting booleans would take longer than the
    multiplication itself.
    """
    count = math.prod(shape)
    words = torch.empty(-(-count // 4), dtype=torch.int64, device="cpu")
    words.random_(-(1 << 63), None)  # None: all 64 bits; the default never sets the sign bit
    uniform = words.view(torch.int16)[:count].view(shape)
    ones = torch.empty(shape, dtype=dtype, device="cpu")
    return torch.ge(uniform, dropped_steps(probability) - UNIFORM_STEPS // 2, out=ones)


def keep_scale(probability: float) -> float:
    """Return the factor for kept elements: one over their exact probability of being kept."""
    return UNIFORM_STEPS / (UNIFORM_STEPS - dropped_steps(probability))


def dropped_steps(probability: float) -> int:
    """Return how many of the 65,536 values of a draw drop an element; one at least keeps it."""
    return min(round(probability * UNIFORM_STEPS), UNIFORM_STEPS - 1)
