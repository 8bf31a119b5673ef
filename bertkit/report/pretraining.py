"""The report of a run: one self-contained HTML page. This module makes that of a pre-training run.

Its numbers come from `journal.jsonl`; the page of a fine-tuning is made in `finetuning.py`.
"""

from __future__ import annotations

import math
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from bertkit.errors import BertkitError
from bertkit.files import from_home, read_optional, write_text
from bertkit.progress import JOURNAL, read_journal
from bertkit.report.findings import run_findings
from bertkit.report.page import (
    Plot,
    curve,
    draw_plot,
    field_title,
    flatten_fields,
    format_number,
    render_page,
)

UNIGRAM = (("guessing by frequency (unigram entropy)", "unigram_entropy"),)
MOST_FREQUENT = (("always the most frequent token", "most_frequent_accuracy"),)
COIN = (("a coin (ln 2)", math.log(2)),)
MAJORITY = (("always the more frequent answer", "nsp_majority"),)
PLOTS = (
    Plot("Masked language model: loss", "mlm_loss", baselines=UNIGRAM),
    Plot("Masked language model: accuracy", "mlm_accuracy", "share", MOST_FREQUENT),
    Plot("Language model: loss", "lm_loss", baselines=UNIGRAM),
    Plot("Language model: accuracy", "lm_accuracy", "share", MOST_FREQUENT),
    Plot("Replaced tokens: loss", "rtd_loss", baselines=(("by their final share", "rtd_entropy"),)),
    Plot(
        "Replaced tokens: accuracy",
        "rtd_accuracy",
        "share",
        (("always the more frequent answer", "rtd_majority"),),
    ),
    Plot("Next sentence: loss", "nsp_loss", baselines=COIN),
    Plot("Next sentence: accuracy", "nsp_accuracy", "share", MAJORITY),
    Plot("Sentence order: loss", "sop_loss", baselines=COIN),
    Plot("Sentence order: accuracy", "sop_accuracy", "share", MAJORITY),
    Plot("Learning rate", "learning_rate", "power"),
    Plot("Gradient norm before clipping", "gradient_norm"),
    Plot("Tokens per second", "tokens_per_second"),
)
SCORES = 10
"""The first plots are of losses and accuracies, whose last values are the run's scores."""


def write_report(run: Path | str) -> Path:
    """Write `report.html` into the folder of a pre-training or fine-tuning run.

    A pre-training run may still be training. The same files give the same page, byte for byte.

    Args:
        run: the run directory.

    Returns:
        The path of the page.

    Raises:
        BertkitError: the folder holds no run, a file is damaged, or there is nothing to show yet.
    """
    run = Path(from_home(run))
    if (run / "finetune.json").is_file():
        from bertkit.report.finetuning import finetuning_page  # imports torch

        text = finetuning_page(run)
    elif (run / JOURNAL).is_file():
        text = pretraining_page(run, read_journal(run / JOURNAL))
    else:
        raise BertkitError(
            f"{run} has neither {JOURNAL} nor finetune.json; give the folder of a run"
        )
    path = run / "report.html"
    write_text(path, text)
    return path


def pretraining_page(run: Path, records: list[dict[str, Any]]) -> str:
    """Return the page of a pre-training run.

    Beside the journal, it shows `recipe.json`, `environment.json`, `corpus.json` and the sections
    of `demo.json` ({"sections": [{"title", "paragraphs", "table": {"columns", "rows"}}]}).
    """
    kinds: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        kinds.setdefault(record["kind"], []).append(record)
    steps, evaluations = kinds.get("step", []), kinds.get("evaluation", [])
    if not steps and not evaluations:
        raise BertkitError(f"{run / JOURNAL} has no training steps yet; wait for the first")
    start = kinds.get("start", [{}])[-1]
    final = (evaluations or steps)[-1]
    baselines = {**(start.get("baselines") or {}), **blind_replaced(final.get("rtd_share"))}
    last_step = max(record["step"] for record in steps + evaluations)
    changes = [change for change in phase_changes(start) if change[0] < last_step]
    drawings = []
    for plot in PLOTS:
        training, held_out = curve(steps, plot.field), curve(evaluations, plot.field)
        if len(training.values) or len(held_out.values):
            known = known_baselines(plot, baselines)
            svg = draw_plot(plot, training, held_out, baselines=known, changes=changes)
            drawings.append((plot.title, svg))
    name = str(start.get("recipe_name") or run.resolve().name)
    where = "on held-out text" if evaluations else "on the training text (nothing is held out)"
    return render_page(
        "pretraining.html",
        title=f"{name}: bertkit report",
        name=name,
        state=f"{run_state(records, start, last_step)} Scores are {where}.",
        scores=(["score", "value", "baseline"], scores_rows(steps, final, baselines)),
        findings=run_findings(run, records),
        sections=read_optional(run / "demo.json").get("sections", []),
        drawings=drawings,
        tables=[table for table in record_tables(run, kinds, start) if table[2]],
    )


