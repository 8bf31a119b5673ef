"""`bertkit clean`: drop duplicates and poor documents from text."""

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

DEFAULTS = CleanOptions()


def clean_command(
    *paths: Annotated[str, TEXT],
    out: Annotated[Path, REPLACED],
    processes: int = 0,
    json: Annotated[Path | None, FILE] = None,
    options: Annotated[CleanOptions, FLATTEN] = DEFAULTS,
) -> None:
    """Drop duplicates and, if wanted, poor documents from text; every one is counted.

    Parameters
    ----------
    paths
        Files, folders, globs, URLs, or Hugging Face data sets, as for `bertkit prepare`.
    out
        A file NAME.jsonl, NAME.jsonl.gz or NAME.jsonl.zst; or, by a name without a dot, a folder of
        files that `bertkit prepare` can deal to many tasks.
    processes
        Worker processes; 0 takes one for each core. The text is the same for any number.
    json
        A file for the counts.
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
    """What was kept and what was not, in sentences."""
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
