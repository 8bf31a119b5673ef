"""A grid of fine-tuning runs, of which the best on dev is chosen (paper sections 4.1 and A.3).

The folder holds `finetune.json` (what all runs share), `runs/NAME/` for each run (`run.json`, its
journal, its checkpoint until it is done, and the model if it is among the best), `model/` (that of
the best run), `results/` and `results.json`. A run with a `run.json` is done and not repeated, and
a run with a checkpoint resumes from it, so a killed grid resumes where it stopped. Another grid in
the same folder adds only the new runs, and the best is the best of all.
"""

from __future__ import annotations

import dataclasses
import shutil
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from bertkit.checkpoints.card import CARD, Card, write_card
from bertkit.errors import BertkitError, DivergedError
from bertkit.files import new_folder, read_json, sha256_file
from bertkit.finetuning.settings import RunSettings
from bertkit.tasks.metrics import is_fraction
from bertkit.training.checkpoint import digest

SHOWN_SCORES = 5


@dataclass(frozen=True)
class RunResult:
    """The result of one run, the content of `run.json`."""

    name: str
    settings: dict[str, Any]
    scores: dict[str, dict[str, float]]
    """Dev split -> metric -> value; {} if the run diverged."""
    metric: float
    """The score by which runs are compared; -inf if the run diverged."""
    degenerate: str
    """Why the run learned nothing; "" if it learned something."""
    seconds: float
    model: str = ""
    """The `model_digest` of the saved model; "" if the run diverged."""

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        """Return the result that `as_json` wrote.

        Raises:
            TypeError, KeyError: the values are not those of a result, or were changed.
        """
        plain = {name: value for name, value in values.items() if name != "sha256"}
        if values.get("sha256", run_checksum(plain)) != run_checksum(plain):
            raise TypeError("its checksum is wrong")
        metric = values["metric"]
        RunSettings(**values["settings"])
        return cls(**{**plain, "metric": float("-inf") if metric is None else metric})

    def as_json(self) -> dict[str, Any]:
        """Return JSON values with a checksum.

        The metric of a diverged run becomes null, since JSON has no -inf.
        """
        values = {**dataclasses.asdict(self), "metric": self.metric if self.scores else None}
        return {**values, "sha256": run_checksum(values)}

    @property
    def setting(self) -> str:
        """The name without the seed."""
        return self.name.rpartition("-s")[0]

    @property
    def place(self) -> tuple[float, ...]:
        """The sort key of the run in a grid: by seed, then by setting."""
        return tuple(self.settings[f] for f in ("seed", "batch_size", "learning_rate", "epochs"))


def run_checksum(values: dict[str, Any]) -> str:
    """Return the checksum of a run's values except its duration; equal runs have equal ones."""
    return digest({name: value for name, value in values.items() if name != "seconds"})


def read_results(folder: Path, runs: Sequence[RunSettings]) -> list[RunResult]:
    """Read the results of those of the runs that are done.

    Raises:
        BertkitError: a file is damaged.
    """
    paths = [folder / "runs" / run.name / "run.json" for run in runs]
    return [read_result(path) for path in paths if path.is_file()]


def all_results(folder: Path) -> list[RunResult]:
    """Read the results of all finished runs in a folder, of any grid, ordered by seed.

    Raises:
        BertkitError: a file is damaged.
    """
    found = [read_result(path) for path in folder.glob("runs/*/run.json")]
    return sorted(found, key=lambda result: result.place)


def read_result(path: Path) -> RunResult:
    """Read a `run.json`.

    Raises:
        BertkitError: the file is damaged.
    """
    try:
        result = RunResult.from_json(read_json(path))
    except (TypeError, KeyError, AttributeError):
        raise BertkitError(f"{path} is damaged; delete it to repeat the run") from None
    if result.name != path.parent.name:  # models are kept or deleted by this name
        raise BertkitError(
            f"{path} is of the run {result.name}; give the folder that name, or delete it",
            code="renamed-run",
        )
    return result


def best_run(results: Sequence[RunResult]) -> RunResult:
    """Return the run with the highest metric, the first of equals; degenerate ones come last.

    Raises:
        DivergedError: every run diverged.
    """
    usable = ranked(results)
    if not usable:
        raise DivergedError("every run diverged; lower the learning rate or raise the warm-up")
    return usable[0]


