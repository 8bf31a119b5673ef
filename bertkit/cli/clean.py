"""The `bertkit clean` command: drop duplicates and low-quality documents from text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from bertkit.config import FLATTEN
from bertkit.corpus.clean import CleanOptions
from bertkit.corpus.clean import clean as clean_text
from bertkit.files import check_output, write_json

CLEAN_DEFAULTS = CleanOptions()


def clean_command(
    *paths: str,
    out: Path,
    processes: int = 0,
    json: Path | None = None,
    options: Annotated[CleanOptions, FLATTEN] = CLEAN_DEFAULTS,
) -> None:
    """Drop duplicates and, optionally, low-quality documents from text, and count what is dropped.

    Parameters
    ----------
    paths
        Files, folders, globs, URLs, or Hugging Face data sets, as for `bertkit prepare`.
    out
        The file to write, NAME.jsonl, NAME.jsonl.gz or NAME.jsonl.zst; a name without a dot makes a
        folder of files, which `bertkit prepare` can divide among processes.
    processes
        The number of worker processes; 0 means one per core. It does not affect the result.
    json
        A JSON file to write the counts to.
    """
    json = json and check_output(json, paths)
    cleaned = clean_text(list(paths), out, options, processes=processes)
    if json is not None:
        write_json(json, {"read": cleaned.read.as_dict(), "kept": cleaned.kept.as_dict()})
