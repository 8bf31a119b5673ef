"""Minimal pairs: two sentences that differ little, of which one is acceptable.

BLiMP (Warstadt et al. 2020, "The Benchmark of Linguistic Minimal Pairs") is a folder of 67 files of
JSON lines, each with 1,000 pairs of one phenomenon. Other files have the same columns, or are plain
text whose lines alternate: an acceptable sentence, then its unacceptable counterpart.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from bertkit.datasets.readers import row_texts
from bertkit.datasets.records import MissingColumnError, Records, as_source
from bertkit.datasets.tabular import first_left_out, numbered_rows
from bertkit.errors import BertkitError, check_known
from bertkit.text.lines import TextCounts, plain_lines, value_name
from bertkit.text.sources import Source, find_sources, uncompressed_name

GOOD, BAD = "sentence_good", "sentence_bad"
SET, FIELD = "UID", "field"
PAIR_SPLITS = ("all", "dev", "test")
BLIMP_DEV = (
    "adjunct_island",
    "anaphor_gender_agreement",
    "distractor_agreement_relative_clause",
    "drop_argument",
    "npi_present_2",
    "tough_vs_raising_1",
    "wh_questions_subject_gap_long_distance",
)
"""The tenth of BLiMP's sets on which recipes may be chosen: of each of the four fields, the tenth
whose names have the lowest SHA-256 (7 of 67 sets). A recipe that was chosen on them is reported by
its accuracy on the other sixty."""


class MinimalPair(NamedTuple):
    """An acceptable sentence and its unacceptable counterpart."""

    good: str
    bad: str
    set: str
    """The name of the set: the column "UID", or the name of the file."""
    field: str
    """The linguistic field of the set, such as "syntax"; "" if the file does not name it."""
    place: str
    """Where the pair is, as "file:line"."""


def read_minimal_pairs(
    data: Any, counts: TextCounts, *, good: str = GOOD, bad: str = BAD, split: str = "all"
) -> list[MinimalPair]:
    """Read the minimal pairs of files or of data in memory.

    Args:
        data: a file, a folder, a glob or `hf:NAME:CONFIG:SPLIT`, a DataFrame, a `datasets.Dataset`,
            or a list of dicts or of (good, bad) tuples.
        counts: collects the pairs left out, with reasons and first locations.
        good: the column of the acceptable sentence.
        bad: the column of the unacceptable sentence.
        split: "all"; "dev" for the sets of BLiMP in `BLIMP_DEV`; or "test" for its other sets.

    Raises:
        BertkitError: the split is unknown or needs BLiMP, there is no pair, a column is missing or
            named twice, lines of a text have no counterpart, or a file is damaged.
    """
    check_known("split", split, PAIR_SPLITS, code="split")
    if good == bad or not (good and bad):
        raise BertkitError(
            f"--good and --bad must name a column for each sentence, not '{good}' and '{bad}'",
            code="column",
        )
    source = as_source(data, "data")
    pairs = list(all_pairs(source, counts, good, bad))
    if not pairs:
        raise BertkitError(
            f"{source} has no minimal pair that can be used{first_left_out(counts)}",
            code="no-pairs",
        )
    if split == "all":
        return pairs
    dev = [pair for pair in pairs if pair.set in BLIMP_DEV]
    chosen = dev if split == "dev" else [pair for pair in pairs if pair.set not in BLIMP_DEV]
    if not (dev and chosen):
        raise BertkitError(
            f"{source} has no set of BLiMP's split {split}; only the whole BLiMP has dev and test",
            code="split",
        )
    return chosen


def all_pairs(
    source: str | Records, counts: TextCounts, good: str, bad: str
) -> Iterator[MinimalPair]:
    """Yield the pairs of every file of a source, or of records in memory."""
    if isinstance(source, Records):
        yield from row_pairs(source, source.name, "auto", counts, good, bad)
        return
    for file, title in titled_files(source):
        if file.format == "text":
            yield from line_pairs(file, title, counts)
        elif file.format == "unknown":
            counts.note("file of unknown type", file.path)
        else:
            yield from row_pairs(file.path, title, file.format, counts, good, bad)


def titled_files(source: str) -> list[tuple[Source, str]]:
    """Return files with the names of their sets: without endings and folders, as far as unique.

    A data set of the hub has its whole name.
    """
    files = find_sources([source])
    paths = [file.path for file in files]
    root = os.path.commonpath([Path(path).parent for path in paths])
    whole = [os.path.relpath(path, root) for path in paths]
    short = [str(uncompressed_name(path).with_suffix("")) for path in whole]
    for titles in ([Path(title).name for title in short], short, whole):
        known = [t for file, t in zip(files, titles, strict=True) if file.format != "unknown"]
        if len(set(known)) == len(known):
            break
    pairs = zip(files, titles, strict=True)
    return [(file, file.path if file.format == "huggingface" else title) for file, title in pairs]


def row_pairs(
    path: str | Records,
    title: str,
    format: str,  # noqa: A002
    counts: TextCounts,
    good: str,
    bad: str,
) -> Iterator[MinimalPair]:
    """Yield the pairs of a file with columns, or of records in memory."""
    rows = numbered_rows(path, counts, format, columns=(good, bad), whole=True)
    try:
        for _, place, row in rows:
            texts = row_texts(row, (good, bad), place, counts)
            if texts is not None:
                name = value_name(row.get(SET)) or title
                field = value_name(row.get(FIELD)).replace("/", "_")  # as one set of BLiMP has it
                yield MinimalPair(texts[0], texts[1], name, field, place)
    except MissingColumnError as error:
        where = title if isinstance(path, Records) else path
        flag = "--good" if error.column == good else "--bad"
        raise MissingColumnError(
            f"{where} has no column '{error.column}'; name the right one by {flag}", error.column
        ) from None


def line_pairs(file: Source, title: str, counts: TextCounts) -> Iterator[MinimalPair]:
    """Yield the pairs of a text whose lines alternate between acceptable and unacceptable.

    Raises:
        BertkitError: the number of lines is odd, or a line before the last sentence is blank.
    """
    counts.files += 1
    first, number = "", 0
    for number, line in trimmed(plain_lines(file, counts)):
        if not line.strip():
            raise BertkitError(
                f"{file.path}:{number}: the line is blank; lines must alternate between an "
                "acceptable sentence and an unacceptable one, with nothing in between",
                code="blank-line",
            )
        if number % 2:
            first = line
            continue
        place = f"{file.path}:{number - 1}"
        texts = row_texts({GOOD: first, BAD: line}, (GOOD, BAD), place, counts)
        if texts is not None:
            yield MinimalPair(texts[0], texts[1], title, "", place)
    if number % 2:
        raise BertkitError(
            f"{file.path}:{number}: the last line has no counterpart; lines must alternate between "
            "an acceptable sentence and an unacceptable one",
            code="odd-lines",
        )


def trimmed(lines: Iterator[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """Yield numbered lines without the blank ones at the end."""
    blank: list[tuple[int, str]] = []
    for numbered in lines:
        blank.append(numbered)
        if numbered[1].strip():
            yield from blank
            blank.clear()
