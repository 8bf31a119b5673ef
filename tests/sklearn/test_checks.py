"""scikit-learn's own checks of estimators, for which rows of numbers become texts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.utils.estimator_checks import estimator_checks_generator
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


CHECKS = [
    pytest.param(made, check, id=f"{type(made).__name__}-{getattr(check, 'func', check).__name__}")
    for estimator in (NumberClassifier(), NumberRegressor(), NumberEmbedder())
    for made, check in estimator_checks_generator(estimator)
    if "readonly_memmap" not in str(check)  # the same again with arrays that become texts anyway
]


@pytest.mark.slow
@pytest.mark.parametrize(("estimator", "check"), CHECKS)
def test_check(estimator: Any, check: Any, pretrained: Path) -> None:
    try:
        check(estimator.set_params(model=pretrained))
    except AssertionError as error:
        # Products in fp32 round by the rows of their batch; the check allows a difference of 1e-7.
        if "not invariant when applied to a subset" not in str(error):
            raise
        differences = re.findall(r"Max absolute difference among violations: (\S+)", str(error))
        assert [float(one) for one in differences] == [pytest.approx(0, abs=1e-6)]
