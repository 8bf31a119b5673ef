"""Predictions: their `repr`, plain values, tables, HTML for notebooks, and those with offsets.

In HTML all texts are escaped; colours are a function of the label and are readable on light and
dark pages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from html import escape
from typing import Any
from zlib import crc32

from bertkit.errors import InputTypeError
from bertkit.text.documents import optional_library

SHOWN_ITEMS = 6
"""The maximum number of labels, words or choices that a `repr` shows."""
MAX_BARS = 10
MAX_CONTEXT = 300
"""The maximum number of characters that are shown on either side of an answer."""
BAR = "background:#4a7fc1;display:inline-block;height:.7em;min-width:1px"
MARK = "border-radius:.25em;color:#111;padding:0 .25em"


@dataclass(frozen=True, slots=True, repr=False)
class Prediction:
    """The base of all predictions; each task type has a subclass with its fields."""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as values that JSON can hold: tuples become lists."""
        return {name: plain(value) for name, value in shown_fields(self).items()}

    def __repr__(self) -> str:
        """Show the fields, with numbers rounded and long lists shortened."""
        shown = ", ".join(f"{name}={brief(value)}" for name, value in shown_fields(self).items())
        return f"{type(self).__name__}({shown})"


ONLY_SHOWN = {"only_shown": True}
"""The metadata of a field that is no part of the prediction, but is shown with it in notebooks."""


def shown_fields(prediction: Prediction) -> dict[str, Any]:
    """Return field -> value, without fields that are only shown."""
    named = [field.name for field in fields(prediction) if not field.metadata.get("only_shown")]
    return {name: getattr(prediction, name) for name in named}


def plain(value: Any) -> Any:
    """Return a value as it would come back from a round trip through JSON."""
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


def probability_bars(probabilities: Mapping[str, float], chosen: Iterable[str]) -> str:
    """Return a table of labels and their probabilities as bars, the `MAX_BARS` most probable first.

    The predicted labels, those of `chosen`, are bold.
    """
    bold = set(chosen)
    ordered = sorted(probabilities.items(), key=lambda pair: -pair[1])
    rows = []
    for label, share in ordered[:MAX_BARS]:
        name = f"<b>{escape(label)}</b>" if label in bold else escape(label)
        bar = f'<span style="{BAR};width:{100 * share:.1f}px"></span>'
        rows.append(f"<tr><td>{name}</td><td>{share:.1%}</td><td>{bar}</td></tr>")
    if len(ordered) > MAX_BARS:
        rows.append(f"<tr><td>{len(ordered) - MAX_BARS:,} more</td></tr>")
    return f"<table>{''.join(rows)}</table>"


def marked_text(text: str, spans: Iterable[tuple[int, int, str]]) -> str:
    """Return a text with coloured spans: (start, end, label), in order and without overlaps."""
    parts, at = [], 0
    for start, end, label in spans:
        hue = crc32(label.encode(errors="surrogatepass")) % 360
        name = f' <small style="opacity:.75">{escape(label)}</small>' if label else ""
        style = f"background:hsl({hue} 75% 82%);{MARK}"
        inside = f'<mark style="{style}">{escape(text[start:end])}{name}</mark>'
        parts += [escape(text[at:start]), inside]
        at = end
    return f'<div style="white-space:pre-wrap">{"".join(parts)}{escape(text[at:])}</div>'


@dataclass(frozen=True, slots=True, repr=False)
class TagsPrediction(Prediction):
    """A tag for every word of a sentence."""

    tags: tuple[str, ...]
    probabilities: tuple[float, ...]
    """The probability of each tag."""
    entities: tuple[tuple[str, int, int], ...]
    """(type, first word, one after the last word) of each; () if tags are not entity tags."""


@dataclass(frozen=True, slots=True, repr=False)
class Entity(Prediction):
    """A tagged span of a text, `text[start:end]`."""

    type: str
    start: int
    end: int
    text: str
    word_start: int
    """The index of its first word."""
    word_end: int
    """The index after its last word."""


@dataclass(frozen=True, slots=True, repr=False)
class WordTag(Prediction):
    """A word of a text and its tag."""

    word: str
    tag: str
    probability: float
    start: int
    end: int


@dataclass(frozen=True, slots=True, repr=False)
class TaggedText(Prediction):
    """The tags of the words of a text, and the entities that they form."""

    words: tuple[WordTag, ...]
    entities: tuple[Entity, ...]
    shown: str = field(default="", compare=False, metadata=ONLY_SHOWN)
    """The text itself, for notebooks."""

    def _repr_html_(self) -> str:
        """Return what notebooks show: the text with its entities, or tags, in colour."""
        found = [(one.start, one.end, one.type) for one in self.entities]
        tags = [(one.start, one.end, one.tag) for one in self.words if one.tag != "O"]
        return marked_text(self.shown, found or tags)


@dataclass(frozen=True, slots=True, repr=False)
class GivenAnswer(Prediction):
    """The answer to a question, `context[start:end]`; "" and None if there is no answer."""

    answer: str
    start: int | None
    end: int | None
    probability: float
    """The probability of this answer, possibly "", among the best spans and no answer."""
    no_answer_probability: float
    """The probability of no answer; 0 if the model was not trained on unanswerable questions."""
    context: str = field(default="", compare=False, metadata=ONLY_SHOWN)
    """The text that was searched, for notebooks."""

    def _repr_html_(self) -> str:
        """Return what notebooks show: the answer in its context, and its probability."""
        if self.start is None or self.end is None:
            return f"<div><i>no answer</i> ({self.probability:.1%})</div>"
        first, last = max(0, self.start - MAX_CONTEXT), self.end + MAX_CONTEXT
        before, after = "…" * (first > 0), "…" * (last < len(self.context))
        shift = len(before) - first
        around = f"{before}{self.context[first:last]}{after}"
        inside = marked_text(around, [(self.start + shift, self.end + shift, "")])
        return f"{inside}<div>{self.probability:.1%}</div>"


def tagged_text(found: TagsPrediction, text: str, spans: Sequence[tuple[int, int]]) -> TaggedText:
    """Add the character spans of `split_words_with_offsets` to tags and entities."""
    rows = zip(found.tags, found.probabilities, spans, strict=True)
    words = tuple(WordTag(text[a:b], tag, chance, a, b) for tag, chance, (a, b) in rows)
    entities = []
    for type_name, first, last in found.entities:
        start, end = spans[first][0], spans[last - 1][1]
        entities.append(Entity(type_name, start, end, text[start:end], first, last))
    return TaggedText(words, tuple(entities), text)
