"""Split raw text into BERT's words by the rules of Google's `BasicTokenizer` (BERT, section 3).

The order of the steps matters; it is that of google-research/bert `tokenization.py`:

1. drop U+0000, U+FFFD and characters of category Cc or Cf; tab, line feed, carriage return and
   category Zs become spaces;
2. put spaces around CJK ideographs (eight blocks; neither Hangul nor Kana);
3. lower-case, if the model is uncased;
4. decompose to NFD and drop category Mn, if accents are stripped (by default: if uncased);
5. put spaces around punctuation: every ASCII symbol, and category P;
6. split at white space.

Each step treats every character independently, with two exceptions: `str.lower` reads the context
of a capital sigma, and NFD orders combining marks. Neither reads across white space, so one pass
over a whole text equals Google's word-by-word one. Steps 1-2 and 4-5 are `str.translate` tables
that fill on demand. The categories are those of the running Python's `unicodedata`, as in Google's
code.

`unicodedata.normalize` takes quadratic time for a run of marks. Here a table decomposes characters;
runs are sorted only in a text with a mark that step 4 keeps.
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

KEPT = "\0"  # follows a mark that step 4 keeps and NFD orders; step 1 drops NULs of the text
COMBINING = range(0x20000)  # no code point above this has a combining class
MAX_TABLE_CHARACTERS = 1 << 16  # entries of a table; about 15 MB

Sourced = tuple[str, int]
"""A character and the index in the raw text of the character it came from."""


class AlignedWord(NamedTuple):
    """A normalised word, with the half-open raw span of each of its characters."""

    text: str
    starts: Sequence[int]
    ends: Sequence[int]


class CharacterTable(dict[int, str | None]):
    """A `str.translate` table that calls `rule` for each new code point and caches the result."""

    def __init__(self, rule: Callable[[str], str | None]) -> None:
        super().__init__()
        self.rule = rule

    def __missing__(self, code_point: int) -> str | None:
        if len(self) >= MAX_TABLE_CHARACTERS:
            self.clear()
        self[code_point] = replacement = self.rule(chr(code_point))
        return replacement


def clean_text(character: str) -> str | None:
    """Apply steps 1 and 2: return the character, a space, " ideograph ", or None to drop it."""
    category = unicodedata.category(character)
    if character in "\t\n\r" or category == "Zs":
        return " "
    if character in "\x00\ufffd" or category in ("Cc", "Cf"):
        return None
    return f" {character} " if is_cjk(character) else character


def is_cjk(character: str) -> bool:
    """Return whether step 2 makes the character a separate word."""
    return any(ord(character) in block for block in CJK_BLOCKS)


def is_punctuation(character: str) -> bool:
    """Return whether step 5 makes the character a separate word; Google includes `$`, `^` etc."""
    return character in ASCII_SYMBOLS or unicodedata.category(character).startswith("P")


def split_punctuation(character: str) -> str:
    """Apply step 5 to a character."""
    return f" {character} " if is_punctuation(character) else character


def strip_and_split(character: str) -> str:
    """Apply steps 4 and 5 to one character, with KEPT after each mark that NFD may reorder."""
    decomposed = unicodedata.normalize("NFD", character)
    letters = (one for one in decomposed if unicodedata.category(one) != "Mn")
    return "".join(
        letter + KEPT if unicodedata.combining(letter) else split_punctuation(letter)
        for letter in letters
    )


FINAL_SIGMA = "\u03a3"  # the one character whose lower case depends on others
CLEAN = CharacterTable(clean_text)
SPLIT = CharacterTable(split_punctuation)
DECOMPOSE = CharacterTable(partial(unicodedata.normalize, "NFD"))
STRIP_AND_SPLIT = CharacterTable(strip_and_split)


def split_words(text: str, *, lowercase: bool, strip_accents: bool) -> list[str]:
    """Return a text's words after steps 1-6: each a punctuation mark, an ideograph or a run."""
    text = text.translate(CLEAN)
    if lowercase:
        text = text.lower()
    if not strip_accents:
        return text.translate(SPLIT).split()
    stripped = text.translate(STRIP_AND_SPLIT)
    if KEPT in stripped:
        stripped = decompose(text).translate(STRIP_AND_SPLIT).replace(KEPT, "")
    return stripped.split()


def character_rule(character: str, *, lowercase: bool, strip_accents: bool) -> str | None:
    """Return what `split_words` makes of a character in any text, with a space where a word ends.

    Returns None for the few characters that other characters change.
    """
    text = character.translate(CLEAN)
    if lowercase:
        text = text.lower()
    text = text.translate(STRIP_AND_SPLIT if strip_accents else SPLIT)
    if KEPT in text or (lowercase and character == FINAL_SIGMA):
        return None
    return "".join(" " if one.isspace() else one for one in text)


def decompose(text: str) -> str:
    """Compute `unicodedata.normalize("NFD", text)` in linear time even for long runs of marks."""
    by_class = partial(sorted, key=unicodedata.combining)
    return marks().sub(lambda run: "".join(by_class(run[0])), text.translate(DECOMPOSE))


@cache
def marks() -> re.Pattern[str]:
    """Return the pattern of a run of characters that NFD sorts by combining class."""
    return re.compile(f"[{''.join(filter(unicodedata.combining, map(chr, COMBINING)))}]+")


def align_words(text: str, *, lowercase: bool, strip_accents: bool) -> Iterator[AlignedWord]:
    """Yield the words of `split_words`, each character with its half-open span in the raw text.

    Dropped characters belong to no span unless they are inside a word's. If one raw character
    becomes several (a Hangul syllable decomposes into its letters), all of them have its span.
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
    """Apply steps 1-5 to the characters of one chunk and keep the source of each."""
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
    """Replace each character by the result of `rule`, whose characters all keep its source."""
    return [(new, source) for character, source in characters for new in rule(character)]


def canonical_order(characters: Iterable[Sourced]) -> Iterator[Sourced]:
    """Sort runs of combining marks by combining class, as NFD does (a stable sort).

    Sources do not move with marks that change positions, so that spans stay in text order.
    """
    for _, run in groupby(characters, lambda sourced: unicodedata.combining(sourced[0]) > 0):
        letters, sources = zip(*run, strict=True)
        yield from zip(sorted(letters, key=unicodedata.combining), sources, strict=True)


def group_words(characters: Iterable[Sourced]) -> Iterator[AlignedWord]:
    """Apply step 6: group characters with sources into words at white space."""
    for is_space, run in groupby(characters, lambda sourced: sourced[0].isspace()):
        if not is_space:
            word, sources = zip(*run, strict=True)
            yield AlignedWord("".join(word), sources, [source + 1 for source in sources])


def replace_surrogates(text: str) -> str:
    """Replace lone surrogates (JSON can hold them), which no library accepts as text, by U+FFFD."""
    return text if text.isascii() else SURROGATE.sub("\ufffd", text)
