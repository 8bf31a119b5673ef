"""Count how often each normalised word occurs: all that learning a vocabulary needs of a corpus.

Texts are dealt out in blocks, one after the other, and the counts of the blocks are added in the
same order, so that any number of processes gives the same table, including which words it drops.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, islice
from math import fsum

from bertkit.errors import BertkitError, checked_texts
from bertkit.processes import Workers, worker_count
from bertkit.text.lines import cut_blocks
from bertkit.tokenizer.files import MAX_WORD_CHARACTERS
from bertkit.tokenizer.normalize import IDEOGRAPHS, WHITESPACE, split_words

PROGRESS_TEXTS = 1_000
BLOCK_CHARACTERS = 1_000_000
BETWEEN_WORDS = re.compile(f"[{WHITESPACE}{IDEOGRAPHS}]")
KEPT_SHARE = 0.75
"""The share of `max_distinct_words` kept when rare words are dropped, so that sorting is rare."""

TOO_LONG = f"word of more than {MAX_WORD_CHARACTERS['google']} characters"
PRUNED_WORDS = "rare word dropped (max_distinct_words)"
PRUNED = "occurrence of a rare word dropped (max_distinct_words)"
ROUNDED_AWAY = "rare word of a large source that smoothing rounds to none"


def count_words(
    texts: Iterable[str],
    *,
    lowercase: bool,
    strip_accents: bool | None = None,
    progress: Callable[[int], None] | None = None,
    processes: int = 1,
    max_distinct_words: int | None = None,
    skipped: Counter[str] | None = None,
) -> Counter[str]:
    """Count each normalised word; words above Google's limit of 200 characters are left out.

    Args:
        texts: the texts to count, read once, in the calling process.
        lowercase: whether to count uncased words.
        strip_accents: whether to count words without accents; by default as `lowercase`, as in
            BERT.
        progress: called with the number of texts read so far, every 1,000 texts and at the end.
        processes: the number of counting processes, 0 for one per core; the result is the same for
            any number. Text of a single block (a million characters) is counted in this process.
        max_distinct_words: the limit that bounds memory. Whenever the table has more distinct words
            after a block, the rarest are dropped (of equals the later in the alphabet) until three
            quarters of the limit remain. A dropped word that occurs again is counted from 0, so the
            counts of rare words are then too low. None keeps every word.
        skipped: the counter to which is added what was left out, by reason.

    Raises:
        BertkitError: an argument is too low, or a counting process died.
    """
    if max_distinct_words is not None and max_distinct_words < 1:
        raise BertkitError(f"max_distinct_words must be at least 1, got {max_distinct_words}")
    workers = worker_count(processes)
    lost: Counter[str] = Counter() if skipped is None else skipped
    counts: Counter[str] = Counter()
    parts = (cut_text(text, BLOCK_CHARACTERS) for text in watched(texts, progress))
    blocks = cut_blocks(chain.from_iterable(parts), BLOCK_CHARACTERS)
    accents_off = lowercase if strip_accents is None else strip_accents
    for found, long_words in counted_blocks(blocks, lowercase, accents_off, workers):
        counts.update(found)
        if long_words:
            lost[TOO_LONG] += long_words
        if max_distinct_words is not None and len(counts) > max_distinct_words:
            drop_rarest(counts, max(1, int(KEPT_SHARE * max_distinct_words)), lost)
    return counts


def cut_text(text: str, characters: int) -> Iterator[str]:
    """Yield a text in parts of slightly more than `characters` characters, cut between words."""
    start = 0
    while cut := BETWEEN_WORDS.search(text, start + characters):
        yield text[start : cut.end()]
        start = cut.end()
    yield text[start:]


def watched(texts: Iterable[str], progress: Callable[[int], None] | None) -> Iterator[str]:
    """Yield the same texts and report the number of them to `progress`."""
    number = 0
    for number, text in enumerate(checked_texts(texts), start=1):
        yield text
        if progress is not None and number % PROGRESS_TEXTS == 0:
            progress(number)
    if progress is not None and number % PROGRESS_TEXTS:
        progress(number)


def count_block(
    texts: Sequence[str], lowercase: bool, strip_accents: bool
) -> tuple[Counter[str], int]:
    """Return the counts of the words of some texts, and the number of words that were too long."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(split_words(text, lowercase=lowercase, strip_accents=strip_accents))
    too_long = [word for word in counts if len(word) > MAX_WORD_CHARACTERS["google"]]
    return counts, sum(counts.pop(word) for word in too_long)


def counted_blocks(
    blocks: Iterable[list[str]], lowercase: bool, strip_accents: bool, workers: int
) -> Iterator[tuple[Counter[str], int]]:
    """Yield `count_block` of each block, in order, on worker processes if there is enough to do."""
    rest = iter(blocks)
    first = list(islice(rest, 2))
    count = workers if len(first) > 1 else 0
    work = partial(count_block, lowercase=lowercase, strip_accents=strip_accents)
    with Workers(work, count, command="learn", flag="--processes") as pool:
        for _, found in pool.run(chain(first, rest)):
            yield found


def drop_rarest(counts: Counter[str], keep: int, skipped: Counter[str]) -> None:
    """Keep the `keep` most frequent words; ties go to the first in the alphabet."""
    ranked = sorted(counts, key=lambda word: (-counts[word], word))
    for word in ranked[keep:]:
        skipped[PRUNED] += counts.pop(word)
    skipped[PRUNED_WORDS] += len(ranked) - keep


def smoothing_weights(words: Sequence[int], smoothing: float) -> list[float]:
    """Return the weight of each source's counts, by exponential smoothing.

    As in multilingual BERT: a source with the share p of all words gets the share p**S, divided by
    the sum of these over the sources. S is above 0 and at most 1, which keeps every share; near 0
    they become equal. The total number of words does not change.

    Raises:
        BertkitError: S is out of range, or a source is empty or the only one (unless S is 1).
    """
    if not 0 < smoothing <= 1:
        raise BertkitError(
            f"smoothing is {smoothing}; it must be above 0 and at most 1, which means no smoothing"
        )
    if smoothing == 1:
        return [1.0] * len(words)
    if len(words) < 2:
        raise BertkitError(
            "smoothing weighs sources against each other, but only one was given; give one path "
            "for each language, or leave smoothing at 1"
        )
    if min(words) < 1:
        raise BertkitError(f"source {1 + list(words).index(0)} of {len(words)} holds no words")
    shares = [count / sum(words) for count in words]
    total = fsum(share**smoothing for share in shares)
    return [share**smoothing / total / share for share in shares]


def weigh_counts(
    tables: Sequence[Counter[str]], weights: Sequence[float], skipped: Counter[str]
) -> Counter[str]:
    """Return one table of all sources: each count times its source's weight, rounded."""
    counts: Counter[str] = Counter()
    for table, weight in zip(tables, weights, strict=True):
        for word, count in table.items():
            weighted = int(count * weight + 0.5)
            if weighted:
                counts[word] += weighted
            else:
                skipped[ROUNDED_AWAY] += 1
    return counts
