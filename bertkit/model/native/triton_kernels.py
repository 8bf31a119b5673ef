"""Kernels for CUDA in Triton: attention on packed tokens with dropout, and masks of dropout.

Attention, in 16 bits, is flash attention (Dao et al. 2022) for BERT's short sequences. A program
computes 64 queries of one head, the gradients of a sequence that fits into one block come from one
pass over its scores, and queries, keys and values stay in one tensor, as do their gradients. On
GPUs before Hopper the backward pass needs more registers than there are; `choose_kernel` leaves
them to torch. Whether a weight is dropped is a hash of the seed, the token, the head and the key,
so the backward pass computes it again. No kernel adds in an order that varies: the same seed gives
the same bits.

Masks are for code that torch's compiler makes, which would draw one number for each element from a
generator that is made to draw four.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_SIZE = 64
"""The queries, and the keys at a time, of one program."""
FORWARD_WARPS, BACKWARD_WARPS = 4, 4
MASK_LINES, MASK_LENGTH = 4, 1024
"""The elements of a mask that one program stores."""
WIDTHS = (16, 32, 64)
"""The widths of a head for which the kernels have enough registers."""


@triton.jit
def mix(x):
    """Hash 32 bits: every bit of the result depends on all bits of `x`."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def query_hashes(seed, tokens, head, HEADS: tl.constexpr):
    """Hash the seed, two integers, with the queries of a head, given by the tokens' numbers."""
    numbers = (tokens * HEADS + head).to(tl.uint32)
    first = tl.load(seed).to(tl.uint32, bitcast=True)
    second = tl.load(seed + 1).to(tl.uint32, bitcast=True)
    return mix(mix(numbers ^ first) + second)


@triton.jit
def is_kept(hashes, keys, THRESHOLD: tl.constexpr):
    """Return which weights dropout keeps; hashes of queries and numbers of keys are broadcast."""
    return mix(hashes + keys.to(tl.uint32) * 0x9E3779B9) >= THRESHOLD


@triton.jit
def is_seen(queries, keys, length, CAUSAL: tl.constexpr):
    """Return whether queries see keys, which are numbers in the sequence and are broadcast."""
    seen = (queries < length) & (keys < length)
    if CAUSAL:
        seen = seen & (keys <= queries)
    return seen


@triton.jit
def load_rows(start, rows, length, STRIDE: tl.constexpr, WIDTH: tl.constexpr):
    """Load (rows, width) from the sequence that starts at a pointer; zeros beyond its length."""
    columns = tl.arange(0, WIDTH)
    addresses = start + rows[:, None] * STRIDE + columns[None, :]
    return tl.load(addresses, mask=rows[:, None] < length, other=0.0)


@triton.jit
def store_rows(start, rows, length, values, STRIDE: tl.constexpr, WIDTH: tl.constexpr):
    """Store (rows, width) into the sequence that starts at a pointer, within its length."""
    columns = tl.arange(0, WIDTH)
    addresses = start + rows[:, None] * STRIDE + columns[None, :]
    tl.store(addresses, values.to(start.dtype.element_ty), mask=rows[:, None] < length)


