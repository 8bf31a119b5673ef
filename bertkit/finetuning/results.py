"""The results of fine-tuning: of one run, and of a grid of settings and seeds (section A.3)."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bertkit.errors import BertkitError, DivergedError
from bertkit.files import read_object

SHOWN_SCORES = 5
FRACTION = re.compile(r"(^|_)(accuracy|precision|recall|f1|exact|match|matthews|pearson|spearman)$")
Scores = dict[str, dict[str, float]]  # split -> metric -> value


@dataclass(frozen=True)
class RunResult:
    """The result of one run."""

    name: str
    settings: dict[str, Any]  # the fields of `RunSettings`
    scores: Scores  # the scores on the dev splits; {} if the run diverged
    metric: float | None  # the score by which runs are compared; None if the run diverged
    degenerate: str  # why the run learned nothing; "" if it learned something
    seconds: float

    def as_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return asdict(self)

    @property
    def setting(self) -> str:
        """The name of the run without its seed."""
        return self.name.rpartition("-s")[0]


@dataclass(frozen=True)
class FinetuneResult:
    """What `results.json` holds."""

    folder: Path
    best: RunResult
    runs: tuple[RunResult, ...]
    values: dict[str, Any]  # the content of the file

    @property
    def scores(self) -> Scores:
        """The scores of the best run on dev, and on test data with labels."""
        return dict(self.values["scores"])

    @property
    def model(self) -> Path:
        """The directory of the best model."""
        return self.folder / "model"


def read_run(path: Path) -> RunResult:
    """Read the `run.json` of a run of a grid."""
    try:
        return RunResult(**read_object(path))
    except TypeError:
        raise BertkitError(f"{path} is damaged; delete it to repeat the run") from None


def read_results(folder: Path) -> FinetuneResult:
    """Read the `results.json` of a finished folder."""
    path = folder / "results.json"
    values = read_object(path)
    try:
        runs = tuple(RunResult(**run) for run in values["runs"])
        best = next(run for run in runs if run.name == values["best"])
    except (TypeError, KeyError, StopIteration):
        raise BertkitError(f"{path} is damaged; delete it and fine-tune again") from None
    return FinetuneResult(folder, best, runs, values)


def best_run(results: Sequence[RunResult]) -> RunResult:
    """Return the run with the highest metric, the first of equals; degenerate ones come last."""
    usable = [result for result in results if result.metric is not None]
    if not usable:
        raise DivergedError("every run diverged; lower the learning rate or raise the warm-up")
    return min(usable, key=lambda result: (bool(result.degenerate), -(result.metric or 0.0)))


def grid_summary(results: Sequence[RunResult]) -> list[dict[str, Any]]:
    """Summarize each setting: its runs, how many failed, and the median and spread of scores."""
    rows = []
    for setting in dict.fromkeys(result.setting for result in results):
        runs = [result for result in results if result.setting == setting]
        scored = [result for result in runs if result.scores]
        row: dict[str, Any] = {
            "setting": setting,
            "runs": len(runs),
            "diverged": len(runs) - len(scored),
            "degenerate": sum(bool(result.degenerate) for result in scored),
            "scores": {},
        }
        for split in scored[0].scores if scored else {}:
            for metric in scored[0].scores[split]:
                if all(metric in result.scores[split] for result in scored):  # entity types vary
                    values = [result.scores[split][metric] for result in scored]
                    row["scores"].setdefault(split, {})[metric] = metric_spread(values)
        rows.append(row)
    return rows


def metric_spread(values: Sequence[float]) -> dict[str, float | None]:
    """Return median, range and standard deviation; a single value has no deviation."""
    return {
        "median": statistics.median(values),
        "lowest": min(values),
        "highest": max(values),
        "deviation": statistics.stdev(values) if len(values) > 1 else None,
    }


# Texts --------------------------------------------------------------------------------------------


def is_fraction(metric: str) -> bool:
    """Return whether a metric, such as "macro_f1" or "f1/PER", is a fraction, shown in percent."""
    return FRACTION.search(metric.partition("/")[0]) is not None


def score_text(metric: str, value: float) -> str:
    """Format a score: fractions in percent, other values as numbers."""
    return f"{value:.1%}" if is_fraction(metric) else f"{value:.4g}"


def scores_text(scores: dict[str, float], main: str = "") -> str:
    """Format the main metric, if there is one, and the first few other scores."""
    overall = (name for name in scores if "/" not in name or name == main)
    names = sorted(overall, key=lambda name: name != main)
    return ", ".join(f"{name} {score_text(name, scores[name])}" for name in names[:SHOWN_SCORES])


def run_text(result: RunResult, main: str = "") -> str:
    """Describe a run in one line, beginning with its main metric."""
    flag = f" [degenerate: {result.degenerate}]" if result.degenerate else ""
    scores = "; ".join(f"{split} {scores_text(v, main)}" for split, v in result.scores.items())
    return f"{result.name}: {scores or 'no score'} ({result.seconds:.0f} s){flag}"


def setting_text(row: dict[str, Any], main: str) -> str:
    """Describe a setting in one line, with median and range of its main metric."""
    parts = []
    for split, metrics in row["scores"].items():
        spread = metrics.get(main) or next(iter(metrics.values()))
        median, low, high = (score_text(main, spread[k]) for k in ("median", "lowest", "highest"))
        parts.append(f"{split} {main} median {median} ({low} to {high})")
    failed = f", {row['degenerate']} degenerate" if row["degenerate"] else ""
    failed += f", {row['diverged']} diverged" if row["diverged"] else ""
    return f"{row['setting']}, n={row['runs']}{failed}: {', '.join(parts)}"
