"""Clean text: drop documents that are too short, of poor quality or duplicates, and count them.

Duplicated text costs training steps, is memorized (Lee et al., 2022, Deduplicating Training Data
Makes Language Models Better), and leaks into held-out text. The quality rules are those of
MassiveText (Rae et al., 2021, appendix A.1) that apply to any language with letters. One pass reads
the input in order: of several copies the first is kept. The result does not depend on the number of
workers. Memory holds the keys of the kept documents (`minhash.py`), not their text.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import fsspec
import fsspec.compression

from bertkit.console import Console, console_or_new
from bertkit.corpus.minhash import KeySet, band_keys, exact_key, word_patterns
from bertkit.errors import BertkitError
from bertkit.files import check_output, disk_errors, new_file, remove_leftovers
from bertkit.processes import map_in_order, open_executor
from bertkit.text.documents import TextCounts, cut_blocks, describe_skipped, read_documents
from bertkit.text.sources import TextSource, is_remote

BLOCK_CHARACTERS = 250_000
EXAMPLE_CHARACTERS = 50
"""The maximum number of characters of a dropped document that are shown next to its location."""
EXACT, NEAR = "equal to an earlier document", "nearly equal to an earlier document"
MIN_ALPHABETIC = 0.8
"""The minimum share of words that contain a letter."""
MAX_REPEATED = 0.2
"""The maximum share of a document's characters in lines that repeat an earlier line."""
WORD_LENGTH = 3.0, 10.0
"""The bounds of the mean length of words; scripts without spaces are not counted."""


@dataclass(frozen=True, kw_only=True)
class CleanOptions:
    """The settings that determine which documents are dropped."""

    exact: bool = True
    """Drop documents equal to an earlier one, ignoring case and white space."""
    near: bool = False
    """Drop documents that share most five-word sequences with an earlier one (MinHash)."""
    min_words: int = 0
    """Minimum number of words in a document."""
    max_words: int = 0
    """Maximum number of words in a document; 0 for no limit."""
    quality: bool = False
    """Drop documents of which few words have letters, many lines are repeated, or words are very
    short or long on average."""


CLEAN_DEFAULTS = CleanOptions()


class Cleaned(NamedTuple):
    """The counts that `clean` returns."""

    read: TextCounts
    kept: TextCounts
    """`skipped` counts the dropped documents by reason; `examples` gives the first of each."""


def clean(
    text: TextSource | Sequence[str | Path],
    out: Path | str,
    options: CleanOptions = CLEAN_DEFAULTS,
    *,
    processes: int = 1,
    executor: Executor | None = None,
    console: Console | None = None,
) -> Cleaned:
    """Write the documents that are kept, in their order; show progress and what was dropped.

    Args:
        text: the text, or only its paths.
        out: a file of JSON lines, NAME.jsonl, which may be compressed (.gz, .bz2, .xz or .zst). It
            appears only when it is complete.
        options: the cleaning settings; see `CleanOptions`.
        processes: the number of worker processes, 0 for one per core; the result is the same for
            any number.
        executor: workers instead; see `bertkit.processes.map_in_order`.
        console: the console for progress; None for a new one.

    Raises:
        BertkitError: there is nothing to read, an option is impossible, no document is kept, `out`
            exists, a worker died, or the disk is full.
    """
    text = TextSource.of(text)
    out = check_output(out, text.paths)
    if min(options.min_words, options.max_words) < 0 or options.min_words > options.max_words > 0:
        raise BertkitError("min_words and max_words must be at least 0, and the first not above")
    sources = text.files()
    read, kept, keys, bands = TextCounts(), TextCounts(), KeySet(), KeySet()
    waiting: deque[list[tuple[str, str]]] = deque()

    def documents() -> Iterator[tuple[str, str]]:
        for source in sources:
            found = read_documents(source, read, column=text.column)
            for number, document in enumerate(found, 1):
                yield f"{source.path}, document {number:,}", document

    def blocks() -> Iterator[list[str]]:
        for block in cut_blocks(documents(), BLOCK_CHARACTERS, lambda pair: len(pair[1])):
            waiting.append(block)
            yield [document for _, document in block]

    with (
        console_or_new(console) as shown,
        json_lines_writer(out) as write,
        open_executor(processes, executor) as pool,
    ):
        shown.start(None, title="cleaning", unit="documents")
        for verdicts in map_in_order(partial(judge_block, options=options), blocks(), pool):
            for (location, document), verdict in zip(waiting.popleft(), verdicts, strict=True):
                if reason := verdict.reason or duplicate(verdict, options, keys, bands):
                    kept.note(reason, f"{location}: {beginning(document)}")
                else:
                    kept.documents += 1
                    kept.bytes += write(document)
            shown.update({"done": read.documents, "bytes": read.bytes})
        if not kept.documents:
            raise BertkitError(
                f"none of {read.documents:,} documents is left "
                f"({', '.join(sorted(kept.skipped)) or 'there was none'}); relax the options"
            )
        shown.close()
        shown.say(*describe_clean(Cleaned(read, kept), out))
    return Cleaned(read, kept)


