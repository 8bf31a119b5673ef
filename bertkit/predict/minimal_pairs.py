"""Evaluation of pre-trained models on minimal pairs, a yardstick that needs no fine-tuning.

A model is right about a pair if the acceptable sentence has the higher (pseudo-)log-likelihood
(Warstadt et al. 2020, section 4); equal scores count half. BLiMP's accuracy is the mean over its
sets, so every phenomenon has the same weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from bertkit.console import Console, console_or_new
from bertkit.datasets.minimal_pairs import BAD, GOOD, MinimalPair, read_minimal_pairs
from bertkit.errors import BertkitError
from bertkit.files import from_home, write_json, write_json_lines
from bertkit.predict.engine import count_bar
from bertkit.predict.likelihood import SentenceScorer, choose_method
from bertkit.predict.pretrained import load_pretrained
from bertkit.text.lines import TextCounts, describe_skipped
from bertkit.training.device import environment

RECORD_FILE, SCORES_FILE = "minimal-pairs.json", "minimal-pairs.jsonl"
"""The files of a saved evaluation."""


class ScoredPair(NamedTuple):
    """A minimal pair with the log-likelihoods of its sentences, in nats."""

    pair: MinimalPair
    good: float
    bad: float

    @property
    def credit(self) -> float:
        """1 if the acceptable sentence is more likely, 0.5 if both are equal, else 0."""
        return 0.5 if self.good == self.bad else float(self.good > self.bad)


class SetAccuracy(NamedTuple):
    """The accuracy on one set of minimal pairs."""

    field: str
    pairs: int
    ties: int
    """The number of pairs whose sentences have equal scores; each counts half."""
    accuracy: float
    """A fraction of 1."""


@dataclass(frozen=True)
class MinimalPairEvaluation:
    """The scores of a model's sentences, and its accuracy on minimal pairs."""

    model: str
    data: str
    split: str
    method: str
    """How sentences are scored; see `bertkit.predict.likelihood`."""
    precision: str
    """The precision that the network computed in: "fp32", "bf16" or "int8"."""
    device: str
    seconds: float
    """The time for scoring, without loading the model."""
    sentences: int
    """The number of distinct sentences."""
    scored: list[ScoredPair]
    skipped: dict[str, int]
    """Reason -> the number of pairs left out."""

    @property
    def sets(self) -> dict[str, SetAccuracy]:
        """The accuracy by set, in the order of the data."""
        members: dict[str, list[ScoredPair]] = {}
        for one in self.scored:
            members.setdefault(one.pair.set, []).append(one)
        return {
            name: SetAccuracy(
                own[0].pair.field,
                len(own),
                sum(one.good == one.bad for one in own),
                fmean(one.credit for one in own),
            )
            for name, own in members.items()
        }

    @property
    def fields(self) -> dict[str, float]:
        """The mean accuracy of the sets of each linguistic field, by field; {} without fields."""
        sets = self.sets.values()
        return {
            name: fmean(one.accuracy for one in sets if one.field == name)
            for name in dict.fromkeys(one.field for one in sets)
            if name
        }

    @property
    def accuracy(self) -> float:
        """The mean accuracy of the sets, as a fraction of 1."""
        return fmean(one.accuracy for one in self.sets.values())

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the scores of sentences, as JSON values."""
        settings = ("model", "data", "split", "method", "precision", "device")
        return {
            **{name: getattr(self, name) for name in (*settings, "accuracy", "fields")},
            "sets": {name: one._asdict() for name, one in self.sets.items()},
            "pairs": len(self.scored),
            "ties": sum(one.good == one.bad for one in self.scored),
            "sentences": self.sentences,
            "skipped": self.skipped,
            "seconds": round(self.seconds, 3),
            "environment": environment(),
        }

    def save(self, out: Path | str) -> list[Path]:
        """Write the record and, as JSON lines, the scores of every pair to a folder.

        Returns:
            The two files.

        Raises:
            BertkitError: the folder cannot be written.
        """
        out = Path(from_home(out))
        rows = (
            {**one.pair._asdict(), "good_score": one.good, "bad_score": one.bad}
            for one in self.scored
        )
        write_json_lines(out / SCORES_FILE, rows)
        write_json(out / RECORD_FILE, self.to_dict())
        return [out / RECORD_FILE, out / SCORES_FILE]


def evaluate_minimal_pairs(
    model: Path | str,
    data: Any,
    *,
    method: str = "auto",
    split: str = "all",
    good: str = GOOD,
    bad: str = BAD,
    precision: str = "fp32",
    device: str = "auto",
    console: Console | None = None,
) -> MinimalPairEvaluation:
    """Measure how often a pre-trained model prefers the acceptable sentence of a minimal pair.

    Sentences are compared by their pseudo-log-likelihood (Salazar et al. 2020), or, if the model
    reads in one direction, by its likelihood. Nothing is truncated: a pair with a sentence that is
    too long for the model is left out and counted, as are pairs without a sentence.

    Args:
        model: a model directory, a run directory or a model of the hub, with a language-model head.
        data: the folder of BLiMP; a file with columns or with alternating lines; a DataFrame, a
            `datasets.Dataset`, or a list of dicts or of (good, bad) tuples.
        method: "within-word-l2r" (Kauf and Ivanova 2023), "pll" (Salazar et al. 2020), "causal", or
            "auto": within-word-l2r for a masked language model, else causal.
        split: "all"; for BLiMP also "dev", the tenth of its sets on which recipes may be chosen, or
            "test", the other sets.
        good: the column of the acceptable sentence.
        bad: the column of the unacceptable sentence.
        precision: "fp32", "bf16", "int8" (CPUs only), or "auto": bf16 if the device computes it
            fast. The default is the same on every machine, because differences of scores are small.
        device: "auto", "cpu", "cuda", ...
        console: the console for progress; None for a new one.

    Raises:
        BertkitError: the model is missing, damaged or has no language-model head; the method does
            not fit it; or the data has no pair that can be scored.
    """
    with console_or_new(console) as shown:
        counts = TextCounts()
        pairs = read_minimal_pairs(data, counts, good=good, bad=bad, split=split)
        predictor = load_pretrained(model, device=device, precision=precision)
        scorer = predictor.scorer
        method = choose_method(method, predictor.model.config)
        pairs, ids = scorable_pairs(pairs, scorer, counts)
        shown.say(*describe_skipped(counts.skipped, counts.examples))
        began = perf_counter()
        bar = count_bar(shown, "scoring", "tokens")
        sums = [numbers.sum() for numbers in scorer.score(ids, method, bar)]
        return MinimalPairEvaluation(
            model=str(model),
            data=str(data) if isinstance(data, str | Path) else f"{len(pairs)} pairs in memory",
            split=split,
            method=method,
            precision=predictor.precision,
            device=str(predictor.device),
            seconds=perf_counter() - began,
            sentences=len({one.tobytes() for one in ids}),
            scored=[
                ScoredPair(pair, float(good), float(bad))
                for pair, good, bad in zip(pairs, sums[::2], sums[1::2], strict=True)
            ],
            skipped=dict(sorted(counts.skipped.items())),
        )


def scorable_pairs(
    pairs: Sequence[MinimalPair], scorer: SentenceScorer, counts: TextCounts
) -> tuple[list[MinimalPair], list[np.ndarray]]:
    """Return the pairs that the model can read, and the ids of each good and bad sentence in turn.

    Raises:
        BertkitError: it can read none of them.
    """
    kept: list[MinimalPair] = []
    ids: list[np.ndarray] = []
    left_out = TextCounts()
    found = scorer.encode([text for pair in pairs for text in (pair.good, pair.bad)])
    for pair, both in zip(pairs, zip(found[::2], found[1::2], strict=True), strict=True):
        lengths = [len(one) for one in both]
        if max(lengths) > scorer.max_tokens:
            reason = f"pair with a sentence of more than {scorer.max_tokens} tokens, left out"
            left_out.note(reason, pair.place)
        elif not min(lengths):
            left_out.note("pair with a sentence without tokens, left out", pair.place)
        else:
            kept.append(pair)
            ids += both
    if not kept:
        reason, place = next(iter(left_out.examples.items()))
        raise BertkitError(
            f"no pair can be scored; the first: {reason} at {place}", code="no-pairs"
        )
    counts += left_out
    return kept, ids
