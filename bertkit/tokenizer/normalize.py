"""Split raw text into BERT's words by the rules of transformers' `BertTokenizer` (BERT, section 3).

The `tokenizers` library defines the rules: control characters are dropped, accents are stripped and
letters are lower-cased if the model is uncased, and white space, punctuation and ideographs end a
word. It treats each character independently, except that it orders combining marks. So a table of
what becomes of each character, which asks the library once for each, splits whole texts quickly;
a text with a mark whose order matters is left to the library.
"""

from __future__ import annotations

import re
from functools import cache
from unicodedata import combining

from tokenizers import normalizers, pre_tokenizers

CJK_BLOCKS = (
    *((0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF), (0x20000, 0x2A6DF)),
    *((0x2A700, 0x2B73F), (0x2B740, 0x2B81F), (0x2B820, 0x2CEAF), (0x2F800, 0x2FA1F)),
)
WHITESPACE = "\t\n\r \u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
IDEOGRAPHS = "".join(f"{chr(first)}-{chr(last)}" for first, last in CJK_BLOCKS)
MAX_TABLE_CHARACTERS = 1 << 16  # entries of a table; about 15 MB
SURROGATE = re.compile("[\ud800-\udfff]")
IN_CONTEXT = "\0"
"""Marks a character that others change; no rule produces U+0000."""


@cache
def bert_normalizer(lowercase: bool, strip_accents: bool) -> normalizers.BertNormalizer:
    """Return the library's normalizer with these settings."""
    return normalizers.BertNormalizer(lowercase=lowercase, strip_accents=strip_accents)


def character_rule(character: str, lowercase: bool, strip_accents: bool) -> str | None:
    """Return what becomes of a character in any text, with a space where a word ends.

    Returns None for the few characters whose order in a run of marks matters.
    """
    if "\ud800" <= character <= "\udfff":  # half of a pair, which the library does not take
        return ""
    normal = bert_normalizer(lowercase, strip_accents).normalize_str(character)
    if strip_accents and any(map(combining, normal)):
        return None
    words = pre_tokenizers.BertPreTokenizer().pre_tokenize_str(f"a{normal}a")
    return " ".join(word for word, _ in words)[1:-1]


class CharacterTable(dict[int, str]):
    """A `str.translate` table of the rules of characters, which are computed when they occur."""

    def __init__(self, lowercase: bool, strip_accents: bool) -> None:
        super().__init__()
        self.settings = lowercase, strip_accents

    def __missing__(self, code_point: int) -> str:
        if len(self) >= MAX_TABLE_CHARACTERS:
            self.clear()
        rule = character_rule(chr(code_point), *self.settings)
        self[code_point] = rule = IN_CONTEXT if rule is None else rule
        return rule


character_table = cache(CharacterTable)


def split_words(text: str, *, lowercase: bool, strip_accents: bool) -> list[str]:
    """Return the words of a text: each a punctuation mark, an ideograph or a run of letters."""
    split = text.translate(character_table(lowercase, strip_accents))
    if IN_CONTEXT not in split:
        return split.split()
    normal = bert_normalizer(lowercase, strip_accents).normalize_str(without_surrogates(text))
    return [word for word, _ in pre_tokenizers.BertPreTokenizer().pre_tokenize_str(normal)]


def without_surrogates(text: str) -> str:
    """Return a text with U+FFFD, which normalization drops, in place of half surrogate pairs."""
    return text if text.isascii() else SURROGATE.sub("\ufffd", text)


def stands_alone(letter: str) -> bool:
    """Return whether a character is always a word by itself, so that it has no "##" form."""
    rule = character_rule(letter, lowercase=False, strip_accents=False)
    return rule is not None and rule.startswith(" ")
