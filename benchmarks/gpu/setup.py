"""What every case of `benchmarks.gpu` gets and yields: sizes, batches, and measured seconds.

Batches have full or log-normal lengths and random tokens, on which no kernel's speed depends.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from bertkit.model.encoder import ModelConfig
from bertkit.pretraining_data.batch import from_arrays
from bertkit.pretraining_data.loader import PretrainingBatch
from bertkit.training.device import synchronize

Found = tuple[str, dict[str, Any] | str]
"""The name of a row, and the row or, if it could not be measured, the error."""
Case = Callable[["Setup"], Iterator[Found]]

BASE = ModelConfig(vocab_size=30522)
TINY = ModelConfig(
    vocab_size=1018, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
    intermediate_size=64, hidden_dropout_prob=0.0,
)  # fmt: skip
"""The network of a dry run, without the CPU's way of dropout, which torch cannot trace."""


class Setup(NamedTuple):
    """The device of a case, and the time when it has to be done."""

    device: torch.device
    end: float
    """The time when the case has to be done, in seconds of `time.monotonic`."""

    @property
    def dry(self) -> bool:
        """Whether this only tries the code, with a tiny network on the CPU."""
        return self.device.type == "cpu"

    def config(self) -> ModelConfig:
        """Return the sizes of BERT-base; the tiny ones in a dry run."""
        return TINY if self.dry else BASE

    def tokens(self, wanted: int) -> int:
        """Return the tokens of a batch; fewer in a dry run."""
        return min(wanted, 256) if self.dry else wanted

    def count(self, wanted: int) -> int:
        """Return how often something is done; once or twice in a dry run."""
        return min(wanted, 2) if self.dry else wanted

    def late(self, needed: float = 5.0) -> bool:
        """Return whether fewer than `needed` seconds are left."""
        return time.monotonic() > self.end - needed

    def attempt(self, name: str, measure: Callable[[], dict[str, Any]]) -> Found:
        """Return what a contestant measures, or why it cannot: others do not pay for its errors."""
        if self.late(1.0 if self.dry else TO_COMPILE):
            return name, NO_TIME
        try:
            return name, measure()
        except Exception as error:
            if not self.dry:
                torch.cuda.empty_cache()
            return name, in_one_line(error)

    def seconds_of_one(self, work: Callable[[], object], calls: int = 1) -> float:
        """Return the mean seconds of some calls, which the host waits for once."""
        synchronize(self.device)
        started = time.perf_counter()
        for _ in range(calls):
            work()
        synchronize(self.device)
        return (time.perf_counter() - started) / calls


NO_TIME = "there was no time left"
TO_COMPILE = 20.0
"""The seconds without which no contestant is begun on a GPU: it may have to be compiled."""


def in_one_line(error: Exception) -> str:
    """Return the kind of an error and its message; of a long one, both ends."""
    message = " ".join(str(error).split())
    if len(message) > 500:
        message = f"{message[:200]} [...] {message[-300:]}"
    return f"{type(error).__name__}: {message}"


# Batches ------------------------------------------------------------------------------------------

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
    """Return the FLOPs of the matrix products for the real tokens; in inference, of the layers."""
    h, layers = config.hidden_size, config.num_hidden_layers
    squares = sum(length**2 for length in batch.packed.lengths)
    per_token = 2 * layers * (4 * h * h + 2 * h * config.intermediate_size)
    work = float(per_token * len(batch.packed.ids) + 4 * h * layers * squares)
    if not training:
        return work
    targets = 2 * config.embedding_width * (h + config.vocab_size) * len(batch.target_ids)
    return 3 * (work + targets + 2 * (h * h + 2 * h) * len(batch.next_labels))
