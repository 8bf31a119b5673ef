"""Live progress: a bar on a terminal or in a notebook, otherwise plain lines at intervals."""

from __future__ import annotations

import io
import math
import os
import sys
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from html import escape
from time import monotonic
from typing import TYPE_CHECKING, Any, Self, TextIO

from bertkit.processes import rank

if TYPE_CHECKING:
    from rich.progress import Progress

SHOWN = {
    "step": {
        "loss": "loss {:.3f}",
        "mlm_loss": "MLM {:.3f}",
        "mlm_accuracy": "accuracy {:.1%}",
        "lm_loss": "LM {:.3f}",
        "lm_accuracy": "accuracy {:.1%}",
        "rtd_accuracy": "replaced-token accuracy {:.1%}",
        "nsp_accuracy": "NSP {:.1%}",
        "sop_accuracy": "SOP {:.1%}",
        "learning_rate": "rate {:.1e}",
        "tokens_per_second": "{:,.0f} tokens/s",
        "mfu": "MFU {:.0%}",
    },
    "evaluation": {
        "mlm_loss": "MLM loss {:.3f}",
        "mlm_perplexity": "perplexity {:,.1f}",
        "mlm_accuracy": "accuracy {:.1%}",
        "lm_loss": "LM loss {:.3f}",
        "lm_perplexity": "perplexity {:,.1f}",
        "lm_accuracy": "accuracy {:.1%}",
        "rtd_loss": "replaced-token loss {:.3f}",
        "rtd_accuracy": "replaced-token accuracy {:.1%}",
        "nsp_loss": "NSP loss {:.3f}",
        "nsp_accuracy": "NSP accuracy {:.1%}",
        "sop_loss": "SOP loss {:.3f}",
        "sop_accuracy": "SOP accuracy {:.1%}",
    },
}
"""The fields of a record that the console shows, in order, each with its format."""

REFRESH_SECONDS = 0.25
"""The shortest time between two drawings of a bar in a notebook."""
MAX_SECONDS = timedelta.max.total_seconds() - 1
RATE_SECONDS = 60.0
"""The number of seconds over which the rate and the remaining time are measured."""


class Console:
    """Live progress: a bar on a terminal or in a notebook, otherwise a plain line at intervals.

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

    def __init__(self, *, interval: float = 10.0, stream: TextIO | None = None) -> None:
        self.interval = interval
        self.stream = stream or (io.StringIO() if rank() else sys.stderr)
        self.bar: Progress | None = None
        self.cell: NotebookBar | None = None
        self.default = stream is None and not rank()
        self.total: int | None = None
        self.title = self.unit = ""
        self.seen: deque[tuple[float, int]] = deque()
        self.printed = -math.inf
        self.printed_done: int | None = None
        self.pending = ""

    def start(
        self, total: int | None, done: int = 0, *, title: str = "", unit: str = "steps"
    ) -> None:
        """Start to show a task, and close the previous one.

        Args:
            total: the total number of units, or None if it is not known.
            done: the number of units done before now, as in a resumed run.
            title: one or two words to show before the bar or on each line.
            unit: the name of the units, in the plural.
        """
        self.close()
        self.total, self.unit, self.title = total, unit, title
        self.seen = deque([(monotonic(), done)])
        self.printed, self.printed_done = -math.inf, None
        if self.stream.isatty() and os.environ.get("TERM") != "dumb":
            self.bar = progress_bar(self.stream)
            self.bar.add_task(title, total=total, completed=done, text=self._counted())
            self.bar.start()
        elif self.default and is_notebook():
            self.cell = NotebookBar(title, total, done, self._counted())

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
        if self.cell is not None:
            self.cell.update(self.seen[-1][1], text)
            return
        self.pending = f"{self.title}: {text}" if self.title else text
        if now - self.printed >= self.interval:
            self._print_pending(now)

    def say(self, *lines: str) -> None:
        """Print lines, above the bar if there is one."""
        for line in lines:
            if self.bar is not None:
                self.bar.console.print(line, markup=False, highlight=False, soft_wrap=True)
            else:
                print(line, file=self.stream, flush=True)

    def close(self) -> None:
        """Remove the bar, or show the last state; calling this again does nothing."""
        if self.bar is not None:
            self.bar.stop()
            self.bar = None
        if self.cell is not None:
            self.cell.stop()
            self.cell = None
        if self.pending and self.seen[-1][1] != self.printed_done:
            self._print_pending(monotonic())
        self.pending = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _print_pending(self, now: float) -> None:
        self.say(self.pending)
        self.pending = ""
        self.printed, self.printed_done = now, self.seen[-1][1]

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


def progress_bar(stream: TextIO) -> Progress:
    """Build a rich progress display: a title, a bar, and a text truncated to the line."""
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
        console=rich.console.Console(file=stream, force_terminal=True),
        expand=True,
        refresh_per_second=4,
    )


def shown_record(record: dict[str, Any]) -> list[str]:
    """Format the fields of a record that the console shows."""
    formats = SHOWN.get(record.get("kind", ""))
    if formats is None:
        return [count_text(n, v) for n, v in record.items() if n not in {"kind", "step", "done"}]
    return [text.format(record[n]) for n, text in formats.items() if record.get(n) is not None]


def count_text(name: str, value: Any) -> str:
    """Format a count with its unit, such as `1,234 documents` or `56.7 MB`."""
    if name == "bytes":
        return f"{value / 1e6:,.1f} MB"
    return f"{value:,} {name}" if isinstance(value, int) else f"{name} {value}"


def is_notebook() -> bool:
    """Return whether this process is the kernel of a notebook, which shows HTML."""
    interactive = sys.modules.get("IPython")
    shell = interactive.get_ipython() if interactive is not None else None
    return shell is not None and getattr(shell, "kernel", None) is not None


class NotebookBar:
    """A bar that is redrawn in place and stays with its last state, between a title and a text."""

    def __init__(self, title: str, total: int | None, done: int, text: str) -> None:
        from IPython.display import display

        show: Any = display
        self.title, self.total, self.done, self.text = title, total, done, text
        self.shown = monotonic()
        self.handle: Any = show(self, display_id=True)

    def _repr_html_(self) -> str:
        """Return the bar as HTML."""
        value = "" if self.total is None else f' value="{self.done}" max="{max(1, self.total)}"'
        return f"<div>{escape(self.title)} <progress{value}></progress> {escape(self.text)}</div>"

    def __repr__(self) -> str:
        """Return the bar as text, for programs that show no HTML."""
        return f"{self.title}: {self.text}" if self.title else self.text

    def update(self, done: int, text: str) -> None:
        """Move the bar, at most a few times a second."""
        self.done, self.text = done, text
        if monotonic() - self.shown >= REFRESH_SECONDS:
            self.shown = monotonic()
            self.handle.update(self)

    def stop(self) -> None:
        """Show the last state."""
        self.handle.update(self)
