"""The `bertkit clean` command: drop duplicates and low-quality documents from text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from bertkit.cli.options import FLATTEN, Column, Format
from bertkit.corpus.clean import CLEAN_DEFAULTS, CleanOptions
from bertkit.corpus.clean import clean as clean_text
from bertkit.files import check_output, write_json
from bertkit.text.sources import TextSource


def clean_command(
    *paths: str,
    out: Path,
    options: Annotated[CleanOptions, FLATTEN] = CLEAN_DEFAULTS,
    format: Format = "auto",  # noqa: A002 - the flag's natural name
    column: Column = "text",
    processes: int = 0,
    json: Path | None = None,
) -> None:
    """Drop duplicates and, optionally, low-quality documents from text, and count what is dropped.

    Parameters
    ----------
    paths
        Files, folders, globs, URLs, or Hugging Face data sets, as for `bertkit prepare`.
    out
        The file to write: NAME.jsonl, NAME.jsonl.gz or NAME.jsonl.zst.
    processes
        The number of worker processes; 0 means one per core. It does not affect the result.
    json
        A JSON file to write the counts to.
    """
    json = json and check_output(json, paths)
    text = TextSource(paths, format, column)
    cleaned = clean_text(text, out, options, processes=processes)
    if json is not None:
        write_json(json, {"read": cleaned.read.to_dict(), "kept": cleaned.kept.to_dict()})
