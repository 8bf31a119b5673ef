"""The results of a fine-tuning folder, finished or in progress: runs, settings and the best run.

The runs are read from `runs/NAME/run.json`; `results.json`, which is written last, adds the scores
on test data and the runs whose folders are gone.
"""

from __future__ import annotations

import dataclasses
import statistics
from pathlib import Path
from typing import Any

from bertkit.errors import BertkitError
from bertkit.files import read_object
from bertkit.finetuning.grid import RunResult, all_results, best_run, grid_summary
from bertkit.finetuning.settings import Grid
from bertkit.training.journal import JOURNAL, read_journal

ResultRow = dict[str, Any]
"""The summary of the runs of one setting; see `grid_summary`."""


class FinetuningResults:
    """The results of a fine-tuning folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.shared = read_object(folder / "finetune.json", file_names=True)
        results = folder / "results.json"
        self.written = read_object(results) if results.is_file() else {}
        self.runs = read_runs(folder, self.written)
        if not self.runs:
            raise BertkitError(f"{folder} has no finished run yet; wait for the first, then report")
        self.scored = [run for run in self.runs if run.scores]
        self.splits = list(self.scored[0].scores) if self.scored else []
        self.metric = str(self.recorded("metric") or "score")
        """The name of the score by which runs are compared, on the first split."""
        self.planned, self.in_progress = read_plan(folder, self.runs)
        self.listed = {run["name"] for run in self.written.get("runs", [])}
        """The names of the runs in `results.json`."""
        self.finished = self.listed == {run.name for run in self.runs} and not self.in_progress
        chosen = [run for run in self.scored if run.name == self.written.get("best")]
        self.best: RunResult | None = None
        """The best run in `results.json`, or of the runs so far; None if all diverged."""
        if self.scored:
            self.best = chosen[0] if chosen and self.finished else best_run(self.runs)
        self.of_setting = {run.setting: run.settings for run in reversed(self.runs)}
        self.settings = sorted(
            grid_summary(comparable(self.runs)), key=lambda row: -self.median(row)
        )

    def main_scores(self, row: ResultRow) -> dict[str, Any]:
        """Return the `metric_spread` of the main metric; {} if all runs diverged."""
        splits = self.splits[:1]
        return row["scores"][splits[0]].get(self.metric, {}) if row["scores"] and splits else {}

    def median(self, row: ResultRow) -> float:
        """Return the median of the main metric; -inf if all runs diverged."""
        return float(self.main_scores(row).get("median", "-inf"))

    def spread(self, setting: str) -> float | None:
        """Return the standard deviation of the main metric over the seeds of a setting.

        Degenerate runs are left out, since one would hide all else; None with fewer than two runs.
        """
        own = [run for run in self.scored if run.setting == setting and not run.degenerate]
        return statistics.stdev(run.metric for run in own) if len(own) > 1 else None

    def recorded(self, name: str) -> Any:
        """Return a field of `results.json`, else of `finetune.json`, else {}."""
        return self.written.get(name) or self.shared.get(name) or {}

    def baseline(self, split: str, metric: str) -> float | None:
        """Return the score of the input-independent baseline, or None if it was not recorded."""
        value = (self.recorded("baseline").get(split) or {}).get(metric)
        return None if value is None else float(value)

    def named(self, setting: str) -> str:
        """Describe a setting in words."""
        found = self.of_setting[setting]
        epochs = found["epochs"]
        rate = f"rate {found['learning_rate']:g}"
        return f"batch {found['batch_size']}, {rate}, {epochs} epoch{'s' * (epochs != 1)}"


def read_runs(folder: Path, written: dict[str, Any]) -> list[RunResult]:
    """Read the finished runs, ordered by seed.

    Raises:
        BertkitError: a file is damaged.
    """
    try:
        runs = [RunResult.from_json(values) for values in written.get("runs", [])]
    except (TypeError, KeyError, AttributeError):
        path = folder / "results.json"
        raise BertkitError(f"{path} is damaged; delete it and finetune again") from None
    found = {run.name: run for run in (*runs, *all_results(folder))}
    return sorted(found.values(), key=lambda run: run.place)


def read_plan(folder: Path, runs: list[RunResult]) -> tuple[int, list[tuple[str, int]]]:
    """Return the number of known planned runs, and (name, update) of those in progress.

    `grid.json`, if it exists, holds the fields of `Grid`, and in a reproduction the `first` seed.
    """
    done = {run.name for run in runs}
    in_progress = []
    for path in sorted(folder.glob(f"runs/*/{JOURNAL}")):
        if path.parent.name not in done:
            steps = [record.get("step", 0) for record in read_journal(path)]
            in_progress.append((path.parent.name, max(steps, default=0)))
    planned = done | {name for name, _ in in_progress}
    path = folder / "grid.json"
    grid = read_object(path) if path.is_file() else {}
    first = grid.pop("first", 1)
    try:
        planned |= {run.name for run in Grid(**grid).runs() if run.seed >= first} if grid else set()
    except (TypeError, ValueError):
        raise BertkitError(f"{path} is damaged; delete it") from None
    return len(planned), in_progress


def comparable(runs: list[RunResult]) -> list[RunResult]:
    """Keep only the scores that all runs have, since entity types may differ between runs."""
    scored = [run.scores for run in runs if run.scores]
    names = {
        split: [name for name in found if all(name in one.get(split, {}) for one in scored)]
        for split, found in (scored[0] if scored else {}).items()
    }

    def common(run: RunResult) -> dict[str, dict[str, float]]:
        return {s: {name: run.scores[s][name] for name in own} for s, own in names.items()}

    return [dataclasses.replace(run, scores=common(run) if run.scores else {}) for run in runs]
