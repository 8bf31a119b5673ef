"""What the inference benchmark computes: real texts as token sequences, the same in every run.

| name  | what                                                               | head               |
|-------|--------------------------------------------------------------------|--------------------|
| short | Wikipedia's sentences, log-normal lengths with a mean of 31 tokens | classification     |
| mrpc  | MRPC's pairs                                                       | classification     |
| squad | windows of at most 384 tokens of SQuAD 1.1                         | question-answering |
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bertkit.datasets.glue import GLUE, read_glue
from bertkit.datasets.squad import read_squad

from benchmarks.exports import has_integer_products
from benchmarks.record import summary
from benchmarks.tokenization import read_sentences
from bertkit.model.encoder import ModelConfig
from bertkit.model.native.compiled import has_bf16
from bertkit.tasks.classification import Classification
from bertkit.tasks.question_answering import QuestionAnswering
from bertkit.tasks.sequences import surround
from bertkit.tasks.task import Encoded, Items
from bertkit.text.documents import TextCounts
from bertkit.tokenizer.wordpiece import Tokenizer
from bertkit.training.device import matmul_peak, training_flops

MEAN_SHORT = 31
DEVIATION_SHORT = 0.5
"""The standard deviation of the logarithm of the length."""
LONGEST_SHORT = 128
SIZES = {"short": 512, "mrpc": 512, "squad": 160}
"""The number of sequences of each workload."""


@dataclass(frozen=True)
class Workload:
    """Sequences and the head that reads them."""

    name: str
    head: str
    """ "classification": logits of [CLS]; "question-answering": two logits of every token."""
    sequences: list[Encoded]

    @property
    def lengths(self) -> list[int]:
        """The number of tokens of each sequence."""
        return [len(sequence.ids) for sequence in self.sequences]

    @property
    def tokens(self) -> int:
        """The number of tokens of all sequences."""
        return sum(self.lengths)

    def described(self) -> dict[str, float]:
        """Return what a reader of a results file needs to know of the workload."""
        return {
            "sequences": len(self.sequences),
            "tokens": self.tokens,
            "mean_tokens": round(self.tokens / len(self.sequences), 1),
            "max_length": max(self.lengths),
        }


def read_workload(name: str, data: Path, tokenizer: Tokenizer, count: int) -> Workload:
    """Read a workload by its name.

    Args:
        name: one of `SIZES`.
        data: the folder of data sets.
        tokenizer: the tokenizer of the model.
        count: the number of sequences.
    """
    if name == "short":
        return Workload(name, "classification", short_texts(data, tokenizer, count))
    if name == "mrpc":
        return Workload(name, "classification", mrpc_pairs(data, tokenizer, count))
    return Workload(name, "question-answering", squad_windows(data, tokenizer, count))


def short_lengths(count: int) -> np.ndarray:
    """Return (count,) lengths with [CLS] and [SEP], in random order.

    They are quantiles of the distribution rather than draws from it: any count has the same mean.
    """
    generator = np.random.Generator(np.random.Philox(key=31))
    shares = (np.arange(count) + 0.5) / count
    normal = np.array([inverse_normal(share) for share in shares])
    mean = math.log(MEAN_SHORT) - DEVIATION_SHORT**2 / 2
    lengths = np.exp(mean + DEVIATION_SHORT * normal).round().astype(np.int64)
    return generator.permutation(lengths.clip(4, LONGEST_SHORT))


def inverse_normal(share: float) -> float:
    """Return a quantile of the standard normal distribution."""
    from statistics import NormalDist

    return NormalDist().inv_cdf(share)


def short_texts(data: Path, tokenizer: Tokenizer, count: int) -> list[Encoded]:
    """Return texts that begin with a sentence and go on with the next ones up to their length."""
    sentences = read_sentences(data / "wikipedia" / "wiki_AA.txt.xz", 0.5 * count / SIZES["short"])
    ids = iter(tokenizer.encode_batch(sentences))
    texts = []
    for length in short_lengths(count):
        text: list[int] = []
        while len(text) < length - 2:
            text += next(ids)
        texts.append(surround(text[: length - 2], None, tokenizer))
    return texts


def mrpc_pairs(data: Path, tokenizer: Tokenizer, count: int) -> list[Encoded]:
    """Return the first pairs of the dev set, then those of the training set."""
    counts = TextCounts()
    inputs = [
        given
        for split in ("dev", "train")
        for given in read_glue("mrpc", data / "glue", split, counts)
    ]
    return flat(Classification(GLUE["mrpc"].labels).items(inputs[:count], tokenizer))[:count]


def squad_windows(data: Path, tokenizer: Tokenizer, count: int) -> list[Encoded]:
    """Return windows of dev questions that are chosen evenly from all articles."""
    inputs = read_squad(data / "squad" / "dev-v1.1.json", TextCounts(), scoring=True)
    chosen = [inputs[number * len(inputs) // count] for number in range(count)]
    return flat(QuestionAnswering().items(chosen, tokenizer))[:count]


def flat(items: Items) -> list[Encoded]:
    """Return all sequences of a task's items, in order."""
    return [sequence for item in items.items for part in item.parts for sequence in part.sequences]


