"""Running text → words for a tagger, which was trained on words (paper section 5.3).

Data sets of tagged words are cut by rules of their own; these are close to CoNLL's. A mark stays
with its letter, and an ideograph is a word, as it is for BERT's tokenizer. Other text without
spaces between words, such as Thai, is not divided: give its words.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from functools import cache
from itertools import chain

from bertkit.datasets.examples import joined
from bertkit.tokenizer.normalize import IDEOGRAPHS

JOINERS = "\u200c\u200d"
PREFIXES = "\u0600\u0601\u0602\u0603\u0604\u0605\u06dd\u070f\u0890\u0891\u08e2\U000110bd\U000110cd"
"""Signs that enclose or precede numbers and words; Unicode counts them with what is not seen."""
SEEN = JOINERS + PREFIXES
ZERO_WIDTH_SPACE = "\u200b"
"""Divides words where nothing visible does, as in Khmer."""


@cache
def word_pattern() -> re.Pattern[str]:
    """Words of running text: "U.N.", "3.5", "AT&T" and "part-time" are one word each.

    It is made when it is first asked for: only taggers need it, and Unicode has many marks.
    """
    codes = map(chr, chain(range(0x20000), range(0xE0000, 0xE01F0)))  # the others hold neither
    kinds = [(sign, unicodedata.category(sign)) for sign in codes]
    mark = "".join(sign for sign, kind in kinds if kind.startswith("M"))
    # what nobody sees, such as soft hyphens and marks of direction: within words, and else nothing
    unseen = "".join(sign for sign, kind in kinds if kind == "Cf" and sign not in SEEN)
    within = unseen.replace(ZERO_WIDTH_SPACE, "")
    # with the joiners that stand within words of Persian and of Indian languages
    letter = rf"(?:[^\W{IDEOGRAPHS}]|[{mark}{JOINERS}])"
    letters = rf"{letter}+(?:[{within}]+{letter}+)*"
    # a pair of regional letters is a flag
    symbol = rf"(?:[\U0001f1e6-\U0001f1ff]{{2}}|[^\w\s{unseen}])"
    return re.compile(
        rf"(?:[^\W\d_{IDEOGRAPHS}]\.){{2,}}|[{IDEOGRAPHS}][{mark}]*"
        rf"|{letters}(?:[.,'’&/-]{letters})*"
        rf"|{symbol}(?:[{mark}\U0001f3fb-\U0001f3ff\U000e0020-\U000e007f]|\u200d{symbol})*"
    )


def split_words_with_offsets(given: str | Sequence[str]) -> tuple[str, list[tuple[int, int]]]:
    """A text and where its words stand: those of running text, or given ones joined by spaces."""
    if isinstance(given, str):
        return given, [match.span() for match in word_pattern().finditer(given)]
    return joined(given)
