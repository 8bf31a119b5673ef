"""What the sentence pairs of a store are like: label balance, tokens cut, shortcuts (section 3.1).

A next-sentence task teaches nothing where its answer shows without reading: in the lengths, or in
whether A and B have words in common. How far one such number gets is measured: the best threshold
on it is chosen on one half of a sample and tried on the other.
"""

from __future__ import annotations

import numpy as np

from bertkit.corpus.store import TokenStore
from bertkit.doctor.findings import Finding, judged, pair_findings, percent
from bertkit.examples.pairs import PairOptions, measure_pairs, plan_window

LENGTH = 128
"""Tokens of the examples: those of the paper's first phase (A.2)."""
SAMPLE = 4_000
"""Pairs that are looked at for shortcuts."""
FEWEST = 200
"""Of fewer pairs nothing can be said."""


def check_pairs(store: TokenStore, shards: list[int]) -> list[Finding]:
    """Make the examples of the first shards that have two documents, and look at them.

    Args:
        store: the training split.
        shards: its undamaged shards.
    """
    chosen = first_window(store, shards)
    if not chosen:
        return []
    rows = plan_window(store, chosen, PairOptions(max_length=LENGTH), 0, 0, 0)
    measured = measure_pairs(rows, LENGTH)
    where = f"{measured.examples:,} examples of length {LENGTH}"
    where += "" if len(chosen) == len(store.shards) else " (the first of the corpus)"
    findings = pair_findings(measured.random_share, measured.cut_share, where)
    sample = rows[:SAMPLE]  # the table is shuffled
    labels = sample["is_random"].astype(bool)
    most = max(labels.mean(), 1 - labels.mean())
    if len(sample) < FEWEST or most >= LIMIT_OF_BALANCE:
        return findings
    reached = {name: stump(values, labels) for name, values in features(store, sample).items()}
    best = max(reached, key=lambda name: reached[name])
    shortcut = judged(
        "pair-shortcut",
        reached[best],
        {"accuracy": reached[best], "by": best, "pairs": len(sample)},
        f"without reading, by {best} alone, {percent(reached[best])} of next-sentence labels are "
        f"right (the commoner label: {percent(most)}; {len(sample):,} pairs)",
        "documents have too little in common, so next-sentence prediction teaches nothing: join "
        "documents of one topic or language into a corpus of their own, or train without it",
    )
    return [*findings, shortcut]


LIMIT_OF_BALANCE = 0.9
"""Where one label is commoner than this, the balance is the finding, and shortcuts are not."""


def first_window(store: TokenStore, shards: list[int]) -> list[int]:
    """As few of the shards, from the first, as have two documents; none if all have fewer."""
    documents = 0
    for count, shard in enumerate(shards, start=1):
        documents += len(store.arrays(shard).documents) - 1
        if documents > 1:
            return shards[:count]
    return []


def features(store: TokenStore, rows: np.ndarray) -> dict[str, np.ndarray]:
    """Numbers that take no reading; each (pairs,).

    Args:
        store: where the rows point.
        rows: a table of `examples.pairs.ROW`.
    """
    common = np.zeros(len(rows))
    for index, row in enumerate(rows):
        a, b = (side_of(store, row, side) for side in "ab")
        common[index] = len(np.intersect1d(a, b, assume_unique=True)) / min(len(a), len(b))
    return {
        "the pieces that A and B share": common,
        "the length of A": rows["a_length"],
        "the length of B": rows["b_length"],
        "the length of both": rows["a_length"] + rows["b_length"],
    }


def side_of(store: TokenStore, row: np.void, side: str) -> np.ndarray:
    """The different ids of A or of B."""
    start = int(row[f"{side}_start"])
    tokens = store.arrays(int(row[f"{side}_shard"])).tokens
    return np.unique(tokens[start : start + int(row[f"{side}_length"])])


def stump(values: np.ndarray, labels: np.ndarray) -> float:
    """Accuracy, on the second half, of the best threshold on the first half.

    Args:
        values: (pairs,) numbers.
        labels: (pairs,) bool.
    """
    half = len(values) // 2
    order = np.argsort(values[:half], kind="stable")
    ranked, answers = values[:half][order], labels[:half][order]
    true_before = np.concatenate([[0], np.cumsum(answers)])
    places = np.arange(half + 1)
    right = true_before + (half - places) - (true_before[-1] - true_before)  # true below a cut
    ends = np.concatenate([[True], ranked[1:] != ranked[:-1], [True]])  # equal ones stay together
    below = bool(right[ends].max() >= half - right[ends].min())
    score = np.where(ends, right if below else half - right, -1)
    cut = int(score.argmax())
    limit = -np.inf if cut == 0 else ranked[cut - 1]
    said = (values[half:] <= limit) == below
    return float((said == labels[half:]).mean())
