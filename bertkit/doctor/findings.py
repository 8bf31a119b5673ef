"""A finding: what was measured, how bad that is, and what to change.

`THRESHOLDS` holds every finding there is with the number from which it is worth a notice or is a
problem; docs/doctor.md explains them, and a test keeps the two equal. A finding without limits is
judged by the rule that its check describes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

SEVERITIES = ("ok", "notice", "problem")
"""From good to bad."""


@dataclass(frozen=True)
class Threshold:
    """From which number on something is worth a notice, and from which it is a problem."""

    notice: float = math.inf
    problem: float = math.inf
    unit: str = "share"
    """share (written in per cent), or what is counted."""
    low: bool = False
    """Whether small numbers are the bad ones; limits that are not used are then -inf."""

    def grade(self, value: float) -> str:
        """The severity of a number."""
        sign = -1 if self.low else 1
        if sign * value >= sign * self.problem:
            return "problem"
        return "notice" if sign * value >= sign * self.notice else "ok"

    def written(self, value: float) -> str:
        """A limit as the documentation has it."""
        if not math.isfinite(value):
            return "-"
        return percent(value) if self.unit == "share" else f"{value:,.10g} {self.unit}".strip()


RULE = Threshold(unit="rule")
"""No single number decides; the check says what does."""

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
    "unknown-pieces": Threshold(0.005, 0.02),
    "fertility": Threshold(1.8, 2.5, "pieces a word"),
    "unused-vocabulary": Threshold(0.25, 0.8),
    "label-balance": Threshold(0.65, 0.8),
    "cut-tokens": Threshold(0.4, 0.7),
    "pair-shortcut": Threshold(0.9, 0.97),
}
"""What can be found in a token store."""

RUN_LIMITS = {
    "state": RULE,
    "journal": RULE,
    "vocabulary": RULE,
    "corpus": RULE,
    "plateau": RULE,
    "learning-rate-high": RULE,
    "learning-rate-low": RULE,
    "gradient-norm": Threshold(20.0, math.inf, "times the usual"),
    "clipping": Threshold(10.0, math.inf, "times the limit"),
    "warm-up": Threshold(0.25, 0.5),
    "schedule-over": Threshold(0.1, 0.5),
    "next-sentence-chance": RULE,
    "next-sentence-easy": RULE,
    "replaced-chance": RULE,
    "label-balance": STORE_LIMITS["label-balance"],
    "cut-tokens": STORE_LIMITS["cut-tokens"],
    "evaluation": RULE,
    "overfitting": Threshold(0.3, 1.0, "nats"),
    "epochs": Threshold(50, 500, "epochs"),
    "throughput": Threshold(0.7, -math.inf, low=True),
    "matmul-share": Threshold(0.05, -math.inf, low=True),
}
"""What can be found in a run."""

THRESHOLDS = STORE_LIMITS | RUN_LIMITS


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    name: str
    """A key of `THRESHOLDS`."""
    severity: str
    """ok, notice or problem."""
    numbers: dict[str, Any]
    """What was measured, by name."""
    meaning: str
    """What the numbers say, in words and with the main one."""
    change: str = ""
    """What to do about it; nothing where all is well."""

    def lines(self) -> list[str]:
        """One line with the severity first, and under it what to change."""
        first = f"{self.severity:<8} {self.name}: {self.meaning}"
        return [first, f"{'':<8} > {self.change}"] if self.change else [first]

    def as_json(self) -> dict[str, Any]:
        """All fields as JSON values."""
        return asdict(self)


def make_finding(
    name: str, severity: str, numbers: dict[str, Any], meaning: str, change: str = ""
) -> Finding:
    """A finding whose severity a rule has decided; advice is kept only where it is needed."""
    assert name in THRESHOLDS, name
    assert severity in SEVERITIES, severity
    return Finding(name, severity, numbers, meaning, "" if severity == "ok" else change)


def judge_value(
    name: str, value: float, numbers: dict[str, Any], meaning: str, change: str = ""
) -> Finding:
    """A finding whose severity follows from one number and its limits."""
    return make_finding(name, THRESHOLDS[name].grade(value), numbers, meaning, change)


def worst_severity(severities: Iterable[str]) -> str:
    """The worst of some severities; ok where there is none."""
    return max(severities, key=SEVERITIES.index, default="ok")


def percent(value: float) -> str:
    """A share in per cent, with two digits where it is small, and 100 only where it is whole."""
    if 0 < value < 1e-5:
        return "less than 0.001%"
    text = f"{100 * value:.2g}%" if value < 0.1 else f"{value:.0%}"
    return f"{value:.2%}" if text == "100%" and value < 1 else text


PAIR_LABELS = {
    "nsp": (
        "a random next sentence",
        "a document or chunk of one sentence can only be 'random': give whole documents, split "
        "sentences (prepare --language), or raise phases.lengths",
    ),
    "sop": (
        "A and B swapped",
        "a document of one piece cannot be swapped: give whole documents",
    ),
}
"""Pair objective -> what label 1 says of an example, and how to balance labels."""


def pair_findings(
    random_share: float, cut_share: float, where: str, pair: str = "nsp"
) -> list[Finding]:
    """What the measured examples say: label balance and tokens cut off.

    Args:
        random_share: share of examples with label 1.
        cut_share: share of the drawn tokens that truncation took.
        where: which examples these are, in words.
        pair: the pair objective; without a loss on pairs there are no labels to balance.
    """
    commoner = max(random_share, 1 - random_share)
    balance = []
    if pair in PAIR_LABELS:
        label, change = PAIR_LABELS[pair]
        said = f"{percent(random_share)} of {where} have {label} (half is meant): always saying "
        said += f"the commoner label gets {percent(commoner)} right"
        numbers = {"random_share": random_share}
        balance = [judge_value("label-balance", commoner, numbers, said, change)]
    return [
        *balance,
        judge_value(
            "cut-tokens",
            cut_share,
            {"cut_share": cut_share},
            f"truncation takes {percent(cut_share)} of the tokens drawn for {where}",
            "sentences are long beside the examples: raise phases.lengths, or split the text into "
            "sentences (prepare --language)",
        ),
    ]