def run_state(records: list[dict[str, Any]], start: dict[str, Any], step: int) -> str:
    """Describe the progress of the run in a sentence."""
    ended = records[-1].get("reason", "") if records[-1]["kind"] == "end" else ""
    total = start.get("steps_total")
    of_total = f" of {total:,}" if isinstance(total, int) else ""
    resumed = sum(record["kind"] == "start" for record in records) - 1
    again = f"; resumed {resumed} time{'s' * (resumed > 1)}" if resumed > 0 else ""
    return f"{step:,}{of_total} updates: {ended or 'still running, or killed'}{again}."


def scores_rows(
    steps: list[dict[str, Any]], final: dict[str, Any], baselines: dict[str, float]
) -> list[list[str]]:
    """Return the last scores of a run beside what needs no learning, and its median speed."""
    rows = []
    for plot in PLOTS[:SCORES]:
        if final.get(plot.field) is not None:
            known = known_baselines(plot, baselines)
            beside = ", ".join(f"{label} {format_number(v, plot.kind)}" for label, v in known)
            rows.append([plot.title, format_number(final[plot.field], plot.kind), beside])
    if len(numbers := curve(steps, "tokens_per_second").values):
        rows.append(["tokens/s, median", format_number(float(np.median(numbers)), ""), ""])
    return rows


def known_baselines(plot: Plot, baselines: dict[str, float]) -> list[tuple[str, float]]:
    """Return the (label, value) of a plot's baselines that are known."""
    named = [(label, baselines.get(v) if isinstance(v, str) else v) for label, v in plot.baselines]
    return [(label, float(value)) for label, value in named if value is not None]


def blind_replaced(share: float | None) -> dict[str, float]:
    """Return the loss and the accuracy on replaced tokens that need no look at the text."""
    if share is None:
        return {}
    loss = -sum(p * math.log(p) for p in (share, 1 - share) if p > 0)
    return {"rtd_entropy": loss, "rtd_majority": max(share, 1 - share)}


def phase_changes(start: dict[str, Any]) -> list[tuple[int, str]]:
    """Return (step, label) of each change of phase."""
    phases = start.get("phases") or []
    ends = accumulate(phase["steps"] for phase in phases)
    return [
        (step, f"length {phase['length']}") for step, phase in zip(ends, phases[1:], strict=False)
    ]


def record_tables(
    run: Path, kinds: dict[str, list[dict[str, Any]]], start: dict[str, Any]
) -> list[tuple[str, list[str], list[list[Any]]]]:
    """Return tables of everything else that is known about the run, as (title, columns, rows)."""
    evaluations = kinds.get("evaluation", [])
    names = {name for record in evaluations for name in record}
    fields = [plot.field for plot in PLOTS[:SCORES] if plot.field in names]
    tables = []
    for title, kind, columns in (
        ("Held-out measurements", "evaluation", ["step", *fields]),
        ("Checkpoints", "checkpoint", ["step", "path", "seconds"]),
        ("Notes", "note", ["step", "message"]),
    ):
        rows = [[record.get(column) for column in columns] for record in kinds.get(kind, [])]
        tables.append((title, [field_title(name) for name in columns], rows))
    facts = {"Before the first update": {k: v for k, v in start.items() if k != "time"}}
    for file in ("recipe", "environment", "corpus"):
        facts[file.capitalize()] = read_optional(run / f"{file}.json")
    for title, value in facts.items():
        tables.append((title, ["field", "value"], [list(row) for row in flatten_fields(value)]))
    return tables
