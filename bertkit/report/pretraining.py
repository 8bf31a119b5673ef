"""Write the report of a run: one self-contained HTML page that works without a network.

The numbers of a pre-training run come only from `journal.jsonl`; the report of a fine-tuning run is
in `finetuning.py`. Matplotlib draws the plots as SVG inside the page, in the page's colours, so
that they follow its light or dark appearance.
"""

from __future__ import annotations

import math
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import TemplateError

from bertkit.errors import BertkitError
from bertkit.files import from_home, read_optional, write_text
from bertkit.report.html import field_title, flatten_fields, render_page
from bertkit.report.plots import Plot, curve, draw_plot, format_number
from bertkit.training.journal import JOURNAL, read_journal

FINETUNING, RUN = "finetune.json", "run.json"
"""The files that mark a folder of fine-tuning runs, and one of its runs."""

OBJECTIVES = ("mlm", "lm", "rtd", "nsp", "sop")
UNIGRAM = (("guessing by frequency (unigram entropy)", "unigram_entropy"),)
MOST_FREQUENT = (("always the most frequent token", "most_frequent_accuracy"),)
COIN = ("a coin", 0.5)
BY_SHARE = "by the final share of replaced tokens"
PLOTS = (
    Plot("Masked language model: loss", "mlm_loss", baselines=UNIGRAM),
    Plot("Masked language model: accuracy", "mlm_accuracy", "share", MOST_FREQUENT),
    Plot("Language model: loss", "lm_loss", baselines=UNIGRAM),
    Plot("Language model: accuracy", "lm_accuracy", "share", MOST_FREQUENT),
    Plot("Replaced tokens: loss", "rtd_loss", baselines=((BY_SHARE, "rtd_entropy"),)),
    Plot("Replaced tokens: accuracy", "rtd_accuracy", "share", ((BY_SHARE, "rtd_majority"),)),
    Plot("Next sentence: loss", "nsp_loss", baselines=(("a coin (ln 2)", math.log(2)),)),
    Plot(
        "Next sentence: accuracy",
        "nsp_accuracy",
        "share",
        (COIN, ("always the more frequent label", "nsp_majority")),
    ),
    Plot("Sentence order: loss", "sop_loss", baselines=(("a coin (ln 2)", math.log(2)),)),
    Plot("Sentence order: accuracy", "sop_accuracy", "share", (COIN,)),
    Plot("Learning rate", "learning_rate", "power"),
    Plot("Gradient norm before clipping", "gradient_norm"),
    Plot("Tokens per second", "tokens_per_second"),
    Plot("MFU: share of the measured matrix-product peak", "mfu", "share"),
)


class PretrainingReport:
    """The journal of one run."""

    def __init__(self, folder: Path) -> None:
        path = folder / JOURNAL
        records = read_journal(path)
        self.kinds: dict[str, list[dict[str, Any]]] = {}
        for record in records:
            self.kinds.setdefault(record.get("kind", ""), []).append(record)
        self.steps, self.evaluations = self.of("step"), self.of("evaluation")
        if not self.steps and not self.evaluations:
            end = (self.of("end") or [{}])[-1].get("reason")
            why = f": the run has ended ({end})" if end else " yet; wait for the first, then report"
            raise BertkitError(f"{path} has no training steps{why}")
        self.start: dict[str, Any] = (self.of("start") or [{}])[-1]
        self.baselines: dict[str, float] = self.start.get("baselines") or {}
        self.name = str(self.start.get("recipe_name") or folder.resolve().name)
        self.last_step = max(record["step"] for record in self.steps + self.evaluations)
        self.final = (self.evaluations or self.steps)[-1]
        if "rtd_share" in self.final:  # what always saying "original" would get
            self.baselines = {**self.baselines, **blind_replaced(self.final["rtd_share"])}
        self.ended = records[-1].get("reason", "") if records[-1].get("kind") == "end" else ""

    def baseline(self, name: str) -> float | None:
        """Return a baseline from the last record, or from the first phase if that has none."""
        found = self.final.get(name, self.baselines.get(name))
        return None if found is None else float(found)

    def of(self, kind: str) -> list[dict[str, Any]]:
        """Return all records of one kind, in order."""
        return self.kinds.get(kind, [])

    def changes(self) -> list[tuple[int, str]]:
        """Return (step, label) of each change of phase that was reached."""
        phases = self.start.get("phases") or []
        ends = accumulate(phase["steps"] for phase in phases)
        later = zip(ends, phases[1:], strict=False)
        return [(s, f"length {p['length']}") for s, p in later if s < self.last_step]

    def known(self, plot: Plot) -> list[tuple[str, float]]:
        """Return the baselines of a plot that the journal has."""
        values = [
            (label, self.baselines.get(value) if isinstance(value, str) else value)
            for label, value in plot.baselines
        ]
        return [(label, value) for label, value in values if value is not None]


