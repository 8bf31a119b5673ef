"""Splits raw text into words for a tagger, which was trained on words (paper section 5.3).

Every data set of tagged words has its own splitting rules; these are close to CoNLL's. A combining
mark stays with its letter, and an ideograph is a word, as in BERT's tokenizer. Other scripts
without spaces between words, such as Thai, are not split: pass a list of words instead.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from functools import cache
from itertools import chain

from bertkit.datasets.examples import WordsExample, joined
from bertkit.tokenizer.normalize import IDEOGRAPHS

JOINERS = "\u200c\u200d"
PREFIXES = "\u0600\u0601\u0602\u0603\u0604\u0605\u06dd\u070f\u0890\u0891\u08e2\U000110bd\U000110cd"
"""Signs that enclose or precede numbers and words, although Unicode classes them as format (Cf)."""
SEEN = JOINERS + PREFIXES
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
    unseen = "".join(sign for sign, kind in kinds if kind == "Cf" and sign not in SEEN)
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


def split_words_with_offsets(given: str | Sequence[str]) -> tuple[str, list[tuple[int, int]]]:
    """Return a text and the spans of its words; given words are first joined by spaces."""
    if isinstance(given, str):
        return given, [match.span() for match in word_pattern().finditer(given)]
    return joined(given)


def words_example(name: str, given: str | Sequence[str], document: int, place: str) -> WordsExample:
    """Return the example, without tags, of a text that is split here, or of given words."""
    text, spans = split_words_with_offsets(given)
    words = tuple(text[start:end] for start, end in spans)
    return WordsExample(name, words, None, document, place, text, tuple(spans))
