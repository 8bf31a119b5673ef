"""Live progress: a bar on a terminal or in a notebook, otherwise plain lines at intervals."""

from __future__ import annotations

import os
import sys
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from time import monotonic
from typing import TYPE_CHECKING, Any, Self, TextIO

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
    "mfu": "MFU {:.0%}",
}
"""The fields of a journal's record that are shown, in order, each with its format."""
FIRST_SECONDS, INTERVAL_SECONDS = 5.0, 10.0
"""When the first plain line is printed, and the time between two later ones."""
RATE_SECONDS = 60.0
"""The number of seconds over which the rate and the remaining time are measured."""
MAX_SECONDS = timedelta.max.total_seconds() - 1


class Console:
    """Live progress: a bar on a terminal or in a notebook, otherwise plain lines at intervals.

        with Console() as console:
            console.start(total=1000)
            console.update({"kind": "step", "step": 1, "mlm_loss": 9.8})
            console.say("saved")

    Training passes journal records; other work passes records such as {"done": 120, "bytes": 3456},
    with the amount done and any other counts to show. Printed text appears above the bar.

    Args:
        interval: the number of seconds between two plain lines.
        stream: the stream to write to; the default is standard error, because results go to
            standard output. By default only rank 0 of torchrun's processes shows anything.
    """

    def __init__(self, *, interval: float = INTERVAL_SECONDS, stream: TextIO | None = None) -> None:
        self.interval, self.default = interval, stream is None
        self.stream = stream or sys.stderr
        self.silent = stream is None and rank() > 0
        self.bar: Progress | None = None
        self.total: int | None = None
        self.title = self.unit = self.pending = ""
        self.seen: deque[tuple[float, int]] = deque()
        self.due = 0.0

    def start(
        self, total: int | None, done: int = 0, *, title: str = "", unit: str = "steps"
    ) -> None:
        """Start to show a task, and close the previous one.

        The total is None if it is not known; `done` units were done before, as in a resumed run.
        """
        self.close()
        self.total, self.unit, self.title = total, unit, title
        self.seen = deque([(monotonic(), done)])
        self.due = monotonic() + min(FIRST_SECONDS, self.interval)
        terminal = not self.silent and self.stream.isatty() and os.environ.get("TERM") != "dumb"
        if terminal or (self.default and not self.silent and "ipykernel" in sys.modules):
            self.bar = progress_bar(self.stream if terminal else None)
            self.bar.add_task(title, total=total, completed=done, text=self._counted())
            self.bar.start()

    def update(self, record: dict[str, Any]) -> None:
        """Show a record: its `step` or `done` moves the bar; an evaluation is printed on a line."""
        if record.get("kind") == "evaluation":
            self.say(f"step {record['step']:,}, held out: {', '.join(shown_record(record))}")
            return
        if not self.seen:
            self.start(None)
        now = monotonic()
        self.seen.append((now, record.get("step", record.get("done", self.seen[-1][1]))))
        while len(self.seen) > 2 and self.seen[1][0] < now - RATE_SECONDS:
            self.seen.popleft()
        text = ", ".join([self._counted(), *shown_record(record)])
        if self.bar is not None:
            self.bar.update(self.bar.task_ids[0], completed=self.seen[-1][1], text=text)
            return
        self.pending = f"{self.title}: {text}" if self.title else text
        if now >= self.due:
            self.due = now + self.interval
            self.say(self.pending)
            self.pending = ""

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
        parts = [f"{done:,} {self.unit}"]
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
