"""The log of a run (`journal.jsonl`, trackers) and its live progress on the console.

A journal is a text file with one JSON object per line. Each has a `kind`: "start", "step",
"evaluation", "checkpoint", "note" or "end". It is standard JSON: NaN and infinity are written as
null.
"""

from __future__ import annotations

import io
import json
import math
import os
import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from time import monotonic, time
from typing import TYPE_CHECKING, Any, Self, TextIO

from bertkit.errors import BertkitError
from bertkit.files import disk_errors, not_through_links, write_text
from bertkit.processes import rank

if TYPE_CHECKING:
    from rich.progress import Progress

    from bertkit.training.notebook import NotebookBar

JOURNAL = "journal.jsonl"

OnRecord = Callable[[dict[str, Any]], object]
"""A function of the user that receives every record of a journal when it is written."""


class Journal:
    """The journal of one run, open for writing.

    Args:
        folder: the run directory, which is created if it is missing.
        resume_step: the number of updates made so far. Records of later steps, which a killed run
            wrote after its last checkpoint, are dropped.
        track: the names of trackers that receive every record; see `bertkit.training.trackers`. If
            TensorBoard is not installed, a note in the journal says so.
        on_record: a function that receives every record, after the trackers.

    Raises:
        BertkitError: a journal exists and `resume_step` is None, the journal is damaged, a tracker
            does not exist or is not installed, or the disk is full.
    """

    def __init__(
        self,
        folder: Path,
        *,
        resume_step: int | None = None,
        track: Sequence[str] = (),
        on_record: OnRecord | None = None,
    ) -> None:
        self.path, self.on_record = folder / JOURNAL, on_record
        since = None
        if self.path.exists():
            records = read_journal(self.path)
            if records and resume_step is None:
                raise BertkitError(
                    f"{self.path} is another run's journal; resume that run or choose a new folder"
                )
            kept = [record for record in records if record.get("step", 0) <= (resume_step or 0)]
            since = next((one.get("time") for one in kept if one.get("kind") == "start"), None)
            write_text(self.path, "".join(json_line(record) for record in kept))
        with disk_errors(self.path):
            folder.mkdir(parents=True, exist_ok=True)
            opener = not_through_links
            self.file = open(self.path, "a", encoding="utf-8", opener=opener)  # noqa: SIM115
        self.trackers: list[Any] = []
        if track:
            self._open_trackers(track, folder, resume_step, since)

    def _open_trackers(
        self, names: Sequence[str], folder: Path, resume_step: int | None, since: float | None
    ) -> None:
        from bertkit.training.trackers import TRACKERS, check_trackers, is_installed

        check_trackers(names)
        for name in names:
            if is_installed(name):
                self.trackers.append(TRACKERS[name](folder, resume_step, since))
            else:
                message = "no TensorBoard events: the package tensorboard is not installed"
                self.write({"kind": "note", "step": resume_step or 0, "message": message})

    def write(self, record: dict[str, Any]) -> None:
        """Append one record with its `time` in Unix seconds, flush the file, and pass it on.

        A tracker that fails is left out from then on, and a note says so; training continues.

        Raises:
            BertkitError: the disk is full, or a tracker cannot be started.
            Exception: whatever `on_record` raises.
        """
        stamped = {**standard(record), "time": time()}
        with disk_errors(self.path):
            self.file.write(json_line(stamped))
            self.file.flush()
        for tracker in list(self.trackers):
            try:
                tracker(stamped)
            except Exception as error:
                if record.get("kind") == "start":
                    raise BertkitError(f"{tracker.name} cannot be started: {error}") from error
                self.trackers.remove(tracker)
                reason = getattr(error, "strerror", None) or error
                message = f"no more records for {tracker.name}: {reason}"
                self.write({"kind": "note", "step": record.get("step", 0), "message": message})
        if self.on_record is not None:
            self.on_record(dict(stamped))

    def close(self) -> None:
        """Close the files; calling this again does nothing."""
        with suppress(OSError):  # write() has already reported a full disk
            self.file.close()
        for tracker in self.trackers:
            with suppress(Exception):
                tracker.close()
        self.trackers = []


def json_line(record: dict[str, Any]) -> str:
    """Format a record as one line of standard JSON."""
    return json.dumps(standard(record), ensure_ascii=False, allow_nan=False) + "\n"


def standard(value: Any) -> Any:
    """Convert a value to standard JSON: without NaN, infinity, NumPy or torch scalars, or paths."""
    if isinstance(value, dict):
        return {str(key): standard(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [standard(item) for item in value]
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value


def read_journal(path: Path) -> list[dict[str, Any]]:
    """Return all records of a journal in order, without a last line truncated by a kill.

    Raises:
        BertkitError: the file is missing, or a line before the last is damaged.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        raise BertkitError(f"{path} does not exist; name the folder of a run") from None
    except OSError as error:
        raise BertkitError(f"{path}: {error.strerror}; name the folder of a run") from None
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line.decode()) if line.strip() else None
        except ValueError:
            record = line
        if isinstance(record, dict) and isinstance(record.get("step", 0), int):
            records.append(record)
        elif record is not None and number < len(lines):
            raise BertkitError(f"{path} line {number} is not a JSON object; remove that line")
    return records


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
        self.printed = -math.inf
        if self.stream.isatty() and os.environ.get("TERM") != "dumb":
            self.bar = progress_bar(self.stream)
            self.bar.add_task(title, total=total, completed=done, text=self._counted())
            self.bar.start()
        elif self.default and "IPython" in sys.modules:
            from bertkit.training.notebook import NotebookBar, is_notebook

            if is_notebook():
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

    def say(self, message: str) -> None:
        """Print a line, above the bar if there is one."""
        if self.bar is not None:
            self.bar.console.print(message, markup=False, highlight=False, soft_wrap=True)
        else:
            print(message, file=self.stream, flush=True)

    def close(self) -> None:
        """Remove the bar, or show the last state; calling this again does nothing."""
        if self.bar is not None:
            self.bar.stop()
            self.bar = None
        if self.cell is not None:
            self.cell.stop()
            self.cell = None
        if self.pending:
            self._print_pending(monotonic())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _print_pending(self, now: float) -> None:
        self.say(self.pending)
        self.pending = ""
        self.printed = now

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
                left = timedelta(seconds=round(max(0, self.total - done) / rate))
                parts.append(f"{left} left")
        return ", ".join(parts)


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


@dataclass(frozen=True)
class RunLog:
    """The journal of a run, None except on rank 0, and the console; leaving a block closes both."""

    journal: Journal | None
    console: Console

    def write(self, record: dict[str, Any], *, show: bool = False) -> None:
        """Append a record to the journal and, if `show` is true, show it on the console."""
        if self.journal is not None:
            self.journal.write(record)
        if show:
            self.console.update(record)

    def note(self, step: int, message: str) -> None:
        """Write a message to the journal and print it."""
        self.write({"kind": "note", "step": step, "message": message})
        self.console.say(message)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self.journal is not None:
            self.journal.close()
        self.console.close()
