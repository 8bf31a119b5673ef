"""Many runs as one command: a grid of settings times seeds, best on dev (paper section A.3).

The folder holds `finetune.json` (what all runs share), `runs/NAME/` for each run (`run.json`, its
journal, and the model of the best few), `model/` (the best run's), `results/` and `results.json`. A
run that has its `run.json` is done and not repeated, so a killed grid goes on where it was. Another
grid in the same folder makes only the new runs, and the best is the best of all.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import shutil
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self

from bertkit.config import FLATTEN
from bertkit.errors import BertkitError, DivergedError
from bertkit.files import new_folder, read_json, sha256_file
from bertkit.finetuning.heads import HeadSettings
from bertkit.finetuning.run import RunSettings, TrainingSettings
from bertkit.training.checkpoint import digest

SHOWN_SCORES = 5


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Every combination is tried, with every seed."""

    batch_size: tuple[int, ...] = (32,)
    """Inputs in an update; the paper tries 16 and 32."""
    learning_rate: tuple[float, ...] = (5e-5,)
    """The highest one; the paper tries 5e-5, 3e-5 and 2e-5, small models like 1e-4 to 3e-4."""
    epochs: tuple[int, ...] = (3,)
    """The paper tries 2, 3 and 4."""
    seeds: int = 1
    """Runs of each setting, with seeds 1, 2, ..."""

    def __post_init__(self) -> None:
        """Check every value.

        Raises:
            BertkitError: names the field.
        """
        for name in ("batch_size", "learning_rate", "epochs"):
            values = getattr(self, name)
            if not isinstance(values, Sequence):
                raise BertkitError(f"{name} takes several values: ({values!r},), not {values!r}")
            if not values or not all(0 < value < math.inf for value in values):
                raise BertkitError(f"{name} must be a finite number above 0, got {values}")
        if self.seeds < 1:
            raise BertkitError(f"seeds must be at least 1, got {self.seeds}")
        names = [run.name for run in self.runs()]
        if len(set(names)) < len(names):
            raise BertkitError("two runs of the grid are the same; give each value once")

    def runs(self) -> list[RunSettings]:
        """All runs: the first seed of every setting, then the second, and so on."""
        settings = itertools.product(
            range(1, self.seeds + 1), self.batch_size, self.learning_rate, self.epochs
        )
        return [
            RunSettings(seed=seed, batch_size=batch, learning_rate=rate, epochs=epochs)
            for seed, batch, rate, epochs in settings
        ]


ONE_RUN, USUAL, OWN_HEAD = Grid(), TrainingSettings(), HeadSettings()


@dataclass(frozen=True, kw_only=True)
class FinetuneSettings:
    """Which runs to make, and how."""

    grid: Annotated[Grid, FLATTEN] = ONE_RUN
    """Which runs to make; one by default."""
    training: Annotated[TrainingSettings, FLATTEN] = USUAL
    """What they share."""
    head: Annotated[HeadSettings, FLATTEN] = OWN_HEAD
    """What stands on the encoder."""
    keep: int = 1
    """How many of the best runs keep their model in `runs/NAME/model`, for ensembles."""
    device: str = "auto"
    """auto (CUDA, else Apple's mps, else the CPU), cpu, cuda, cuda:N or mps."""

    def __post_init__(self) -> None:
        """Check the number of models.

        Raises:
            BertkitError: none would be kept.
        """
        if self.keep < 1:
            raise BertkitError(f"--keep must be at least 1, got {self.keep}")


@dataclass(frozen=True)
class RunResult:
    """What `run.json` holds."""

    name: str
    settings: dict[str, Any]
    scores: dict[str, dict[str, float]]
    """Split of dev -> metric -> value; {} where the run diverged."""
    metric: float
    """By which runs are compared; -inf where the run diverged."""
    degenerate: str
    """Why the run learnt nothing; "" where it did."""
    seconds: float
    model: str = ""
    """`model_digest` of what the run saved; "" where it diverged."""

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        """The result that `as_json` wrote.

        Raises:
            TypeError, KeyError: these are other values, or they were changed.
        """
        plain = {name: value for name, value in values.items() if name != "sha256"}
        if values.get("sha256", run_checksum(plain)) != run_checksum(plain):
            raise TypeError("its checksum is wrong")
        metric = values["metric"]
        RunSettings(**values["settings"])
        return cls(**{**plain, "metric": float("-inf") if metric is None else metric})

    def as_json(self) -> dict[str, Any]:
        """Plain values and their checksum.

        JSON has no -inf, so null stands for a run that diverged.
        """
        values = {**dataclasses.asdict(self), "metric": self.metric if self.scores else None}
        return {**values, "sha256": run_checksum(values)}

    @property
    def setting(self) -> str:
        """The name without the seed."""
        return self.name.rpartition("-s")[0]

    @property
    def place(self) -> tuple[float, ...]:
        """Where the run stands in a grid: the first seed of every setting comes first."""
        return tuple(self.settings[f] for f in ("seed", "batch_size", "learning_rate", "epochs"))