@contextmanager
def json_lines_writer(out: Path) -> Iterator[Callable[[str], int]]:
    """Yield a function that writes a document and returns its bytes; the file appears on success.

    Each document is an object {"text": document} on a line.
    """
    kind = fsspec.utils.infer_compression(out.name)
    if Path(out.stem if kind else out.name).suffix != ".jsonl" or is_remote(out):
        raise BertkitError(f"{out} is not a local file of JSON lines; use NAME.jsonl or .jsonl.zst")
    with disk_errors(out):
        remove_leftovers(out)
        if out.is_symlink() or out.exists():  # it may be one of the inputs
            raise BertkitError(f"{out} exists already; choose another --out, or remove it")
    with new_file(out) as temporary, disk_errors(out, temporary), temporary.open("wb") as plain:
        file = fsspec.compression.compr[kind](plain, mode="wb") if kind else plain

        def write(document: str) -> int:
            line = json.dumps({"text": document}, ensure_ascii=False) + "\n"
            file.write(line.encode())
            return len(document.encode())

        yield write
        file.close()


class Verdict(NamedTuple):
    """The result of judging a document's text without the other documents."""

    reason: str
    """Why the document is dropped; empty if it is not."""
    key: int
    bands: list[int]
    """The MinHash band keys; empty unless near-duplicates are dropped."""


def judge_block(documents: Sequence[str], options: CleanOptions) -> list[Verdict]:
    """Judge each document by itself: the work of the workers."""
    return [judge_document(document, options) for document in documents]


def judge_document(document: str, options: CleanOptions) -> Verdict:
    """Judge a document by itself."""
    limits = options.min_words or options.max_words
    words = len(word_patterns()[0].findall(document)) if limits else 0
    if words < options.min_words:
        reason = f"fewer than {options.min_words:,} words"
    elif words > options.max_words > 0:
        reason = f"more than {options.max_words:,} words"
    else:
        reason = poor_quality(document) if options.quality else ""
    if reason:
        return Verdict(reason, 0, [])
    bands = band_keys(document).tolist() if options.near else []
    return Verdict("", exact_key(document) if options.exact else 0, bands)


def poor_quality(document: str) -> str:
    """Return the first quality rule that a document violates; empty if there is none."""
    tokens = document.split()
    if sum(any(map(str.isalpha, token)) for token in tokens) < MIN_ALPHABETIC * len(tokens):
        return f"fewer than {MIN_ALPHABETIC:.0%} of words have a letter"
    if repeated_share(document) > MAX_REPEATED:
        return f"more than {MAX_REPEATED:.0%} of the text is in repeated lines"
    if spelled := word_patterns()[1].findall(document):
        mean = sum(map(len, spelled)) / len(spelled)
        if not WORD_LENGTH[0] <= mean <= WORD_LENGTH[1]:
            bound = f"below {WORD_LENGTH[0]:g}" if mean < WORD_LENGTH[0] else "above 10"
            return f"mean word length {bound}"
    return ""


def repeated_share(document: str) -> float:
    """Return the share of a document's characters, without line ends, in repeated lines."""
    seen: set[str] = set()
    repeated = total = 0
    for line in map(str.strip, document.splitlines()):
        total += len(line)
        if line in seen:
            repeated += len(line)
        seen.add(line)
    return repeated / max(1, total)


def duplicate(verdict: Verdict, options: CleanOptions, keys: KeySet, bands: KeySet) -> str:
    """Return why a document is a duplicate; if it is not, store its keys and return ""."""
    if options.exact and keys.has_any([verdict.key]):
        return EXACT
    if bands.has_any(verdict.bands):
        return NEAR
    if options.exact:
        keys.add([verdict.key])
    bands.add(verdict.bands)
    return ""


def beginning(document: str) -> str:
    """Return the first characters of a document, quoted, on one line."""
    start = " ".join(document[: 4 * EXAMPLE_CHARACTERS].split())
    return json.dumps(start[:EXAMPLE_CHARACTERS], ensure_ascii=False)


def describe_clean(cleaned: Cleaned, out: Path) -> list[str]:
    """Return lines that say what was kept, dropped and skipped."""
    read, kept = cleaned.read, cleaned.kept
    dropped = describe_skipped(kept.skipped, kept.examples)
    return [
        f"{out}: {kept.documents:,} of {read.documents:,} documents kept, "
        f"{kept.bytes / max(1, read.bytes):.1%} of the text",
        *(line.replace("counted", "dropped", 1) for line in dropped),
        *describe_skipped(read.skipped, read.examples),
    ]
