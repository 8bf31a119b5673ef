"""Convert raw text to documents (BERT section 3.1: the corpus must keep documents whole).

A document is a block between blank lines (the input format of the BERT release), a `<doc>` of
WikiExtractor, or a row of JSON lines, CSV, TSV, Parquet or a Hugging Face data set. Files are
streamed: memory grows with the longest document. Every change and omission is counted.
"""

from __future__ import annotations

import csv
import importlib
import io
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any, Self, TypeVar

from bertkit.errors import BertkitError, escape_line_breaks, nearest
from bertkit.text.sources import DAMAGE, HEAD_BYTES, Source, one_line, open_binary

PARQUET_ROWS = 1024
READ_BYTES = 1 << 20
DOC_TAG = re.compile(r"""\s*<doc (?:(?:[^>"']|"[^"]*"|'[^']*')*|.*?["'])>""")
"""The second alternative is for titles with a single quote or inch mark."""
BETWEEN_DOCS = re.compile(r"(?<=</doc>)\s*(?=<doc )")
ONE_VALUE = re.compile(r'\s*(\[.*|\{(\s*"data"\s*:\s*\[?)?)\s*')
"""The first line of a JSON file that may be one value over several lines, not a value a line."""
LONE_SURROGATE = re.compile("[\ud800-\udfff]")
REPLACED = "U+FFFD, which invalid UTF-8 becomes, kept"
LONE_CR = "line that ends in CR, unlike others of its file, kept"
MAX_INVALID = 1e-3
"""The share of invalid characters above which a file has another encoding and is not damaged."""
BlockItem = TypeVar("BlockItem")
LocatedText = tuple[str, str]
"""The location of the line or row, `file:line`, where a document starts; and its text."""
Row = tuple[str, Mapping[str, Any] | None]
"""The location of a line or row, and its fields; None if it cannot be used."""


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

    def note(self, reason: str, location: str, times: int = 1) -> None:
        """Count something that was left out or changed."""
        self.skipped[reason] += times
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


def describe_skipped(skipped: Mapping[str, int], examples: Mapping[str, str]) -> list[str]:
    """Return one line per reason: what was left out or changed, how often, and where first."""
    return [
        escape_line_breaks(
            f"counted: {reason}: {count:,}"
            + (f" (first: {examples[reason]})" if reason in examples else "")
        )
        for reason, count in sorted(skipped.items())
    ]


def read_documents(source: Source, counts: TextCounts, *, column: str = "text") -> Iterator[str]:
    """Yield the documents of a source, stripped, not empty, and encodable as UTF-8.

    `column` holds the text in formats with columns. A file that is missing, damaged or not UTF-8,
    or has no text in the column, is a BertkitError that names it.
    """
    if source.format == "unknown":
        counts.note("file of unknown type", source.path)
        return
    counts.files += 1
    before, others = (counts.documents, counts.skipped.total()), 0
    located: Iterable[tuple[str, Any]]
    if source.format == "text":
        located = text_documents(source, counts)
    elif source.format == "wikiextractor":
        located = wikiextractor_documents(source, counts)
    else:
        rows = source_rows(source, counts, [column], [column])
        located = ((location, row[column]) for location, row in rows if row is not None)
    for location, text in located:
        if not isinstance(text, str):
            reason = "empty document" if text is None else f"column '{column}' is not text"
            counts.note(reason, location)
            others += 1
            continue
        document = text.strip()
        if not document:
            counts.note("empty document", location)
            continue
        document = valid_text(document, location, counts)
        counts.documents += 1
        counts.bytes += len(document.encode())
        yield document
    if others and counts.documents == before[0]:
        raise BertkitError(f"no row of {source.path} has text in column '{column}'; name another")
    if (counts.documents, counts.skipped.total()) == before:
        counts.note("empty file", source.path)


def valid_text(text: str, location: str, counts: TextCounts) -> str:
    """Return text that UTF-8 can encode: lone surrogates, which JSON can spell, are replaced."""
    if text.isascii() or not LONE_SURROGATE.search(text):
        return text
    counts.note("lone surrogate replaced, kept", location)
    return LONE_SURROGATE.sub("\ufffd", text)


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