def run_checksum(values: dict[str, Any]) -> str:
    """The checksum of a run's values, but for its time: equal runs have equal ones."""
    return digest({name: value for name, value in values.items() if name != "seconds"})


def read_results(folder: Path, runs: Sequence[RunSettings]) -> list[RunResult]:
    """The results of those runs that are done.

    Raises:
        BertkitError: a file is damaged.
    """
    paths = [folder / "runs" / run.name / "run.json" for run in runs]
    return [read_result(path) for path in paths if path.is_file()]


def all_results(folder: Path) -> list[RunResult]:
    """Of all runs that are done in a folder, whatever grid asked for them, seed by seed.

    Raises:
        BertkitError: a file is damaged.
    """
    found = [read_result(path) for path in folder.glob("runs/*/run.json")]
    return sorted(found, key=lambda result: result.place)


def read_result(path: Path) -> RunResult:
    """What a `run.json` holds.

    Raises:
        BertkitError: it is damaged.
    """
    try:
        return RunResult.from_json(read_json(path))
    except (TypeError, KeyError, AttributeError):
        raise BertkitError(f"{path} is damaged; delete it to repeat the run") from None


def best_run(results: Sequence[RunResult]) -> RunResult:
    """The run with the highest metric, the first of equals; degenerate ones come last.

    Raises:
        DivergedError: every run diverged.
    """
    usable = ranked(results)
    if not usable:
        raise DivergedError("every run diverged; lower the learning rate or raise the warm-up")
    return usable[0]


def ranked(results: Sequence[RunResult]) -> list[RunResult]:
    """The runs that did not diverge, best first, degenerate ones last."""
    scored = [result for result in results if result.scores]
    return sorted(scored, key=lambda result: (bool(result.degenerate), -result.metric))


def keep_models(folder: Path, results: Sequence[RunResult], keep: int) -> None:
    """Delete the models of all but the best `keep` runs."""
    for result in ranked(results)[keep:]:
        shutil.rmtree(folder / "runs" / result.name / "model", ignore_errors=True)


def model_digest(folder: Path) -> str:
    """The SHA-256 of the names and contents of a model directory's files, but for hidden ones.

    File managers and network file systems leave such in folders that are looked at.
    """
    files = sorted(path for path in folder.rglob("[!.]*") if path.is_file())
    return digest({path.relative_to(folder).as_posix(): sha256_file(path) for path in files})


def model_problem(folder: Path, result: RunResult) -> str:
    """Why the model of a run must be made again; "" where it is as the run left it."""
    if not folder.is_dir():
        return "did not keep its model"
    return "has a damaged model" if result.model not in ("", model_digest(folder)) else ""


def copy_model(source: Path, target: Path) -> None:
    """Copy a model directory, whole or not at all."""
    with new_folder(target) as folder:
        shutil.copytree(source, folder, dirs_exist_ok=True)


def grid_summary(results: Sequence[RunResult]) -> list[dict[str, Any]]:
    """For each setting: runs, median and spread of every score, and how many are degenerate."""
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
                    continue  # a type of entity that only some runs predict
                values = [result.scores[split][metric] for result in scored]
                row["scores"].setdefault(split, {})[metric] = metric_spread(values)
        rows.append(row)
    return rows


def metric_spread(values: Sequence[float]) -> dict[str, float | None]:
    """Median, range and standard deviation; one value alone has no deviation."""
    return {
        "median": statistics.median(values),
        "lowest": min(values),
        "highest": max(values),
        "deviation": statistics.stdev(values) if len(values) > 1 else None,
    }


def shown_scores(scores: dict[str, float]) -> str:
    """The first few scores in percent; errors as they are."""
    shown = [pair for pair in scores.items() if "/" not in pair[0]][:SHOWN_SCORES]
    return ", ".join(
        f"{name} {value:.4g}" if name.endswith(("error", "threshold")) else f"{name} {value:.1%}"
        for name, value in shown
    )


def scores_text(result: RunResult) -> str:
    """A run in a line."""
    flag = f" [degenerate: {result.degenerate}]" if result.degenerate else ""
    scores = "; ".join(f"{split} {shown_scores(found)}" for split, found in result.scores.items())
    return f"{result.name}: {scores or 'no score'} ({result.seconds:.0f} s){flag}"


def setting_text(row: dict[str, Any]) -> str:
    """A setting of the grid in a line: median and range of the first scores."""
    parts = []
    for split, metrics in row["scores"].items():
        for metric, found in list(metrics.items())[:2]:
            parts.append(
                f"{split} {metric} median {found['median']:.1%} "
                f"({found['lowest']:.1%} to {found['highest']:.1%})"
            )
    flagged = f", {row['degenerate']} degenerate" if row["degenerate"] else ""
    flagged += f", {row['diverged']} diverged" if row["diverged"] else ""
    return f"{row['setting']}, n={row['runs']}{flagged}: {', '.join(parts)}"
