"""The `bertkit reproduce` command: run the paper's tables and figure at any scale."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import bertkit
from bertkit.cli.options import Device
from bertkit.config import FLATTEN
from bertkit.outputs import FOLDER, NAMED
from bertkit.reproduce.paper import NO_SOURCES, Sources


def reproduce_command(
    *tables: str,
    out: Annotated[Path, FOLDER],
    scale: Annotated[str | None, NAMED] = None,
    sources: Annotated[Sources, FLATTEN] = NO_SOURCES,
    device: Device = "auto",
    plan: bool = False,
    render: bool = False,
) -> int:
    """Run the experiments of the paper's tables 1 to 8 and figure 5 at a chosen scale.

    The page shows the results next to the paper's. The command first prints what it will run. The
    same command resumes a stopped reproduction, and several processes with the same command share
    the work. Cells without results are shown as not run.

    Parameters
    ----------
    tables
        The tables to run: table-1 to table-8, figure-5, or all.
    out
        The folder for networks, fine-tuning results and the rendered tables.
    scale
        The scale: tiny (minutes on two cores), small (hours on two cores), base or large (those of
        the paper), or a .toml file. By default it is the scale recorded in the folder, else small.
    plan
        Only print what would be run.
    render
        Only render the results that exist.
    """
    stopped_by = bertkit.reproduce_tables(
        *(tables, out), scale=scale, sources=sources, device=device, plan=plan, render=render
    )
    return 128 + stopped_by if stopped_by else 0
