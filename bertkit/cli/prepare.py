"""The `bertkit prepare` command: tokenize text into a token store."""

from __future__ import annotations

from pathlib import Path

from bertkit.cli.options import Column, Format, Language
from bertkit.corpus.prepare import prepare
from bertkit.text.sources import TextSource


def prepare_command(
    *paths: str,
    tokenizer: Path,
    out: Path,
    format: Format = "auto",  # noqa: A002 - the flag's natural name
    column: Column = "text",
    language: Language = "en",
    held_out: float = 0.01,
    shard_megabytes: int = 64,
    processes: int = 0,
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
    held_out
        Share of documents kept for evaluation, chosen by a hash of their text.
    shard_megabytes
        Text per shard, in units of 1,000,000 bytes.
    processes
        The number of worker processes; 0 means one per core. It does not affect the store.
    """
    prepare(
        TextSource(paths, format, column, language),
        tokenizer,
        out,
        held_out=held_out,
        shard_megabytes=shard_megabytes,
        processes=processes,
    )
