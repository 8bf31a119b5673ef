"""Attention within each sequence of a packed batch: one function in front of every kernel.

Paper section 3 (Vaswani et al. 2017, section 3.2.1). This is the only part of the encoder's layers
that reads sequence boundaries, and padding exists only inside a kernel.

| kernel    | used for                        | method                                        |
|-----------|---------------------------------|-----------------------------------------------|
| compiled  | CPU, x86-64                     | native.c, a sequence and a head at a time      |
| grouped   | CPU otherwise                   | one call of torch per run of equal lengths     |
| triton    | CUDA on Hopper, 16 bits         | `bertkit.model.triton_attention`              |
| flash     | CUDA otherwise, 16 bits         | torch's flash attention on the packed tokens  |
| padded    | other devices, fp32 on CUDA     | pads query, key, value; masks the padded keys |
| reference | tests                           | a block mask over all pairs of tokens         |
"""

from __future__ import annotations

import math
import os
import shutil
import sysconfig
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from bertkit.errors import BertkitError, nearest
from bertkit.model.cpu import CompiledAttention, has_compiled_attention, pad_rows
from bertkit.pretraining_data.batch import Packed
from bertkit.shapes import Heads


def has_compiler() -> bool:
    """Return whether there is a C compiler, without which Triton compiles nothing."""
    return bool(os.environ.get("CC") or any(map(shutil.which, ("cc", "gcc", "clang"))))


def has_triton() -> bool:
    """Return whether Triton can compile kernels: it needs a C compiler and Python's headers."""
    if torch.version.cuda is None or find_spec("triton") is None:
        return False
    return has_compiler() and Path(sysconfig.get_path("include"), "Python.h").is_file()


HAS_TRITON = has_triton()
if HAS_TRITON:
    from bertkit.model.triton_attention import WIDTHS, packed_attention

DIRECTIONS = ("bidirectional", "left_to_right", "right_to_left")
WINDOWS = dict(zip(DIRECTIONS, ((-1, -1), (-1, 0), (0, -1)), strict=True))
"""How many tokens a token sees to its left and right, in the flash kernel's terms; -1: all."""

FLASH_ARGUMENTS = (
    *("query", "key", "value", "cum_seq_q", "cum_seq_k", "max_q", "max_k"),
    *("dropout_p", "is_causal", "return_debug_mask", "scale"),
    *("window_size_left", "window_size_right"),
)
"""The first arguments of torch's operator for flash attention on packed tokens, in their order.

The operator is private, because torch's public functions for packed tokens have no dropout
(`varlen_attn`, `flex_attention`) or wrap this one (jagged nested tensors)."""


def attention(
    query: Heads,
    key: Heads,
    value: Heads,
    packed: Packed,
    *,
    direction: str = "bidirectional",
    dropout: float = 0.0,
    kernel: str = "auto",
) -> Heads:
    """Return softmax(query key^T / sqrt(head width)) value, computed within each sequence.

    Args:
        query: (tokens, heads, head width) queries; keys and values have the same shape.
        key: the keys, see query.
        value: the values, see query.
        packed: the batch, which holds the sequence boundaries.
        direction: which tokens of its sequence a token attends to: all of them, or itself and those
            before it ("left_to_right", the ablation in the paper's section 5.1) or after it
            ("right_to_left").
        dropout: the probability of setting an attention weight to 0; pass 0 for evaluation.
        kernel: "auto" or a kernel name from the module's table.

    Raises:
        BertkitError: the kernel or the direction is unknown.
    """
    if direction not in DIRECTIONS:
        raise BertkitError(f"unknown direction '{direction}'{nearest(direction, DIRECTIONS)}")
    if kernel == "auto":
        kernel = choose_kernel(query, dropout)
    if kernel not in KERNELS:
        raise BertkitError(f"unknown attention kernel '{kernel}'{nearest(kernel, KERNELS)}")
    return KERNELS[kernel](query, key, value, packed, direction=direction, dropout=dropout)


