"""The `bertkit demo` command: the whole workflow on text that every Python contains."""

from __future__ import annotations

from pathlib import Path

from bertkit.console import Console
from bertkit.files import check_output


def demo_command(*, out: Path = Path("runs/demo")) -> int:
    """Pre-train and fine-tune a small BERT on the docstrings of Python and of installed packages.

    Nothing is downloaded. It takes minutes on two cores.

    Parameters
    ----------
    out
        The run directory, in which the report is report.html.
    """
    import torch

    from bertkit.demo import run_demo

    out = check_output(out, folder=True)
    torch.set_num_threads(1)  # the network is so small that threads mostly wait for each other
    with Console() as console:
        stopped = run_demo(out, console)
    return 0 if stopped is None else 128 + stopped
