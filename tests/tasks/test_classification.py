"""The metrics of labels, label sets and numbers, computed by hand."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bertkit.errors import BertkitError
from bertkit.tasks.classification import (
    Classification,
    LabelSetColumns,
    LabelSetResult,
    MultiLabelClassification,
    TextExample,
    label_score,
)
from bertkit.tasks.columns import from_json
from bertkit.tasks.regression import NumberResult, Regression
from bertkit.tasks.types import DataFiles, TaskData, load_dataset
from tests.conftest import ORACLES


def score(name: str, gold: str, predicted: str) -> float:
    """Of labels of one letter each, in a row; "p" is the positive one."""
    return label_score(name, list(gold), list(predicted), "p")


def example(label: Any) -> TextExample:
    return TextExample("", "x", None, label, "f:1")


def correlations(gold: Sequence[float], predicted: Sequence[float]) -> dict[str, float]:
    results = [NumberResult(float(value)) for value in predicted]
    return Regression().score([example(float(value)) for value in gold], results)


def multi_label(gold: Any, predicted: Any, labels: tuple[str, ...]) -> dict[str, float]:
    results = [LabelSetResult(row, {}) for row in predicted]
    return MultiLabelClassification(labels).score([example(row) for row in gold], results)


@pytest.mark.parametrize(
    ("name", "gold", "predicted", "expected"),
    [
        ("accuracy", "pnpn", "ppnn", 1 / 2),
        ("accuracy", "abc", "abd", 2 / 3),
        ("accuracy", "", "", 0),
        # 2 right positives, 1 wrong, 1 missed: precision and recall 2/3
        ("f1", "pppnnnn", "pppnnnn", 1),
        ("f1", "pppnnnn", "ppnpnnn", 2 / 3),
        ("f1", "ppppnn", "pnnnnn", 2 / 5),
        ("f1", "nnn", "nnn", 0),
        ("f1", "nnn", "npn", 0),
        ("f1", "npn", "nnn", 0),
        # a: precision 1, recall 1/2; b: right; c: only predicted
        ("macro_f1", "aab", "acb", (2 / 3 + 1 + 0) / 3),
        # a: precision 3/4, recall 1; b: never predicted
        ("macro_f1", "aaab", "aaaa", (6 / 7 + 0) / 2),
        ("macro_f1", "aaa", "aaa", 1),
    ],
)
def test_scores_of_labels(name: str, gold: str, predicted: str, expected: float) -> None:
    assert score(name, gold, predicted) == pytest.approx(expected)


def test_f1_is_of_one_class_whatever_others_there_are() -> None:
    """As of a model that knows a third label than the set has."""
    assert score("f1", "pnpn", "pmmp") == 0.5


def test_matthews_correlation_is_that_of_its_formula() -> None:
    """(TP TN - FP FN) / sqrt((TP + FP) (TP + FN) (TN + FP) (TN + FN))."""
    gold, predicted = "pppp" + "nnnnnn", "pppn" + "nnnnpp"  # TP 3, FN 1, TN 4, FP 2
    expected = (3 * 4 - 2 * 1) / math.sqrt(5 * 4 * 6 * 5)
    assert score("matthews", gold, predicted) == pytest.approx(expected)
    opposite = predicted.translate(str.maketrans("pn", "np"))
    assert score("matthews", gold, opposite) == pytest.approx(-expected)
    assert score("matthews", gold, gold) == pytest.approx(1)


@pytest.mark.parametrize("name", ["accuracy", "f1", "macro_f1", "matthews"])
@pytest.mark.parametrize(("gold", "predicted"), [("pnp", "ppp"), ("ppp", "pnp"), ("ppp", "ppp")])
def test_constant_labels_are_scored_without_a_warning(name: str, gold: str, predicted: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = score(name, gold, predicted)
    assert (found == 0) == (name == "matthews")


def test_pearson_is_of_values_and_spearman_of_ranks() -> None:
    # deviations from the means: -1 -1 0 2 and -2 -1 -2 5, whose products sum to 13;
    # ranks, tied ones shared: 1.5 1.5 3 4 and 1.5 3 1.5 4, deviations -1 -1 .5 1.5 and -1 .5 -1 1.5
    found = correlations([1, 1, 2, 4], [2, 3, 2, 9])
    assert found["pearson"] == pytest.approx(13 / math.sqrt(6 * 34))
    assert found["spearman"] == pytest.approx(2.25 / 4.5)
    assert found["mean_squared_error"] == pytest.approx((1 + 4 + 0 + 25) / 4)


def test_spearman_sees_order_alone() -> None:
    found = correlations([1, 2, 3, 4], [1, 10, 100, 1000])
    assert found["spearman"] == pytest.approx(1)
    assert found["pearson"] < 0.9


@pytest.mark.parametrize(
    ("gold", "predicted", "error"),
    [([1.0, 2.0, 3.0], [2.0] * 3, 2 / 3), ([2.0] * 3, [1.0, 2.0, 3.0], 2 / 3), ([1.0], [3.0], 4)],
)
def test_correlations_with_a_constant_are_zero_without_a_warning(
    gold: list[float], predicted: list[float], error: float
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = correlations(gold, predicted)
    assert (found["pearson"], found["spearman"]) == (0, 0)
    assert found["mean_squared_error"] == pytest.approx(error)


@ORACLES
def test_scores_are_those_of_scikit_learn_and_scipy() -> None:
    metrics, stats = pytest.importorskip("sklearn.metrics"), pytest.importorskip("scipy.stats")
    rng = np.random.default_rng(0)
    for labels in ("pq", "pqr", "pqrstuv"):
        for count in (8, 20, 200):
            gold, predicted = rng.choice([*labels], (2, count)).tolist()
            found = [
                label_score(name, gold, predicted, "p") for name in ("f1", "macro_f1", "matthews")
            ]
            assert found == pytest.approx([
                metrics.f1_score(gold, predicted, average=None, labels=["p"], zero_division=0)[0],
                metrics.f1_score(gold, predicted, average="macro", zero_division=0),
                metrics.matthews_corrcoef(gold, predicted),
            ])  # fmt: skip
            numbers = rng.integers(0, 4, (2, count)).astype(float)
            found = correlations(*numbers)
            assert found["pearson"] == pytest.approx(stats.pearsonr(*numbers)[0])
            assert found["spearman"] == pytest.approx(stats.spearmanr(*numbers)[0])


def test_scores_of_label_sets() -> None:
    gold = [("a",), ("a", "b"), (), ("a",)]
    predicted = [("a",), ("b",), ("b",), ("a", "b")]
    # a: 2 right of 3 + 2 given; b: 1 right of 1 + 3 given; c is nowhere
    found = multi_label(gold, predicted, ("a", "b", "c"))
    assert found["micro_f1"] == pytest.approx(2 * 3 / 9)
    assert found["macro_f1"] == pytest.approx(np.mean([4 / 5, 2 / 4]))
    assert found["exact_match"] == pytest.approx(1 / 4)


def test_one_column_is_scored_by_its_label_alone() -> None:
    found = multi_label([("a",), (), (), ("a",)], [("a",), (), ("a",), ()], ("a",))
    assert found["micro_f1"] == found["macro_f1"] == pytest.approx(2 / 4)
    assert found["exact_match"] == pytest.approx(2 / 4)


def test_empty_sets_are_equal_and_have_nothing_right() -> None:
    found = multi_label([(), ()], [(), ()], ("a", "b"))
    assert found == {"micro_f1": 0, "macro_f1": 0, "exact_match": 1}


@pytest.mark.parametrize(
    ("value", "names"),
    [
        ("a|b | a", ("a", "b")),
        ('["a|b", 2]', ("a|b", "2")),
        (["b", "a"], ("b", "a")),
        ("", ()),
        (None, None),
        (7, ("7",)),
        ({"choices": ["b", "a"]}, ("b", "a")),
        ('{"a": 1.0, "b": 0.0, "c": true}', ("a", "c")),
    ],
)
def test_labels_in_a_field(value: Any, names: tuple[str, ...] | None) -> None:
    assert LabelSetColumns().label_in(value, "f:1") == names


def test_a_vector_of_labels_is_refused() -> None:
    for value in ([0, 1, 0], [True, False, False], [{"name": "a"}]):
        with pytest.raises(BertkitError, match="0 or 1 for each label"):
            LabelSetColumns().label_in(value, "f:1")
    for value in ({"a": 0.7, "b": 0.3}, {"name": "a"}):
        with pytest.raises(BertkitError, match="needs 0 or 1"):
            LabelSetColumns().label_in(value, "f:1")


@pytest.mark.parametrize("field", ["['a', 'b']", "['a' 'b']", "{'text': ['a']}"])
def test_python_s_notation_is_refused(field: str) -> None:
    for read in (from_json, lambda value: LabelSetColumns().label_in(value, "f:1")):
        with pytest.raises(BertkitError, match="JSON"):
            read(field)
    assert from_json("[ORDER] is 'late']") == "[ORDER] is 'late']"


SETS = [("x one", "damage contact"), ("x two", ""), ("x three", "late"), ("x four", "contact")] * 2
NAMES = ("damage", "late", "contact")


def load_sets(train: Any, **columns: Any) -> TaskData:
    dev = [("new", ())] if "label" not in columns else train
    return load_dataset("multi-label-classification", DataFiles(train=train, dev=dev), columns)


@pytest.mark.parametrize("yes_no", [("1", "0"), ("True", "False"), (1, 0), (1.0, 0.0)])
@pytest.mark.parametrize("source", ["file", "dicts", "frame"])
def test_columns_of_zero_and_one_are_label_sets(
    yes_no: tuple[Any, Any], source: str, write: Callable[..., Path]
) -> None:
    rows: Any = [
        {"text": text, **{name: yes_no[name not in names.split()] for name in NAMES}}
        for text, names in SETS
    ]
    if source == "frame":
        rows = pytest.importorskip("pandas").DataFrame(rows)
    elif source == "file":
        lines = [",".join(map(str, row.values())) for row in rows]
        rows = str(write("rows.csv", "\n".join(["text,damage,late,contact", *lines]) + "\n"))
    data = load_sets(rows, label=list(NAMES))
    assert data.task.labels == ("contact", "damage", "late")
    golds = {e.text: e.gold for e in data.train}
    assert golds == {text: tuple(n for n in NAMES if n in names.split()) for text, names in SETS}
    with pytest.raises(BertkitError, match="holds only"):
        load_sets(rows, label="damage")
    with pytest.raises(BertkitError, match="takes one value for --label"):
        load_dataset("classification", DataFiles(train=rows), {"label": NAMES})


def test_other_values_than_zero_and_one_are_refused() -> None:
    rows = [{"text": "a", "p": 1, "q": 0}, {"text": "b", "p": 2, "q": 0}]
    with pytest.raises(BertkitError, match=r"train\[1\]: 'p' is '2'"):
        load_sets(rows, label=("p", "q"))
    data = load_sets([rows[0], {"text": "c", "p": None, "q": None}], label=("p", "q"))
    assert data.counts.skipped["row without label"] == 2  # in train, and in dev


@pytest.mark.parametrize("separator", [",", ";", "#", "/", "+"])
def test_joined_labels_name_the_separator(separator: str) -> None:
    rows = [(text, names.replace(" ", f"{separator} ")) for text, names in [*SETS, ("y", "damage")]]
    with pytest.raises(BertkitError, match=f"--separator '[{separator}]'"):
        load_sets(rows)
    joined = [(text, labels) for text, labels in rows if separator in labels]
    never_alone = [*joined, ("z", f"late{separator}damage"), ("z", f"late{separator}contact")]
    with pytest.raises(BertkitError, match=f"--separator '[{separator}]'"):
        load_sets([*never_alone, ("z", f"contact{separator}late")])
    assert load_sets(rows, separator=separator).task.labels == ("contact", "damage", "late")
    whole = load_sets(rows, separator="|").task.labels
    assert f"damage{separator} contact" in whole, "the user says that labels are whole"


@pytest.mark.parametrize("task", ["classification", "multi-label-classification"])
def test_labels_that_differ_in_case_or_spaces_are_counted(task: str) -> None:
    labels = ["Spam", "spam", "No spam", "nospam", "other", "other"]
    rows = [(f"text {n}", label) for n, label in enumerate(labels)]
    skipped = load_dataset(task, DataFiles(train=rows, dev=rows)).counts.skipped
    assert skipped["label that differs from another only in case or spaces, kept"] == 2


def test_many_labels_have_the_most_probable_ones() -> None:
    logits = np.random.default_rng(0).normal(size=(3, 4000)).astype(np.float32)
    labels = tuple(f"l{n}" for n in range(4000))
    for top, wanted in ((0, 10), (3, 3), (4000, 4000)):
        for task in (Classification(labels, top=top), MultiLabelClassification(labels, top=top)):
            for row, result in zip(logits, task.results([], logits[:, None]), strict=True):
                shares = result.probabilities
                assert len(shares) == wanted
                if top != 4000:
                    best = [labels[index] for index in np.argsort(-row)[:wanted]]
                    assert list(shares) == best
                    assert list(shares.values()) == sorted(shares.values(), reverse=True)
    few = Classification(labels[:100]).results([], logits[:, None, :100])[0]
    assert tuple(few.probabilities) == labels[:100]
    assert few.probability == max(few.probabilities.values())


def test_classes_called_0_and_1_may_form_sets() -> None:
    for sets in ([[0], [1], [0, 1]], ["0", "1", "0|1"], [[0], [], [1, 0]]):
        rows = [{"text": f"t{n}", "label": names} for n, names in enumerate(sets)]
        assert load_sets(rows, label="label").task.labels == ("0", "1")
    for lists in ([[0], [1]], [[0, 1], [1, 0]], [0, 1, None]):
        rows = [{"text": f"t{n}", "label": names} for n, names in enumerate(lists)]
        with pytest.raises(BertkitError, match="holds only"):
            load_sets(rows, label="label")
