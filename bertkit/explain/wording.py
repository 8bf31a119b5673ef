"""What the terminal and the page say alike about an explanation."""

from __future__ import annotations

import math

import numpy as np

from bertkit.explain.sections import SECTIONS, Section
from bertkit.explain.trace import Trace
from bertkit.explain.words import Cut, visible

KINDS = ("[MASK]", "random", "kept")

SMALLEST = 1e-38
"""A probability of 0 is the smallest of fp32."""


def sections_of(trace: Trace) -> list[tuple[str, Section]]:
    """(key, section) of what a trace has, in order."""
    return [(key, section) for key, section in SECTIONS.items() if key != "task" or trace.task]


def divided(words: list[Cut]) -> tuple[list[Cut], list[Cut]]:
    """Words that are not in the vocabulary whole, each once; and all others."""
    apart = {cut.word: cut for cut in words if cut.pieces != (cut.word,)}
    return list(apart.values()), [cut for cut in words if cut.word not in apart]


def tried(cut: Cut, most: int = 6) -> str:
    """What did not fit on the way to a word's pieces."""
    if not cut.matches:
        return f"the word has {len(cut.word)} characters, more than are tried"
    failed = [piece for match in cut.matches for piece in match.tried]
    more = f", and {len(failed) - most:,} more" if len(failed) > most else ""
    return visible(", ".join(failed[:most])) + more


def masks_in_words(trace: Trace) -> str:
    """How many targets there are, and why."""
    n, options = len(trace.tokens), trace.masking
    kept = 1 - options.mask_share - options.random_share
    unit = "whole words" if options.whole_words else "pieces"
    counted = [(kind, sum(t.kind == kind for t in trace.targets)) for kind in KINDS]
    drawn = ", ".join(f"{count} {kind}" for kind, count in counted)
    read = "the network below reads these" if trace.masked else "the network below reads the text"
    return (
        f"Of n = {n} tokens, {options.probability:.0%} are {len(trace.targets)} targets, in "
        f"{unit}, never [CLS] or [SEP]. Each is shown as [MASK] ({options.mask_share:.0%}), as a "
        f"random piece ({options.random_share:.0%}) or as it is ({kept:.0%}); with seed "
        f"{trace.seed}: {drawn}; {read}."
    )


def widest_entropy(trace: Trace) -> str:
    """The entropy of equal weights."""
    return f"{math.log(len(trace.tokens)):.3f}"


def pooled_in_words(trace: Trace) -> str:
    """Length and saturation of the pooled vector."""
    if trace.pooled is None:
        return ""
    size = np.abs(trace.pooled)
    return (
        f"{len(size):,} numbers, length {float(np.sqrt((size**2).sum())):.3f}, mean absolute value "
        f"{float(size.mean()):.3f}; {float((size > 0.9).mean()):.0%} are beyond 0.9, where tanh "
        "hardly moves."
    )


ANSWERS = {
    "next": ("IsNext: it follows", "NotNext: it is random"),
    "order": ("in order: it follows", "swapped: it comes before"),
}
"""What a head on pairs was trained on -> its two answers."""


def answers(trace: Trace) -> list[tuple[str, float, float]]:
    """(name, probability, loss if it is the true one) of the two answers; none without a head."""
    if trace.next_probability is None:
        return []
    shares = (trace.next_probability, 1 - trace.next_probability)
    named = zip(ANSWERS[trace.pairs], shares, strict=True)
    return [(name, share, -math.log(max(share, SMALLEST))) for name, share in named]
