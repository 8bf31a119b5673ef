"""The strongest fair ways to run the same model with onnxruntime and transformers.

All contestants read the same model directory and have one method, `run`: sequences in, outputs in
their order. What each peer gets:

- onnxruntime fp32: the graph that transformers' own BERT exports to, as it is (the session fuses
  what it can) and with attention, LayerNorm, GELU and embeddings fused by
  `onnxruntime.transformers.optimizer`; whichever is faster here.
- onnxruntime int8: both graphs quantized dynamically, weights int8 per channel.
- Batches of onnxruntime are sorted by length, padded to their longest and of the size that is
  fastest here.
- transformers: its default attention, batches of 32; in the order given as its own pipelines do,
  and sorted by length.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from benchmarks.exports import logits_of, open_session, their_model
from bertkit.checkpoints.pretrained import PretrainedWeights
from bertkit.checkpoints.save import save_model
from bertkit.export.verify import padded_arrays
from bertkit.model.encoder import ModelConfig
from bertkit.model.task_heads import ClassificationModel, SpanModel
from bertkit.tasks.task import Encoded, ItemPart

CLASSES = 32
"""Of the classification head: so many random views of the pooled [CLS] say how equal it is."""
BATCH = 32
BATCHES = (4, 8, 16, 32)
"""Tried for onnxruntime."""

Arrays = dict[str, np.ndarray]


class Contestant(Protocol):
    """A model that is ready to run."""

    def run(self, sequences: Sequence[Encoded]) -> list[np.ndarray]:
        """Logits of each sequence: (classes,) of a classification, (tokens, 2) of an answer."""


def build_head(head: str, config: ModelConfig) -> ClassificationModel | SpanModel:
    """The network with a head of `Workload.head`."""
    return ClassificationModel(config, CLASSES) if head == "classification" else SpanModel(config)


def write_model(folder: Path, start: PretrainedWeights, head: str) -> Path:
    """A model directory in `folder`: the start's encoder and a head drawn from seed 0."""
    path = folder / head
    if not (path / "model.safetensors").is_file():
        torch.manual_seed(0)
        loaded = start.build(lambda config: build_head(head, config), keep_head=False)
        save_model(path, loaded.model, start.tokenizer, {"task": head})
    return path


def padded(sequences: Sequence[Encoded]) -> Arrays:
    """A batch as padded models take it, each array (sequences, longest) int64."""
    return padded_arrays([ItemPart((sequence,)) for sequence in sequences], head="classification")


def longest_first(sequences: Sequence[Encoded]) -> list[int]:
    """Indices, sorted by length."""
    return sorted(range(len(sequences)), key=lambda i: -len(sequences[i].ids))


def run_padded(
    sequences: Sequence[Encoded],
    order: Sequence[int],
    batch: int,
    forward: Callable[[Arrays], np.ndarray],
) -> list[np.ndarray]:
    """The outputs in the order of the sequences, computed in batches of another order."""
    outputs: list[np.ndarray] = [np.empty(0)] * len(sequences)
    for start in range(0, len(order), batch):
        rows = order[start : start + batch]
        for row, output in zip(rows, forward(padded([sequences[i] for i in rows])), strict=True):
            outputs[row] = output if output.ndim == 1 else output[: len(sequences[row].ids)]
    return outputs


class TransformersPeer:
    """transformers' model of a directory, in fp32 or with weights in bf16."""

    def __init__(self, folder: Path, head: str, *, precision: str, by_length: bool) -> None:
        self.by_length = by_length
        self.model = their_model(folder, head, precision, attention="sdpa")

    def run(self, sequences: Sequence[Encoded]) -> list[np.ndarray]:
        """See `Contestant`."""
        order = longest_first(sequences) if self.by_length else range(len(sequences))
        return run_padded(sequences, order, BATCH, self._forward)

    @torch.inference_mode()
    def _forward(self, arrays: Arrays) -> np.ndarray:
        inputs = {name: torch.from_numpy(array) for name, array in arrays.items()}
        return logits_of(self.model(**inputs)).float().numpy()


class OnnxPeer:
    """An exported graph in onnxruntime, on as many threads as torch uses."""

    def __init__(self, path: Path, batch: int = 1) -> None:
        self.path, self.batch = path, batch
        self.session = open_session(path)

    def run(self, sequences: Sequence[Encoded]) -> list[np.ndarray]:
        """See `Contestant`."""
        return run_padded(sequences, longest_first(sequences), self.batch, self._forward)

    def _forward(self, arrays: Arrays) -> np.ndarray:
        return self.session.run(None, arrays)[0]


def sample(sequences: Sequence[Encoded], batch: int, every: int) -> list[Encoded]:
    """The sequences of every n-th batch: run alone, they form the same batches again."""
    order = longest_first(sequences)
    batches = [order[start : start + batch] for start in range(0, len(order), batch)]
    # begins in the middle of a stride: the first batch has the longest sequences
    chosen = batches[min(every // 2, (len(batches) - 1) // 2) :: every]
    return [sequences[i] for rows in chosen for i in rows]


def tune(
    paths: Mapping[str, Path],
    sequences: Sequence[Encoded],
    *,
    batches: Sequence[int] = BATCHES,
    every: int = 8,
) -> tuple[str, int, dict[str, float]]:
    """The graph and the batch size with the most real tokens per second.

    Args:
        paths: name → graph.
        sequences: the workload.
        batches: to be tried.
        every: one batch of so many is timed.

    Returns:
        The name, the batch size, and all rates by "name, batch".
    """
    peers = {name: OnnxPeer(path) for name, path in paths.items()}
    rates: dict[tuple[str, int], float] = {}
    for batch in batches:
        chosen = sample(sequences, batch, every)
        tokens = sum(len(sequence.ids) for sequence in chosen)
        for _ in range(2):  # the first one also warms up
            for name, peer in peers.items():
                peer.batch = batch
                started = time.perf_counter()
                peer.run(chosen)
                rate = tokens / (time.perf_counter() - started)
                rates[name, batch] = max(rate, rates.get((name, batch), 0.0))
    name, batch = max(rates, key=lambda key: rates[key])
    return name, batch, {f"{name}, {batch}": round(rate) for (name, batch), rate in rates.items()}
