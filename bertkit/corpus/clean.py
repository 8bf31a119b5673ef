"""Clean text: drop documents that are too short, too long or duplicates, and count them.

Duplicated text costs training steps, is memorized (Lee et al., 2022, Deduplicating Training Data
Makes Language Models Better), and leaks into held-out text. One pass reads the input in order: of
several copies the first is kept. The result does not depend on the number of workers.

Two documents are equal if their texts are, ignoring case and white space. They are nearly equal if
they share most runs of SHINGLE words. MinHash (Broder, 1997) estimates that share: each of BANDS x
ROWS hash functions keeps its smallest value over a document's set of shingles, and for each
function the probability that two documents have the same smallest value is their Jaccard
similarity s. The values are grouped in bands (Leskovec, Rajaraman and Ullman, Mining of Massive
Datasets, section 3.4): two documents that agree on a whole band count as near-duplicates, which has
the probability 1 - (1 - s ** ROWS) ** BANDS. 14 bands of 8 rows over runs of 5 words are the
defaults of datatrove, whose code needs three passes and intermediate files. Here one pass keeps 8
bytes for each band of each document that is kept, and 8 for the document itself.
"""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bertkit.errors import BertkitError
from bertkit.files import check_output, disk_errors, new_file
from bertkit.processes import map_in_order, open_executor
from bertkit.progress import Console, console_or_new
from bertkit.text.documents import TextCounts, cut_blocks, describe_skipped, read_documents
from bertkit.text.sources import TextSource

BLOCK_CHARACTERS = 250_000
EXAMPLE_CHARACTERS = 50
"""The maximum number of characters of a dropped document that are shown next to its location."""
EXACT, NEAR = "equal to an earlier document", "nearly equal to an earlier document"


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


CLEAN_DEFAULTS = CleanOptions()


class Cleaned(NamedTuple):
    """The counts that `clean` returns."""

    read: TextCounts
    written: TextCounts
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
    read, written, keys, bands = TextCounts(), TextCounts(), KeySet(), KeySet()
    waiting: deque[list[tuple[str, str]]] = deque()

    def documents() -> Iterator[tuple[str, str]]:
        for source in sources:
            texts = read_documents(source, read, column=text.column)
            for number, document in enumerate(texts, 1):
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
                    start = " ".join(document[: 4 * EXAMPLE_CHARACTERS].split())
                    quoted = json.dumps(start[:EXAMPLE_CHARACTERS], ensure_ascii=False)
                    written.note(reason, f"{location}: {quoted}")
                else:
                    written.documents += 1
                    written.bytes += write(document)
            shown.update({"done": read.documents, "bytes": read.bytes})
        if not written.documents:
            raise BertkitError(
                f"none of {read.documents:,} documents is left "
                f"({', '.join(sorted(written.skipped)) or 'there was none'}); relax the options"
            )
        shown.close()
        shown.say(*describe_clean(Cleaned(read, written), out))
    return Cleaned(read, written)


@contextmanager
def json_lines_writer(out: Path) -> Iterator[Callable[[str], int]]:
    """Yield a function that writes a document as a line of JSON, and returns its text's bytes."""
    import fsspec.compression

    kind = fsspec.utils.infer_compression(out.name)
    if Path(out.stem if kind else out.name).suffix != ".jsonl":
        raise BertkitError(f"{out} is not a file of JSON lines; use NAME.jsonl or NAME.jsonl.zst")
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
    """Return whether a document is too short or too long, and the keys by which copies agree."""
    limits = options.min_words or options.max_words
    words = len(word_pattern().findall(document)) if limits else 0
    if words < options.min_words:
        return Verdict(f"fewer than {options.min_words:,} words", 0, [])
    if words > options.max_words > 0:
        return Verdict(f"more than {options.max_words:,} words", 0, [])
    bands = band_keys(document).tolist() if options.near else []
    return Verdict("", exact_key(document) if options.exact else 0, bands)


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


def describe_clean(cleaned: Cleaned, out: Path) -> list[str]:
    """Return lines that say what was kept, dropped and skipped."""
    read, written = cleaned.read, cleaned.written
    dropped = describe_skipped(written.skipped, written.examples)
    return [
        f"{out}: {written.documents:,} of {read.documents:,} documents kept, "
        f"{written.bytes / max(1, read.bytes):.1%} of the text",
        *(line.replace("counted", "dropped", 1) for line in dropped),
        *describe_skipped(read.skipped, read.examples),
    ]


# Keys of duplicates -------------------------------------------------------------------------------

SHINGLE = 5
"""The number of words in a run; a shorter document is one run."""
BANDS, ROWS = 14, 8
SHINGLES_AT_ONCE = 2048
"""The maximum number of runs hashed at once; their (shingles, functions) hashes take 2 MB."""
UNSPACED_SCRIPTS = (
    "\u0e00-\u0eff\u1000-\u109f\u1100-\u11ff\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf"
    "\u4e00-\u9fff\uac00-\ud7ff\uff66-\uff9f"
)
"""Thai, Lao, Burmese, Khmer, kana, Han and Hangul, treated as written without spaces."""
MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


