"""A small slice of `python -m tests.tools.crashes`: the whole of it takes minutes.

It runs in a process of its own, which forks: what pytest has loaded would be in every fork.
"""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from tests.conftest import python
from tests.tools.crashes.__main__ import stop
from tests.tools.crashes.bench import Bench
from tests.tools.crashes.damage import damage_checkpoints, damage_runs, remove_in_use
from tests.tools.crashes.runs import Ended, Moment
from tests.tools.crashes.subjects import Subject

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


def test_files_beside_the_wanted_ones_are_a_failure(tmp_path: Path) -> None:
    bench, subject = fake(tmp_path)
    subject.left = "whole"
    bench.whole["pretrain"] = {}
    bench.compare("row", subject, tmp_path, "a kill")
    (failure,) = bench.failures
    assert "these were left: model" in failure
