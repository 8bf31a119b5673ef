"""The batches of `benchmarks.gpu`: log-normal lengths, cut at the longest, and random tokens.

No kernel's speed depends on which tokens they are.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from bertkit.pretraining_data.buckets import round_batch

from bertkit.model.encoder import ModelConfig
from bertkit.pretraining_data.batch import from_arrays
from bertkit.pretraining_data.loader import PretrainingBatch
from bertkit.training.device import training_flops

AREA = {"base": 32768, "large": 32768, "tiny": 512}
"""Sequences times longest length: 256 x 128 or 64 x 512."""
MEDIAN = 0.3
SIGMA = 0.6
"""Of the log-normal lengths; the median as a share of the longest, so that 0.35 is the mean."""


class Both(NamedTuple):
    """A batch in both forms, on the host; making them is no part of what is timed."""

    packed: PretrainingBatch
    padded: dict[str, torch.Tensor]
    """As transformers takes it."""


def make_batch(
    config: ModelConfig, sequences: int, max_length: int, generator: np.random.Generator
) -> PretrainingBatch:
    """Random examples, longest first, one of them of the longest length; 15 % are targets."""
    drawn = np.exp(generator.normal(np.log(MEDIAN * max_length), SIGMA, sequences))
    lengths = -np.sort(-np.clip(np.round(drawn), 8, max_length).astype(np.int64))
    lengths[0] = max_length
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
        torch.from_numpy(generator.integers(0, 2, sequences)),
    )


def make_batches(config: ModelConfig, sequences: int, max_length: int, count: int) -> list[Both]:
    """Batches that have one shape when they are rounded up, so that code is compiled once."""
    generator = np.random.default_rng(0)
    kept: list[PretrainingBatch] = []
    while len(kept) < count:
        batch = make_batch(config, sequences, max_length, generator)
        if not kept or rounded_sizes(batch, config) == rounded_sizes(kept[0], config):
            kept.append(batch)
    return [Both(batch, padded(batch)) for batch in kept]


def rounded_sizes(batch: PretrainingBatch, config: ModelConfig) -> tuple[int, int]:
    """Tokens and targets once rounded up."""
    rounded = round_batch(batch, config.max_position_embeddings)
    return len(rounded.packed.ids), len(rounded.target_ids)


def padded(batch: PretrainingBatch) -> dict[str, torch.Tensor]:
    """A packed batch as transformers takes it: padded to its longest sequence."""
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


def needed(batch: PretrainingBatch, config: ModelConfig, *, training: bool) -> float:
    """Floating-point operations that the real tokens need; in inference, those of the layers."""
    work = training_flops(
        config,
        tokens=len(batch.packed.ids),
        targets=len(batch.target_ids) if training else 0,
        sequences=len(batch.next_labels) if training else 0,
        sum_squared_lengths=sum(length**2 for length in batch.packed.lengths),
    )
    return work if training else work / 3
