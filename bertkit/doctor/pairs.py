"""Checks of sentence pairs (section 3.1): the pairs that a store yields, and what a run learns.

A store is checked for label balance, truncated tokens and shortcuts. A next-sentence task teaches
nothing if its label can be predicted without reading: from the lengths, or from whether A and B
have words in common. To measure how predictive such a feature is, the best threshold on it is
chosen on one half of a sample and evaluated on the other.
"""

from __future__ import annotations

import math

import numpy as np

from bertkit.corpus.store import TokenStore
from bertkit.doctor.findings import (
    PAIR_LABELS,
    Finding,
    judge_value,
    make_finding,
    pair_findings,
    percent,
)
from bertkit.doctor.learning import EARLY_EXAMPLES, blind_losses, last_level, uses_context
from bertkit.doctor.records import (
    RunRecords,
    finite_number,
    mean,
    record_phase,
    record_step,
    third_of,
)
from bertkit.pretraining_data.pairs import PairOptions, measure_pairs, plan_block

LENGTH = 128
"""The length of the examples in tokens: that of the paper's first phase (A.2)."""
PAIR_SAMPLE = 4_000
"""The maximum number of pairs that are checked for shortcuts."""
MIN_PAIRS = 200
"""The minimum number of pairs for a check for shortcuts."""
LIMIT_OF_BALANCE = 0.9
"""The share of one label from which only the balance is reported, and no shortcut."""
CHANCE = 0.03
"""An accuracy on pairs less than this above the majority baseline counts as chance."""
FEWEST_PAIRS = 500
"""The minimum number of examples to judge an accuracy."""
RIGHT_AWAY = 0.95
"""An accuracy on pairs that only a shortcut reaches while the run is on the plateau."""

QUESTIONS = {
    "nsp": (
        "next-sentence labels",
        "B must really follow A: check that documents are complete and in their original order, "
        "not shuffled lines; longer examples also help",
        "see pair-shortcut, label-balance and one-sentence-documents of the store; use documents "
        "of one language and genre",
    ),
    "sop": (
        "sentence-order labels",
        "sentences must be in their original order: check that documents are not shuffled lines; "
        "longer examples also help",
        "see pair-shortcut of the store: something, such as a title or a template, marks where a "
        "document begins",
    ),
}
"""The journal's name of the pair objective -> the name of its labels, the advice if they are not
learned, and the advice if they are learned without reading."""


def check_pairs(store: TokenStore, shards: list[int], pair: str = "nsp") -> list[Finding]:
    """Check the examples made from the first shards that together have two documents.

    Args:
        store: the training split.
        shards: the indices of its undamaged shards.
        pair: the pair objective, as in `pretraining_data.pairs.PairOptions`.
    """
    chosen = first_window(store, shards)
    if not chosen:
        return []
    options = PairOptions(max_length=LENGTH, pair=pair)
    rows = plan_block(store, chosen, options, 0, 0, 0)
    measured = measure_pairs(rows, LENGTH)
    where = f"{measured.examples:,} examples of length {LENGTH}"
    where += "" if len(chosen) == len(store.shards) else " (from the start of the corpus)"
    findings = pair_findings(measured.random_share, measured.cut_share, where, pair)
    if pair not in PAIR_LABELS:
        return findings
    sample = rows[:PAIR_SAMPLE]  # the table is shuffled
    labels = sample["is_random"].astype(bool)
    most = max(labels.mean(), 1 - labels.mean())
    if len(sample) < MIN_PAIRS or most >= LIMIT_OF_BALANCE:
        return findings
    reached = {name: stump(values, labels) for name, values in pair_features(store, sample).items()}
    best = max(reached, key=lambda name: reached[name])
    shortcut = judge_value(
        "pair-shortcut",
        reached[best],
        {"accuracy": reached[best], "by": best, "pairs": len(sample)},
        f"without reading, {best} alone predicts {percent(reached[best])} of the labels correctly "
        f"(the more frequent label: {percent(most)}; {len(sample):,} pairs)",
        "documents have too little in common, so next-sentence prediction teaches nothing: put "
        "documents of one topic or language into a separate corpus, or train without NSP"
        if pair == "nsp"
        else "sentence order can be predicted without reading, so it teaches nothing: train "
        "without it",
    )
    return [*findings, shortcut]


def first_window(store: TokenStore, shards: list[int]) -> list[int]:
    """Return the fewest leading shards with two documents in total, or [] if there are not two."""
    documents = 0
    for count, shard in enumerate(shards, start=1):
        documents += len(store.arrays(shard).documents) - 1
        if documents > 1:
            return shards[:count]
    return []


