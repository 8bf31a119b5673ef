"""The batches of `benchmarks.gpu`: full or log-normal lengths, and random tokens.

No kernel's speed depends on which tokens they are.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from bertkit.model.encoder import ModelConfig
from bertkit.pretraining_data.batch import from_arrays
from bertkit.pretraining_data.loader import PretrainingBatch
from bertkit.training.device import training_flops

MEDIAN = 0.3
SIGMA = 0.6
MEAN = 0.35
"""The log-normal lengths are cut at the longest; median and mean are shares of the longest."""
DIVISIBLE = 12
PADDED_TOKENS = 1 << 16
"""The most tokens of a padded forward pass: transformers computes logits for every one of them."""

Padded = dict[str, torch.Tensor]
"""A batch as transformers takes it."""


class Both(NamedTuple):
    """A batch in both forms, on the host; making them is no part of what is timed."""

    packed: PretrainingBatch
    padded: list[Padded]
    """The batch in parts of at most `PADDED_TOKENS`, whose gradients add up."""


def draw_lengths(
    tokens: int, max_length: int, ragged: bool, generator: np.random.Generator
) -> np.ndarray:
    """Return lengths, longest first, of about so many tokens together."""
    if not ragged:
        return np.full(max(1, tokens // max_length), max_length)
    sequences = max(1, round(tokens / (MEAN * max_length)))
    if sequences > DIVISIBLE:  # so that the parts of a padded batch have one shape
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