def ranked(results: Sequence[RunResult]) -> list[RunResult]:
    """Return the runs that did not diverge, best first, degenerate ones last."""
    scored = [result for result in results if result.scores]
    return sorted(scored, key=lambda result: (bool(result.degenerate), -result.metric))


def keep_models(folder: Path, results: Sequence[RunResult], keep: int) -> None:
    """Delete the models of all but the best `keep` runs, and the checkpoints of finished runs."""
    kept = {result.name for result in ranked(results)[:keep]}
    for result in results:
        shutil.rmtree(folder / "runs" / result.name / "checkpoints", ignore_errors=True)
        if result.name not in kept:
            shutil.rmtree(folder / "runs" / result.name / "model", ignore_errors=True)


def model_digest(folder: Path) -> str:
    """Return the SHA-256 of the names and contents of a model directory's files.

    Hidden files and folders are ignored, since file managers, notebooks and network file systems
    create them; so is the card, which users may edit.
    """
    files = {path.relative_to(folder): path for path in folder.rglob("*") if path.is_file()}
    shown = [name for name in files if not any(part.startswith(".") for part in name.parts)]
    return digest({str(n): sha256_file(files[n]) for n in shown if str(n) != CARD})


def model_problem(folder: Path, result: RunResult) -> str:
    """Return why the model of a run must be trained again, or "" if it is intact."""
    if not folder.is_dir():
        return "did not keep its model"
    return "has a damaged model" if result.model not in ("", model_digest(folder)) else ""


def copy_model(source: Path, target: Path, card: Card) -> None:
    """Copy a model directory atomically, with another card; one that was edited is kept."""
    with new_folder(target) as folder:
        shutil.copytree(source, folder, dirs_exist_ok=True)
        write_card(folder, card, replaced=target)


def grid_summary(results: Sequence[RunResult]) -> list[dict[str, Any]]:
    """Summarize each setting: its runs, how many failed, and the median and spread of scores."""
    rows = []
    for setting in dict.fromkeys(result.setting for result in results):
        own = [result for result in results if result.setting == setting]
        scored = [result for result in own if result.scores]
        row: dict[str, Any] = {
            "setting": setting,
            "runs": len(own),
            "diverged": len(own) - len(scored),
            "degenerate": sum(bool(result.degenerate) for result in scored),
            "scores": {},
        }
        for split in scored[0].scores if scored else {}:
            for metric in scored[0].scores[split]:
                if any(metric not in result.scores[split] for result in scored):
                    continue  # an entity type that only some runs predict
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


def score_text(metric: str, value: float) -> str:
    """Format a score: fractions in percent, other values as numbers."""
    return f"{value:.1%}" if is_fraction(metric) else f"{value:.4g}"


def shown_scores(scores: dict[str, float], main: str = "") -> str:
    """Format the main metric, if there is one, and the first few other scores."""
    overall = (name for name in scores if "/" not in name or name == main)
    names = sorted(overall, key=lambda name: name != main)
    return ", ".join(f"{name} {score_text(name, scores[name])}" for name in names[:SHOWN_SCORES])


def scores_text(result: RunResult, main: str = "") -> str:
    """Describe a run in one line, beginning with its main metric."""
    flag = f" [degenerate: {result.degenerate}]" if result.degenerate else ""
    scores = "; ".join(
        f"{split} {shown_scores(found, main)}" for split, found in result.scores.items()
    )
    return f"{result.name}: {scores or 'no score'} ({result.seconds:.0f} s){flag}"


def setting_text(row: dict[str, Any], main: str = "") -> str:
    """Describe a setting in one line, with median and range of its main and another score."""
    parts = []
    for split, metrics in row["scores"].items():
        for metric in sorted(metrics, key=lambda name: name != main)[:2]:
            kinds = ("median", "lowest", "highest")
            median, low, high = (score_text(metric, metrics[metric][kind]) for kind in kinds)
            parts.append(f"{split} {metric} median {median} ({low} to {high})")
    flagged = f", {row['degenerate']} degenerate" if row["degenerate"] else ""
    flagged += f", {row['diverged']} diverged" if row["diverged"] else ""
    return f"{row['setting']}, n={row['runs']}{flagged}: {', '.join(parts)}"
