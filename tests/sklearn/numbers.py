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
    def __init__(
        self,
        model: Any = None,
        *,
        epochs: int = 1,
        learning_rate: float = 1e-2,
        class_weight: Any = None,
        precision: str = "fp32",
        random_state: Any = 1,
    ) -> None:
        super().__init__(
            model,
            epochs=epochs,
            learning_rate=learning_rate,
            class_weight=class_weight,
            precision=precision,
            random_state=random_state,
        )


class NumberRegressor(OfNumbers, BertRegressor):
    def __init__(
        self,
        model: Any = None,
        *,
        epochs: int = 1,
        learning_rate: float = 1e-2,
        precision: str = "fp32",
        random_state: Any = 1,
    ) -> None:
        super().__init__(
            model,
            epochs=epochs,
            learning_rate=learning_rate,
            precision=precision,
            random_state=random_state,
        )


class NumberEmbedder(OfNumbers, BertEmbedder):
    def __init__(self, model: Any = None, *, precision: str = "fp32") -> None:
        super().__init__(model, precision=precision)
