"""Clean text: drop documents that are too short, of poor quality or duplicates, and count them.

Duplicated text costs training steps, is memorized (Lee et al., 2022, Deduplicating Training Data
Makes Language Models Better), and leaks into held-out text. The quality rules are those of
MassiveText (Rae et al., 2021, appendix A.1) that apply to any language with letters. One pass reads
the input in order: of several copies the first is kept. The result does not depend on the number of
processes. Memory holds the keys of the kept documents (`minhash.py`), not their text.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from bertkit.console import Console, console_or_new
from bertkit.corpus.minhash import KeySet, band_keys, exact_key, word_patterns
from bertkit.corpus.writers import open_writer
from bertkit.errors import BertkitError
from bertkit.files import check_output
from bertkit.processes import Workers, worker_count
from bertkit.text.documents import TextCounts, read_documents
from bertkit.text.lines import cut_blocks, describe_skipped
from bertkit.text.sources import Source, find_sources

JUDGE_CHARACTERS = 250_000
EXAMPLE_CHARACTERS = 50
"""The maximum number of characters of a dropped document that are shown next to its location."""
EXACT, NEAR = "equal to an earlier document", "nearly equal to an earlier document"


@dataclass(frozen=True, kw_only=True)
class CleanOptions:
    """The settings that determine which documents are dropped."""

    format: str = "auto"
    """text, wikiextractor, jsonl, csv, tsv or parquet; auto uses extensions and first lines."""
    column: str = "text"
    """The column that holds the text, in formats that have columns."""
    exact: bool = True
    """Drop documents equal to an earlier one, ignoring case and white space."""
    near: bool = False
    """Drop documents that share most five-word sequences with an earlier one (MinHash)."""
    min_words: int = 0
    """Minimum number of words in a document."""
    max_words: int = 0
    """Maximum number of words in a document; 0 for no limit."""
    quality: bool = False
    """Drop documents that violate one of the four rules below."""
    min_alphabetic: float = 0.8
    """Minimum share of words that contain a letter."""
    max_repeated: float = 0.2
    """Maximum share of a document's characters in lines that repeat an earlier line."""
    min_word_length: float = 3.0
    """Minimum mean length of words, in characters; scripts without spaces are not counted."""
    max_word_length: float = 10.0
    """Maximum mean length of words."""


class Verdict(NamedTuple):
    """The result of judging a document's text without the other documents."""

    reason: str
    """Why the document is dropped; empty if it is not."""
    key: int
    bands: list[int]
    """The MinHash band keys; empty unless near-duplicates are dropped."""


class Cleaned(NamedTuple):
    """The counts that `clean` returns."""

    read: TextCounts
    kept: TextCounts
    """`skipped` counts the dropped documents by reason; `examples` gives the first of each."""
    key_bytes: int
    """The memory in bytes that the keys of the kept documents took."""


def poor_quality(document: str, options: CleanOptions) -> str:
    """Return the first quality rule that a document violates; empty if there is none."""
    tokens = document.split()
    alphabetic = sum(any(map(str.isalpha, token)) for token in tokens) / max(1, len(tokens))
    if alphabetic < options.min_alphabetic:
        return f"fewer than {options.min_alphabetic:.0%} of words have a letter"
    if repeated_share(document) > options.max_repeated:
        return f"more than {options.max_repeated:.0%} of the text is in repeated lines"
    spelled = word_patterns()[1].findall(document)
    if spelled:
        mean = sum(map(len, spelled)) / len(spelled)
        if mean < options.min_word_length:
            return f"mean word length below {options.min_word_length:g}"
        if mean > options.max_word_length:
            return f"mean word length above {options.max_word_length:g}"
    return ""


def repeated_share(document: str) -> float:
    """Return the share of a document's characters, without line ends, in repeated lines."""
    seen: set[str] = set()
    repeated = total = 0
    for line in document.splitlines():
        stripped = line.strip()
        total += len(stripped)
        if stripped in seen:
            repeated += len(stripped)
        seen.add(stripped)
    return repeated / max(1, total)


def judge_document(document: str, options: CleanOptions) -> Verdict:
    """Judge a document by itself; this is the work of the worker processes."""
    limits = options.min_words or options.max_words
    words = len(word_patterns()[0].findall(document)) if limits else 0
    if words < options.min_words:
        reason = f"fewer than {options.min_words:,} words"
    elif words > options.max_words > 0:
        reason = f"more than {options.max_words:,} words"
    else:
        reason = poor_quality(document, options) if options.quality else ""
    if reason:
        return Verdict(reason, 0, [])
    bands = band_keys(document).tolist() if options.near else []
    return Verdict("", exact_key(document) if options.exact else 0, bands)


def judge_block(documents: Sequence[str], options: CleanOptions) -> list[Verdict]:
    """Return `judge_document` of each document."""
    return [judge_document(document, options) for document in documents]


