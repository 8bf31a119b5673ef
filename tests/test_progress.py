"""Progress on a terminal and in plain lines."""

from __future__ import annotations

import errno
import io
import json
import math
import re
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bertkit import progress
from bertkit.errors import BertkitError
from bertkit.progress import Console, Journal, read_journal


def step(number: int, **fields: Any) -> dict[str, Any]:
    return {"kind": "step", "step": number, "loss": 1 / number, **fields}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    """Time that passes only when told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(progress, "monotonic", lambda: self.now)


def test_the_first_line_comes_after_five_seconds_and_later_ones_every_ten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, stream = Clock(monkeypatch), io.StringIO()
    with Console(stream=stream) as console:
        console.start(1000, 0)
        for number in range(1, 31):
            clock.now += 1.0
            console.update(step(10 * number, mlm_accuracy=0.5))
            if number == 12:
                console.update({"kind": "evaluation", "step": 120, "mlm_loss": 4.25})
    lines = stream.getvalue().splitlines()
    first = "50 of 1,000 steps (5%), 10.0 steps/s, 0:01:35 left, loss 0.020, accuracy 50.0%"
    assert lines[0] == first
    assert [line.split(" ")[0] for line in lines] == ["50", "step", "150", "250", "300"]
    assert lines[1] == "step 120, held out: MLM 4.250"


def test_lines_of_a_long_task_come_ever_more_sparsely(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, stream = Clock(monkeypatch), io.StringIO()
    with Console(stream=stream) as console:
        console.start(86_400)
        for number in range(0, 86_400, 5):
            clock.now = 100.0 + number
            console.update(step(1 + number))
    shown = [int(line.split(" ")[0].replace(",", "")) for line in stream.getvalue().splitlines()]
    assert len([second for second in shown if second < 3600]) <= 30
    assert max(np.diff(shown)) <= 610


def test_a_part_of_the_work_is_shown_by_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, stream = Clock(monkeypatch), io.StringIO()
    with Console(interval=0, stream=stream) as console:
        console.start(None, unit="inputs")
        for units in (10, 4):
            part = console.part(units)
            for done in (1, 2):
                clock.now += 1
                part(done, 2)
    assert [line.split()[0] for line in stream.getvalue().splitlines()] == ["5", "10", "12", "14"]


def test_other_ranks_show_and_keep_nothing(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    with Console(interval=0) as console:
        console.start(20_000)
        tracemalloc.start()
        for number in range(1, 5001):
            console.update(step(number))
            console.say(f"line {number}")
        kept, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert kept < 50_000
    assert capfd.readouterr() == ("", "")


def test_counts_of_work_whose_total_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, stream = Clock(monkeypatch), io.StringIO()
    with Console(stream=stream) as console:
        console.start(None, title="reading", unit="documents")
        clock.now += 2
        console.update({"done": 3000, "bytes": 12_345_678, "tokens": 1234, "file": "a.txt"})
    expected = "reading: 3,000 documents, 1,500.0 documents/s, 12.3 MB, 1,234 tokens, file a.txt\n"
    assert stream.getvalue() == expected


def test_the_rate_is_that_of_the_last_minute_and_of_this_run_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, stream = Clock(monkeypatch), io.StringIO()
    with Console(interval=0, stream=stream) as console:
        console.start(2000, 500)
        clock.now += 10
        console.update(step(1500))  # fast short sequences
        clock.now += 100
        console.update(step(1510))
        clock.now += 100
        console.update(step(1520))
    lines = stream.getvalue().splitlines()
    assert "100.0 steps/s, 0:00:05 left" in lines[0]
    assert "10.0 s each, 1:20:00 left" in lines[-1]


def test_a_terminal_gets_one_bar_and_whole_lines_above_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    clock, stream = Clock(monkeypatch), Terminal()
    with Console(stream=stream) as console:
        console.start(40, 10, title="training")
        clock.now += 2
        console.update(step(20))
        console.say("[note] a line " + 12 * "that is long " + "end")
        print("printed by someone else", file=sys.stdout)
        console.update({"kind": "evaluation", "step": 20, "mlm_accuracy": 0.25})
        console.update(step(40))
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "\n", stream.getvalue())
    lines = [line.strip() for line in re.split(r"[\r\n]+", plain) if line.strip()]
    assert any(line.startswith("[note] a line") and line.endswith("end") for line in lines)
    assert "step 20, held out: accuracy 25.0%" in lines
    assert "printed by someone else" in lines
    assert any("40 of 40 steps (100%)" in line for line in lines)
    assert "\x1b[?25h" in stream.getvalue()  # the cursor is shown again


def strict_lines(path: Path) -> list[dict[str, Any]]:
    """Read with a reader that refuses the NaN and Infinity that are not in the JSON standard."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not standard JSON")

    text = path.read_text(encoding="utf-8")
    assert text.endswith("\n")
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def test_records_come_back_in_order_with_their_time(tmp_path: Path) -> None:
    log = Journal(tmp_path / "run")
    log.write({"kind": "start", "step": 0, "recipe_name": "démo 漢"})
    log.write(step(1))
    on_disk = strict_lines(log.path)  # before close: each line is handed over at once
    log.close()
    log.close()
    assert on_disk == read_journal(log.path)
    assert [record["kind"] for record in on_disk] == ["start", "step"]
    assert on_disk[0]["recipe_name"] == "démo 漢"
    assert abs(on_disk[1]["time"] - Path(log.path).stat().st_mtime) < 60


