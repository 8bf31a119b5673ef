"""Reading at scale: what opening, planning and batches cost, for stores of several sizes.

The stores are synthetic: random ids of a vocabulary as large as BERT's, sentences of 5 to 45
tokens, documents of 1 to 40 sentences. A few shards are real; the others are hard links to them
with names and entries of their own, so that five thousand million tokens take little of the disk
(`real_shards`, `real_gigabytes`; --real 400 makes all of them real). Links share the page cache:
what is measured is the program, not the disk. Each size is measured in a process of its own.

    python -m benchmarks.reading
    python -m benchmarks.reading --quick  # small stores, no result file
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.record import child_result, summary, timed, write_result
from bertkit.corpus.store import ARRAYS, ShardInfo, TokenStore
from bertkit.corpus.writers import DocumentArrays, write_manifest, write_shard
from bertkit.tokenizer.wordpiece import SPECIAL_TOKENS, Tokenizer

VOCABULARY = 30_522
BATCH = 256
LENGTH = 128
CASES = {  # name -> (shards, tokens per shard)
    "0.05 thousand million tokens": (4, 12_500_000),
    "0.5 thousand million tokens": (40, 12_500_000),
    "5 thousand million tokens": (400, 12_500_000),
    "5 thousand million tokens, small shards": (50_000, 100_000),
}
QUICK = {"small": (4, 60_000), "ten times": (40, 60_000), "hundred times": (400, 60_000)}
BATCHES = 40
"""The number of batches of a measurement of rates."""
SEQUENCES_PER_SECOND = 64_000
"""The sequences that a run uses up per second while the next window is planned."""


def main() -> None:
    """Measure every size, and print a row as soon as it is there."""
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(measure(Path(sys.argv[2]), int(sys.argv[3]))))
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", help="not needed; other benchmarks take it")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--real", type=int, default=8, help="shards of a store that are no links")
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    rows: dict[str, Any] = {}
    for name, (shards, tokens) in (QUICK if arguments.quick else CASES).items():
        with tempfile.TemporaryDirectory() as folder:
            store = write_store(Path(folder) / "store", shards, tokens, real=arguments.real)
            real = min(shards, arguments.real)
            rows[name] = {
                "tokens": store.tokens,
                "shards": shards,
                "real_shards": real,
                "real_gigabytes": round(sum(store.shards[0].bytes.values()) * real / 1e9, 3),
                "repeats": arguments.repeats,
                **repeated(store.folder, arguments.repeats),
            }
        print(name, rows[name], flush=True)
    if not arguments.quick:
        details = {"batch_size": BATCH, "length": LENGTH, "batches": BATCHES}
        print(write_result("reading", rows, details))


def write_store(
    folder: Path, shards: int, tokens: int, *, real: int = 8, seed: int = 0, split: str = "train"
) -> TokenStore:
    """Write a store of random ids, most of whose shards are hard links to a few real ones."""
    pieces = [*SPECIAL_TOKENS, *(f"w{n}" for n in range(VOCABULARY - len(SPECIAL_TOKENS)))]
    tokenizer = Tokenizer.from_vocabulary(pieces, lowercase=True)
    tokenizer.save(folder / "tokenizer")
    rng = np.random.default_rng(seed)
    entries: list[ShardInfo] = []
    for number in range(shards):
        name = f"{split.replace('_', '-')}-{number:05d}-000"
        if number < real:
            entries.append(write_shard(folder, name, split, [random_documents(tokens, rng)]))
            continue
        original = entries[number % real]
        for kind in ARRAYS:
            os.link(folder / f"{original.name}.{kind}.npy", folder / f"{name}.{kind}.npy")
        entries.append(replace(original, name=name))
    write_manifest(folder, tokenizer, entries, {})
    return TokenStore(folder, split)


def random_documents(tokens: int, rng: np.random.Generator) -> DocumentArrays:
    """Return about `tokens` random tokens, in documents of 1 to 40 sentences of 5 to 45 tokens."""
    sentences = rng.integers(5, 46, max(41, tokens // 25))
    lengths = rng.integers(1, 41, len(sentences))
    cut = int(np.searchsorted(np.cumsum(lengths), len(sentences)))
    documents = lengths[: cut + 1].copy()
    documents[-1] -= documents.sum() - len(sentences)
    ids = rng.integers(len(SPECIAL_TOKENS), VOCABULARY, int(sentences.sum()), dtype=np.uint16)
    return DocumentArrays(ids, sentences, documents)


def repeated(folder: Path, repeats: int) -> dict[str, Any]:
    """Return medians and spreads over processes that measure the same store."""
    runs = [child_result(folder, repeat) for repeat in range(repeats)]
    return {key: summary([run[key] for run in runs]) for key in runs[0]}


def measure(folder: Path, seed: int) -> dict[str, float]:
    """Measure one row in a child process, in seconds, megabytes and rates of one thread."""
    import torch

    from bertkit.pretraining_data.loader import BatchBuilder
    from bertkit.pretraining_data.masking import MaskingOptions
    from bertkit.pretraining_data.pairs import PairOptions
    from bertkit.pretraining_data.sampler import START, ExampleSampler

    torch.set_num_threads(1)
    before = own_megabytes()
    started = time.perf_counter()
    store, opening = timed(lambda: (found := TokenStore(folder), found.content_hash)[0])
    table = ExampleSampler(store, PairOptions(max_length=LENGTH), seed)
    _, verifying = timed(lambda: [store.arrays(shard) for shard in table.window_shards(0, 0)])
    rows, planning = timed(lambda: table.window_rows(0, 0))
    builder = BatchBuilder(store, MaskingOptions(), 20, seed)
    builder[table.take(START, BATCH)[0]]
    until_first_batch = time.perf_counter() - started
    _, building = timed(lambda: batches(builder, rows))
    _, seeking = timed(lambda: table.window_rows(1000 + seed, table.windows - 1))
    scattered = anywhere(store, rows, seed)
    builder[scattered]  # this maps their shards
    _, reading = timed(lambda: builder[scattered])
    return {
        "open_milliseconds": 1000 * opening,
        "first_batch_after_milliseconds": 1000 * until_first_batch,
        "seek_milliseconds": 1000 * seeking,
        "examples_of_a_window": len(rows),
        "verify_seconds_of_a_window": verifying,
        "plan_seconds_of_a_window": planning,
        "plan_seconds_per_million_examples": 1e6 * planning / len(rows),
        "longest_wait_milliseconds": 1000 * longest_wait(table),
        "batches_per_second_of_a_core": BATCHES / building,
        "random_rows_per_second": len(scattered) / reading,
        "own_megabytes": own_megabytes() - before,
    }


def batches(builder: Any, rows: np.ndarray) -> None:
    """Build some batches, the rows of a small window over and over."""
    for batch in range(BATCHES):
        builder[np.take(rows, range(batch * BATCH, (batch + 1) * BATCH), mode="wrap")]


def anywhere(store: TokenStore, rows: np.ndarray, seed: int) -> np.ndarray:
    """Return examples from random places of as many shards as a store keeps mapped."""
    from bertkit.corpus.store import KEPT_MAPS

    rng = np.random.default_rng(seed)
    shards = rng.choice(len(store.shards), min(KEPT_MAPS, len(store.shards)), replace=False)
    found = np.take(rows, range(20 * BATCH), mode="wrap").copy()
    for side in ("a", "b"):
        found[f"{side}_shard"] = rng.choice(shards, len(found))
        most = min(store.shards[0].tokens, 50_000_000) // 2
        found[f"{side}_start"] = rng.integers(0, most, len(found))
    return found


def longest_wait(table: Any) -> float:
    """Return the longest wait in seconds for a batch's rows, from mid-window into the next window.

    A pause stands for a step: 64,000 sequences a second are what several large GPUs use up.
    """
    half = len(table.window_rows(0, 0)) // 2
    place, max_length = (0, 0, half), 0.0
    for _ in range(half // BATCH + 4):
        started = time.perf_counter()
        _, place = table.take(place, BATCH)
        max_length = max(max_length, time.perf_counter() - started)
        time.sleep(BATCH / SEQUENCES_PER_SECOND)
    table.close()
    return max_length


def own_megabytes() -> float:
    """Return the memory of this process without mapped files."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) / 1024
    return 0.0


if __name__ == "__main__":
    main()
