"""Sentence pairs (section 3.1): what those of a store are like, and whether a run learns from them.

Of a store: label balance, tokens cut, shortcuts. A next-sentence task teaches nothing where its
answer shows without reading: in the lengths, or in whether A and B have words in common. How far
one such number gets is measured: the best threshold on it is chosen on one half of a sample and
tried on the other.
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
"""Tokens of the examples: those of the paper's first phase (A.2)."""
PAIR_SAMPLE = 4_000
"""Pairs that are looked at for shortcuts."""
MIN_PAIRS = 200
"""Of fewer pairs nothing can be said."""
LIMIT_OF_BALANCE = 0.9
"""Where one label is commoner than this, the balance is the finding, and shortcuts are not."""
CHANCE = 0.03
"""Accuracy on pairs so little above the commoner label's share is chance."""
FEWEST_PAIRS = 500
"""Of fewer examples no accuracy is judged."""
RIGHT_AWAY = 0.95
"""Accuracy on pairs that nothing but a shortcut reaches on the plateau."""

QUESTIONS = {
    "nsp": (
        "next-sentence labels",
        "B must really follow A: check that documents are whole and in order, not shuffled "
        "lines; longer examples help, too",
        "look at pair-shortcut, label-balance and one-sentence-documents of the store; make "
        "documents of one language and kind",
    ),
    "sop": (
        "sentence-order labels",
        "sentences must stand in their order: check that documents are not shuffled lines; longer "
        "examples help, too",
        "look at pair-shortcut of the store: something marks where a document begins, such as a "
        "title or a template",
    ),
}
"""The pairs' objective as the journal has it -> its labels, and what to change about it where they
are not learnt, and where they are learnt without reading."""


def check_pairs(store: TokenStore, shards: list[int], pair: str = "nsp") -> list[Finding]:
    """Make the examples of the first shards that have two documents, and look at them.

    Args:
        store: the training split.
        shards: its undamaged shards.
        pair: the pair objective, as in `PairOptions`.
    """
    chosen = first_window(store, shards)
    if not chosen:
        return []
    options = PairOptions(max_length=LENGTH, pair=pair)
    rows = plan_block(store, chosen, options, 0, 0, 0)
    measured = measure_pairs(rows, LENGTH)
    where = f"{measured.examples:,} examples of length {LENGTH}"
    where += "" if len(chosen) == len(store.shards) else " (the first of the corpus)"
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
        f"without reading, by {best} alone, {percent(reached[best])} of the labels are right "
        f"(the commoner label: {percent(most)}; {len(sample):,} pairs)",
        "documents have too little in common, so next-sentence prediction teaches nothing: join "
        "documents of one topic or language into a corpus of their own, or train without it"
        if pair == "nsp"
        else "the order of sentences shows without reading, so it teaches nothing: leave it out",
    )
    return [*findings, shortcut]


def first_window(store: TokenStore, shards: list[int]) -> list[int]:
    """As few of the shards, from the first, as have two documents; none if all have fewer."""
    documents = 0
    for count, shard in enumerate(shards, start=1):
        documents += len(store.arrays(shard).documents) - 1
        if documents > 1:
            return shards[:count]
    return []


def pair_features(store: TokenStore, rows: np.ndarray) -> dict[str, np.ndarray]:
    """Numbers that take no reading; each (pairs,).

    Args:
        store: where the rows point.
        rows: a table of `examples.pairs.ROW`.
    """
    common = np.zeros(len(rows))
    for index, row in enumerate(rows):
        a, b = (side_ids(store, row, side) for side in "ab")
        least = max(1, min(len(a), len(b)))  # of a sentence of one piece that is cut, B is empty
        common[index] = len(np.intersect1d(a, b, assume_unique=True)) / least
    return {
        "the pieces that A and B share": common,
        "the length of A": rows["a_length"],
        "the length of B": rows["b_length"],
        "the length of both": rows["a_length"] + rows["b_length"],
    }


def side_ids(store: TokenStore, row: np.void, side: str) -> np.ndarray:
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


def check_next_sentence(run: RunRecords) -> list[Finding]:
    """Whether the pairs' labels are at chance, or were solved before the words were."""
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
        f"{percent(accuracy)} of {labels} are right at the end; the commoner label alone gets "
        f"{percent(majority)}; {run.sequences:,} examples"
        + ("; it comes after the plateau" if at_chance and not learns else ""),
        change,
    )
    return [chance, *check_easy(run)]


def check_easy(run: RunRecords) -> list[Finding]:
    """Whether pairs were told apart while the words were still guessed blindly."""
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
    said += "while the words are still guessed without context"
    if leaks:
        said += f", the first at update {record_step(leaks[0]):,}: labels show without reading"
    return [
        make_finding(
            "next-sentence-easy",
            ("ok", "notice", "problem")[min(2, len(leaks))],
            {"lines": len(leaks), "step": record_step(leaks[0]) if leaks else None},
            said,
            change,
        )
    ]