def test_numbers_json_does_not_know_become_null_and_others_plain(tmp_path: Path) -> None:
    log = Journal(tmp_path)
    log.write(
        step(
            1,
            nan=math.nan,
            inside=[math.inf, {"x": -math.inf}],
            numpy=np.float32(0.5),
            count=np.int64(7),
            tensor=torch.tensor(0.25),
            path=Path("a") / "b",
            pair=(1, 2),
        )
    )
    log.close()
    (record,) = strict_lines(log.path)
    assert record["nan"] is None
    assert record["inside"] == [None, {"x": None}]
    assert (record["numpy"], record["count"], record["tensor"]) == (0.5, 7, 0.25)
    assert (record["path"], record["pair"]) == ("a/b", [1, 2])


def test_resuming_drops_the_records_after_the_checkpoint(tmp_path: Path) -> None:
    log = Journal(tmp_path)
    log.write({"kind": "start", "step": 0})
    for number in (10, 20, 30):
        log.write(step(number))
    log.write({"kind": "checkpoint", "step": 20})
    log.close()
    resumed = Journal(tmp_path, resume_step=20)
    resumed.write(step(30, again=True))
    resumed.close()
    records = read_journal(log.path)
    assert [(r["kind"], r["step"]) for r in records] == [
        ("start", 0),
        ("step", 10),
        ("step", 20),
        ("checkpoint", 20),
        ("step", 30),
    ]
    assert records[-1]["again"] is True


@given(cut=st.integers(1, 60))
@settings(max_examples=20, deadline=None)
def test_a_torn_last_line_is_tolerated(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    folder = tmp_path_factory.mktemp("run")
    log = Journal(folder)
    for number in (1, 2, 3):
        log.write(step(number, word="é漢"))
    log.close()
    whole = log.path.read_bytes()
    third = len(whole.splitlines()[2])
    torn = whole[: -min(cut + 1, third)]
    log.path.write_bytes(torn)
    assert [r["step"] for r in read_journal(log.path)] == [1, 2]
    resumed = Journal(folder, resume_step=3)
    resumed.write(step(4))
    resumed.close()
    assert [r["step"] for r in strict_lines(log.path)] == [1, 2, 4]


def test_a_damaged_line_in_the_middle_is_named(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    for damaged in ('{"kind": "st', "[1]", "\x00\x00"):
        path.write_text(f'{{"kind": "start"}}\n{damaged}\n{{"kind": "end"}}\n')
        with pytest.raises(BertkitError, match=r"journal.jsonl line 2 is not a JSON object"):
            read_journal(path)
    with pytest.raises(BertkitError, match=r"none.jsonl does not exist"):
        read_journal(tmp_path / "none.jsonl")
    path.write_text("")
    assert read_journal(path) == []


def test_two_runs_do_not_share_a_journal(tmp_path: Path) -> None:
    log = Journal(tmp_path)
    log.write(step(1))
    log.close()
    with pytest.raises(BertkitError, match="another run's journal"):
        Journal(tmp_path)
    assert len(read_journal(log.path)) == 1
    Journal(tmp_path, resume_step=0).close()
    assert read_journal(log.path) == []


def test_a_full_disk_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(io.StringIO):
        def flush(self) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    log = Journal(tmp_path)
    log.close()
    monkeypatch.setattr(log, "file", Full())
    with pytest.raises(BertkitError, match=r"journal\.jsonl: the disk is full"):
        log.write(step(1))
