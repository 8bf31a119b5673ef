"""How fast a network reaches a held-out loss: recipes against the clock, on fixed text.

Every recipe in `benchmarks/speedruns` reads the same text with the same vocabulary of 16,000
tokens and is then evaluated on the same held-out examples: pairs of at most 64 tokens, cut and
masked as the paper does, whatever the recipe trains on. The target is the loss at which the recipe
`two-cores` of bertkit 0.1 ended its first phase. A recipe counts if its run ends at or below the
target; its time is that of its updates, without evaluations. BLiMP's dev split is shown beside it.
Settings are chosen on the held-out loss alone.

Times are compared with those of the recipe `two-cores` here, or, as long as it is not run, with the
recorded time of the run that set the target, which an older bertkit made
(results/speedrun-baseline.json).

    python -m benchmarks.speedrun --data FOLDER --work FOLDER [--recipes NAME ...] [--seeds 0 1 2]

The results file is written after every run and keeps the runs that it has; processors with AMX have
a file of their own. A run whose folder is finished is not repeated, so the command can be stopped
and started again. The SHA-256 of the
weights is kept: a replay on the same machine ends with the same bytes.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from bertkit.corpus.from_text import TextOptions, store_from_text
from bertkit.predict.minimal_pairs import evaluate_minimal_pairs

from benchmarks.exports import processor_name
from benchmarks.record import ROOT, data_folder, made, new_parser, write_result
from bertkit.checkpoints.pretrained import read_pretrained
from bertkit.corpus.store import TokenStore
from bertkit.files import read_json, sha256_file
from bertkit.progress import read_journal
from bertkit.training.pretrain import HeldOut, pretrain
from bertkit.training.recipe import PretrainRecipe, read_recipe
from bertkit.training.step import LoopSettings, evaluate_batches

RECIPES = ROOT / "benchmarks" / "speedruns"
BASELINE = "two-cores"
"""The recipe whose time the others are compared with: the first phase of the shipped one in 0.1."""
RECORDED = ROOT / "results" / "speedrun-baseline.json"
"""The run that set the target, of the recipe `two-cores` in an earlier bertkit."""
TARGET = 4.35
"""The MLM loss to reach, in nats per masked token."""
HELD_OUT = RECIPES / f"{BASELINE}.toml"
"""The recipe whose held-out examples all are evaluated on."""


def corpus(data: Path, work: Path) -> TokenStore:
    """Return the store of the text, which is made if it is missing."""
    text = TextOptions(text=(str(data / "wikipedia" / "wiki_AA.txt.xz"),), vocabulary_size=16_000)
    return store_from_text(text, work / "corpus")


def evaluate_held_out(
    run: Path, recipe: PretrainRecipe, store: TokenStore, phase: int = 0
) -> dict[str, Any]:
    """Evaluate the model of a run on the held-out examples of a phase of a recipe."""
    model = read_pretrained(run).build(recipe.objectives.model, keep_head=True).model
    settings = LoopSettings(
        device=torch.device("cpu"),
        precision="fp32",
        seed=0,
        max_gradient_norm=1.0,
        learning_rate=lambda step: 0.0,
    )
    batches = HeldOut(recipe, store).batches(phase)
    means, counts = evaluate_batches(model, recipe.objectives.function(), batches, settings)
    return {"targets": counts["targets"], "mlm_loss": round(means["mlm_loss"], 4)}


def finish_run(
    recipe: PretrainRecipe, store: TokenStore, out: Path, name: str, init_from: Path | None = None
) -> None:
    """Make or finish a pre-training run; end the program if a signal stops it."""
    if pretrain(recipe, store, out, recipe_name=name, init_from=init_from, track=()) is not None:
        raise SystemExit("stopped; the same command goes on")


def run_once(name: str, seed: int, store: TokenStore, data: Path, work: Path) -> dict[str, Any]:
    """Make or finish one run, and return its measurements."""
    flags = ["--training.seed", str(seed)]
    recipe = read_recipe(str(RECIPES / f"{name}.toml"), flags)
    out = work / f"{name}-{seed}"
    finish_run(recipe, store, out, name)
    records = read_journal(out / "journal.jsonl")
    steps = {record["step"]: record for record in records if record["kind"] == "step"}
    start = next(record for record in records if record["kind"] == "start")
    tokens = sum(record["tokens"] for record in steps.values())
    seconds = sum(record["seconds"] for record in steps.values())
    held_out = evaluate_held_out(out, read_recipe(str(HELD_OUT)), store)
    blimp = evaluate_minimal_pairs(out, data / "blimp", split="dev", device="cpu")
    return {
        "made": [made(start["precision"])],
        "parameters": start["parameters"],
        "updates": max(steps),
        "training_tokens": tokens,
        "seconds": round(seconds, 2),
        "tokens_per_second": round(tokens / seconds),
        **held_out,
        "blimp_dev_accuracy": round(blimp.accuracy, 4),
        "weights_sha256": sha256_file(out / "model" / "model.safetensors"),
    }


def recorded_baseline() -> dict[str, Any]:
    """Return the measurements of the first phase of the run that set the target."""
    record = read_json(RECORDED)
    updates = [one for one in record["curve"] if one["phase"] == 0]
    return {
        "parameters": record["run"]["parameters"],
        "training_tokens": sum(one["tokens"] for one in updates),
        "seconds": round(sum(one["seconds"] for one in updates), 2),
        "mlm_loss": round(record["rows"]["phase 1, length 64"]["mlm_loss"], 4),
    }


def baseline_of(runs: dict[str, dict[str, dict[str, Any]]]) -> dict[str, Any]:
    """Return the baseline's seconds, and whether they are from these runs or recorded."""
    if BASELINE in runs:
        seconds = statistics.median(one["seconds"] for one in runs[BASELINE].values())
        return {"source": "run beside the others", "seconds": seconds}
    record = read_json(RECORDED)
    source = f"recorded in results/{RECORDED.name}, {record['date'][:10]}, {record['cpu']}"
    return {"source": source, **recorded_baseline()}


