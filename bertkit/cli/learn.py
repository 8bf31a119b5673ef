"""The `bertkit learn` command: learn a WordPiece vocabulary from text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from bertkit.cli.options import FLATTEN, Column, Format
from bertkit.text.sources import TextSource
from bertkit.tokenizer.learn import LEARN_DEFAULTS, LearnOptions, learn_tokenizer


def learn_command(
    *paths: str,
    out: Path,
    size: int = 30522,
    options: Annotated[LearnOptions, FLATTEN] = LEARN_DEFAULTS,
    format: Format = "auto",  # noqa: A002 - the flag's natural name
    column: Column = "text",
    processes: int = 0,
) -> None:
    """Learn a WordPiece vocabulary from text.

    Parameters
    ----------
    paths
        Files, folders, globs, URLs, or Hugging Face data sets as hf:NAME.
    out
        The folder for vocab.txt, tokenizer.json, tokenizer_config.json and vocabulary.json.
    size
        The number of tokens, including the five special tokens.
    processes
        The number of counting processes; 0 means one per core. It does not affect the result.
    """
    learn_tokenizer(TextSource(paths, format, column), out, size, options, processes=processes)
