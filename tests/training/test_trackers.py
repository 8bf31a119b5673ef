"""Trackers get the journal's records: Weights & Biases and MLflow without a network."""

from __future__ import annotations

import errno
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from bertkit.errors import BertkitError
from bertkit.training.journal import Journal, read_journal
from bertkit.training.trackers import TRACKERS, check_trackers

START = {"kind": "start", "step": 0, "seed": 3, "tuning": {"warmup": 0.1}}
STEPS = [{"kind": "step", "step": step, "loss": 1.0 / step, "epoch": 1} for step in (1, 2)]
SCORES = {"kind": "evaluation", "step": 2, "accuracy": 0.75, "split": "dev"}
END = {"kind": "end", "step": 2, "reason": "finished"}


def write_run(folder: Path, tracker: str) -> list[dict[str, Any]]:
    """A run that is stopped after its first update, and resumed."""
    seen: list[dict[str, Any]] = []
    journal = Journal(folder, track=(tracker,), on_record=seen.append)
    for record in (START, STEPS[0]):
        journal.write(record)
    journal.close()
    journal = Journal(folder, resume_step=1, track=(tracker,), on_record=seen.append)
    for record in ({**START, "step": 1}, STEPS[1], SCORES, END):
        journal.write(record)
    journal.close()
    return seen


def test_mlflow_has_one_run_of_both_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/mlflow")
    mlflow.set_tracking_uri(f"file://{tmp_path}/mlflow")
    assert [record["kind"] for record in write_run(tmp_path / "run", "mlflow")][-1] == "end"
    [found] = mlflow.search_runs(output_format="list")
    assert found.info.status == "FINISHED"
    assert found.data.metrics == {"training/loss": 0.5, "held-out/accuracy": 0.75}
    assert found.data.params == {"seed": "3", "tuning.warmup": "0.1"}
    history = mlflow.MlflowClient().get_metric_history(found.info.run_id, "training/loss")
    assert [(one.step, one.value) for one in history] == [(1, 1.0), (2, 0.5)]


@pytest.mark.parametrize(
    ("reason", "status", "code"),
    [("finished", "FINISHED", 0), ("interrupted", "KILLED", 1), ("diverged", "FAILED", 1)],
)
def test_the_reason_for_the_end_is_passed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: str, status: str, code: int
) -> None:
    """To stand-ins for both libraries, as either may be absent."""
    for name in ("wandb", "mlflow"):
        library = MagicMock()
        library.search_runs.return_value = []
        monkeypatch.setitem(sys.modules, name, library)
        tracker = TRACKERS[name](tmp_path, None, None)
        tracker({**START, "time": 1.0})
        tracker({**END, "reason": reason, "time": 2.0})
        tracker.close()
        if name == "wandb":
            library.init.return_value.finish.assert_called_once_with(exit_code=code)
        else:
            library.end_run.assert_called_once_with(status)


def test_weights_and_biases_writes_runs_without_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    folder = tmp_path / "run"
    write_run(folder, "wandb")
    written = sorted((folder / "wandb").glob("offline-run-*/*.wandb"))
    assert written
    assert len({path.stem.removeprefix("run-") for path in written}) == 1, "the same run goes on"
    assert not [one for one in read_journal(folder / "journal.jsonl") if one["kind"] == "note"]


def test_a_tracker_that_fails_is_noted_and_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken:
        name = "Broken"

        def __init__(self, *_: object) -> None:
            self.closed = False

        def __call__(self, record: Any) -> None:
            if record["kind"] == "step":
                raise ConnectionError("no network")

        def close(self) -> None:
            raise ConnectionError("no network")

    monkeypatch.setitem(TRACKERS, "tensorboard", Broken)
    monkeypatch.setattr("bertkit.training.trackers.is_installed", lambda name: True)
    journal = Journal(tmp_path, track=("tensorboard",))
    for record in (START, *STEPS, END):
        journal.write(record)
    journal.close()
    kinds = [record["kind"] for record in read_journal(tmp_path / "journal.jsonl")]
    assert kinds == ["start", "step", "note", "step", "end"]


def test_a_full_disk_is_said_when_a_tracker_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setitem(TRACKERS, "tensorboard", full)
    monkeypatch.setattr("bertkit.training.trackers.is_installed", lambda name: True)
    with pytest.raises(BertkitError, match="the disk is full"):
        Journal(tmp_path, track=("tensorboard",))


def test_unknown_and_missing_trackers_are_refused_before_training() -> None:
    with pytest.raises(BertkitError, match="no tracker is called 'wandbb'; did you mean 'wandb'"):
        check_trackers(("wandbb",))
