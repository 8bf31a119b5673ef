"""A small slice of `python -m tests.tools.crashes`: the whole of it takes minutes.

It runs in a process of its own, which forks: what pytest has loaded would be in every fork.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
from pathlib import Path

import pytest

from tests.conftest import python
from tests.tools.crashes.__main__ import stop
from tests.tools.crashes.bench import Bench
from tests.tools.crashes.damage import damage_checkpoints, damage_runs, remove_in_use
from tests.tools.crashes.runs import Ended, Hook, Moment
from tests.tools.crashes.subjects import LAST, Subject

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = (
    *("pretrain", "finetune", "prepare", "learn", "clean"),
    *("predict", "embed", "features"),
)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_every_kind_of_crash_ends_with_the_same_bytes() -> None:
    """Kills, signals and full disks for every command; damage to checkpoints, shards and runs."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "BERTKIT_CHECK_SHAPES": "0"}
    done = python("-m", "tests.tools.crashes", "--quick", cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    for command in COMMANDS:
        row = f"{command}, killed and stopped"
        assert re.search(rf"^{row}: .*[1-9] equal bytes$", done.stdout, re.MULTILINE), command


def test_an_action_happens_in_the_command_which_continues(tmp_path: Path) -> None:
    """An audit hook cannot be taken away, so it is called here by hand."""
    done: list[int] = []
    hook = Hook(str(tmp_path), Moment(event=2, action=lambda: done.append(1)))
    for name, path in (("open", "/elsewhere"), ("open", tmp_path / "a"), ("exec", tmp_path / "b")):
        hook(name, (str(path), "r", 0))
    assert done == []
    for _ in range(3):
        hook("os.rename", (str(tmp_path / "a"), str(tmp_path / "b"), -1, -1))
    assert done == [1]
    assert hook.seen == 4


class FakeBench(Bench):
    """Commands that do nothing, or, while something is removed under them, what a test says."""

    live = Ended(0, "", 0.0)

    def go(self, subject: Subject, out: Path, moment: Moment | None = None) -> Ended:
        if moment is not None and moment.action:
            assert moment.event
            moment.action()
            return self.live
        return self.live if moment and moment.signal != signal.SIGKILL else Ended(0, "", 0.0)


class FakeSubject(Subject):
    left = "other"

    def outcome(self, place: Path) -> dict[str, str]:
        return {"model": self.left}


def fake(home: Path) -> tuple[FakeBench, FakeSubject]:
    bench = FakeBench(home, 1, events={"pretrain": 200}, whole={"pretrain": {"model": "whole"}})
    (home / "store").mkdir()
    (home / "store" / "train-0.npy").write_text("a shard")
    (home / "whole" / "pretrain").mkdir(parents=True)
    return bench, FakeSubject("pretrain", ("pretrain",))


@pytest.mark.parametrize("damage", [damage_checkpoints, damage_runs])
def test_a_row_without_damage_is_a_failure(damage: object, tmp_path: Path) -> None:
    bench, subject = fake(tmp_path)
    assert callable(damage)
    damage(bench, subject, 2)
    (failure,) = bench.failures
    assert "0 damages instead of 2" in failure


def test_other_bytes_after_a_removal_are_a_failure(tmp_path: Path) -> None:
    bench, subject = fake(tmp_path)
    remove_in_use(bench, subject, 2)
    row = bench.counts["pretrain, file in use removed"]
    assert row == {"removals": 2, "went on": 2, "other bytes": 2}
    assert len(bench.failures) == 2
    assert "after the removal of" in bench.failures[0]
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
    remove_in_use(bench, subject, 1)
    (failure,) = bench.failures
    assert f"it ended with {status}" in failure
    bench.failures.clear()
    bench.live = Ended(2, f"error: {tmp_path}/removed/journal.jsonl is missing", 0.0)
    shutil.rmtree(tmp_path / "spare")
    remove_in_use(bench, subject, 2)
    assert bench.failures == []


@pytest.mark.parametrize(
    ("status", "shown", "failed"),
    [
        (128 + signal.SIGTERM, "stopped; run the same command again", ""),
        (-signal.SIGTERM, "", ""),
        (0, "", ""),
        (1, "", "it ended with 1"),
        (128 + signal.SIGTERM, "Traceback (most recent call last):\n  x", "it printed 'Traceback"),
    ],
)
def test_a_stop_is_quiet_and_says_its_signal(
    tmp_path: Path, status: int, shown: str, failed: str
) -> None:
    bench, subject = fake(tmp_path)
    subject.left, bench.live = "whole", Ended(status, shown, 0.0)
    bench.events["pretrain"], bench.seconds["pretrain"] = 200, 1.0
    stop(bench, subject, 1)
    assert bench.counts["pretrain, stopped"]["SIGTERM"] == 1
    assert [failed in failure for failure in bench.failures] == [True] * bool(failed)


def test_a_checkpoint_of_a_stop_counts_as_the_one_before_the_last(tmp_path: Path) -> None:
    subject = Subject("pretrain", ("pretrain",), kept=lambda name: name.startswith(LAST))
    outcomes = []
    for steps in ((32, 36), (35, 36), (28, 35, 36)):
        for step in steps:
            folder = tmp_path / str(steps) / "out" / "checkpoints" / f"step-{step:08d}"
            folder.mkdir(parents=True)
            (folder / "progress.json").write_text("{}")
        outcomes.append(subject.outcome(tmp_path / str(steps)))
    assert outcomes[0] == outcomes[1]
    assert len(outcomes[2]) == 3, "one too many is a leftover"


def test_files_beside_the_wanted_ones_are_a_failure(tmp_path: Path) -> None:
    bench, subject = fake(tmp_path)
    subject.left = "whole"
    bench.whole["pretrain"] = {}
    bench.compare("row", subject, tmp_path, "a kill")
    (failure,) = bench.failures
    assert "these were left: model" in failure
