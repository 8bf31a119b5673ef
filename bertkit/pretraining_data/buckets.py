"""Batches of a few constant shapes, for torch.compile and CUDA graphs (design section 3).

Compiled code and captured graphs serve tensors of one shape, but every packed batch has a token
count of its own. So dummy sequences are appended until tokens, sequences and targets have round
numbers. Attention does not lead from them to other sequences, nobody reads their rows and their
labels are ignored by the loss: results and gradients stay what they were.

- One dummy serves where less than one sequence is missing. More tokens are shared among several:
  one long dummy would have more tokens than the model has positions, and its attention would cost
  the square of its length.
- No dummy is empty. An empty sequence would have no first token, yet the heads read
  `first_tokens` of every sequence, and not every attention kernel takes one.
- `lengths` and `equal_lengths` of a rounded batch include the dummies: they say how its tokens lie,
  which is what kernels need. `max_seqlen` is a round upper bound; the kernels that read it need no
  more. What is counted (tokens, targets, sequences) is counted on the batch before it is rounded.

Everything is computed from sizes that the host knows, on the device of the batch, so a GPU is never
waited for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from bertkit.pretraining_data.batch import Packed
from bertkit.pretraining_data.loader import PretrainingBatch

IGNORED = -100
"""The label that torch's cross entropy leaves out."""

SEQUENCES_PER_DUMMY = 16
"""Of a batch; it sets how coarse the shapes are: tokens grow by 1/64 in the mean, at most 1/32."""

LENGTH_STEP = 64
"""`max_seqlen` is rounded up to a multiple of this."""


class Shape(NamedTuple):
    """What is constant over all batches that share compiled code."""

    tokens: int
    sequences: int
    max_length: int
    """Upper bound of the lengths, `max_seqlen`."""

    def fits(self, tokens: int, sequences: int, max_length: int) -> bool:
        """Whether a batch fits: each missing sequence needs 1 to `max_length` tokens."""
        missing, dummies = self.tokens - tokens, self.sequences - sequences
        return (
            max_length <= self.max_length and 1 <= dummies <= missing <= dummies * self.max_length
        )


def shape_above(tokens: int, sequences: int, max_length: int, limit: int) -> Shape:
    """The shape in a coarse grid that a batch is rounded up to; it always fits.

    Batches of one number of sequences and one longest length, as in a phase of pre-training, share
    a handful of shapes: tokens come in steps of about 1/32 of what they could be.

    Args:
        tokens: of the batch.
        sequences: of the batch.
        max_length: of its lengths.
        limit: positions of the model, at least 2; no length is rounded beyond.
    """
    dummies = -(-sequences // SEQUENCES_PER_DUMMY)
    max_length = min(limit, round_up(max_length, LENGTH_STEP))
    # Half of what the dummies could hold, so that the worst case still fits into them.
    step = dummies * max_length // 2
    return Shape(round_up(tokens + dummies, step), sequences + dummies, max_length)


def round_up(number: int, step: int) -> int:
    """The smallest multiple of `step` that is not below `number`."""
    return -(-number // step) * step


def round_packed(packed: Packed, shape: Shape) -> Packed:
    """Append dummy sequences of about equal length, of id 0, until a batch has a shape.

    Raises:
        ValueError: the batch does not fit.
    """
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
    """A pre-training batch with `shape_above` and a round number of targets.

    The targets that are added are ignored ones at a dummy's first token. `counts` of the result is
    that of its tensors: divide losses by the counts of the batch that was given.

    Args:
        batch: on any device.
        limit: positions of the model.
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
    """An objective that sees its batches rounded, and so computes on a few shapes only.

    The training loop keeps the batch as it was, so what it counts and divides by is real.

    Args:
        objective: (model, batch) → sums.
        limit: positions of the model.
    """
    return lambda model, batch: objective(model, round_batch(batch, limit))
