"""Which objective teaches most in equal time: a question of `open_questions`.

Networks of the speedrun's recipe `wide` are pre-trained on one part of Wikipedia, each with another
objective or with shared weights, for as many updates as fit into the same processor time of one
thread. Short runs that take turns measure the time of each network's updates beforehand. All other
settings are those of the recipe. The networks are fine-tuned with the default settings.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.defaults import folder_name, task_data, tuned_scores
from benchmarks.record import summary
from benchmarks.speedrun import RECIPES, corpus, finish_run
from bertkit.checkpoints.pretrained import read_pretrained
from bertkit.config import read_recipe
from bertkit.corpus.store import TokenStore
from bertkit.files import read_json, write_json
from bertkit.finetuning.settings import FinetuneSettings, Grid
from bertkit.training.pretrain import pretrain
from bertkit.training.recipe import PretrainRecipe

NETWORKS = {
    "BERT": "",
    "BERT without NSP": "--objectives.pair none",
    "left to right": "--objectives.token clm --objectives.pair none",
    "ALBERT": "--model.share-layers --model.embedding-size 128 --objectives.pair sop",
    "ELECTRA": "--objectives.token rtd --objectives.pair single-segment --masking.mask-share 0.85 "
    "--masking.random-share 0.0",
}
"""Row -> the flags that are added to the recipe `wide`."""
TASKS = ("mrpc", "sst-2, 2,000 rows", "conll-2003, 2,000 sentences")
MINUTES = 20.0
"""The processor time of the updates of every network."""
ROUNDS, TRIAL, TIMED = 3, 16, 8
"""The short runs of each network, their updates in each phase, and how many of these are timed."""
MOST_DEV = 3_000


def recipe_for(name: str, steps: list[int], warmup: int, log_every: int) -> PretrainRecipe:
    """Return the recipe of a network with so many updates in each phase."""
    flags = [*NETWORKS[name].split(), "--phases.steps", *map(str, steps)]
    flags += ["--training.warmup-steps", str(warmup), "--logging.log-every", str(log_every)]
    return read_recipe(PretrainRecipe, str(RECIPES / "wide.toml"), flags)


def update_seconds(name: str, store: TokenStore) -> list[float]:
    """Return the processor seconds of an update of a network in each phase."""
    times: dict[int, float] = {}

    def note(record: dict[str, Any]) -> None:
        if record["kind"] == "step":
            times[record["step"]] = time.process_time()

    with TemporaryDirectory() as folder:
        recipe = recipe_for(name, [TRIAL] * 3, 10, TIMED)
        pretrain(recipe, store, Path(folder, "run"), recipe_name=name, track=(), on_record=note)
    ends = [TRIAL * (phase + 1) for phase in range(3)]
    return [(times[end] - times[end - TIMED]) / TIMED for end in ends]


def planned_steps(store: TokenStore, work: Path) -> dict[str, list[int]]:
    """Return the updates of each network and phase, measured once for a work folder."""
    path = work / "equal-time.json"
    if not path.is_file():
        found: dict[str, list[list[float]]] = {name: [] for name in NETWORKS}
        for _ in range(ROUNDS):
            for name in NETWORKS:
                found[name].append(update_seconds(name, store))
        planned = read_recipe(PretrainRecipe, str(RECIPES / "wide.toml")).phases.steps
        steps = {}
        for name, rounds in found.items():
            each = [statistics.median(times) for times in zip(*rounds, strict=True)]
            whole = sum(count * seconds for count, seconds in zip(planned, each, strict=True))
            steps[name] = [round(60 * MINUTES / whole * count) for count in planned]
        write_json(path, {"update_seconds": found, "steps": steps})
    return dict(read_json(path)["steps"])


def make_network(name: str, steps: list[int], store: TokenStore, work: Path) -> Path:
    """Pre-train a network, unless that is done, and return its run."""
    run = work / f"equal-time-{name.lower().replace(' ', '-')}"
    finish_run(recipe_for(name, steps, round(sum(steps) / 30), 50), store, run, name)
    return run


def equal_time(data: Path, seeds: int, work: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a row for each network: its updates, and its median score on each task."""
    torch.set_num_threads(1)
    store = corpus(data, work)
    rows: dict[str, Any] = {}
    scores_by_seed: dict[str, Any] = {}
    for name, steps in planned_steps(store, work).items():
        run = make_network(name, steps, store, work)
        start = read_pretrained(run)
        rows[name] = {"seeds": seeds, "updates": sum(steps)}
        for task in TASKS:
            used = task_data(task, data, start.config.max_position_embeddings, MOST_DEV)
            settings = FinetuneSettings(grid=Grid(seeds=seeds), track=())
            out = run / "tuned" / folder_name(run.name, task)
            scores = tuned_scores(used, start, out, settings)
            rows[name][f"{task} {used.task.metric} percent"] = summary(scores)
            scores_by_seed.setdefault(name, {})[task] = scores
            print(name, task, scores, flush=True)
    timed = read_json(work / "equal-time.json")
    return rows, {"scores_by_seed": scores_by_seed, "processor_minutes": MINUTES, **timed}
