"""Write the report of a fine-tuning folder: what the grid found, and how certain that is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import compress
from pathlib import Path
from typing import Any

from bertkit.files import read_optional
from bertkit.finetuning.grid import RunResult
from bertkit.finetuning.results import FinetuningResults
from bertkit.report.html import field_title, flatten_fields, render_page
from bertkit.report.plots import (
    EMPTY_CURVE,
    Curve,
    DotRow,
    Plot,
    curve,
    draw_dots,
    draw_losses,
    draw_plot,
    format_number,
)
from bertkit.tasks.metrics import is_fraction
from bertkit.training.journal import JOURNAL, read_journal

BLIND = "input-independent baseline"
SETTING_COLUMNS = [
    *("setting", "split", "metric", "median", "lowest to highest", "deviation"),
    *("n", "degenerate", "diverged"),
]
MAX_LABELS = 20
"""With more labels, the page lists the most frequent errors instead of a confusion matrix."""
MAX_WRONG = 20
MAX_TEXT = 400
"""The number of characters of a text that are shown."""


def finetuning_page(folder: Path) -> str:
    """Return the page of a fine-tuning folder, finished or still running.

    This reads `finetune.json`, `runs/NAME/run.json` with the journals next to them and, if they
    exist, `results.json`, `results/SPLIT.jsonl`, `environment.json` and `grid.json`. "baseline"
    (split -> metric -> score of the input-independent baseline), "windowed" and "cut" (split ->
    number of inputs) are shown if `finetune.json` or `results.json` has them.
    """
    tuned = FinetuningResults(folder)
    return render_page(
        "finetuning.html",
        title=f"{report_title(tuned)}: bertkit report",
        name=report_title(tuned),
        state=grid_state(tuned),
        verdict=verdict_text(tuned),
        cards=grid_cards(tuned),
        chosen_on_dev=len(tuned.scored) > 1,
        drawings=drawings(tuned),
        **settings_tables(tuned),
        runs=runs_table(tuned),
        types={s: types_table(scores) for s, scores in best_scores(tuned).items()},
        answers=[dev_answers(tuned, split) for split in best_scores(tuned)],
        fields=[
            (title, flatten_fields(value))
            for title, value in (
                ("What all runs share", tuned.shared),
                ("Environment", read_optional(folder / "environment.json", file_names=True)),
            )
            if value
        ],
    )


def best_scores(tuned: FinetuningResults) -> dict[str, dict[str, float]]:
    """Return split -> metric -> score of the best run; {} if every run diverged."""
    return tuned.best.scores if tuned.best else {}


def report_title(tuned: FinetuningResults) -> str:
    """Return the name of the data set, and the task type if that is not the name."""
    data, task_type = (str(tuned.shared.get(name, "")) for name in ("data", "task_type"))
    return data if data == task_type else f"{data} ({task_type})"


def grid_state(tuned: FinetuningResults) -> str:
    """Describe the progress of the grid in a sentence."""
    done = len(tuned.runs)
    state = "finished"
    if tuned.in_progress:
        named = ", ".join(f"{name} is at update {step:,}" for name, step in tuned.in_progress)
        state = f"still running, or killed; {named}"
    elif not tuned.listed:
        state = "still running, or killed"
    elif not tuned.finished:
        state = f"results.json covers {len(tuned.listed)} of them"
    best = "every run diverged" if tuned.best is None else f"best run: {tuned.best.name}"
    return f"Fine-tuning, {done:,} of {tuned.planned:,} runs done: {state}; {best}."


def score_kind(metric: str) -> str:
    """Return the kind of a metric's values for `format_number`."""
    return "share" if is_fraction(metric) else "number"


def shown_value(metric: str, value: float | None) -> str:
    """Format a score: fractions in percent, other values as numbers."""
    return format_number(value, score_kind(metric))


def shown_difference(metric: str, value: float | None) -> str:
    """Format a difference of two scores: of fractions in percentage points."""
    if value is None:
        return "–"
    return f"{100 * value:.2f} points" if is_fraction(metric) else format_number(value)


def headline(scores: dict[str, float]) -> dict[str, float]:
    """Return the overall scores, without those of single entity types ("f1/PER")."""
    return {name: value for name, value in scores.items() if "/" not in name}


