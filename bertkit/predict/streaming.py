"""Files larger than memory: inputs in stretches, lines written as they come, one bar for it all.

Order is kept: a stretch is read, run and written before the next one is read to its end. So no more
than two of them are ever in memory, one at work and one being read.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from bertkit.files import disk_errors, sync_folder
from bertkit.predict.tasks import CHUNK, TaskPredictor
from bertkit.tasks.tag import Tag
from bertkit.training.journal import Console


def stretches(inputs: Iterable[Any], *, whole: bool = False) -> Iterator[list[Any]]:
    """Inputs in stretches of `CHUNK`, or of a little more where documents must stay whole.

    Args:
        inputs: of `bertkit.tasks.inputs`; they are taken as they are needed.
        whole: whether no document of tagged words may be divided. One longer than a stretch is held
            in memory.
    """
    stretch: list[Any] = []
    for given in inputs:
        if len(stretch) >= CHUNK and not (whole and stretch[-1].document == given.document):
            yield stretch
            stretch = []
        stretch.append(given)
    if stretch:
        yield stretch


def reads_documents(predictor: TaskPredictor) -> bool:
    """Whether the sentences of a document are read together."""
    return isinstance(predictor.task, Tag) and predictor.task.context == "document"


@contextmanager
def new_lines(out: Path | None) -> Iterator[Callable[[Iterable[str]], None]]:
    """Give a block what writes lines: to a file that is there once the block has ended well.

    Without a file, to the standard output, where they are to be seen at once.

    Raises:
        BertkitError: the file cannot be written.
    """
    if out is not None:
        with new_text(out) as write:
            yield write
        return
    stream = sys.stdout  # kept: while a bar is up, sys.stdout prints above it instead

    def write_now(lines: Iterable[str]) -> None:
        stream.writelines(lines)
        stream.flush()

    yield write_now


@contextmanager
def new_text(path: Path) -> Iterator[Callable[[Iterable[str]], None]]:
    """Write UTF-8 text piece by piece; it becomes `path` when the block ends well.

    After an error or an interruption the temporary file is removed and the old `path`, if any,
    stands. The block is given the function that writes some pieces.

    Raises:
        BertkitError: the disk is full or the folder cannot be written.
    """
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = temporary.open("w", encoding="utf-8")

    def write(pieces: Iterable[str]) -> None:
        with disk_errors(path):
            file.writelines(pieces)

    try:
        yield write
        with disk_errors(path):
            file.flush()
            os.fsync(file.fileno())
            file.close()
            temporary.replace(path)
            sync_folder(path.parent)
    finally:
        with suppress(OSError):  # on a full disk closing fails, too
            file.close()
        temporary.unlink(missing_ok=True)


class Progress(Console):
    """A file's bar, to be given to `TaskPredictor.run`, which tells of the windows of one stretch.

    Args:
        console: what shows the bar; it is closed by its owner.
        total: how many units there are, or None where that is not known.
        unit: "inputs"; or "lines", where inputs are found by the lines that they stand on.
        visible: whether there is a bar.
    """

    def __init__(self, console: Console, total: int | None, unit: str, *, visible: bool) -> None:
        super().__init__(stream=console.stream)
        self.console, self.whole, self.by_lines = console, total, unit == "lines"
        self.visible = visible
        self.inputs = 0
        """Inputs so far, with the stretch at work."""
        self.size = self.before = self.after = 0
        self.windows = 1
        if visible:
            console.start(total, title="predicting", unit=unit)

    def begin(self, stretch: list[Any]) -> None:
        """The next stretch is at work."""
        self.inputs += len(stretch)
        self.size, self.before = len(stretch), self.after
        self.after = line_of(stretch[-1]) if self.by_lines else self.inputs
        if self.whole is not None:
            self.after = min(self.after, self.whole)

    def finish(self) -> None:
        """All is done: show that, and take the bar down."""
        self.size, self.after = 0, self.inputs if self.whole is None else self.whole
        self._show(1.0)
        self.console.close()

    def start(
        self, total: int | None, done: int = 0, *, title: str = "", unit: str = "steps"
    ) -> None:
        """See `Console`; the windows of a stretch are no bar of their own."""
        self.windows = max(1, total or 0)

    def update(self, record: dict[str, Any]) -> None:
        """See `Console`; the share of windows that are done is taken for that of inputs."""
        self._show(record["done"] / self.windows)

    def close(self) -> None:
        """See `Console`; the bar stays up for the next stretch."""

    def _show(self, share: float) -> None:
        if not self.visible:
            return
        record = {"done": self.before + int(share * (self.after - self.before))}
        if self.by_lines:
            record["inputs"] = self.inputs - self.size + int(share * self.size)
        self.console.update(record)


def line_of(given: Any) -> int:
    """The line of an input, from its place, "file:line"."""
    return int(given.place.rpartition(":")[2])
