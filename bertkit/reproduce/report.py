"""Render the tables as Markdown for the docs and as one HTML page."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from bertkit.report.html import render_page
from bertkit.report.plots import HELD_OUT, TRAINING, render_svg
from bertkit.reproduce.experiments import PERPLEXITY

VERDICTS = {
    "holds": "as in the paper",
    "reversed": "the opposite",
    "not clear": "not clear: the seeds differ more than the rows",
    "holds once": "as in the paper, with a single network",
    "reversed once": "the opposite, with a single network",
    "not comparable": "no verdict: one of the two is a given model, trained differently",
    "not learned": "no verdict: next-sentence prediction was not learned",
    "degenerate": "no verdict: every run of one row is degenerate",
    "too few seeds": "no verdict yet: too few seeds are done",
    "not run": "not run",
}
NOTHING = "–"


def as_markdown(outcome: dict[str, Any], level: int = 2) -> str:
    """Return all tables as Markdown."""
    mark, scale = "#" * level, outcome["scale"]
    lines = [f"Scale: {scale['title']}; {scale['seeds']} seeds per fine-tuning job.", ""]
    lines += [*outcome["remarks"], ""] if outcome["remarks"] else []
    for found in outcome["tables"]:
        lines += [f"{mark} {table_heading(found)}", "", table_summary(found), ""]
        lines += markdown_table(*table_body(found))
        if claims := claim_rows(found):
            lines += ["", *markdown_table(CLAIM_COLUMNS, claims)]
        lines += ["", *(f"- {remark}" for remark in table_notes(found)), ""]
    lines += [f"{mark} The networks", ""]
    lines += markdown_table(*network_table(outcome["networks"]))
    return "\n".join(lines) + "\n"


def as_page(outcome: dict[str, Any]) -> str:
    """Return all tables, and a drawing of figure 5, as one HTML page."""
    tables = []
    for found in outcome["tables"]:
        columns, rows = table_body(found)
        is_drawn = found["key"] == "figure-5" and any(cell["n"] for cell in found["cells"])
        tables.append(
            {
                "heading": table_heading(found),
                "summary": table_summary(found),
                "drawing": curves(found) if is_drawn else "",
                "columns": columns,
                "rows": [[cell.replace("**", "") for cell in row] for row in rows],
                "claims": claim_rows(found),
                "notes": table_notes(found),
            }
        )
    return render_page(
        "reproduction.html",
        title="The paper's tables, reproduced",
        scale=outcome["scale"],
        remarks=outcome["remarks"],
        tables=tables,
        claim_columns=CLAIM_COLUMNS,
        networks=network_table(outcome["networks"]),
    )


def table_heading(found: dict[str, Any]) -> str:
    """Return the heading of a table."""
    return f"{found['name']}: {found['title']} (paper section {found['section']})"


def table_summary(found: dict[str, Any]) -> str:
    """Return a sentence that says how many cells of a table were run."""
    run = sum(bool(cell["n"]) for cell in found["cells"])
    return f"{run} of {len(found['cells'])} cells were run." if run else "Not run."


def table_body(found: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return the column names and rows, whose cells show our value and the paper's.

    The paper's rows that we did not run, and all those of figure 5, follow as separate rows.
    """
    columns = ["", *(table_column_name(found, column) for column in found["columns"])]
    by_place = {(cell["row"], cell["column"]): cell for cell in found["cells"]}
    rows = []
    for row in found["rows"]:
        cells = [by_place.get((row, column)) for column in found["columns"]]
        rows.append([row, *(format_cell(cell) for cell in cells)])
    others = [name for name in found["paper_rows"] if name not in found["rows"]]
    if found["columns"] == found["paper_columns"]:
        for name in others:
            rows.append([f"paper: {name}", *(f"{v:g}" for v in found["paper_rows"][name])])
    else:
        own = found["key"] == "figure-5"
        for name in found["paper_rows"] if own else others:
            points = zip(found["paper_columns"], found["paper_rows"][name], strict=True)
            said = ", ".join(f"{column}: {value:g}" for column, value in points)
            rows.append([f"paper: {name}", said, *[""] * (len(found["columns"]) - 1)])
    return columns, rows


def table_column_name(found: dict[str, Any], column: str) -> str:
    """Return the heading of a column: the paper's name with the metric and any stand-in task."""
    task, metric, stands_in = next(
        (cell["task"], cell["metric"], cell["stands_in"])
        for cell in found["cells"]
        if cell["column"] == column
    )
    if found["key"] == "figure-5":
        return f"{column} updates ({task})"
    if stands_in:
        return f"{column} (here: {task}, {metric})"
    metric = metric.replace("_", " ")
    return column if metric in column else f"{column}, {metric}"


