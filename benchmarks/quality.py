"""Quality of fine-tuning against transformers' Trainer: same start, data and hyper-parameters.

`python -m benchmarks.reference` makes the Trainer's runs, this module bertkit's; both skip what is
done in the work folder. Then this module writes the table: medians, spreads, and whether bertkit's
median is within one standard deviation of the reference or better.

The results file keeps the scores of every run by seed and how each was made, and seeds that only a
work folder has are added: a run takes up to an hour, and they need not be made on one machine or on
one day. After a change that should show in the scores, or of settings, begin with --fresh TASK, or
with --fresh TASK:trainer if only the reference changes.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from bertkit.finetuning.grid import read_results
from bertkit.reproduce.run import LaterSeeds

from benchmarks.quality_data import (
    SETTINGS,
    Setting,
    dataset,
    grid_values,
    make_slices,
    start_folder,
)
from benchmarks.record import ROOT, data_folder, made, new_parser, summary, write_result
from bertkit.checkpoints.pretrained import read_pretrained
from bertkit.files import read_json, write_json
from bertkit.finetuning.finetune import finetune
from bertkit.finetuning.runs import FinetuneSettings, Grid, TrainingSettings
from bertkit.predict.load import load_predictor
from bertkit.progress import Console
from bertkit.training.device import choose_precision

METRICS = {
    "mrpc": ("accuracy", "f1"),
    "cola": ("matthews",),
    "rte": ("accuracy",),
    "sts-b": ("pearson", "spearman"),
    "sst-2": ("accuracy",),
    "mnli-10k": ("accuracy",),
    "qqp-10k": ("accuracy",),
    "arc-easy": ("accuracy",),
    "conll-2003": ("f1",),
    "conll-2003-documents": ("f1",),
    "squad-1.1": ("exact_match", "f1"),
    "squad-2.0": ("exact_match", "f1"),
}


def own_runs(
    task: str, setting: Setting, seeds: range, data: Path, work: Path, precision: str
) -> None:
    """Make bertkit's runs, except for those that are done."""
    start = read_pretrained(start_folder(setting, data, work, precision))
    found = dataset(task, data, work / "slices", start.config.max_position_embeddings)
    grid = LaterSeeds(**grid_values(setting), seeds=seeds[-1], first=seeds[0])
    before = own_scores(task, work)
    with Console(interval=60) as console:
        finetune(
            found,
            start,
            work / "bertkit" / task,
            settings=FinetuneSettings(grid=grid, training=TrainingSettings(precision=precision)),
            console=console,
        )
    known = {str(seed): run.made for seed, run in before.items()}
    new = {str(seed): made(precision) for seed in own_scores(task, work) if seed not in before}
    write_json(work / "bertkit" / f"{task}.json", known | new)


Runs = dict[str, Any]
"""The runs of one side: "seeds", "made", and for each metric as many values in percent; seeds come
in any order."""


class Scored(NamedTuple):
    """The dev scores of a run, as shares of one."""

    made: str
    """The code and the precision of the run."""
    scores: Mapping[str, float]


def own_scores(task: str, work: Path) -> dict[int, Scored]:
    """Return bertkit's runs by seed."""
    grid = Grid(**grid_values(SETTINGS[task]), seeds=20)
    results = read_results(work / "bertkit" / task, grid.runs())
    path = work / "bertkit" / f"{task}.json"
    known = read_json(path) if path.is_file() else {}
    seeds = {result.settings["seed"]: result.scores.get("dev", {}) for result in results}
    return {s: Scored(known.get(str(s), "unknown"), scores) for s, scores in seeds.items()}


def reference_scores(task: str, data: Path, work: Path, precision: str) -> dict[int, Scored]:
    """Return the reference's runs by seed; saved SQuAD models are scored here, once."""
    found = {}
    for path in sorted((work / "reference").glob(f"{task}-[0-9]*.json")):
        values = json.loads(path.read_text())
        if not values["scores"]:
            values["scores"] = score_saved(task, path.with_suffix(""), data, work, precision)
            path.write_text(json.dumps(values, indent=2))
        found[values["seed"]] = Scored(values["made"], values["scores"])
    return found


