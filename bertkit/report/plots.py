"""Draw curves and scores as SVG that lives inside an HTML page and takes its colours from it."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, NamedTuple

import numpy as np

TEXT, GRID, TRAINING, HELD_OUT, BASELINE = "#1c1e21", "#d8dce2", "#2563a8", "#c8501e", "#6f7680"

VARIABLES = {
    TEXT: "var(--text)",
    GRID: "var(--grid)",
    TRAINING: "var(--training)",
    HELD_OUT: "var(--held-out)",
    BASELINE: "var(--baseline)",
}
"""Colours as matplotlib draws them, and what the page's style calls them."""

COLOURS: dict[Any, str] = {
    "text.color": TEXT,
    "axes.labelcolor": TEXT,
    "axes.edgecolor": GRID,
    "grid.color": GRID,
    "xtick.color": GRID,
    "ytick.color": GRID,
    "xtick.labelcolor": TEXT,
    "ytick.labelcolor": TEXT,
}

MAX_POINTS = 1200

ROLES: dict[str, dict[str, Any]] = {
    "run": {"color": TRAINING, "alpha": 0.5, "linewidth": 1.1},
    "best run": {"color": TRAINING, "linewidth": 2.2},
    "degenerate run": {"color": HELD_OUT, "linewidth": 1.1, "linestyle": "--"},
    "diverged run": {"color": HELD_OUT, "linewidth": 1.6, "linestyle": ":"},
}
"""How the loss of a run is drawn; the roles differ in more than colour."""


@dataclass(frozen=True)
class Plot:
    """One quantity of the journal against the step."""

    title: str
    field: str
    kind: str = "number"
    """number, share (in percent) or power (as 1.0e-04; not a noisy one, so never smoothed)."""
    baselines: tuple[tuple[str, str | float], ...] = ()
    """(label, value), the value being a number or the name of one in the start record."""


class Curve(NamedTuple):
    """Steps and values of one quantity; both (points,) floats."""

    steps: np.ndarray
    values: np.ndarray


EMPTY_CURVE = Curve(np.empty(0), np.empty(0))


def format_number(value: float | None, kind: str = "number") -> str:
    """A quantity for reading: 4.213, 28.1%, 12,345 or 1.0e-04; a dash where there is none."""
    if value is None or not math.isfinite(value):
        return "–"
    if kind == "share":
        return f"{value:.1%}"
    if kind == "power":
        return f"{value:.1e}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3f}"


def curve(records: Iterable[dict[str, Any]], field: str) -> Curve:
    """The curve of a field of journal records; records where it is absent or null are left out."""
    pairs = [(record["step"], record[field]) for record in records if record.get(field) is not None]
    steps, values = np.array(pairs, dtype=float).reshape(-1, 2).T
    return Curve(steps, values)


