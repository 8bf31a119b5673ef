"""Does the token store keep up with a GPU? A part of `benchmarks.gpu`."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.record import summary
from bertkit.corpus.store import TokenStore
from bertkit.corpus.writers import DocumentArrays, write_manifest, write_shard
from bertkit.pretraining_data.loader import BatchBuilder, StreamStep, stream_steps
from bertkit.pretraining_data.masking import MaskingOptions
from bertkit.pretraining_data.pairs import PairOptions
from bertkit.pretraining_data.sampler import ExampleSampler
from bertkit.tokenizer.wordpiece import SPECIAL_TOKENS, Tokenizer
from bertkit.training.device import synchronize

STEPS = 15
"""Updates of a source for each repeat: more than the loaders make in advance."""


def stream_case(
    train: Callable[[Any], Iterator[Any]],
    vocabulary: int,
    length: int,
    sequences: int,
    device: torch.device,
    repeats: int,
) -> tuple[dict[str, Any], dict[str, str]]:
    """Tokens/s of the loaders alone, and of training from memory, with loaders and without.

    Args:
        train: steps → a record after each update.
        vocabulary: of the network.
        length: the longest example.
        sequences: in a batch.
        device: of the network.
        repeats: each stands for `STEPS` updates.

    Returns: rows by source; errors by source.
    """
    workers = min(12, max(1, (os.cpu_count() or 2) - 2))
    rows: dict[str, Any] = {}
    failed: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        store = random_store(Path(folder) / "store", vocabulary, 200 * sequences * length)

        def steps(loaders: int) -> Iterator[StreamStep]:
            table = ExampleSampler(store, PairOptions(max_length=length), seed=0)
            builder = BatchBuilder(store, MaskingOptions(), 20, seed=0)
            count = STEPS * repeats
            return stream_steps(table, builder, batch_size=sequences, steps=count, workers=loaders)

        kept = list(steps(0))
        sources: dict[str, Callable[[], Iterator[Any]]] = {
            "loaders alone": lambda: steps(workers),
            "training from memory": lambda: train(kept),
            "training with loaders": lambda: train(steps(workers)),
            "training without loaders": lambda: train(steps(0)),
        }
        for name, source in sources.items():
            try:
                rates = stream_rates(source(), STEPS * repeats // 5, device)
            except Exception as error:  # whatever it is, the others go on
                failed[name] = f"{type(error).__name__}: {error}"
                continue
            rows[name] = {
                "sequences": sequences,
                "repeats": len(rates),
                "workers": workers if "loaders" in name and "without" not in name else 0,
                "tokens_per_second": summary(rates),
            }
    return rows, failed


def stream_rates(records: Iterator[Any], stretch: int, device: torch.device) -> list[float]:
    """Tokens/s of each stretch of steps but the first, in which loaders start."""
    rates, tokens, started = [], 0, time.perf_counter()
    for number, record in enumerate(records, 1):
        made = isinstance(record, StreamStep)
        tokens += len(record.micro_batches[0].packed.ids) if made else record.tokens
        if number % stretch == 0:
            synchronize(device)
            now = time.perf_counter()
            rates.append(tokens / (now - started))
            tokens, started = 0, now
    return rates[1:]


def random_store(folder: Path, vocabulary: int, tokens: int) -> TokenStore:
    """A token store of random pieces in sentences of 5 to 40 and documents of 3 to 40 sentences."""
    words = [f"w{number}" for number in range(vocabulary - len(SPECIAL_TOKENS))]
    tokenizer = Tokenizer.from_vocabulary([*SPECIAL_TOKENS, *words], lowercase=True)
    tokenizer.save(folder / "tokenizer")
    generator = np.random.default_rng(0)
    sentences = generator.integers(5, 41, tokens // 22)
    ids = generator.integers(len(SPECIAL_TOKENS), vocabulary, int(sentences.sum()))
    documents = generator.integers(3, 41, len(sentences) // 20)
    documents = documents[np.cumsum(documents) < len(sentences)]
    documents = np.append(documents, len(sentences) - documents.sum())
    parts = [DocumentArrays(ids.astype(np.uint16), sentences, documents)]
    shard = write_shard(folder, "train-00000-000", "train", parts)
    write_manifest(folder, tokenizer, [shard], {})
    return TokenStore(folder)