RECORD_FAULTS = (ArithmeticError, AttributeError, LookupError, TemplateError, TypeError, ValueError)
"""What a page raises whose records lack a field or hold another kind of value."""


def write_report(run: Path | str) -> Path:
    """Write `report.html` into the folder of a pre-training or fine-tuning run.

    The run may still be training. The same files give the same page, byte for byte.

    Raises:
        BertkitError: the folder holds no run, a file is damaged, or there is nothing to show yet.
    """
    run = Path(from_home(run))
    try:
        text = report_page(run)
    except BertkitError:
        raise
    except RECORD_FAULTS as error:
        raise BertkitError(
            f"a file of the run {run} is damaged, so it cannot be reported "
            f"({type(error).__name__}: {error}); restore its JSON files"
        ) from error
    path = run / "report.html"
    write_text(path, text)
    return path


def report_page(run: Path) -> str:
    """Return the report of a pre-training or fine-tuning run."""
    if (run / FINETUNING).is_file():
        from bertkit.report.finetuning import finetuning_page  # imports torch

        return finetuning_page(run)
    runs = run.resolve().parent
    if runs.name == "runs" and (grid := runs.parent / FINETUNING).is_file():
        raise BertkitError(f"{run} is one run of a fine-tuning grid; give its folder {grid.parent}")
    if not (run / JOURNAL).is_file():
        raise BertkitError(
            f"{run / JOURNAL} does not exist, nor does {FINETUNING}; give the folder of a run"
        )
    return pretraining_page(run)


def pretraining_page(run: Path) -> str:
    """Return the report of a pre-training run as HTML.

    This reads `journal.jsonl` and, if they exist, `recipe.json`, `environment.json`, `corpus.json`
    and `demo.json` ({"sections": [{"title", "paragraphs", "table": {"columns", "rows"}}]}).
    """
    content = PretrainingReport(run)
    return render_page(
        "pretraining.html",
        title=f"{content.name}: bertkit report",
        name=content.name,
        state=run_state(content),
        cards=run_cards(content),
        summary=summary_text(content),
        sections=read_optional(run / "demo.json", file_names=True).get("sections", []),
        drawings=[drawing for plot in PLOTS for drawing in draw(content, plot)],
        tables=[table for table in record_tables(content, run) if table[2]],
    )


def run_state(run: PretrainingReport) -> str:
    """Describe the progress of the run in a sentence."""
    total = run.start.get("steps_total")
    of_total = f" of {total:,}" if isinstance(total, int) else ""
    state = run.ended or "still running, or killed"
    resumed = len(run.of("start")) - 1
    again = f"; resumed {resumed} time{'s' * (resumed > 1)}" if resumed > 0 else ""
    return f"Pre-training, {run.last_step:,}{of_total} steps: {state}{again}."


def run_cards(run: PretrainingReport) -> list[tuple[str, str, str]]:
    """Return the headline numbers as (name, value, baseline)."""
    where = "held-out" if run.evaluations else "training"
    final, entropy = run.final, run.baselines.get("unigram_entropy")
    unigram = None if entropy is None else math.exp(entropy)
    key, name = token_objective(final)
    perplexity = final.get(f"{key}_perplexity")
    shown = []
    if "rtd_loss" in final:
        blind = f"guessing by frequency {format_number(run.baseline('rtd_entropy'))}"
        shown.append((f"{where} replaced-token loss", format_number(final["rtd_loss"]), blind))
    shown += [
        (
            f"{where} {name} loss",
            format_number(final.get(f"{key}_loss")),
            f"unigram {format_number(entropy)}",
        ),
        (f"{where} perplexity", format_number(perplexity), f"unigram {format_number(unigram)}"),
    ]
    for label, field, known, than in (
        ("replaced-token accuracy", "rtd_accuracy", "rtd_majority", "always original"),
        (f"{name} accuracy", f"{key}_accuracy", "most_frequent_accuracy", "most frequent token"),
        ("next-sentence accuracy", "nsp_accuracy", "nsp_majority", "more frequent label"),
        ("sentence-order accuracy", "sop_accuracy", "nsp_majority", "more frequent label"),
    ):
        if field not in final:
            continue
        baseline = format_number(run.baseline(known), "share")
        shown.append(
            (f"{where} {label}", format_number(final.get(field), "share"), f"{than} {baseline}")
        )
    for label, field, kind in (("tokens/s", "tokens_per_second", ""), ("MFU", "mfu", "share")):
        values = curve(run.steps, field).values
        if len(values):
            shown.append((label, format_number(float(np.median(values)), kind), "median"))
    return shown