@triton.jit(do_not_specialize=["tokens", "blocks"])
def forward_kernel(
    projected,
    output,
    logsums,
    cu_seqlens,
    seed,
    tokens,
    blocks,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    SCALE: tl.constexpr,
    CAUSAL: tl.constexpr,
    THRESHOLD: tl.constexpr,
    KEPT: tl.constexpr,
):
    """Compute one head's output and log-sums, both of base 2, for one block of queries."""
    program = tl.program_id(0)
    head, block = program % HEADS, program // HEADS % blocks
    sequence = program // (HEADS * blocks)
    first = tl.load(cu_seqlens + sequence)
    length = tl.load(cu_seqlens + sequence + 1) - first
    low = block * SIZE
    if low < length:
        stride: tl.constexpr = 3 * HEADS * WIDTH
        start = projected + first.to(tl.int64) * stride + head * WIDTH
        rows = low + tl.arange(0, SIZE)
        query = load_rows(start, rows, length, stride, WIDTH)
        most = tl.full((SIZE,), float("-inf"), tl.float32)
        total = tl.zeros((SIZE,), tl.float32)
        sums = tl.zeros((SIZE, WIDTH), tl.float32)
        hashes = query_hashes(seed, first + rows, head, HEADS) if THRESHOLD else rows
        end = low + SIZE if CAUSAL else length
        for at in range(0, end, SIZE):
            columns = at + tl.arange(0, SIZE)
            key = load_rows(start + HEADS * WIDTH, columns, length, stride, WIDTH)
            value = load_rows(start + 2 * HEADS * WIDTH, columns, length, stride, WIDTH)
            scores = tl.dot(query, tl.trans(key)) * SCALE
            seen = is_seen(rows[:, None], columns[None, :], length, CAUSAL)
            scores = tl.where(seen, scores, -1e30)
            higher = tl.maximum(most, tl.max(scores, 1))
            weights = tl.exp2(scores - higher[:, None])
            factor = tl.exp2(most - higher)
            total = total * factor + tl.sum(weights, 1)
            if THRESHOLD:
                mask = is_kept(hashes[:, None], columns[None, :], THRESHOLD)
                weights = tl.where(mask, weights, 0.0)
            sums = tl.dot(weights.to(value.dtype), value, sums * factor[:, None])
            most = higher
        sums = sums * (KEPT / total)[:, None]
        out = output + first.to(tl.int64) * HEADS * WIDTH + head * WIDTH
        store_rows(out, rows, length, sums, HEADS * WIDTH, WIDTH)
        addresses = logsums + head * tokens.to(tl.int64) + first + rows
        tl.store(addresses, most + tl.log2(total), mask=rows < length)


@triton.jit
def score_gradients(
    query,
    key,
    value,
    upstream,
    logsum,
    inner,
    hashes,
    rows,
    columns,
    length,
    SCALE: tl.constexpr,
    CAUSAL: tl.constexpr,
    THRESHOLD: tl.constexpr,
    KEPT: tl.constexpr,
):
    """Return (queries, keys): the weights that multiply the values, and the scores' gradients."""
    scores = tl.dot(query, tl.trans(key)) * SCALE
    seen = is_seen(rows[:, None], columns[None, :], length, CAUSAL)
    weights = tl.where(seen, tl.exp2(scores - logsum[:, None]), 0.0)
    gradients = tl.dot(upstream, tl.trans(value))
    used = weights
    if THRESHOLD:
        mask = is_kept(hashes[:, None], columns[None, :], THRESHOLD)
        used = tl.where(mask, weights * KEPT, 0.0)
        gradients = tl.where(mask, gradients * KEPT, 0.0)
    return used.to(query.dtype), (weights * (gradients - inner[:, None])).to(query.dtype)


