"""A progress bar in the output of a Jupyter cell; it needs IPython and nothing else."""

from __future__ import annotations

import sys
import time
from html import escape
from typing import Any

REFRESH_SECONDS = 0.25


def is_notebook() -> bool:
    """Return whether this process is the kernel of a notebook, which shows HTML."""
    interactive = sys.modules.get("IPython")
    shell = interactive.get_ipython() if interactive is not None else None
    return shell is not None and getattr(shell, "kernel", None) is not None


class NotebookBar:
    """A bar that is redrawn in place and stays with its last state.

    Args:
        title: one or two words before the bar.
        total: the number of units, or None if it is not known.
        done: the units done before now.
        text: the text after the bar.
    """

    def __init__(self, title: str, total: int | None, done: int, text: str) -> None:
        from IPython.display import display

        self.title, self.total, self.done, self.text = title, total, done, text
        self.shown = time.monotonic()
        self.handle: Any = display(self, display_id=True)

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
        if time.monotonic() - self.shown >= REFRESH_SECONDS:
            self.shown = time.monotonic()
            self.handle.update(self)

    def stop(self) -> None:
        """Show the last state."""
        self.handle.update(self)
