"""One pre-training update: bertkit against transformers' BertForPreTraining on the same examples.

Both train the same network (same sizes, same first weights, dropout 0.1, both losses) with the same
fused AdamW, clipping at 1 and, in the rows of bf16, autocast. transformers gets the batch padded to
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

from benchmarks.exports import processor_name
from benchmarks.gpu.setup import padded
from benchmarks.record import (
    data_folder,
    new_parser,
    precisions,
    summary,
    timed,
    write_result,
)
from bertkit.checkpoints.save import save_model
from bertkit.corpus.prepare import prepare
from bertkit.corpus.store import TokenStore
from bertkit.model.encoder import ModelConfig
from bertkit.model.heads import PretrainingModel, pretraining_objective
from bertkit.pretraining_data.examples import MaskingOptions, PairOptions
from bertkit.pretraining_data.loader import (
    BatchBuilder,
    ExampleSampler,
    PretrainingBatch,
    stream_steps,
)
from bertkit.tokenizer.wordpiece import Tokenizer
from bertkit.training.device import autocast
from bertkit.training.optimizer import build_optimizer
from bertkit.training.step import LoopSettings, train_steps

CPU = torch.device("cpu")
BATCH = 32
WIDTHS = (256, 512)


def own_update(model: PretrainingModel, precision: str) -> Callable[[PretrainingBatch], None]:
    """Return a function that makes one update through bertkit's own loop."""
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
    """Return a function that makes one update of transformers' model, as its examples do."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def update(batch: PretrainingBatch) -> None:
        with autocast(CPU, precision):
            loss = model(**padded(batch)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return update


def sizes(store: TokenStore, width: int) -> ModelConfig:
    """Return the sizes of a network of four layers."""
    return ModelConfig(
        vocab_size=store.vocabulary_size, hidden_size=width, num_hidden_layers=4,
        num_attention_heads=width // 64, intermediate_size=4 * width,
    )  # fmt: skip


def contestant(
    name: str, config: ModelConfig, tokenizer: Tokenizer
) -> Callable[[PretrainingBatch], None]:
    """Return the update of a contestant, such as "bertkit fp32"; all begin with equal weights."""
    library, precision = name.split()
    torch.manual_seed(0)
    ours = PretrainingModel(config)
    if library == "bertkit":
        return own_update(ours.train(), precision)
    from transformers import BertForPreTraining

    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder) / "model", ours, tokenizer, {})
        theirs = BertForPreTraining.from_pretrained(Path(folder) / "model")
    return their_update(theirs.train(), precision)


def make_batches(store: TokenStore, count: int) -> list[PretrainingBatch]:
    """Return the first batches of examples of at most 128 tokens."""
    table = ExampleSampler(store, PairOptions(max_length=128), seed=0)
    builder = BatchBuilder(store, MaskingOptions(), 20, seed=0)
    steps = stream_steps(table, builder, batch_size=BATCH, steps=count)
    return [step.micro_batches[0] for step in steps]


def measure(folder: Path, width: int, repeats: int) -> dict[str, dict[str, Any]]:
    """Measure the real tokens/s of all contestants, alternating."""
    store = TokenStore(folder)
    config, batches = sizes(store, width), make_batches(store, repeats + 1)
    names = [f"{side} {mode}" for mode in precisions() for side in ("transformers", "bertkit")]
    contestants = {name: contestant(name, config, store.tokenizer) for name in names}
    for update in contestants.values():
        update(batches[-1])
    rates: dict[str, list[float]] = {name: [] for name in contestants}
    for batch in batches[:-1]:
        for name, update in contestants.items():
            rates[name].append(len(batch.packed.ids) / timed(update, batch)[1])
    return {f"4x{width}, {name}": row(name, rates) for name in contestants}


def row(name: str, rates: dict[str, list[float]]) -> dict[str, Any]:
    """Return rates, and ratios to transformers in fp32 and in the same precision."""
    precision = name.split()[1]

    def over(other: str) -> dict[str, float]:
        return summary([a / b for a, b in zip(rates[name], rates[other], strict=True)])

    return {
        "batch": BATCH,
        "repeats": len(rates[name]),
        "real_tokens_per_second": summary(rates[name]),
        "over_transformers_fp32": over("transformers fp32"),
        "over_transformers_same_precision": over(f"transformers {precision}"),
    }


def main() -> None:
    """Measure widths 256 and 512 at length 128."""
    parser = new_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    data = data_folder(options.data)
    text = data / "wikipedia" / "wiki_AA.txt.xz"
    vocabulary = data / "vocab" / "bert-base-uncased-vocab.txt"
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        prepare([text], vocabulary, Path(folder) / "store", processes=2)
        for width in WIDTHS:
            rows |= measure(Path(folder) / "store", width, options.repeats)
    for name, measured in rows.items():
        print(name, measured)
    print(write_result(processor_name("pretraining"), rows, folder=options.out))


if __name__ == "__main__":
    main()
