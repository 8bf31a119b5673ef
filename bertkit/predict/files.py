"""Files larger than memory: lines that are written as they come, and one bar for it all.

Order is kept: a stretch of inputs (`bertkit.predict.predictors.stretches`) is read, run and written
before the next one is read to its end. So no more than two of them are ever in memory, one at work
and one being read.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from bertkit.files import disk_errors, new_file
from bertkit.training.journal import Console


@contextmanager
def new_text(path: Path) -> Iterator[Callable[[Iterable[str]], None]]:
    """Give a block what writes pieces of UTF-8 text; see `new_file`."""
    with new_file(path) as temporary:
        with disk_errors(path):
            file = temporary.open("w", encoding="utf-8")

        def write(pieces: Iterable[str]) -> None:
            with disk_errors(path):
                file.writelines(pieces)

        try:
            yield write
            with disk_errors(path):
                file.close()
        finally:
            with suppress(OSError):  # on a full disk closing fails, too
                file.close()


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


class FileProgress:
    """A file's bar, to be given to `TaskPredictor.run`, which tells of the windows of one stretch.

    The share of windows that are done is taken for that of the stretch's inputs.

    Args:
        console: what shows the bar; it is closed by its owner.
        total: how many units there are, or None where that is not known.
        unit: "inputs"; or "lines", where inputs are found by the lines that they stand on.
        visible: whether there is a bar.
    """

    def __init__(self, console: Console, total: int | None, unit: str, *, visible: bool) -> None:
        self.console, self.whole, self.by_lines = console, total, unit == "lines"
        self.visible = visible
        self.inputs = 0
        """Inputs so far, with the stretch at work."""
        self.size = self.before = self.after = 0
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

    def __call__(self, done: int, total: int) -> None:
        """Of the stretch at work, `done` of `total` windows are done."""
        if done:
            self._show(done / total)

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