def pair_features(store: TokenStore, rows: np.ndarray) -> dict[str, np.ndarray]:
    """Compute features of pairs that take no understanding of the text.

    Args:
        store: the store that the rows refer to.
        rows: (pairs,) examples of `pretraining_data.pairs.EXAMPLE_DTYPE`.

    Returns:
        Feature name -> (pairs,) values.
    """
    common = np.zeros(len(rows))
    for index, row in enumerate(rows):
        a, b = (side_ids(store, row, side) for side in "ab")
        least = max(1, min(len(a), len(b)))  # B can be empty if a sentence has one token
        common[index] = len(np.intersect1d(a, b, assume_unique=True)) / least
    return {
        "the share of tokens that A and B have in common": common,
        "the length of A": rows["a_length"],
        "the length of B": rows["b_length"],
        "the total length": rows["a_length"] + rows["b_length"],
    }


def side_ids(store: TokenStore, row: np.void, side: str) -> np.ndarray:
    """Return the distinct token ids of one side of a pair, "a" or "b"."""
    start = int(row[f"{side}_start"])
    tokens = store.arrays(int(row[f"{side}_shard"])).tokens
    return np.unique(tokens[start : start + int(row[f"{side}_length"])])


def stump(values: np.ndarray, labels: np.ndarray) -> float:
    """Return the accuracy, on the second half, of the threshold that is best on the first half.

    Args:
        values: (pairs,) feature values.
        labels: (pairs,) bool labels.
    """
    half = len(values) // 2
    order = np.argsort(values[:half], kind="stable")
    ranked, answers = values[:half][order], labels[:half][order]
    true_before = np.concatenate([[0], np.cumsum(answers)])
    places = np.arange(half + 1)
    right = true_before + (half - places) - (true_before[-1] - true_before)  # if true below the cut
    ends = np.concatenate([[True], ranked[1:] != ranked[:-1], [True]])  # never cut equal values
    below = bool(right[ends].max() >= half - right[ends].min())
    score = np.where(ends, right if below else half - right, -1)
    cut = int(score.argmax())
    limit = -np.inf if cut == 0 else ranked[cut - 1]
    said = (values[half:] <= limit) == below
    return float((said == labels[half:]).mean())


def check_next_sentence(run: RunRecords) -> list[Finding]:
    """Check whether pair accuracy is at chance, or high before the token objective is learned."""
    if not run.pairs:
        return []
    records = third_of(run.present(), 2)
    majority = run.commoner_label(record_phase(records[-1])) if records else None
    accuracy = mean(records, f"{run.pairs}_accuracy", "sequences")
    seen = sum(finite_number(record, "sequences") or 0 for record in records)
    if majority is None or accuracy is None or seen < FEWEST_PAIRS:
        return check_easy(run)
    labels, change, _ = QUESTIONS[run.pairs]
    level, blind = last_level(run), blind_losses(run)
    learns = blind is None or level is None or uses_context(level, *blind)
    at_chance = accuracy < majority + max(CHANCE, 3 * math.sqrt(0.25 / seen))
    severity = "ok"
    if at_chance and run.sequences >= EARLY_EXAMPLES:
        severity = "problem" if learns else "notice"
    elif at_chance and learns:
        severity = "notice"
    chance = make_finding(
        "next-sentence-chance",
        severity,
        {"accuracy": accuracy, "majority": majority, "examples": run.sequences},
        f"{percent(accuracy)} of {labels} are right at the end; the more frequent label alone gets "
        f"{percent(majority)}; {run.sequences:,} examples"
        + ("; it is only learned after the plateau" if at_chance and not learns else ""),
        change,
    )
    return [chance, *check_easy(run)]


def check_easy(run: RunRecords) -> list[Finding]:
    """Check whether pair labels were predicted while the token loss still used no context."""
    blind, majority = blind_losses(run), run.baseline("nsp_majority")
    if majority is None or majority >= RIGHT_AWAY or blind is None:
        return []
    labels, _, change = QUESTIONS[run.pairs]
    leaks = [
        record
        for record in sorted(run.steps + run.evaluations, key=record_step)
        if (finite_number(record, f"{run.pairs}_accuracy") or 0) >= RIGHT_AWAY
        and (finite_number(record, "sequences") or 0) >= FEWEST_PAIRS / 5
        and (loss := finite_number(record, f"{run.words}_loss")) is not None
        and not uses_context(loss, *blind)
    ]
    said = f"{len(leaks):,} journal lines have {percent(RIGHT_AWAY)} of {labels} right "
    said += "while tokens are still predicted without context"
    if leaks:
        said += f", the first at update {record_step(leaks[0]):,}: a shortcut reveals the labels"
    return [
        make_finding(
            "next-sentence-easy",
            ("ok", "notice", "problem")[min(2, len(leaks))],
            {"lines": len(leaks), "step": record_step(leaks[0]) if leaks else None},
            said,
            change,
        )
    ]
