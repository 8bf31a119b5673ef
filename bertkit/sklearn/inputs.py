"""The inputs of estimators: texts, pairs of texts, and their labels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.sparse import issparse
from sklearn.utils import check_array, check_consistent_length
from sklearn.utils.multiclass import check_classification_targets, type_of_target
from sklearn.utils.validation import column_or_1d, validate_data

from bertkit.errors import BertkitError, InputTypeError
from bertkit.tasks.classification import TextExample
from bertkit.text.documents import value_name


class InputValueError(BertkitError, ValueError):
    """A Python argument has a value that cannot be used, such as labels of a single class."""

    code = "value"


UNLABELLED = "no_validation"
"""The y of rows without labels, as scikit-learn's `validate_data` has it."""


def read_texts(
    estimator: Any, data: Any, y: Any = UNLABELLED, *, reset: bool, maximum: int
) -> np.ndarray:
    """Return the texts of an X, an object array (rows, 1) or (rows, 2).

    `y` is only counted; with `reset`, in a fit, the estimator keeps the number and the names of the
    columns, and otherwise checks them.
    """
    name = type(estimator).__name__
    if isinstance(data, str):
        raise InputValueError(
            f"Iterable over raw text documents expected, string object received. {name} takes a "
            "list of texts: put one text in brackets"
        )
    array = check_array(
        data, dtype=object, ensure_2d=False, ensure_all_finite=False, estimator=name
    )
    table = array[:, None] if array.ndim == 1 else array
    named = hasattr(data, "columns") and array.ndim == 2
    validate_data(estimator, data if named else table, y, reset=reset, skip_check_array=True)
    if not isinstance(y, str):
        check_consistent_length(table, y)
    if table.shape[1] > maximum:
        pairs = ", or pairs of texts as two columns" if maximum == 2 else ""
        raise InputValueError(
            f"X has {table.shape[1]} columns; {name} takes one column of texts{pairs}"
        )
    for (row, _), value in np.ndenumerate(table):
        if is_missing(value):
            raise InputValueError(
                f"Input X contains NaN: row {row} is {value!r}; leave the row out, or fill in ''"
            )
        if not isinstance(value, str):
            raise InputTypeError(f"X[{row}] is {value!r:.40}, which is not a text")
    return table


def is_missing(value: object) -> bool:
    """Return whether a value stands for a missing one: None, NaN, or those of pandas."""
    return value is None or (not isinstance(value, str) and str(value) in {"nan", "<NA>", "NaT"})


def examples_of_texts(table: np.ndarray, labels: Sequence[Any] | None = None) -> list[TextExample]:
    """Return the examples of texts (rows, 1) or (rows, 2), and their labels if there are any."""
    return [
        TextExample(
            "",
            str(row[0]),
            str(row[1]) if len(row) == 2 else None,
            None if labels is None else labels[number],
            f"X[{number}]",
        )
        for number, row in enumerate(table)
    ]


def read_labels(y: Any, name: str) -> tuple[Any, list[str], list[Any]]:
    """Return the classes of a y, their names, and the name or names of every row.

    `y` has one label for each row, or is a binary indicator matrix (rows, classes), of which
    the classes are [0, 1] for each column. Messages call the estimator `name`.
    """
    rows = y.toarray() if issparse(y) else np.asarray(y, dtype=object)
    if missing := [index for index, value in np.ndenumerate(rows) if is_missing(value)]:
        raise InputValueError(f"Input y contains NaN: row {missing[0][0]} has no label")
    if type_of_target(y, input_name="y") == "multilabel-indicator":
        names = names_of_classes(
            [str(label) for label in getattr(y, "columns", range(rows.shape[1]))]
        )
        if not rows.any():
            raise InputValueError(f"{name} needs at least one label in y, and all of y is 0")
        sets = [tuple(names[i] for i in np.flatnonzero(row)) for row in rows]
        return [np.array([0, 1]) for _ in names], names, sets
    check_classification_targets(y)
    labels = column_or_1d(np.asarray(y), warn=True)  # else pandas' Int64 becomes float
    classes = np.unique(labels)
    if len(classes) < 2:
        raise InputValueError(
            f"{name} needs samples of at least 2 classes in y, but y contains only one class: "
            f"{classes.tolist()[0]!r}"
        )
    names = names_of_classes(classes.tolist())
    named = dict(zip(classes.tolist(), names, strict=True))
    return classes, names, [named[label] for label in labels.tolist()]


def names_of_classes(classes: Sequence[Any]) -> list[str]:
    """Return the names of classes in the model, which are those of `bertkit.finetune`."""
    names = [value_name(label) for label in classes]
    if len(set(names)) < len(names):
        [(twice, _)] = Counter(names).most_common(1)
        raise InputValueError(f"several labels of y have the name {twice!r}; make them one")
    return names
