"""Experiment trackers, which receive the journal's records: TensorBoard, Weights & Biases, MLflow.

A tracker is a callable that takes a record and has a `close` method. The record "start" opens a
run, the numbers of "step" and "evaluation" are logged at their update, and "end" ends it with its
reason. A run that is closed without "end" was ended by an error. Weights & Biases and MLflow read
their own environment variables (`WANDB_PROJECT`, `WANDB_MODE`, `MLFLOW_TRACKING_URI`, ...).
"""

from __future__ import annotations

import hashlib
import importlib.util
import re
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from bertkit.config import dotted_values
from bertkit.errors import BertkitError, check_known


class Tracker(Protocol):
    """A consumer of the journal's records."""

    name: str

    def __call__(self, record: Mapping[str, Any]) -> None:
        """Take one record, with its "time"."""

    def close(self) -> None:
        """End the run if it was not ended by a record."""


NOT_FINISHED = {"interrupted": "KILLED", "diverged": "FAILED"}
"""Reason of an "end" -> MLflow's status, which is else FINISHED."""
NOT_LOGGED = {"kind", "step", "time", "phase", "epoch"}


def logged_numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a record by group and name; {} if it is not for plotting."""
    group = {"step": "training", "evaluation": "held-out"}.get(record["kind"])
    return {
        f"{group}/{name}": value
        for name, value in record.items()
        if group and name not in NOT_LOGGED and isinstance(value, int | float)
    }


def flat_settings(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings in a "start" record by dotted name."""
    return {name: value for name, value in dotted_values(record) if name not in NOT_LOGGED}


class TensorBoard:
    """Events in `folder`/tensorboard."""

    name = "TensorBoard"

    def __init__(self, folder: Path, resume_step: int | None, since: float | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purge = None if resume_step is None else resume_step + 1
        self.events = SummaryWriter(folder / "tensorboard", purge_step=purge)

    def __call__(self, record: Mapping[str, Any]) -> None:
        """See `Tracker`."""
        for name, value in logged_numbers(record).items():
            self.events.add_scalar(name, value, record["step"], record["time"])

    def close(self) -> None:
        """See `Tracker`."""
        self.events.close()


class WeightsAndBiases:
    """A run of Weights & Biases; a resumed run continues it."""

    name = "Weights & Biases"

    def __init__(self, folder: Path, resume_step: int | None, since: float | None) -> None:
        self.library, self.folder, self.since = import_module("wandb"), folder, since
        self.run: Any = None

    def __call__(self, record: Mapping[str, Any]) -> None:
        """See `Tracker`."""
        if record["kind"] == "start":
            self.run = self.library.init(
                id=run_key(self.folder, self.since or record["time"]),
                resume="allow",
                name=run_title(self.folder),
                dir=self.folder,
                config=flat_settings(record),
                reinit="create_new",
            )
        elif numbers := logged_numbers(record):
            self.run.log(numbers, step=record["step"])
        elif record["kind"] == "end":
            self.run.summary["reason"] = record["reason"]
            self.run.finish(exit_code=int(record["reason"] in NOT_FINISHED))
            self.run = None

    def close(self) -> None:
        """See `Tracker`."""
        if self.run is not None:
            self.run.finish(exit_code=1)


class MLflow:
    """A run of MLflow, inside the active run if there is one; a resumed run continues it."""

    name = "MLflow"

    def __init__(self, folder: Path, resume_step: int | None, since: float | None) -> None:
        self.library, self.folder, self.since = import_module("mlflow"), folder, since
        self.run = ""

    def __call__(self, record: Mapping[str, Any]) -> None:
        """See `Tracker`."""
        if record["kind"] == "start":
            key = run_key(self.folder, self.since or record["time"])
            self._start(key, flat_settings(record))
        elif numbers := logged_numbers(record):
            named = {re.sub(r"[^\w\-./ ]", "_", name): value for name, value in numbers.items()}
            self.library.log_metrics(named, step=record["step"], run_id=self.run)
        elif record["kind"] == "end":
            self._end(NOT_FINISHED.get(record["reason"], "FINISHED"))

    def _start(self, key: str, settings: Mapping[str, Any]) -> None:
        wanted = f"tags.bertkit = '{key}'"
        before = self.library.search_runs(filter_string=wanted, output_format="list")
        found = before[0].info.run_id if before else None
        started = self.library.start_run(
            run_id=found,
            run_name=None if found else run_title(self.folder),
            nested=True,
            tags={"bertkit": key},
        )
        self.run = started.info.run_id
        if not found:
            self.library.log_params({name: str(value) for name, value in settings.items()})

    def _end(self, status: str) -> None:
        if self.run:
            self.library.end_run(status)
            self.run = ""

    def close(self) -> None:
        """See `Tracker`."""
        self._end("KILLED")


TRACKERS: dict[str, Callable[[Path, int | None, float | None], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
}
"""The name of each tracker, which is that of its package."""


def check_trackers(names: Iterable[str]) -> None:
    """Check that the trackers exist and that their packages are installed.

    A missing TensorBoard is only noted in the journal, because it is the default.

    Raises:
        BertkitError: a tracker does not exist, or its package is not installed.
    """
    for name in names:
        check_known("tracker", name, TRACKERS)
        if name != "tensorboard" and not is_installed(name):
            raise BertkitError(
                f"the package {name} is not installed; run pip install 'bertkit[{name}]'",
                code="missing-extra",
            )


def is_installed(name: str) -> bool:
    """Return whether the package of a tracker is installed."""
    return importlib.util.find_spec(name) is not None


def run_key(folder: Path, since: float) -> str:
    """Return the key of a run for a tracker, which stays the same when the run is resumed.

    `since` is the time of the first record "start" in its journal.
    """
    return hashlib.sha256(f"{run_title(folder)} {since}".encode()).hexdigest()[:16]


def run_title(folder: Path) -> str:
    """Return the name of a run's folder, after that of the grid in fine-tuning: `mrpc/b32-...`."""
    grid = folder.parent
    return f"{grid.parent.name}/{folder.name}" if grid.name == "runs" else folder.name