def forward_flops(
    config: ModelConfig,
    lengths: Sequence[int],
    *,
    targets: int = 0,
    pooled: bool = False,
    rows: int | None = None,
) -> float:
    """Return the floating-point operations of the forward pass that real tokens need.

    They are counted as by `training_flops`, but without heads unless asked for, and with only that
    part of the last layer that the wanted rows need.

    Args:
        config: the sizes of the model.
        lengths: the lengths of the sequences.
        targets: the number of tokens that go through the MLM head.
        pooled: whether pooler and next-sentence layer count.
        rows: the number of tokens whose last hidden state is wanted; None for all.
    """
    tokens = sum(lengths)
    whole = training_flops(
        config,
        tokens=tokens,
        targets=targets,
        sequences=len(lengths) if pooled else 0,
        sum_squared_lengths=sum(length**2 for length in lengths),
    )
    h, inner = config.hidden_size, config.intermediate_size
    unneeded = 0 if rows is None else tokens - rows
    return whole / 3 - 2.0 * (h * h + 2 * h * inner) * unneeded


def int8_peak(seconds: float, size: int = 1024) -> float:
    """Measure the peak operations per second of int8 matrix products with int32 sums here."""
    generator = torch.Generator().manual_seed(0)
    draw = {"dtype": torch.int8, "generator": generator}
    left, right = (torch.randint(-127, 128, (size, size), **draw) for _ in range(2))  # type: ignore[call-overload]
    torch._int_mm(left, right)
    best, end = 0.0, time.perf_counter() + seconds
    while not best or time.perf_counter() < end:
        started = time.perf_counter()
        torch._int_mm(left, right)
        best = max(best, 2 * size**3 / (time.perf_counter() - started))
    return best


def measure_peaks(seconds: float) -> dict[str, float]:
    """Measure operations per second of torch's products in each precision of this processor."""
    peaks = {"fp32": matmul_peak(torch.device("cpu"), "fp32", seconds)}
    if has_bf16():
        peaks["bf16"] = matmul_peak(torch.device("cpu"), "bf16", seconds)
    if has_integer_products():
        peaks["int8"] = int8_peak(seconds)
    return peaks


def share_of_peak(
    workload: Workload, config: ModelConfig, seconds: Sequence[float], peaks: Sequence[float]
) -> dict[str, Any]:
    """Return the needed work per second over that of matrix products of the same round."""
    if not peaks:
        return {}
    rows = len(workload.sequences) if workload.head == "classification" else None
    flops = forward_flops(config, workload.lengths, rows=rows)
    shares = [flops / s / peak for s, peak in zip(seconds, peaks, strict=False)]
    return {"share_of_matmul_peak_needed": summary(shares)}