def format_cell(cell: dict[str, Any] | None) -> str:
    """Format a cell: our median with its range and number of seeds, and the paper's value."""
    if cell is None:
        return NOTHING
    paper = "" if cell["paper"] is None else f"; paper {cell['paper']:g}"
    if not cell["n"]:
        return f"{'diverged' if 'diverged' in cell['missing'] else 'not run'}{paper}"
    digits = 2 if cell["metric"] == PERPLEXITY else 1
    spread = ""
    if cell["n"] > 1:
        range_ = f"{cell['lowest']:.{digits}f} to {cell['highest']:.{digits}f}"
        spread = f" ({range_}, n={cell['n']})"
    flag = f", {cell['degenerate']} degenerate" if cell.get("degenerate") else ""
    flag += "" if cell["complete"] else ", unfinished"
    return f"**{cell['median']:.{digits}f}**{spread}{flag}{paper}"


CLAIM_COLUMNS = ["the paper", "in", "here", "difference", "deviation over seeds"]


def claim_rows(found: dict[str, Any]) -> list[list[str]]:
    """Return a row for each of the paper's claims, with the columns of `CLAIM_COLUMNS`."""
    return [
        [
            f"{'argues' if claim['argued'] else 'finds'}: {claim['text']}",
            f"{claim['column']} (here: {claim['task']})" if claim.get("task") else claim["column"],
            VERDICTS[claim["verdict"]],
            f"{claim['difference']:+.1f}" if "difference" in claim else NOTHING,
            f"{claim['deviation']:.1f}" if "deviation" in claim else NOTHING,
        ]
        for claim in found["claims"]
    ]


def table_notes(found: dict[str, Any]) -> list[str]:
    """Return the remarks below a table, including what is missing and why."""
    notes = list(found["remarks"])
    tasks = {cell["task"] for cell in found["cells"]}
    if "squad-sentences" in tasks:
        notes.append(
            "squad-sentences stands in for a task whose data is missing: given a question and a "
            "sentence of its paragraph in SQuAD, does the sentence contain the answer? QNLI is "
            "made from SQuAD in the same way."
        )
    for task in sorted(tasks - {""}):
        own = [
            cell["inputs"] for cell in found["cells"] if cell["task"] == task and "inputs" in cell
        ]
        if own:
            amounts = ", ".join(f"{name} {count:,}" for name, count in own[0].items())
            notes.append(f"{task}: {amounts} inputs.")
    for name in sorted({cell.get("given", "") for cell in found["cells"]} - {""}):
        rows = dict.fromkeys(cell["row"] for cell in found["cells"] if cell["given"])
        notes.append(f"The given model {name} replaces the scale's network in: {'; '.join(rows)}.")
    reasons = {cell["missing"] for cell in found["cells"]} - {"", "not run"}
    return [*notes, *(f"Not run: {reason}." for reason in sorted(reasons))]


def network_table(networks: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return the columns and rows of the table of networks."""
    rows = []
    for name, facts in networks.items():
        held_out = facts["held_out"]
        said = ", ".join(f"{key.replace('_', ' ')} {value:g}" for key, value in held_out.items())
        done = f"{facts['updates']:,}" + ("" if facts["finished"] else ", unfinished")
        done = f"given: {facts['model']}" if facts["model"] else facts["failure"] or done
        flags = " ".join(facts["flags"]) or NOTHING
        rows.append([name, flags, done, facts.get("precision") or NOTHING, said or NOTHING])
    return ["network", "flags added to the scale's", "updates", "precision", "held out"], rows


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]


def cells_of(found: dict[str, Any], row: str) -> list[dict[str, Any]]:
    """Return the cells of a table's row that were run."""
    return [cell for cell in found["cells"] if cell["row"] == row and cell["n"]]


def plot_scores(axes: Any, found: dict[str, Any], colours: Sequence[str]) -> None:
    """Draw figure 5 into axes: score against updates, with a line and a range for each row."""
    for row, colour in zip(found["rows"], colours, strict=True):
        cells = cells_of(found, row)
        steps = [int(cell["column"].replace(",", "")) for cell in cells]
        low, middle, high = ([c[key] for c in cells] for key in ("lowest", "median", "highest"))
        axes.fill_between(steps, low, high, color=colour, alpha=0.2, linewidth=0)
        axes.plot(steps, middle, "o-", color=colour, label=row, markersize=4)
    axes.set_xlabel("updates of pre-training")
    first = found["cells"][0]
    axes.set_ylabel(f"{first['task']}, {first['metric']}, %")
    axes.legend(frameon=False, fontsize=9)


def curves(found: dict[str, Any]) -> str:
    """Draw figure 5 as an SVG element, with a logarithmic scale of updates."""

    def paint(axes: Any) -> None:
        plot_scores(axes, found, (TRAINING, HELD_OUT))
        axes.set_xscale("log")

    lines = [(row, cells_of(found, row)) for row in found["rows"]]
    words = "; ".join(
        f"{row}: " + ", ".join(f"{cell['median']:.1f} after {cell['column']}" for cell in cells)
        for row, cells in lines
    )
    prefix = hashlib.sha256(words.encode()).hexdigest()[:8]
    return render_svg(paint, f"figure-{prefix}-", words)
