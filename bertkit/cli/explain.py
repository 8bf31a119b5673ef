"""`bertkit explain`: one example followed from its characters to its losses."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import rich.console

from bertkit.errors import BertkitError
from bertkit.explain.page import write_page
from bertkit.explain.terminal import print_explanation
from bertkit.explain.trace import trace_example
from bertkit.outputs import FILE


def explain_command(
    model: Path,
    text: str,
    pair: str | None = None,
    *,
    html: Annotated[Path | None, FILE] = None,
    seed: int = 0,
    layer: int | None = None,
    head: int | None = None,
) -> None:
    """Follow one example through a model: words, pieces, masks, vectors, attention, losses.

    Every step names its place in the paper and its file here. Layers and heads count from 1.

    Parameters
    ----------
    model
        A model directory, a run directory, or a Google checkpoint.
    text
        The text.
    pair
        A second text, which may or may not follow the first.
    html
        Write one self-contained page there, with every layer and head to click through, instead of
        printing.
    seed
        Seed of the masks.
    layer
        The layer whose attention is printed; the last where not given.
    head
        The head whose attention is printed in full; the mean of all where not given.
    """
    if html is not None and (layer is not None or head is not None):
        raise BertkitError("the page has every layer and head; leave --layer and --head out")
    trace = trace_example(model, text, pair, seed=seed)
    if html is not None:
        write_page(html, trace)
        print(f"explanation: {html}")  # noqa: T201
    else:
        print_explanation(trace, rich.console.Console(highlight=False), layer=layer, head=head)
