"""Estimators of scikit-learn: what a fit learns, and that they work where others do."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bertkit import load
from bertkit.predict.embeddings import load_embedder
from tests.conftest import ORACLES

pytestmark = ORACLES

TEXTS = ["river deep", "harbour wide", "thunder loud", "stone dry", "candle hot", "copper red"] * 4
LABELS = ["wet", "wet", "wet", "dry", "dry", "dry"] * 4
FIT: dict[str, Any] = {"epochs": 12, "learning_rate": 1e-2, "batch_size": 8, "precision": "fp32"}


@pytest.fixture(scope="module")
def estimators() -> Any:
    import bertkit.sklearn

    return bertkit.sklearn


@pytest.fixture(scope="module")
def fitted(estimators: Any, pretrained: Path) -> Any:
    return estimators.BertClassifier(pretrained, **FIT).fit(TEXTS, LABELS)


def test_a_classifier_learns(fitted: Any, tmp_path: Path) -> None:
    assert fitted.score(TEXTS, LABELS) == 1.0
    assert fitted.classes_.tolist() == ["dry", "wet"]
    chances = fitted.predict_proba(["river", ""])
    assert chances.shape == (2, 2)
    assert chances.sum(axis=1) == pytest.approx([1.0, 1.0])
    fitted.model_.save(tmp_path / "model")
    results = load(tmp_path / "model", precision="fp32")(TEXTS[:6])
    assert [result.label for result in results] == LABELS[:6]


def test_a_pickle_needs_no_other_file(fitted: Any) -> None:
    again = pickle.loads(pickle.dumps(fitted))
    assert (again.predict_proba(TEXTS) == fitted.predict_proba(TEXTS)).all()


@pytest.mark.slow
def test_seeds_decide_the_model(estimators: Any, pretrained: Path, fitted: Any) -> None:
    same = estimators.BertClassifier(pretrained, **FIT).fit(TEXTS, LABELS)
    other = estimators.BertClassifier(pretrained, random_state=2, **FIT).fit(TEXTS, LABELS)
    assert same.model_.files["model.safetensors"] == fitted.model_.files["model.safetensors"]
    assert other.model_.files["model.safetensors"] != fitted.model_.files["model.safetensors"]


@pytest.mark.slow
def test_labels_keep_their_type(estimators: Any, pretrained: Path) -> None:
    numbers = [7 if label == "wet" else -1 for label in LABELS]
    model = estimators.BertClassifier(pretrained, **FIT, class_weight={7: 2.0}).fit(TEXTS, numbers)
    assert model.predict(TEXTS).tolist() == numbers


@pytest.mark.slow
def test_several_labels(estimators: Any, pretrained: Path) -> None:
    wanted = np.array([[label == "wet", True] for label in LABELS]).astype(int)
    model = estimators.BertClassifier(pretrained, **FIT).fit(TEXTS, wanted)
    assert (model.predict(TEXTS) == wanted).all()
    assert model.predict_proba(TEXTS).shape == (24, 2)


def test_each_of_many_classes_has_its_probability(estimators: Any, pretrained: Path) -> None:
    texts = [f"river {number}" for number in range(120)] * 2
    model = estimators.BertClassifier(pretrained, epochs=1, batch_size=60, precision="fp32")
    chances = model.fit(texts, texts).predict_proba(texts[:2])
    assert (chances > 0).all()
    assert chances.sum(axis=1) == pytest.approx([1.0, 1.0])


@pytest.mark.slow
def test_pairs_and_numbers(estimators: Any, pretrained: Path) -> None:
    table = np.array([[text, "and the"] for text in TEXTS], dtype=object)
    numbers = [100.0 if label == "wet" else 300.0 for label in LABELS]
    model = estimators.BertRegressor(pretrained, **FIT).fit(table, numbers)
    assert model.n_features_in_ == 2
    assert model.score(table, numbers) > 0.8


def test_a_search_over_a_pipeline_of_vectors(estimators: Any, pretrained: Path) -> None:
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import GridSearchCV
    from sklearn.pipeline import make_pipeline

    embedder = estimators.BertEmbedder(pretrained, precision="fp32")
    search = GridSearchCV(
        make_pipeline(embedder, LogisticRegression()),
        {"bertembedder__pooling": ["cls", "mean"]},
        cv=2,
    )
    search.fit(TEXTS, LABELS)
    assert search.best_score_ > 0.5
    vectors = embedder.fit(TEXTS).transform(TEXTS[:3])
    assert (vectors == load_embedder(pretrained, precision="fp32").encode(TEXTS[:3])).all()


@pytest.mark.parametrize(
    ("texts", "labels", "error"),
    [
        ("one text", ["a"], ValueError),
        ([1, 2], ["a", "b"], TypeError),
        (["x", None], ["a", "b"], ValueError),
        (["x", "y"], ["a", "a"], ValueError),
        (["x", "y"], ["a"], ValueError),
        (["x", "y"], ["a", None], ValueError),
        ([["a", "b", "c"]] * 2, ["a", "b"], ValueError),
    ],
)
def test_bad_input(
    estimators: Any, texts: Any, labels: Any, error: type[Exception], pretrained: Path
) -> None:
    with pytest.raises(error):
        estimators.BertClassifier(pretrained, **FIT).fit(texts, labels)


def test_numbers_must_differ_and_predictions_need_a_fit(estimators: Any, pretrained: Path) -> None:
    from sklearn.exceptions import NotFittedError

    for texts, numbers in ((["x", "y"], [2.5, 2.5]), (["x"], [1.0])):
        with pytest.raises(ValueError, match=" y:"):
            estimators.BertRegressor(pretrained, **FIT).fit(texts, numbers)
    classifier = estimators.BertClassifier(pretrained, **FIT)
    for method in (classifier.predict, classifier.predict_proba):
        with pytest.raises(NotFittedError):
            method(["x"])
