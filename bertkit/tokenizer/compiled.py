"""WordPiece in compiled code (wordpiece.c), with the ids and offsets of the `tokenizers` library.

The code is compiled when bertkit is installed, if there is a C compiler (hatch_build.py). Without
it, the library does the same work, about ten times slower.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import threading
import weakref
from collections.abc import Sequence
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bertkit.tokenizer.files import CONTINUATION
from bertkit.tokenizer.normalize import character_rule

WORDPIECE_SOURCE = Path(__file__).with_name("wordpiece.c")
PAGE, PAGES = 256, 0x110000 // 256
MOST_BYTES, IN_CONTEXT = 15, 255
LONG_TEXT = 10_000
"""The characters of a text from which its rules are computed while other threads need not wait."""


class EncodedTexts(NamedTuple):
    """The ids of several texts."""

    ids: np.ndarray
    """(tokens,) int32, of one text after the other."""
    lengths: np.ndarray
    """(texts,) int64, the number of tokens of each; -1 if a text is left to the library."""
    spans: np.ndarray
    """(tokens, 2) int32, half-open character spans in each text; (0, 2) if they were not wanted."""


def compiled_library(source: Path, name: str) -> ctypes.CDLL | None:
    """Return a library next to its C source; None if there is none of this source and system."""
    try:
        code = ctypes.CDLL(str(source.with_name(f"libbertkit-{name}.so")))
        code.bertkit_source.restype = ctypes.c_char_p
        made_from = sha256(source.read_bytes()).hexdigest().encode()
    except (OSError, AttributeError):
        return None
    return code if code.bertkit_source() == made_from else None


@cache
def wordpiece_library() -> ctypes.CDLL | None:
    """Return the compiled code, unless BERTKIT_NATIVE=0 switches it off or it was not built."""
    code = compiled_library(WORDPIECE_SOURCE, "wordpiece")
    if code is None or os.environ.get("BERTKIT_NATIVE") == "0":
        return None
    for name in ("new", "ids", "spans"):
        getattr(code, f"bertkit_{name}").restype = ctypes.c_void_p
    for name in ("encode", "count", "set_rule"):
        getattr(code, f"bertkit_{name}").restype = ctypes.c_int64
    return code


class CharacterPages:
    """What characters become, as wordpiece.c reads it: pages of rules, set when they are needed.

    Raises:
        MemoryError: there is not enough memory.
    """

    def __init__(self, lowercase: bool, strip_accents: bool) -> None:
        self.lowercase, self.strip_accents = lowercase, strip_accents
        self.pointers = (ctypes.c_void_p * PAGES)()
        self._known, self._lock = bytearray(PAGE * PAGES), threading.Lock()
        self.learn("".join(map(chr, range(128))))

    def learn(self, text: str) -> None:
        """Set the rules of all characters of a text."""
        code = wordpiece_library()
        assert code is not None
        for character in set(text):
            if self._known[ord(character)]:
                continue
            rule = character_rule(character, self.lowercase, self.strip_accents)
            encoded = b"" if rule is None else rule.encode("utf-8", "surrogatepass")
            size = IN_CONTEXT if rule is None or len(encoded) > MOST_BYTES else len(encoded)
            place, size_of = ctypes.c_int64(ord(character)), ctypes.c_int64(size)
            with self._lock:  # for this character only, as others may wait
                if code.bertkit_set_rule(self.pointers, place, encoded, size_of):
                    raise MemoryError
                self._known[ord(character)] = True


character_pages = cache(CharacterPages)
"""The pages for a combination of settings, which all tokenizers share."""


class CompiledTokenizer:
    """The compiled counterpart of a `Tokenizer`; `special_ids` are those of SPECIAL_TOKENS.

    Raises:
        MemoryError: there is not enough memory.
    """

    def __init__(
        self,
        vocabulary: Sequence[str],
        special_ids: Sequence[int],
        max_word_characters: int,
        pages: CharacterPages,
    ) -> None:
        code = wordpiece_library()
        assert code is not None
        self._code, self._pages, self._lock = code, pages, threading.Lock()
        continues = [token.startswith(CONTINUATION) for token in vocabulary]
        tokens = [token.removeprefix(CONTINUATION) for token in vocabulary]
        text, ends = utf8_of(tokens)
        made = code.bertkit_new(
            pages.pointers,
            text,
            pointer(ends),
            pointer(np.array(continues, dtype=np.uint8)),
            pointer(np.array([len(token) for token in tokens], dtype=np.int32)),
            ctypes.c_int64(len(tokens)),
            ctypes.c_int64(max_word_characters),
            pointer(np.array(special_ids, dtype=np.int32)),
            ctypes.c_uint64(secrets.randbits(64)),
        )
        if not made:
            raise MemoryError
        self._tokenizer = ctypes.c_void_p(made)
        # When Python exits, other threads may still encode, so the memory is left to the system.
        weakref.finalize(self, code.bertkit_free, self._tokenizer).atexit = False

    def encode(self, texts: Sequence[str], *, with_spans: bool = False) -> EncodedTexts:
        """Return the ids of texts, and the spans of tokens if they are wanted.

        Raises:
            MemoryError: there is not enough memory.
        """
        text, ends = utf8_of(texts)
        lengths = np.empty(len(texts), dtype=np.int64)
        code, tokenizer = self._code, self._tokenizer
        rest = (ctypes.c_int64(len(texts)), pointer(lengths), ctypes.c_int64(with_spans))
        while True:
            done = 0
            with self._lock:
                while done < len(texts):
                    place = (text, pointer(ends), ctypes.c_int64(done))
                    done = code.bertkit_encode(tokenizer, *place, *rest)
                    if done < 0:
                        raise MemoryError
                    if done < len(texts) and len(texts[done]) > LONG_TEXT:
                        break
                    if done < len(texts):
                        self._pages.learn(texts[done])
                else:
                    count = code.bertkit_count(tokenizer) if texts else 0
                    ids = copied(code.bertkit_ids(tokenizer), count)
                    spans = copied(code.bertkit_spans(tokenizer), 2 * count * with_spans)
                    return EncodedTexts(ids, lengths, spans.reshape(-1, 2))
            for one in texts[done:]:  # all at once, as encoding starts again
                if len(one) > LONG_TEXT:
                    self._pages.learn(one)


def utf8_of(texts: Sequence[str]) -> tuple[bytes, np.ndarray]:
    """Return texts as UTF-8, one after the other and eight bytes more, and the end of each."""
    try:
        parts = [text.encode() for text in texts]
    except UnicodeEncodeError:
        parts = [text.encode("utf-8", "surrogatepass") for text in texts]
    return b"".join([*parts, bytes(8)]), np.fromiter(map(len, parts), np.int64, len(parts)).cumsum()


def pointer(array: np.ndarray) -> ctypes.c_void_p:
    """Return the address of an array, which it keeps alive."""
    return array.ctypes.data_as(ctypes.c_void_p)


def copied(address: int | None, count: int) -> np.ndarray:
    """Return a copy of (count,) int32 at an address."""
    made = np.empty(count, dtype=np.int32)
    if count and address:
        ctypes.memmove(pointer(made), address, made.nbytes)
    return made