@triton.jit(do_not_specialize=["tokens", "blocks"])
def backward_kernel(
    projected,
    output,
    logsums,
    upstream,
    gradient,
    cu_seqlens,
    seed,
    tokens,
    blocks,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    SCALE: tl.constexpr,
    UNIT: tl.constexpr,
    CAUSAL: tl.constexpr,
    THRESHOLD: tl.constexpr,
    KEPT: tl.constexpr,
):
    """Compute one head's gradients for a block: as keys and values, and as queries."""
    program = tl.program_id(0)
    head, block = program % HEADS, program // HEADS % blocks
    sequence = program // (HEADS * blocks)
    first = tl.load(cu_seqlens + sequence)
    length = tl.load(cu_seqlens + sequence + 1) - first
    low = block * SIZE
    if low < length:
        stride: tl.constexpr = 3 * HEADS * WIDTH
        across: tl.constexpr = HEADS * WIDTH
        start = projected + first.to(tl.int64) * stride + head * WIDTH
        target = gradient + first.to(tl.int64) * stride + head * WIDTH
        out = output + first.to(tl.int64) * across + head * WIDTH
        up = upstream + first.to(tl.int64) * across + head * WIDTH
        logs = logsums + head * tokens.to(tl.int64) + first
        rows = low + tl.arange(0, SIZE)
        query = load_rows(start, rows, length, stride, WIDTH)
        key = load_rows(start + across, rows, length, stride, WIDTH)
        value = load_rows(start + 2 * across, rows, length, stride, WIDTH)
        above = load_rows(up, rows, length, across, WIDTH)
        below = load_rows(out, rows, length, across, WIDTH)
        inner = tl.sum(above.to(tl.float32) * below.to(tl.float32), 1)
        logsum = tl.load(logs + rows, mask=rows < length, other=0.0)
        hashes = query_hashes(seed, first + rows, head, HEADS) if THRESHOLD else rows
        used, scores = score_gradients(
            query, key, value, above, logsum, inner, hashes, rows, rows, length,
            SCALE, CAUSAL, THRESHOLD, KEPT,
        )  # fmt: skip
        values = tl.dot(tl.trans(used), above)
        keys = tl.dot(tl.trans(scores), query)
        queries = tl.dot(scores, key)
        if length > SIZE:
            for at in range(0, length, SIZE):
                if at != low:
                    other = at + tl.arange(0, SIZE)
                    if CAUSAL == 0 or at > low:
                        # the block as keys: other queries see it
                        query_2 = load_rows(start, other, length, stride, WIDTH)
                        above_2 = load_rows(up, other, length, across, WIDTH)
                        below_2 = load_rows(out, other, length, across, WIDTH)
                        inner_2 = tl.sum(above_2.to(tl.float32) * below_2.to(tl.float32), 1)
                        logsum_2 = tl.load(logs + other, mask=other < length, other=0.0)
                        hashes_2 = (
                            query_hashes(seed, first + other, head, HEADS) if THRESHOLD else other
                        )
                        used, scores = score_gradients(
                            query_2, key, value, above_2, logsum_2, inner_2, hashes_2, other, rows,
                            length, SCALE, CAUSAL, THRESHOLD, KEPT,
                        )  # fmt: skip
                        values = tl.dot(tl.trans(used), above_2, values)
                        keys = tl.dot(tl.trans(scores), query_2, keys)
                    if CAUSAL == 0 or at < low:
                        # the block as queries: it sees other keys
                        key_2 = load_rows(start + across, other, length, stride, WIDTH)
                        value_2 = load_rows(start + 2 * across, other, length, stride, WIDTH)
                        used, scores = score_gradients(
                            query, key_2, value_2, above, logsum, inner, hashes, rows, other,
                            length, SCALE, CAUSAL, THRESHOLD, KEPT,
                        )  # fmt: skip
                        queries = tl.dot(scores, key_2, queries)
        store_rows(target, rows, length, queries * UNIT, stride, WIDTH)
        store_rows(target + across, rows, length, keys * UNIT, stride, WIDTH)
        store_rows(target + 2 * across, rows, length, values, stride, WIDTH)


@triton.jit
def mask_kernel(mask, seed, THRESHOLD: tl.constexpr, LINES: tl.constexpr, LENGTH: tl.constexpr):
    """Store which elements are kept, for some lines of equally many elements."""
    lines = tl.program_id(0) * LINES + tl.arange(0, LINES)
    columns = tl.arange(0, LENGTH)
    elements = is_kept(query_hashes(seed, lines, 0, 1)[:, None], columns[None, :], THRESHOLD)
    offsets = lines[:, None].to(tl.int64) * LENGTH + columns[None, :]
    tl.store(mask + offsets, elements.to(tl.uint8))


def constants(projected: Tensor, causal: bool, dropout: float) -> dict[str, Any]:
    """Return what the kernels are compiled for."""
    _, _, heads, width = projected.shape
    return {
        "HEADS": heads,
        "WIDTH": width,
        "SIZE": BLOCK_SIZE,
        "SCALE": math.log2(math.e) / math.sqrt(width),
        "CAUSAL": causal,
        "THRESHOLD": round(dropout * 2**32),
        "KEPT": 1 / (1 - dropout),
    }


def dropout_seed(device: torch.device, dropout: float) -> Tensor:
    """Return the two integers that seed a step's dropout, from the device's default generator."""
    seed = torch.empty(2, dtype=torch.int32, device=device)
    return seed.random_(-(2**31), 2**31) if dropout else seed


