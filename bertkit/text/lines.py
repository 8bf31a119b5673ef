"""Read files as numbered lines of text, or as CSV or TSV rows, and count what could not be read.

CSV fields may be quoted as spreadsheets do; TSV has no quotes.
"""

from __future__ import annotations

import csv
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, BinaryIO, Self, TypeVar

from bertkit.errors import BertkitError, escape_line_breaks
from bertkit.text.sources import BYTE_ORDER_MARK, DAMAGE, HEAD_BYTES, Source, one_line, open_binary

LONE_SURROGATE = re.compile("[\ud800-\udfff]")
READ_BYTES = 1 << 20
MAX_TEXT_SIZE = 1 << 28
"""The maximum bytes of a line, or characters of a document or CSV row. Each is held in memory
whole, and a small compressed file can hold an arbitrarily long one."""
ENDED_LINE = re.compile(rb"[^\r\n]*(?:\r\n|\r|\n)")
NUL_SHARE = 0.01
UNDECODABLE_SHARE = 0.10
UNDECODABLE = 20
"""If this many of the first characters are undecodable, and more than there are valid ones beyond
ASCII, the file has another encoding and is not merely damaged."""

OTHER_FORMATS = {
    b"\x1f\x8b": "compressed by gzip: its name should end in .gz",
    b"BZh": "compressed by bzip2: its name should end in .bz2",
    b"\xfd7zXZ": "compressed by xz: its name should end in .xz",
    b"(\xb5/\xfd": "compressed by zstd: its name should end in .zst",
    b"PAR1": "a Parquet file: its name should end in .parquet",
    b"PK": "an archive or a spreadsheet: unpack it, or save it as CSV",
    b"%PDF": "a PDF: extract its text",
}
"""First bytes of a file that is not text -> what it is, and what to do."""

BlockItem = TypeVar("BlockItem")
NumberedRow = tuple[int, str]
"""The number, from 1, of a line, or of the line or row where a document starts; and its text."""


@dataclass
class TextCounts:
    """Counts of what was read and what was not; counts of several readers are added with `+=`."""

    files: int = 0
    documents: int = 0
    bytes: int = 0
    """The size of the text that was yielded, in bytes of UTF-8."""
    skipped: Counter[str] = field(default_factory=Counter)
    """Reason -> number of occurrences; a reason ending in "kept" lost no text."""
    examples: dict[str, str] = field(default_factory=dict)
    """Reason -> the location of the first occurrence, `file:line`."""

    def note(self, reason: str, place: str) -> None:
        """Count one thing that was left out or changed; `place` is its location."""
        self.skipped[reason] += 1
        self.examples.setdefault(reason, place)

    def __iadd__(self, other: TextCounts) -> Self:
        self.files += other.files
        self.documents += other.documents
        self.bytes += other.bytes
        self.skipped.update(other.skipped)
        self.examples = {**other.examples, **self.examples}
        return self

    def as_dict(self) -> dict[str, Any]:
        """Return the counts as plain JSON values, for the manifest."""
        return {
            **vars(self),
            "skipped": dict(sorted(self.skipped.items())),
            "examples": dict(sorted(self.examples.items())),
        }


def text_lines(source: Source, counts: TextCounts, *, ends: bool = False) -> Iterator[NumberedRow]:
    r"""Yield the number and text of every line; "\r\n" and "\r" end a line as "\n" does.

    Blocks of whole lines are decoded at once; a block with invalid bytes, which are counted, is
    decoded line by line. With `ends`, lines keep their line ends as in the file, and a line without
    one gets "\n".
    """
    number = 1
    with open_binary(source.path) as stream:
        for block in line_blocks(stream, source.path, ends=ends):
            cut = ENDED_LINE.findall(block + b"\n") if ends else None
            try:
                lines = block.decode().split("\n") if cut is None else [*map(bytes.decode, cut)]
            except UnicodeDecodeError:
                lines = [
                    decode_line(line, f"{source.path}:{place}", counts)
                    for place, line in enumerate(cut or block.split(b"\n"), number)
                ]
            yield from enumerate(lines, number)
            number += len(lines)


def plain_lines(source: Source, counts: TextCounts) -> Iterator[NumberedRow]:
    """Yield the lines of a file as `text_lines` does, with read errors as `BertkitError`s."""
    number = 0
    try:
        for number, line in text_lines(source, counts):
            yield number, line
    except DAMAGE as error:
        raise BertkitError(
            f"{source.path} cannot be read after line {number} ({one_line(error)}); restore it"
        ) from error


