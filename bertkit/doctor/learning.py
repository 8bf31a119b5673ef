"""Checks of whether a run learns: tokens, sentence pairs, replaced tokens, overfitting.

Two losses can be reached without using any context. One is the unigram entropy: predict every token
by its frequency. The other, the copying loss, is lower, because not every target is masked (paper
A.1: 10 % of the targets are kept and 10 % are replaced by a random token): repeat the token at the
target if it is more likely kept than random. Runs stay at the copying loss until attention forms,
which takes long if the learning rate is low or the batch is small; this is the plateau near 7 that
many issues report (google-research/bert#746, huggingface/transformers#3983).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from bertkit.doctor.findings import (
    THRESHOLDS,
    Finding,
    Threshold,
    make_finding,
    percent,
    worst_severity,
)
from bertkit.doctor.records import (
    RunRecords,
    finite_number,
    mean,
    record_phase,
    record_step,
    third_of,
)
from bertkit.errors import BertkitError

CONTEXT_MARGIN = 0.03
"""A loss this far below the copying loss uses context, as a share of the unigram entropy."""
LEVEL = 0.02
"""A loss that falls less than this between thirds of a phase is level (share of that entropy)."""
EARLY_EXAMPLES = 500_000
"""The number of examples before which, if `EARLY_UPDATES` holds too, a plateau is expected."""
EARLY_UPDATES = 10_000
"""The number of updates before which a plateau is expected in the first half of a run."""
GUESSING_UPDATES = 500
"""The number of updates after the warm-up by which the loss should be below the unigram entropy."""
MEANINGFUL_GAP = 0.1
"""The gap to the training loss, in nats, below which a rising held-out loss is no overfitting."""
EASY_TARGETS = "also predicting every [CLS] and [SEP]"
"""How the second loss is reached if the next token is the target, so that none can be repeated."""
CHANCE = 0.03
"""An accuracy on pairs less than this above the majority baseline counts as chance."""
MIN_PAIRS = 500
"""The minimum number of examples to judge an accuracy."""
RISE = Threshold(0.05, 0.2, "nats")
"""The limits for the rise of the held-out loss above its lowest value."""


def copying_loss(unigrams: np.ndarray, mask_share: float, random_share: float) -> float:
    """Return the MLM loss, in nats, of the best predictor that sees only the token at the target.

    Let p be the frequencies, from the token counts (V,), k the share of targets kept, and r the
    share replaced by one of V tokens. A masked target is predicted by p. A token w seen at the
    target was kept with probability c = k p(w) / (k p(w) + r / V), so w gets c + (1 - c) p(w) and
    any other token (1 - c) p.
    """
    p = unigrams / unigrams.sum()
    seen = p > 0
    entropy = -float((p[seen] * np.log(p[seen])).sum())
    k, r = max(0.0, 1 - mask_share - random_share), random_share
    if k == 0 or r == 0:  # a visible target is never, or always, the original token
        return (mask_share + r) * entropy
    kept = k * p / (k * p + r / len(p))
    repeated = np.log((kept + (1 - kept) * p)[seen])  # if the target is the visible token
    other = np.log1p(-kept)
    if_kept = -float((p[seen] * repeated).sum())
    same = float((p[seen] * (repeated - other[seen] - np.log(p[seen]))).sum()) / len(p)
    if_random = entropy - float(other.mean()) - same  # the random token may equal the original
    return mask_share * entropy + k * if_kept + r * if_random


def blind_losses(run: RunRecords) -> tuple[float, float] | None:
    """Return (unigram entropy, copying loss) of a run, or None if its journal has no entropy."""
    entropy = run.baseline("unigram_entropy")
    if entropy is None or entropy <= 0:
        return None
    if run.loss_prefix == "lm":  # all tokens but one are targets, also [CLS] and [SEP]: easy ones
        targets = sum(finite_number(record, "targets") or 0 for record in run.steps)
        easy = min(0.5, (run.specials - 1) * run.sequences / max(1, targets))
        return entropy, (1 - easy) * entropy
    mask, random = run.setting("masking", "mask_share"), run.setting("masking", "random_share")
    if mask is None or random is None:
        return entropy, entropy
    counts = store_unigrams(run, entropy)
    if counts is None:
        return entropy, min(entropy, (mask + random) * entropy)
    return entropy, copying_loss(counts, mask, random)


def store_unigrams(run: RunRecords, entropy: float) -> np.ndarray | None:
    """Return the token counts behind the run's baseline, or None if they are not available.

    They are unavailable if the store cannot be reached, is damaged, or has changed.
    """
    try:
        counts = None if run.store is None else run.store.unigrams
    except (OSError, ValueError, BertkitError):
        return None  # the findings about the store report this
    if counts is None or not counts.sum():
        return None
    shares = counts[counts > 0] / counts.sum()
    same = math.isclose(-float((shares * np.log(shares)).sum()), entropy, rel_tol=1e-6)
    return counts if same else None


def uses_context(level: float, entropy: float, copying: float) -> bool:
    """Return whether a loss is clearly below what can be reached without context."""
    return level < copying - CONTEXT_MARGIN * entropy


def is_early(run: RunRecords) -> bool:
    """Return whether a run that has not learned yet may simply need more updates."""
    total = run.total_steps
    half_made = total is not None and run.last_step >= total / 2
    few = run.sequences < EARLY_EXAMPLES and run.last_step < EARLY_UPDATES
    return few and not half_made and not run.finished


def last_level(run: RunRecords) -> float | None:
    """Return the current token loss: the mean over the last sixth of the current phase."""
    records = run.last_judgeable_phase()
    return mean(records[-max(1, len(records) // 6) :], f"{run.loss_prefix}_loss", "targets")


def check_plateau(run: RunRecords, causes: Sequence[str]) -> list[Finding]:
    """Check whether the loss has fallen below what can be reached without context."""
    blind, level = blind_losses(run), last_level(run)
    if blind is None or level is None:
        return []
    entropy, copying = blind
    records = run.last_judgeable_phase()
    before, now = (
        mean(third_of(records, index), f"{run.loss_prefix}_loss", "targets") for index in (1, 2)
    )
    fall = 0.0 if before is None or now is None else before - now
    numbers = {
        "loss": level,
        "unigram_entropy": entropy,
        "copying_loss": copying,
        "fall": fall,
        "updates": run.last_step,
        "examples": run.sequences,
    }
    said = f"{run.loss_name} loss {level:.3f}; without context, predicting by frequency reaches "
    said += f"{entropy:.3f}, and "
    said += "repeating the token seen at the target" if run.loss_prefix == "mlm" else EASY_TARGETS
    said += f" reaches {copying:.3f}"
    if uses_context(level, entropy, copying):
        return [make_finding("plateau", "ok", numbers, said)]
    guessing = level > (entropy + copying) / 2 and copying < (1 - LEVEL) * entropy
    early = "; still early" if is_early(run) else ""
    said += f"; it fell by {fall:.3f} from the middle to the last third of the phase"
    said += f"; {run.last_step:,} updates, {run.sequences:,} examples{early}"
    severity = plateau_severity(run, guessing=guessing, is_level=fall < LEVEL * entropy)
    return [make_finding("plateau", severity, numbers, said, plateau_advice(run, guessing, causes))]


def plateau_severity(run: RunRecords, *, guessing: bool, is_level: bool) -> str:
    """Return the severity of a loss that needs no context, by how far the run has got.

    A model is `guessing` if its loss is nearer to the unigram entropy than to the copying loss, and
    the loss `is_level` if it has stopped falling.
    """
    after = run.last_step - (run.setting("training", "warmup_steps") or 0)
    if run.finished or (is_level and guessing and after > GUESSING_UPDATES):
        return "problem"
    if is_early(run):
        return "notice" if is_level else "ok"
    return "problem" if is_level else "notice"


def plateau_advice(run: RunRecords, guessing: bool, causes: Sequence[str]) -> str:
    """Return advice on what to change if the loss needs no context."""
    rate = run.setting("training", "learning_rate")
    now = "" if rate is None else f" (now {rate:g})"
    advice = f"fix first: {', '.join(causes)}; " if causes else ""
    if run.loss_prefix == "lm":
        return advice + (
            "the network does not use any context yet, not even the neighboring token: see "
            f"learning-rate-high and learning-rate-low{now}; if it has made few updates, train on"
        )
    if guessing:
        return advice + (
            "the network does not even repeat kept tokens, which takes some hundred updates: see "
            "learning-rate-high and learning-rate-low; if it has made few updates, train on"
        )
    return advice + (
        "attention has not formed yet. It forms sooner with shorter examples in the first phase "
        "(phases.lengths 64), more examples per update (phases.batch_sizes), a higher "
        f"training.learning_rate (up to 2e-3 for narrow networks{now}), model.dropout 0 for small "
        "networks, or more updates"
    )


PAIR_NAMES = {"nsp": "next-sentence labels", "sop": "sentence-order labels"}
"""The journal's name of the pair objective -> the name of its labels."""


