"""What predictions have in common: a readable `repr`, conversion to plain values, and tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from bertkit.errors import InputTypeError
from bertkit.text.documents import optional_library

SHOWN_ITEMS = 6
"""The most labels, words or choices that a `repr` shows."""


@dataclass(frozen=True, slots=True, repr=False)
class Prediction:
    """The base of all predictions; each task type has a subclass with its fields."""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as values that JSON can hold: tuples become lists."""
        return {name: plain(value) for name, value in vars_of(self).items()}

    def __repr__(self) -> str:
        """Show the fields, with numbers rounded and long lists shortened."""
        shown = ", ".join(f"{name}={brief(value)}" for name, value in vars_of(self).items())
        return f"{type(self).__name__}({shown})"


ONLY_SHOWN = {"only_shown": True}
"""The metadata of a field that is no part of the prediction, but is shown with it in notebooks."""


def vars_of(prediction: Prediction) -> dict[str, Any]:
    """Return field -> value, without fields that are only shown."""
    named = [field.name for field in fields(prediction) if not field.metadata.get("only_shown")]
    return {name: getattr(prediction, name) for name in named}


def plain(value: Any) -> Any:
    """Return a value as JSON would give it back."""
    if isinstance(value, Prediction):
        return value.to_dict()
    if isinstance(value, Mapping):
        return {key: plain(one) for key, one in value.items()}
    return [plain(one) for one in value] if isinstance(value, tuple | list) else value


def brief(value: Any) -> str:
    """Return the `repr` of a value, with numbers rounded and long lists shortened."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        shown = [f"{key!r}: {brief(one)}" for key, one in list(value.items())[:SHOWN_ITEMS]]
    elif isinstance(value, tuple | list):
        shown = [brief(one) for one in value[:SHOWN_ITEMS]]
    else:
        return repr(value)
    shown += [f"... {len(value) - SHOWN_ITEMS} more"] * (len(value) > SHOWN_ITEMS)
    return f"{{{', '.join(shown)}}}" if isinstance(value, Mapping) else f"[{', '.join(shown)}]"


def flat_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a prediction's fields for a table: one column `probability_NAME` for each label."""
    flat: dict[str, Any] = {}
    for name, value in row.items():
        if name == "probabilities" and isinstance(value, Mapping):
            flat |= {f"probability_{label}": share for label, share in value.items()}
        else:
            flat[name] = value
    return flat


def to_frame(predictions: Iterable[Prediction]) -> Any:
    """Return predictions as a pandas DataFrame with one row each.

    The columns are the fields of the predictions. The probabilities of labels have a column each,
    `probability_NAME`; words, entities and the probabilities of choices stay lists.

    Raises:
        InputTypeError: the argument is not a list of predictions.
        BertkitError: pandas is not installed.
    """
    given = [predictions] if isinstance(predictions, Prediction) else list(predictions)
    for number, one in enumerate(given):
        if not isinstance(one, Prediction):
            raise InputTypeError(
                f"to_frame() takes a list of predictions; number {number} is {one!r:.60}"
            )
    pandas = optional_library("pandas", "data frames")
    return pandas.DataFrame([flat_row(one.to_dict()) for one in given])
