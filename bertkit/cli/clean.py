"""The `bertkit clean` command: drop duplicates and low-quality documents from text."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from bertkit.config import FLATTEN
from bertkit.corpus.clean import Cleaned, CleanOptions
from bertkit.corpus.clean import clean as clean_text
from bertkit.errors import BertkitError
from bertkit.files import write_json
from bertkit.outputs import FILE, REPLACED, TEXT
from bertkit.text.documents import TextCounts
from bertkit.text.lines import describe_skipped
from bertkit.training.journal import Console

CLEAN_DEFAULTS = CleanOptions()


def clean_command(
    *paths: Annotated[str, TEXT],
    out: Annotated[Path, REPLACED],
    processes: int = 0,
    json: Annotated[Path | None, FILE] = None,
    options: Annotated[CleanOptions, FLATTEN] = CLEAN_DEFAULTS,
) -> None:
    """Drop duplicates and, optionally, low-quality documents from text, and count what is dropped.

    Parameters
    ----------
    paths
        Files, folders, globs, URLs, or Hugging Face data sets, as for `bertkit prepare`.
    out
        The file to write, NAME.jsonl, NAME.jsonl.gz or NAME.jsonl.zst; a name without a dot makes a
        folder of files, which `bertkit prepare` can distribute over many tasks.
    processes
        The number of worker processes; 0 means one per core. It does not affect the result.
    json
        A JSON file to write the counts to.
    """
    if processes < 0:
        raise BertkitError(f"--processes must be 0 or more, got {processes}")
    with Console() as console:

        def show(counts: TextCounts) -> None:
            console.update({"done": counts.documents, "bytes": counts.bytes})

        console.start(None, title="cleaning", unit="documents")
        processes = processes or os.cpu_count() or 1
        cleaned = clean_text(list(paths), out, options, processes=processes, progress=show)
        console.close()
        for line in describe_clean(cleaned, out):
            console.say(line)
    if json is not None:
        write_json(json, {"read": cleaned.read.as_dict(), "kept": cleaned.kept.as_dict()})


def describe_clean(cleaned: Cleaned, out: Path) -> list[str]:
    """Return lines that say what was kept, dropped and skipped."""
    read, kept = cleaned.read, cleaned.kept
    dropped = [
        line.replace("counted", "dropped", 1)
        for line in describe_skipped(kept.skipped, kept.examples)
    ]
    return [
        f"{out}: {kept.documents:,} of {read.documents:,} documents kept, "
        f"{kept.bytes / max(1, read.bytes):.1%} of the text",
        *dropped,
        *describe_skipped(read.skipped, read.examples),
    ]
