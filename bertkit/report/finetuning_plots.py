"""Drawings of a fine-tuning: every run of every setting as a dot, and the losses of some runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from bertkit.finetuning.grid import RunResult
from bertkit.finetuning.results import FinetuningResults
from bertkit.report.html import drawing, field_title
from bertkit.report.plots import (
    BASELINE,
    HELD_OUT,
    TEXT,
    TRAINING,
    Curve,
    Plot,
    curve,
    draw_plot,
    format_number,
    render_svg,
    thin,
)
from bertkit.training.journal import JOURNAL, read_journal

NO_POINT = np.empty(0)

ROLES: dict[str, dict[str, Any]] = {
    "run": {"color": TRAINING, "alpha": 0.5, "linewidth": 1.1},
    "best run": {"color": TRAINING, "linewidth": 2.2},
    "degenerate run": {"color": HELD_OUT, "linewidth": 1.1, "linestyle": "--"},
    "diverged run": {"color": HELD_OUT, "linewidth": 1.6, "linestyle": ":"},
}
"""How the loss of a run is drawn; not by colour alone."""


class DotRow(NamedTuple):
    """The runs of one setting."""

    label: str
    values: list[float]
    """One for each run that has a score."""
    degenerate: list[bool]
    """Of each."""
    median: float


def draw_dots(metric: str, rows: Sequence[DotRow], baseline: float | None, *, prefix: str) -> str:
    """A row for each setting, a dot for each run, the median as a bar, as an SVG element.

    Runs that learnt nothing may lie far from the others: they are drawn at the edge then, with
    their score beside them, so that the others stay apart.

    Args:
        metric: what the values are.
        rows: at least one, from the top; values as fractions of 1.
        baseline: the score without looking at the input; drawn where it is near the dots.
        prefix: begins every id.
    """
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    lowest, highest = shown_range(rows)

    def paint(axes: Any) -> None:
        for place, row in enumerate(rows):
            for value, beside, flag in zip(
                row.values, beside_each_other(row), row.degenerate, strict=True
            ):
                at = min(max(value, lowest), highest)
                colour, mark = (HELD_OUT, "X") if flag else (TRAINING, "o")
                name = "degenerate run" if flag else "run"
                style = {"color": colour, "markersize": 6, "markeredgewidth": 0, "alpha": 0.85}
                axes.plot(at, place + beside, mark, label=name, **style)
                if at != value:
                    text, point = format_number(value, "share"), (at, place + beside)
                    how = {"textcoords": "offset points", "va": "center", "fontsize": 9}
                    axes.annotate(text, point, xytext=(6, 0), **how)
            if lowest <= row.median <= highest:
                ends = [place - 0.36, place + 0.36]
                axes.plot([row.median] * 2, ends, color=TEXT, linewidth=1.8, label="median")
        if baseline is not None and lowest <= baseline <= highest:
            axes.axvline(baseline, color=BASELINE, linewidth=1.2, linestyle="--", label="baseline")
        axes.set_yticks(range(len(rows)), [row.label for row in rows])
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.grid(visible=False, axis="y")
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.xaxis.set_major_formatter(PercentFormatter(1.0))
        axes.set_xlabel(metric)
        legend(axes)

    described = "; ".join(
        f"{row.label}: {', '.join(format_number(value, 'share') for value in row.values)}, "
        f"median {format_number(row.median, 'share')}"
        for row in rows
    )
    height = 1.1 + 0.42 * max(2, len(rows))
    return render_svg(paint, prefix, f"{metric} of every run. {described}.", height)


def shown_range(rows: Sequence[DotRow]) -> tuple[float, float]:
    """The lowest and highest value that are drawn where they are: a span beyond those that learnt.

    All values, where no run learnt anything.
    """
    pairs = [pair for row in rows for pair in zip(row.values, row.degenerate, strict=True)]
    values = [value for value, flag in pairs if not flag] or [value for value, _ in pairs]
    span = max(max(values) - min(values), 0.01)
    return min(values) - span, max(values) + span


def beside_each_other(row: DotRow) -> list[float]:
    """How far above or below its row each dot lies, so that equal values can be told apart."""
    last = len(row.values) - 1
    return [0.22 * (2 * i / last - 1) for i in range(last + 1)] if last else [0.0]


def draw_losses(lines: Sequence[tuple[str, Curve]], *, prefix: str) -> str:
    """The training losses of some runs against the update, as an SVG element.

    Args:
        lines: (one of `ROLES`, curve), the best run's last, so that it lies on top.
        prefix: begins every id.
    """
    from matplotlib.ticker import FuncFormatter

    def paint(axes: Any) -> None:
        for role, line in lines:
            dots = "." if len(line.values) < 20 else ""  # a line of one point cannot be seen
            axes.plot(*thin(line), marker=dots, label=role, **ROLES[role])
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,g}"))
        axes.set_xlabel("update")
        legend(axes)

    described = "; ".join(
        f"{role} from {format_number(line.values[0])} to {format_number(line.values[-1])}"
        for role, line in lines
    )
    return render_svg(paint, prefix, f"Training loss: {described}.")


def legend(axes: Any) -> None:
    """One entry for each label, above the drawing, where it hides nothing."""
    handles, labels = axes.get_legend_handles_labels()
    entries = dict(zip(labels, handles, strict=True))
    axes.figure.legend(
        entries.values(),
        entries.keys(),
        loc="outside upper right",
        ncols=len(entries),
        frameon=False,
        fontsize=9,
    )


def varying_names(tuned: FinetuningResults) -> dict[str, str]:
    """Each setting in words, without what is the same in all of them."""
    parts = {row["setting"]: tuned.named(row["setting"]).split(", ") for row in tuned.settings}
    alike = [len(set(values)) == 1 for values in zip(*parts.values(), strict=True)]
    if all(alike):
        return {setting: ", ".join(own) for setting, own in parts.items()}
    return {
        setting: ", ".join(part for part, same in zip(own, alike, strict=True) if not same)
        for setting, own in parts.items()
    }


def figures(tuned: FinetuningResults) -> str:
    """Every run of every setting as a dot; losses and learning rate of the best setting."""
    if tuned.best is None:
        return ""
    rows, names = [], varying_names(tuned)
    for row in tuned.settings:
        own = [run for run in tuned.scored if run.setting == row["setting"]]
        if own:
            values, flags = [run.metric for run in own], [bool(run.degenerate) for run in own]
            rows.append(DotRow(names[row["setting"]], values, flags, tuned.median(row)))
    metric, split = field_title(tuned.metric), tuned.splits[0]
    dots = draw_dots(metric, rows, tuned.baseline(split, tuned.metric), prefix="dots-")
    drawings = [drawing(f"{metric} on {split}: every run", dots)]
    setting = tuned.settings[0]["setting"]
    lines = losses(tuned, tuned.best, setting)
    if lines:
        drawn = draw_losses([(name, loss) for name, loss, _ in lines], prefix="loss-")
        drawings.append(drawing(f"Training loss: {tuned.named(setting)}", drawn))
        plot, rate = Plot("Learning rate", "learning_rate", "power"), lines[-1][2]
        drawn = draw_plot(plot, rate, Curve(NO_POINT, NO_POINT), prefix="rate-")
        drawings.append(drawing(f"Learning rate: {tuned.named(setting)}", drawn))
    return f'<h2>Runs</h2><div class="plots">{"".join(drawings)}</div>'


def losses(
    tuned: FinetuningResults, best: RunResult, setting: str
) -> list[tuple[str, Curve, Curve]]:
    """(role, loss, learning rate) of the runs of a setting, the best run's last."""
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
    """As what a run's loss is drawn."""
    if not run.scores:
        return "diverged run"
    if run.degenerate:
        return "degenerate run"
    return "best run" if run.name == best.name else "run"
