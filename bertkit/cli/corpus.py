"""Commands from text to a token store: clean, learn and prepare."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from bertkit.cli.options import FLATTEN, USUAL_READING, Language, Reading
from bertkit.corpus.clean import CLEAN_DEFAULTS, CleanOptions, clean
from bertkit.corpus.prepare import prepare
from bertkit.text.sources import TextSource
from bertkit.tokenizer.learn import LEARN_DEFAULTS, LearnOptions, learn_tokenizer


def clean_command(
    *paths: str,
    out: Path,
    options: Annotated[CleanOptions, FLATTEN] = CLEAN_DEFAULTS,
    reading: Annotated[Reading, FLATTEN] = USUAL_READING,
) -> None:
    """Drop duplicates and documents of unwanted lengths from text, and count what is dropped.

    Args:
        paths: Files, folders, globs, or Hugging Face data sets, as for `bertkit prepare`.
        out: The file to write: NAME.jsonl, NAME.jsonl.gz or NAME.jsonl.zst.
    """
    clean(
        TextSource(paths, reading.format, reading.column), out, options, processes=reading.processes
    )


def learn_command(
    *paths: str,
    out: Path,
    size: int = 30522,
    options: Annotated[LearnOptions, FLATTEN] = LEARN_DEFAULTS,
    reading: Annotated[Reading, FLATTEN] = USUAL_READING,
) -> None:
    """Learn a WordPiece vocabulary from text.

    Args:
        paths: Files, folders, globs, or Hugging Face data sets as hf:NAME.
        out: The folder for vocab.txt, tokenizer.json, tokenizer_config.json and vocabulary.json.
        size: The number of tokens, including the five special tokens.
    """
    text = TextSource(paths, reading.format, reading.column)
    learn_tokenizer(text, out, size, options, processes=reading.processes)


def prepare_command(
    *paths: str,
    tokenizer: Path,
    out: Path,
    reading: Annotated[Reading, FLATTEN] = USUAL_READING,
    language: Language = "en",
    held_out: float = 0.01,
    shard_megabytes: int = 64,
) -> None:
    """Tokenize text into a token store.

    Args:
        paths: Files, folders, globs, or Hugging Face data sets as hf:NAME. Formats: plain
            text (a blank line ends a document), WikiExtractor, JSONL, CSV, TSV and Parquet, which
            may be compressed as .gz, .bz2, .xz or .zst.
        tokenizer: A folder made by `bertkit learn`, a model directory, a run, or a vocab.txt file.
        out: The store's folder. The same command resumes a stopped run.
        held_out: Share of documents kept for evaluation, chosen by a hash of their text.
        shard_megabytes: Text per shard, in units of 1,000,000 bytes.
    """
    prepare(
        TextSource(paths, reading.format, reading.column, language),
        tokenizer,
        out,
        held_out=held_out,
        shard_megabytes=shard_megabytes,
        processes=reading.processes,
    )
