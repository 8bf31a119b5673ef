"""The report of a fine-tuning folder: scores beside a baseline, runs, errors, the training loss."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bertkit.finetuning.runs import FinetuneResult, read_results, score_text
from bertkit.progress import JOURNAL, read_journal
from bertkit.report.page import Plot, curve, draw_plot, flatten_fields, format_number, render_page

MAX_LABELS = 20
"""With more labels, the page lists the most frequent errors instead of a confusion matrix."""
MAX_WRONG, MAX_TEXT = 20, 400
LEAST_POINTS = 8  # fewer losses say too little for a curve, which takes as long as such a run


def finetuning_page(folder: Path) -> str:
    """Return the page of a finished fine-tuning folder."""
    result = read_results(folder)
    values = result.values
    name = f"{values['data']}, {result.best.name}"
    return render_page(
        "finetuning.html",
        title=f"{name}: bertkit report",
        name=name,
        verdict=verdict(result),
        several=len(result.runs) > 1,
        scores=scores_table(values),
        settings=settings_table(result),
        runs=runs_table(result),
        drawings=loss_plot(result),
        predictions=[errors_on(result, split) for split in values["scores"]],
        fields=[("How it was made", flatten_fields(values["training"])),
                ("Environment", flatten_fields(values["environment"]))],
    )  # fmt: skip


def verdict(result: FinetuneResult) -> str:
    """Say in a sentence what the best run reached, and whether it learned something."""
    if result.best.degenerate:
        return f"Even the best run learned nothing: it {result.best.degenerate}."
    metric, split = result.values["metric"], next(iter(result.best.scores))
    score = score_text(metric, result.best.scores[split][metric])
    baseline = result.values["baseline"].get(split, {}).get(metric)
    if baseline is None:
        return f"{metric} on {split} is {score}."
    constant = score_text(metric, baseline)
    return f"{metric} on {split} is {score}; the best answer that ignores the input has {constant}."


def scores_table(values: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return each score of the best run, with the interval of few inputs, beside the baseline."""
    rows = []
    for split, scores in values["scores"].items():
        for metric, value in scores.items():
            baseline = values["baseline"].get(split, {}).get(metric)
            shown = "–" if baseline is None else score_text(metric, baseline)
            ends = values.get("predicted", {}).get(split, {}).get("intervals", {}).get(metric, [])
            interval = " to ".join(score_text(metric, end) for end in ends)
            score = score_text(metric, value) + (f" (95 %: {interval})" if interval else "")
            rows.append([split, metric, score, shown])
    return ["split", "metric", "score", "input-independent baseline"], rows


def settings_table(result: FinetuneResult) -> tuple[list[str], list[list[str]]]:
    """Return the median and the range of the main score of each setting."""
    metric, split = result.values["metric"], next(iter(result.best.scores))
    rows, kinds = [], ("median", "lowest", "highest", "deviation")
    for row in result.values["settings"]:
        spread = row["scores"].get(split, {}).get(metric)
        cells = [
            "–" if spread is None or spread[k] is None else score_text(metric, spread[k])
            for k in kinds
        ]
        counts = [row["runs"], row["degenerate"], row["diverged"]]
        rows.append([row["setting"], *cells, *map(str, counts)])
    return ["setting", *kinds, "runs", "degenerate", "diverged"], rows


def runs_table(result: FinetuneResult) -> tuple[list[str], list[list[str]]]:
    """Return a row for each run."""
    metric = result.values["metric"]
    rows = [
        [
            run.name,
            "–" if run.metric is None else score_text(metric, run.metric),
            f"{run.seconds:.0f}",
            "best" if run == result.best else run.degenerate,
        ]
        for run in result.runs
    ]
    return ["run", metric, "seconds", "remark"], rows


def loss_plot(result: FinetuneResult) -> list[tuple[str, str]]:
    """Return the title and the drawing of the best run's training loss, if it has a journal."""
    single = len(result.runs) == 1
    path = (result.folder if single else result.folder / "runs" / result.best.name) / JOURNAL
    if not path.is_file():
        return []
    loss = curve((r for r in read_journal(path) if r.get("kind") == "step"), "loss")
    plot = Plot("Training loss", "loss")
    if len(loss.values) < LEAST_POINTS:
        return []
    return [(plot.title, draw_plot(plot, loss, curve([], "loss")))]


def errors_on(result: FinetuneResult, split: str) -> dict[str, Any] | None:
    """Return a classifier's confusion matrix and most confident errors on a split."""
    path = result.folder / "predictions" / f"{split}.jsonl"
    if result.values["task_type"] != "classification" or not path.is_file():
        return None
    rows = [row for row in read_journal(path) if row.get("gold") is not None]
    pairs = Counter((str(row["gold"]), str(row["label"])) for row in rows)
    wrong = [row for row in rows if str(row["gold"]) != str(row["label"])]
    labels = [str(label) for label in result.values["labels"]]
    few = len(labels) <= MAX_LABELS
    frequent = [[g, p, n] for (g, p), n in pairs.most_common() if g != p][:MAX_WRONG]
    return {
        "split": split,
        "right": len(rows) - len(wrong),
        "answers": len(rows),
        "labels": labels,
        "matrix": confusion_matrix(pairs, labels) if few else [],
        "errors": [] if few else frequent,
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


def confident_errors(wrong: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    """Return the columns and rows of a table of the most confident wrong predictions."""
    surest = sorted(wrong, key=lambda row: -(row.get("probability") or 0.0))[:MAX_WRONG]
    rows = [
        [
            str(row.get("id")),
            row["gold"],
            row["label"],
            format_number(row.get("probability"), "share"),
            " / ".join(str(row[n])[:MAX_TEXT] for n in ("text", "pair") if row.get(n)),
        ]
        for row in surest
    ]
    return ["id", "right label", "prediction", "probability", "text"], rows
