"""Text → words → pieces, with every step on the way (paper section 3).

The steps of `bertkit/tokens/normalize.py` one by one, and the greedy matching of WordPiece (Wu et
al. 2016) with all that it tried. What the tokenizer does at once is taken apart here; a test holds
the two against each other.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Collection
from typing import NamedTuple

from bertkit.tokens.normalize import CLEAN, SPLIT, align_words, clean, is_cjk
from bertkit.tokens.tokenizer import SPECIAL_TOKENS, Encoding, Tokenizer
from bertkit.tokens.vocabulary import CONTINUATION

SAME = "nothing to do"
"""The remark of a step that changes nothing."""


class Stage(NamedTuple):
    """A text after one step of normalisation."""

    name: str
    text: str
    remark: str
    """What the step did, or why it did nothing."""


class Match(NamedTuple):
    """One piece of a word: what was tried, longest first, before it fitted."""

    piece: str
    """"" where nothing fitted."""
    tried: tuple[str, ...]


class Cut(NamedTuple):
    """A normalised word and its pieces."""

    word: str
    start: int
    """Its half-open span of characters in the raw text."""
    end: int
    pieces: tuple[str, ...]
    """As the tokenizer gives them."""
    matches: tuple[Match, ...]
    """How they were found; empty where the word is longer than the tokenizer takes."""


def normalisation(text: str, tokenizer: Tokenizer) -> list[Stage]:
    """A text after each step of `normalize.py`; the words of the last one stand between spaces."""
    cleaned = "".join(char if is_cjk(char) else clean(char) or "" for char in text)
    stages = [Stage("raw", text, f"{len(text):,} characters")]

    def step(name: str, new: str, unused: str = "") -> None:
        old = stages[-1].text
        stages.append(Stage(name, new, unused or ("changed" if new != old else SAME)))

    step("cleaned", cleaned)
    step("ideographs apart", cleaned.translate(CLEAN))
    current = stages[-1].text
    if tokenizer.lowercase:
        step("lower-cased", current.lower())
    else:
        step("lower-cased", current, "not done: the model is cased")
    current = stages[-1].text
    if tokenizer.strip_accents:
        decomposed = unicodedata.normalize("NFD", current)
        step("accents off", "".join(c for c in decomposed if unicodedata.category(c) != "Mn"))
    else:
        step("accents off", current, "not done: the model keeps accents")
    words = stages[-1].text.translate(SPLIT).split()
    remark = f"{len(words):,} words"
    if tokenizer.compat == "hf":
        remark += " (this model is read by transformers' rules, which differ on rare characters)"
    stages.append(Stage("split", " ".join(words), remark))
    return stages


def cuts(text: str, encoding: Encoding, tokenizer: Tokenizer) -> list[Cut]:
    """The words of an encoded text, each with its pieces and how they were found."""
    known = set(tokenizer.vocabulary)
    aligned = align_words(
        text, lowercase=tokenizer.lowercase, strip_accents=tokenizer.strip_accents
    )
    words = {(word.starts[0], word.ends[-1]): word.text for word in aligned}
    groups: list[list[int]] = []
    for index, piece in enumerate(encoding.pieces):
        if groups and piece.startswith(CONTINUATION) and piece != CONTINUATION:
            groups[-1].append(index)
        else:
            groups.append([index])
    found = []
    for group in groups:
        pieces = tuple(encoding.pieces[index] for index in group)
        span = encoding.offsets[group[0]][0], encoding.offsets[group[-1]][1]
        unknown = pieces == (SPECIAL_TOKENS[1],)
        word = words.get(span, text[slice(*span)]) if unknown else joined(pieces)
        whole = pieces[0] in SPECIAL_TOKENS and not unknown  # "hf" keeps "[SEP]" in a text whole
        matches = () if whole else match(word, known, tokenizer.max_word_characters)
        found.append(Cut(word, *span, pieces, matches))
    return found


def joined(pieces: tuple[str, ...]) -> str:
    """The word that pieces make."""
    return pieces[0] + "".join(piece.removeprefix(CONTINUATION) for piece in pieces[1:])


def match(word: str, vocabulary: Collection[str], longest: int) -> tuple[Match, ...]:
    """Greedy longest match first; the last one is empty where the word has no pieces.

    Args:
        word: normalised.
        vocabulary: all pieces.
        longest: characters; a longer word is not tried at all.
    """
    matches: list[Match] = []
    begin = 0
    while begin < len(word) <= longest:
        prefix, tried = CONTINUATION if begin else "", []
        for end in range(len(word), begin, -1):
            candidate = prefix + word[begin:end]
            if candidate in vocabulary:
                break
            tried.append(candidate)
        else:
            return (*matches, Match("", tuple(tried)))
        matches.append(Match(candidate, tuple(tried)))
        begin = end
    return tuple(matches)


def visible(text: str) -> str:
    r"""Text with what cannot be seen or printed written out, such as \\n, \\xa0 or \\u200b."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )
