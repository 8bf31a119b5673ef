"""The command `bertkit explain`, which traces one example from its characters to its losses."""

from __future__ import annotations

import rich.console

from bertkit.cli.options import AnyModel


def explain_command(
    model: AnyModel,
    text: str,
    pair: str | None = None,
    *,
    seed: int = 0,
    layer: int | None = None,
    head: int | None = None,
) -> None:
    """Trace one example through a model: words, tokens, masks, attention, vectors, losses.

    Parameters
    ----------
    text
        The text.
    pair
        A second text, which may or may not follow the first.
    seed
        The seed of the masks.
    layer
        The layer whose attention is printed, from 1; by default the last.
    head
        The head whose attention is printed, from 1; by default the mean of all heads.
    """
    from bertkit.report.explain import print_explanation, trace_example

    trace = trace_example(model, text, pair, seed=seed)
    print_explanation(trace, rich.console.Console(highlight=False), layer=layer, head=head)