def rows_of(runs: dict[str, dict[str, dict[str, Any]]]) -> dict[str, Any]:
    """Return a row for each recipe: medians over its seeds, and its time beside the baseline's."""
    baseline = baseline_of(runs)
    rows: dict[str, Any] = {}
    if BASELINE not in runs:
        rows[f"{BASELINE}, recorded"] = {
            "seeds": 1,
            **{name: baseline[name] for name in ("parameters", "training_tokens")},
            "minutes": round(baseline["seconds"] / 60, 1),
            "mlm_loss": round(baseline["mlm_loss"], 3),
            "share_of_baseline_time": 1.0,
        }
    for name, seeds in runs.items():
        found = list(seeds.values())

        def median(key: str, found: Sequence[dict[str, Any]] = found) -> Any:
            return statistics.median(one[key] for one in found)

        rows[name] = {
            "seeds": len(found),
            "parameters": median("parameters"),
            "training_tokens": round(median("training_tokens")),
            "minutes": round(median("seconds") / 60, 1),
            "mlm_loss": round(median("mlm_loss"), 3),
            "worst_mlm_loss": round(max(one["mlm_loss"] for one in found), 3),
            "seeds_at_the_target": sum(one["mlm_loss"] <= TARGET for one in found),
            "blimp_dev_accuracy": round(median("blimp_dev_accuracy"), 4),
        }
        rows[name]["share_of_baseline_time"] = round(median("seconds") / baseline["seconds"], 3)
    return rows


def main() -> None:
    """Make the runs that are missing, and write the table after each."""
    known = sorted(path.stem for path in RECIPES.glob("*.toml"))
    known.sort(key=lambda name: name != BASELINE)
    parser = new_parser(__doc__, work="runs/speedrun")
    parser.add_argument("--recipes", nargs="+", choices=known, default=known)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    arguments = parser.parse_args()
    data = data_folder(arguments.data)
    store = corpus(data, arguments.work)
    results = processor_name("speedrun")
    path = ROOT / "results" / f"{results}.json"
    runs: dict[str, Any] = read_json(path)["runs"] if path.is_file() else {}
    for seed in arguments.seeds:
        for name in arguments.recipes:
            found = run_once(name, seed, store, data, arguments.work)
            print(name, seed, found, flush=True)
            runs.setdefault(name, {})[str(seed)] = found
            ordered = {one: runs[one] for one in known if one in runs}
            details = {
                "target": TARGET,
                "corpus": store.content_hash,
                "baseline": baseline_of(ordered),
                "runs": ordered,
            }
            print(write_result(results, rows_of(ordered), details), flush=True)


if __name__ == "__main__":
    main()
