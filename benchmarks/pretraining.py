"""One pre-training update: bertkit against transformers' BertForPreTraining on the same examples.

Both train the same network (same sizes, same first weights, dropout 0.1, both losses) with the same
fused AdamW, clipping at 1 and, where it says bf16, autocast. transformers gets the batch padded to
its longest example with labels -100 where nothing is to be guessed, as its collators make it, and
its default attention. Rounds alternate between all four; a rate counts real tokens only.

    python -m benchmarks.pretraining --data FOLDER
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.batches import padded
from benchmarks.record import data_folder, new_parser, precisions, summary, timed, write_result
from bertkit.checkpoints.save import save_model
from bertkit.corpus.build import prepare
from bertkit.corpus.store import TokenStore
from bertkit.model.encoder import ModelConfig
from bertkit.model.heads import PretrainingModel
from bertkit.objectives import pretraining_objective
from bertkit.pretraining_data.loader import BatchBuilder, PretrainingBatch, stream_steps
from bertkit.pretraining_data.masking import MaskingOptions
from bertkit.pretraining_data.pairs import PairOptions
from bertkit.pretraining_data.sampler import ExampleSampler
from bertkit.tokenizer.wordpiece import Tokenizer
from bertkit.training.device import autocast, matmul_peak, training_flops
from bertkit.training.optimizer import build_optimizer
from bertkit.training.step import LoopSettings, train_steps

CPU = torch.device("cpu")
BATCH = 32


def own_update(model: PretrainingModel, precision: str) -> Callable[[PretrainingBatch], None]:
    """One update through bertkit's own loop."""
    optimizer = build_optimizer(model, learning_rate=1e-4)
    settings = LoopSettings(
        device=CPU, precision=precision, seed=0, max_gradient_norm=1.0,
        learning_rate=lambda step: 1e-4,
    )  # fmt: skip

    def update(batch: PretrainingBatch) -> None:
        for _ in train_steps(model, optimizer, pretraining_objective, [([batch], None)], settings):
            pass

    return update


def their_update(model: Any, precision: str) -> Callable[[PretrainingBatch], None]:
    """One update of transformers' model, as its examples make it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def update(batch: PretrainingBatch) -> None:
        with autocast(CPU, precision):
            loss = model(**padded(batch)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return update


def both_models(config: ModelConfig, tokenizer: Tokenizer) -> tuple[PretrainingModel, Any]:
    """The same weights twice."""
    from transformers import BertForPreTraining

    torch.manual_seed(0)
    own = PretrainingModel(config)
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder) / "model", own, tokenizer, {})
        theirs = BertForPreTraining.from_pretrained(Path(folder) / "model")
    return own.train(), theirs.train()


def measure(store: TokenStore, width: int, repeats: int) -> dict[str, dict[str, Any]]:
    """Real tokens/s of all four, alternating."""
    config = ModelConfig(
        vocab_size=store.vocabulary_size, hidden_size=width, num_hidden_layers=4,
        num_attention_heads=width // 64, intermediate_size=4 * width,
    )  # fmt: skip
    contestants: dict[str, Callable[[PretrainingBatch], None]] = {}
    for precision in precisions():
        own, theirs = both_models(config, store.tokenizer)
        contestants[f"transformers {precision}"] = their_update(theirs, precision)
        contestants[f"bertkit {precision}"] = own_update(own, precision)
    table = ExampleSampler(store, PairOptions(max_length=128), seed=0)
    builder = BatchBuilder(store, MaskingOptions(), 20, seed=0)
    steps = stream_steps(table, builder, batch_size=BATCH, steps=repeats + 1)
    batches = [step.micro_batches[0] for step in steps]
    for update in contestants.values():
        update(batches[-1])
    rates: dict[str, list[float]] = {name: [] for name in contestants}
    for batch in batches[:-1]:
        for name, update in contestants.items():
            rates[name].append(len(batch.packed.ids) / timed(update, batch)[1])
    return {f"4x{width}, {name}": row(name, rates, config, batches[:-1]) for name in contestants}


def row(
    name: str, rates: dict[str, list[float]], config: ModelConfig, batches: list[PretrainingBatch]
) -> dict[str, Any]:
    """Rates, ratios to transformers in fp32 and in the same precision, and MFU."""
    precision = name.split()[1]
    work = sum(
        training_flops(
            config,
            tokens=len(batch.packed.ids),
            targets=len(batch.target_ids),
            sequences=len(batch.next_labels),
            sum_squared_lengths=sum(length**2 for length in batch.packed.lengths),
        )
        for batch in batches
    ) / sum(len(batch.packed.ids) for batch in batches)
    median = summary(rates[name])
    peak = matmul_peak(CPU, precision, seconds=1.0)

    def over(other: str) -> dict[str, float]:
        return summary([a / b for a, b in zip(rates[name], rates[other], strict=True)])

    return {
        "batch": BATCH,
        "repeats": len(batches),
        "real_tokens_per_second": median,
        "over_transformers_fp32": over("transformers fp32"),
        "over_transformers_same_precision": over(f"transformers {precision}"),
        "needed_gigaflop_per_second": round(median["median"] * work / 1e9, 1),
        "share_of_matmul_peak": round(median["median"] * work / peak, 3),
    }


def main() -> None:
    """Measure widths 256 and 512 at length 128."""
    parser = new_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args()
    data = data_folder(arguments.data)
    tokenizer = Tokenizer.load(data / "vocab" / "bert-base-uncased-vocab.txt")
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        text = str(data / "wikipedia" / "wiki_AA.txt.xz")
        store = prepare([text], tokenizer, Path(folder) / "store", processes=2)
        for width in (256, 512):
            rows |= measure(store, width, arguments.repeats)
    for name, measured in rows.items():
        print(name, measured)
    print(write_result("pretraining", rows))


if __name__ == "__main__":
    main()
