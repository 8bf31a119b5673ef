"""The metrics of paper sections 4.1 to 4.3, as fractions.

F1 and Matthews correlation are computed by scikit-learn, Pearson and Spearman by SciPy, as in the
reference scripts. An undefined metric, as for a constant prediction, is 0. The entity scores are
in `conll.py`.

SQuAD's exact match and F1 are computed as evaluate-v1.1.py and evaluate-v2.0.py compute them
(Rajpurkar et al. 2016 and 2018). The two programs differ if an answer is empty after normalisation;
`is_version2` decides which of them scores a set of questions.
"""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby

import numpy as np

from bertkit.datasets.examples import QuestionExample
from bertkit.errors import BertkitError

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


ARTICLES = re.compile(r"\b(?:a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_answer(text: str) -> str:
    """Lowercase a text, drop ASCII punctuation and English articles, and normalise spaces."""
    return " ".join(ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split())


def exact_match(prediction: str, gold: str) -> float:
    """Return 1.0 if both texts are equal when normalised, else 0.0."""
    return float(normalize_answer(prediction) == normalize_answer(gold))


def answer_f1(prediction: str, gold: str, *, version2: bool = False) -> float:
    """Return the F1 over normalised words, counted with repetition.

    Two texts that are both empty when normalised score 1.0 with `version2` and 0.0 otherwise.
    """
    predicted, wanted = normalize_answer(prediction).split(), normalize_answer(gold).split()
    if version2 and not (predicted and wanted):
        return float(predicted == wanted)
    common = (Counter(predicted) & Counter(wanted)).total()
    return 2 * common / (len(predicted) + len(wanted)) if common else 0.0


def is_version2(inputs: Sequence[QuestionExample]) -> bool:
    """Return whether to score a set as 2.0: it was read as 2.0, or a question is unanswerable."""
    return any(question.version2 or question.answers == () for question in inputs)


def raw_scores(
    inputs: Sequence[QuestionExample], predictions: Mapping[str, str]
) -> dict[str, tuple[float, float]]:
    """Return id -> (exact, F1), each the best over the gold answers.

    Raises:
        BertkitError: there is no question, or one has no gold answers.
    """
    if not inputs:
        raise BertkitError("there is no question to score")
    version2 = is_version2(inputs)
    scores = {}
    for question in inputs:
        if question.answers is None:
            raise BertkitError(
                f"{question.place}: no gold answers to score against; use a dev file"
            )
        golds = [answer.text for answer in question.answers]
        if version2:
            golds = [gold for gold in golds if normalize_answer(gold)] or [""]
        prediction = predictions[question.id]
        scores[question.id] = (
            max(exact_match(prediction, gold) for gold in golds),
            max(answer_f1(prediction, gold, version2=version2) for gold in golds),
        )
    return scores


def squad_scores(
    inputs: Sequence[QuestionExample], predictions: Mapping[str, str]
) -> dict[str, float]:
    """Compute exact match and F1 in percent, as the official programs do.

    The questions, with gold answers, are read with `scoring=True`. The predictions are the text for
    the id of each question, "" if there is no answer.

    Returns:
        `exact`, `f1` and `total`; for 2.0 also `HasAns_exact`, `HasAns_f1`, `HasAns_total`, and the
        same with `NoAns_` for the unanswerable questions.

    Raises:
        BertkitError: see `raw_scores`.
    """
    scores = raw_scores(inputs, predictions)
    result = squad_averages(scores, inputs)
    if is_version2(inputs):
        for name, wanted in (("HasAns", True), ("NoAns", False)):
            part = [question for question in inputs if bool(question.answers) == wanted]
            values = squad_averages(scores, part) if part else {}
            result |= {f"{name}_{key}": value for key, value in values.items()}
    return result


def squad_averages(
    scores: Mapping[str, tuple[float, float]], inputs: Sequence[QuestionExample]
) -> dict[str, float]:
    """Return mean scores in percent."""
    pairs = [scores[question.id] for question in inputs]
    exact, overlap = (100.0 * sum(values) / len(pairs) for values in zip(*pairs, strict=True))
    return {"exact": exact, "f1": overlap, "total": len(pairs)}


def best_threshold(
    inputs: Sequence[QuestionExample],
    predictions: Mapping[str, str],
    null_odds: Mapping[str, float],
) -> dict[str, float]:
    """Find the thresholds for the null odds with the highest exact match and F1 (2.0).

    A question whose odds are above the threshold counts as answered with "".

    This differs from evaluate-v2.0.py in two cases where its threshold does not give the score that
    it reports: questions with equal odds are decided together, and if never answering is best and
    some odds are 0 or less, the threshold is below all odds and not 0.

    Args:
        inputs: see `squad_scores`.
        predictions: id -> the best text that is not empty, whatever its odds.
        null_odds: id -> the finite score of no answer relative to the answer.

    Returns:
        `best_exact`, `best_exact_threshold`, `best_f1`, `best_f1_threshold`; scores in percent.

    Raises:
        BertkitError: see `raw_scores`.
    """
    scores = raw_scores(inputs, predictions)
    answerable = {question.id for question in inputs if question.answers}
    ordered = sorted(scores, key=lambda question_id: null_odds[question_id])
    result: dict[str, float] = {}
    for column, name in enumerate(("exact", "f1")):
        best = current = float(sum(question_id not in answerable for question_id in scores))
        threshold = min(0.0, math.nextafter(null_odds[ordered[0]], -math.inf))
        for odds, group in groupby(ordered, key=lambda question_id: null_odds[question_id]):
            for question_id in group:
                if question_id in answerable:
                    current += scores[question_id][column]
                else:
                    current -= bool(predictions[question_id])
            if current > best:
                best, threshold = current, odds
        result |= {f"best_{name}": 100.0 * best / len(inputs), f"best_{name}_threshold": threshold}
    return result
