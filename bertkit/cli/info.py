"""The command `bertkit info`, which says what a model is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import rich.console
from rich.markup import escape
from rich.table import Table

from bertkit.cli.options import AnyModel
from bertkit.files import check_output, write_json
from bertkit.predict.load import model_info

MAX_SHOWN = 20


def info_command(model: AnyModel, *, json: Path | None = None) -> None:
    """Show what a model is: its task, labels, network, vocabulary, size and origin.

    Parameters
    ----------
    json
        The file for the same facts as JSON.
    """
    facts = model_info(model)
    table = Table("", "", show_header=False, box=None)
    for name, value in facts.items():
        if value not in (None, "", [], {}):
            table.add_row(name.replace("_", " "), escape(shown(value)))
    rich.console.Console().print(table)
    if json is not None:
        write_json(check_output(json), facts)


def shown(value: Any) -> str:
    """Return a fact as one line of text."""
    if isinstance(value, dict):
        return ", ".join(
            f"{name.replace('_', ' ')} {shown(one)}"
            for name, one in value.items()
            if one not in (None, "", [])
        )
    if isinstance(value, list | tuple):
        more = f", and {len(value) - MAX_SHOWN} more" if len(value) > MAX_SHOWN else ""
        return ", ".join(map(str, value[:MAX_SHOWN])) + more
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return value if isinstance(value, str) else json.dumps(value)
