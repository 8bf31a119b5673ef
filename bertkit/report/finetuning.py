"""A fine-tuning folder → one HTML page: what the grid found, and how sure one can be of it."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

from bertkit.finetuning.results import FinetuningResults, ResultRow
from bertkit.report.answers import answers_section, types_table
from bertkit.report.finetuning_plots import figures
from bertkit.report.html import (
    card_list,
    field_table,
    field_title,
    flatten_fields,
    folded,
    html_page,
    html_table,
    optional_json,
)
from bertkit.report.plots import format_number
from bertkit.training.journal import read_journal

BLIND = "without looking at the input"
SETTINGS = [
    *("setting", "split", "metric", "median", "lowest to highest", "deviation"),
    *("n", "degenerate", "diverged"),
]
CHOSEN = (
    "The best run was chosen by this very score, which therefore flatters it; "
    "the median of its setting is the fairer number."
)


def finetuning_page(folder: Path) -> str:
    """The page of a fine-tuning folder, finished or still going on.

    Reads `finetune.json`, `runs/NAME/run.json` with the journals beside them and, where they are
    there, `results.json`, `results/SPLIT.jsonl`, `environment.json` and `grid.json`. "baseline"
    (split -> metric -> score without looking at the input), "windowed" and "cut" (split -> inputs)
    are shown where `finetune.json` or `results.json` has them.

    Raises:
        BertkitError: a file is damaged, or no run is done yet.
    """
    tuned = FinetuningResults(folder)
    parts = [
        report_heading(tuned),
        f"<p><strong>{escape(verdict_text(tuned))}</strong></p>",
        result_cards(tuned),
    ]
    if len(tuned.scored) > 1:
        parts.append(f"<p>{CHOSEN}</p>")
    parts += [figures(tuned), settings_tables(tuned), runs_table(tuned), on_dev(tuned)]
    environment = optional_json(folder / "environment.json")
    for title, value in (("What all runs share", tuned.shared), ("Environment", environment)):
        parts.append(folded(title, field_table(value)) if value else "")
    return html_page(f"{report_title(tuned)}: bertkit report", parts)


def report_title(tuned: FinetuningResults) -> str:
    """Data set and task type."""
    data, task_type = (str(tuned.shared.get(name, "")) for name in ("data", "task_type"))
    return data if data == task_type else f"{data} ({task_type})"


def report_heading(tuned: FinetuningResults) -> str:
    """Title and state of the grid."""
    done = len(tuned.runs)
    state = "finished"
    if tuned.going_on:
        named = ", ".join(f"{name} is at update {step:,}" for name, step in tuned.going_on)
        state = f"still going on, or killed; {named}"
    elif not tuned.listed:
        state = "still going on, or killed"
    elif not tuned.finished:
        state = f"results.json is about {len(tuned.listed)} of them"
    best = "every run diverged" if tuned.best is None else f"best run: {tuned.best.name}"
    line = f"Fine-tuning, {done:,} of {tuned.planned:,} runs done: {state}; {best}."
    return f"<h1>{escape(report_title(tuned))}</h1><p>{escape(line)}</p>"


def shown_value(metric: str, value: float | None) -> str:
    """A score: in percent, errors and thresholds as they are."""
    return format_number(value, "number" if metric.endswith(("error", "threshold")) else "share")


def points(value: float | None) -> str:
    """A difference of shares."""
    return "–" if value is None else f"{100 * value:.2f} points"


def headline(scores: dict[str, float]) -> dict[str, float]:
    """The scores over everything, without those of single types ("f1/PER")."""
    return {name: value for name, value in scores.items() if "/" not in name}


def verdict_text(tuned: FinetuningResults) -> str:
    """The result in a sentence: the best run, the spread, and whether the choice is a clear one."""
    best, metric = tuned.best, field_title(tuned.metric)
    if best is None:
        return "Every run diverged; lower the learning rate or raise the warm-up."
    split = tuned.splits[0]
    base = tuned.baseline(split, tuned.metric)
    blind = "" if base is None else f" ({shown_value(tuned.metric, base)} {BLIND})"
    first = f"The best of {len(tuned.runs):,} runs has {metric}"
    if len(tuned.runs) == 1:
        first = f"The only run has {metric}"
    parts = [f"{first} {shown_value(tuned.metric, best.metric)} on {split}{blind}"]
    if best.degenerate:
        parts.append(f"but it has learnt nothing: it {best.degenerate}")
    if len(tuned.runs) == 1:
        parts.append("one run shows neither the spread between seeds nor what other settings give")
    else:
        parts += [spread_text(tuned), rivalry(tuned)]
    return "; ".join(parts) + "."


def spread_text(tuned: FinetuningResults) -> str:
    """What the seeds of the best setting gave."""
    top, found = tuned.settings[0], tuned.main_scores(tuned.settings[0])
    scored, named = top["runs"] - top["diverged"], tuned.named(top["setting"])
    if scored == 1:
        return f"{named} is the best setting, but one seed does not show the spread between seeds"
    lowest, highest = (shown_value(tuned.metric, found[end]) for end in ("lowest", "highest"))
    notes = [f"{lowest} to {highest}"]
    if top["degenerate"]:
        notes.append(f"{top['degenerate']} learnt nothing")
    if top["diverged"]:
        notes.append(f"{top['diverged']} more diverged")
    spread = tuned.spread(top["setting"])
    if spread is not None:
        others = " of the others" * bool(top["degenerate"])
        notes.append(f"standard deviation{others} {points(spread)}")
    median = shown_value(tuned.metric, found["median"])
    line = f"the setting with the highest median ({named}) has median {median} over {scored} seeds"
    return f"{line} ({', '.join(notes)})"


def rivalry(tuned: FinetuningResults) -> str:
    """Whether the lead of the best setting over the next is larger than the spread of seeds.

    The spread is the larger one of the two settings' standard deviations between seeds, of the
    runs that learnt something.
    """
    ranked = [row for row in tuned.settings if row["scores"]]
    if len(ranked) == 1:
        tried = "has a score" if len(tuned.settings) > 1 else "was tried"
        return f"no other setting {tried}"
    first, second = ranked[:2]
    lead = tuned.median(first) - tuned.median(second)
    known = [tuned.spread(row["setting"]) for row in (first, second)]
    spreads = [spread for spread in known if spread is not None]
    line = f"its lead over the next setting ({tuned.named(second['setting'])}), {points(lead)}, "
    if not spreads:
        return line + "may be chance: the spread between seeds is not known"
    spread = max(spreads)
    if lead > spread:
        return line + f"is larger than the spread between seeds, {points(spread)}"
    return line + f"is not larger than the spread between seeds, {points(spread)}: no clear choice"


def result_cards(tuned: FinetuningResults) -> str:
    """The headline numbers."""
    cards = []
    for split, scores in (tuned.best.scores if tuned.best else {}).items():
        for metric, value in headline(scores).items():
            base = tuned.baseline(split, metric)
            than = "of the best run" if base is None else f"{shown_value(metric, base)} {BLIND}"
            cards.append((f"{split} {field_title(metric)}", shown_value(metric, value), than))
    for split, scores in (tuned.written.get("scores") or {}).items():
        if split not in tuned.splits:
            for metric, value in headline(scores).items():
                cards.append(
                    (
                        f"{split} {field_title(metric)}",
                        shown_value(metric, value),
                        "of the best run",
                    )
                )
    seeds = len({run.settings["seed"] for run in tuned.runs})
    settings = len(tuned.settings)
    tried = f"{settings} setting{'s' * (settings > 1)}, {seeds} seed{'s' * (seeds > 1)}"
    cards.append(("runs done", f"{len(tuned.runs):,} of {tuned.planned:,}", tried))
    for what, meaning in (("degenerate", "learnt nothing"), ("diverged", "loss not a number")):
        cards.append((f"{what} runs", f"{sum(row[what] for row in tuned.settings):,}", meaning))
    inputs = dict(tuned.shared.get("inputs") or {})
    if "train" in inputs:
        train = inputs.pop("train")
        others = ", ".join(f"{split} {count:,}" for split, count in inputs.items())
        cards.append(("training inputs", f"{train:,}", others))
    if windowed := tuned.recorded("windowed"):
        cut = total(tuned.recorded("cut"))
        cards.append(("inputs in several windows", f"{total(windowed):,}", f"cut: {cut:,}"))
    return card_list(cards)


def total(counts: Any) -> int:
    """The sum of nested counts."""
    return sum(int(count) for _, count in flatten_fields(counts) if count)


def settings_tables(tuned: FinetuningResults) -> str:
    """The main metric of every setting; every other score folded away."""
    split = tuned.splits[0] if tuned.splits else "dev"
    pairs = list(
        dict.fromkeys(
            (name, metric)
            for row in tuned.settings
            for name, found in row["scores"].items()
            for metric in found
        )
    )
    main = [row[:1] + row[3:] for row in settings_rows(tuned, [(split, tuned.metric)])]
    rest = html_table(SETTINGS, settings_rows(tuned, pairs))
    parts = [
        f"<h2>Settings: {escape(field_title(tuned.metric))} on {escape(split)}</h2>",
        f'<div class="named">{html_table(SETTINGS[:1] + SETTINGS[3:], main)}</div>',
        folded("Every score of every setting", rest) if len(pairs) > 1 else "",
    ]
    return "".join(parts)


def settings_rows(tuned: FinetuningResults, pairs: list[tuple[str, str]]) -> list[list[Any]]:
    """Median and spread of some (split, metric) for every setting, the best first."""
    rows = []
    for row in tuned.settings:
        for split, metric in pairs:
            found = row["scores"].get(split, {}).get(metric)
            score = ["–", "–", "–"]
            if found:
                lowest, highest = (shown_value(metric, found[end]) for end in ("lowest", "highest"))
                ends = f"{lowest} to {highest}"
                score = [shown_value(metric, found["median"]), ends, deviation(metric, found)]
            counts = [row["runs"], row["degenerate"], row["diverged"]]
            rows.append([tuned.named(row["setting"]), split, field_title(metric), *score, *counts])
    return rows


def deviation(metric: str, found: ResultRow) -> str:
    """A standard deviation between seeds, in the metric's own unit."""
    value = found["deviation"]
    is_share = shown_value(metric, 0.5).endswith("%")
    return points(value) if is_share else format_number(value)


