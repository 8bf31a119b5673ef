"""Findings: what was measured, how severe it is, and what to change.

`THRESHOLDS` lists every finding with the numbers from which it is a notice or a problem;
docs/doctor.md explains them, and a test keeps the two equal. The severity of a finding without
limits follows from the rule that its check describes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

SEVERITIES = ("ok", "notice", "problem")
"""The severities, from best to worst."""


@dataclass(frozen=True)
class Threshold:
    """The numbers from which a measured value is a notice and a problem."""

    notice: float = math.inf
    problem: float = math.inf
    unit: str = "share"
    """The unit of the value: share (shown in per cent), or the name of what is counted."""
    low: bool = False
    """Whether low values are the bad ones; an unused limit is then -inf."""

    def grade(self, value: float) -> str:
        """Return the severity of a value."""
        sign = -1 if self.low else 1
        if sign * value >= sign * self.problem:
            return "problem"
        return "notice" if sign * value >= sign * self.notice else "ok"

    def written(self, value: float) -> str:
        """Return a limit in the form in which docs/doctor.md shows it."""
        if not math.isfinite(value):
            return "-"
        return percent(value) if self.unit == "share" else f"{value:,.10g} {self.unit}".strip()


RULE = Threshold(unit="rule")
"""The entry of findings that no single number decides: their check describes the rule."""

STORE_LIMITS = {
    "files": RULE,
    "tokenizer": RULE,
    "corpus-size": Threshold(1_000_000, 10_000, "tokens", low=True),
    "documents": Threshold(100, 10, "documents", low=True),
    "held-out-size": Threshold(20_000, -math.inf, "tokens", low=True),
    "held-out-copies": Threshold(0.01, 0.1),
    "duplicate-documents": Threshold(0.01, 0.1),
    "repeated-sentences": Threshold(0.05, 0.2),
    "largest-document": Threshold(0.1, 0.5),
    "one-sentence-documents": Threshold(0.2, 0.5),
    "long-sentences": Threshold(0.1, 0.4),
    "unknown-tokens": Threshold(0.005, 0.02),
    "fertility": Threshold(1.8, 2.5, "tokens a word"),
    "unused-vocabulary": Threshold(0.25, 0.8),
    "label-balance": Threshold(0.65, 0.8),
    "cut-tokens": Threshold(0.4, 0.7),
}
"""The findings about a token store, with their limits."""

RUN_LIMITS = {
    "state": RULE,
    "journal": RULE,
    "vocabulary": RULE,
    "corpus": RULE,
    "plateau": RULE,
    "learning-rate-high": RULE,
    "learning-rate-low": RULE,
    "warm-up": Threshold(0.25, 0.5),
    "next-sentence-chance": RULE,
    "replaced-chance": RULE,
    "label-balance": STORE_LIMITS["label-balance"],
    "cut-tokens": STORE_LIMITS["cut-tokens"],
    "evaluation": RULE,
    "overfitting": Threshold(0.3, 1.0, "nats"),
    "epochs": Threshold(50, 500, "epochs"),
}
"""The findings about a pre-training run, with their limits."""

THRESHOLDS = STORE_LIMITS | RUN_LIMITS


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    name: str
    """A key of `THRESHOLDS`."""
    severity: str
    """One of ok, notice and problem."""
    numbers: dict[str, Any]
    """The measured values, by name."""
    meaning: str
    """A sentence that states the most important values and what they mean."""
    change: str = ""
    """Advice on what to change; empty if the severity is ok."""

    def lines(self) -> list[str]:
        """Return a line that starts with the severity and, if there is advice, a second with it."""
        first = f"{self.severity:<8} {self.name}: {self.meaning}"
        return [first, f"{'':<8} > {self.change}"] if self.change else [first]

    def as_json(self) -> dict[str, Any]:
        """Return all fields as JSON values."""
        return asdict(self)


def make_finding(
    name: str, severity: str, numbers: dict[str, Any], meaning: str, change: str = ""
) -> Finding:
    """Return a finding whose severity a rule has decided; an ok finding carries no advice."""
    assert name in THRESHOLDS, name
    assert severity in SEVERITIES, severity
    return Finding(name, severity, numbers, meaning, "" if severity == "ok" else change)


def judge_value(
    name: str, value: float, numbers: dict[str, Any], meaning: str, change: str = ""
) -> Finding:
    """Return a finding whose severity follows from one value and the limits of this name."""
    return make_finding(name, THRESHOLDS[name].grade(value), numbers, meaning, change)


def worst_severity(severities: Iterable[str]) -> str:
    """Return the worst of some severities, or ok if there are none."""
    return max(severities, key=SEVERITIES.index, default="ok")


def percent(value: float) -> str:
    """Format a share in per cent: two digits below 10 %, and 100 % only for exactly 1."""
    if 0 < value < 1e-5:
        return "less than 0.001%"
    text = f"{100 * value:.2g}%" if value < 0.1 else f"{value:.0%}"
    return f"{min(value, 0.9999):.2%}" if text == "100%" and value < 1 else text


PAIR_LABELS = {
    "nsp": (
        "a random next sentence",
        "the next sentence of a document or chunk of one sentence is always random: provide whole "
        "documents, split sentences (`bertkit prepare --language`), or raise phases.lengths",
    ),
    "sop": (
        "A and B swapped",
        "a document of one sentence cannot be swapped: provide whole documents",
    ),
}
"""`PairOptions.pair` -> what label 1 means, and advice on how to balance the labels."""


def pair_findings(
    random_share: float, cut_share: float, where: str, pair: str = "nsp"
) -> list[Finding]:
    """Return the findings about label balance and truncated tokens of measured examples.

    `random_share` is the share of examples with label 1, `cut_share` that of the drawn tokens which
    truncation removes, and `where` a phrase that says which examples were measured. Label balance
    is only judged if pairs have a loss.
    """
    balance = []
    if pair in PAIR_LABELS:
        majority = max(random_share, 1 - random_share)
        label, change = PAIR_LABELS[pair]
        said = f"{percent(random_share)} of {where} have {label} (50% intended): always predicting "
        said += f"the more frequent label is {percent(majority)} accurate"
        numbers = {"random_share": random_share}
        balance = [judge_value("label-balance", majority, numbers, said, change)]
    return [
        *balance,
        judge_value(
            "cut-tokens",
            cut_share,
            {"cut_share": cut_share},
            f"truncation removes {percent(cut_share)} of the tokens drawn for {where}",
            "sentences are long compared with the examples: raise phases.lengths, or split the "
            "text into sentences (`bertkit prepare --language`)",
        ),
    ]
