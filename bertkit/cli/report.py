"""The `bertkit report` command: show a run directory as one HTML page."""

from __future__ import annotations

from pathlib import Path

from bertkit.report.pretraining import write_report


def report_command(run: Path) -> None:
    """Write a run's report as one self-contained HTML page with plots.

    Parameters
    ----------
    run
        The folder of a pre-training run or a fine-tuning, finished or still running.
    """
    print(f"report: {write_report(run)}")  # noqa: T201
