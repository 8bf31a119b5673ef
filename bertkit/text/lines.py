"""Read files as numbered lines of text or rows of CSV, and count what could not be read."""

from __future__ import annotations

import csv
import io
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

from bertkit.errors import BertkitError, escape_line_breaks
from bertkit.text.sources import DAMAGE, HEAD_BYTES, Source, one_line, open_binary

LONE_SURROGATE = re.compile("[\ud800-\udfff]")
READ_BYTES = 1 << 20
REPLACED = "U+FFFD, which invalid UTF-8 becomes, kept"
MAX_INVALID = 1e-3
"""The share of invalid characters above which a file has another encoding and is not damaged."""

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

    def note(self, reason: str, location: str) -> None:
        """Count something that was left out or changed."""
        self.skipped[reason] += 1
        self.examples.setdefault(reason, location)

    def __iadd__(self, other: TextCounts) -> Self:
        self.files += other.files
        self.documents += other.documents
        self.bytes += other.bytes
        self.skipped.update(other.skipped)
        self.examples = {**other.examples, **self.examples}
        return self

    def to_dict(self) -> dict[str, Any]:
        """Return the counts as plain JSON values."""
        skipped, examples = dict(sorted(self.skipped.items())), dict(sorted(self.examples.items()))
        return {**vars(self), "skipped": skipped, "examples": examples}


@contextmanager
def open_text(
    source: Source, counts: TextCounts, newline: str | None = None
) -> Iterator[Iterator[str]]:
    """Yield the lines of a file: UTF-8, or UTF-16 that begins with its byte order mark.

    Invalid bytes become U+FFFD and are counted. `newline` is that of `open`.

    Raises:
        BertkitError: the file is in another encoding.
    """
    with open_binary(source.path) as stream:
        buffered = io.BufferedReader(stream, READ_BYTES)  # type: ignore[type-var]
        encoding = check_encoding(buffered, source.path)
        text = io.TextIOWrapper(buffered, encoding, errors="replace", newline=newline)

        def lines() -> Iterator[str]:
            for number, line in enumerate(text, 1):
                if "\ufffd" in line:
                    counts.note(REPLACED, f"{source.path}:{number}")
                yield line

        yield lines()


def check_encoding(stream: io.BufferedReader[Any], path: str) -> str:
    """Return the encoding of a file, or refuse one that is clearly not UTF-8 from its beginning."""
    head = stream.peek(HEAD_BYTES)[:HEAD_BYTES]
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "utf-16"
    text = head.decode(errors="replace")
    invalid = text.count("\ufffd") - head.count("\ufffd".encode())
    valid = sum(not letter.isascii() for letter in text) - invalid
    other = invalid > valid and invalid > MAX_INVALID * len(text)
    if other or head.count(0) > 1 + len(head) // 100:  # or UTF-16 without a mark
        raise BertkitError(
            f"{path} is not UTF-8 text; if it is text, convert it: iconv -f ENCODING -t UTF-8 "
            "(the encoding is often CP1252 or UTF-16); if it is compressed, its name must say so",
            code="encoding",
        )
    return "utf-8-sig"


def text_lines(source: Source, counts: TextCounts) -> Iterator[NumberedRow]:
    r"""Yield the number and text of every line; "\r\n" and "\r" end a line as "\n" does."""
    with open_text(source, counts) as lines:
        for number, line in enumerate(lines, 1):
            yield number, line.removesuffix("\n")


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


def split_rows(source: Source, counts: TextCounts) -> Iterator[tuple[int, list[str]]]:
    """Yield the first line number and the fields of every row of CSV or TSV that is not blank.

    CSV fields may be quoted as spreadsheets do; TSV has no quotes.
    """
    csv.field_size_limit((1 << 31) - 1)
    start = 1
    with open_text(source, counts, newline="") as lines:
        if source.format == "tsv":
            reader = csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)
        else:  # strict: an unclosed quote would otherwise swallow the rest of the file
            reader = csv.reader(lines, strict=True)
        try:
            for fields in reader:
                if fields:
                    yield start, fields
                start = reader.line_num + 1
        except csv.Error as error:
            raise BertkitError(
                f"{source.path}:{start}: bad quotes in the row that begins here ({error}); double "
                "quotes inside a quoted field, or name the format tsv"
            ) from error


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
    filled = 0
    for item in items:
        block.append(item)
        filled += of(item)
        if filled >= size:
            yield block
            block, filled = [], 0
    if block:
        yield block


def valid_text(text: str, location: str, counts: TextCounts) -> str:
    """Return text that UTF-8 can encode: lone surrogates, which JSON can spell, are replaced."""
    if text.isascii() or not LONE_SURROGATE.search(text):
        return text
    counts.note("lone surrogate replaced, kept", location)
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
