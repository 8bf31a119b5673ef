"""What is wrong with a pre-training run, and what to change: the findings of its report.

Two losses can be reached without any context. One is the unigram entropy: predict each token by its
frequency. The other is a tenth lower, as a tenth of the targets are shown unchanged (paper, A.1):
repeat the token at the target. A run stays there until attention forms, which takes long if the
learning rate is low or the batch is small; many issues report this plateau near 7
(google-research/bert#746, huggingface/transformers#3983).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from bertkit.files import read_optional

Record = dict[str, Any]
CONTEXT_MARGIN = 0.03
"""A loss this share of the unigram entropy below what needs no context is learning."""
RISE = 0.1
"""The rise of the smoothed training loss above its lowest value, or of the held-out loss from one
phase to the next, in nats, that is no chance."""
SETTLED = 200
"""The updates after the warm-up by which the loss should be below the unigram entropy."""
MANY_EXAMPLES = 500_000
"""The examples by which sentence pairs should be answered better than by chance."""
MAX_GAP = 0.3
"""The gap between the held-out and the training loss, in nats, from which a run overfits."""


def run_findings(run: Path, records: Sequence[Record]) -> list[str]:
    """Return what is wrong with a run, each finding with its numbers and advice; [] if nothing is.

    Args:
        run: the run directory.
        records: the records of its journal.
    """
    settings = read_optional(run / "recipe.json")
    recipe = settings.get("recipe") or {}
    learning = learning_findings(records, (recipe.get("training") or {}).get("warmup_steps") or 0)
    copied = (recipe.get("phases") or {}).get("copy_positions", False)
    changes = phase_findings(records, copied=bool(copied) and "init_from" not in settings)
    return [*learning, *changes]


def learning_findings(records: Sequence[Record], warmup: int) -> Iterator[str]:
    """Yield what the journal shows about the learning rate, the plateau and overfitting."""
    starts, ends, steps, evaluations = (
        [record for record in records if record.get("kind") == kind]
        for kind in ("start", "end", "step", "evaluation")
    )
    if ends and ends[-1].get("reason") == "diverged":
        yield (
            "The loss or the gradient became NaN or infinite: start a new run with a lower "
            "training.learning_rate or more training.warmup_steps."
        )
    start = starts[-1] if starts else {}
    phase = [r for r in steps if r.get("phase") == steps[-1].get("phase")]
    name = next((n for n in ("mlm_loss", "lm_loss") if phase and phase[-1].get(n)), "")
    losses = values(phase, name)
    if len(losses) < 6:
        return
    width = len(losses) // 6
    smooth = np.convolve(losses, np.ones(width) / width, "valid")
    level, step = float(smooth[-1]), int(phase[-1]["step"])
    if level > smooth.min() + RISE:
        yield (
            f"The training loss rose by {level - smooth.min():.2f} above its lowest value and did "
            "not fall again: lower training.learning_rate, or raise training.warmup_steps."
        )
    entropy = (start.get("baselines") or {}).get("unigram_entropy")
    if entropy:
        total = start.get("steps_total") or step
        late = 2 * step > total or step > 10_000
        settled = step > warmup + SETTLED
        yield from plateau_findings(level, float(entropy), name, settled=settled, late=late)
    yield from pair_findings(phase[-2 * width :], start, steps)
    held_out = values([e for e in evaluations if e.get("phase") == phase[-1].get("phase")], name)
    if len(held_out) and held_out[-1] - level > MAX_GAP:
        yield (
            f"The held-out loss {held_out[-1]:.2f} is {held_out[-1] - level:.2f} above the training"
            f" loss (its lowest value was {held_out.min():.2f}): the network memorizes the corpus. "
            "Use more text, fewer updates, model.dropout 0.1 or a smaller network."
        )


def phase_findings(records: Sequence[Record], *, copied: bool) -> Iterator[str]:
    """Yield whether the held-out loss rose from the end of a phase to the end of the next one."""
    start = next((r for r in reversed(records) if r.get("kind") == "start"), {})
    lengths = [phase["length"] for phase in start.get("phases") or []]
    last = {r.get("phase"): r for r in records if r.get("kind") == "evaluation"}
    for phase, (before, after) in enumerate(pairwise(lengths)):
        ends = [last.get(phase, {}), last.get(phase + 1, {})]
        losses = next((v for n in ("mlm_loss", "lm_loss") if len(v := values(ends, n)) == 2), None)
        if losses is None or losses[1] <= losses[0] + RISE:
            continue
        cause = "the phase of these examples is too short to get used to them (phases.steps)"
        if after > max(lengths[: phase + 1]) and not copied:
            cause = (
                f"positions {max(lengths[: phase + 1]) + 1} to {after} began untrained "
                "(phases.copy_positions), and the phase is too short to train them (phases.steps)"
            )
        yield (
            f"The held-out loss rose from {losses[0]:.2f} in examples of {before} tokens to "
            f"{losses[1]:.2f} in those of {after}: {cause}."
        )


def plateau_findings(
    level: float, entropy: float, name: str, *, settled: bool, late: bool
) -> Iterator[str]:
    """Yield whether a loss could be reached without context, late enough to say so."""
    blind = entropy if name == "lm_loss" else 0.9 * entropy
    if level > entropy and settled:
        yield (
            f"The loss {level:.2f} is above the unigram entropy {entropy:.2f}, which guessing by "
            "frequency reaches: raise training.learning_rate (1e-4 suits BERT-base, 1e-3 networks "
            "of width 128), or train longer."
        )
    elif level > blind - CONTEXT_MARGIN * entropy and late:
        yield (
            f"The loss {level:.2f} needs no context: guessing by frequency reaches {entropy:.2f} "
            f"and repeating the shown token about {blind:.2f}. Attention forms sooner with shorter "
            "examples at first (phases.lengths 64), larger batches, a higher "
            "training.learning_rate, model.dropout 0 for small networks, or more updates."
        )


def pair_findings(late: Sequence[Record], start: Record, steps: Sequence[Record]) -> Iterator[str]:
    """Yield whether sentence pairs are answered by chance after many examples."""
    majority = (start.get("baselines") or {}).get("nsp_majority")
    seen = sum(record.get("sequences") or 0 for record in steps)
    for name in ("nsp_accuracy", "sop_accuracy"):
        shares = values(late, name)
        if len(shares) and majority and seen > MANY_EXAMPLES and shares.mean() < majority + 0.03:
            yield (
                f"{shares.mean():.1%} of the sentence pairs are answered correctly after {seen:,} "
                f"examples, and the more frequent answer alone gets {majority:.1%}: check that "
                "documents are whole and their sentences in order."
            )


def values(records: Sequence[Record], name: str) -> np.ndarray:
    """Return a field's numbers: (records that have one,) float64."""
    return np.array([r[name] for r in records if r.get(name) is not None], dtype=np.float64)
