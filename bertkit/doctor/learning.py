"""Whether a run learns: the plateau, ELECTRA's replaced pieces, overfitting.

Two losses can be reached without using any context. One is the unigram entropy: guess every piece
by its frequency. The other is lower, because a target is not always masked (paper A.1: of the
targets 10 % are kept and 10 % become a random piece): repeat the piece that is seen, where it is
likelier to be kept than random. Runs stay at this second loss until attention forms, for long where
the learning rate is low or the batch is small; that is the plateau near 7 of which so many reports
speak (google-research/bert#746, huggingface/transformers#3983).
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
from bertkit.pretraining_data.pairs import SPECIALS

CONTEXT_MARGIN = 0.03
"""Of the unigram entropy: a loss so far below the copying loss uses context."""
LEVEL = 0.02
"""Of the unigram entropy: a loss that falls less from a third of a phase to the next is level."""
EARLY_EXAMPLES = 500_000
"""Before so many examples..."""
EARLY_UPDATES = 10_000
"""... and so many updates, and half of the run, the plateau is no surprise."""
GUESSING_UPDATES = 500
"""So many updates after the warm-up no loss should be at the unigram entropy itself."""
MEANINGFUL_GAP = 0.1
"""In nats: without such a gap to the training loss, a risen held-out loss is no overfitting."""
NEXT_PIECE = "at best, where each [CLS] and [SEP] is known,"
"""What the second level is where the next piece is the target and there is nothing to repeat."""
RISE = Threshold(0.05, 0.2, "nats")
"""Of the held-out loss above its lowest value."""


def copying_loss(unigrams: np.ndarray, mask_share: float, random_share: float) -> float:
    """The MLM loss, in nats, of the best guesser that sees only the piece at the target itself.

    Let p be the frequencies, k the share of targets kept, r the share replaced by one of V pieces.
    A masked target is guessed by p. A piece w that is seen there was kept with probability
    c = k p(w) / (k p(w) + r / V), so w gets c + (1 - c) p(w) and any other piece (1 - c) p.

    Args:
        unigrams: (V,) counts.
        mask_share: of targets that become [MASK].
        random_share: of targets that become a random piece.
    """
    p = unigrams / unigrams.sum()
    seen = p > 0
    entropy = -float((p[seen] * np.log(p[seen])).sum())
    k, r = max(0.0, 1 - mask_share - random_share), random_share
    if k == 0 or r == 0:  # nothing to repeat, or always to be repeated
        return (mask_share + r) * entropy
    kept = k * p / (k * p + r / len(p))
    repeated = np.log((kept + (1 - kept) * p)[seen])  # of guessing the piece that is seen
    other = np.log1p(-kept)
    if_kept = -float((p[seen] * repeated).sum())
    same = float((p[seen] * (repeated - other[seen] - np.log(p[seen]))).sum()) / len(p)
    if_random = entropy - float(other.mean()) - same  # it may be the same piece by chance
    return mask_share * entropy + k * if_kept + r * if_random


def blind_losses(run: RunRecords) -> tuple[float, float] | None:
    """(unigram entropy, copying loss) of a run; None where its journal has no entropy."""
    entropy = run.baseline("unigram_entropy")
    if entropy is None or entropy <= 0:
        return None
    if run.words == "lm":  # every token but one is a target: [SEP] and [CLS], too, which are easy
        targets = sum(finite_number(record, "targets") or 0 for record in run.steps)
        specials = SPECIALS - 1 - (run.pair == "single-segment")
        easy = min(0.5, specials * run.sequences / max(1, targets))
        return entropy, (1 - easy) * entropy
    mask, random = run.setting("masking", "mask_share"), run.setting("masking", "random_share")
    if mask is None or random is None:
        return entropy, entropy
    counts = store_unigrams(run, entropy)
    if counts is None:
        return entropy, min(entropy, (mask + random) * entropy)
    return entropy, copying_loss(counts, mask, random)


def store_unigrams(run: RunRecords, entropy: float) -> np.ndarray | None:
    """The counts behind the run's baseline, where its store is there, whole and unchanged."""
    try:
        counts = None if run.store is None else run.store.unigrams
    except (OSError, ValueError, BertkitError):
        return None  # the store's own findings say so
    if counts is None or not counts.sum():
        return None
    shares = counts[counts > 0] / counts.sum()
    same = math.isclose(-float((shares * np.log(shares)).sum()), entropy, rel_tol=1e-6)
    return counts if same else None


def uses_context(level: float, entropy: float, copying: float) -> bool:
    """Whether a loss is below what can be had without context."""
    return level < copying - CONTEXT_MARGIN * entropy


def is_early(run: RunRecords) -> bool:
    """Whether a run that has not learnt yet may simply need more updates."""
    total = run.total_steps
    half_made = total is not None and run.last_step >= total / 2
    few = run.sequences < EARLY_EXAMPLES and run.last_step < EARLY_UPDATES
    return few and not half_made and not run.finished


