"""A slow, plain statement of Google's BERT tokenizer, one function per step, to test against.

Written from the rules (field notes T1-T4), not from bertkit: it walks characters and words one at a
time, keeps no tables and no caches, and uses nothing but `unicodedata`.
"""

from __future__ import annotations

import unicodedata


def is_whitespace(character: str) -> bool:
    return character in (" ", "\t", "\n", "\r") or unicodedata.category(character) == "Zs"


def is_control(character: str) -> bool:
    if character in ("\t", "\n", "\r"):
        return False
    return unicodedata.category(character) in ("Cc", "Cf")


def is_punctuation(character: str) -> bool:
    code = ord(character)
    if 33 <= code <= 47 or 58 <= code <= 64 or 91 <= code <= 96 or 123 <= code <= 126:
        return True
    return unicodedata.category(character)[0] == "P"


def is_cjk(character: str) -> bool:
    code = ord(character)
    return code >= 0x3400 and (
        code <= 0x4DBF
        or 0x4E00 <= code <= 0x9FFF
        or 0xF900 <= code <= 0xFAFF
        or 0x20000 <= code <= 0x2A6DF
        or 0x2A700 <= code <= 0x2B73F
        or 0x2B740 <= code <= 0x2B81F
        or 0x2B820 <= code <= 0x2CEAF
        or 0x2F800 <= code <= 0x2FA1F
    )


def clean_text(text: str) -> str:
    kept = []
    for character in text:
        if character in ("\x00", "\ufffd") or is_control(character):
            continue
        kept.append(" " if is_whitespace(character) else character)
    return "".join(kept)


def pad_cjk(text: str) -> str:
    return "".join(f" {c} " if is_cjk(c) else c for c in text)


def strip_accents(word: str) -> str:
    decomposed = unicodedata.normalize("NFD", word)
    return "".join(c for c in decomposed if unicodedata.category(c) != "Mn")


def split_on_punctuation(word: str) -> list[str]:
    parts: list[str] = []
    start_new = True
    for character in word:
        if is_punctuation(character):
            parts.append(character)
            start_new = True
        elif start_new:
            parts.append(character)
            start_new = False
        else:
            parts[-1] += character
    return parts


def basic_tokenize(text: str, *, lowercase: bool) -> list[str]:
    words: list[str] = []
    for raw in pad_cjk(clean_text(text)).split():
        word = strip_accents(raw.lower()) if lowercase else raw
        words.extend(split_on_punctuation(word))
    return " ".join(words).split()


def wordpiece(word: str, vocabulary: dict[str, int], max_characters: int = 200) -> list[str]:
    if len(word) > max_characters:
        return ["[UNK]"]
    pieces = []
    start = 0
    while start < len(word):
        end = len(word)
        while end > start:
            piece = word[start:end] if start == 0 else "##" + word[start:end]
            if piece in vocabulary:
                break
            end -= 1
        else:
            return ["[UNK]"]
        pieces.append(piece)
        start = end
    return pieces


def tokenize(
    text: str, vocabulary: dict[str, int], *, lowercase: bool, max_characters: int = 200
) -> list[str]:
    words = basic_tokenize(text, lowercase=lowercase)
    return [piece for word in words for piece in wordpiece(word, vocabulary, max_characters)]
