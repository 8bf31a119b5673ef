"""Gather the results: cells next to the paper's values, and which findings hold (section 5)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bertkit.checkpoints.pretrained import model_name
from bertkit.config import as_json
from bertkit.files import read_json
from bertkit.finetuning.grid import RunResult, metric_spread
from bertkit.reproduce.experiments import BASE, PERPLEXITY, Cell, Experiment, variant_of
from bertkit.reproduce.paper import Claim, PaperTable
from bertkit.reproduce.run import Reproduction

LEARNED = 0.02
"""The margin over the majority baseline at which next-sentence prediction counts as learned."""


def gather_results(work: Reproduction, experiments: Sequence[Experiment]) -> dict[str, Any]:
    """Return the whole content of the rendered page as JSON values."""
    networks = {
        variant: network_facts(work, variant, flags)
        for experiment in experiments
        for variant, flags in experiment.variants.items()
    }
    remarks = list(work.scale.remarks)
    if work.scale.repeated:
        names = ", ".join(work.scale.repeated)
        said = f"The networks {names} are pre-trained once for each seed, all others once."
        remarks.append(said)
    return {
        "scale": as_json(work.scale),
        "remarks": remarks,
        "tables": [table_facts(work, experiment, networks) for experiment in experiments],
        "networks": networks,
    }


def network_facts(work: Reproduction, variant: str, flags: Sequence[str]) -> dict[str, Any]:
    """Return the facts about a network, including how far its pre-training has got."""
    given = work.given(variant)
    records = [] if given else work.journal(variant)  # a given model leaves it only to figure 5
    evaluations = [r for r in records if r["kind"] == "evaluation"]
    last: dict[str, Any] = evaluations[-1] if evaluations else {}
    kept = (
        *("mlm_loss", "mlm_perplexity", "lm_loss", "lm_perplexity"),
        *("nsp_accuracy", "nsp_majority"),
    )
    precisions = [str(r["precision"]) for r in records if "precision" in r]
    return {
        "model": model_name(given.resolve()) if given else "",
        "precision": " and ".join(dict.fromkeys(precisions)),
        "failure": work.failure(f"pre-train {variant}"),
        "flags": list(flags),
        "updates": max((r.get("step", 0) for r in records), default=0),
        "finished": not given and work.is_trained(variant),
        "held_out": {name: round(last[name], 4) for name in kept if last.get(name) is not None},
        "curve": [
            [r["step"], round(loss, 4)]
            for r in evaluations
            if (loss := r.get("mlm_loss", r.get("lm_loss"))) is not None  # NaN is null
        ],
    }


def table_facts(
    work: Reproduction, experiment: Experiment, networks: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the content of a table: its cells, and a verdict on each of the paper's claims."""
    paper = experiment.paper
    cells = [cell_facts(work, experiment, cell) for cell in experiment.cells]
    return {
        "key": paper.key,
        "name": paper.name,
        "title": paper.title,
        "section": paper.section,
        "remarks": [*paper.remarks, *paper.ours],
        "columns": experiment.columns,
        "rows": experiment.rows,
        "paper_columns": list(paper.columns),
        "paper_rows": {name: list(values) for name, values in paper.rows.items()},
        "cells": cells,
        "claims": judge_claims(paper, cells, networks),
    }