# Lines --------------------------------------------------------------------------------------------


@contextmanager
def open_text(
    source: Source, counts: TextCounts, newline: str | None = None
) -> Iterator[Iterator[str]]:
    """Yield the lines of a file of UTF-8 or marked UTF-16; invalid bytes become U+FFFD, counted."""
    number = 0

    def lines(text: Iterable[str]) -> Iterator[str]:
        nonlocal number
        for number, line in enumerate(text, 1):
            if "\ufffd" in line:
                counts.note(REPLACED, f"{source.path}:{number}")
            yield line

    try:
        with open_binary(source.path) as stream:
            buffered = io.BufferedReader(stream, READ_BYTES)  # type: ignore[type-var]
            encoding = check_encoding(buffered, source.path)
            text = io.TextIOWrapper(buffered, encoding, errors="replace", newline=newline)
            yield lines(text)  # `text` lives until its file is closed
    except DAMAGE as error:
        raise BertkitError(
            f"{source.path} cannot be read after line {number:,} ({one_line(error)}); restore the "
            "file or leave it out"
        ) from error


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


def plain_lines(source: Source, counts: TextCounts) -> Iterator[tuple[int, str]]:
    r"""Yield the number and text of every line; a "\r" in a file of other line ends is counted."""
    first = broken = others = 0
    with open_text(source, counts, newline="") as lines:
        for number, line in enumerate(lines, 1):
            if line.endswith("\n"):
                others += 1
                yield number, line[:-2] if line.endswith("\r\n") else line[:-1]
                continue
            if line.endswith("\r"):
                first, broken = first or number, broken + 1
            yield number, line.removesuffix("\r")
    if broken and others:
        counts.note(LONE_CR, f"{source.path}:{first}", broken)


def text_documents(source: Source, counts: TextCounts) -> Iterator[LocatedText]:
    """Yield the blocks of lines between blank lines."""
    lines: list[str] = []
    start = 0
    for number, line in chain(plain_lines(source, counts), [(0, "")]):
        if line and not line.isspace():
            start = start if lines else number
            lines.append(line)
        elif lines:
            yield f"{source.path}:{start}", "\n".join(lines)
            lines = []


def wikiextractor_documents(source: Source, counts: TextCounts) -> Iterator[LocatedText]:
    """Yield the bodies of `<doc id=... url=... title=...>` ... `</doc>`, each title line first."""
    lines: list[str] | None = None  # None outside a document
    start = ""
    pieces = (
        (f"{source.path}:{number}", piece)
        for number, line in plain_lines(source, counts)
        for piece in (BETWEEN_DOCS.split(line) if "</doc>" in line else [line])
    )
    for location, text in pieces:
        line = text
        if tag := DOC_TAG.match(line):
            if lines is not None:
                counts.note("unclosed <doc>, kept", start)
                yield start, "\n".join(lines)
            lines, start, line = [], location, line[tag.end() :]
        if lines is None:
            if line and not line.isspace():
                counts.note("line outside <doc>", location)
        elif line.rstrip().endswith("</doc>"):
            yield start, "\n".join([*lines, line.rstrip().removesuffix("</doc>")])
            lines = None
        else:
            lines.append(line)
    if lines is not None:
        counts.note("unclosed <doc>, kept", start)
        yield start, "\n".join(lines)


# Rows ---------------------------------------------------------------------------------------------


def source_rows(
    source: Source,
    counts: TextCounts,
    needed: Sequence[str] = (),
    wanted: Sequence[str] | None = None,
    header: bool | Sequence[str] = True,
) -> Iterator[Row]:
    """Yield the rows of a source, whose fields are None if one is bad or lacks a `needed` column.

    Parquet and data sets may be read with the `wanted` columns alone; without, all are read. For
    `header`, see `separated_rows`. It is an error if no row has a needed column.
    """
    if source.format == "jsonl":
        rows = json_lines(source, counts)
    elif source.format in ("csv", "tsv"):
        rows = separated_rows(source, counts, needed, header)
    else:
        rows = typed_rows(source, needed, wanted)
    return complete_rows(rows, source.path, needed, counts)


