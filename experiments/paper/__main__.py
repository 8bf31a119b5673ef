"""Run tables of the paper: `python -m experiments.paper TABLE --scale tiny --data DATA --out OUT`.

DATA holds the labelled data (see `data.py`) and, unless --text names it, a folder `text` to
pre-train on. Each run writes its scores to OUT/runs and is skipped if they exist, so the same
command resumes. OUT gets TABLE.json and TABLE.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import bertkit
from experiments.paper.data import MissingDataError, stand_in
from experiments.paper.runs import Study, do_run
from experiments.paper.tables import PAPER, TABLES, cells, read_scale


def arguments() -> argparse.Namespace:
    """Return the arguments of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.paper",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("tables", nargs="+", choices=[*TABLES, "all"], metavar="TABLE")
    parser.add_argument("--scale", default="tiny", help="tiny, small, base, large, or FILE.toml")
    parser.add_argument("--text", nargs="+", help="text to pre-train on; default: DATA/text")
    parser.add_argument("--data", type=Path, required=True, help="the folder of labelled data")
    parser.add_argument("--out", type=Path, required=True, help="the folder of results")
    parser.add_argument("--model", type=Path, help="a model instead of the scale's plain network")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N or mps")
    parser.add_argument("--plan", action="store_true", help="only list the runs")
    return parser.parse_args()


def run_table(study: Study, table: str) -> dict[str, Any]:
    """Run a table; return its values by row, column and seed, and why cells are empty."""
    rows: dict[str, dict[str, list[float]]] = {}
    missing: dict[str, str] = {}
    stand_ins: dict[str, str] = {}
    for cell in cells(table, study.scale):
        values = rows.setdefault(cell.row, {}).setdefault(cell.column, [])
        for seed in range(1, study.scale.seeds + 1):
            try:
                result = do_run(study, cell.run, seed)
            except MissingDataError as error:
                missing[cell.run.task] = str(error)
                break
            if "failed" in result:
                missing[f"{cell.run.name}, seed {seed}"] = result["failed"]
                continue
            if other := stand_in(cell.run.task, study.data):
                stand_ins[cell.run.task] = other
            factor = 1 if cell.metric == "perplexity" else 100
            values.append(round(factor * result["scores"][cell.split][cell.metric], 2))
    return {
        "table": table,
        "scale": study.scale.name,
        "rows": rows,
        "stand_ins": stand_ins,
        "missing": missing,
    }


def markdown(results: dict[str, Any]) -> str:
    """Return a page with the paper's rows and ours, which are medians with the range of seeds."""
    paper = PAPER[results["table"]]
    columns = list(dict.fromkeys([*paper["columns"], *next(iter(results["rows"].values()))]))
    lines = [
        f"# {results['table'].replace('-', ' ').capitalize()}: {paper['title']}",
        "",
        f"Section {paper['section']} of the paper; scale `{results['scale']}`.",
        "",
        *[f"- {remark}" for remark in paper["remarks"]],
        "",
        f"| row | from | {' | '.join(columns)} |",
        f"|---|---|{'--:|' * len(columns)}",
    ]
    for row in dict.fromkeys([*paper["rows"], *results["rows"]]):
        if row in paper["rows"]:
            values = dict(zip(paper["columns"], paper["rows"][row], strict=True))
            lines.append(table_line(row, "paper", [str(values.get(c, "")) for c in columns]))
        if row in results["rows"]:
            measured = results["rows"][row]
            lines.append(table_line(row, "here", [summary(measured.get(c, [])) for c in columns]))
    lines += ["", *[f"- {task} here: {other}" for task, other in results["stand_ins"].items()]]
    lines += [f"- Not run: {name} ({why})" for name, why in results["missing"].items()]
    return "\n".join(lines).rstrip() + "\n"


def table_line(row: str, source: str, values: list[str]) -> str:
    """Return a row of a Markdown table."""
    return f"| {row} | {source} | {' | '.join(values)} |"


def summary(values: list[float]) -> str:
    """Return the median of some seeds, with their range if there are several."""
    if not values:
        return ""
    spread = f" ({min(values):.1f} to {max(values):.1f})" if len(values) > 1 else ""
    return f"{statistics.median(values):.1f}{spread}"


def main() -> None:
    """Run the tables of the command line."""
    options = arguments()
    text = tuple(options.text or [str(options.data / "text")])
    scale = read_scale(options.scale)
    study = Study(options.out, scale, text, options.data, options.model, options.device)
    for table in TABLES if "all" in options.tables else options.tables:
        if options.plan:
            names = dict.fromkeys(cell.run.name for cell in cells(table, scale))
            print(f"{table}, {scale.seeds} seeds each: {', '.join(names)}")
            continue
        results = run_table(study, table)
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / f"{table}.json").write_text(json.dumps(results, indent=1) + "\n")
        page = options.out / f"{table}.md"
        page.write_text(markdown(results), encoding="utf-8")
        print(page)


if __name__ == "__main__":
    try:
        main()
    except bertkit.BertkitError as error:
        raise SystemExit(f"error: {error}") from None