@cache
def word_pattern() -> re.Pattern[str]:
    r"""Return the pattern of a word; marks, such as vowel signs of Hindi, belong to it."""
    # marks beyond the first 65,536 characters would make matching five times as slow
    marks = "".join(c for c in map(chr, range(1 << 16)) if unicodedata.category(c)[0] == "M")
    marks += "\u200c\u200d"  # the joiners
    letters = rf"[^\W{UNSPACED_SCRIPTS}]"
    spelled = rf"{letters}++(?:[{marks}]++{letters}*+)*+"
    return re.compile(rf"[{UNSPACED_SCRIPTS}][{marks}]*+|{spelled}")


def hash_parameters(count: int, stream: int) -> np.ndarray:
    """Return (count,) uint64 random numbers, always the same for a stream."""
    rng = np.random.Generator(np.random.Philox(key=[7, stream]))
    return rng.integers(0, 1 << 64, count, dtype=np.uint64)


FACTORS = hash_parameters(BANDS * ROWS, 0) | np.uint64(1)
SUMMANDS = hash_parameters(BANDS * ROWS, 1)
POSITION_FACTORS = hash_parameters(SHINGLE, 2) | np.uint64(1)
"""The factor for each word of a run."""
BAND_KEYS = hash_parameters(BANDS * ROWS, 3).reshape(BANDS, ROWS) | np.uint64(1)


def mix_bits(values: np.ndarray) -> np.ndarray:
    """Mix the bits of each number over all 64 bits (the final step of SplitMix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def hash_segments(values: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Hash consecutive segments of uint64 values, of (segments,) lengths above 0, to uint64."""
    starts = np.cumsum(lengths) - lengths
    exponents = np.arange(len(values)) - np.repeat(starts, lengths)
    powers = np.cumprod(np.full(int(lengths.max()), MULTIPLIER), dtype=np.uint64)
    return mix_bits(np.add.reduceat(values * powers[exponents], starts))


def exact_key(document: str) -> int:
    """Return a 64-bit hash of the text, ignoring case and white space."""
    text = " ".join(document.casefold().split())
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def shingles(document: str) -> np.ndarray:
    """Return (runs,) uint64 hashes of the runs of SHINGLE words, ignoring case and punctuation."""
    words = word_pattern().findall(document.casefold())
    if not words:
        return np.zeros(0, dtype=np.uint64)
    lengths = np.fromiter(map(len, words), dtype=np.int64, count=len(words))
    codes = np.frombuffer("".join(words).encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    keys = hash_segments(mix_bits(codes.astype(np.uint64)), lengths)
    runs = max(1, len(keys) - SHINGLE + 1)
    hashes = np.zeros(runs, dtype=np.uint64)
    for offset in range(min(SHINGLE, len(keys))):
        hashes += keys[offset : offset + runs] * POSITION_FACTORS[offset]
    return mix_bits(hashes)


def band_keys(document: str) -> np.ndarray:
    """Return (BANDS,) uint64 keys, of each band of smallest hashes; (0,) without words."""
    runs = shingles(document)
    if not len(runs):
        return runs
    smallest = np.full(BANDS * ROWS, np.iinfo(np.uint64).max, dtype=np.uint64)
    for start in range(0, len(runs), SHINGLES_AT_ONCE):
        hashes = runs[start : start + SHINGLES_AT_ONCE, None] * FACTORS + SUMMANDS
        np.minimum(smallest, hashes.min(axis=0), out=smallest)
    rows = (mix_bits(smallest).reshape(BANDS, ROWS) * BAND_KEYS).sum(axis=1, dtype=np.uint64)
    return mix_bits(rows + np.arange(BANDS, dtype=np.uint64) * MULTIPLIER)


class KeySet:
    """A set of 64-bit numbers at 8 bytes each: few sorted arrays, and a Python set of new ones."""

    def __init__(self, waiting: int = 1 << 16) -> None:
        self.max_waiting = waiting
        self._waiting: set[int] = set()
        self._runs: list[np.ndarray] = []

    def has_any(self, keys: Sequence[int]) -> bool:
        """Return whether at least one of the keys is in the set."""
        if not self._waiting.isdisjoint(keys):
            return True
        wanted = np.array(keys, dtype=np.uint64)
        for run in self._runs:
            positions = np.minimum(np.searchsorted(run, wanted), len(run) - 1)
            if (run[positions] == wanted).any():
                return True
        return False

    def add(self, keys: Sequence[int]) -> None:
        """Add keys. A repeated key may take its 8 bytes twice until its arrays are merged."""
        self._waiting.update(keys)
        if len(self._waiting) >= self.max_waiting:
            run = np.fromiter(self._waiting, dtype=np.uint64, count=len(self._waiting))
            self._waiting.clear()
            run.sort()
            while self._runs and len(self._runs[-1]) <= 2 * len(run):  # so that numbers move rarely
                run = np.concatenate([self._runs.pop(), run])
                run.sort(kind="stable")  # detects the two sorted halves and merges them
            self._runs.append(run)