def self_attention(
    projected: Tensor, packed: Packed, *, direction: str, dropout: float = 0.0
) -> Heads:
    """Return `attention` of queries, keys and values that lie in one tensor, by the best kernel.

    Args:
        projected: (tokens, 3, heads, head width) queries, keys and values.
        packed: the batch, which holds the sequence boundaries.
        direction: see `attention`.
        dropout: see `attention`.
    """
    query, key, value = projected.unbind(1)
    kernel = choose_kernel(query, dropout)
    if kernel in FROM_ONE_TENSOR:
        return FROM_ONE_TENSOR[kernel](projected, packed, direction, dropout)
    return attention(query, key, value, packed, direction=direction, dropout=dropout, kernel=kernel)


def has_flash() -> bool:
    """Return whether this torch has flash attention, with the arguments that `flash` passes."""
    operator = getattr(torch.ops.aten, "_flash_attention_forward", None)
    built = torch.version.cuda is None or torch.backends.cuda.is_flash_attention_available()
    if operator is None or not built:
        return False
    found = tuple(argument.name for argument in operator.default._schema.arguments)
    return found[: len(FLASH_ARGUMENTS)] == FLASH_ARGUMENTS


HAS_FLASH = has_flash()
"""Determined at import, because compiled layers cannot read an operator's schema."""


def choose_kernel(query: Heads, dropout: float) -> str:
    """Return the name of the fastest kernel that supports the device and dtype of `query`.

    Args:
        query: (tokens, heads, head width) queries.
        dropout: the probability of dropping an attention weight; every kernel supports it.
    """
    if query.device.type == "cpu":
        return "compiled" if has_compiled_attention(query) else "grouped"
    if query.device.type != "cuda" or query.dtype not in (torch.float16, torch.bfloat16):
        return "padded"
    major, _ = torch.cuda.get_device_capability(query.device)
    if HAS_TRITON and major == 9 and query.shape[-1] in WIDTHS:
        return "triton"
    flash = HAS_FLASH and major >= 8 and query.shape[-1] % 8 == 0 and query.shape[-1] <= 256
    return "flash" if flash else "padded"


def grouped(
    query: Heads, key: Heads, value: Heads, packed: Packed, *, direction: str, dropout: float
) -> Heads:
    """Compute attention with one call of torch for each run of sequences of one length.

    The tensors are split, not sliced: the gradient of `split` is one concatenation, whereas every
    slice would have a full-size tensor of zeros as its gradient.
    """
    runs = packed.equal_lengths
    sizes = [run.sequences * run.length for run in runs]
    outputs = []
    for run, *parts in zip(
        runs, *(torch.split(tensor, sizes) for tensor in (query, key, value)), strict=True
    ):
        q, k, v = (part.unflatten(0, (run.sequences, run.length)).transpose(1, 2) for part in parts)
        if direction == "right_to_left":  # the same as left_to_right on the reversed sequence
            q, k, v = (part.flip(2) for part in (q, k, v))
        causal = direction != "bidirectional"
        output = scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=causal)
        output = output.flip(2) if direction == "right_to_left" else output
        outputs.append(output.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs)


def visible_positions(length: int, direction: str, device: torch.device) -> Tensor:
    """Return a (length, length) bool mask: whether the row's query sees the column's key."""
    every = torch.ones(length, length, dtype=torch.bool, device=device)
    if direction == "bidirectional":
        return every
    return every.tril() if direction == "left_to_right" else every.triu()


def flash(
    query: Heads, key: Heads, value: Heads, packed: Packed, *, direction: str, dropout: float
) -> Heads:
    """Compute flash attention on packed tokens (CUDA, fp16 or bf16).

    The state of dropout's random numbers stays on the device and follows `torch.manual_seed`.
    """
    left, right = WINDOWS[direction]
    output: Tensor = torch.ops.aten._flash_attention_forward(
        *(query, key, value),
        *(packed.cu_seqlens, packed.cu_seqlens, packed.max_seqlen, packed.max_seqlen),
        *(dropout, direction == "left_to_right", False),
        scale=None,
        window_size_left=left,
        window_size_right=right,
    )[0]
    return output


def triton(
    query: Heads, key: Heads, value: Heads, packed: Packed, *, direction: str, dropout: float
) -> Heads:
    """Put queries, keys and values into one tensor, as `self_attention` has them already."""
    return by_triton(torch.stack([query, key, value], dim=1), packed, direction, dropout)


