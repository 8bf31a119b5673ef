"""Checks of the learning rate: divergence, lack of progress, warm-up (paper section A.2)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bertkit.doctor.findings import THRESHOLDS, Finding, make_finding, percent, worst_severity
from bertkit.doctor.learning import LEVEL, blind_losses, last_level, uses_context
from bertkit.doctor.records import Record, RunRecords, mean, record_step, values

SPREAD = 0.35
"""The standard deviation of one target's loss divided by the unigram entropy, typical of text."""
SURE = 4.0
"""The number of standard errors that a rise of the loss must exceed to be more than chance."""
SMOOTHING = 20
"""The loss of a phase is smoothed by a moving average over 1 / SMOOTHING of its journal lines."""
SETTLED = 200
"""The number of updates after the warm-up by which the loss reaches the unigram entropy."""


class Rise(NamedTuple):
    """The largest rise of the training loss within a phase."""

    height: float
    """The height in nats above the lowest value before it."""
    limit: float
    """The height up to which a rise is chance, or too small to matter."""
    step: int
    """The update at which the rise was highest."""
    recovered: bool
    """Whether the phase ended, up to chance, below the value at which the rise started."""


def check_rates(run: RunRecords) -> list[Finding]:
    """Return all findings about the learning rate."""
    rises = [rise for records in run.phases() if (rise := largest_rise(records, run)) is not None]
    high = check_too_high(run, rises)
    low = check_too_low(run, steady=all(rise.height <= rise.limit / 3 for rise in rises))
    return [high, *low, *check_schedule(run)]


def largest_rise(records: Sequence[Record], run: RunRecords) -> Rise | None:
    """Return the largest rise of the loss in a phase, or None if it has too few journal lines."""
    losses, targets = values(records, f"{run.loss_prefix}_loss"), values(records, "targets")
    if len(losses) < 4 or len(targets) != len(records) or len(losses) != len(records):
        return None
    width = max(1, len(losses) // SMOOTHING)
    window = np.ones(width)
    weights = np.convolve(targets, window, "valid")
    smooth = np.convolve(losses * targets, window, "valid") / np.maximum(weights, 1)
    scale = run.baseline("unigram_entropy") or float(np.median(losses))
    chance = SURE * SPREAD * scale * math.sqrt(2 / max(1.0, float(weights.min())))
    limit = max(LEVEL * scale, chance, 1e-9)
    lowest = np.minimum.accumulate(smooth)
    top = int((smooth - lowest).argmax())
    return Rise(
        height=float((smooth - lowest)[top]),
        limit=limit,
        step=record_step(records[top + width - 1]),
        recovered=bool(smooth[-1] < lowest[top] + limit / 2),
    )


def lower_rate_advice(run: RunRecords) -> str:
    """Return advice on how to keep the loss from rising."""
    peak = run.setting("training", "learning_rate")
    return (
        "start a new run with a lower training.learning_rate"
        + ("" if peak is None else f" (now {peak:g}; try {peak / 3:.1g})")
        + " or longer training.warmup_steps; larger phases.batch_sizes also help"
    )


def check_too_high(run: RunRecords, rises: Sequence[Rise]) -> Finding:
    """Check whether the loss became NaN or infinite, or rose."""
    change = lower_rate_advice(run)
    if run.end == "diverged":
        last = record_step(run.steps[-1])
        said = f"loss or gradient became NaN or infinite between updates {last:,} and "
        said += f"{run.last_step:,}"
        return make_finding("learning-rate-high", "problem", {"step": run.last_step}, said, change)
    broken = [
        record
        for record in run.steps + run.evaluations
        if any(name.endswith("loss") and value is None for name, value in record.items())
    ]
    rise = max(rises, key=lambda one: one.height / one.limit, default=None)
    if broken:
        step = record_step(min(broken, key=record_step))
        said = f"the loss is NaN or infinite at update {step:,}"
        return make_finding("learning-rate-high", "problem", {"step": step}, said, change)
    if rise is None:
        said = "there are too few journal lines to judge whether the loss rose"
        return make_finding("learning-rate-high", "ok", {"lines": len(run.steps)}, said)
    risen = rise.height > rise.limit
    level, blind = last_level(run), blind_losses(run)
    learns = level is None or blind is None or uses_context(level, *blind)
    severity = ("notice" if rise.recovered and learns else "problem") if risen else "ok"
    said = f"the training loss rose by at most {rise.height:.3f} above an earlier value"
    said += f" (up to {rise.limit:.3f} is within chance)"
    if risen:
        said += f", at update {rise.step:,}, and "
        said += "fell again afterwards" if rise.recovered else "did not fall again"
        said += "" if learns else "; the run has not learned to use context"
    numbers = {"rise": rise.height, "limit": rise.limit, "step": rise.step}
    return make_finding("learning-rate-high", severity, numbers, said, change)


def check_too_low(run: RunRecords, *, steady: bool) -> list[Finding]:
    """Check whether the loss falls too slowly.

    A `steady` loss has hardly ever risen, so that a high one has just not fallen yet.
    """
    entropy, level = run.baseline("unigram_entropy"), last_level(run)
    first = mean(run.steps[:1], f"{run.loss_prefix}_loss", "targets")
    if entropy is None or level is None or first is None:
        return []
    warmup = run.setting("training", "warmup_steps") or 0
    peak = run.setting("training", "learning_rate")
    above = level - entropy
    slow = above > LEVEL * entropy and steady
    judgeable = run.finished or run.last_step >= warmup + SETTLED
    said = f"{run.loss_name} loss {level:.3f} after {run.last_step:,} updates, from {first:.3f}"
    if slow:
        said += f"; a run usually reaches the unigram entropy {entropy:.3f} within its warm-up"
        said += "" if judgeable else f" ({warmup:,.0f} updates)"
    else:
        said += f"; the unigram entropy is {entropy:.3f}"
    return [
        make_finding(
            "learning-rate-low",
            "problem" if slow and judgeable else "ok",
            {"above_entropy": above, "fallen": first - level, "updates": run.last_step},
            said,
            "raise training.learning_rate"
            + ("" if peak is None else f" (now {peak:g})")
            + ": 1e-4 suits BERT-base, 1e-3 to 2e-3 suit networks of width 128; or train longer",
        )
    ]


def check_schedule(run: RunRecords) -> list[Finding]:
    """Check how much of the run is warm-up."""
    warmup, total = run.setting("training", "warmup_steps"), run.total_steps
    if warmup is None or not total:
        return []
    share = warmup / total
    stopped = not run.in_progress and run.last_step < warmup
    said = f"{warmup:,.0f} of {total:,} updates ({percent(share)}) are warm-up"
    said += f", and the run stopped after only {run.last_step:,}" if stopped else ""
    return [
        make_finding(
            "warm-up",
            worst_severity([THRESHOLDS["warm-up"].grade(share), "notice" if stopped else "ok"]),
            {"share": share, "warmup_steps": warmup, "steps": total},
            said,
            "lower training.warmup_steps (the paper uses 1 % of the updates) or train longer",
        )
    ]