def judge_claims(
    paper: PaperTable, cells: Sequence[dict[str, Any]], networks: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Judge a table's claims by its cells and by whether the base network learned NSP."""
    own = [facts["held_out"] for name, facts in networks.items() if variant_of(name) == BASE]
    learned = all(
        found.get("nsp_accuracy", 1.0) - found.get("nsp_majority", 0.0) >= LEARNED for found in own
    )
    return [claim_facts(claim, cells, pairs_learned=learned) for claim in paper.claims]


def cell_facts(work: Reproduction, experiment: Experiment, cell: Cell) -> dict[str, Any]:
    """Return the content of a cell: what was run, and the value of each seed."""
    paper_column = cell.thousands or cell.column
    first = cell.jobs[0]
    model = work.given(first.variant, first.at)
    found: dict[str, Any] = {
        "row": cell.row,
        "column": cell.column,
        "task": first.task,
        "metric": cell.metric,
        "stands_in": cell.stands_in,
        "paper": None if cell.stands_in else experiment.paper.value(cell.row, paper_column),
        "values": [],
        "missing": "",
        "given": "" if model is None else model_name(model.resolve()),
    }
    if cell.metric == PERPLEXITY and found["given"]:
        found |= {"missing": f"{found['given']} was pre-trained elsewhere", "complete": False}
    elif cell.metric == PERPLEXITY:
        found["values"] = [v for job in cell.jobs for v in last_perplexity(work, job.variant)]
        found["complete"] = len(found["values"]) == len(cell.jobs)
    else:
        results = [result for job in cell.jobs for result in work.results(job)]
        split, _, metric = cell.metric.rpartition(" ")
        scored = [result for result in results if result.scores]
        kept = [result for result in scored if metric in scores_of(result, split)]
        found["values"] = [round(100 * scores_of(result, split)[metric], 2) for result in kept]
        found["complete"] = len(results) == work.scale.seeds
        found["degenerate"] = sum(bool(result.degenerate) for result in kept)
        if results and not kept:
            lacking = f"the data has no {split or metric}"
            found["missing"] = lacking if scored else "every run diverged"
        paths = [work.tuned(job) / "finetune.json" for job in cell.jobs]
        if there := [path for path in paths if path.is_file()]:
            found["inputs"] = read_json(there[0])["inputs"]
    if not found["values"]:
        own = cell.metric == PERPLEXITY
        reason = work.why_untrainable(first.variant) if own else work.why_unrunnable(first)
        found["missing"] = found["missing"] or reason or "not run"
    return found | spread(found["values"])


def last_perplexity(work: Reproduction, variant: str) -> list[float]:
    """Return [perplexity of held-out text at the end of pre-training], or [] before the end."""
    measured = [r for r in work.journal(variant) if r["kind"] == "evaluation"]
    if not measured or not work.is_trained(variant, own=True):
        return []
    return [round(measured[-1]["mlm_perplexity"], 4)]


def scores_of(result: RunResult, split: str) -> dict[str, float]:
    """Return the scores of a run on a split, or on the first one if `split` is empty."""
    return result.scores.get(split, {}) if split else next(iter(result.scores.values()))


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Return the number of values (n), and if there are any their median, range and deviation."""
    if not values:
        return {"n": 0}
    found = metric_spread(values)
    rounded = {name: None if v is None else round(v, 2) for name, v in found.items()}
    return {"n": len(values), **rounded, "lowest": found["lowest"], "highest": found["highest"]}


def claim_facts(
    claim: Claim, cells: Sequence[dict[str, Any]], *, pairs_learned: bool = True
) -> dict[str, Any]:
    """Judge whether a claim of the paper holds here.

    It holds, or is reversed, if the medians differ by more than the larger of the two standard
    deviations over seeds; otherwise it is not clear. There is no verdict before all seeds are
    done, with only one seed, or if every run of a row is degenerate.
    """
    facts: dict[str, Any] = {"text": claim.text, "column": claim.column, "argued": claim.argued}
    facts |= {"better": claim.better, "worse": claim.worse}
    ends = {}
    for axis in ("row", "column"):
        every = list(dict.fromkeys(cell[axis] for cell in cells))
        ends[axis] = {"first": every[0], "last": every[-1]}
    column = ends["column"].get(claim.column, claim.column)
    rows = [ends["row"].get(row, row) for row in (claim.better, claim.worse)]
    better, worse = (
        next((c for c in cells if (c["row"], c["column"]) == (row, column)), None) for row in rows
    )
    if better is None or worse is None or not better["n"] or not worse["n"]:
        return {**facts, "verdict": "not run"}
    facts["task"] = better["task"] if better["stands_in"] else ""
    if reason := withheld(claim, better, worse, pairs_learned=pairs_learned):
        return {**facts, "verdict": reason}
    difference = round(better["median"] - worse["median"], 2)
    if better["metric"] == PERPLEXITY:  # lower is better
        difference = -difference
        if min(better["n"], worse["n"]) == 1:
            verdict = "holds once" if difference > 0 else "reversed once"
            return {**facts, "verdict": verdict, "difference": difference}
    deviation = max(better["deviation"] or 0.0, worse["deviation"] or 0.0)
    verdict = "not clear" if abs(difference) <= deviation else "reversed"
    if difference > deviation:
        verdict = "holds"
    return {**facts, "verdict": verdict, "difference": difference, "deviation": deviation}


def withheld(
    claim: Claim, better: dict[str, Any], worse: dict[str, Any], *, pairs_learned: bool
) -> str:
    """Return why two cells of a table cannot be compared, or "" if they can."""
    if bool(better["given"]) != bool(worse["given"]):
        return "not comparable"
    perplexity = better["metric"] == PERPLEXITY
    fewest = 1 if perplexity else 2
    if not (better["complete"] and worse["complete"]) or min(better["n"], worse["n"]) < fewest:
        return "too few seeds"
    if perplexity:
        return ""
    if claim.needs_pairs and not pairs_learned:
        return "not learned"
    idle = any(cell.get("degenerate") == cell["n"] for cell in (better, worse))
    return "degenerate" if idle else ""