def last_level(run: RunRecords) -> float | None:
    """The words' loss now: the mean of the last sixth of the present phase."""
    records = run.present()
    return mean(records[-max(1, len(records) // 6) :], f"{run.words}_loss", "targets")


def check_plateau(run: RunRecords, causes: Sequence[str]) -> list[Finding]:
    """Whether the loss is one that needs no context, and whether that is to be worried about.

    Args:
        run: what was written down.
        causes: names of problems that would keep it there, for the advice.
    """
    blind, level = blind_losses(run), last_level(run)
    if blind is None or level is None:
        return []
    entropy, copying = blind
    records = run.present()
    before, now = (
        mean(third_of(records, index), f"{run.words}_loss", "targets") for index in (1, 2)
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
    said = f"{run.words_name} loss {level:.3f}; without context, guessing by frequency reaches "
    said += f"{entropy:.3f}, and "
    said += "repeating what is seen at the target itself" if run.words == "mlm" else NEXT_PIECE
    said += f" {copying:.3f}"
    if uses_context(level, entropy, copying):
        return [make_finding("plateau", "ok", numbers, said)]
    guessing = level > (entropy + copying) / 2 and copying < (1 - LEVEL) * entropy
    early = "; still early" if is_early(run) else ""
    said += f"; it fell by {fall:.3f} from the middle to the last third of the phase"
    said += f"; {run.last_step:,} updates, {run.sequences:,} examples{early}"
    severity = plateau_severity(run, guessing=guessing, is_level=fall < LEVEL * entropy)
    return [make_finding("plateau", severity, numbers, said, plateau_advice(run, guessing, causes))]


def plateau_severity(run: RunRecords, *, guessing: bool, is_level: bool) -> str:
    """How bad a loss without context is.

    Args:
        run: how far it is decides.
        guessing: the loss is nearer to the unigram entropy than to the copying loss.
        is_level: the loss does not fall any more.
    """
    after = run.last_step - (run.setting("training", "warmup_steps") or 0)
    if run.finished or (is_level and guessing and after > GUESSING_UPDATES):
        return "problem"
    if is_early(run):
        return "notice" if is_level else "ok"
    return "problem" if is_level else "notice"


def plateau_advice(run: RunRecords, guessing: bool, causes: Sequence[str]) -> str:
    """What to change about a loss that uses no context."""
    rate = run.setting("training", "learning_rate")
    now = "" if rate is None else f" (now {rate:g})"
    advice = f"mend first: {', '.join(causes)}; " if causes else ""
    if run.words == "lm":
        return advice + (
            "the network looks at nothing yet, not even at the neighbour: see learning-rate-high "
            f"and learning-rate-low{now}; after few updates, train on"
        )
    if guessing:
        return advice + (
            "not even kept pieces are repeated, which takes some hundred updates: see "
            "learning-rate-high and learning-rate-low; after few updates, train on"
        )
    return advice + (
        "attention has not formed. What brings it sooner: shorter examples in the first phase "
        "(phases.lengths 64), more of them in an update (phases.batch_sizes), "
        f"training.learning_rate up to 2e-3 for narrow networks{now}, model.dropout 0 for small "
        "ones, more updates"
    )


def check_replaced(run: RunRecords) -> list[Finding]:
    """Whether ELECTRA's discriminator, the network that is kept, beats a blind guess.

    Who looks at nothing reaches the entropy of the share of replaced pieces.
    """
    records = third_of(run.present(), 2)
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
            f"replaced-token loss {loss:.4f} at the end; without looking, by the share of replaced "
            f"pieces ({percent(share)}), {blind:.4f}; {percent(accuracy)} are right",
            "the network that is kept has learnt nothing: mend the plateau first; a generator of "
            "another size (objectives.generator_share) or more updates help, too",
        )
    ]


def check_overfitting(run: RunRecords) -> list[Finding]:
    """Whether the held-out loss is far above the training loss, or rises.

    The held-out masks are 80/10/10 always, so masked models with others are not judged.
    """
    shares = (run.setting("masking", "mask_share"), run.setting("masking", "random_share"))
    masks_differ = run.words == "mlm" and shares not in {(0.8, 0.1), (None, None)}
    if not run.evaluations or masks_differ:
        return []
    last = run.evaluations[-1]
    phase = record_phase(last)
    own = [r for r in run.steps if record_phase(r) == phase and record_step(r) <= record_step(last)]
    losses = [
        (loss, record_step(record))
        for record in run.evaluations
        if record_phase(record) == phase
        and (loss := finite_number(record, f"{run.words}_loss")) is not None
    ]
    training = mean(own[-max(1, len(own) // 6) :], f"{run.words}_loss", "targets")
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
            f"held-out {run.words_name} loss {held_out:.3f} is {gap:+.3f} from the training loss "
            f"{training:.3f}; its lowest, {lowest:.3f}, was at update {best:,}"
            + (f"; the corpus was read {run.epochs:.1f} times" if run.epochs else ""),
            "the corpus is learnt by heart: give more text, fewer updates, model.dropout 0.1, or a "
            "smaller network",
        )
    ]
