"""Print an explanation in 80 columns."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import rich.console
import rich.table
from rich.text import Text

from bertkit.errors import BertkitError
from bertkit.explain.sections import Content, Table, attention_accuracy, trace_sections
from bertkit.explain.steps import printable
from bertkit.explain.trace import Trace

MAX_MATRIX = 60
"""The number of tokens whose weights fit side by side in 80 columns, one digit each."""
SHOWN_TOKENS = 3


def print_explanation(
    trace: Trace,
    console: rich.console.Console,
    *,
    layer: int | None = None,
    head: int | None = None,
) -> None:
    """Print an explanation with the attention of one layer, by default the last.

    That of a head is printed in full, by default the mean of all heads. Both count from 1.

    Raises:
        BertkitError: the model has no such layer or head.
    """
    check_within("layer", layer, trace.config.num_hidden_layers)
    check_within("head", head, trace.config.num_attention_heads)
    for number, (key, section) in enumerate(trace_sections(trace), start=1):
        console.print(Text(f"\n{number}. {section.title}", style="bold"))
        console.print(Text(f"{section.source} | {', '.join(section.modules)}", style="dim"))
        console.print(Text(section.meaning))
        if key in trace.left_out:
            console.print(Text(f"Not shown: {trace.left_out[key]}."))
            continue
        blocks = section.blocks(trace)
        if key == "attention":
            blocks = attention_blocks(trace, layer or trace.config.num_hidden_layers, head)
        for block in blocks:
            if not (isinstance(block, Table) and block.page_only):
                console.print(printed(block))


def check_within(name: str, chosen: int | None, size: int) -> None:
    """Raise a BertkitError unless the model has the chosen layer or head."""
    if chosen is not None and not 1 <= chosen <= size:
        raise BertkitError(f"--{name} must be within 1 to {size} for this model, got {chosen}")


def printed(block: Content) -> Text | rich.table.Table:
    """Turn a block into what rich prints; its text is never taken for markup."""
    if isinstance(block, str):
        return Text(block)
    made = rich.table.Table(box=None, pad_edge=False, header_style="dim")
    for name in block.columns:
        made.add_column(
            name.removeprefix(">"),
            justify="right" if name.startswith(">") else "left",
            no_wrap=name in ("step", "weights, first token to last"),
        )
    for row in block.rows:
        made.add_row(*map(Text, row))
    return made


def attention_blocks(trace: Trace, layer: int, head: int | None) -> Iterator[Content]:
    """Show what each token attends to in one layer and one head (both from 1), or in their mean."""
    heads = trace.inside.attention[layer - 1]
    weights = heads.mean(0) if head is None else heads[head - 1]
    which = "mean of the heads" if head is None else f"head {head} of {len(heads)}"
    yield f"Layer {layer} of {trace.config.num_hidden_layers}, {which}:"
    if head is not None and len(weights) <= MAX_MATRIX:
        yield "In tenths, rounded: 3 is 0.25 to 0.35, # is 0.95 or more, . is below 0.05."
        shown, title = 12, "weights, first token to last"
        cells = ["".join(map(digit, row.tolist())) for row in weights]
    else:
        shown, title = None, "attends most to"
        cells = [most_attended(trace, row) for row in weights]
    names = [printable(token.shown)[:shown] for token in trace.tokens]
    rows = zip(map(str, range(len(names))), names, cells, strict=True)
    yield Table((">", "token", title), [list(row) for row in rows])
    yield attention_accuracy(trace)


def digit(weight: float) -> str:
    """Show a weight as one character."""
    return ".123456789#"[math.floor(10 * weight + 0.5)]


def most_attended(trace: Trace, row: np.ndarray) -> str:
    """Name the tokens with the largest weights of a row (tokens,)."""
    best = np.argsort(-row, kind="stable")[:SHOWN_TOKENS].tolist()
    return ", ".join(f"{printable(trace.tokens[i].shown)} ({i}) {row[i]:.0%}" for i in best)
