"""A run directory → `report.html`: one page that needs nothing else, not even a network.

The numbers come from `journal.jsonl` alone. Plots are drawn by matplotlib as SVG inside the page,
with the page's own colours, so that they follow its light or dark appearance.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from html import escape
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from bertkit.errors import BertkitError
from bertkit.files import read_json, write_text
from bertkit.plots import Plot, curve, draw, number
from bertkit.training.journal import JOURNAL, read_journal

PLOTS = (
    Plot(
        "Masked language model: loss",
        "mlm_loss",
        baselines=(("guessing by frequency (unigram entropy)", "unigram_entropy"),),
    ),
    Plot(
        "Masked language model: accuracy",
        "mlm_accuracy",
        "share",
        (("always the commonest piece", "most_frequent_accuracy"),),
    ),
    Plot("Next sentence: loss", "nsp_loss", baselines=(("a coin (ln 2)", math.log(2)),)),
    Plot(
        "Next sentence: accuracy",
        "nsp_accuracy",
        "share",
        (("a coin", 0.5), ("always the commoner label", "nsp_majority")),
    ),
    Plot("Learning rate", "learning_rate", "power"),
    Plot("Gradient norm before clipping", "gradient_norm"),
    Plot("Tokens per second", "tokens_per_second"),
    Plot("MFU: share of the measured matrix-product peak", "mfu", "share"),
)

STYLE = """
:root{color-scheme:light dark;--page:#fff;--card:#f4f6f8;--text:#1c1e21;--grid:#d8dce2;
 --training:#2563a8;--held-out:#c8501e;--baseline:#6f7680}
@media(prefers-color-scheme:dark){:root{--page:#15171a;--card:#20242a;--text:#e6e8eb;--grid:#3a3f47;
 --training:#6cb0f5;--held-out:#ff9a5c;--baseline:#9aa2ad}}
body{background:var(--page);color:var(--text);font:16px/1.5 system-ui,sans-serif;margin:0 auto;
 max-width:64rem;padding:1rem}
h1{font-size:1.6rem}h2{font-size:1.25rem;margin-top:2rem}h3{font-size:1rem;margin:0}
.cards,.plots{display:grid;gap:1rem;grid-template-columns:repeat(auto-fit,minmax(min(11rem,100%),1fr))}
.plots{grid-template-columns:repeat(auto-fit,minmax(min(24rem,100%),1fr))}
.cards div,figure{background:var(--card);border-radius:.5rem;margin:0;padding:.75rem 1rem}
.cards dt,.cards dd.than{color:var(--baseline);font-size:.85rem}.cards dd{margin:0}
.cards dd.value{font-size:1.5rem;font-variant-numeric:tabular-nums}
svg{display:block;height:auto;width:100%}svg *{stroke-linecap:butt;stroke-linejoin:round}
svg text{font-family:system-ui,sans-serif!important}
.wide{overflow-x:auto}table{border-collapse:collapse;font-size:.9rem}
td,th{border-bottom:1px solid var(--grid);padding:.25rem 1rem .25rem 0;text-align:left;
 vertical-align:top;overflow-wrap:anywhere}summary{cursor:pointer;font-weight:600;margin:.75rem 0}
"""


class Run:
    """What the journal of one run says."""

    def __init__(self, folder: Path) -> None:
        path = folder / JOURNAL
        records = read_journal(path)
        self.kinds: dict[str, list[dict[str, Any]]] = {}
        for record in records:
            self.kinds.setdefault(record.get("kind", ""), []).append(record)
        self.steps, self.evaluations = self.of("step"), self.of("evaluation")
        if not self.steps and not self.evaluations:
            raise BertkitError(f"{path} has no training steps yet; wait for the first, then report")
        self.start: dict[str, Any] = (self.of("start") or [{}])[-1]
        self.baselines: dict[str, float] = self.start.get("baselines") or {}
        self.name = str(self.start.get("recipe_name") or folder.resolve().name)
        self.last_step = max(record["step"] for record in self.steps + self.evaluations)
        self.final = (self.evaluations or self.steps)[-1]
        self.ended = records[-1].get("reason", "") if records[-1].get("kind") == "end" else ""

    def of(self, kind: str) -> list[dict[str, Any]]:
        """All records of a kind, in order."""
        return self.kinds.get(kind, [])

    def changes(self) -> list[tuple[int, str]]:
        """(step, label) of each change of phase that was reached."""
        phases = self.start.get("phases") or []
        ends = accumulate(phase["steps"] for phase in phases)
        later = zip(ends, phases[1:], strict=False)
        return [(s, f"length {p['length']}") for s, p in later if s < self.last_step]

    def known(self, plot: Plot) -> list[tuple[str, float]]:
        """The baselines of a plot that the journal has."""
        values = [
            (label, self.baselines.get(value) if isinstance(value, str) else value)
            for label, value in plot.baselines
        ]
        return [(label, value) for label, value in values if value is not None]


def write_report(run: Path) -> Path:
    """Write `report.html` into a run directory, finished or still going on.

    Reads `journal.jsonl` and, where they are there, `recipe.json`, `environment.json`,
    `corpus.json` and `demo.json` ({"sections": [{"title", "paragraphs", "table": {"columns",
    "rows"}}]}). The same files give the same page, byte for byte.

    Raises:
        BertkitError: the journal is missing, damaged, or has no step yet.
    """
    content = Run(run)
    parts = [heading(content), cards(content), f"<p>{escape(in_words(content))}</p>"]
    demo = optional_json(run / "demo.json") or {}
    parts += [section(one) for one in demo.get("sections", [])]
    figures = "\n".join(figure(content, plot) for plot in PLOTS)
    parts.append(f'<h2>Training</h2><div class="plots">{figures}</div>')
    parts.append(tables(content, run))
    title = escape(f"{content.name}: bertkit report")
    page = (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{STYLE}</style></head>\n<body><main>"
        + "\n".join(parts)
        + "</main></body></html>\n"
    )
    path = run / "report.html"
    write_text(path, page)
    return path


def optional_json(path: Path) -> Any:
    """A JSON file's value, or None where there is no such file."""
    return read_json(path) if path.is_file() else None


def heading(run: Run) -> str:
    """Title and state of the run."""
    total = run.start.get("steps_total")
    of_total = f" of {total:,}" if isinstance(total, int) else ""
    state = run.ended or "still going on, or killed"
    resumed = len(run.of("start")) - 1
    again = f"; resumed {resumed} time{'s' * (resumed > 1)}" if resumed > 0 else ""
    line = f"Pre-training, {run.last_step:,}{of_total} steps: {state}{again}."
    return f"<h1>{escape(run.name)}</h1><p>{escape(line)}</p>"


def cards(run: Run) -> str:
    """The headline numbers, each over what knowing nothing would give."""
    where = "held-out" if run.evaluations else "training"
    final, entropy = run.final, run.baselines.get("unigram_entropy")
    unigram = None if entropy is None else math.exp(entropy)
    perplexity = final.get("mlm_perplexity")
    shown = [
        (f"{where} MLM loss", number(final.get("mlm_loss")), f"unigram {number(entropy)}"),
        (f"{where} perplexity", number(perplexity), f"unigram {number(unigram)}"),
    ]
    for label, field, name, than in (
        ("MLM accuracy", "mlm_accuracy", "most_frequent_accuracy", "commonest piece"),
        ("next-sentence accuracy", "nsp_accuracy", "nsp_majority", "commoner label"),
    ):
        baseline = number(run.baselines.get(name), "share")
        shown.append((f"{where} {label}", number(final.get(field), "share"), f"{than} {baseline}"))
    for label, field, kind in (("tokens/s", "tokens_per_second", ""), ("MFU", "mfu", "share")):
        values = curve(run.steps, field).values
        if len(values):
            shown.append((label, number(float(np.median(values)), kind), "median"))
    body = "".join(
        f'<div><dt>{escape(label)}</dt><dd class="value">{escape(value)}</dd>'
        f'<dd class="than">{escape(than)}</dd></div>'
        for label, value, than in shown
    )
    return f'<dl class="cards">{body}</dl>'


def in_words(run: Run) -> str:
    """What the headline numbers mean, in sentences."""
    where = "on held-out text" if run.evaluations else "on the training text (nothing is held out)"
    sentences = [f"All numbers are {where}, after {run.final['step']:,} steps."]
    loss, entropy = run.final.get("mlm_loss"), run.baselines.get("unigram_entropy")
    if loss is not None and entropy is not None:
        side, meaning = ("below", "the network uses the words around a gap")
        if loss >= entropy:
            side, meaning = ("above", "it has not yet learned more than how common each piece is")
        sentences.append(
            f"MLM loss {number(loss)} is {number(abs(entropy - loss))} {side} the unigram entropy "
            f"{number(entropy)}, the loss of guessing by frequency alone: {meaning}."
        )
    for what, field, name, rival in (
        ("masked pieces", "mlm_accuracy", "most_frequent_accuracy", "the commonest piece"),
        ("next-sentence questions", "nsp_accuracy", "nsp_majority", "the commoner answer"),
    ):
        share, base = run.final.get(field), run.baselines.get(name)
        if share is not None and base is not None:
            sentences.append(
                f"It gets {number(share, 'share')} of the {what} right; always saying {rival} "
                f"gets {number(base, 'share')}."
            )
    return " ".join(sentences)


def figure(run: Run, plot: Plot) -> str:
    """One plot with its title, or nothing where the journal has no such numbers."""
    training, held_out = curve(run.steps, plot.field), curve(run.evaluations, plot.field)
    if not len(training.values) and not len(held_out.values):
        return ""
    svg = draw(
        plot,
        training,
        held_out,
        baselines=run.known(plot),
        changes=run.changes(),
        prefix=f"{plot.field}-",
    )
    return f"<figure><h3>{escape(plot.title)}</h3>{svg}</figure>"


def section(content: dict[str, Any]) -> str:
    """A section of `demo.json`: title, paragraphs and, where there is one, a table."""
    paragraphs = "".join(f"<p>{escape(str(text))}</p>" for text in content.get("paragraphs", []))
    rows = content.get("table")
    body = table(rows["columns"], rows["rows"]) if rows else ""
    return f"<section><h2>{escape(str(content['title']))}</h2>{paragraphs}{body}</section>"


def tables(run: Run, folder: Path) -> str:
    """Everything else that is known of the run, folded away."""
    measured = ["step", "mlm_loss", "mlm_perplexity", "mlm_accuracy", "nsp_loss", "nsp_accuracy"]
    parts = []
    for title, kind, columns in (
        ("Held-out measurements", "evaluation", measured),
        ("Checkpoints", "checkpoint", ["step", "path", "seconds"]),
        ("Notes", "note", ["step", "message"]),
    ):
        rows = [[record.get(column) for column in columns] for record in run.of(kind)]
        parts.append((title, [name.replace("_", " ") for name in columns], rows))
    known = {key: value for key, value in run.start.items() if key not in {"kind", "time"}}
    for title, value in (
        ("Before the first step", known),
        ("Recipe", optional_json(folder / "recipe.json")),
        ("Environment", optional_json(folder / "environment.json")),
        ("Corpus", optional_json(folder / "corpus.json")),
    ):
        parts.append((title, ["field", "value"], [list(row) for row in flat(value or {})]))
    return "\n".join(
        f"<details><summary>{title}</summary>{table(columns, rows)}</details>"
        for title, columns, rows in parts
        if rows
    )


def flat(value: Any, name: str = "") -> list[tuple[str, Any]]:
    """Nested JSON as (dotted name, value); a list of plain values stays one value."""
    if isinstance(value, dict):
        children = list(value.items())
    elif isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
        children = [(str(i), item) for i, item in enumerate(value)]
    else:
        return [(name, value)]
    return [row for key, item in children for row in flat(item, f"{name}.{key}" if name else key)]


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """An HTML table of any values."""
    head = "".join(f'<th scope="col">{escape(str(column))}</th>' for column in columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell(value))}</td>" for value in row) + "</tr>\n"
        for row in rows
    )
    head = f"<thead><tr>{head}</tr></thead>"
    return f'<div class="wide"><table>{head}<tbody>{body}</tbody></table></div>'


def cell(value: Any) -> str:
    """A value in a table: text as it is, numbers short, the rest as in JSON."""
    if value is None:
        return "–"
    if isinstance(value, str):
        return value
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        return ", ".join(cell(item) for item in value)
    return json.dumps(value, ensure_ascii=False)
