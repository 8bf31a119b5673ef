"""`bertkit demo`: the whole story on text that every Python has."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from bertkit.config import refuse_foreign
from bertkit.demo.run import run_demo
from bertkit.outputs import FOLDER
from bertkit.training.journal import Console


def demo_command(*, out: Annotated[Path, FOLDER] = Path("runs/demo")) -> int:
    """Pre-train and tune a small BERT on text that every Python has.

    No download: the text is the documentation inside this Python. A few minutes on two cores.

    Parameters
    ----------
    out
        The run directory; the report is its report.html.
    """
    refuse_foreign(out / "recipe.json", "a run")
    with Console() as console:
        stopped = run_demo(out, console)
    return 0 if stopped is None else 128 + stopped
