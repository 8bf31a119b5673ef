"""Whether bertkit and transformers' Trainer tune equally well: short runs, many seeds a side.

`quality.py` compares the medians of a few long runs, which says little about a difference of a
point. Here both sides make short runs over the same rows, seed by seed in turn, and the table has
the difference of their means with Welch's 95 % confidence interval. CoLA, of which one epoch
teaches next to nothing, is run as `quality.py` does it, and begins with the runs that are stored
there.

    python -m benchmarks.seeds --data FOLDER            make the runs that are missing
    python -m benchmarks.seeds --data FOLDER --seeds    write the table of those that are done

The results file is written after every seed and keeps the scores of every run. Processes with
different --seeds or --tasks may share a work folder.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from bertkit.reproduce.run import LaterSeeds

from benchmarks import reference
from benchmarks.quality import Runs, Scored, with_runs
from benchmarks.quality_data import SETTINGS as QUALITY
from benchmarks.quality_data import Setting, dataset, grid_values
from benchmarks.record import ROOT, data_folder, made, new_parser, start_model, write_result
from bertkit.checkpoints.pretrained import read_pretrained
from bertkit.files import read_json, write_json, write_text
from bertkit.finetuning.finetune import finetune
from bertkit.finetuning.settings import FinetuneSettings, TrainingSettings

SETTINGS = {
    "sts-b": Setting(16, 1e-4, 1),
    "mnli-10k": Setting(32, 1e-4, 1),
    "cola": QUALITY["cola"],
}
METRICS = {"sts-b": ("pearson", "spearman"), "mnli-10k": ("accuracy",), "cola": ("matthews",)}
FILES = {
    "STS-B": ("tsv", {"train": 4500, "dev": 1500}),
    "CoLA": ("tsv", {"train": 8551, "dev": 1043}),
    "MNLI-10k": ("jsonl", {"train": 3000, "dev": 1500}),
}
"""Folder -> the ending of its files, and how many of their rows are used."""
CONFIDENCE = 0.95


def make_files(data: Path, out: Path) -> None:
    """Write the rows that both sides read, drawn at random and always the same ones."""
    for folder, (ending, sizes) in FILES.items():
        for split, size in sizes.items():
            source = data / "glue" / folder / f"{split}.{ending}"
            lines = source.read_text(encoding="utf-8").removesuffix("\n").split("\n")
            first = int(folder == "STS-B")  # STS-B has a header
            kept = sorted(random.Random(0).sample(range(first, len(lines)), size))
            text = "\n".join([*lines[:first], *(lines[i] for i in kept)]) + "\n"
            write_text(out / "glue" / folder / source.name, text)


def own_run(task: str, seed: int, data: Path, out: Path, precision: str) -> None:
    """Make one run of bertkit, and write its scores; the model is not kept."""
    start = read_pretrained(start_model())
    found = dataset(task, data, data, start.config.max_position_embeddings)
    grid = LaterSeeds(**grid_values(SETTINGS[task]), seeds=seed, first=seed)
    with tempfile.TemporaryDirectory(dir=out.parent) as folder:
        began = time.perf_counter()
        training = TrainingSettings(precision=precision)
        best = finetune(
            found,
            start,
            folder,
            settings=FinetuneSettings(grid=grid, training=training, device="cpu"),
        )
        seconds = time.perf_counter() - began
    values = {"task": task, "seed": seed, "scores": best.scores["dev"], "seconds": seconds}
    write_json(out, {**values, "made": made(precision)})


def make_runs(task: str, seed: int, work: Path, precision: str) -> None:
    """Make the runs of a task and a seed that are not done, on both sides."""
    done = {side: runs["seeds"] for side, runs in all_runs(work, stored_runs())[task].items()}
    data = work / "data"
    if seed not in done["bertkit"]:
        own_run(task, seed, data, work / f"bertkit-{task}-{seed}.json", precision)
    if seed not in done["trainer"]:
        out = work / f"trainer-{task}-{seed}.json"
        reference.run(task, SETTINGS[task], seed, data, work, out, precision)


def stored_runs() -> dict[str, dict[str, Runs]]:
    """Return the runs of the results file or, before there is one, those that `quality.py` made."""
    folder = ROOT / "results"
    if (folder / "seeds.json").is_file():
        return dict(read_json(folder / "seeds.json")["runs"])
    runs = read_json(folder / "quality.json")["runs"]
    return {task: runs[task] for task in SETTINGS if SETTINGS[task] == QUALITY[task]}


def all_runs(work: Path, known: dict[str, dict[str, Runs]]) -> dict[str, dict[str, Runs]]:
    """Return the runs of the results file, and those of the work folder that it lacks."""
    runs: dict[str, dict[str, Runs]] = {task: {} for task in METRICS}
    for task, metrics in METRICS.items():
        for side in ("bertkit", "trainer"):
            files = [read_json(path) for path in work.glob(f"{side}-{task}-*.json")]
            scored = {run["seed"]: Scored(run["made"], run["scores"]) for run in files}
            runs[task][side] = with_runs(known.get(task, {}).get(side, {}), scored, metrics)
    return runs


def row(own: list[float], theirs: list[float]) -> dict[str, Any]:
    """Return means, deviations and the difference of the means with its interval, in percent."""
    from scipy.stats import ttest_ind

    low, high = ttest_ind(own, theirs, equal_var=False).confidence_interval(CONFIDENCE)
    found: dict[str, Any] = {}
    for side, values in (("bertkit", own), ("trainer", theirs)):
        found[f"{side}_mean"] = round(statistics.mean(values), 2)
        found[f"{side}_deviation"] = round(statistics.stdev(values), 2)
        found[f"{side}_runs"] = len(values)
    difference = statistics.mean(own) - statistics.mean(theirs)
    return {
        **found,
        "difference": round(difference, 2),
        "interval_low": round(float(low), 2),
        "interval_high": round(float(high), 2),
    }


def rows_of(runs: dict[str, dict[str, Runs]]) -> dict[str, Any]:
    """Return a row for each metric of a task that has two or more runs on both sides."""
    return {
        f"{task}, {metric}": row(sides["bertkit"][metric], sides["trainer"][metric])
        for task, sides in runs.items()
        for metric in METRICS[task]
        if min(len(side["seeds"]) for side in sides.values()) > 1
    }


def main() -> None:
    """Make the runs that are missing, and write the table after each seed."""
    parser = new_parser(__doc__, work="runs/seeds")
    parser.add_argument("--tasks", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--seeds", nargs="*", type=int, default=list(range(1, 13)))
    parser.add_argument("--precision", default="bf16", help="of both sides: fp32 or bf16")
    arguments = parser.parse_args()
    work = arguments.work
    if arguments.seeds:
        make_files(data_folder(arguments.data), work / "data")
    details = {"settings": {task: setting._asdict() for task, setting in SETTINGS.items()}}
    details["rows_used"] = {folder: sizes for folder, (_, sizes) in FILES.items()}
    for seed in arguments.seeds or [None]:
        for task in arguments.tasks if seed is not None else ():
            make_runs(task, seed, work, arguments.precision)
        runs = all_runs(work, stored_runs())
        print(write_result("seeds", rows_of(runs), {**details, "runs": runs}), flush=True)


if __name__ == "__main__":
    main()
