"""Multiple choice: choosing one of n continuations (paper section 4.4, SWAG).

Each choice is a separate sequence, [CLS] context [SEP] choice [SEP]; one vector scores each, and
the softmax is over the choices of an input. Inputs may have different numbers of choices. If a
context is too long, window i of each choice makes one comparison.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from bertkit.errors import BertkitError, InputTypeError, check_known, short_repr
from bertkit.tasks.classification import TextTask
from bertkit.tasks.columns import (
    Columns,
    Fields,
    MemoryRows,
    Purpose,
    from_json,
    require_texts,
    row_texts,
)
from bertkit.tasks.task import Inputs, Metrics, Result, Results, TrainingData, softmax
from bertkit.text.documents import TextCounts, value_name

LETTERS = "abcdefghijklmnopqrstuvwxyz"
PAST_LAST = "label equal to the number of choices (if labels count from 1, add --first-choice 1)"


class ChoiceExample(NamedTuple):
    """A context with n choices, of which one is right."""

    id: str
    text: str
    choices: tuple[str, ...]
    gold: int | None  # the index of the right choice in `choices`
    location: str


@dataclass(frozen=True, kw_only=True)
class ChoiceColumns(Columns):
    """Columns of texts with several choices; empty choices at the end of a row are dropped."""

    text: str = "text"
    """The column of the context."""
    choices: tuple[str, ...] = ("choices",)
    """The columns of the choices, or the one column that holds a list of them."""
    label: str = "label"
    """The column of the right choice (a column's name, a letter, an index, or the choice's
    text)."""
    first_choice: int = 0
    """The number of the first choice if labels are numbers: 0 or 1."""
    key: str = "auto"
    """What labels are: text (of the choice), position (its column's name, letter or index), or auto
    for either."""
    input_options = ("text", "choices")
    wanted = "(text, choices) tuples"

    def read(
        self,
        data: str | Path | MemoryRows,
        counts: TextCounts,
        purpose: Purpose = "train",
        rows: dict[str, Fields] | None = None,
    ) -> Iterator[ChoiceExample]:
        """Raise if keys seem to count from 1: some are the number of choices, and none is 0."""
        read, golds = TextCounts(), set[int | None]()
        for example in super().read(data, read, purpose, rows):
            golds.add(example.gold)
            yield example
        if PAST_LAST in read.examples and 0 not in golds:
            raise BertkitError(f"{read.examples[PAST_LAST]}: {PAST_LAST}")
        counts += read

    def __post_init__(self) -> None:
        """Check that each choice is named once; a single name may be a text."""
        check_known("key", self.key, ("auto", "text", "position"))
        if isinstance(self.choices, str):
            object.__setattr__(self, "choices", (self.choices,))
        if len(set(self.choices)) != len(self.choices) or not self.choices:
            raise BertkitError(
                f"choices need two columns or more, each once, or one of lists, not "
                f"{', '.join(self.choices) or 'none'}; name them: --choices A B ..."
            )

    def example(self, row: Fields, location: str, counts: TextCounts, purpose: Purpose) -> Any:
        """A row is left out if a text is empty or its key is out of range."""
        fields = {name: row[name] for name in self.choices}
        if len(self.choices) == 1:
            fields = choice_fields(row[self.choices[0]], location)
        while len(fields) > 2 and not value_name(list(fields.values())[-1]):
            fields.popitem()
        texts = row_texts({**row, **fields}, (self.text, *fields), location, counts)
        if texts is None:
            return None
        context, *choices = texts
        key = "" if purpose == "predict" else value_name(row.get(self.label))
        named = dict(zip(fields, choices, strict=True))
        label = self.choice_index(key, named, location) if key else None
        if label == -1:
            reason = f"column, letter, index (from {self.first_choice}) or text"
            past = key == str(len(choices)) and not self.first_choice and self.key != "text"
            counts.note(PAST_LAST if past else f"label that is no choice's {reason}", location)
            return None
        return ChoiceExample("", context, tuple(choices), label, location)

    def choice_index(self, key: str, named: Mapping[str, str], location: str) -> int:
        """Return the index of the choice that a key names, -1 if it names none."""
        choices = list(named.values())
        by_text = [index for index, choice in enumerate(choices) if choice.strip() == key]
        text = by_text[0] if len(by_text) == 1 and self.key != "position" else -1
        if key in named and (self.header or len(self.choices) == 1):
            position = list(named).index(key)
        elif key.isdecimal():
            position = int(key) - self.first_choice
        else:
            position = LETTERS.find(key.lower()) if len(key) == 1 else -1
        if self.key == "text" or not 0 <= position < len(choices):
            return text
        if text not in (-1, position):
            raise BertkitError(
                f"{location}: the key {key!r} is the position of {choices[position]!r:.40} and the "
                "text of another choice; say which: --key position or --key text"
            )
        return position

    def from_values(self, values: Sequence[Any], location: str, id: str) -> ChoiceExample:  # noqa: A002
        text, *choices = values
        if len(choices) == 1:
            choices = list(choice_fields(choices[0], location).values())
        while len(choices) > 2 and choices[-1] in ("", None):
            choices.pop()
        require_texts(location, [text, *choices])
        if not choices:
            raise BertkitError(f"{location} has no choices")
        return ChoiceExample(id, text, tuple(choices), None, location)


def choice_fields(value: Any, location: str) -> dict[str, Any]:
    """Return name -> choice of a list, which may be JSON, or as in ARC "text" beside "label"."""
    listed: Any = from_json(value, location)
    names: Any = ()
    if isinstance(listed, Mapping):
        listed, names = listed.get("text"), listed.get("label")
    if not isinstance(listed, list | tuple):
        raise InputTypeError(
            f"{location}: choices must be a list of texts, not {short_repr(value)}; in a table, "
            "name a column for each: --choices A B ..."
        )
    known = [value_name(name) for name in names] if isinstance(names, list | tuple) else []
    if len(known) != len(listed) or len({*known}) < len(known):
        known = [f"choice {number}" for number in range(1, len(listed) + 1)]
    return dict(zip(known, listed, strict=True))


@dataclass(frozen=True, slots=True)
class ChoiceResult(Result):
    """The most probable choice: its index, text and probability, and all probabilities."""

    choice: int
    text: str
    probability: float
    probabilities: tuple[float, ...]


@dataclass(frozen=True)
class MultipleChoice(TextTask):
    """A task that picks one of the choices of each input."""

    max_length: int = 512
    stride: int = 0
    task_type = "multiple-choice"
    head = "choice"
    columns = ChoiceColumns
    input_fields = ("text", "choices")
    target_dtype = np.int64
    answer_field = "choice"
    metric = "accuracy"
    labels = ()

    @classmethod
    def from_data(cls, data: TrainingData) -> Self:
        return cls(data.max_length, data.windows.stride)

    def texts_of(self, example: ChoiceExample) -> list[tuple[str, ...]]:
        return [(example.text, choice) for choice in example.choices]

    def target_of(self, example: ChoiceExample) -> int | None:
        return example.gold

    def losses(self, logits: Tensor, targets: Tensor, class_weights: Tensor | None) -> Tensor:
        return F.cross_entropy(logits[..., 0], targets, reduction="none")

    def results(self, inputs: Inputs, logits: Sequence[np.ndarray]) -> list[ChoiceResult]:
        results = []
        for example, scores in zip(inputs, logits, strict=True):
            chances = softmax(scores[:, 0]).tolist()
            best = chances.index(max(chances))
            results.append(ChoiceResult(best, example.choices[best], chances[best], tuple(chances)))
        return results

    def score(self, inputs: Inputs, results: Results) -> Metrics:
        right = sum(i.gold == r.choice for i, r in zip(inputs, results, strict=True))
        return {"accuracy": right / max(1, len(inputs))}

    def baseline(self, inputs: Inputs) -> Metrics:
        """Score answering every input with the most frequent correct index."""
        [(_, right)] = Counter(example.gold for example in inputs).most_common(1)
        return {"accuracy": right / len(inputs)}