def complete_rows(
    rows: Iterable[Row], path: str, needed: Sequence[str], counts: TextCounts
) -> Iterator[Row]:
    """Yield the rows of a file, None for one without a needed column; raise if all lack one."""
    names: list[str] | None = None
    complete = False
    for location, fields in rows:
        missing = [name for name in needed if fields is not None and name not in fields]
        if fields is not None:
            names, complete = names or list(map(str, fields)), complete or not missing
        if missing:
            counts.note(f"row without column '{missing[0]}'", location)
        yield location, None if missing else fields
    if names is not None and not complete:
        require_columns(path, needed, names)


def require_columns(
    path: str, columns: Collection[str], names: Sequence[str], *, header: object = False
) -> None:
    """Raise unless each column occurs once in a file, of which `header` may be the first line."""
    for column in columns:
        if column not in names:
            hint = nearest(column, names)
            if header is True and not hint.endswith("?") and not {*columns} & {*names}:
                hint += (
                    "; if its first line is not a header, add --no-header (header=False) and name "
                    "the columns 0, 1, ..."
                )
            raise BertkitError(f"{path} has no column '{column}'{hint}", code="column")
        if names.count(column) > 1:
            raise BertkitError(f"{path} has two columns '{column}'; rename one of them")


def parse_line(text: str) -> Any:
    """Parse JSON; None if it is not valid."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def json_lines(source: Source, counts: TextCounts) -> Iterator[Row]:
    """Yield the object, or None, of each line of JSON, or of each item of an array (as `data`)."""
    lines = (line for line in plain_lines(source, counts) if line[1] and not line[1].isspace())
    head = list(islice(lines, 2))
    values = ((number, parse_line(text)) for number, text in chain(head, lines))
    if len(head) == 1 or (head and ONE_VALUE.fullmatch(head[0][1])):
        texts = [*head, *lines]
        values = ((number, parse_line(text)) for number, text in texts)
        whole = parse_line("\n".join(text for _, text in texts))
        rows = whole.get("data") if isinstance(whole, dict) else whole
        if isinstance(rows, list) and any(isinstance(row, dict) for row in rows):
            values = ((number, row) for number, row in enumerate(rows, 1))
    usable = not head
    for number, row in values:
        if isinstance(row, dict):
            usable = True
        else:
            counts.note("line is not a JSON object", f"{source.path}:{number}")
        yield f"{source.path}:{number}", row if isinstance(row, dict) else None
    if not usable:
        raise BertkitError(
            f"{source.path}:{head[0][0]}: no line is a JSON object, and the file as a whole is no "
            "valid array of objects; write each row as an object with the names of its columns"
        )


def split_rows(
    source: Source, counts: TextCounts, header: bool | Sequence[str]
) -> Iterator[tuple[int, list[str]]]:
    """Yield the first line number and the fields of each row of CSV, or of TSV, without quotes."""
    csv.field_size_limit((1 << 31) - 1)
    start = 1
    with open_text(source, counts, newline="") as lines:
        if source.format == "tsv":
            reader = csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)
        else:  # strict: an unclosed quote would otherwise swallow the rest of the file
            first = next(lines, "")  # a header without a comma shows another separator
            signs = [sign for sign in ";\t" if sign in first and "," not in first]
            sign = signs[0] if signs and header is True else ","
            reader = csv.reader(chain([first], lines), delimiter=sign, strict=True)
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


def separated_rows(
    source: Source,
    counts: TextCounts,
    needed: Sequence[str],
    header: bool | Sequence[str],
) -> Iterator[Row]:
    """Yield the rows of CSV or TSV; `header` is whether the first has the names, or the names."""
    rows = split_rows(source, counts, header)
    first = next(rows, None)
    if first is None:
        return
    names = [name.strip() for name in first[1]]
    if header is not True:
        names = list(header) if header else [str(number) for number in range(len(names))]
        rows = chain([first], rows)
    require_columns(source.path, needed, names, header=header)
    for number, fields in rows:
        location, row = f"{source.path}:{number}", dict(zip(names, fields, strict=False))
        longer = any(map(str.strip, fields[len(names) :]))  # as from a comma that is not quoted
        if longer:
            counts.note("row with more fields than the first line", location)
        yield location, None if longer else row


def typed_rows(
    source: Source, needed: Sequence[str], wanted: Sequence[str] | None
) -> Iterator[Row]:
    """Yield the rows of a Parquet file or a data set, with class names in place of numbers."""
    open_rows = open_parquet if source.format == "parquet" else open_data_set
    with open_rows(source) as (names, features, rows):
        if names:
            require_columns(source.path, needed, names)
        named = class_names(features)
        for number, row in enumerate(rows([n for n in wanted or () if n in names] or None), 1):
            yield f"{source.path}:{number}", with_class_names(row, named)


def class_names(features: Mapping[str, Any]) -> dict[str, Sequence[str]]:
    """Return column -> class names, for columns of `datasets` that hold (lists of) classes."""
    named = {}
    for column, feature in features.items():
        while isinstance(feature, list) or "feature" in feature:
            feature = feature[0] if isinstance(feature, list) else feature["feature"]  # noqa: PLW2901
        if feature.get("_type") == "ClassLabel":
            named[column] = feature["names"]
    return named


def with_class_names(row: Mapping[str, Any], named: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Return the fields of a row with class names in place of numbers; -1 becomes None."""

    def name(value: Any, names: Sequence[str]) -> Any:
        if isinstance(value, list):
            return [name(item, names) for item in value]
        if not isinstance(value, int):
            return value
        return names[value] if value >= 0 else None

    return {
        column: name(value, named[column]) if column in named else value
        for column, value in row.items()
    }


