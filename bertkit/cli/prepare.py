"""The `bertkit prepare` command: tokenize text into a token store."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from bertkit.config import FLATTEN
from bertkit.corpus.build import PrepareOptions, prepare, prepare_share
from bertkit.tokenizer.wordpiece import Tokenizer

PREPARE_DEFAULTS = PrepareOptions()


def prepare_command(
    *paths: str,
    tokenizer: Path,
    out: Path,
    processes: int = 0,
    share: str = "",
    options: Annotated[PrepareOptions, FLATTEN] = PREPARE_DEFAULTS,
) -> None:
    """Tokenize text into a token store.

    Parameters
    ----------
    paths
        Files, folders, globs, URLs, or Hugging Face data sets as hf:NAME. Formats: plain text (a
        blank line ends a document), WikiExtractor, JSONL, CSV, TSV and Parquet, which may be
        compressed as .gz, .bz2, .xz or .zst.
    tokenizer
        A folder made by `bertkit learn`, a model directory, a run, or a vocab.txt file.
    out
        The store's folder. The same command resumes a stopped run.
    processes
        The number of worker processes; 0 means one per core. It does not affect the store.
    share
        Make one share of the store, such as 2/4 for the second of four, while other machines that
        see the same files make the others. The one that completes the store writes its manifest.
    """
    loaded = Tokenizer.load(tokenizer)
    if share:
        prepare_share([*paths], loaded, out, options, share=share, processes=processes)
    else:
        prepare([*paths], loaded, out, options, processes=processes)
