"""Predictions as HTML, which notebooks show: probabilities as bars, spans in their text.

All texts are escaped; colours are a function of the label and are readable on light and dark pages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from zlib import crc32

MAX_BARS = 10
MAX_CONTEXT = 300
"""The most characters that are shown on either side of an answer."""
BAR = "background:#4a7fc1;display:inline-block;height:.7em;min-width:1px"
MARK = "border-radius:.25em;color:#111;padding:0 .25em"


def probability_bars(probabilities: Mapping[str, float], chosen: Iterable[str]) -> str:
    """Return a table of labels and their probabilities as bars, most probable first.

    Args:
        probabilities: label -> probability; the first `MAX_BARS` are shown.
        chosen: the predicted labels, which are bold.
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
    """Return a text with coloured spans.

    Args:
        text: the text.
        spans: (start, end, label) in characters, in order and without overlaps.
    """
    parts, at = [], 0
    for start, end, label in spans:
        hue = crc32(label.encode(errors="surrogatepass")) % 360
        name = f' <small style="opacity:.75">{escape(label)}</small>' if label else ""
        style = f"background:hsl({hue} 75% 82%);{MARK}"
        inside = f'<mark style="{style}">{escape(text[start:end])}{name}</mark>'
        parts += [escape(text[at:start]), inside]
        at = end
    return f'<div style="white-space:pre-wrap">{"".join(parts)}{escape(text[at:])}</div>'


def answer_in_context(context: str, start: int, end: int) -> str:
    """Return an answer in the part of its context that is around it."""
    first, last = max(0, start - MAX_CONTEXT), min(len(context), end + MAX_CONTEXT)
    before, after = "…" * (first > 0), "…" * (last < len(context))
    text = f"{before}{context[first:last]}{after}"
    shift = len(before) - first
    return marked_text(text, [(start + shift, end + shift, "")])
