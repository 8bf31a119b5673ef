"""The log of a run: `journal.jsonl` and trackers.

A journal is a text file with one JSON object per line. Each has a `kind`: "start", "step",
"evaluation", "checkpoint", "note" or "end". It is standard JSON: NaN and infinity are written as
null.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import time
from typing import Any, Self

from bertkit.console import Console
from bertkit.errors import BertkitError
from bertkit.files import disk_errors, jsonable, write_text

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
            self.file = self.path.open("a", encoding="utf-8", errors="backslashreplace")
        self.trackers: list[Any] = []
        if track:
            try:
                self._open_trackers(track, folder, resume_step, since)
            except BaseException:
                self.close()
                raise

    def _open_trackers(
        self, names: Sequence[str], folder: Path, resume_step: int | None, since: float | None
    ) -> None:
        from bertkit.training.trackers import TRACKERS, is_installed

        for name in names:
            message = "no TensorBoard events: the package tensorboard is not installed"
            if is_installed(name):
                try:
                    with disk_errors(folder):
                        self.trackers.append(TRACKERS[name](folder, resume_step, since))
                    continue
                except UnicodeEncodeError:
                    message = "no TensorBoard events: the name of the run's folder is not UTF-8"
            self.write({"kind": "note", "step": resume_step or 0, "message": message})

    def write(self, record: dict[str, Any]) -> None:
        """Append one record with its `time` in Unix seconds, flush the file, and pass it on.

        A tracker that fails is left out from then on, and a note says so; training continues.

        Raises:
            BertkitError: the disk is full, or a tracker cannot be started.
            Exception: whatever `on_record` raises.
        """
        stamped = {**jsonable(record), "time": time()}
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
                with suppress(Exception):
                    tracker.close()
                reason = getattr(error, "strerror", None) or error
                message = f"no more records for {tracker.name}: {reason}"
                self.write({"kind": "note", "step": record.get("step", 0), "message": message})
        if self.on_record is not None:
            self.on_record(dict(stamped))

    def sync(self) -> None:
        """Flush the file to disk, so that a power cut leaves no checkpoint without its records."""
        with disk_errors(self.path):
            os.fsync(self.file.fileno())

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
    return json.dumps(jsonable(record), ensure_ascii=False, allow_nan=False) + "\n"


def read_journal(path: Path) -> list[dict[str, Any]]:
    """Return all records of a journal in order, without a last line truncated by a kill.

    Raises:
        BertkitError: the file is missing, or a line before the last is damaged.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise BertkitError(f"{path} does not exist; give the folder of a run") from None
    except OSError as error:
        raise BertkitError(f"{path}: {error.strerror}; give the folder of a run") from None
    records = []
    for number, record in numbered_records(content):
        if record is not None:
            records.append(record)
        elif number <= content.count(b"\n"):
            raise BertkitError(f"{path} line {number} is not a JSON object; remove that line")
    return records


def numbered_records(content: bytes) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Yield the number of every line that is not empty and its record, None if it is damaged."""
    for number, line in enumerate(content.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line.decode())
        except (ValueError, RecursionError):
            record = None
        step = record.get("step", 0) if isinstance(record, dict) else None
        yield number, record if isinstance(step, int) and abs(step) < 1 << 63 else None


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
