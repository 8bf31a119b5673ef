"""Texts → how often each normalised word occurs: all that learning a vocabulary needs of a corpus.

Texts are dealt in blocks, one after the other, and the counts of the blocks are added in the same
order, so that any number of processes gives the same table, words dropped from it included.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, islice
from math import fsum

from bertkit.errors import BertkitError
from bertkit.processes import Workers
from bertkit.text.lines import cut_blocks
from bertkit.tokenizer.files import MAX_WORD_CHARACTERS
from bertkit.tokenizer.normalize import IDEOGRAPHS, WHITESPACE, split_words

PROGRESS_TEXTS = 1_000
BLOCK_CHARACTERS = 1_000_000
BETWEEN_WORDS = re.compile(f"[{WHITESPACE}{IDEOGRAPHS}]")
KEPT_SHARE = 0.75
"""Of `max_distinct_words`, after the rarest words are dropped, so that they are sorted seldom."""

TOO_LONG = f"word of more than {MAX_WORD_CHARACTERS['google']} characters"
PRUNED_WORDS = "rare word dropped (word_limit)"
PRUNED = "occurrence of a rare word dropped (word_limit)"
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
    """How often each normalised word occurs; words above Google's 200 characters are left out.

    Args:
        texts: read once, in the calling process.
        lowercase: count uncased words.
        strip_accents: count words without accents; by default what `lowercase` is, as in BERT.
        progress: called with the number of texts read so far, every 1,000 texts and at the end.
        processes: how many count; the result is the same for any number. Text of one block of a
            million characters is counted here.
        max_distinct_words: bounds memory: whenever the table has more distinct words after a block,
            the rarest are dropped (of equals the later in the alphabet) down to three quarters of
            the limit. A word that was dropped and comes back is counted from 0, so the counts of
            rare words are then too low. None keeps every word.
        skipped: is brought up to date with what was left out, by reason.

    Raises:
        BertkitError: a number is below 1, or a counting process died.
    """
    if processes < 1 or (max_distinct_words is not None and max_distinct_words < 1):
        raise BertkitError(
            f"counting needs at least 1 process and a word_limit of at least 1; got {processes} "
            f"and {max_distinct_words}"
        )
    lost: Counter[str] = Counter() if skipped is None else skipped
    counts: Counter[str] = Counter()
    parts = (cut_text(text, BLOCK_CHARACTERS) for text in watched(texts, progress))
    blocks = cut_blocks(chain.from_iterable(parts), BLOCK_CHARACTERS)
    accents_off = lowercase if strip_accents is None else strip_accents
    for found, long_words in counted_blocks(blocks, lowercase, accents_off, processes):
        counts.update(found)
        if long_words:
            lost[TOO_LONG] += long_words
        if max_distinct_words is not None and len(counts) > max_distinct_words:
            drop_rarest(counts, max(1, int(KEPT_SHARE * max_distinct_words)), lost)
    return counts


def cut_text(text: str, characters: int) -> Iterator[str]:
    """A text in parts of about so many characters that together have the words of the whole."""
    start = 0
    while cut := BETWEEN_WORDS.search(text, start + characters):
        yield text[start : cut.end()]
        start = cut.end()
    yield text[start:]


def watched(texts: Iterable[str], progress: Callable[[int], None] | None) -> Iterator[str]:
    """The same texts; `progress` is told how many went by."""
    number = 0
    for number, text in enumerate(texts, start=1):
        yield text
        if progress is not None and number % PROGRESS_TEXTS == 0:
            progress(number)
    if progress is not None and number % PROGRESS_TEXTS:
        progress(number)


def count_block(
    texts: Sequence[str], lowercase: bool, strip_accents: bool
) -> tuple[Counter[str], int]:
    """The words of some texts, and how many were too long."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(split_words(text, lowercase=lowercase, strip_accents=strip_accents))
    too_long = [word for word in counts if len(word) > MAX_WORD_CHARACTERS["google"]]
    return counts, sum(counts.pop(word) for word in too_long)


def counted_blocks(
    blocks: Iterable[list[str]], lowercase: bool, strip_accents: bool, processes: int
) -> Iterator[tuple[Counter[str], int]]:
    """`count_block` of each block, in order, on worker processes where there is enough to do."""
    rest = iter(blocks)
    first = list(islice(rest, 2))
    every = chain(first, rest)
    if processes == 1 or len(first) < 2:
        for block in every:
            yield count_block(block, lowercase, strip_accents)
        return
    work = partial(count_block, lowercase=lowercase, strip_accents=strip_accents)
    with Workers(work, processes, command="learn", flag="--processes") as workers:
        for _, found in workers.run(every):
            yield found


def drop_rarest(counts: Counter[str], keep: int, skipped: Counter[str]) -> None:
    """Keep the most frequent words; of equals those that come first in the alphabet."""
    ranked = sorted(counts, key=lambda word: (-counts[word], word))
    for word in ranked[keep:]:
        skipped[PRUNED] += counts.pop(word)
    skipped[PRUNED_WORDS] += len(ranked) - keep


def smoothing_weights(words: Sequence[int], smoothing: float) -> list[float]:
    """What the counts of each source are multiplied with, by exponential smoothing.

    As in multilingual BERT: a source with the share p of all words gets the share p**S, divided by
    the sum of these over the sources. The number of words in all stays.

    Args:
        words: how many words each source has.
        smoothing: S, above 0; 1 leaves every share as it is, towards 0 they become equal.

    Raises:
        BertkitError: S is out of range, or a source is empty or the only one (unless S is 1).
    """
    if not 0 < smoothing <= 1:
        raise BertkitError(f"smoothing is {smoothing}; it must be above 0 and at most 1 (none)")
    if smoothing == 1:
        return [1.0] * len(words)
    if len(words) < 2:
        raise BertkitError(
            "smoothing weighs sources against each other, but only one was named; name one path "
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
    """One table of all sources, each count times the weight of its source, rounded to a whole.

    Args:
        tables: the words of each source.
        weights: see `smoothing_weights`.
        skipped: is brought up to date with the words that rounding removes.
    """
    counts: Counter[str] = Counter()
    for table, weight in zip(tables, weights, strict=True):
        for word, count in table.items():
            weighted = int(count * weight + 0.5)
            if weighted:
                counts[word] += weighted
            else:
                skipped[ROUNDED_AWAY] += 1
    return counts