def line_blocks(stream: BinaryIO, path: str, *, ends: bool = False) -> Iterator[bytes]:
    """Yield blocks of whole lines without the last line end; a long line makes a long block.

    Line ends become Unix line ends unless `ends` is true.
    """
    unix = bytes if ends else unix_lines
    pending: list[bytes] = []  # joined once, so that a line of any length costs linear time
    number, size = 1, 0
    block = stream.read(READ_BYTES)
    check_encoding(block[:HEAD_BYTES], path)
    block = block.removeprefix(BYTE_ORDER_MARK)
    while block:
        lines, newline, rest = block.rpartition(b"\n")
        if newline:
            yield unix(b"".join([*pending, lines]))
            pending.clear()
            number, size = number + lines.count(b"\n") + 1, 0
        pending.append(rest)
        size += len(rest)
        check_size(size, path, number, "no line end")
        block = stream.read(READ_BYTES)
    if last := b"".join(pending):
        yield unix(last)


def check_size(size: int, path: str, number: int, missing: str) -> None:
    """Refuse a line, document or row that is too long, before it fills the memory."""
    if size > MAX_TEXT_SIZE:
        raise BertkitError(
            f"{path}:{number}: {missing} in {MAX_TEXT_SIZE:,} characters, the most that are read "
            "at once; fix the file or leave it out"
        )


def unix_lines(block: bytes) -> bytes:
    """Return a block with Windows and old Macintosh line ends replaced by Unix ones."""
    if b"\r" not in block:
        return block
    return block.removesuffix(b"\r").replace(b"\r\n", b"\n").replace(b"\r", b"\n")


def decode_line(line: bytes, place: str, counts: TextCounts) -> str:
    """Decode a line, with U+FFFD in place of every invalid byte."""
    try:
        return line.decode()
    except UnicodeDecodeError:
        counts.note("invalid UTF-8 replaced, kept", place)
        return line.decode(errors="replace")


def check_encoding(head: bytes, path: str) -> None:
    """Refuse a file whose first bytes are in another encoding or not text at all.

    A few stray NUL or invalid bytes are accepted: they are passed on or replaced.
    """
    text = head.decode(errors="replace")
    undecodable = text.count("\ufffd") - head.count("\ufffd".encode())
    valid = len(text) - len(text.encode("ascii", errors="ignore")) - undecodable
    encoding = "CP1252"  # Latin-1 with the additions of Windows
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        problem, encoding = "it begins with a UTF-16 byte order mark", "UTF-16"
    elif head.count(0) > max(1, NUL_SHARE * len(head)):
        problem = f"{head.count(0) / len(head):.0%} of its first bytes are NUL, as in UTF-16"
        encoding = "UTF-16"
    elif undecodable > UNDECODABLE_SHARE * len(text):
        problem = f"{undecodable / len(text):.0%} of its first characters cannot be decoded"
    elif undecodable >= UNDECODABLE and undecodable > valid:
        problem = f"{undecodable:,} of its first letters cannot be decoded, and only {valid:,} can"
    else:
        return
    known = [what for start, what in OTHER_FORMATS.items() if head.startswith(start)]
    advice = f"iconv -f {encoding} -t UTF-8 (or -f the encoding that it has)"
    raise BertkitError(
        f"{path} is not text, but {known[0]}"
        if known
        else f"{path} is not UTF-8 text ({problem}); if it is text, convert it: {advice}"
    )


def describe_skipped(skipped: Mapping[str, int], examples: Mapping[str, str]) -> list[str]:
    """Return one line per reason: what was left out or changed, how often, and where first."""
    return [
        escape_line_breaks(
            f"counted: {reason}: {count:,}"
            + (f" (first: {examples[reason]})" if reason in examples else "")
        )
        for reason, count in sorted(skipped.items())
    ]


def cut_blocks(
    items: Iterable[BlockItem], size: int, of: Callable[[Any], int] = len
) -> Iterator[list[BlockItem]]:
    """Yield items, such as texts, in lists that each end once their sizes add up to `size`."""
    block: list[BlockItem] = []
    there = 0
    for item in items:
        block.append(item)
        there += of(item)
        if there >= size:
            yield block
            block, there = [], 0
    if block:
        yield block


def valid_text(text: str, place: str, counts: TextCounts) -> str:
    """Return text that UTF-8 can encode: lone surrogates, which JSON can spell, are replaced."""
    if text.isascii() or not LONE_SURROGATE.search(text):
        return text
    counts.note("lone surrogate replaced, kept", place)
    return LONE_SURROGATE.sub("\ufffd", text)


def value_name(value: object) -> str:
    """Return a field as a name: True and False as pandas writes them to CSV, "" for null or NaN."""
    if isinstance(value, str):
        return LONE_SURROGATE.sub("\ufffd", value.strip())
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))  # integer columns with missing values are read as floats
    return str(value)


class RaggedRows:
    """Counts the rows of a table whose number of fields is not that of its header."""

    def __init__(self, path: str, fields: int, counts: TextCounts) -> None:
        self.path, self.fields, self.counts = path, fields, counts
        self.found = 0
        self.first = ""

    def note(self, line: int, fields: int) -> None:
        """Count a row that is left out."""
        place = f"{self.path}:{line}"
        more = "more" if fields > self.fields else "fewer"
        self.counts.note(f"row with {more} fields than the first line", place)
        self.found += 1
        self.first = self.first or f"{place}: row with {fields} fields instead of {self.fields}"

    def check(self, total: int) -> None:
        """Refuse the table if they are more than half of its rows."""
        if 2 * self.found > total:
            raise BertkitError(
                f"{self.first}; {self.found} of {total} rows are ragged; check the separator, the "
                "quotes and whether the first line names the columns"
            )


