"""The charts of the documents: results files drawn as docs/images/*.svg.

`python -m benchmarks.tables` writes them together with the tables. Equal results give equal bytes
with the matplotlib of constraints.txt: a drawing holds neither a date nor a version.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any, NamedTuple

TEXT, GRID, BAND, BERTKIT, SLOWER = "#1c1e21", "#d8dce2", "#c3c9d1", "#2563a8", "#c8501e"
STYLE = {
    "svg.hashsalt": "bertkit",
    "svg.fonttype": "none",
    "font.size": 10,
    "text.color": TEXT,
    "axes.labelcolor": TEXT,
    "axes.edgecolor": GRID,
    "xtick.color": TEXT,
    "ytick.color": TEXT,
}
SPREAD = ("lowest", "median", "highest")
WIDTH, TOP, BOTTOM = 8.4, 0.35, 0.55
"""In inches, the width of a drawing, and the space above and below its rows."""


class Comparison(NamedTuple):
    """One bar of the chart of speed: bertkit over another library."""

    label: str
    other: str
    file: str
    row: str
    column: str
    is_time: bool = False
    """Whether the column holds a ratio of times, of which the inverse is drawn."""


PEERS = "the fastest of four other libraries"
COMPARISONS = (
    Comparison("Pre-training, 4 layers, width 256, bf16", "transformers, padded", "pretraining",
               "4x256, bertkit bf16", "over_transformers_same_precision"),
    Comparison("Pre-training, 4 layers, width 512, bf16", "transformers, padded", "pretraining",
               "4x512, bertkit bf16", "over_transformers_same_precision"),
    Comparison("Fine-tuning on MRPC, bf16", "the Trainer of transformers", "finetuning",
               "mrpc, bertkit bf16", "over_faster_trainer_bf16"),
    Comparison("Sentence embeddings, fp32", "sentence-transformers", "embeddings",
               "bertkit fp32", "over_sentence_transformers"),
    Comparison("Classifying 512 short texts, int8", PEERS, "inference-short",
               "bertkit int8", "over_fastest_peer"),
    Comparison("Classifying one short text at a time, int8", PEERS, "inference-latency",
               "bertkit int8", "p50_over_fastest_peer", is_time=True),
)  # fmt: skip
NAMES = {
    "cola": "CoLA", "mnli-10k": "MNLI-10k", "qqp-10k": "QQP-10k", "arc-easy": "ARC-Easy",
    "conll-2003": "CoNLL-2003", "squad-1.1": "SQuAD 1.1", "squad-2.0": "SQuAD 2.0", "f1": "F1",
    "exact_match": "exact match", "mrpc": "MRPC", "rte": "RTE", "sts-b": "STS-B", "sst-2": "SST-2",
    "matthews": "Matthews", "pearson": "Pearson", "spearman": "Spearman",
}  # fmt: skip
"""Task or metric -> its name as people write it."""


def charts(results: Path) -> dict[str, str]:
    """Return every chart as SVG by the name of its file."""
    import matplotlib as mpl

    with mpl.rc_context(STYLE):
        drawings = {"speed.svg": speed(results), "quality.svg": quality(results)}
        for name in ("pretraining", "pretraining-amx", "finetuning", "finetuning-amx"):
            drawings[f"{name}.svg"] = training(rows_of(results, name))
        for path in sorted(results.glob("inference-*.json")):
            drawings[f"{path.stem}.svg"] = inference(rows_of(results, path.stem))
        return drawings


def speed(results: Path) -> str:
    """Draw how many times as fast bertkit is: a bar per comparison, with the spread of its runs."""
    figure, axes = canvas(len(COMPARISONS), row=0.42, left=0.36, right=0.02)
    axes.set_xlabel("times as fast as the other library")
    axes.axvline(1, color=TEXT, linewidth=1)
    for y, comparison in enumerate(COMPARISONS):
        low, middle, high = ratios(results, comparison)
        axes.barh(y, middle, height=0.55, color=BERTKIT if middle >= 1 else SLOWER)
        axes.plot([low, high], [y, y], color=TEXT, linewidth=1)
        beside = max(high, 1) + 0.08  # the line at 1 stays free
        axes.text(beside, y, f"{middle:.2g}×", va="center_baseline", fontweight="bold")
    figure.text(
        0.02,
        0.94,
        "bertkit against other libraries on the same two CPU cores; line: range of the runs",
    )
    labels = [f"{each.label}\nagainst {each.other}" for each in COMPARISONS]
    axes.set_yticks(range(len(labels)), labels, fontsize=9)
    axes.set_xlim(0, 5)
    return drawn(figure)


def ratios(results: Path, comparison: Comparison) -> tuple[float, float, float]:
    """Return the lowest, median and highest; all the same if only one number was recorded."""
    measured = rows_of(results, comparison.file)[comparison.row][comparison.column]
    spread = measured if isinstance(measured, dict) else dict.fromkeys(SPREAD, measured)
    low, middle, high = (spread[key] for key in SPREAD)
    return (1 / high, 1 / middle, 1 / low) if comparison.is_time else (low, middle, high)


def quality(results: Path) -> str:
    """Draw bertkit's scores, median and range, over the Trainer's range, whose median is at 0."""
    compared = {name: row for name, row in rows_of(results, "quality").items() if "trainer" in row}
    figure, axes = canvas(len(compared), row=0.3, left=0.24, right=0.18)
    axes.set_xlabel("points above or below the median of the Trainer's runs")
    axes.axvline(0, color=TEXT, linewidth=1)
    for y, row in enumerate(compared.values()):
        zero = row["trainer"]["median"]
        low, middle, high = (row["bertkit"][key] - zero for key in SPREAD)
        first, last = (row["trainer"][key] - zero for key in ("lowest", "highest"))
        axes.barh(y, last - first, left=first, height=0.6, color=BAND)
        axes.plot([low, high], [y, y], color=BERTKIT, linewidth=2)
        axes.plot(middle, y, "o", color=BERTKIT, markersize=7)
        scores = f"{row['bertkit']['median']:.1f} | {zero:.1f}"
        axes.text(1.02, y, scores, va="center_baseline", transform=axes.get_yaxis_transform())
    axes.set_yticks(
        range(len(compared)),
        [", ".join(NAMES.get(word, word) for word in name.split(", ")) for name in compared],
    )
    explained = "dot and line: bertkit, median and range; grey: the Trainer, range"
    for x, text in ((0, explained), (1.02, "bertkit | Trainer")):
        axes.text(x, -0.7, text, transform=axes.get_yaxis_transform())
    return drawn(figure)


def inference(rows: dict[str, Any]) -> str:
    """Draw every contestant, the fastest first: sequences per second, or p50 and p99."""
    by_time = "p50_milliseconds" in next(iter(rows.values()))
    column = "p50_milliseconds" if by_time else "sequences_per_second"
    spreads = [(name, *spread_of(row, column)) for name, row in rows.items()]
    spreads.sort(key=lambda spread: spread[2] if by_time else -spread[2])
    figure, axes = canvas(len(spreads), row=0.26, left=0.3, right=0.1)
    axes.set_xlabel(
        "milliseconds for one text: median, with a line to the 99th percentile; shorter is better"
        if by_time
        else "sequences per second: median, with a line for the range of the runs"
    )
    for y, (name, low, middle, high) in enumerate(spreads):
        same = not rows[name].get("remark")
        color = BERTKIT if name.startswith("bertkit") else BAND
        axes.barh(y, middle, height=0.6, color=color if same else "white", edgecolor=color)
        add_range(axes, y, low, high, f"{middle:.3g}" + ", other outputs" * (not same))
    axes.set_yticks(range(len(spreads)), [name for name, *_ in spreads], fontsize=9)
    return drawn(figure)


def training(rows: dict[str, Any]) -> str:
    """Draw the tokens per second of every case, in the order of the file, with its groups apart."""
    groups = list(dict.fromkeys(name.partition(", ")[0] for name in rows))
    figure, axes = canvas(len(rows) + len(groups) - 1, row=0.26, left=0.33, right=0.1)
    axes.set_xlabel("real tokens per second: median, with a line for the range of the runs")
    positions = []
    for number, (name, row) in enumerate(rows.items()):
        y = number + groups.index(name.partition(", ")[0])
        low, middle, high = spread_of(row, "real_tokens_per_second")
        axes.barh(y, middle, height=0.6, color=BERTKIT if ", bertkit" in name else BAND)
        add_range(axes, y, low, high, f"{middle:,.0f}")
        positions.append(y)
    axes.set_yticks(positions, rows, fontsize=9)
    return drawn(figure)


def add_range(axes: Any, y: float, low: float, high: float, text: str) -> None:
    """Draw the range of a bar's value, and write a text beside it."""
    axes.plot([low, high], [y, y], color=TEXT, linewidth=1)
    beside = {"xytext": (4, 0), "textcoords": "offset points"}
    axes.annotate(text, (high, y), **beside, va="center_baseline", fontsize=9)


