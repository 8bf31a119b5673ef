"""Batches of a few constant shapes, for torch.compile and CUDA graphs (design section 3).

Compiled code and captured graphs work for tensors of one shape, but packed batches differ in their
number of tokens. So dummy sequences are appended until tokens, sequences and targets have round
numbers. Other sequences do not attend to them, their outputs are not used and their labels are
ignored by the loss, so results and gradients do not change.

- The missing tokens are divided among several dummies in a large batch: one long dummy could have
  more tokens than the model has positions, and its attention would cost the square of its
  length.
- No dummy is empty. An empty sequence would have no first token, yet the heads read
  `first_tokens` of every sequence, and not every attention kernel accepts one.
- `lengths` and `equal_lengths` of a rounded batch include the dummies, because kernels need the
  layout of all its tokens. `max_seqlen` is a rounded upper bound, which suffices for the kernels
  that read it. Tokens, targets and sequences are counted on the batch before it is rounded.

Everything is computed from sizes that the host knows, on the device of the batch, so that the host
never waits for a GPU.
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
"""Sequences of a batch per dummy; dummies add 1/64 to the tokens on average, at most 1/32."""

LENGTH_STEP = 64
"""`max_seqlen` is rounded up to a multiple of this."""


class Shape(NamedTuple):
    """The sizes that all batches with the same compiled code share."""

    tokens: int
    sequences: int
    max_length: int
    """An upper bound on the sequence lengths, used as `max_seqlen`."""

    def fits(self, tokens: int, sequences: int, max_length: int) -> bool:
        """Whether a batch fits: each missing sequence needs 1 to `max_length` tokens."""
        missing, dummies = self.tokens - tokens, self.sequences - sequences
        return (
            max_length <= self.max_length and 1 <= dummies <= missing <= dummies * self.max_length
        )


def shape_above(tokens: int, sequences: int, max_length: int, limit: int) -> Shape:
    """Return the shape in a coarse grid that a batch is rounded up to; the batch always fits.

    Batches with the same number of sequences and maximum length, as in a phase of pre-training,
    share a few shapes: tokens are rounded up in steps of about 1/32 of their maximum.
    """
    dummies = -(-sequences // SEQUENCES_PER_DUMMY)
    max_length = min(limit, round_up(max_length, LENGTH_STEP))
    # Half of the dummies' capacity, so that the worst case still fits into them.
    step = dummies * max_length // 2
    return Shape(round_up(tokens + dummies, step), sequences + dummies, max_length)


def round_up(number: int, step: int) -> int:
    """Return the smallest multiple of `step` that is at least `number`."""
    return -(-number // step) * step


def round_packed(packed: Packed, shape: Shape) -> Packed:
    """Append dummy sequences of id 0 and about equal length until a batch has the given shape."""
    tokens, sequences = len(packed.ids), len(packed.cu_seqlens) - 1
    if not shape.fits(tokens, sequences, packed.max_seqlen):
        raise ValueError(
            f"{sequences} sequences of at most {packed.max_seqlen} and in all {tokens} tokens "
            f"cannot be rounded up to {shape}"
        )
    missing, dummies = shape.tokens - tokens, shape.sequences - sequences
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
    """Pad a pre-training batch to the next constant shape (`shape_above`), its targets too.

    Padding sequences are added; the added targets point at the first token of one, and the loss
    ignores them. The new `counts` include them, so divide losses by the counts of the old batch.
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
    """Return an objective that rounds its batches first, and so computes on few shapes.

    The training loop keeps the original batch, so its counts do not include dummies.
    """
    return lambda model, batch: objective(model, round_batch(batch, limit))
