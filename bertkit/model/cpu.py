"""Optimizations for the CPU: compiled steps of training, cheap dropout, and groups for attention.

Compiled steps: what lies between the matrix products of a layer (softmax and dropout of attention,
LayerNorm of a residual sum with dropout) is a dozen operators of torch, forward and backward, each
of which reads and writes all activations. native.c does it in one pass each, on x86-64.

Dropout (Srivastava et al. 2014; paper section A.2): on a CPU torch draws one double per element,
one after the other, which takes longer than the matrix product before it. Sixteen random bits per
element are as good and four times as fast: the probability is rounded to a multiple of 1/65536
(0.1 becomes 0.100006), and the scale of the kept values uses the rounded probability, so the mean
is preserved. Other devices use torch's own dropout.

Grouping (paper section 3): every call of an attention kernel has a fixed cost, and padding costs
time too, so neighbouring sequences of equal or similar length share one call.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from bertkit.pretraining_data.batch import EqualLengths, Packed
from bertkit.tokenizer.compiled import compiled_library

SOURCE = Path(__file__).with_name("native.c")
NATIVE_LIBRARIES = {"avx512": {"avx512_dq"}, "avx2": {"avx2", "fma3"}}
"""The names of the sets of instructions for which the code is compiled, the fastest first, and what
the processor needs for each, by torch's names."""
DIRECTION_SIGNS = {"bidirectional": 0, "left_to_right": -1, "right_to_left": 1}
MODES = ("fp32", "bf16", "int8")
"""What matrix products of inference are computed in, in the order of native.c."""
SIZES = ("layer_bytes", "parts_bytes", "panel", "element_size", "rows_of_a_part", "tiles")
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
    """Return the dtypes of activations and residual sums of compiled steps, with native.c's names.

    They are none without the compiled code.
    """
    code, fp32, bf16 = library(), torch.float32, torch.bfloat16
    if code is None:
        return {}
    if not element_size("bf16") or not torch.cpu.get_capabilities().get("avx512_bf16"):
        return {(fp32, fp32): (0, 0)}
    return {(fp32, fp32): (0, 0), (bf16, fp32): (1, 0), (bf16, bf16): (1, 1)}


def has_compiled_steps(x: Tensor, residual: Tensor) -> bool:
    """Return whether a training step on these activations and residual sums is compiled code."""
    plain = x.device.type == "cpu" and not torch.compiler.is_compiling()
    return plain and (x.dtype, residual.dtype) in step_types()


def call_compiled(name: str, *arguments: Any) -> None:
    """Call a function of the compiled code; tensors and numbers become pointers and 64 bits."""

    def converted(one: Any) -> Any:
        if isinstance(one, Tensor):
            return ctypes.c_void_p(one.data_ptr())
        kind = C_NUMBERS.get(type(one))
        return kind(one) if kind else one  # ctypes passes None as a null pointer

    getattr(compiled(), f"bertkit_{name}")(*map(converted, arguments))