def verdict_text(tuned: FinetuningResults) -> str:
    """Summarize the result in a sentence: the best run, the spread, and how clear its lead is."""
    best, metric = tuned.best, field_title(tuned.metric)
    if best is None:
        return "Every run diverged; lower the learning rate or raise the warm-up."
    split = tuned.splits[0]
    base = tuned.baseline(split, tuned.metric)
    blind = "" if base is None else f" ({BLIND}: {shown_value(tuned.metric, base)})"
    first = f"The best of {len(tuned.runs):,} runs has {metric}"
    if len(tuned.runs) == 1:
        first = f"The only run has {metric}"
    parts = [f"{first} {shown_value(tuned.metric, best.metric)} on {split}{blind}"]
    if best.degenerate:
        parts.append(f"but it did not learn: it {best.degenerate}")
    if len(tuned.runs) == 1:
        parts.append("one run shows neither the spread between seeds nor what other settings give")
    else:
        parts += [spread_text(tuned), rivalry(tuned)]
    return "; ".join(parts) + "."


def spread_text(tuned: FinetuningResults) -> str:
    """Describe the scores of the best setting's seeds."""
    top, found = tuned.settings[0], tuned.main_scores(tuned.settings[0])
    scored, named = top["runs"] - top["diverged"], tuned.named(top["setting"])
    if scored == 1:
        return f"{named} is the best setting, but one seed does not show the spread between seeds"
    lowest, highest = (shown_value(tuned.metric, found[end]) for end in ("lowest", "highest"))
    notes = [f"{lowest} to {highest}"]
    if top["degenerate"]:
        notes.append(f"{top['degenerate']} did not learn")
    if top["diverged"]:
        notes.append(f"{top['diverged']} more diverged")
    spread = tuned.spread(top["setting"])
    if spread is not None:
        others = " of the others" * bool(top["degenerate"])
        notes.append(f"standard deviation{others} {shown_difference(tuned.metric, spread)}")
    median = shown_value(tuned.metric, found["median"])
    line = f"the setting with the highest median ({named}) has median {median} over {scored} seeds"
    return f"{line} ({', '.join(notes)})"


def rivalry(tuned: FinetuningResults) -> str:
    """Report whether the best setting leads the next by more than the spread between seeds.

    The spread is the larger of the two settings' standard deviations between seeds, over the runs
    that learned.
    """
    ranked = [row for row in tuned.settings if row["scores"]]
    if len(ranked) == 1:
        tried = "has a score" if len(tuned.settings) > 1 else "was tried"
        return f"no other setting {tried}"
    first, second = ranked[:2]
    lead = tuned.median(first) - tuned.median(second)
    known = [tuned.spread(row["setting"]) for row in (first, second)]
    spreads = [spread for spread in known if spread is not None]
    by = shown_difference(tuned.metric, lead)
    line = f"its lead over the next setting ({tuned.named(second['setting'])}), {by}, "
    if not spreads:
        return line + "may be chance: the spread between seeds is not known"
    spread = max(spreads)
    shown = shown_difference(tuned.metric, spread)
    if lead > spread:
        return line + f"is larger than the spread between seeds, {shown}"
    return line + f"is not larger than the spread between seeds, {shown}: no clear choice"


def grid_cards(tuned: FinetuningResults) -> list[tuple[str, str, str]]:
    """Return the headline numbers as (name, value, comparison)."""
    cards = []
    written = tuned.written.get("scores") or {}
    tests = {split: scores for split, scores in written.items() if split not in tuned.splits}
    for split, scores in (best_scores(tuned) | tests).items():
        for metric, value in headline(scores).items():
            base = tuned.baseline(split, metric) if split in tuned.splits else None
            than = "of the best run" if base is None else f"{BLIND} {shown_value(metric, base)}"
            cards.append((f"{split} {field_title(metric)}", shown_value(metric, value), than))
    seeds = len({run.settings["seed"] for run in tuned.runs})
    settings = len(tuned.settings)
    tried = f"{settings} setting{'s' * (settings > 1)}, {seeds} seed{'s' * (seeds > 1)}"
    cards.append(("runs done", f"{len(tuned.runs):,} of {tuned.planned:,}", tried))
    for what, meaning in (("degenerate", "did not learn"), ("diverged", "loss is not finite")):
        cards.append((f"{what} runs", f"{sum(row[what] for row in tuned.settings):,}", meaning))
    inputs = dict(tuned.shared.get("inputs") or {})
    if "train" in inputs:
        train = inputs.pop("train")
        others = ", ".join(f"{split} {count:,}" for split, count in inputs.items())
        cards.append(("training inputs", f"{train:,}", others))
    if windowed := tuned.recorded("windowed"):
        cut = nested_total(tuned.recorded("cut"))
        cards.append(("inputs in several windows", f"{nested_total(windowed):,}", f"cut: {cut:,}"))
    return cards