MAX_FIELD = (1 << 31) - 1
DIVIDERS = {";": "semicolons", "\t": "tabs"}
SEPARATOR = re.compile("sep=(.)")
"""The first line of some CSV files, which tells Excel the delimiter."""
BLANK_LINE = "blank line in a file of one column"
QUOTED_TSV = "field of TSV quoted as in CSV (the format csv reads its quotes), kept"


def split_rows(
    source: Source, counts: TextCounts, columns: Sequence[str] | None, *, ends: bool = False
) -> Iterator[tuple[int, list[str]]]:
    """Yield the first line number and the fields of every row that is not blank.

    Args:
        source: a CSV or TSV file.
        counts: the counts to which are added invalid UTF-8, TSV fields quoted as in CSV (as pandas
            writes them), and a CSV delimiter other than the comma.
        columns: the names that the header must contain; None if the first line is not a header.
        ends: whether line ends inside a quoted field stay as in the file, so that offsets match the
            user's text; otherwise they become Unix line ends.
    """
    blank, first, yielded, one_column = 0, 0, 0, False
    for number, fields in every_row(source, counts, columns, ends=ends):
        if not fields:
            blank, first = blank + 1, first or number
            continue
        if yielded == 1 and blank == 1:  # each line ends twice, as csv of Python does it on Windows
            one_column = False
        if blank and one_column:  # each may be an empty field
            counts.note(BLANK_LINE, f"{source.path}:{first}")
            counts.skipped[BLANK_LINE] += blank - 1
        if not yielded:
            one_column = len(fields) == 1
        blank, first, yielded = 0, 0, yielded + 1
        yield number, fields


def every_row(
    source: Source, counts: TextCounts, columns: Sequence[str] | None, *, ends: bool
) -> Iterator[tuple[int, list[str]]]:
    """Yield the first line number and the fields of every row, [] for a blank one."""
    if source.format == "tsv":
        for number, line in text_lines(source, counts):
            if '""' in line and any(is_quoted(field) for field in line.split("\t")):
                counts.note(QUOTED_TSV, f"{source.path}:{number}")
            yield number, line.split("\t") if line else []
        return
    csv.field_size_limit(MAX_FIELD)
    divider, before, lines = detect_divider(
        source, text_lines(source, counts, ends=ends), counts, columns
    )
    start, size = before + 1, 0

    def texts() -> Iterator[str]:
        nonlocal size
        for _, line in lines:
            size += len(line)
            check_size(size, source.path, start, "no end of the row that begins here")
            yield line if ends else f"{line}\n"

    # strict: an unclosed quote would otherwise swallow the rest of the file
    reader = csv.reader(texts(), delimiter=divider, strict=True)
    try:
        for fields in reader:
            yield start, fields
            start, size = before + reader.line_num + 1, 0
    except csv.Error as error:
        raise BertkitError(
            f"{source.path}:{start}: bad quotes in the row that begins here ({error}); double "
            f"quotes inside a quoted field, or give the format tsv"
        ) from error


def is_quoted(field: str) -> bool:
    """Return whether a field is quoted and has doubled quotes inside, as no prose does."""
    inside = field[1:-1]
    return field[:1] == field[-1:] == '"' and '""' in inside and '"' not in inside.replace('""', "")


def detect_divider(
    source: Source,
    lines: Iterator[tuple[int, str]],
    counts: TextCounts,
    columns: Sequence[str] | None,
) -> tuple[str, int, Iterator[tuple[int, str]]]:
    """Return the delimiter of a CSV, the number of lines before its header, and the other lines."""
    divider, before = ",", 0
    for number, line in lines:
        header = line.rstrip("\r\n")
        if not (header if columns is None else header.strip(" \t")):
            continue
        if number == 1 and (said := SEPARATOR.fullmatch(header)):
            divider, before = said[1], number
        else:
            divider = field_divider(header, columns) if columns is not None else ","
            before, lines = number - 1, chain([(number, line)], lines)
        if divider != ",":
            name = DIVIDERS.get(divider, repr(divider))
            counts.note(f"CSV divided by {name}, kept", source.path)
        break
    return divider, before, lines


def field_divider(header: str, columns: Sequence[str]) -> str:
    """Return "," unless it leaves the header one unknown name and another delimiter splits it."""
    names = {}
    for divider in (",", *DIVIDERS):
        split = next(csv.reader([header], delimiter=divider), [])
        names[divider] = [name.strip() for name in split]
    if len(names[","]) != 1 or names[","] == [*columns]:
        return ","
    others = [divider for divider in DIVIDERS if len(names[divider]) > 1]
    known = [divider for divider in others if set(columns).intersection(names[divider])]
    return next(iter(known or others), ",")
