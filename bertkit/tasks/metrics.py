"""The metrics of paper section 4.1, by the libraries that the reference scripts use, as fractions.

Accuracy, F1 and Matthews correlation are scikit-learn's, Pearson and Spearman SciPy's. Where a
metric is not defined it is 0, as for a constant prediction. SQuAD's are in `squad.py`, those of
entities in `conll.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

Names = Sequence[str]


def accuracy(gold: Names, predicted: Names, positive: str) -> float:
    """The share of equal labels."""
    return sum(g == p for g, p in zip(gold, predicted, strict=True)) / max(1, len(gold))


def f1(gold: Names, predicted: Names, positive: str) -> float:
    """F1 of one class (GLUE's for MRPC and QQP)."""
    from sklearn.metrics import f1_score

    return float(f1_score(gold, predicted, pos_label=positive, zero_division=0.0))


def macro_f1(gold: Names, predicted: Names, positive: str) -> float:
    """The mean of the F1 of every class that occurs."""
    from sklearn.metrics import f1_score

    return float(f1_score(gold, predicted, average="macro", zero_division=0.0))


def matthews(gold: Names, predicted: Names, positive: str) -> float:
    """Matthews correlation (GLUE's for CoLA): 0 for a constant prediction."""
    from sklearn.metrics import matthews_corrcoef

    if len({*gold, *predicted}) == 1:  # scikit-learn says 0, too, and warns
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
    """Pearson's and Spearman's correlation (GLUE's for STS-B), 0 where a side is constant."""
    from scipy.stats import pearsonr, spearmanr

    error = float(np.mean((np.asarray(gold) - np.asarray(predicted)) ** 2))
    if len(gold) < 2 or np.ptp(gold) == 0 or np.ptp(predicted) == 0:
        return {"pearson": 0.0, "spearman": 0.0, "mean_squared_error": error}
    return {
        "pearson": float(pearsonr(gold, predicted)[0]),
        "spearman": float(spearmanr(gold, predicted)[0]),
        "mean_squared_error": error,
    }


def multi_label(
    gold: Sequence[Names], predicted: Sequence[Names], labels: Names
) -> dict[str, float]:
    """F1 over all (input, label) decisions together, mean F1 of the labels, and exact sets."""
    true = np.array([[label in row for label in labels] for row in gold])
    found = np.array([[label in row for label in labels] for row in predicted])
    # By hand: scikit-learn takes a single column for two classes and counts the other one, too.
    right, given = (true & found).sum(axis=0), true.sum(axis=0) + found.sum(axis=0)
    return {
        "micro_f1": float(2 * right.sum() / max(1, given.sum())),
        "macro_f1": float(np.mean(2 * right / np.maximum(1, given))),
        "exact_match": float((true == found).all(axis=1).mean()),
    }
