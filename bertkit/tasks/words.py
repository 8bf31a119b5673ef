"""Splits raw text into words for a tagger, which was trained on words (paper section 5.3).

Each data set of tagged words has its own splitting rules; these are close to CoNLL's. A combining
mark stays with its letter, and an ideograph is a word, as in BERT's tokenizer. Other scripts
without spaces between words, such as Thai, are not split: pass a list of words instead.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from functools import cache
from itertools import accumulate, chain

from bertkit.tasks.entities import WordsExample
from bertkit.tokenizer.normalize import IDEOGRAPHS

JOINERS = "\u200c\u200d"
PREFIXES = "\u0600\u0601\u0602\u0603\u0604\u0605\u06dd\u070f\u0890\u0891\u08e2\U000110bd\U000110cd"
"""Signs that enclose or precede numbers and words, although Unicode classes them as format (Cf)."""
ZERO_WIDTH_SPACE = "\u200b"
"""Separates words that have no visible space between them, as in Khmer."""


@cache
def word_pattern() -> re.Pattern[str]:
    """Return the pattern of a word: "U.N.", "3.5", "AT&T" and "part-time" are one word each.

    It is compiled on first use, because only taggers need it and Unicode has many marks.
    """
    codes = map(chr, chain(range(0x20000), range(0xE0000, 0xE01F0)))  # others: no marks, no Cf
    kinds = [(sign, unicodedata.category(sign)) for sign in codes]
    mark = "".join(sign for sign, kind in kinds if kind.startswith("M"))
    # Invisible characters, such as soft hyphens and direction marks, only belong within words.
    visible = JOINERS + PREFIXES
    unseen = "".join(sign for sign, kind in kinds if kind == "Cf" and sign not in visible)
    within = unseen.replace(ZERO_WIDTH_SPACE, "")
    # Joiners occur within words of Persian and of Indian languages.
    letter = rf"(?:[^\W{IDEOGRAPHS}]|[{mark}{JOINERS}])"
    letters = rf"{letter}+(?:[{within}]+{letter}+)*"
    # A pair of regional indicators is a flag.
    symbol = rf"(?:[\U0001f1e6-\U0001f1ff]{{2}}|[^\w\s{unseen}])"
    return re.compile(
        rf"(?:[^\W\d_{IDEOGRAPHS}]\.){{2,}}|[{IDEOGRAPHS}][{mark}]*"
        rf"|{letters}(?:[.,'’&/-]{letters})*"
        rf"|{symbol}(?:[{mark}\U0001f3fb-\U0001f3ff\U000e0020-\U000e007f]|\u200d{symbol})*"
    )


def words_example(
    id: str,  # noqa: A002
    text_or_words: str | Sequence[str],
    document: str,
    location: str,
) -> WordsExample:
    """Return the untagged example of a text that is split here, or of words joined by spaces."""
    if isinstance(text_or_words, str):
        text, spans = text_or_words, [m.span() for m in word_pattern().finditer(text_or_words)]
    else:
        text, spans = joined(text_or_words)
    words = tuple(text[start:end] for start, end in spans)
    return WordsExample(id, words, None, document, location, text, tuple(spans))


def joined(words: Sequence[str]) -> tuple[str, list[tuple[int, int]]]:
    """Join words by spaces; return the text and the half-open character span of each word."""
    ends = list(accumulate(len(word) + 1 for word in words))
    spans = [(end - len(word) - 1, end - 1) for word, end in zip(words, ends, strict=True)]
    return " ".join(words), spans