def with_runs(known: Runs, runs: Mapping[int, Scored], metrics: tuple[str, ...]) -> Runs:
    """Return known runs and those of seeds that are not among them.

    Args:
        known: the runs of the results file; {} if it has none.
        runs: the runs to add, by seed.
        metrics: the metrics that are kept.
    """
    found = {name: list(known.get(name, ())) for name in ("seeds", "made", *metrics)}
    for seed, (how, scores) in sorted(runs.items()):
        if seed not in found["seeds"] and set(metrics) <= set(scores):
            found["seeds"].append(seed)
            found["made"].append(how)
            for metric in metrics:
                found[metric].append(round(100 * scores[metric], 2))
    return found


def score_saved(
    task: str, folder: Path, data: Path, work: Path, precision: str
) -> dict[str, float]:
    """Score a model that the Trainer saved, with bertkit's windows and decoding."""
    found = dataset(task, data, work / "slices", 512)
    predictor = load_predictor([folder], precision=precision)
    predictor.task = found.task
    [(_, inputs)] = found.dev
    predictions, _ = predictor.run(inputs)
    return found.task.calibrated(inputs, predictions).score(inputs, predictions)


def row(own: list[float], theirs: list[float]) -> dict[str, Any]:
    """Return medians and spreads of values in percent, and the comparison of both sides.

    One run of the Trainer has no deviation, and so no verdict; if it has no runs, the row is only
    about bertkit.
    """
    if not theirs:
        return {"bertkit": summary(own), "bertkit_runs": len(own)}
    deviation = statistics.stdev(theirs) if len(theirs) > 1 else None
    lowest = None if deviation is None else statistics.median(theirs) - deviation
    return {
        "bertkit": summary(own),
        "bertkit_runs": len(own),
        "trainer": summary(theirs),
        "trainer_runs": len(theirs),
        "trainer_deviation": None if deviation is None else round(deviation, 2),
        "bertkit_minus_trainer": round(statistics.median(own) - statistics.median(theirs), 2),
        "within_one_deviation": None if lowest is None else statistics.median(own) >= lowest,
    }


def main() -> None:
    """Make bertkit's runs that are missing, then write the table of all tasks with both sides."""
    parser = new_parser(__doc__, work="runs/quality")
    parser.add_argument("--tasks", nargs="*", default=list(SETTINGS))
    parser.add_argument("--seeds", type=int, default=3, help="the last one; they count from 1")
    parser.add_argument("--first-seed", type=int, default=1, help="leave out those before it")
    parser.add_argument("--table-only", action="store_true")
    parser.add_argument("--precision", default="auto", help="of bertkit's runs: fp32, bf16, auto")
    parser.add_argument(
        "--fresh",
        nargs="+",
        default=[],
        metavar="TASK[:SIDE]",
        help="forget these in the results file; SIDE is bertkit or trainer",
    )
    arguments = parser.parse_args()
    precision = choose_precision(arguments.precision, torch.device("cpu"))
    data = data_folder(arguments.data)
    make_slices(data, arguments.work / "slices")
    if not arguments.table_only:
        for task in arguments.tasks:
            seeds = range(arguments.first_seed, arguments.seeds + 1)
            own_runs(task, SETTINGS[task], seeds, data, arguments.work, precision)
    stored = ROOT / "results" / "quality.json"
    known = read_json(stored)["runs"] if stored.is_file() else {}
    rows, runs = {}, {}
    for task, metrics in METRICS.items():
        before = {
            side: made_before
            for side, made_before in known.get(task, {}).items()
            if not {task, f"{task}:{side}"} & {*arguments.fresh}
        }
        own = with_runs(before.get("bertkit", {}), own_scores(task, arguments.work), metrics)
        scored = reference_scores(task, data, arguments.work, precision)
        theirs = with_runs(before.get("trainer", {}), scored, metrics)
        runs[task] = {"bertkit": own, "trainer": theirs}
        if own["seeds"]:
            for metric in metrics:
                rows[f"{task}, {metric}"] = row(own[metric], theirs[metric])
                print(task, metric, rows[f"{task}, {metric}"])
    settings = {task: setting._asdict() for task, setting in SETTINGS.items()}
    print(write_result("quality", rows, {"settings": settings, "runs": runs}))


if __name__ == "__main__":
    main()
