"""What the inference benchmark computes: real texts as token sequences, the same in every run.

| name  | what                                                               | head               |
|-------|--------------------------------------------------------------------|--------------------|
| short | Wikipedia's sentences, log-normal lengths with a mean of 31 tokens | classification     |
| mrpc  | MRPC's pairs                                                       | classification     |
| squad | windows of at most 384 tokens of SQuAD 1.1                         | question-answering |
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

import numpy as np

from benchmarks.tokenization import read_sentences
from bertkit import Tokenizer
from bertkit.tasks.sequences import surround
from bertkit.tasks.task import Encoded
from bertkit.tasks.types import DataFiles, load_dataset

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
    def tokens(self) -> int:
        """The number of tokens of all sequences."""
        return sum(len(sequence.ids) for sequence in self.sequences)

    def described(self) -> dict[str, float]:
        """Return what a reader of a results file needs to know of the workload."""
        return {
            "sequences": len(self.sequences),
            "tokens": self.tokens,
            "mean_tokens": round(self.tokens / len(self.sequences), 1),
            "max_length": max(len(sequence.ids) for sequence in self.sequences),
        }


def read_workload(name: str, data: Path, tokenizer: Tokenizer) -> Workload:
    """Read a workload by its name, one of `SIZES`."""
    count = SIZES[name]
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
    normal = np.array([NormalDist().inv_cdf(share) for share in shares])
    mean = math.log(MEAN_SHORT) - DEVIATION_SHORT**2 / 2
    lengths = np.exp(mean + DEVIATION_SHORT * normal).round().astype(np.int64)
    return generator.permutation(lengths.clip(4, LONGEST_SHORT))


def short_texts(data: Path, tokenizer: Tokenizer, count: int) -> list[Encoded]:
    """Return texts that begin with a sentence and go on with the next ones up to their length."""
    sentences = read_sentences(data / "wikipedia" / "wiki_AA.txt.xz", 0.5)
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
    read = load_dataset("mrpc", DataFiles(data=data / "glue"))
    [(_, dev)] = read.dev
    return list(read.task.items([*dev, *read.train][:count], tokenizer).sequences())[:count]


def squad_windows(data: Path, tokenizer: Tokenizer, count: int) -> list[Encoded]:
    """Return windows of dev questions that are chosen evenly from all articles."""
    path = str(data / "squad" / "dev-v1.1.json")
    read = load_dataset("squad-1.1", DataFiles(train=path, dev=path))
    [(_, inputs)] = read.dev
    chosen = [inputs[number * len(inputs) // count] for number in range(count)]
    return list(read.task.items(chosen, tokenizer).sequences())[:count]
