"""CSV and TSV as fields: CSV is quoted as spreadsheets do, TSV has no quotes.

Spreadsheets of languages that write numbers with a comma put semicolons between the fields of CSV.
Such a file is recognised by its header, or it would be one column.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from itertools import chain, islice

from bertkit.errors import BertkitError
from bertkit.text.documents import LONGEST_FIELD
from bertkit.text.lines import TextCounts, text_lines
from bertkit.text.sources import Source

DIVIDERS = {";": "semicolons", "\t": "tabs"}


def split_rows(
    source: Source, counts: TextCounts, columns: Sequence[str] | None
) -> Iterator[tuple[int, list[str]]]:
    """First line and fields of every row that is not blank.

    Args:
        source: a CSV or TSV.
        counts: is told of invalid UTF-8, and where commas do not divide a CSV.
        columns: what the header must name; None where the first line is no header.

    Raises:
        BertkitError: a quote is never closed, or closed in the middle of a field.
    """
    lines = text_lines(source, counts)
    if source.format == "tsv":
        yield from ((number, line.split("\t")) for number, line in lines if line)
        return
    csv.field_size_limit(LONGEST_FIELD)
    first = list(islice(lines, 1))
    divider = divider_of(first[0][1], columns) if first and columns is not None else ","
    if divider != ",":
        counts.note(f"CSV divided by {DIVIDERS[divider]}, kept", source.path)
    # strict: an unclosed quote would otherwise swallow the rest of the file
    texts = (f"{line}\n" for _, line in chain(first, lines))
    reader = csv.reader(texts, delimiter=divider, strict=True)
    start = 1
    try:
        for fields in reader:
            if fields:
                yield start, fields
            start = reader.line_num + 1
    except csv.Error as error:
        raise BertkitError(
            f"{source.path}:{start}: bad quotes in the row that begins here ({error}); double "
            f"quotes inside a quoted field, or give the format tsv"
        ) from error


def divider_of(header: str, columns: Sequence[str]) -> str:
    """What divides the fields of a CSV: a comma, unless the header would be one unasked name."""
    for divider in (",", *DIVIDERS):
        names = next(csv.reader([header], delimiter=divider), [])
        if len(names) > 1 or [name.strip() for name in names] == [*columns]:
            return divider
    return ","
