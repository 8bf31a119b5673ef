"""Files to numbered lines of text, and the account of what was lost on the way."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Self

from bertkit.errors import BertkitError
from bertkit.text.sources import BYTE_ORDER_MARK, DAMAGE, HEAD_BYTES, Source, one_line, open_binary

BLOCK_BYTES = 1 << 20
ENDED_LINE = re.compile(rb"[^\r\n]*(?:\r\n|\r|\n)")
NUL_SHARE = 0.01
UNDECODABLE_SHARE = 0.10
UNDECODABLE = 20
"""So many of the first characters, and more than there are valid ones beyond ASCII, are letters of
another encoding and no damage."""

Row = tuple[int, str]
"""The number of a line, or of the line or row where a document begins, from 1; and its text."""


@dataclass
class TextCounts:
    """What was read and what was not; counts of several readers add up with `+=`."""

    files: int = 0
    documents: int = 0
    bytes: int = 0
    """Bytes of the text passed on, as UTF-8."""
    skipped: Counter[str] = field(default_factory=Counter)
    """Reason -> how often; a reason ending in "kept" lost no text."""
    examples: dict[str, str] = field(default_factory=dict)
    """Reason -> the first place, `file:line`."""

    def note(self, reason: str, place: str) -> None:
        """Count one thing that was left out or changed."""
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
        """Plain JSON values, for the manifest."""
        return {
            "files": self.files,
            "documents": self.documents,
            "bytes": self.bytes,
            "skipped": dict(sorted(self.skipped.items())),
            "examples": dict(sorted(self.examples.items())),
        }


def text_lines(source: Source, counts: TextCounts, *, ends: bool = False) -> Iterator[Row]:
    r"""Number and text of every line; "\r\n" and "\r" end a line as "\n" does.

    Decoding goes by blocks of whole lines; only a block with invalid bytes is decoded by lines.

    Args:
        source: the file.
        counts: is told of invalid bytes.
        ends: whether lines keep their ends, as they are in the file; one without gets "\n".
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


def plain_lines(source: Source, counts: TextCounts) -> Iterator[Row]:
    """The same, of a file that has nothing but lines, so that its damage is found here.

    Raises:
        BertkitError: it is missing, truncated or corrupt; says after which line.
    """
    number = 0
    try:
        for number, line in text_lines(source, counts):
            yield number, line
    except DAMAGE as error:
        raise BertkitError(
            f"{source.path} cannot be read after line {number} ({one_line(error)}); restore it"
        ) from error


def line_blocks(stream: BinaryIO, path: str, *, ends: bool = False) -> Iterator[bytes]:
    """Blocks of whole lines without the last line end; a block is as long as its longest line.

    Line ends become Unix ones but with `ends`.
    """
    unix = bytes if ends else unix_lines
    pending: list[bytes] = []  # joined once, so that a line of any length costs linear time
    block = stream.read(BLOCK_BYTES)
    check_encoding(block[:HEAD_BYTES], path)
    block = block.removeprefix(BYTE_ORDER_MARK)
    while block:
        lines, newline, rest = block.rpartition(b"\n")
        if newline:
            yield unix(b"".join([*pending, lines]))
            pending.clear()
        pending.append(rest)
        block = stream.read(BLOCK_BYTES)
    if last := b"".join(pending):
        yield unix(last)


def unix_lines(block: bytes) -> bytes:
    """Windows and old Macintosh line ends as Unix ones."""
    if b"\r" not in block:
        return block
    return block.removesuffix(b"\r").replace(b"\r\n", b"\n").replace(b"\r", b"\n")


def decode_line(line: bytes, place: str, counts: TextCounts) -> str:
    """A line with U+FFFD for every invalid byte."""
    try:
        return line.decode()
    except UnicodeDecodeError:
        counts.note("invalid UTF-8 replaced, kept", place)
        return line.decode(errors="replace")


def check_encoding(head: bytes, path: str) -> None:
    """Refuse a file whose first bytes are another encoding or no text at all.

    A stray NUL or invalid byte is no reason: it is passed on or replaced.
    """
    text = head.decode(errors="replace")
    undecodable = text.count("\ufffd") - head.count("\ufffd".encode())
    valid = len(text) - len(text.encode("ascii", errors="ignore")) - undecodable
    encoding = "UTF-16"
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        problem = "it begins with a UTF-16 byte order mark"
    elif head.count(0) > NUL_SHARE * len(head):
        problem = f"{head.count(0) / len(head):.0%} of its first bytes are NUL, as in UTF-16"
    elif undecodable > UNDECODABLE_SHARE * len(text):
        problem = f"{undecodable / len(text):.0%} of its first characters cannot be decoded"
    elif undecodable >= UNDECODABLE and undecodable > valid:
        problem = f"{undecodable:,} of its first letters cannot be decoded, and only {valid:,} can"
        encoding = "CP1252"
    else:
        return
    raise BertkitError(
        f"{path} is not UTF-8 text ({problem}); if it is text, convert it: "
        f"iconv -f {encoding} -t UTF-8 (or -f the encoding that it has)"
    )


def describe_skipped(skipped: Mapping[str, int], examples: Mapping[str, str]) -> list[str]:
    """What was left out or changed, how often, and where first."""
    return [
        f"counted: {reason}: {count:,}"
        + (f" (first: {examples[reason]})" if reason in examples else "")
        for reason, count in sorted(skipped.items())
    ]


def cut_blocks(texts: Iterable[str], characters: int) -> Iterator[list[str]]:
    """Texts in lists of about so many characters, to be worked on at once."""
    block: list[str] = []
    there = 0
    for text in texts:
        block.append(text)
        there += len(text)
        if there >= characters:
            yield block
            block, there = [], 0
    if block:
        yield block
