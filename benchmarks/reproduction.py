"""The paper's tables at a scale: from the folder of `bertkit reproduce` to a results file.

    bertkit reproduce all --scale small --text CORPUS --data DATA --out runs/paper
    python -m benchmarks.reproduction --work runs/paper

The first takes hours, may be stopped and goes on; the second takes seconds and may be repeated.
With --add, the results file keeps what it has, except for cells of fewer seeds, and the folder
fills what it lacks, so that several machines may each run a part; the file says what came from
where. A network that both have trained is shown as the file has it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from bertkit.reproduce.outcome import judge_claims
from bertkit.reproduce.paper import paper_tables

from benchmarks.record import ROOT, circumstances, write_result
from bertkit.files import read_json

Outcome = dict[str, Any]
"""The value that `bertkit.reproduce.outcome.gather_results` returns."""


def rows_of(outcome: Outcome) -> dict[str, Any]:
    """Return a row for each cell that was run."""
    return {
        f"{table['name']}, {cell['row']}, {cell['column']}": {
            name: cell[name] for name in ("task", "metric", "paper", "n", "median")
        }
        for table in outcome["tables"]
        for cell in table["cells"]
        if cell["n"]
    }


def added(before: Outcome, found: Outcome) -> tuple[Outcome, list[str]]:
    """Add to an outcome the cells, networks and tables of another one that it lacks.

    Returns:
        The outcome, its claims judged anew, and the cells that were added.

    Raises:
        ValueError: the two are of different scales.
    """
    both = set.intersection(*({one["key"] for one in side["tables"]} for side in (before, found)))
    for name in (before["scale"].keys() & found["scale"].keys()) - {"title", "remarks"}:
        one, other = before["scale"][name], found["scale"][name]
        if name == "bases":  # the sizes of the networks of some tables
            one, other = ({k: v for k, v in side.items() if k in both} for side in (one, other))
        if one != other:
            raise ValueError(f"the scales differ in {name}: {one} and {other}")
    networks = found["networks"] | {
        name: facts
        for name, facts in before["networks"].items()
        if facts["finished"] or not found["networks"].get(name, {}).get("finished")
    }
    old, new = ({table["key"]: table for table in side["tables"]} for side in (before, found))
    tables, names = [], []
    for key, paper in paper_tables().items():
        if key not in old and key not in new:
            continue
        table = new.get(key) or old[key]
        there = {(c["row"], c["column"]): c for c in old[key]["cells"]} if key in old else {}
        cells = []
        for cell in table["cells"]:
            kept = there.get((cell["row"], cell["column"]))
            if kept and kept["n"] >= cell["n"]:
                cells.append({**kept, "paper": cell["paper"]})
                continue
            cells.append(cell)
            if cell["n"]:
                names.append(f"{paper.name}, {cell['row']}, {cell['column']}")
        claims = judge_claims(paper, cells, networks)
        tables.append({**table, "cells": cells, "claims": claims})
    return {**found, "tables": tables, "networks": networks}, names


def main() -> None:
    """Write results/reproduction.json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=Path("runs/paper"))
    parser.add_argument("--name", default="reproduction", help="of the results file")
    parser.add_argument("--tables", nargs="*", help="keys such as table-7; all where not given")
    parser.add_argument("--add", action="store_true", help="fill what the results file lacks")
    arguments = parser.parse_args()
    outcome: Outcome = read_json(arguments.work / "reproduction.json")
    if arguments.tables:
        outcome["tables"] = [t for t in outcome["tables"] if t["key"] in arguments.tables]
    parts: list[Any] = []
    if arguments.add:
        before = read_json(ROOT / "results" / f"{arguments.name}.json")
        try:
            outcome, names = added(before["outcome"], outcome)
        except ValueError as error:
            sys.exit(f"error: {error}; leave out --add, or give another --name")
        rest = {**{name: before[name] for name in ("date", "commit", "cpu")}, "cells": "the others"}
        parts = before.get("parts") or [rest]
        if names:
            parts.append({**circumstances(), "cells": names})
    details = {"outcome": outcome, "parts": parts}
    print(write_result(arguments.name, rows_of(outcome), details))


if __name__ == "__main__":
    main()
