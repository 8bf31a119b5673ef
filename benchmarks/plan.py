"""How accurate `bertkit plan` is: a short pre-training is forecast, then made, on Wikipedia text.

Forecast and run are each made in a process of their own, one after the other. The rate is that of
the updates, without the first ones, evaluation and saving; the memory is the most that the whole
process held.

    python -m benchmarks.plan --data FOLDER
"""

from __future__ import annotations

import lzma
import multiprocessing
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.record import data_folder, new_parser, summary, write_result
from bertkit.corpus.build import PrepareOptions, prepare
from bertkit.corpus.store import TokenStore
from bertkit.planning import GIB
from bertkit.planning.corpus import store_corpus
from bertkit.planning.estimate import make_plan, this_machine
from bertkit.processes import resident_bytes
from bertkit.tokenizer.wordpiece import Tokenizer
from bertkit.training.device import choose_precision
from bertkit.training.journal import read_journal
from bertkit.training.pretrain import pretrain
from bertkit.training.recipe import Logging, ModelSize, Phases, PretrainRecipe, Training

CPU = torch.device("cpu")
TEXT_BYTES = 24_000_000
WARM = 10
"""The number of first updates that are not counted."""


def recipe_of(layers: int, width: int, batch: int, updates: int) -> PretrainRecipe:
    """Return a recipe of one phase at length 128, in the precision of this machine."""
    return PretrainRecipe(
        model=ModelSize(
            hidden_size=width, num_hidden_layers=layers, num_attention_heads=width // 64
        ),
        phases=Phases(
            lengths=(128,), steps=(updates,), batch_sizes=(batch,), max_predictions=(20,)
        ),
        training=Training(warmup_steps=updates // 10),
        logging=replace(Logging(), log_every=WARM, held_out_sequences=128),
    )


def wikipedia_store(data: Path, folder: Path) -> Path:
    """Make a token store of the first TEXT_BYTES of Wikipedia in a folder."""
    with lzma.open(data / "wikipedia" / "wiki_AA.txt.xz") as file:
        head = file.read(TEXT_BYTES)
    text = folder / "text.txt"
    text.write_bytes(head[: head.rfind(b"\n") + 1])
    tokenizer = Tokenizer.load(data / "vocab" / "bert-base-uncased-vocab.txt")
    prepare([str(text)], tokenizer, folder / "store", PrepareOptions(held_out=0.02))
    return folder / "store"


def forecast(recipe: PretrainRecipe, store: Path, seconds: float) -> dict[str, float]:
    """Return what `bertkit plan` says."""
    corpus = store_corpus(TokenStore(store), recipe.phases.lengths)
    machine = this_machine(CPU, recipe)
    made = make_plan(recipe, corpus, machine, CPU, seconds=seconds)
    [phase] = made.phases
    return {
        "tokens_per_second": phase.tokens_per_second,
        "mfu": phase.mfu,
        "peak_gib": phase.fit.memory.peak / GIB,
    }


def real(recipe: PretrainRecipe, store: Path) -> dict[str, float]:
    """Make the run, and return what it gives."""
    with tempfile.TemporaryDirectory() as folder:
        pretrain(recipe, TokenStore(store), folder, recipe_name="plan")
        records = read_journal(Path(folder) / "journal.jsonl")
    steps = [r for r in records if r["kind"] == "step" and r["step"] > WARM]
    seconds = sum(record["seconds"] for record in steps)
    return {
        "tokens_per_second": sum(record["tokens"] for record in steps) / seconds,
        "mfu": sum(record["mfu"] * record["seconds"] for record in steps) / seconds,
        "peak_gib": (resident_bytes("VmHWM") or 0.0) / GIB,
    }


def alone(work: Callable[..., dict[str, float]], *arguments: Any) -> dict[str, float]:
    """Call a function in a process of its own, so that its memory is its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(work, arguments)


def compare(forecasts: list[dict[str, float]], runs: list[dict[str, float]]) -> dict[str, Any]:
    """Return forecasts and runs, and the error of each forecast against the run after it."""
    row: dict[str, Any] = {"repeats": len(runs)}
    for name in ("tokens_per_second", "peak_gib", "mfu"):
        expected, found = ([values[name] for values in side] for side in (forecasts, runs))
        errors = [100 * (a / b - 1) for a, b in zip(expected, found, strict=True)]
        row[f"forecast_{name}"] = summary(expected)
        row[f"real_{name}"] = summary(found)
        row[f"error_{name}_percent"] = summary(errors)
    return row


def main() -> None:
    """Compare forecasts and runs, which alternate, for two sizes."""
    parser = new_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="few updates; writes no results file")
    arguments = parser.parse_args()
    data = data_folder(arguments.data)
    updates, seconds = (WARM + 5, 4.0) if arguments.quick else (60 + WARM, 20.0)
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        store = wikipedia_store(data, Path(folder))
        for layers, width, batch in ((4, 256, 32), (6, 384, 16)):
            recipe = recipe_of(layers, width, batch, updates)
            pairs = [
                (alone(forecast, recipe, store, seconds), alone(real, recipe, store))
                for _ in range(arguments.repeats)
            ]
            row = compare([pair[0] for pair in pairs], [pair[1] for pair in pairs])
            details = {"updates": updates - WARM, "batch": batch, "calibration_seconds": seconds}
            precision = choose_precision(recipe.training.precision, CPU)
            rows[f"{layers}x{width}, length 128, {precision}"] = {**details, **row}
            print(rows)
    if not arguments.quick:
        print(write_result("plan", rows))


if __name__ == "__main__":
    main()
