"""Parts of a fine-tuning's report: what the best model answers, right and wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from bertkit.report.html import html_table
from bertkit.report.plots import format_number

MOST_LABELS = 20
"""A confusion matrix of more labels is a list of its largest errors instead."""

MOST_WRONG = 20
LONGEST_TEXT = 400
"""Characters of a text that are shown."""

GoldAndPredicted = Counter[tuple[str, str]]
"""(gold label, answer) -> inputs."""


def classified(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The lines of a result file that have one answer and the label that is right."""
    return [row for row in rows if row.get("gold") is not None and row.get("label") is not None]


def answers_section(
    rows: Sequence[Mapping[str, Any]], labels: Sequence[str], split: str, run: str | None
) -> str:
    """What a classifier answered: a confusion matrix, and its most confident errors.

    Args:
        rows: of `results/SPLIT.jsonl`: "label", "probability", and where the split is labelled
            "gold", and "text" and "pair"; without "gold" nothing is shown.
        labels: in the order of the model; labels that only the rows have come after them.
        split: its name.
        run: the name of the run that answered.
    """
    known = classified(rows)
    if not known:
        return ""
    pairs: GoldAndPredicted = Counter((str(row["gold"]), str(row["label"])) for row in known)
    seen = sorted({label for pair in pairs for label in pair} - {*labels})
    wrong = [row for row in known if str(row["gold"]) != str(row["label"])]
    of_run = f" of {escape(run)}" if run else ""
    line = f"{len(known) - len(wrong):,} of {len(known):,} answers{of_run} are right."
    confusion = (largest_errors if len(labels) + len(seen) > MOST_LABELS else matrix)(
        pairs, [*labels, *seen]
    )
    return (
        f"<section><h2>Answers on {escape(split)}</h2><p>{line}</p>{confusion}"
        f"{confident_errors(wrong)}</section>"
    )


def matrix(pairs: GoldAndPredicted, labels: Sequence[str]) -> str:
    """A row for each gold label, a column for each answer, shaded by the share of the row."""
    head = "".join(f'<th scope="col">{escape(label)}</th>' for label in labels)
    body = []
    for gold in labels:
        total = sum(pairs[gold, label] for label in labels)
        cells = "".join(
            shaded(pairs[gold, label], total, "training" if gold == label else "held-out")
            for label in labels
        )
        right = format_number(pairs[gold, gold] / total if total else None, "share")
        body.append(f'<tr><th scope="row">{escape(gold)}</th>{cells}<td>{right}</td></tr>\n')
    return (
        "<h3>Confusion: a row for each label that is right, a column for each answer</h3>"
        f'<div class="wide"><table><thead><tr><th scope="col">right label</th>{head}'
        f'<th scope="col">recall</th></tr></thead><tbody>{"".join(body)}</tbody></table></div>'
    )


def shaded(count: int, total: int, colour: str) -> str:
    """A cell of the matrix; the shade stays pale enough to read the number on it."""
    strength = round(45 * count / total) if total else 0
    shade = f"background:color-mix(in srgb,var(--{colour}) {strength}%,transparent)"
    return f'<td style="{shade};padding-left:.5rem">{count:,}</td>'


def largest_errors(pairs: GoldAndPredicted, labels: Sequence[str]) -> str:
    """The most frequent pairs of different labels."""
    order = {label: place for place, label in enumerate(labels)}
    errors = sorted(
        ((count, gold, found) for (gold, found), count in pairs.items() if gold != found),
        key=lambda error: (-error[0], order[error[1]], order[error[2]]),
    )
    rows = [[gold, found, count] for count, gold, found in errors[:MOST_WRONG]]
    if not rows:
        return ""
    return f"<h3>Most frequent errors</h3>{html_table(['right label', 'answer', 'inputs'], rows)}"


def confident_errors(wrong: Sequence[Mapping[str, Any]]) -> str:
    """The wrong answers of which the model was surest."""
    surest = sorted(wrong, key=lambda row: -(row.get("probability") or 0.0))[:MOST_WRONG]
    if not surest:
        return ""
    texts = [name for name in ("text", "pair") if any(row.get(name) for row in surest)]
    rows = [
        [
            str(row.get("id")),
            row["gold"],
            row["label"],
            format_number(row.get("probability"), "share"),
            *(shorten_text(row.get(name)) for name in texts),
        ]
        for row in surest
    ]
    columns = ["id", "right label", "answer", "probability", *texts]
    body = html_table(columns, rows)
    return f'<h3>Most confident wrong answers</h3><div class="texts">{body}</div>'


def shorten_text(text: Any) -> str | None:
    """A text for a table."""
    if text is None:
        return None
    return str(text) if len(str(text)) <= LONGEST_TEXT else f"{str(text)[:LONGEST_TEXT]}…"


def types_table(scores: Mapping[str, float]) -> str:
    """Precision, recall and F1 of every type of entity, from names such as "recall/PER"."""
    found: dict[str, dict[str, float]] = {}
    for name, value in scores.items():
        measure, slash, kind = name.partition("/")
        if slash:
            found.setdefault(kind, {})[measure] = value
    measures = list(dict.fromkeys(measure for own in found.values() for measure in own))
    rows = [
        [kind, *(format_number(own.get(measure), "share") for measure in measures)]
        for kind, own in found.items()
    ]
    return html_table(["type", *measures], rows) if rows else ""
