"""The compiled code (native.c): loading, calls, and the steps of training on a CPU.

It is compiled when bertkit is installed, if there is a C compiler (hatch_build.py), once for AVX512
and once for AVX2. Without it torch's operators compute the same, more slowly: attention with its
dropout, and LayerNorm of a residual sum with dropout, are a dozen operators of torch each, forward
and backward, which read and write all activations; native.c does each in one pass.

Dropout (Srivastava et al. 2014; paper section A.2): on a CPU torch draws one double per element,
one after the other, which takes longer than the matrix product before it. Sixteen random bits per
element are as good and four times as fast: the probability is rounded to a multiple of 1/65536
(0.1 becomes 0.100006), and the scale of the kept values uses the rounded probability, so the mean
is preserved.
"""

from __future__ import annotations

import ctypes
import math
import os
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from bertkit.pretraining_data.batch import Packed
from bertkit.tokenizer.wordpiece import compiled_library

SOURCE = Path(__file__).with_name("native.c")
NATIVE_LIBRARIES = {"avx512": {"avx512_dq"}, "avx2": {"avx2", "fma3"}}
"""The names of the sets of instructions for which the code is compiled, the fastest first, and what
the processor needs for each, by torch's names."""
MODES = ("fp32", "bf16", "int8")
"""What matrix products of inference are computed in, in the order of native.c."""
SIZES = (
    *("layer_bytes", "parts_bytes", "attention_bytes"),
    *("panel", "element_size", "rows_of_a_part", "tiles"),
)
"""The functions of the compiled code that return a number."""
C_NUMBERS = {int: ctypes.c_int64, float: ctypes.c_double}
ELEMENTS_PER_THREAD = 1 << 14
"""The minimum number of elements of a step for which another thread pays off."""


@cache
def library() -> ctypes.CDLL | None:
    """Return the compiled code for this processor; None if it was not built from native.c as it is.

    The environment variable BERTKIT_NATIVE=0 switches it off, and BERTKIT_NATIVE=avx2 or avx512
    names the instructions to use; otherwise these are AVX512 with AMX, if the processor has it.
    """
    chosen, able = os.environ.get("BERTKIT_NATIVE", "1"), torch.cpu.get_capabilities()
    for name, needed in NATIVE_LIBRARIES.items():
        if chosen in ("1", name) and all(map(able.get, needed)):
            code = compiled_library(SOURCE, name)
            if code is not None:
                for function in SIZES:
                    getattr(code, f"bertkit_{function}").restype = ctypes.c_int64
                code.bertkit_use_tiles(ctypes.c_int64(chosen == "1"))
                return code
    return None


def compiled() -> ctypes.CDLL:
    """Return the compiled code, where it is known to be there."""
    code = library()
    assert code is not None
    return code


def uses_tiles() -> bool:
    """Return whether compiled products use AMX."""
    code = library()
    return bool(code and code.bertkit_tiles())


def element_size(mode: str) -> int:
    """Return the bytes of an element in compiled products of a mode, 0 if there are none."""
    code = library()
    return code.bertkit_element_size(ctypes.c_int64(MODES.index(mode))) if code else 0


@cache
def step_types() -> dict[tuple[torch.dtype, torch.dtype], tuple[int, int]]:
    """Return the dtypes of activations and residual sums of compiled training steps.

    The values are native.c's names for them; without the compiled code there are none.
    """
    code, fp32, bf16 = library(), torch.float32, torch.bfloat16
    if code is None:
        return {}
    if not element_size("bf16") or not torch.cpu.get_capabilities().get("avx512_bf16"):
        return {(fp32, fp32): (0, 0)}
    return {(fp32, fp32): (0, 0), (bf16, fp32): (1, 0), (bf16, bf16): (1, 1)}


def has_bf16() -> bool:
    """Return whether the CPU multiplies bf16 matrices (AVX512-BF16 or AMX; Arm is untested)."""
    able = torch.cpu.get_capabilities()
    return bool(able.get("avx512_bf16") or able.get("amx_bf16"))


def call_compiled(name: str, *arguments: Any) -> None:
    """Call a function of the compiled code; tensors and numbers become pointers and 64 bits."""

    def converted(argument: Any) -> Any:
        if isinstance(argument, Tensor):
            return ctypes.c_void_p(argument.data_ptr())
        kind = C_NUMBERS.get(type(argument))
        return kind(argument) if kind else argument  # ctypes passes None as a null pointer

    getattr(compiled(), f"bertkit_{name}")(*map(converted, arguments))


def threads_for(count: int, least: int = ELEMENTS_PER_THREAD) -> int:
    """Return the number of threads, at most torch's, that have at least `least` of a count each."""
    return min(torch.get_num_threads(), max(1, count // least))


# Steps of training --------------------------------------------------------------------------------

WIDEST_HEAD = 256


def has_compiled_steps(x: Tensor, residual: Tensor) -> bool:
    """Return whether compiled code can train on these activations and residual sums."""
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

        `x` and `residual` are (rows, width), of dtypes that `step_types` has; `weight` and `bias`
        are (width,) fp32; `drop` is the probability of setting an element of x to 0.
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
        upstream, skip_gradient = gradients[0].contiguous(), torch.empty_like(normalized)
        gradient = torch.empty_like(normalized, dtype=ctx.dtype)
        parts = -(-len(upstream) // compiled().bertkit_rows_of_a_part())
        sums = weight.new_empty(parts, 2, len(weight))
        read, written = (upstream, weight, normalized, deviations), (gradient, skip_gradient, sums)
        call_compiled("add_norm_gradients", *ctx.sizes, *read, *written, *ctx.dropout)
        return gradient, skip_gradient, *sums.sum(dim=0), None, None


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
    mask = torch.empty(shape, dtype=dtype, device="cpu")
    return torch.ge(uniform, dropped_steps(probability) - UNIFORM_STEPS // 2, out=mask)


def keep_scale(probability: float) -> float:
    """Return the factor for kept elements: one over their exact probability of being kept."""
    return UNIFORM_STEPS / (UNIFORM_STEPS - dropped_steps(probability))


def dropped_steps(probability: float) -> int:
    """Return how many of the 65,536 values of a draw drop an element; one at least keeps it."""
    return min(round(probability * UNIFORM_STEPS), UNIFORM_STEPS - 1)