@torch.library.custom_op(
    "bertkit::dropout_mask", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,)
)
def dropout_mask(hidden: Tensor, dropout: float) -> Tensor:
    """Return a bool tensor of the shape of `hidden`, in which False has the given probability."""
    block = MASK_LINES * MASK_LENGTH
    programs = -(-hidden.numel() // block)
    mask = torch.empty(programs * block, dtype=torch.uint8, device=hidden.device)
    seed = dropout_seed(hidden.device, dropout)
    with torch.cuda.device_of(hidden):
        mask_kernel[(programs,)](mask, seed, round(dropout * 2**32), MASK_LINES, MASK_LENGTH)
    return mask[: hidden.numel()].view(torch.bool).view(hidden.shape)


@dropout_mask.register_fake
def _(hidden: Tensor, dropout: float) -> Tensor:
    return hidden.new_empty(hidden.shape, dtype=torch.bool)


@torch.library.custom_op("bertkit::packed_attention", mutates_args=())
def packed_attention(
    projected: Tensor, cu_seqlens: Tensor, max_seqlen: int, causal: bool, dropout: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (tokens, heads, width) attention, and what the gradient needs.

    Args:
        projected: (tokens, 3, heads, width) queries, keys and values in 16 bits.
        cu_seqlens: (sequences + 1,) int32 boundaries.
        max_seqlen: the length of the longest sequence, or more.
        causal: whether a token sees only itself and those before it.
        dropout: the probability of setting a weight to 0.

    Returns:
        The output, (heads, tokens) log-sums, and the two integers that seed dropout.
    """
    tokens, _, heads, width = projected.shape
    projected = projected.contiguous()
    output = projected.new_empty(tokens, heads, width)
    logsums = projected.new_empty(heads, tokens, dtype=torch.float32)
    seed = dropout_seed(projected.device, dropout)
    blocks = -(-max_seqlen // BLOCK_SIZE)
    with torch.cuda.device_of(projected):
        forward_kernel[((len(cu_seqlens) - 1) * blocks * heads,)](
            projected, output, logsums, cu_seqlens, seed, tokens, blocks,
            **constants(projected, causal, dropout), num_warps=FORWARD_WARPS,
        )  # fmt: skip
    return output, logsums, seed


@packed_attention.register_fake
def _(
    projected: Tensor, cu_seqlens: Tensor, max_seqlen: int, causal: bool, dropout: float
) -> tuple[Tensor, Tensor, Tensor]:
    tokens, _, heads, width = projected.shape
    return (
        projected.new_empty(tokens, heads, width),
        projected.new_empty(heads, tokens, dtype=torch.float32),
        projected.new_empty(2, dtype=torch.int32),
    )


@torch.library.custom_op("bertkit::packed_attention_gradient", mutates_args=())
def packed_attention_gradient(
    upstream: Tensor,
    projected: Tensor,
    output: Tensor,
    logsums: Tensor,
    cu_seqlens: Tensor,
    seed: Tensor,
    max_seqlen: int,
    causal: bool,
    dropout: float,
) -> Tensor:
    """Return the gradient of `packed_attention` with respect to `projected`."""
    projected = projected.contiguous()
    gradient = torch.empty_like(projected)
    blocks = -(-max_seqlen // BLOCK_SIZE)
    tokens, _, heads, width = projected.shape
    with torch.cuda.device_of(projected):
        backward_kernel[((len(cu_seqlens) - 1) * blocks * heads,)](
            projected, output, logsums, upstream.contiguous(), gradient, cu_seqlens, seed, tokens,
            blocks, UNIT=1 / math.sqrt(width), **constants(projected, causal, dropout),
            num_warps=BACKWARD_WARPS,
        )  # fmt: skip
    return gradient


@packed_attention_gradient.register_fake
def _(
    upstream: Tensor,
    projected: Tensor,
    output: Tensor,
    logsums: Tensor,
    cu_seqlens: Tensor,
    seed: Tensor,
    max_seqlen: int,
    causal: bool,
    dropout: float,
) -> Tensor:
    return torch.empty_like(projected, memory_format=torch.contiguous_format)


def keep_for_gradient(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Keep what the backward pass reads."""
    projected, cu_seqlens, *ctx.settings = inputs
    ctx.save_for_backward(projected, cu_seqlens, *output)


def gradients(ctx: Any, upstream: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients with respect to the arguments of `packed_attention`."""
    projected, cu_seqlens, output, logsums, seed = ctx.saved_tensors
    gradient = packed_attention_gradient(
        upstream, projected, output, logsums, cu_seqlens, seed, *ctx.settings
    )
    return gradient, None, None, None, None


packed_attention.register_autograd(gradients, setup_context=keep_for_gradient)
