"""CSV and TSV as fields: CSV is quoted as spreadsheets do, TSV has no quotes.

Spreadsheets of languages that write numbers with a comma put semicolons between the fields of CSV.
Such a file is recognised by its header, or it would be one column.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Sequence
from itertools import chain

from bertkit.errors import BertkitError
from bertkit.text.lines import TextCounts, text_lines
from bertkit.text.sources import Source

LONGEST_FIELD = (1 << 31) - 1
DIVIDERS = {";": "semicolons", "\t": "tabs"}
SEPARATOR = re.compile("sep=(.)")
"""The first line of some CSV: it tells Excel what divides the fields."""
QUOTED_TSV = "field of TSV quoted as in CSV (the format csv reads its quotes), kept"


def split_rows(
    source: Source, counts: TextCounts, columns: Sequence[str] | None, *, ends: bool = False
) -> Iterator[tuple[int, list[str]]]:
    """First line and fields of every row that is not blank.

    Args:
        source: a CSV or TSV.
        counts: is told of invalid UTF-8, of TSV written with the quotes of CSV, as pandas does, and
            where commas do not divide a CSV.
        columns: what the header must name; None where the first line is no header.
        ends: whether lines within a quoted field end as in the file, so that offsets are those of
            the user's text; else all end as on Unix.

    Raises:
        BertkitError: a quote is never closed, or closed in the middle of a field.
    """
    if source.format == "tsv":
        lines = text_lines(source, counts)
        for number, line in lines:
            if '""' in line and any(is_quoted(field) for field in line.split("\t")):
                counts.note(QUOTED_TSV, f"{source.path}:{number}")
            if line:
                yield number, line.split("\t")
        return
    csv.field_size_limit(LONGEST_FIELD)
    divider, before, lines = divided(source, text_lines(source, counts, ends=ends), counts, columns)
    # strict: an unclosed quote would otherwise swallow the rest of the file
    texts = (line if ends else f"{line}\n" for _, line in lines)
    reader = csv.reader(texts, delimiter=divider, strict=True)
    start = before + 1
    try:
        for fields in reader:
            if fields:
                yield start, fields
            start = before + reader.line_num + 1
    except csv.Error as error:
        raise BertkitError(
            f"{source.path}:{start}: bad quotes in the row that begins here ({error}); double "
            f"quotes inside a quoted field, or give the format tsv"
        ) from error


def is_quoted(field: str) -> bool:
    """Whether a field stands in quotes and has quotes inside, all doubled: no prose looks so."""
    inside = field[1:-1]
    return field[:1] == field[-1:] == '"' and '""' in inside and '"' not in inside.replace('""', "")


def divided(
    source: Source,
    lines: Iterator[tuple[int, str]],
    counts: TextCounts,
    columns: Sequence[str] | None,
) -> tuple[str, int, Iterator[tuple[int, str]]]:
    """What divides the fields of a CSV, how many lines come before its header, and the others.

    Args:
        source: the file.
        lines: its lines.
        counts: is told where commas do not divide it.
        columns: what the header must name; None where there is none.
    """
    if columns is None:
        return ",", 0, lines
    for number, line in lines:
        header = line.rstrip("\r\n")
        if not header.strip(" \t"):
            continue
        if number == 1 and (said := SEPARATOR.fullmatch(header)):
            return said[1], number, lines
        divider = divider_of(header, columns)
        if divider != ",":
            counts.note(f"CSV divided by {DIVIDERS[divider]}, kept", source.path)
        return divider, number - 1, chain([(number, line)], lines)
    return ",", 0, lines


def divider_of(header: str, columns: Sequence[str]) -> str:
    """A comma, unless the header is then one name that none asked for, and else divided."""
    names = {divider: names_of(header, divider) for divider in (",", *DIVIDERS)}
    if len(names[","]) != 1 or names[","] == [*columns]:
        return ","
    others = [divider for divider in DIVIDERS if len(names[divider]) > 1]
    known = [divider for divider in others if set(columns).intersection(names[divider])]
    return next(iter(known or others), ",")


def names_of(header: str, divider: str) -> list[str]:
    """The names in a header."""
    return [name.strip() for name in next(csv.reader([header], delimiter=divider), [])]