def smooth(values: np.ndarray, reach: int) -> np.ndarray:
    """The mean of each value and its `reach` neighbours on either side, fewer near the ends."""
    reach = min(reach, (len(values) - 1) // 2)
    if reach < 1:
        return values
    window = np.ones(2 * reach + 1)
    return np.convolve(values, window, "same") / np.convolve(np.ones_like(values), window, "same")


def trend(line: Curve, changes: Sequence[tuple[int, str]]) -> Curve:
    """The curve smoothed over a twentieth of its length.

    Each phase is smoothed for itself, so that the step between two phases stays sharp.
    """
    first = np.searchsorted(line.steps, [step for step, _ in changes], side="right")
    reach = len(line.values) // 40
    parts = [smooth(part, reach) for part in np.split(line.values, first)]
    return Curve(line.steps, np.concatenate(parts))


def thin(line: Curve) -> Curve:
    """At most MAX_POINTS points: the lowest and highest of each stretch, so every spike stays."""
    steps, values = line
    if len(values) <= MAX_POINTS:
        return line
    parts = np.array_split(np.arange(len(values)), MAX_POINTS // 2)
    kept = sorted(
        {int(part[pick(values[part])]) for part in parts for pick in (np.argmin, np.argmax)}
    )
    return Curve(steps[kept], values[kept])


def draw_plot(
    plot: Plot,
    training: Curve,
    held_out: Curve,
    *,
    baselines: Sequence[tuple[str, float]] = (),
    changes: Sequence[tuple[int, str]] = (),
    prefix: str = "",
) -> str:
    """One plot as an SVG element.

    Args:
        plot: what is drawn.
        training: pale as it is, and strong as `trend` makes it.
        held_out: as points; may be empty.
        baselines: (label, height) of horizontal lines, at most two.
        changes: (step, label) of vertical lines.
        prefix: begins every id, so that several drawings can be in one page.
    """
    from matplotlib.ticker import FuncFormatter, PercentFormatter

    def paint(axes: Any) -> None:
        for (label, height), style in zip(baselines, ("--", ":"), strict=False):
            axes.axhline(height, color=BASELINE, linewidth=1.2, linestyle=style, label=label)
        axes.plot(*thin(training), color=TRAINING, linewidth=0.8, alpha=0.35)
        strong = training if plot.kind == "power" else trend(training, changes)
        dots = "." if len(strong.values) < 20 else ""  # a line of one point cannot be seen
        axes.plot(*thin(strong), color=TRAINING, linewidth=1.6, marker=dots, label="training")
        if len(held_out.values):
            axes.plot(*held_out, "o", color=HELD_OUT, markersize=4, label="held out")
        for step, label in changes:
            axes.axvline(step, color=TEXT, linewidth=0.8)
            text = axes.text(step, 0.98, label, rotation=90, fontsize=9, ha="right", va="top")
            text.set_transform(axes.get_xaxis_transform())
        power = "{:.1e}" if plot.kind == "power" else "{:,g}"
        shares = plot.kind == "share"
        axes.yaxis.set_major_formatter(
            PercentFormatter(1.0) if shares else FuncFormatter(lambda y, _: power.format(y))
        )
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,g}"))
        axes.set_xlabel("step")
        if len(held_out.values) or baselines:
            axes.legend(frameon=False, fontsize=9)

    return render_svg(paint, prefix, describe_curve(plot, training, held_out, baselines))


def render_svg(
    paint: Callable[[Any], None], prefix: str, alternative: str, height: float = 3.2
) -> str:
    """What `paint` puts on matplotlib axes, as an SVG element.

    Args:
        paint: is given the axes.
        prefix: begins every id, so that several drawings can be in one page.
        alternative: the drawing in words.
        height: in inches; the width is 6.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({**COLOURS, "svg.hashsalt": "bertkit", "svg.fonttype": "none"}):
        figure = Figure(figsize=(6.0, height), layout="constrained")
        axes = figure.add_subplot()
        axes.grid(alpha=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        paint(axes)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    return inline(buffer.getvalue(), prefix, alternative)


def inline(svg: str, prefix: str, alternative: str) -> str:
    """Fit a drawing of matplotlib's into a page: no prologue, own ids, the page's colours."""
    svg = svg[svg.index("<svg") :]
    # metadata names web addresses, and a style element would apply to the whole page
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r' xmlns(:\w+)?="[^"]*"| (width|height)="[^"]*pt"', "", svg)
    svg = re.sub(r'( id="|url\(#|href="#)', rf"\g<1>{prefix}", svg)
    for colour, variable in VARIABLES.items():
        svg = svg.replace(colour, variable)
    return svg.replace("<svg", f'<svg role="img" aria-label="{escape(alternative)}"', 1).strip()


def describe_curve(
    plot: Plot, training: Curve, held_out: Curve, baselines: Sequence[tuple[str, float]]
) -> str:
    """A plot in words, for those who do not see it."""
    parts = [
        f"{name} from {format_number(line.values[0], plot.kind)} "
        f"to {format_number(line.values[-1], plot.kind)}"
        for name, line in (("training", training), ("held out", held_out))
        if len(line.values)
    ]
    parts += [f"{label} {format_number(height, plot.kind)}" for label, height in baselines]
    return f"{plot.title}: {', '.join(parts)}."


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

    Runs that did not learn may lie far from the others. They are drawn at the edge with their
    score beside them, so that the other runs stay apart.

    Args:
        metric: what the values are.
        rows: at least one, from the top; values as fractions of 1.
        baseline: the score of the input-independent baseline; drawn if it is near the dots.
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
    """The lowest and highest value that are drawn where they are: a span beyond those that learned.

    All values, if no run learned.
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
