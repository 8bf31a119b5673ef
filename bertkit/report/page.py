"""What the pages of reports are made of: Jinja2's templates, numbers, and plots by matplotlib.

A page is self-contained: plots are SVG elements in the page's own colours, so that they follow its
light or dark appearance.
"""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from typing import Any, NamedTuple

import jinja2
import numpy as np

INK, GRID, TRAINING, HELD_OUT, BASELINE = "#1c1e21", "#d8dce2", "#2563a8", "#c8501e", "#6f7680"

VARIABLES = {
    INK: "var(--text)",
    GRID: "var(--grid)",
    TRAINING: "var(--training)",
    HELD_OUT: "var(--held-out)",
    BASELINE: "var(--baseline)",
}
"""The colours in matplotlib's drawings, and the page's CSS variables that replace them."""

COLOURS: dict[Any, str] = {
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"), INK),
    **dict.fromkeys(("axes.edgecolor", "grid.color", "xtick.color", "ytick.color"), GRID),
}

MAX_POINTS = 1200


@dataclass(frozen=True)
class Plot:
    """A plot of one field of the journal against the step."""

    title: str
    field: str
    kind: str = "number"
    """The number format: number, share (in percent) or power (as 1.0e-04; never smoothed)."""
    baselines: tuple[tuple[str, str | float], ...] = ()
    """(label, value) pairs; a value is a number or the name of a baseline in the start record."""


class Curve(NamedTuple):
    """The steps and values of one quantity, both (points,) floats."""

    steps: np.ndarray
    values: np.ndarray


def format_number(value: float | None, kind: str = "number") -> str:
    """Format a number as 4.213, 28.1%, 12,345 or 1.0e-04; a missing or infinite one as a dash."""
    if value is None or not math.isfinite(value):
        return "–"
    if kind == "share":
        return f"{value:.1%}"
    if kind == "power":
        return f"{value:.1e}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3f}"


def curve(records: Iterable[dict[str, Any]], field: str) -> Curve:
    """Return the curve of a field, from the journal records in which it is not absent or null."""
    pairs = [(record["step"], record[field]) for record in records if record.get(field) is not None]
    steps, values = np.array(pairs, dtype=float).reshape(-1, 2).T
    return Curve(steps, values)


