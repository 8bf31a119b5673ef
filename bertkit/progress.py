"""What a run shows and writes: the console and `journal.jsonl`.

The console is a bar on a terminal or in a notebook, otherwise plain lines at intervals. A journal
is a text file with one JSON object per line. Each has a `kind`: "start", "step", "evaluation",
"checkpoint", "note" or "end". It is standard JSON: NaN and infinity are written as null.
"""

from __future__ import annotations

import json
import os
import sys
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from time import monotonic, time
from typing import TYPE_CHECKING, Any, Self, TextIO

from bertkit.errors import BertkitError
from bertkit.files import disk_errors, json_line, jsonable, write_json_lines
from bertkit.processes import rank

if TYPE_CHECKING:
    from rich.progress import Progress


STEP = {
    "loss": "loss {:.3f}",
    "mlm_loss": "MLM {:.3f}",
    "mlm_accuracy": "accuracy {:.1%}",
    "lm_loss": "LM {:.3f}",
    "lm_accuracy": "accuracy {:.1%}",
    "rtd_loss": "replaced tokens {:.3f}",
    "rtd_accuracy": "accuracy {:.1%}",
    "nsp_accuracy": "NSP {:.1%}",
    "sop_accuracy": "SOP {:.1%}",
    "mlm_perplexity": "perplexity {:,.1f}",
    "lm_perplexity": "perplexity {:,.1f}",
    "learning_rate": "rate {:.1e}",
    "tokens_per_second": "{:,.0f} tokens/s",
}
"""The fields of a journal's record that are shown, in order, each with its format."""
FIRST_SECONDS, INTERVAL_SECONDS = 5.0, 10.0
"""When the first plain line is printed, and the least time between two later ones."""
SPARSENESS, LONGEST_INTERVAL = 0.25, 600.0
"""The share of the elapsed time that passes between two later lines, and its limit in seconds."""
BAR_SECONDS = 0.5
"""The time between two texts of a bar that only shows what is due."""
RATE_SECONDS = 60.0
"""The number of seconds over which the rate and the remaining time are measured."""
MAX_SECONDS = timedelta.max.total_seconds() - 1


