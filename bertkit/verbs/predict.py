"""`bertkit predict fill-mask` and `bertkit predict next-sentence`."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bertkit.predict.predictor import load


def fill_mask(model: Path, text: str, *, top: int = 5, device: str = "auto") -> None:
    """Guess what stands at each [MASK] of a text.

    Parameters
    ----------
    model
        A model directory, for example runs/demo/model.
    text
        A text with one or more [MASK].
    top
        Guesses per mask.
    device
        auto, cpu or cuda.
    """
    for number, candidates in enumerate(load(model, device=device).fill_mask(text, top), start=1):
        table = Table("piece", "probability", title=f"mask {number}")
        for piece, probability in candidates:
            table.add_row(escape(piece), f"{probability:.4f}")
        Console().print(table)


def next_sentence(model: Path, text: str, following: str, *, device: str = "auto") -> None:
    """How probable it is that one text follows another.

    Parameters
    ----------
    model
        A model directory, for example runs/demo/model.
    text
        The first text.
    following
        The text that may or may not follow it.
    device
        auto, cpu or cuda.
    """
    probability = load(model, device=device).next_sentence(text, following)
    Console().print(f"follows with probability {probability:.4f}")