def spread_of(row: dict[str, Any], column: str) -> tuple[float, float, float]:
    """Return the lowest, median and highest rate of a row; of times, the median and the 99th."""
    if column == "p50_milliseconds":
        return row[column], row[column], row["p99_milliseconds"]
    low, middle, high = (row[column][key] for key in SPREAD)
    return low, middle, high


def rows_of(results: Path, name: str) -> dict[str, Any]:
    """Return the rows of a results file by their names."""
    text = (results / f"{name}.json").read_text(encoding="utf-8")
    return json.loads(text)["rows"]


def canvas(rows: int, *, row: float, left: float, right: float) -> tuple[Any, Any]:
    """Return a figure and axes whose height follows from the rows, the first of them at the top.

    `row` is the height of a row in inches; `left` and `right` are the shares of the width that are
    kept free for text.
    """
    height = rows * row + TOP + BOTTOM
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), facecolor="white")
    axes = figure.add_axes((left, BOTTOM / height, 1 - left - right, rows * row / height))
    axes.set_ylim(rows - 0.5, -0.5)
    axes.grid(axis="x", color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    return figure, axes


def drawn(figure: Any) -> str:
    """Return a figure as SVG without anything that changes from run to run."""
    buffer = io.StringIO()
    none = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    figure.savefig(buffer, format="svg", metadata=none)
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n"


def stale(results: Path, images: Path) -> dict[Path, str]:
    """Return the charts that are not what the results files say, as they should be."""
    drawings = {images / name: svg for name, svg in charts(results).items()}
    return {
        path: svg
        for path, svg in drawings.items()
        if not path.is_file() or path.read_text(encoding="utf-8") != svg
    }
