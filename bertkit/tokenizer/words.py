"""Count how often each normalised word occurs: all that learning a vocabulary needs of a corpus.

Texts are dealt out in blocks, one after the other, and the counts of the blocks are added in the
same order, so that any number of workers gives the same table, including which words it drops.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor
from functools import partial
from itertools import chain
from math import fsum

from bertkit.errors import BertkitError, checked_texts
from bertkit.processes import map_in_order
from bertkit.text.documents import cut_blocks
from bertkit.tokenizer.files import IDEOGRAPHS, MAX_WORD_CHARACTERS, WHITESPACE, split_words

BLOCK_CHARACTERS = 1_000_000
BETWEEN_WORDS = re.compile(f"[{WHITESPACE}{IDEOGRAPHS}]")
KEPT_SHARE = 0.75
"""The share of `max_distinct_words` kept when rare words are dropped, so that sorting is rare."""

TOO_LONG = f"word of more than {MAX_WORD_CHARACTERS} characters"
PRUNED_WORDS = "rare word dropped (max_distinct_words)"
PRUNED = "occurrence of a rare word dropped (max_distinct_words)"
ROUNDED_AWAY = "rare word of a large source that smoothing rounds to none"


def count_words(
    texts: Iterable[str],
    *,
    lowercase: bool,
    strip_accents: bool | None = None,
    max_distinct_words: int | None = None,
    skipped: Counter[str] | None = None,
    executor: Executor | None = None,
) -> Counter[str]:
    """Count each normalised word; words that are too long for a tokenizer are left out.

    Args:
        texts: the texts to count, read once, in the calling process.
        lowercase: whether to count uncased words.
        strip_accents: whether to count words without accents; by default as `lowercase`, as in
            BERT.
        max_distinct_words: the limit that bounds memory. Whenever the table has more distinct words
            after a block, the rarest are dropped (of equals the later in the alphabet) until three
            quarters of the limit remain. A dropped word that occurs again is counted from 0, so the
            counts of rare words are then too low. None keeps every word.
        skipped: the counter to which is added what was left out, by reason.
        executor: the workers; None to count in this process. The result is the same.
    """
    if max_distinct_words is not None and max_distinct_words < 1:
        raise BertkitError(f"max_distinct_words must be at least 1, got {max_distinct_words}")
    lost: Counter[str] = Counter() if skipped is None else skipped
    counts: Counter[str] = Counter()
    parts = (cut_text(text, BLOCK_CHARACTERS) for text in checked_texts(texts))
    blocks = cut_blocks(chain.from_iterable(parts), BLOCK_CHARACTERS)
    accents = lowercase if strip_accents is None else strip_accents
    work = partial(count_block, lowercase=lowercase, strip_accents=accents)
    for counted, long_words in map_in_order(work, blocks, executor):
        counts.update(counted)
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


def count_block(
    texts: Sequence[str], lowercase: bool, strip_accents: bool
) -> tuple[Counter[str], int]:
    """Return the counts of the words of some texts, and the number of words that were too long."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(split_words(text, lowercase=lowercase, strip_accents=strip_accents))
    too_long = [word for word in counts if len(word) > MAX_WORD_CHARACTERS]
    return counts, sum(counts.pop(word) for word in too_long)


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
    """
    if not 0 < smoothing <= 1:
        raise BertkitError(f"smoothing is {smoothing}; it must be above 0 and at most 1 (none)")
    if smoothing < 1 and (len(words) < 2 or min(words) < 1):
        raise BertkitError("smoothing needs several paths, one for each language, that have words")
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