def check_next_sentence(run: RunRecords) -> list[Finding]:
    """Check whether the accuracy on pairs is at chance."""
    records = third_of(run.last_judgeable_phase(), 2)
    judged = records and run.pair_loss
    majority = run.majority_accuracy(record_phase(records[-1])) if judged else None
    accuracy = mean(records, f"{run.pair_loss}_accuracy", "sequences")
    seen = sum(finite_number(record, "sequences") or 0 for record in records)
    if majority is None or accuracy is None or seen < MIN_PAIRS:
        return []
    level, blind = last_level(run), blind_losses(run)
    learns = blind is None or level is None or uses_context(level, *blind)
    at_chance = accuracy < majority + max(CHANCE, 3 * math.sqrt(0.25 / seen))
    severity = "ok"
    if at_chance and run.sequences >= EARLY_EXAMPLES:
        severity = "problem" if learns else "notice"
    elif at_chance and learns:
        severity = "notice"
    return [
        make_finding(
            "next-sentence-chance",
            severity,
            {"accuracy": accuracy, "majority": majority, "examples": run.sequences},
            f"{percent(accuracy)} of {PAIR_NAMES[run.pair_loss]} are right at the end; the more "
            f"frequent label alone gets {percent(majority)}; {run.sequences:,} examples"
            + ("; it is only learned after the plateau" if at_chance and not learns else ""),
            "sentences must be in their original order: check that documents are complete and not "
            "shuffled lines; longer examples also help",
        )
    ]