class Console:
    """Live progress: a bar on a terminal or in a notebook, otherwise ever sparser plain lines.

        with Console() as console:
            console.start(total=1000)
            console.update({"kind": "step", "step": 1, "mlm_loss": 9.8})
            console.say("saved")

    Training passes journal records; other work passes records such as {"done": 120, "bytes": 3456},
    with the amount done and any other counts to show. The default stream is standard error, where
    only rank 0 of torchrun's processes shows anything.
    """

    def __init__(self, *, interval: float = INTERVAL_SECONDS, stream: TextIO | None = None) -> None:
        self.interval, self.default = interval, stream is None
        self.stream = stream or sys.stderr
        self.silent = stream is None and rank() > 0
        self.bar: Progress | None = None
        self.total: int | None = None
        self.title = self.unit = self.pending = ""
        self.fields: list[str] = []
        """The latest values that were shown."""
        self.seen: deque[tuple[float, int]] = deque()
        self.began = self.due = 0.0

    @property
    def is_due(self) -> bool:
        """Whether it is time to show a record."""
        return not self.silent and monotonic() >= self.due

    def start(
        self, total: int | None, done: int = 0, *, title: str = "", unit: str = "steps"
    ) -> None:
        """Start to show a task, of which `done` units were done before; close the previous one."""
        self.close()
        self.total, self.unit, self.title, self.fields = total, unit, title, []
        self.began = monotonic()
        self.seen = deque([(self.began, done)])
        self.due = self.began + min(FIRST_SECONDS, self.interval)
        terminal = not self.silent and self.stream.isatty() and os.environ.get("TERM") != "dumb"
        if terminal or (self.default and not self.silent and "ipykernel" in sys.modules):
            self.bar = progress_bar(self.stream if terminal else None)
            self.bar.add_task(title, total=total, completed=done, text=self._counted())
            self.bar.start()
            self.due = 0.0

    def update(self, record: dict[str, Any]) -> None:
        """Show a record: its `step` or `done` moves the bar; an evaluation is printed on a line."""
        if self.silent:
            return
        if record.get("kind") == "evaluation":
            self.say(f"step {record['step']:,}, held out: {', '.join(shown_record(record))}")
            return
        if not self.seen:
            self.start(None)
        now = monotonic()
        self.seen.append((now, record.get("step", record.get("done", self.seen[-1][1]))))
        while len(self.seen) > 2 and self.seen[1][0] < now - RATE_SECONDS:
            self.seen.popleft()
        self.fields = shown_record(record) or self.fields
        text = ", ".join([self._counted(), *self.fields])
        if self.bar is not None:
            self.bar.update(self.bar.task_ids[0], completed=self.seen[-1][1], text=text)
            self.due = now + BAR_SECONDS
            return
        self.pending = f"{self.title}: {text}" if self.title else text
        if now >= self.due:
            sparse = min(SPARSENESS * (now - self.began), LONGEST_INTERVAL)
            self.due = now + max(self.interval, sparse)
            self.say(self.pending)
            self.pending = ""

    def part(self, units: int) -> Callable[[int, int], None]:
        """Return a function of (done, total) that shows this share of the next `units` as done."""
        before = self.seen[-1][1] if self.seen else 0
        return lambda done, total: self.update({"done": before + units * done // total})

    def say(self, *lines: str) -> None:
        """Print lines, above the bar if there is one."""
        for line in lines:
            if self.silent:
                continue
            if self.bar is not None:
                self.bar.console.print(line, markup=False, highlight=False, soft_wrap=True)
            else:
                print(line, file=self.stream, flush=True)

    def close(self) -> None:
        """Remove the bar, or print the last state; calling this again does nothing."""
        if self.bar is not None:
            self.bar.stop()
            self.bar = None
        if self.pending:
            self.say(self.pending)
        self.pending = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _counted(self) -> str:
        """Describe the progress, as in `500 of 1,000 steps (50%), 12.5 steps/s, 0:00:40 left`."""
        (began, first), (now, done) = self.seen[0], self.seen[-1]
        parts = [counted(done, self.unit)]
        if self.total is not None:
            parts = [f"{done:,} of {self.total:,} {self.unit} ({done / max(1, self.total):.0%})"]
        if done > first and now > began:
            rate = (done - first) / (now - began)
            parts.append(f"{rate:,.1f} {self.unit}/s" if rate > 1 else f"{1 / rate:,.1f} s each")
            if self.total is not None:
                seconds = max(0, self.total - done) / rate
                left = timedelta(seconds=round(min(seconds, MAX_SECONDS)))
                parts.append(f"{left} left")
        return ", ".join(parts)


def counted(number: int, units: str) -> str:
    """Return a number of units, as in "1 input" and "2 inputs"."""
    return f"{number:,} {units.removesuffix('s') if number == 1 else units}"


def console_or_new(console: Console | None) -> AbstractContextManager[Console]:
    """Return a context with a caller's console, which stays open, or with a new one."""
    return nullcontext(console) if console else Console()


def progress_bar(stream: TextIO | None) -> Progress:
    """Build rich's display: a title, a bar, and a text cut to the line; for a notebook if None."""
    import rich.console
    from rich.progress import BarColumn, Progress, TextColumn
    from rich.table import Column

    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=20),
        TextColumn(
            "{task.fields[text]}",
            markup=False,
            table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"),
        ),
        console=rich.console.Console(file=stream, force_terminal=True if stream else None),
        expand=True,
        refresh_per_second=4,
    )