def nested_total(counts: Any) -> int:
    """Return the sum of nested counts."""
    return sum(int(count) for _, count in flatten_fields(counts) if count)


def score_names(every: Iterable[Mapping[str, Mapping[str, Any]]]) -> list[tuple[str, str]]:
    """Return the distinct (split, metric) of some scores by split and metric, in order."""
    names = ((split, metric) for scores in every for split in scores for metric in scores[split])
    return list(dict.fromkeys(names))


def settings_tables(tuned: FinetuningResults) -> dict[str, Any]:
    """Return the template values for the tables of settings: by main metric, and every score."""
    split = tuned.splits[0] if tuned.splits else "dev"
    pairs = score_names(row["scores"] for row in tuned.settings)
    main = [row[:1] + row[3:] for row in settings_rows(tuned, [(split, tuned.metric)])]
    return {
        "settings_title": f"Settings: {field_title(tuned.metric)} on {split}",
        "settings": (SETTING_COLUMNS[:1] + SETTING_COLUMNS[3:], main),
        "every_score": (SETTING_COLUMNS, settings_rows(tuned, pairs) if len(pairs) > 1 else []),
    }


def settings_rows(tuned: FinetuningResults, pairs: list[tuple[str, str]]) -> list[list[Any]]:
    """Return rows with median and spread of (split, metric) pairs per setting, best first."""
    rows = []
    for row in tuned.settings:
        for split, metric in pairs:
            found = row["scores"].get(split, {}).get(metric)
            score = ["–", "–", "–"]
            if found:
                lowest, highest = (shown_value(metric, found[end]) for end in ("lowest", "highest"))
                ends = f"{lowest} to {highest}"
                score = [
                    shown_value(metric, found["median"]),
                    ends,
                    shown_difference(metric, found["deviation"]),
                ]
            counts = [row["runs"], row["degenerate"], row["diverged"]]
            rows.append([tuned.named(row["setting"]), split, field_title(metric), *score, *counts])
    return rows


def runs_table(tuned: FinetuningResults) -> tuple[list[str], list[list[Any]]]:
    """Return the columns and rows of a table of all runs, best first."""
    every = score_names(run.scores for run in tuned.scored)
    names = [(split, metric) for split, metric in every if "/" not in metric]
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
    return [*columns, "seconds", "did not learn because"], rows


def dev_answers(tuned: FinetuningResults, split: str) -> dict[str, Any] | None:
    """Return the template values for a classifier's predictions on a split, if a file has them."""
    path = tuned.folder / "results" / f"{split}.jsonl"
    if tuned.shared.get("task_type") != "classification" or not path.is_file():
        return None
    labels = [str(label) for label in tuned.shared.get("labels") or []]
    found = judge_answers(read_journal(path), labels)  # both are JSON lines
    return found and {"split": split, "run": tuned.written.get("best"), **found}


def judge_answers(
    rows: Sequence[Mapping[str, Any]], labels: Sequence[str]
) -> dict[str, Any] | None:
    """Compare predictions with labels: a confusion matrix, and the most confident errors.

    Args:
        rows: the lines of `results/SPLIT.jsonl`: "label", "probability" and, if the split is
            labelled, "gold", "text" and "pair".
        labels: the model's labels in order; labels that occur only in the rows follow them.

    Returns:
        Counts ("right", "answers") and tables; None if no row has a label.
    """
    known = [row for row in rows if row.get("gold") is not None and row.get("label") is not None]
    if not known:
        return None
    pairs = Counter((str(row["gold"]), str(row["label"])) for row in known)
    every = [*labels, *sorted({label for pair in pairs for label in pair} - {*labels})]
    wrong = [row for row in known if str(row["gold"]) != str(row["label"])]
    return {
        "right": len(known) - len(wrong),
        "answers": len(known),
        "labels": every,
        "matrix": confusion_matrix(pairs, every) if len(every) <= MAX_LABELS else [],
        "errors": frequent_errors(pairs, every) if len(every) > MAX_LABELS else [],
        "confident": confident_errors(wrong),
    }