def smooth(values: np.ndarray, reach: int) -> np.ndarray:
    """Average each value with its `reach` neighbours on either side, or fewer near the ends."""
    reach = min(reach, (len(values) - 1) // 2)
    if reach < 1:
        return values
    window = np.ones(2 * reach + 1)
    return np.convolve(values, window, "same") / np.convolve(np.ones_like(values), window, "same")


def trend(line: Curve, changes: Sequence[tuple[int, str]]) -> Curve:
    """Return the curve, smoothed over a twentieth of its length.

    Each phase is smoothed separately, so that a jump between two phases stays sharp.
    """
    first = np.searchsorted(line.steps, [step for step, _ in changes], side="right")
    reach = len(line.values) // 40
    parts = [smooth(part, reach) for part in np.split(line.values, first)]
    return Curve(line.steps, np.concatenate(parts))


def thin(line: Curve) -> Curve:
    """Reduce a curve to `MAX_POINTS` points, the extrema of each interval, to keep every spike."""
    steps, values = line
    if len(values) <= MAX_POINTS:
        return line
    parts = np.array_split(np.arange(len(values)), MAX_POINTS // 2)
    indices = sorted(
        {int(part[pick(values[part])]) for part in parts for pick in (np.argmin, np.argmax)}
    )
    return Curve(steps[indices], values[indices])


def draw_plot(
    plot: Plot,
    training: Curve,
    held_out: Curve,
    *,
    baselines: Sequence[tuple[str, float]] = (),
    changes: Sequence[tuple[int, str]] = (),
) -> str:
    """Draw a plot as an SVG element."""
    from matplotlib.ticker import FuncFormatter, PercentFormatter

    def paint(axes: Any) -> None:
        for (label, height), style in zip(baselines, ("--", ":"), strict=False):
            axes.axhline(height, color=BASELINE, linewidth=1.2, linestyle=style, label=label)
        axes.plot(*thin(training), color=TRAINING, linewidth=0.8, alpha=0.35)
        strong = training if plot.kind == "power" else trend(training, changes)
        dots = "." if len(strong.values) < 20 else ""  # a line of one point would be invisible
        axes.plot(*thin(strong), color=TRAINING, linewidth=1.6, marker=dots, label="training")
        if len(held_out.values):
            axes.plot(*held_out, "o", color=HELD_OUT, markersize=4, label="held out")
        for step, label in changes:
            axes.axvline(step, color=INK, linewidth=0.8)
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

    return render_svg(paint, f"{plot.field}-", describe_curve(plot, training, held_out, baselines))


def render_svg(paint: Callable[[Any], None], prefix: str, alternative: str) -> str:
    """Draw on matplotlib axes, and return the drawing as an SVG element."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({**COLOURS, "svg.hashsalt": "bertkit", "svg.fonttype": "none"}):
        figure = Figure(figsize=(6.0, 3.2), layout="constrained")
        axes = figure.add_subplot()
        axes.grid(alpha=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        paint(axes)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    return inline(buffer.getvalue(), prefix, alternative)


def inline(svg: str, prefix: str, alternative: str) -> str:
    """Prepare an SVG of matplotlib for a page: no prologue, prefixed ids, the page's colours."""
    svg = svg[svg.index("<svg") :]
    # Metadata contains web addresses, and a style element would apply to the whole page.
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r' xmlns(:\w+)?="[^"]*"| (width|height)="[^"]*pt"', "", svg)
    svg = re.sub(r'( id="|url\(#|href="#)', rf"\g<1>{prefix}", svg)
    for colour, variable in VARIABLES.items():
        svg = svg.replace(colour, variable)
    return svg.replace("<svg", f'<svg role="img" aria-label="{escape(alternative)}"', 1).strip()


def describe_curve(
    plot: Plot, training: Curve, held_out: Curve, baselines: Sequence[tuple[str, float]]
) -> str:
    """Return the alternative text of a plot."""
    parts = [
        f"{name} from {format_number(line.values[0], plot.kind)} "
        f"to {format_number(line.values[-1], plot.kind)}"
        for name, line in (("training", training), ("held out", held_out))
        if len(line.values)
    ]
    parts += [f"{label} {format_number(height, plot.kind)}" for label, height in baselines]
    return f"{plot.title}: {', '.join(parts)}."


@cache
def template_environment() -> jinja2.Environment:
    """Return the environment for the templates of this package, which escapes values."""
    made = jinja2.Environment(
        loader=jinja2.PackageLoader("bertkit.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters["cell"] = cell_text
    return made


def render_page(template: str, **values: Any) -> str:
    """Render a template as a whole page."""
    return template_environment().get_template(template).render(values)


def field_title(name: str) -> str:
    """Return a field's name with spaces instead of underscores."""
    return name.replace("_", " ")


def flatten_fields(value: Any, name: str = "") -> list[tuple[str, Any]]:
    """Flatten nested JSON into (dotted name, value) pairs, except for lists of plain values."""
    if isinstance(value, dict):
        children = list(value.items())
    elif isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
        children = [(str(i), item) for i, item in enumerate(value)]
    else:
        return [(name, value)]
    return [
        row
        for key, item in children
        for row in flatten_fields(item, f"{name}.{key}" if name else key)
    ]


def cell_text(value: Any) -> str:
    """Format a value for a table: text unchanged, floats to six digits, other values as JSON."""
    if value is None:
        return "–"
    if isinstance(value, str):
        return value
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        return ", ".join(cell_text(item) for item in value)
    return json.dumps(value, ensure_ascii=False)
