"""The metrics of paper section 4.1, as fractions.

F1 and Matthews correlation are computed by scikit-learn, Pearson and Spearman by SciPy, as in the
reference scripts. An undefined metric, as for a constant prediction, is 0. The scores of entities
are in `entities.py`, those of SQuAD in `squad.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np

Names = Sequence[str]
FRACTION = re.compile(r"(^|_)(accuracy|precision|recall|f1|exact|match|matthews|pearson|spearman)$")


def is_fraction(metric: str) -> bool:
    """Return whether the name of a metric, as in "macro_f1" or "f1/PER", is that of a fraction.

    Fractions are shown in percent; other values, such as a user's own metric, are shown as numbers.
    """
    return FRACTION.search(metric.partition("/")[0]) is not None


def accuracy(gold: Names, predicted: Names, positive: str) -> float:
    """Return the share of correct labels."""
    return sum(g == p for g, p in zip(gold, predicted, strict=True)) / max(1, len(gold))


def f1(gold: Names, predicted: Names, positive: str) -> float:
    """Return the F1 of the positive class (GLUE's for MRPC and QQP) against all others."""
    from sklearn.metrics import f1_score

    pairs = ([name == positive for name in names] for names in (gold, predicted))
    return float(f1_score(*pairs, zero_division=0.0))


def macro_f1(gold: Names, predicted: Names, positive: str) -> float:
    """Return the mean F1 over the classes that occur."""
    from sklearn.metrics import f1_score

    return float(f1_score(gold, predicted, average="macro", zero_division=0.0))


def matthews(gold: Names, predicted: Names, positive: str) -> float:
    """Return the Matthews correlation (GLUE's for CoLA): 0 for a constant prediction."""
    from sklearn.metrics import matthews_corrcoef

    if len({*gold, *predicted}) == 1:  # scikit-learn also returns 0, but warns
        return 0.0
    return float(matthews_corrcoef(gold, predicted))


CLASSIFICATION: dict[str, Callable[[Names, Names, str], float]] = {
    "accuracy": accuracy,
    "f1": f1,
    "macro_f1": macro_f1,
    "matthews": matthews,
}
"""Name → (gold labels, predicted labels, positive label) → value."""


def correlations(gold: Sequence[float], predicted: Sequence[float]) -> dict[str, float]:
    """Return Pearson, Spearman (GLUE's for STS-B; 0 if a side is constant) and squared error."""
    from scipy.stats import pearsonr, spearmanr

    constant = len(gold) < 2 or np.ptp(gold) == 0 or np.ptp(predicted) == 0
    return {
        "pearson": 0.0 if constant else float(pearsonr(gold, predicted)[0]),
        "spearman": 0.0 if constant else float(spearmanr(gold, predicted)[0]),
        "mean_squared_error": float(np.mean((np.asarray(gold) - np.asarray(predicted)) ** 2)),
    }


def multi_label(
    gold: Sequence[Names], predicted: Sequence[Names], labels: Names
) -> dict[str, float]:
    """Return micro F1 over all (input, label) pairs, macro F1, and the share of exact sets."""
    true = np.array([[label in row for label in labels] for row in gold])
    found = np.array([[label in row for label in labels] for row in predicted])
    # Not scikit-learn: it takes a single column for two classes and counts the negative one too.
    right, given = (true & found).sum(axis=0), true.sum(axis=0) + found.sum(axis=0)
    return {
        "micro_f1": float(2 * right.sum() / max(1, given.sum())),
        "macro_f1": float(np.mean(2 * right / np.maximum(1, given))),
        "exact_match": float((true == found).all(axis=1).mean()),
    }