def threads_for(count: int, least: int = ELEMENTS_PER_THREAD) -> int:
    """Return the number of threads, at most torch's, that have at least `least` of a count each."""
    return min(torch.get_num_threads(), max(1, count // least))


def draw_seed(probability: float) -> int:
    """Return the seed of a step's dropout: 64 bits of torch's default generator."""
    return int(torch.empty((), dtype=torch.int64).random_(-(1 << 63), None)) if probability else 0


class SoftmaxDropout(torch.autograd.Function):
    """The softmax of attention scores, followed by dropout, in compiled code."""

    @staticmethod
    def forward(
        ctx: Any, scores: Tensor, lengths: Tensor | None, direction: str, dropout: float
    ) -> Tensor:
        """Return the weights, with dropout, (items, length, length).

        Args:
            ctx: what the backward pass needs.
            scores: (items, length, length) scores, of a dtype among `step_types`.
            lengths: (items,) int32, how many keys of each item exist; None if all do.
            direction: which keys a query sees; see `attention`.
            dropout: the probability of setting a weight to 0.
        """
        weights, dropped = torch.empty_like(scores), torch.empty_like(scores)
        kind = step_types()[scores.dtype, scores.dtype][0]
        ctx.sizes = kind, *scores.shape[:2], DIRECTION_SIGNS[direction], lengths
        ctx.dropout = draw_seed(dropout), float(dropout), threads_for(scores.numel())
        call_compiled("softmax", *ctx.sizes, scores, weights, dropped, None, *ctx.dropout)
        ctx.save_for_backward(weights)
        return dropped

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        """Return the gradient of the scores."""
        [weights] = ctx.saved_tensors
        given, gradient = gradients[0].contiguous(), torch.empty_like(weights)
        call_compiled("softmax", *ctx.sizes, given, weights, None, gradient, *ctx.dropout)
        return gradient, None, None, None


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
        given, own = gradients[0].contiguous(), torch.empty_like(normalized)
        gradient = torch.empty_like(normalized, dtype=ctx.dtype)
        parts = -(-len(given) // compiled().bertkit_rows_of_a_part())
        sums = weight.new_empty(parts, 2, len(weight))
        read, written = (given, weight, normalized, deviations), (gradient, own, sums)
        call_compiled("add_norm_gradients", *ctx.sizes, *read, *written, *ctx.dropout)
        return gradient, own, *sums.sum(dim=0), None, None


UNIFORM_STEPS = 1 << 16


class Dropout(nn.Module):
    """A dropout layer: in training, elements become 0 with `probability`, others are scaled up."""

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.probability = probability

    def forward(self, hidden: Tensor) -> Tensor:
        """Return `hidden`, of any shape, with dropout applied if the module is in training mode."""
        if not self.training or self.probability == 0.0:
            return hidden
        if hidden.device.type != "cpu":
            return torch.dropout(hidden, self.probability, train=True)
        mask = keep_mask(hidden.shape, self.probability, hidden.dtype)
        return hidden * mask * keep_scale(self.probability)

    def extra_repr(self) -> str:
        """Return the probability, for `print(model)`."""
        return f"probability={self.probability}"


def keep_mask(shape: torch.Size, probability: float, dtype: torch.dtype) -> Tensor:
    """Return a CPU tensor of ones, with zeros at `probability`, from torch's default generator.

    It has the `dtype` of the tensor it multiplies: converting booleans would take longer than the
    multiplication itself.
    """
    count = math.prod(shape)
    words = torch.empty(-(-count // 4), dtype=torch.int64)
    words.random_(-(1 << 63), None)  # None: all 64 bits; the default never sets the sign bit
    uniform = words.view(torch.int16)[:count].view(shape)
    ones = torch.empty(shape, dtype=dtype)
    return torch.ge(uniform, round(probability * UNIFORM_STEPS) - UNIFORM_STEPS // 2, out=ones)


def keep_scale(probability: float) -> float:
    """Return the factor for kept elements: one over their exact probability of being kept."""
    return UNIFORM_STEPS / (UNIFORM_STEPS - round(probability * UNIFORM_STEPS))


MOST_PADDED = 1 << 13
"""How many squares of lengths a group may compute because of padding: starting the operations of
another group takes longer than computing these."""

SHORT_STEP, LEAST_LENGTH, SHORT_LENGTH, LONG_STEP = 16, 32, 128, 32
"""How `bucket_lengths` rounds: lengths up to SHORT_LENGTH to multiples of SHORT_STEP, and to at
least LEAST_LENGTH; longer ones to multiples of LONG_STEP."""


class Group(NamedTuple):
    """Neighbouring sequences that share one call."""

    sequences: int
    length: int
    """The length to which all sequences are padded."""
    tokens: int
    inside: Tensor | None
    """(tokens,) indices into the sequences x length positions; None if nothing is padded."""
    lengths: Tensor | None
    """(sequences,) int32 lengths without padding; None if nothing is padded."""


def attention_groups(packed: Packed, *, similar: bool, few: bool) -> list[Group]:
    """Return the groups of a batch, which are computed once and kept for all layers.

    Args:
        packed: the batch.
        similar: whether runs of similar lengths may share a group.
        few: whether to round lengths up, so that few different lengths occur: for each new one
            oneDNN compiles code, which takes as long as several batches, and keeps it in memory.
    """
    name = similar, few
    if name not in packed.kept:
        if few and 2 * len(packed.equal_lengths) <= len(packed.lengths):
            similar = few = False
        runs = merge_similar(packed, few=few) if similar else [[r] for r in packed.equal_lengths]
        packed.kept[name] = [sequence_group(own, few=few) for own in runs]
    return packed.kept[name]


def sequence_group(runs: Sequence[EqualLengths], *, few: bool) -> Group:
    """Return the group made of some runs, which must start with the longest one."""
    length = bucket_lengths(runs[0].length) if few else runs[0].length
    sequences = sum(run.sequences for run in runs)
    tokens = sum(run.sequences * run.length for run in runs)
    if tokens == sequences * length:
        return Group(sequences, length, tokens, None, None)
    lengths = torch.tensor(
        [run.length for run in runs for _ in range(run.sequences)], dtype=torch.int32
    )
    inside = (torch.arange(length) < lengths[:, None]).flatten().nonzero().squeeze(1)
    return Group(sequences, length, tokens, inside, lengths)


def bucket_lengths(length: int) -> int:
    """Return the rounded length to which a sequence of this length is padded."""
    step = SHORT_STEP if length <= SHORT_LENGTH else LONG_STEP
    return max(LEAST_LENGTH, -(-length // step) * step)


def merge_similar(packed: Packed, *, few: bool = False) -> list[list[EqualLengths]]:
    """Merge neighbouring runs, each padded to the first of its group, up to `MOST_PADDED`.

    Args:
        packed: the batch.
        few: whether to compare rounded lengths.
    """
    groups: list[list[EqualLengths]] = []
    padded = 0
    for run in packed.equal_lengths:
        first = groups[-1][0].length if groups else 0
        own, whole = (bucket_lengths(n) if few else n for n in (run.length, first))
        padded += run.sequences * (whole**2 - own**2)
        if run.length <= first and padded <= MOST_PADDED:
            groups[-1].append(run)
        else:
            groups.append([run])
            padded = 0
    return groups


def pad_rows(rows: Tensor, inside: Tensor | None, sequences: int, max_length: int) -> Tensor:
    """Return packed rows as (sequences, heads, max_length, head width), padded with zeros.

    Args:
        rows: (tokens, heads, head width) packed rows.
        inside: (tokens,) indices into the sequences x max_length positions; None without padding.
        sequences: the number of sequences.
        max_length: the length to which every sequence is padded.
    """
    if inside is not None:
        empty = rows.new_zeros(sequences * max_length, *rows.shape[1:])
        rows = empty.index_copy(0, inside, rows)
    return rows.view(sequences, max_length, *rows.shape[1:]).transpose(1, 2)
