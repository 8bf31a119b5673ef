"""Batches of a few constant shapes, for code that is compiled for exact ones.

Dummy sequences are appended until tokens, sequences and targets have round numbers. Other sequences
do not attend to them and the loss ignores their labels, so results and gradients do not change.

- Several dummies share the missing tokens: a single one could be longer than the model has
  positions, and its attention would cost the square of its length.
- No dummy is empty, because the heads read the first token of every sequence.

Everything is computed from sizes that the host knows, on the device of the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from bertkit.pretraining_data.batch import Packed
from bertkit.pretraining_data.loader import PretrainingBatch

IGNORED = -100
"""The label that torch's cross entropy ignores."""
SEQUENCES_PER_DUMMY = 16
LENGTH_STEP = 64
"""`max_seqlen` is rounded up to a multiple of this."""


class Shape(NamedTuple):
    """The sizes that all batches with the same compiled code share."""

    tokens: int
    sequences: int
    max_length: int
    """An upper bound on the sequence lengths, used as `max_seqlen`."""


def shape_above(tokens: int, sequences: int, max_length: int, limit: int) -> Shape:
    """Return the shape in a coarse grid that a batch is rounded up to; the batch always fits.

    Tokens are rounded up in steps of half of what the dummies can hold, so that the worst case
    still fits into them: about 1/32 of the most tokens that such a batch can have.
    """
    dummies = -(-sequences // SEQUENCES_PER_DUMMY)
    max_length = min(limit, round_up(max_length, LENGTH_STEP))
    step = dummies * max_length // 2
    return Shape(round_up(tokens + dummies, step), sequences + dummies, max_length)


def round_up(number: int, step: int) -> int:
    """Return the smallest multiple of `step` that is at least `number`."""
    return -(-number // step) * step


def round_packed(packed: Packed, shape: Shape) -> Packed:
    """Append dummy sequences of id 0 and about equal length until a batch has the given shape."""
    tokens, sequences = len(packed.ids), len(packed.cu_seqlens) - 1
    missing, dummies = shape.tokens - tokens, shape.sequences - sequences
    fits = packed.max_seqlen <= shape.max_length and dummies >= 1
    if not (fits and dummies <= missing <= dummies * shape.max_length):
        raise ValueError(
            f"{sequences} sequences of at most {packed.max_seqlen} and in all {tokens} tokens "
            f"cannot be rounded up to {shape}"
        )
    device = packed.ids.device
    ends = torch.arange(dummies + 1, device=device) * missing // dummies
    places = torch.arange(missing, device=device)
    dummy = torch.searchsorted(ends, places, right=True) - 1
    return Packed(
        ids=F.pad(packed.ids, (0, missing)),
        segment_ids=F.pad(packed.segment_ids, (0, missing)),
        position_ids=torch.cat([packed.position_ids, places - ends.index_select(0, dummy)]),
        cu_seqlens=torch.cat([packed.cu_seqlens, (ends[1:] + tokens).to(packed.cu_seqlens.dtype)]),
        max_seqlen=shape.max_length,
    )


def round_batch(batch: PretrainingBatch, limit: int) -> PretrainingBatch:
    """Round a pre-training batch up, its targets too; the added labels are ignored.

    Args:
        batch: on any device.
        limit: the number of positions of the model.
    """
    packed, targets = batch.packed, len(batch.target_ids)
    sequences = len(batch.next_labels)
    shape = shape_above(len(packed.ids), sequences, packed.max_seqlen, limit)
    dummies = shape.sequences - sequences
    missing = round_up(targets, max(1, dummies * shape.max_length // 8)) - targets
    return PretrainingBatch(
        packed=round_packed(packed, shape),
        target_positions=F.pad(batch.target_positions, (0, missing), value=len(packed.ids)),
        target_ids=F.pad(batch.target_ids, (0, missing), value=IGNORED),
        next_labels=F.pad(batch.next_labels, (0, dummies), value=IGNORED),
    )


def on_rounded_batches(objective: Callable[[Any, PretrainingBatch], Any], limit: int) -> Any:
    """Return an objective that rounds its batches first; the loop still counts the original."""
    return lambda model, batch: objective(model, round_batch(batch, limit))
