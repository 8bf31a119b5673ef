"""scikit-learn's own checks of estimators, for which rows of numbers become texts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.conftest import ORACLES


@ORACLES
@pytest.mark.slow
@pytest.mark.parametrize("name", ["classifier", "regressor", "embedder"])
def test_checks(name: str, pretrained: Path, subtests: pytest.Subtests) -> None:
    from sklearn.utils.estimator_checks import estimator_checks_generator

    from tests.sklearn.numbers import ESTIMATORS

    for estimator, check in estimator_checks_generator(ESTIMATORS[name]):
        if "readonly_memmap" in str(check):
            continue  # the same again with arrays that become texts anyway
        with subtests.test(getattr(check, "func", check).__name__):
            try:
                check(estimator.set_params(model=pretrained))
            except AssertionError as error:
                # Products in fp32 round by the rows of their batch; the check allows 1e-7.
                if "not invariant when applied to a subset" not in str(error):
                    raise
                text = r"Max absolute difference among violations: (\S+)"
                differences = [float(number) for number in re.findall(text, str(error))]
                assert differences == [pytest.approx(0, abs=1e-6)]