def shown_record(record: dict[str, Any]) -> list[str]:
    """Format the fields of a record that the console shows, such as `56.7 MB` or `loss 2.345`."""
    if record.get("kind") in ("step", "evaluation"):
        return [text.format(record[n]) for n, text in STEP.items() if record.get(n) is not None]
    counts = {name: v for name, v in record.items() if name not in {"kind", "step", "done"}}
    return [
        f"{value / 1e6:,.1f} MB"
        if name == "bytes"
        else (f"{value:,} {name}" if isinstance(value, int) else f"{name} {value}")
        for name, value in counts.items()
    ]


# Journal ------------------------------------------------------------------------------------------


JOURNAL = "journal.jsonl"

OnRecord = Callable[[dict[str, Any]], object]
"""A function of the user that receives every record of a journal when it is written."""


class Journal:
    """The journal of one run, open for writing; leaving its block closes it and the console's bar.

    Args:
        folder: the run directory; None on ranks other than 0, which write nothing.
        console: where notes and shown records appear, too.
        resume_step: the number of updates made so far. Records of later steps, which a killed run
            wrote after its last checkpoint, are dropped. None: there must be no journal yet.
        on_record: a function that receives every record, such as one that calls another tracker.
    """

    def __init__(
        self,
        folder: Path | None,
        console: Console | None = None,
        *,
        resume_step: int | None = None,
        on_record: OnRecord | None = None,
    ) -> None:
        self.console, self.on_record = console, on_record
        self.path = folder and folder / JOURNAL
        if folder is None or self.path is None:
            return
        if self.path.exists():
            records = read_journal(self.path)
            if records and resume_step is None:
                raise BertkitError(
                    f"{self.path} is another run's journal; resume that run or choose a new folder"
                )
            earlier = [record for record in records if record.get("step", 0) <= (resume_step or 0)]
            write_json_lines(self.path, earlier)
        with disk_errors(self.path):
            folder.mkdir(parents=True, exist_ok=True)
            self.file = self.path.open("a", encoding="utf-8", errors="backslashreplace")

    def write(self, record: dict[str, Any], *, show: bool = False) -> None:
        """Append a record with its `time` in Unix seconds, pass it on, and perhaps show it."""
        if show and self.console is not None:
            self.console.update(record)
        if self.path is None:
            return
        stamped = {**jsonable(record), "time": time()}
        with disk_errors(self.path):
            self.file.write(json_line(stamped))
            self.file.flush()
        if self.on_record is not None:
            self.on_record(dict(stamped))

    def note(self, step: int, message: str) -> None:
        """Write a message to the journal and print it."""
        self.write({"kind": "note", "step": step, "message": message})
        if self.console is not None:
            self.console.say(message)

    def sync(self) -> None:
        """Flush the file to disk, so that a power cut leaves no checkpoint without its records."""
        if self.path is not None:
            with disk_errors(self.path):
                os.fsync(self.file.fileno())

    def close(self) -> None:
        """Close the files; calling this again does nothing."""
        if self.path is not None:
            with suppress(OSError):  # write() has already reported a full disk
                self.file.close()
        if self.console is not None:
            self.console.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def read_journal(path: Path) -> list[dict[str, Any]]:
    """Return all records of a journal in order, without a last line truncated by a kill."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise BertkitError(f"{path} does not exist; give the folder of a run") from None
    except OSError as error:
        raise BertkitError(f"{path}: {error.strerror}; give the folder of a run") from None
    records = []
    for number, line in enumerate(content.split(b"\n"), start=1):
        if line.strip() and (record := parsed(line)) is not None:
            records.append(record)
        elif line.strip() and number <= content.count(b"\n"):
            raise BertkitError(f"{path} line {number} is not a JSON object; remove that line")
    return records


def parsed(line: bytes) -> dict[str, Any] | None:
    """Return the record of a line; None if it is damaged."""
    try:
        record = json.loads(line.decode())
    except (ValueError, RecursionError):
        return None
    step = record.get("step", 0) if isinstance(record, dict) else None
    return record if isinstance(step, int) and abs(step) < 1 << 63 else None