@contextmanager
def open_parquet(source: Source) -> Iterator[Any]:
    """Provide a Parquet file's column names, features and a function that yields rows."""
    parquet = optional_library("pyarrow.parquet", "Parquet files")
    arrow_error = optional_library("pyarrow", "Parquet files").ArrowException
    try:
        with open_binary(source.path, decompress=False) as stream:
            file = parquet.ParquetFile(stream)
            metadata = (file.schema_arrow.metadata or {}).get(b"huggingface", b"{}")

            def rows(columns: list[str] | None) -> Iterator[dict[str, Any]]:
                for batch in file.iter_batches(batch_size=PARQUET_ROWS, columns=columns):
                    yield from batch.to_pylist()

            features = json.loads(metadata).get("info", {}).get("features") or {}
            yield file.schema_arrow.names, features, rows
    except (*DAMAGE, arrow_error) as error:
        raise BertkitError(
            f"{source.path} cannot be read ({one_line(error)}); restore the file or leave it out"
        ) from error


@contextmanager
def open_data_set(source: Source) -> Iterator[Any]:
    """Provide the same of a streamed data set; every failure in the block is a BertkitError."""
    datasets = optional_library("datasets", "Hugging Face data sets")
    _, name, config, split = source.path.split(":")
    try:
        data = datasets.load_dataset(name, config or None, split=split, streaming=True)
        features = data.features.to_dict() if data.features else {}
        yield data.column_names or [], features, lambda c: data.select_columns(c) if c else data
    except BertkitError:
        raise
    except Exception as error:  # the library passes on the errors of a dozen other libraries
        raise BertkitError(
            f"cannot load {source.path} ({one_line(error)}); check name, config, split and network"
        ) from error


def optional_library(name: str, purpose: str, extra: str = "data") -> Any:
    """Import a library of an extra, or raise an error that says how to install it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise BertkitError(
            f"{purpose} need {name}; install bertkit with the extra '{extra}'"
        ) from error


def value_name(value: object) -> str:
    """Return a field as a name: True and False as pandas writes them to CSV, "" for null or NaN."""
    if isinstance(value, str):
        return LONE_SURROGATE.sub("\ufffd", value.strip())
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))  # integer columns with missing values are read as floats
    return str(value)
