"""The paper's tables at a scale: from the folder of `bertkit reproduce` to a results file.

    bertkit reproduce all --scale small --text CORPUS --data DATA --out runs/paper
    python -m benchmarks.reproduction --work runs/paper

The first takes hours, may be stopped and goes on; the second takes seconds and may be repeated.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from benchmarks.record import write_result
from bertkit.files import read_json


def rows_of(outcome: dict[str, Any]) -> dict[str, Any]:
    """A row for each cell that was run."""
    return {
        f"{table['name']}, {cell['row']}, {cell['column']}": {
            name: cell[name] for name in ("task", "metric", "paper", "n", "median")
        }
        for table in outcome["tables"]
        for cell in table["cells"]
        if cell["n"]
    }


def main() -> None:
    """Write results/reproduction.json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=Path("runs/paper"))
    parser.add_argument("--name", default="reproduction", help="of the results file")
    arguments = parser.parse_args()
    outcome = read_json(arguments.work / "reproduction.json")
    print(write_result(arguments.name, rows_of(outcome), {"outcome": outcome}))


if __name__ == "__main__":
    main()
