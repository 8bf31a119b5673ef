"""The batches of `benchmarks.gpu`: full or log-normal lengths, and random tokens.

No kernel's speed depends on which tokens they are.

For code that is compiled for exact shapes, batches are rounded to a few constant ones: dummy
sequences are appended until tokens, sequences and targets have round numbers. Other sequences do
not attend to them and the loss ignores their labels, so results and gradients do not change.

- Several dummies share the missing tokens: a single one could be longer than the model has
  positions, and its attention would cost the square of its length.
- No dummy is empty, because the heads read the first token of every sequence.

Shapes are computed from sizes that the host knows, on the device of the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from bertkit.model.encoder import ModelConfig
from bertkit.pretraining_data.batch import Packed, from_arrays
from bertkit.pretraining_data.loader import PretrainingBatch
from bertkit.training.device import training_flops

MEDIAN = 0.3
SIGMA = 0.6
MEAN = 0.35
"""Of the log-normal lengths, cut at the longest; median and mean as shares of the longest."""
DIVISIBLE = 12
PADDED_TOKENS = 1 << 16
"""The most tokens of a padded forward pass: transformers computes logits for every one of them."""

Padded = dict[str, torch.Tensor]
"""A batch as transformers takes it."""


class Both(NamedTuple):
    """A batch in both forms, on the host; making them is no part of what is timed."""

    packed: PretrainingBatch
    padded: list[Padded]
    """In parts of at most `PADDED_TOKENS`, whose gradients add up."""


def draw_lengths(
    tokens: int, max_length: int, ragged: bool, generator: np.random.Generator
) -> np.ndarray:
    """Return lengths, longest first, of about so many tokens together."""
    if not ragged:
        return np.full(max(1, tokens // max_length), max_length)
    sequences = max(1, round(tokens / (MEAN * max_length)))
    if sequences > DIVISIBLE:  # then the parts of a padded batch have one shape
        sequences -= sequences % DIVISIBLE
    drawn = np.exp(generator.normal(np.log(MEDIAN * max_length), SIGMA, sequences))
    lengths = -np.sort(-np.clip(np.round(drawn), 8, max_length).astype(np.int64))
    lengths[0] = max_length
    return lengths


def make_batch(
    config: ModelConfig, lengths: np.ndarray, generator: np.random.Generator
) -> PretrainingBatch:
    """Return random examples; 15 % of their tokens are targets."""
    ids = generator.integers(5, config.vocab_size, int(lengths.sum()))
    starts = np.cumsum(lengths) - lengths
    targets = np.concatenate(
        [
            start + np.sort(generator.permutation(np.arange(1, length))[: round(0.15 * length)])
            for start, length in zip(starts, lengths, strict=True)
        ]
    )
    packed = from_arrays(ids, np.zeros_like(ids), lengths)
    return PretrainingBatch(
        replace(packed, segment_ids=(packed.position_ids > 4).long()),
        torch.from_numpy(targets),
        packed.ids[targets],
        torch.from_numpy(generator.integers(0, 2, len(lengths))),
    )


def make_batches(
    config: ModelConfig, tokens: int, max_length: int, count: int, *, ragged: bool = True
) -> list[Both]:
    """Return batches with the same number of sequences."""
    generator = np.random.default_rng(0)
    made = [
        make_batch(config, draw_lengths(tokens, max_length, ragged, generator), generator)
        for _ in range(count)
    ]
    return [Both(batch, padded_parts(batch)) for batch in made]


def padded(batch: PretrainingBatch) -> Padded:
    """Pad a batch to its longest sequence, as transformers takes it."""
    packed = batch.packed
    inside = torch.arange(packed.max_seqlen) < torch.tensor(packed.lengths)[:, None]
    labels = torch.full_like(packed.ids, -100)
    labels[batch.target_positions] = batch.target_ids

    def place(values: torch.Tensor, empty: int) -> torch.Tensor:
        return torch.full(inside.shape, empty).masked_scatter(inside, values)

    return {
        "input_ids": place(packed.ids, 0),
        "token_type_ids": place(packed.segment_ids, 0),
        "attention_mask": inside.long(),
        "labels": place(labels, -100),
        "next_sentence_label": batch.next_labels,
    }


def padded_parts(batch: PretrainingBatch) -> list[Padded]:
    """Pad a batch, and divide it so that every part has sequences of all lengths."""
    whole = padded(batch)
    parts = -(-whole["input_ids"].numel() // PADDED_TOKENS)
    return [{name: value[part::parts] for name, value in whole.items()} for part in range(parts)]


def needed(batch: PretrainingBatch, config: ModelConfig, *, training: bool = True) -> float:
    """Return the FLOPs that the real tokens need; in inference, those of the layers."""
    work = training_flops(
        config,
        tokens=len(batch.packed.ids),
        targets=len(batch.target_ids) if training else 0,
        sequences=len(batch.next_labels) if training else 0,
        sum_squared_lengths=sum(length**2 for length in batch.packed.lengths),
    )
    return work if training else work / 3


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