def runs_table(tuned: FinetuningResults) -> str:
    """All runs, the best first."""
    names = list(
        dict.fromkeys(
            (split, metric)
            for run in tuned.scored
            for split, scores in run.scores.items()
            for metric in headline(scores)
        )
    )
    rows = [
        [
            run.name,
            *(
                shown_value(metric, run.scores.get(split, {}).get(metric))
                for split, metric in names
            ),
            f"{run.seconds:,.1f}",
            run.degenerate or None,
        ]
        for run in sorted(tuned.runs, key=lambda run: (bool(run.degenerate), -run.metric))
    ]
    columns = ["run", *(f"{split} {field_title(metric)}" for split, metric in names)]
    body = html_table([*columns, "seconds", "learnt nothing because"], rows)
    return f'<h2>All runs</h2><div class="named remarks">{body}</div>'


def on_dev(tuned: FinetuningResults) -> str:
    """What the best model answers: types of entities, confusions, errors."""
    parts = []
    for split, scores in (tuned.best.scores if tuned.best else {}).items():
        if types := types_table(scores):
            parts.append(f"<h2>Types on {escape(split)}</h2>{types}")
        path = tuned.folder / "results" / f"{split}.jsonl"
        if tuned.shared.get("task_type") == "classification" and path.is_file():
            labels = [str(label) for label in tuned.shared.get("labels") or []]
            rows = read_journal(path)  # which is JSON lines, too
            parts.append(answers_section(rows, labels, split, tuned.written.get("best")))
    return "".join(parts)
