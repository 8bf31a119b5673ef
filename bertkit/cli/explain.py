"""The command `bertkit explain`, which traces one example from its characters to its losses."""

from __future__ import annotations

from pathlib import Path

import rich.console

from bertkit.cli.options import AnyModel
from bertkit.errors import BertkitError
from bertkit.files import write_text


def explain_command(
    model: AnyModel,
    text: str,
    pair: str | None = None,
    *,
    html: Path | None = None,
    seed: int = 0,
    layer: int | None = None,
    head: int | None = None,
) -> None:
    """Trace one example through a model: words, tokens, masks, vectors, attention, losses.

    Every step names its section in the paper and its source file. Layers and heads count from 1.

    Parameters
    ----------
    text
        The text.
    pair
        A second text, which may or may not follow the first.
    html
        The file for one self-contained page with every layer and head, instead of printing.
    seed
        The seed of the masks.
    layer
        The layer whose attention is printed; by default the last.
    head
        The head whose attention is printed in full; by default the mean of all heads.
    """
    if html is not None and (layer is not None or head is not None):
        raise BertkitError("the page has every layer and head; leave --layer and --head out")
    from bertkit.explain.page import explanation_page
    from bertkit.explain.terminal import print_explanation
    from bertkit.explain.trace import trace_example

    trace = trace_example(model, text, pair, seed=seed)
    if html is not None:
        write_text(html, explanation_page(trace))
        print(f"explanation: {html}")  # noqa: T201
    else:
        print_explanation(trace, rich.console.Console(highlight=False), layer=layer, head=head)
