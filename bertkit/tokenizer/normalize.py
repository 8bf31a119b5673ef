"""From raw text to BERT's words: the rules of Google's `BasicTokenizer` (BERT paper, section 3).

The order of the steps matters and is the one of google-research/bert `tokenization.py`:

1. drop U+0000, U+FFFD and characters of category Cc or Cf; tab, line feed, carriage return and
   category Zs become spaces;
2. put spaces around CJK ideographs (eight blocks; neither Hangul nor Kana);
3. lower-case, where the model is uncased;
4. decompose to NFD and drop category Mn, where accents are stripped (by default: when uncased);
5. put spaces around punctuation: every ASCII symbol, and category P;
6. split at white space.

Each step treats a character on its own, but for two: `str.lower` looks around a capital sigma, and
NFD orders combining marks. Neither looks across white space, so one pass over a whole text equals
Google's word-by-word one. Steps 1-2 and 4-5 are `str.translate` tables that fill on demand.
The categories are those of the running Python's `unicodedata`, as they were for Google's code.

`unicodedata.normalize` takes quadratic time for a run of marks. Here a table decomposes characters,
and runs are sorted, which only a text with a mark that step 4 keeps needs.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from itertools import groupby
from typing import NamedTuple

CJK_BLOCKS = (
    range(0x4E00, 0xA000),  # CJK unified ideographs
    range(0x3400, 0x4DC0),  # extension A
    range(0x20000, 0x2A6E0),  # extension B
    range(0x2A700, 0x2B740),  # extension C
    range(0x2B740, 0x2B820),  # extension D
    range(0x2B820, 0x2CEB0),  # extension E
    range(0xF900, 0xFB00),  # compatibility ideographs
    range(0x2F800, 0x2FA20),  # compatibility ideographs, supplement
)
ASCII_SYMBOLS = frozenset("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~")

# Tab, line feed, carriage return, category Zs, and the two separators at which str.split splits.
WHITESPACE = "\t\n\r \u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
CHUNK = re.compile(f"[^{WHITESPACE}]+")
IDEOGRAPHS = "".join(f"{chr(block.start)}-{chr(block.stop - 1)}" for block in CJK_BLOCKS)
ASCII_WORD = re.compile("[0-9A-Za-z]+|[^0-9A-Za-z]")  # within a printable ASCII chunk

SURROGATE = re.compile("[\ud800-\udfff]")

KEPT = "\0"  # behind a mark that step 4 keeps and NFD orders; step 1 drops the text's own
COMBINING = range(0x20000)  # no code point above has a combining class
MAX_TABLE_CHARACTERS = 1 << 16  # of a table; about 15 MB

Sourced = tuple[str, int]
"""A character and the index in the raw text of the character it came from."""


class AlignedWord(NamedTuple):
    """A normalised word and, for each of its characters, the raw span that it came from."""

    text: str
    starts: Sequence[int]
    ends: Sequence[int]


class CharacterTable(dict[int, str | None]):
    """A table for `str.translate` that asks `rule` about each code point and then remembers it."""

    def __init__(self, rule: Callable[[str], str | None]) -> None:
        super().__init__()
        self.rule = rule

    def __missing__(self, code_point: int) -> str | None:
        if len(self) >= MAX_TABLE_CHARACTERS:
            self.clear()
        self[code_point] = replacement = self.rule(chr(code_point))
        return replacement


def clean_text(character: str) -> str | None:
    """Steps 1 and 2: the character, a space, the ideograph between spaces, or None to drop it."""
    category = unicodedata.category(character)
    if character in "\t\n\r" or category == "Zs":
        return " "
    if character in "\x00\ufffd" or category in ("Cc", "Cf"):
        return None
    return f" {character} " if is_cjk(character) else character


def is_cjk(character: str) -> bool:
    """Whether step 2 makes a word of the character."""
    return any(ord(character) in block for block in CJK_BLOCKS)


def is_punctuation(character: str) -> bool:
    """Whether step 5 makes a word of the character; `$`, `^` and the like count, as in Google's."""
    return character in ASCII_SYMBOLS or unicodedata.category(character).startswith("P")


def split_punctuation(character: str) -> str:
    """Step 5."""
    return f" {character} " if is_punctuation(character) else character


def strip_and_split(character: str) -> str:
    """Steps 4 and 5 for a character on its own, with KEPT behind each mark that NFD may move."""
    decomposed = unicodedata.normalize("NFD", character)
    letters = (one for one in decomposed if unicodedata.category(one) != "Mn")
    return "".join(
        letter + KEPT if unicodedata.combining(letter) else split_punctuation(letter)
        for letter in letters
    )