def confusion_matrix(
    pairs: Counter[tuple[str, str]], labels: Sequence[str]
) -> list[tuple[str, list[tuple[int, int]], str]]:
    """Return (gold label, (count, shade in percent) of each prediction, recall) for each label."""
    rows = []
    for gold in labels:
        counts = [pairs[gold, label] for label in labels]
        total = sum(counts)
        shades = [round(45 * count / total) if total else 0 for count in counts]  # pale enough
        recall = format_number(pairs[gold, gold] / total if total else None, "share")
        rows.append((gold, list(zip(counts, shades, strict=True)), recall))
    return rows


def frequent_errors(pairs: Counter[tuple[str, str]], labels: Sequence[str]) -> list[list[Any]]:
    """Return the most frequent pairs of different labels."""
    order = {label: index for index, label in enumerate(labels)}
    errors = sorted(
        ((count, gold, found) for (gold, found), count in pairs.items() if gold != found),
        key=lambda error: (-error[0], order[error[1]], order[error[2]]),
    )
    return [[gold, found, count] for count, gold, found in errors[:MAX_WRONG]]


def confident_errors(wrong: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    """Return the columns and rows of a table of the most confident wrong predictions."""
    surest = sorted(wrong, key=lambda row: -(row.get("probability") or 0.0))[:MAX_WRONG]
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
    return ["id", "right label", "prediction", "probability", *texts], rows


def shorten_text(text: Any) -> str | None:
    """Shorten a text to `MAX_TEXT` characters for a table."""
    if text is None:
        return None
    return str(text) if len(str(text)) <= MAX_TEXT else f"{str(text)[:MAX_TEXT]}…"


def types_table(scores: Mapping[str, float]) -> tuple[list[str], list[list[str]]]:
    """Return a table of the scores of every entity type, from names such as "recall/PER"."""
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
    return ["type", *measures], rows


def drawings(tuned: FinetuningResults) -> list[tuple[str, str]]:
    """Return (title, SVG) of the plots: a dot per run, and the best setting's loss curves."""
    if tuned.best is None:
        return []
    rows, names = [], varying_names(tuned)
    for row in tuned.settings:
        own = [run for run in tuned.scored if run.setting == row["setting"]]
        if own:
            values, flags = [run.metric for run in own], [bool(run.degenerate) for run in own]
            rows.append(DotRow(names[row["setting"]], values, flags, tuned.median(row)))
    metric, split = field_title(tuned.metric), tuned.splits[0]
    baseline = tuned.baseline(split, tuned.metric)
    dots = draw_dots(metric, rows, baseline, score_kind(tuned.metric))
    drawn = [(f"{metric} on {split}: every run", dots)]
    setting = tuned.settings[0]["setting"]
    if lines := losses(tuned, tuned.best, setting):
        svg = draw_losses([(name, loss) for name, loss, _ in lines])
        drawn.append((f"Training loss: {tuned.named(setting)}", svg))
        plot = Plot("Learning rate", "learning_rate", "power")
        svg = draw_plot(plot, lines[-1][2], EMPTY_CURVE, prefix="rate-")
        drawn.append((f"Learning rate: {tuned.named(setting)}", svg))
    return drawn


def varying_names(tuned: FinetuningResults) -> dict[str, str]:
    """Describe each setting by the values that differ between the settings."""
    parts = {row["setting"]: tuned.named(row["setting"]).split(", ") for row in tuned.settings}
    differ = [len(set(values)) > 1 for values in zip(*parts.values(), strict=True)]
    shown = differ if any(differ) else [True] * len(differ)
    return {setting: ", ".join(compress(own, shown)) for setting, own in parts.items()}


def losses(
    tuned: FinetuningResults, best: RunResult, setting: str
) -> list[tuple[str, Curve, Curve]]:
    """Return the role, loss curve and learning rate curve of a setting's runs, the best last."""
    lines = []
    for run in tuned.runs:
        path = tuned.folder / "runs" / run.name / JOURNAL
        if run.setting == setting and path.is_file():
            records = [one for one in read_journal(path) if one.get("kind") == "step"]
            loss = curve(records, "loss")
            if len(loss.values):
                lines.append((role(run, best), loss, curve(records, "learning_rate")))
    return sorted(lines, key=lambda line: line[0] == "best run")


def role(run: RunResult, best: RunResult) -> str:
    """Return the role of a run in the plot of losses: a key of `plots.ROLES`."""
    if not run.scores:
        return "diverged run"
    if run.degenerate:
        return "degenerate run"
    return "best run" if run.name == best.name else "run"
