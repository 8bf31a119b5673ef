"""Which pre-training learns most in equal time: a question of `open_questions`.

Networks of the speedrun's size are pre-trained on one part of Wikipedia, each by another objective
or with shared weights, for as many updates as fit into the same time. A short run of each network
measures the time of its updates; all other settings are those of the speedrun's recipe `wide`. The
networks are fine-tuned with the default settings.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.defaults import folder_name, task_data, tuned_scores
from benchmarks.record import summary
from benchmarks.speedrun import RECIPES, corpus, finish_run
from bertkit.checkpoints.pretrained import read_pretrained
from bertkit.config import read_recipe
from bertkit.finetuning.settings import FinetuneSettings, Grid
from bertkit.training.journal import read_journal
from bertkit.training.recipe import PretrainRecipe

NETWORKS = {
    "BERT": "",
    "BERT without NSP": "--objectives.pair none",
    "left to right": "--objectives.token clm --objectives.pair none",
    "ALBERT": "--model.share-layers true --model.embedding-size 128 --objectives.pair sop",
    "ELECTRA": "--objectives.token rtd --objectives.pair single-segment --masking.mask-share 0.85 "
    "--masking.random-share 0.0",
}
"""Row -> the flags that are added to the recipe `wide`."""
TASKS = ("mnli-10k", "qqp-10k", "mrpc", "sst-2, 2,000 rows", "conll-2003, 2,000 sentences")
MINUTES = 9.0
"""The time of the updates of every network."""
TRIAL = (30, 30, 30)
"""The updates of each phase from which the time of an update is taken."""
MOST_DEV = 3_000


def seconds_by_phase(run: Path) -> list[tuple[int, float]]:
    """Return the updates that a run made in each phase, and their seconds in total."""
    found: dict[int, tuple[int, float]] = {}
    before = 0
    for record in read_journal(run / "journal.jsonl"):
        if record["kind"] == "step":
            made, seconds = found.get(record["phase"], (0, 0.0))
            found[record["phase"]] = (made + record["step"] - before, seconds + record["seconds"])
            before = record["step"]
    return [found[phase] for phase in sorted(found)]


def phase_flag(steps: tuple[int, ...]) -> list[str]:
    """Return the flag that sets the updates of each phase."""
    return ["--phases.steps", *map(str, steps)]


def make_network(name: str, data: Path, work: Path) -> Path:
    """Pre-train a network for `MINUTES`, unless that is done, and return its run."""
    store, wide = corpus(data, work), str(RECIPES / "wide.toml")
    flags = NETWORKS[name].split()
    folder = work / f"equal-time-{name.lower().replace(' ', '-')}"
    trial = folder.with_name(f"{folder.name}-trial")
    short = [*flags, *phase_flag(TRIAL), "--training.warmup-steps", "10"]
    finish_run(read_recipe(PretrainRecipe, wide, short), store, trial, name)
    each = [seconds / made for made, seconds in seconds_by_phase(trial)]
    planned = read_recipe(PretrainRecipe, wide, flags).phases.steps
    whole = sum(count * seconds for count, seconds in zip(planned, each, strict=True))
    steps = tuple(round(60 * MINUTES / whole * count) for count in planned)
    finish_run(
        read_recipe(PretrainRecipe, wide, [*flags, *phase_flag(steps)]), store, folder, name
    )
    return folder


def equal_time(data: Path, seeds: int, work: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a row for each network, with its time and its median score on each task."""
    rows: dict[str, Any] = {}
    scores_by_seed: dict[str, Any] = {}
    for name in NETWORKS:
        run = make_network(name, data, work)
        updates = seconds_by_phase(run)
        start = read_pretrained(run)
        rows[name] = {
            "seeds": seeds,
            "updates": sum(made for made, _ in updates),
            "minutes": round(sum(seconds for _, seconds in updates) / 60, 1),
        }
        for task in TASKS:
            used = task_data(task, data, start.config.max_position_embeddings, MOST_DEV)
            settings = FinetuneSettings(grid=Grid(seeds=seeds), track=())
            scores = tuned_scores(used, start, run / "tuned" / folder_name(run.name, task), settings)
            rows[name][f"{task} {used.task.metric} percent"] = summary(scores)
            scores_by_seed.setdefault(name, {})[task] = scores
            print(name, task, scores, flush=True)
    return rows, {"scores_by_seed": scores_by_seed, "most_dev_inputs": MOST_DEV}