CLEAN = CharacterTable(clean_text)
SPLIT = CharacterTable(split_punctuation)
DECOMPOSE = CharacterTable(partial(unicodedata.normalize, "NFD"))
STRIP_AND_SPLIT = CharacterTable(strip_and_split)


def split_words(text: str, *, lowercase: bool, strip_accents: bool) -> list[str]:
    """The words of a text after steps 1-6, each a piece of punctuation, an ideograph or a run."""
    text = text.translate(CLEAN)
    if lowercase:
        text = text.lower()
    if not strip_accents:
        return text.translate(SPLIT).split()
    stripped = text.translate(STRIP_AND_SPLIT)
    if KEPT in stripped:
        stripped = decompose(text).translate(STRIP_AND_SPLIT).replace(KEPT, "")
    return stripped.split()


def decompose(text: str) -> str:
    """`unicodedata.normalize("NFD", text)` in linear time, however long its runs of marks are."""
    by_class = partial(sorted, key=unicodedata.combining)
    return marks().sub(lambda run: "".join(by_class(run[0])), text.translate(DECOMPOSE))


@cache
def marks() -> re.Pattern[str]:
    """A run of characters that NFD puts in the order of their combining classes."""
    return re.compile(f"[{''.join(filter(unicodedata.combining, map(chr, COMBINING)))}]+")


def align_words(text: str, *, lowercase: bool, strip_accents: bool) -> Iterator[AlignedWord]:
    """The words of `split_words`, each character with its half-open span in the raw text.

    Characters that are dropped belong to no span, unless they stand inside a word's. Where one raw
    character becomes several (a Hangul syllable decomposes into its letters), all have its span.
    """
    for chunk in CHUNK.finditer(text):
        raw, offset = chunk.group(), chunk.start()
        if raw.isascii() and raw.isprintable():
            for word in ASCII_WORD.finditer(raw.lower() if lowercase else raw):
                start, end = offset + word.start(), offset + word.end()
                yield AlignedWord(word.group(), range(start, end), range(start + 1, end + 1))
        else:
            characters = zip(raw, range(offset, offset + len(raw)), strict=True)
            followed = follow_offsets(characters, lowercase=lowercase, strip_accents=strip_accents)
            yield from group_words(followed)


def follow_offsets(
    characters: Iterable[Sourced], *, lowercase: bool, strip_accents: bool
) -> Iterable[Sourced]:
    """Take the characters of one chunk through steps 1-5, each with its source."""
    characters = expand(characters, lambda character: character.translate(CLEAN))
    if lowercase:
        # Only the whole chunk tells whether a sigma is final; either way it is one character.
        lowered = "".join(character for character, _ in characters).lower()
        sources = [source for character, source in characters for _ in character.lower()]
        characters = list(zip(lowered, sources, strict=True))
    if not strip_accents:
        return expand(characters, lambda character: character.translate(SPLIT))
    decomposed = expand(characters, lambda character: character.translate(DECOMPOSE))
    ordered = canonical_order(decomposed)
    return expand(ordered, lambda one: one.translate(STRIP_AND_SPLIT).replace(KEPT, ""))


def expand(characters: Iterable[Sourced], rule: Callable[[str], str]) -> list[Sourced]:
    """Replace each character by what `rule` makes of it; the source stays."""
    return [(new, source) for character, source in characters for new in rule(character)]


def canonical_order(characters: Iterable[Sourced]) -> Iterator[Sourced]:
    """Order runs of combining marks by combining class, as NFD orders them (a stable sort).

    Marks that change places leave their sources where they were, so that spans stay in text order.
    """
    for _, run in groupby(characters, lambda sourced: unicodedata.combining(sourced[0]) > 0):
        letters, sources = zip(*run, strict=True)
        yield from zip(sorted(letters, key=unicodedata.combining), sources, strict=True)


def group_words(characters: Iterable[Sourced]) -> Iterator[AlignedWord]:
    """Step 6 for characters with sources."""
    for is_space, run in groupby(characters, lambda sourced: sourced[0].isspace()):
        if not is_space:
            word, sources = zip(*run, strict=True)
            yield AlignedWord("".join(word), sources, [source + 1 for source in sources])


def replace_surrogates(text: str) -> str:
    """Put U+FFFD for lone surrogates (JSON can hold them), which no library takes as text."""
    return text if text.isascii() else SURROGATE.sub("\ufffd", text)