def by_triton(projected: Tensor, packed: Packed, direction: str, dropout: float) -> Heads:
    """Call the Triton kernels with (tokens, 3, heads, head width) queries, keys and values."""
    output: Tensor = packed_attention(
        projected, packed.cu_seqlens, packed.max_seqlen, direction, dropout
    )[0]
    return output


def compiled_kernel(
    query: Heads, key: Heads, value: Heads, packed: Packed, *, direction: str, dropout: float
) -> Heads:
    """Put queries, keys and values into one tensor, as `self_attention` has them already."""
    return by_compiled_code(torch.stack([query, key, value], dim=1), packed, direction, dropout)


def by_compiled_code(projected: Tensor, packed: Packed, direction: str, dropout: float) -> Heads:
    """Call native.c with (tokens, 3, heads, head width) queries, keys and values."""
    output: Tensor = CompiledAttention.apply(projected, packed, direction, dropout)  # type: ignore[no-untyped-call]
    return output


FROM_ONE_TENSOR = {"compiled": by_compiled_code, "triton": by_triton}
"""The kernels that read queries, keys and values from one tensor."""


def padded(
    query: Heads, key: Heads, value: Heads, packed: Packed, *, direction: str, dropout: float
) -> Heads:
    """Pad to (sequences, heads, max length, width), attend, and remove the padding again.

    Nothing here waits for the device: shapes come from `max_seqlen` and the sizes of tensors.
    """
    sequences, max_length = len(packed.cu_seqlens) - 1, packed.max_seqlen
    full = sequences * max_length == len(query)  # then all sequences have the same length
    if full:
        inside, mask = None, None
    else:
        lengths = packed.cu_seqlens.diff()
        rows = torch.arange(sequences, device=query.device)
        rows = rows.repeat_interleave(lengths, output_size=len(query))
        inside = rows * max_length + packed.position_ids
        real = torch.arange(max_length, device=query.device) < lengths[:, None]
        mask = real[:, None, None, :].expand(-1, 1, max_length, -1)
    if direction == "left_to_right":
        mask = None  # is_causal suffices: all padded keys come after a real query
    elif direction == "right_to_left":
        after = visible_positions(max_length, direction, query.device)
        # A padded query sees itself: a row without keys would give NaN in the backward pass.
        mask = after if mask is None else after & (mask | after.T)

    q, k, v = (pad_rows(rows, inside, sequences, max_length) for rows in (query, key, value))
    output = scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=direction == "left_to_right"
    )
    rows_out = output.transpose(1, 2).flatten(0, 1)
    return rows_out if inside is None else rows_out.index_select(0, inside)


def reference(
    query: Heads, key: Heads, value: Heads, packed: Packed, *, direction: str, dropout: float
) -> Heads:
    """Compute attention by its definition, with a block-diagonal mask over all token pairs."""
    tokens = torch.arange(len(query), device=query.device)
    sequence = torch.searchsorted(packed.cu_seqlens, tokens, right=True)
    allowed = sequence[:, None] == sequence[None, :]
    allowed &= visible_positions(len(tokens), direction, query.device)
    scores = torch.einsum("qhd,khd->hqk", query, key) / math.sqrt(query.shape[-1])
    weights = scores.masked_fill(~allowed, -math.inf).softmax(dim=-1)
    weights = torch.dropout(weights, dropout, train=True)
    return torch.einsum("hqk,khd->qhd", weights, value)


KERNELS = {
    "compiled": compiled_kernel,
    "grouped": grouped,
    "triton": triton,
    "flash": flash,
    "padded": padded,
    "reference": reference,
}


def has_bf16() -> bool:
    """Return whether the CPU multiplies bf16 matrices (AVX512-BF16 or AMX; Arm is untested)."""
    able = torch.cpu.get_capabilities()
    return bool(able.get("avx512_bf16") or able.get("amx_bf16"))


def has_products(dtype: torch.dtype = torch.float32) -> bool:
    """Return whether oneDNN's fast matrix products with a fused GELU or sum are available.

    In bf16 they need AVX512 or AVX-NE-CONVERT. On Arm with the Compute Library they exist but are
    not fast; torch's compiler does not use them there either.
    """
    there = torch._C._has_mkldnn and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    if not there or torch.ops.mkldnn._is_mkldnn_acl_supported():
        return False
    return dtype != torch.bfloat16 or torch.ops.mkldnn._is_mkldnn_bf16_supported()
