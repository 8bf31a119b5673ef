"""Attention within each sequence of a packed batch: one function in front of every kernel.

Paper section 3 (Vaswani et al. 2017, section 3.2.1). This is the only part of the encoder's layers
that reads sequence boundaries, and padding exists only inside a kernel.

| kernel    | used for                        | method                                        |
|-----------|---------------------------------|-----------------------------------------------|
| grouped   | CPU                             | one call per group of similar sequence lengths |
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
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from bertkit.errors import BertkitError, nearest
from bertkit.model.cpu import (
    SoftmaxDropout,
    attention_groups,
    has_compiled_steps,
    keep_mask,
    keep_scale,
    pad_rows,
)
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

CACHED_WEIGHTS = 1 << 19
"""The number of attention weights computed at a time on a CPU: one or two megabytes."""

EVEN_SOFTMAX = 256
"""Below this length torch's bf16 softmax is slow, unless the length is a multiple of 32."""

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
    if kernel == "triton":
        return together(projected, packed, direction, dropout)
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
        return "grouped"
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
    """Compute attention with one batched call for each group of neighbouring sequences.

    With dropout a call consists of many small operations, so runs of sequences with similar lengths
    share one call and are padded inside it. In bf16 inference only short sequences share a call and
    long ones are padded to a rounded length, and only in batches with few sequences of each length,
    as on a server. Otherwise a group is a run of equal lengths, and nothing is padded.

    The tensors are split, not sliced: the gradient of `split` is one concatenation, whereas every
    slice would have a full-size tensor of zeros as its gradient.
    """
    few = query.dtype == torch.bfloat16 and not (dropout or torch.is_grad_enabled())
    groups = attention_groups(packed, similar=few or dropout > 0, few=few)
    sizes = [group.tokens for group in groups]
    outputs = []
    for group, *parts in zip(
        groups, *(torch.split(tensor, sizes) for tensor in (query, key, value)), strict=True
    ):
        q, k, v = (pad_rows(part, group.inside, group.sequences, group.length) for part in parts)
        output = sequences_attention(
            q, k, v, direction=direction, dropout=dropout, lengths=group.lengths
        )
        output = output.transpose(1, 2).flatten(0, 1)
        outputs.append(output if group.inside is None else output.index_select(0, group.inside))
    return concatenate(outputs)


def sequences_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    direction: str,
    dropout: float,
    lengths: Tensor | None = None,
) -> Tensor:
    """Compute attention on a CPU for sequences that are padded to one length.

    torch's flash kernel is the fastest in fp32 without dropout. It does not support dropout, and in
    bf16 `explicit_attention` is faster; that runs a few heads at a time, to stay in the cache.
    Tensors are (sequences, heads, length, head width); `lengths` is (sequences,) or None.
    """
    if dropout == 0.0 and query.dtype == torch.float32 and lengths is None:
        if direction == "right_to_left":  # the same as left_to_right on the reversed sequence
            q, k, v = (tensor.flip(2) for tensor in (query, key, value))
            return scaled_dot_product_attention(q, k, v, is_causal=True).flip(2)
        causal = direction == "left_to_right"
        return scaled_dot_product_attention(query, key, value, is_causal=causal)
    sequences, heads, length, width = query.shape
    every = sequences * heads
    step = max(1, CACHED_WEIGHTS // length**2)
    there: Sequence[Tensor | None] = [None] * -(-every // step)
    if lengths is not None:
        there = torch.split(lengths.repeat_interleave(heads), step)
    merged = (tensor.reshape(every, length, width) for tensor in (query, key, value))
    rows = (torch.split(tensor, step) for tensor in merged)
    parts = [
        explicit_attention(q, k, v, direction=direction, dropout=dropout, lengths=own)
        for q, k, v, own in zip(*rows, there, strict=True)
    ]
    return concatenate(parts).view(query.shape)


def concatenate(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors along their first dimension, without a copy if there is only one."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def explicit_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    direction: str,
    dropout: float,
    lengths: Tensor | None = None,
) -> Tensor:
    """Compute attention with plain operations on (heads of all sequences, length, width)."""
    nothing = q.new_empty(())  # baddbmm does not read it, because beta is 0
    scale = 1 / math.sqrt(q.shape[-1])
    scores = torch.baddbmm(nothing, q, k.transpose(1, 2), beta=0, alpha=scale)
    if dropout and has_compiled_steps(scores, scores):
        kept: Tensor = SoftmaxDropout.apply(scores, lengths, direction, dropout)  # type: ignore[no-untyped-call]
        return kept @ v
    length = scores.shape[-1]
    if lengths is not None:
        absent = torch.arange(length) >= lengths[:, None, None]
        # A finite value: -inf would make rows without real keys NaN, and their gradients too.
        scores = scores.masked_fill(absent, torch.finfo(scores.dtype).min / 2)
    if direction != "bidirectional":
        scores = scores.masked_fill(~visible_positions(length, direction, q.device), -math.inf)
    slow = length < EVEN_SOFTMAX and length % 32
    if scores.dtype == torch.bfloat16 and (torch.is_grad_enabled() or slow):
        scores = scores.float()
    weights = scores.softmax(dim=-1).to(v.dtype)
    if dropout == 0.0:
        return weights @ v
    # Scaling the output equals scaling the kept weights, but touches far fewer numbers.
    mask = keep_mask(weights.shape, dropout, weights.dtype)
    return (weights * mask) @ v * keep_scale(dropout)


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
    return together(torch.stack([query, key, value], dim=1), packed, direction, dropout)


def together(projected: Tensor, packed: Packed, direction: str, dropout: float) -> Heads:
    """Call the Triton kernels with (tokens, 3, heads, head width) queries, keys and values."""
    output: Tensor = packed_attention(
        projected, packed.cu_seqlens, packed.max_seqlen, direction, dropout
    )[0]
    return output


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
