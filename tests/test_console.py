"""Progress on a terminal and in plain lines."""

from __future__ import annotations

import io
import re
import sys
from typing import Any

import pytest

from bertkit import console
from bertkit.console import Console


def step(number: int, **fields: Any) -> dict[str, Any]:
    return {"kind": "step", "step": number, "loss": 1 / number, **fields}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    """Time that passes only when told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(console, "monotonic", lambda: self.now)


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
