"""From a token store to packed, masked batches: examples/s and tokens/s of one core, and planning.

python -m benchmarks.stream --data FOLDER
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.record import data_folder, new_parser, summary, timed, write_result
from bertkit.corpus.build import prepare
from bertkit.corpus.store import TokenStore
from bertkit.pretraining_data.loader import BatchBuilder, stream_steps
from bertkit.pretraining_data.masking import MaskingOptions
from bertkit.pretraining_data.pairs import PairOptions, measure_pairs
from bertkit.pretraining_data.sampler import ExampleSampler
from bertkit.tokenizer.wordpiece import Tokenizer


def measure(
    store: TokenStore, length: int, masking: MaskingOptions, repeats: int
) -> dict[str, Any]:
    """Measure the rates of building batches of 256 examples in one process, on one thread."""
    predictions = 20 if length == 128 else 77
    examples_rates, token_rates, planning = [], [], []
    for repeat in range(repeats):
        table = ExampleSampler(store, PairOptions(max_length=length), seed=repeat)
        rows, seconds = timed(table.window_rows, 0, 0)
        planning.append(len(rows) / seconds)
        builder = BatchBuilder(store, masking, predictions, seed=repeat)
        steps = stream_steps(table, builder, batch_size=256, steps=40)
        next(steps)
        started = time.perf_counter()
        tokens = sum(len(step.micro_batches[0].packed.ids) for step in steps)
        taken = time.perf_counter() - started
        examples_rates.append(39 * 256 / taken)
        token_rates.append(tokens / taken)
    pairs = measure_pairs(rows, length)
    return {
        "length": length,
        "mean_tokens": round(pairs.mean_tokens, 1),
        "random_share": round(pairs.random_share, 4),
        "repeats": repeats,
        "planned_examples_per_second": summary(planning),
        "examples_per_second": summary(examples_rates),
        "tokens_per_second": summary(token_rates),
    }


def main() -> None:
    """Prepare one Wikipedia part, then measure both lengths and whole-word masking."""
    parser = new_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    data = data_folder(arguments.data)
    torch.set_num_threads(1)
    tokenizer = Tokenizer.load(data / "vocab" / "bert-base-uncased-vocab.txt")
    with tempfile.TemporaryDirectory() as folder:
        text = str(data / "wikipedia" / "wiki_AA.txt.xz")
        store = prepare([text], tokenizer, Path(folder) / "store", processes=2)
        rows = {}
        for name, length, masking in (
            ("length 128", 128, MaskingOptions()),
            ("length 512", 512, MaskingOptions()),
            ("length 128, whole words", 128, MaskingOptions(whole_words=True)),
        ):
            rows[name] = measure(store, length, masking, arguments.repeats)
            print(name, rows[name])
    print(write_result("stream", rows))


if __name__ == "__main__":
    main()