def summary_text(run: PretrainingReport) -> str:
    """Explain the headline numbers in sentences."""
    where = "on held-out text" if run.evaluations else "on the training text (nothing is held out)"
    sentences = [f"All numbers are {where}, after {run.final['step']:,} steps."]
    key, name = token_objective(run.final)
    loss, entropy = run.final.get(f"{key}_loss"), run.baselines.get("unigram_entropy")
    if loss is not None and entropy is not None:
        around = "around a gap" if key == "mlm" else "on one side"
        side, meaning = ("below", f"the network uses the tokens {around}")
        if loss >= entropy:
            side, meaning = ("above", "it has not yet learned more than how frequent each token is")
        sentences.append(
            f"{name} loss {format_number(loss)} is {format_number(abs(entropy - loss))} {side} the "
            f"unigram entropy {format_number(entropy)}, the loss of guessing by "
            f"frequency alone: {meaning}."
        )
    targets = "masked tokens" if key == "mlm" else "next tokens"
    for what, field, known, rival in (
        ("tokens (original or replaced?)", "rtd_accuracy", "rtd_majority", '"original"'),
        (targets, f"{key}_accuracy", "most_frequent_accuracy", "the most frequent token"),
        ("next-sentence questions", "nsp_accuracy", "nsp_majority", "the more frequent answer"),
        ("sentence-order questions", "sop_accuracy", "nsp_majority", "the more frequent answer"),
    ):
        share, base = run.final.get(field), run.baseline(known)
        if share is not None and base is not None:
            sentences.append(
                f"It gets {format_number(share, 'share')} of the {what} right; always saying "
                f"{rival} gets {format_number(base, 'share')}."
            )
    if "rtd_loss" in run.final:
        sentences.append("Numbers of masked tokens are those of the generator, which is not kept.")
    return " ".join(sentences)


def token_objective(final: dict[str, Any]) -> tuple[str, str]:
    """Return the token objective of a record: its key and its name."""
    if "rtd_loss" in final:
        return "mlm", "generator's MLM"
    return ("lm", "LM") if "lm_loss" in final else ("mlm", "MLM")


def blind_replaced(share: float) -> dict[str, float]:
    """Return the loss and the accuracy on replaced tokens without a look at the text."""
    loss = -sum(p * math.log(p) for p in (share, 1 - share) if p > 0)
    return {"rtd_entropy": loss, "rtd_majority": max(share, 1 - share)}


def draw(run: PretrainingReport, plot: Plot) -> list[tuple[str, str]]:
    """Return a list with the (title, SVG) of a plot, empty if the journal has no such numbers."""
    training, held_out = curve(run.steps, plot.field), curve(run.evaluations, plot.field)
    if not len(training.values) and not len(held_out.values):
        return []
    svg = draw_plot(
        plot,
        training,
        held_out,
        baselines=run.known(plot),
        changes=run.changes(),
        prefix=f"{plot.field}-",
    )
    return [(plot.title, svg)]


def record_tables(
    run: PretrainingReport, folder: Path
) -> list[tuple[str, list[str], list[list[Any]]]]:
    """Return tables of everything else that is known about the run, as (title, columns, rows)."""
    names = ("loss", "perplexity", "accuracy")
    every = [f"{objective}_{name}" for objective in OBJECTIVES for name in names]
    found = {name for record in run.of("evaluation") for name in record}
    measured = [name for name in every if name in found]
    tables = []
    for title, kind, columns in (
        ("Held-out measurements", "evaluation", ["step", *measured]),
        ("Checkpoints", "checkpoint", ["step", "path", "seconds"]),
        ("Notes", "note", ["step", "message"]),
    ):
        rows = [[record.get(column) for column in columns] for record in run.of(kind)]
        tables.append((title, [field_title(name) for name in columns], rows))
    known = {key: value for key, value in run.start.items() if key not in {"kind", "time"}}
    facts = {"Before the first step": known}
    for file in ("recipe", "environment", "corpus"):
        facts[file.capitalize()] = read_optional(folder / f"{file}.json", file_names=True)
    for title, value in facts.items():
        tables.append((title, ["field", "value"], [list(row) for row in flatten_fields(value)]))
    return tables
