"""Find documents that equal or nearly equal an earlier one, in bounded memory.

Two documents are equal if their texts are, ignoring case and white space. They are nearly equal if
they share most runs of SHINGLE words. MinHash (Broder, 1997) estimates that share: each of BANDS x
ROWS hash functions keeps its smallest value over a document's set of shingles, and for each
function the probability that two documents have the same smallest value is their Jaccard
similarity s, the size of the intersection over that of the union. The values are grouped in bands
(Leskovec, Rajaraman and Ullman, Mining of Massive Datasets, section 3.4): two documents that agree
on a whole band count as near-duplicates, which has the probability

    1 - (1 - s ** ROWS) ** BANDS

14 bands of 8 rows over runs of 5 words are datatrove's defaults; its code needs a word splitter
from a language library, three passes and intermediate files. Here one pass keeps 8 bytes for
each band of each document that is kept, and 8 for the document itself.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Sequence
from functools import cache

import numpy as np

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
def word_patterns() -> tuple[re.Pattern[str], re.Pattern[str]]:
    r"""Return the pattern of a word, and that of a word in a script that has spaces.

    In scripts without spaces, each character is a word. Marks, such as the vowel signs of Hindi,
    belong to the word that they follow, and so do the two joiners; `\w` has neither. (Marks beyond
    the first 65,536 characters would make matching five times as slow, and end a word.)
    """
    marks = "".join(c for c in map(chr, range(1 << 16)) if unicodedata.category(c)[0] == "M")
    marks += "\u200c\u200d"
    letters = rf"[^\W{UNSPACED_SCRIPTS}]"
    spelled = rf"{letters}++(?:[{marks}]++{letters}*+)*+"
    return re.compile(rf"[{UNSPACED_SCRIPTS}][{marks}]*+|{spelled}"), re.compile(spelled)


def hash_parameters(count: int, stream: int) -> np.ndarray:
    """Return (count,) uint64 random numbers, always the same for a stream."""
    rng = np.random.Generator(np.random.Philox(key=[7, stream]))
    return rng.integers(0, 1 << 64, count, dtype=np.uint64)


FACTORS = hash_parameters(BANDS * ROWS, 0) | np.uint64(1)
SUMMANDS = hash_parameters(BANDS * ROWS, 1)
PLACES = hash_parameters(SHINGLE, 2) | np.uint64(1)
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
    places = np.arange(len(values)) - np.repeat(starts, lengths)
    powers = np.cumprod(np.full(int(lengths.max()), MULTIPLIER), dtype=np.uint64)
    return mix_bits(np.add.reduceat(values * powers[places], starts))


def exact_key(document: str) -> int:
    """Return a 64-bit hash of the text, ignoring case and white space.

    Among n different documents, the expected number of collisions is n^2 / 2^65: three in a
    million runs over ten million documents.
    """
    text = " ".join(document.casefold().split())
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def shingles(document: str) -> np.ndarray:
    """Return (runs,) uint64 hashes of the runs of SHINGLE words; (0,) for a text without words.

    Words consist of letters and digits; case and punctuation are ignored.
    """
    words = word_patterns()[0].findall(document.casefold())
    if not words:
        return np.zeros(0, dtype=np.uint64)
    lengths = np.fromiter(map(len, words), dtype=np.int64, count=len(words))
    codes = np.frombuffer("".join(words).encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    keys = hash_segments(mix_bits(codes.astype(np.uint64)), lengths)
    runs = max(1, len(keys) - SHINGLE + 1)
    hashes = np.zeros(runs, dtype=np.uint64)
    for place in range(min(SHINGLE, len(keys))):
        hashes += keys[place : place + runs] * PLACES[place]
    return mix_bits(hashes)


def band_keys(document: str) -> np.ndarray:
    """Return (BANDS,) uint64: one key for each band of smallest hashes.

    The shape is (0,) for a document without words.
    """
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
    """A set of 64-bit numbers at 8 bytes each (16 briefly, while sorted runs are merged).

    New numbers are collected in a small Python set, then sorted into an array. An array is merged
    with the one before it once it is half as long, so there are few, and each number moves rarely.
    """

    def __init__(self, waiting: int = 1 << 16) -> None:
        self.max_waiting = waiting
        self._waiting: set[int] = set()
        self._runs: list[np.ndarray] = []

    @property
    def bytes(self) -> int:
        """The size in bytes, 8 per number; the Python set takes a few megabytes more."""
        return 8 * (len(self._waiting) + sum(map(len, self._runs)))

    def has_any(self, keys: Sequence[int]) -> bool:
        """Return whether at least one of the keys is in the set."""
        if not self._waiting.isdisjoint(keys):
            return True
        wanted = np.array(keys, dtype=np.uint64)
        for run in self._runs:
            places = np.minimum(np.searchsorted(run, wanted), len(run) - 1)
            if (run[places] == wanted).any():
                return True
        return False

    def add(self, keys: Sequence[int]) -> None:
        """Add keys. A repeated key may take its 8 bytes twice until its arrays are merged."""
        self._waiting.update(keys)
        if len(self._waiting) >= self.max_waiting:
            run = np.fromiter(self._waiting, dtype=np.uint64, count=len(self._waiting))
            self._waiting.clear()
            run.sort()
            while self._runs and len(self._runs[-1]) <= 2 * len(run):
                run = np.concatenate([self._runs.pop(), run])
                run.sort(kind="stable")  # detects the two sorted halves and merges them
            self._runs.append(run)
