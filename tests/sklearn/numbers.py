"""Estimators of rows of numbers, which become texts."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.utils.validation import validate_data

from bertkit.sklearn import BertClassifier, BertEmbedder, BertRegressor
from tests.conftest import WORDS


def as_texts(estimator: Any, given: Any, y: Any = "no_validation", *, reset: bool) -> np.ndarray:
    """Rows of numbers, (rows, 1) texts with a word for each number."""
    several = {} if isinstance(y, str) else {"multi_output": True}
    checked = validate_data(estimator, given, y, reset=reset, **several)
    numbers = checked[0] if several else checked
    words = np.array(WORDS, dtype=object)[np.clip(np.round(2 * numbers) + 10, 0, 19).astype(int)]
    return np.array([[" ".join(row)] for row in words], dtype=object)


class OfNumbers:
    """Makes an estimator of texts one of numbers."""

    def _texts(self, given: Any, y: Any = "no_validation", *, reset: bool) -> np.ndarray:
        return as_texts(self, given, y, reset=reset)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()  # type: ignore[misc]
        tags.input_tags.two_d_array = True
        tags.input_tags.one_d_array = tags.input_tags.string = False
        for own in (tags.classifier_tags, tags.regressor_tags):
            if own is not None:
                own.poor_score = True  # the network has random weights
        return tags


class NumberClassifier(OfNumbers, BertClassifier):
    pass


class NumberRegressor(OfNumbers, BertRegressor):
    pass


class NumberEmbedder(OfNumbers, BertEmbedder):
    pass


FIT: dict[str, Any] = {"epochs": 1, "learning_rate": 1e-2, "precision": "fp32", "random_state": 1}
ESTIMATORS = {
    "classifier": NumberClassifier(None, **FIT),
    "regressor": NumberRegressor(None, **FIT),
    "embedder": NumberEmbedder(None, precision="fp32"),
}
