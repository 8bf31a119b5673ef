"""A small slice of `python -m benchmarks.crashes`: the whole of it takes minutes.

It runs in a process of its own, which forks: what pytest has loaded would be in every fork.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import crashes
from benchmarks.crash_bench import Bench
from benchmarks.crash_runs import Ended, Moment, at_event
from benchmarks.crash_subjects import Subject

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_every_kind_of_crash_ends_with_the_same_bytes() -> None:
    """Kills, SIGTERM in a save, damage to checkpoints, shards and runs, a full disk."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.crashes", "--quick"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "BERTKIT_CHECK_SHAPES": "0"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for row in ("pretrain, killed", "finetune, killed", "prepare, killed"):
        assert f"{row}: " in done.stdout
    assert "other bytes" not in done.stdout
    assert "stuck" not in done.stdout


def test_an_action_happens_in_the_command_which_goes_on(tmp_path: Path) -> None:
    """An audit hook cannot be taken away, so it is called here by hand."""
    done: list[int] = []
    hook = at_event(str(tmp_path), Moment(event=2, action=lambda: done.append(1)))
    for name, path in (("open", "/elsewhere"), ("open", tmp_path / "a"), ("exec", tmp_path / "b")):
        hook(name, (str(path), "r", 0))
    assert done == []
    for _ in range(3):
        hook("os.rename", (str(tmp_path / "a"), str(tmp_path / "b"), -1, -1))
    assert done == [1]


class FakeBench(Bench):
    """Commands that do nothing, or, while something is removed under them, what a test says."""

    live = Ended(0, "", 0.0)

    def go(self, subject: Subject, out: Path, moment: Moment | None = None) -> Ended:
        if moment is None or moment.action is None:
            return Ended(0, "", 0.0)
        assert moment.event
        moment.action()
        return self.live


def fake(home: Path) -> tuple[FakeBench, Subject]:
    subject = Subject("pretrain", lambda out: [str(out)], lambda out: {"model": "other"})
    bench = FakeBench(home, 1, events={"pretrain": 200}, whole={"pretrain": {"model": "whole"}})
    (home / "store").mkdir()
    (home / "store" / "train-0.npy").write_text("a shard")
    return bench, subject


@pytest.mark.parametrize("damage", [crashes.damage_checkpoints, crashes.damage_runs])
def test_a_row_without_damage_is_a_failure(damage: object, tmp_path: Path) -> None:
    bench, subject = fake(tmp_path)
    assert callable(damage)
    damage(bench, subject, 2)
    (failure,) = bench.failures
    assert "0 damages instead of 2" in failure


def test_other_bytes_after_a_removal_are_a_failure(tmp_path: Path) -> None:
    bench, subject = fake(tmp_path)
    crashes.remove_in_use(bench, subject, 2)
    row = bench.counts["pretrain, file in use removed"]
    assert row == {"removals": 2, "went on": 2, "other bytes": 2}
    assert len(bench.failures) == 2
    assert "was removed under it at #" in bench.failures[0]
    assert "differ: model" in bench.failures[0]
    assert (tmp_path / "store" / "train-0.npy").read_text() == "a shard", "put back"


@pytest.mark.parametrize(
    ("status", "shown"),
    [
        (1, "Traceback"),
        (-signal.SIGSEGV, ""),
        (2, "error: something"),
        (2, "error: HOME\nerror: 2"),
    ],
)
def test_a_removal_that_is_not_said_in_one_line_is_a_failure(
    tmp_path: Path, status: int, shown: str
) -> None:
    bench, subject = fake(tmp_path)
    bench.whole["pretrain"] = {"model": "other"}
    bench.live = Ended(status, shown.replace("HOME", str(tmp_path)), 0.0)
    crashes.remove_in_use(bench, subject, 1)
    (failure,) = bench.failures
    assert f"it ended with {status}" in failure
    bench.failures.clear()
    bench.live = Ended(2, f"error: {tmp_path}/removed/journal.jsonl is missing", 0.0)
    shutil.rmtree(tmp_path / "spare")
    crashes.remove_in_use(bench, subject, 2)
    assert bench.failures == []
