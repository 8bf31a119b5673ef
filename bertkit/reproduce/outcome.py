"""What came out: every cell beside the paper's value, and whether the paper's orders hold."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from bertkit.files import read_json
from bertkit.reproduce.paper import Claim
from bertkit.reproduce.tables import PERPLEXITY, Cell, Experiment
from bertkit.reproduce.work import Work
from bertkit.tasks.grid import RunResult


def gather(work: Work, experiments: Sequence[Experiment]) -> dict[str, Any]:
    """Everything that the rendered page says, as JSON values.

    Args:
        work: the folder.
        experiments: the tables; what is not done of them is said to be so.
    """
    networks: dict[str, Any] = {}
    for experiment in experiments:
        for variant, flags in experiment.variants.items():
            networks[variant] = network_facts(work, variant, flags)
    return {
        "scale": {"name": work.scale.name, "title": work.scale.title, "seeds": work.scale.seeds},
        "tables": [table_facts(work, experiment) for experiment in experiments],
        "networks": networks,
    }


def network_facts(work: Work, variant: str, flags: Sequence[str]) -> dict[str, Any]:
    """What a network is, and how far its pre-training came."""
    records = work.journal(variant)
    evaluations = [r for r in records if r["kind"] == "evaluation"]
    last: dict[str, Any] = evaluations[-1] if evaluations else {}
    kept = ("mlm_loss", "mlm_perplexity", "lm_loss", "lm_perplexity", "nsp_accuracy")
    ends: list[Any] = [r for r in records if r["kind"] == "end"]
    return {
        "flags": list(flags),
        "updates": max((int(str(r.get("step", 0))) for r in records), default=0),
        "finished": work.is_trained(variant),
        "minutes": round(sum(end.get("seconds", 0.0) for end in ends) / 60, 1),
        "held_out": {name: round(last[name], 4) for name in kept if name in last},
        "curve": [
            [r["step"], round(float(str(r.get("mlm_loss", r.get("lm_loss")))), 4)]
            for r in evaluations
        ],
    }


def table_facts(work: Work, experiment: Experiment) -> dict[str, Any]:
    """A table: cells, and what became of the paper's claims."""
    paper = experiment.paper
    cells = [cell_facts(work, experiment, cell) for cell in experiment.cells]
    return {
        "key": paper.key,
        "name": paper.name,
        "title": paper.title,
        "section": paper.section,
        "remarks": list(paper.remarks),
        "columns": experiment.columns,
        "rows": experiment.rows,
        "paper_columns": list(paper.columns),
        "paper_rows": {name: list(values) for name, values in paper.rows.items()},
        "cells": cells,
        "claims": [claim_facts(claim, cells) for claim in paper.claims],
    }


def cell_facts(work: Work, experiment: Experiment, cell: Cell) -> dict[str, Any]:
    """A cell: what was run and the values of its seeds."""
    found: dict[str, Any] = {
        "row": cell.row,
        "column": cell.column,
        "task": cell.job.task,
        "metric": cell.metric,
        "paper": experiment.paper.value(cell.row, cell.column),
        "values": [],
        "missing": "",
    }
    if cell.metric == PERPLEXITY:
        held_out = network_facts(work, cell.job.variant, ())["held_out"]
        found["values"] = [held_out["mlm_perplexity"]] if "mlm_perplexity" in held_out else []
        found["paper"] = experiment.paper.value(cell.row, cell.column)
    else:
        results = work.results(cell.job)
        found["values"] = [value_of(result, cell.metric) for result in results if result.scores]
        found["degenerate"] = sum(bool(result.degenerate) for result in results)
        path = work.tuned(cell.job) / "finetune.json"
        if path.is_file():
            settings = read_json(path)
            found["inputs"] = settings["inputs"]
    if not found["values"]:
        found["missing"] = work.absence(cell.job) or "not run"
    return found | spread(found["values"])


def value_of(result: RunResult, metric: str) -> float:
    """A score in percent; "SPLIT METRIC" of another split than the first."""
    split, _, name = metric.rpartition(" ")
    scores = result.scores.get(split) if split else next(iter(result.scores.values()))
    return round(100 * (scores or {})[name], 2)


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Number, median and range."""
    if not values:
        return {"n": 0}
    return {
        "n": len(values),
        "median": round(statistics.median(values), 2),
        "lowest": min(values),
        "highest": max(values),
        "deviation": round(statistics.stdev(values), 2) if len(values) > 1 else None,
    }


def claim_facts(claim: Claim, cells: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Whether an order of the paper is found here.

    It holds, or is reversed, where the difference of the medians is above the larger standard
    deviation of the two over seeds; else it is not clear.
    """
    facts: dict[str, Any] = {"text": claim.text, "column": claim.column}
    facts |= {"better": claim.better, "worse": claim.worse}
    columns = list(dict.fromkeys(cell["column"] for cell in cells))
    column = {"first": columns[0], "last": columns[-1]}.get(claim.column, claim.column)
    pair = [
        next((c for c in cells if (c["row"], c["column"]) == (row, column)), None)
        for row in (claim.better, claim.worse)
    ]
    better, worse = pair
    if better is None or worse is None or not better["n"] or not worse["n"]:
        return {**facts, "verdict": "not run"}
    difference = round(better["median"] - worse["median"], 2)
    deviation = max(better["deviation"] or 0.0, worse["deviation"] or 0.0)
    verdict = "not clear" if abs(difference) <= deviation else "reversed"
    if difference > deviation:
        verdict = "holds"
    return {**facts, "verdict": verdict, "difference": difference, "deviation": deviation}
