"""Drawings of a fine-tuning: every run of every setting as a dot, and the losses of some runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from bertkit.plots import (
    BASELINE,
    HELD_OUT,
    TEXT,
    TRAINING,
    Curve,
    number,
    rendered,
    thin,
)

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

    Args:
        metric: what the values are.
        rows: at least one, from the top; values as fractions of 1.
        baseline: the score without looking at the input; drawn where it is near the dots.
        prefix: begins every id.
    """
    from matplotlib.ticker import PercentFormatter

    near = baseline is not None and is_near(baseline, [v for row in rows for v in row.values])

    def paint(axes: Any) -> None:
        for place, row in enumerate(rows):
            values, degenerate = np.array(row.values), np.array(row.degenerate)
            count = len(values)
            beside = place + 0.22 * (2 * np.arange(count) / max(1, count - 1) - 1) * (count > 1)
            for flag, colour, mark, name in (
                (False, TRAINING, "o", "run"),
                (True, HELD_OUT, "X", "degenerate run"),
            ):
                own = degenerate == flag
                style = {"color": colour, "markersize": 6, "markeredgewidth": 0, "alpha": 0.85}
                axes.plot(values[own], beside[own], mark, label=name * bool(own.any()), **style)
            ends = [place - 0.36, place + 0.36]
            axes.plot([row.median] * 2, ends, color=TEXT, linewidth=1.8, label="median")
        if near:
            axes.axvline(baseline, color=BASELINE, linewidth=1.2, linestyle="--", label="baseline")
        axes.set_yticks(range(len(rows)), [row.label for row in rows])
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.grid(visible=False, axis="y")
        axes.xaxis.set_major_formatter(PercentFormatter(1.0))
        axes.set_xlabel(metric)
        legend(axes)

    described = "; ".join(
        f"{row.label}: {', '.join(number(value, 'share') for value in row.values)}, "
        f"median {number(row.median, 'share')}"
        for row in rows
    )
    height = 1.1 + 0.42 * max(2, len(rows))
    return rendered(paint, prefix, f"{metric} of every run. {described}.", height)


def is_near(value: float, others: Sequence[float]) -> bool:
    """Whether a value can be drawn beside others without pressing them together."""
    span = max(others) - min(others)
    return min(others) - span <= value <= max(others) + span


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
        f"{role} from {number(line.values[0])} to {number(line.values[-1])}" for role, line in lines
    )
    return rendered(paint, prefix, f"Training loss: {described}.")


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