def check_replaced(run: RunRecords) -> list[Finding]:
    """Check that ELECTRA's discriminator, the network that is kept, is better than chance.

    Input-independent prediction reaches the entropy of the share of replaced tokens.
    """
    records = third_of(run.last_judgeable_phase(), 2)
    names = ("rtd_loss", "rtd_accuracy", "rtd_share")
    loss, accuracy, share = (mean(records, name, "tokens") for name in names)
    if loss is None or accuracy is None or share is None or not 0 < share < 1:
        return []
    blind = -share * math.log(share) - (1 - share) * math.log1p(-share)
    learns = loss < (1 - CONTEXT_MARGIN) * blind
    severity = "ok" if learns else "notice" if is_early(run) else "problem"
    return [
        make_finding(
            "replaced-chance",
            severity,
            {"loss": loss, "blind_loss": blind, "accuracy": accuracy, "share": share},
            f"replaced-token loss {loss:.4f} at the end; the input-independent baseline, by the "
            f"share of replaced tokens ({percent(share)}), is {blind:.4f}; {percent(accuracy)} of "
            "the predictions are right",
            "the discriminator, which is the network that is kept, has learned nothing: fix the "
            "plateau first; another generator size (objectives.generator_share) or more updates "
            "also help",
        )
    ]


def check_overfitting(run: RunRecords) -> list[Finding]:
    """Check whether the held-out loss is far above the training loss, or rises.

    Held-out masking is always 80/10/10, so runs with other masking shares are not judged.
    """
    shares = (run.setting("masking", "mask_share"), run.setting("masking", "random_share"))
    masks_differ = run.loss_prefix == "mlm" and shares not in {(0.8, 0.1), (None, None)}
    if not run.evaluations or masks_differ:
        return []
    last = run.evaluations[-1]
    phase = record_phase(last)
    own = [r for r in run.steps if record_phase(r) == phase and record_step(r) <= record_step(last)]
    losses = [
        (loss, record_step(record))
        for record in run.evaluations
        if record_phase(record) == phase
        and (loss := finite_number(record, f"{run.loss_prefix}_loss")) is not None
    ]
    training = mean(own[-max(1, len(own) // 6) :], f"{run.loss_prefix}_loss", "targets")
    if training is None or not losses:
        return []
    (lowest, best), (held_out, _) = min(losses), losses[-1]
    gap, rise = held_out - training, held_out - lowest
    risen = RISE.grade(rise) if gap > MEANINGFUL_GAP else "ok"
    return [
        make_finding(
            "overfitting",
            worst_severity([THRESHOLDS["overfitting"].grade(gap), risen]),
            {"gap": gap, "rise": rise, "best_step": best, "epochs": run.epochs},
            f"held-out {run.loss_name} loss {held_out:.3f} is {gap:+.3f} from the training loss "
            f"{training:.3f}; its minimum, {lowest:.3f}, was at update {best:,}"
            + (f"; the corpus was read {run.epochs:.1f} times" if run.epochs else ""),
            "the network memorizes the corpus: use more text, fewer updates, model.dropout 0.1, or "
            "a smaller network",
        )
    ]