class DocumentReader:
    """An iterable of the documents of all sources that knows where each source starts."""

    def __init__(self, sources: Sequence[Source], column: str) -> None:
        self.sources = sources
        self.column = column
        self.counts = TextCounts()
        self._first: list[int] = []

    def __iter__(self) -> Iterator[str]:
        for source in self.sources:
            self._first.append(self.counts.documents)
            yield from read_documents(source, self.counts, column=self.column)

    def place(self, index: int) -> str:
        """Return the source of document `index` and the document's number in it, from 1."""
        source = bisect_right(self._first, index) - 1
        return f"{self.sources[source].path}, document {index - self._first[source] + 1:,}"


def check_clean_options(options: CleanOptions) -> None:
    """Refuse impossible options and options that would have no effect."""
    for name in ("min_alphabetic", "max_repeated", "min_word_length", "max_word_length"):
        if not options.quality and getattr(options, name) != getattr(CleanOptions(), name):
            raise BertkitError(f"{name} has no effect without --quality; give both or neither")
    for name in ("min_alphabetic", "max_repeated"):
        if not 0 <= (value := getattr(options, name)) <= 1:
            raise BertkitError(f"{name} is a share from 0 to 1, got {value}")
    if min(options.min_words, options.max_words) < 0:
        raise BertkitError("min_words and max_words must be 0 or more")
    if options.min_words > options.max_words > 0:
        raise BertkitError(f"min_words {options.min_words} is above max_words {options.max_words}")
    minimum, maximum = options.min_word_length, options.max_word_length
    if not 0 <= minimum <= maximum:
        raise BertkitError(
            f"min_word_length {minimum:g} and max_word_length {maximum:g} leave no mean length "
            "between them; give 0 <= min_word_length <= max_word_length"
        )


def clean(
    paths: Sequence[str],
    out: Path | str,
    options: CleanOptions | None = None,
    *,
    processes: int = 1,
    console: Console | None = None,
) -> Cleaned:
    """Write the documents that are kept, in their order; show progress and what was dropped.

    Args:
        paths: files, folders, globs, URLs or `hf:` data sets; see `find_sources`.
        out: a file of JSON lines, or a folder for several; see `open_writer`. It appears only when
            it is complete.
        options: the cleaning settings; see `CleanOptions`.
        processes: the number of worker processes, 0 for one per core; the result is the same for
            any number.
        console: the console for progress; None for a new one.

    Raises:
        BertkitError: there is nothing to read, an option is impossible, no document is kept, or the
            disk is full.
    """
    options, out = options or CleanOptions(), check_output(out, paths)
    workers = worker_count(processes)
    check_clean_options(options)
    with console_or_new(console) as shown:
        shown.start(None, title="cleaning", unit="documents")
        reader = DocumentReader(find_sources(paths, format=options.format), options.column)
        with open_writer(out) as write:
            cleaned = clean_documents(reader, write, options, workers, shown)
        shown.close()
        shown.say(*describe_clean(cleaned, out))
    return cleaned


def clean_documents(
    reader: DocumentReader,
    write: Callable[[str], int],
    options: CleanOptions,
    processes: int,
    console: Console,
) -> Cleaned:
    """Write the documents of a reader that are kept; see `clean`."""
    kept = TextCounts()
    keys, bands = KeySet(), KeySet()
    index = 0
    work = partial(judge_block, options=options)
    with Workers(work, processes, command="clean", flag="--processes") as workers:
        for documents, verdicts in workers.run(cut_blocks(reader, JUDGE_CHARACTERS)):
            for document, verdict in zip(documents, verdicts, strict=True):
                reason = verdict.reason or is_duplicate(verdict, options, keys, bands)
                if reason:
                    start = document[: 4 * EXAMPLE_CHARACTERS].split()
                    shown = json.dumps(" ".join(start)[:EXAMPLE_CHARACTERS], ensure_ascii=False)
                    kept.note(reason, f"{reader.place(index)}: {shown}")
                else:
                    kept.documents += 1
                    kept.bytes += write(document)
                index += 1
            console.update({"done": reader.counts.documents, "bytes": reader.counts.bytes})
    if not kept.documents:
        raise BertkitError(
            f"none of {reader.counts.documents:,} documents is left "
            f"({', '.join(sorted(kept.skipped)) or 'there was none'}); relax the options"
        )
    return Cleaned(reader.counts, kept, keys.bytes + bands.bytes)


def is_duplicate(verdict: Verdict, options: CleanOptions, keys: KeySet, bands: KeySet) -> str:
    """Return why a document is a duplicate; if it is not, store its keys and return ""."""
    if options.exact and keys.has_any([verdict.key]):
        return EXACT
    if bands.has_any(verdict.bands):
        return NEAR
    if options.exact:
        keys.add([verdict.key])
    bands.add(verdict.bands)
    return ""


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
