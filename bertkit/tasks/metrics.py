"""The metrics of paper sections 4.1 to 4.3, as fractions.

Accuracy, F1 and Matthews correlation are scikit-learn's, Pearson and Spearman SciPy's, as in the
reference scripts. A metric that is undefined, as for a constant prediction, is 0. The metric of
entities is in `conll.py`.

SQuAD's exact match and F1 are computed as evaluate-v1.1.py and evaluate-v2.0.py compute them
(Rajpurkar et al. 2016 and 2018). The two programs differ where an answer is empty after
normalisation; `is_version2` decides which of them scores a set of questions.
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


def accuracy(gold: Names, predicted: Names, positive: str) -> float:
    """The share of equal labels."""
    return sum(g == p for g, p in zip(gold, predicted, strict=True)) / max(1, len(gold))


def f1(gold: Names, predicted: Names, positive: str) -> float:
    """F1 of one class (GLUE's for MRPC and QQP), whatever others a model may answer."""
    from sklearn.metrics import f1_score

    pairs = ([name == positive for name in names] for names in (gold, predicted))
    return float(f1_score(*pairs, zero_division=0.0))


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


ARTICLES = re.compile(r"\b(?:a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_answer(text: str) -> str:
    """Lower case without ASCII punctuation and English articles, one space between words."""
    return " ".join(ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split())


def exact_match(prediction: str, gold: str) -> float:
    """1.0 if both texts are equal when normalised, else 0.0."""
    return float(normalize_answer(prediction) == normalize_answer(gold))


def answer_f1(prediction: str, gold: str, *, version2: bool = False) -> float:
    """The harmonic mean of precision and recall over normalised words, counted with repetition.

    Two texts that are both empty when normalised get 1.0 under `version2` and 0.0 otherwise.
    """
    predicted, wanted = normalize_answer(prediction).split(), normalize_answer(gold).split()
    if version2 and not (predicted and wanted):
        return float(predicted == wanted)
    common = (Counter(predicted) & Counter(wanted)).total()
    return 2 * common / (len(predicted) + len(wanted)) if common else 0.0


def is_version2(inputs: Sequence[QuestionExample]) -> bool:
    """Whether a set is scored as 2.0: its reader says so, or a question is unanswerable."""
    return any(question.version2 or question.answers == () for question in inputs)


def raw_scores(
    inputs: Sequence[QuestionExample], predictions: Mapping[str, str]
) -> dict[str, tuple[float, float]]:
    """Id -> (exact, F1), each the best over the gold answers; without the missing predictions."""
    if not inputs:
        raise BertkitError("there is no question to score")
    version2 = is_version2(inputs)
    scores = {}
    for question in inputs:
        if question.answers is None:
            raise BertkitError(
                f"{question.place}: no gold answers to score against; use a dev file"
            )
        if question.id not in predictions:
            continue
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
    inputs: Sequence[QuestionExample],
    predictions: Mapping[str, str],
    null_odds: Mapping[str, float] | None = None,
    threshold: float = 0.0,
) -> dict[str, float]:
    """Exact match and F1 in percent, as the official programs compute them.

    Args:
        inputs: questions with gold answers, read with `scoring=True`.
        predictions: id -> text; "" says that there is no answer.
        null_odds: id -> how much likelier no answer is (2.0); where it is above `threshold` the
            question counts as answered with "".
        threshold: for `null_odds`.

    Returns:
        `exact`, `f1`, `total`, `missing` (questions without a prediction: they score 0) and
        `unknown` (predictions for no question); for 2.0 also `HasAns_exact`, `HasAns_f1`,
        `HasAns_total` and `NoAns_` for the unanswerable ones.

    Raises:
        BertkitError: there are no gold answers, or no odds for a prediction.
    """
    scores = raw_scores(inputs, predictions)
    missing = len(inputs) - len(scores)
    if null_odds is not None:
        check_odds(scores, null_odds)
        for question in inputs:
            if question.id in scores and null_odds[question.id] > threshold:
                scores[question.id] = (float(not question.answers),) * 2
    result = squad_averages(scores, inputs)
    result |= {"missing": missing, "unknown": len(predictions) - len(scores)}
    if is_version2(inputs):
        for name, wanted in (("HasAns", True), ("NoAns", False)):
            part = [question for question in inputs if bool(question.answers) == wanted]
            values = squad_averages(scores, part) if part else {}
            result |= {f"{name}_{key}": value for key, value in values.items()}
    return result


def squad_averages(
    scores: Mapping[str, tuple[float, float]], inputs: Sequence[QuestionExample]
) -> dict[str, float]:
    """Mean scores in percent; a missing one is 0."""
    pairs = [scores.get(question.id, (0.0, 0.0)) for question in inputs]
    exact, overlap = (100.0 * sum(values) / len(pairs) for values in zip(*pairs, strict=True))
    return {"exact": exact, "f1": overlap, "total": len(pairs)}


def check_odds(ids: Mapping[str, object], null_odds: Mapping[str, float]) -> None:
    """Every prediction needs finite odds."""
    for question_id in ids:
        if not math.isfinite(null_odds.get(question_id, math.nan)):
            raise BertkitError(f"question {question_id} has a prediction but no finite null odds")


def best_threshold(
    inputs: Sequence[QuestionExample],
    predictions: Mapping[str, str],
    null_odds: Mapping[str, float],
) -> dict[str, float]:
    """The thresholds for `squad_scores` with the highest exact match and F1 (2.0).

    As in evaluate-v2.0.py, but for two cases in which its threshold does not give the score that it
    states: questions of equal odds are taken together, and where to answer nothing is best the
    threshold is not 0 but below all odds if some are 0 or less.

    Args:
        inputs: as in `squad_scores`.
        predictions: the best text that is not empty, whatever its odds.
        null_odds: as in `squad_scores`.

    Returns:
        `best_exact`, `best_exact_threshold`, `best_f1`, `best_f1_threshold`; scores in percent.

    Raises:
        BertkitError: as in `squad_scores`.
    """
    scores = raw_scores(inputs, predictions)
    check_odds(scores, null_odds)
    answerable = {question.id for question in inputs if question.answers}
    ordered = sorted(scores, key=lambda question_id: null_odds[question_id])
    result: dict[str, float] = {}
    for column, name in enumerate(("exact", "f1")):
        best = current = float(sum(question_id not in answerable for question_id in scores))
        threshold = min(0.0, math.nextafter(null_odds[ordered[0]], -math.inf)) if ordered else 0.0
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
