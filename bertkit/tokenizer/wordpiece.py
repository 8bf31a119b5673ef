"""Convert text to WordPiece ids and back (BERT, section 3, "Input/Output Representations").

The ids and offsets are those of transformers' `BertTokenizer`. The `tokenizers` library defines
them; compiled code (wordpiece.c) computes the same ones about ten times as fast, and leaves to the
library the few texts with marks whose order matters. The code is compiled when bertkit is
installed, if there is a C compiler (hatch_build.py); without it, the library does all the work.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import re
import secrets
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import cache, cached_property
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tokenizers import AddedToken
from tokenizers.models import WordPiece

from bertkit.errors import BertkitError, InputTypeError, checked_texts
from bertkit.files import from_home, write_json, write_text
from bertkit.tokenizer.files import (
    CONTINUATION,
    MAX_WORD_CHARACTERS,
    SPECIAL_TOKENS,
    character_rule,
    check_tokens,
    has_capitals,
    make_pipeline,
    normal_table,
    read_directory,
    read_vocabulary,
    without_surrogates,
)

__all__ = ["SPECIAL_TOKENS", "Encoding", "PairEncoding", "Tokenizer"]


class Encoding(NamedTuple):
    """A text as WordPiece tokens; `offsets` are half-open character spans in the raw text."""

    ids: list[int]
    tokens: list[str]
    offsets: list[tuple[int, int]]


class PairEncoding(NamedTuple):
    """`[CLS] text [SEP]` or `[CLS] text [SEP] pair [SEP]` as lists of equal length.

    `segment_ids` is 0 up to the first [SEP] and 1 after it. `text_index` is 0 for tokens of the
    text, 1 for those of the pair, and -1 for special tokens, whose offset is (0, 0).
    """

    ids: list[int]
    segment_ids: list[int]
    offsets: list[tuple[int, int]]
    text_index: list[int]


class Tokenizer:
    """A vocabulary and the rules by which text is split into its tokens.

    Use `load` or `from_vocabulary`, which check their arguments, to create one.

    Attributes:
        vocabulary: the tokens in the order of their ids, with the added ones at the end.
        lowercase, strip_accents: whether words are lower-cased, and stripped of accents.
        added: the added tokens, which are matched before a text is split into words.
        pad_id, unk_id, cls_id, sep_id, mask_id: the ids of the special tokens.
    """

    def __init__(
        self,
        vocabulary: Sequence[str],
        lowercase: bool,
        strip_accents: bool,
        added: Sequence[AddedToken] = (),
    ) -> None:
        self._pieces = list(vocabulary)
        self.lowercase = lowercase
        self.strip_accents = strip_accents
        self.added = tuple(added)
        known = set(vocabulary)
        new = [token.content for token in added if token.content not in known]
        self.vocabulary = [*vocabulary, *new]
        ids = {token: index for index, token in enumerate(self.vocabulary)}
        self.pad_id, self.unk_id, self.cls_id, self.sep_id, self.mask_id = (
            ids[token] for token in SPECIAL_TOKENS
        )

    @cached_property
    def _compiled(self) -> CompiledTokenizer | None:
        if wordpiece_library() is None:
            return None
        special = [self.pad_id, self.unk_id, self.cls_id, self.sep_id, self.mask_id]
        pages = character_pages(self.lowercase, self.strip_accents)
        return CompiledTokenizer(self._pieces, special, MAX_WORD_CHARACTERS, pages)

    @cached_property
    def _pipeline(self) -> Any:
        """The library's BERT pipeline, which tokenizer.json describes."""
        model = WordPiece(
            {token: index for index, token in enumerate(self._pieces)},
            unk_token=SPECIAL_TOKENS[1],
            max_input_chars_per_word=MAX_WORD_CHARACTERS,
        )
        rules: Any = {"lowercase": self.lowercase, "strip_accents": self.strip_accents}
        return make_pipeline(model, **rules, added=self.added)

    @cached_property
    def _may_have_added(self) -> Callable[[str], bool]:
        """Whether the library must encode a text, as it may have an added token."""
        table = normal_table(self.lowercase, self.strip_accents)
        normal = [token.content.translate(table) for token in self.added if token.normalized]
        raw = pattern_of([token.content for token in self.added if not token.normalized])
        lower = pattern_of(normal)
        return lambda text: bool(
            raw.search(text) or (normal and lower.search(text.translate(table)))
        )

    @classmethod
    def from_vocabulary(
        cls,
        vocabulary: Sequence[str],
        *,
        lowercase: bool,
        strip_accents: bool | None = None,
        added: Sequence[AddedToken] = (),
    ) -> Tokenizer:
        """Make a tokenizer from the tokens in the order of their ids.

        Args:
            vocabulary: the tokens, which must include the SPECIAL_TOKENS; those that continue a
                word start with "##".
            lowercase: whether text is lower-cased.
            strip_accents: whether accents are stripped; by default as `lowercase`, as in BERT.
            added: tokens that are matched before words are split, as by transformers'
                `add_tokens`; those not in the vocabulary get the ids after it.

        Raises:
            BertkitError: a special token is missing, or an entry is empty, repeated or padded
                with spaces; the message counts entries from 1, as lines of vocab.txt.
        """
        check_tokens(vocabulary, "the vocabulary")
        accents = lowercase if strip_accents is None else strip_accents
        return cls(vocabulary, lowercase, accents, added)

    @classmethod
    def load(cls, path: Path | str) -> Tokenizer:
        """Load a model directory (bertkit's, Hugging Face's or Google's) or a bare vocab.txt.

        If the files do not set it, casing is inferred from the vocabulary (an uncased one has no
        capital letter). As in transformers, tokenizer_config.json overrides tokenizer.json.

        Args:
            path: a vocab.txt, or a folder with vocab.txt or tokenizer.json (both must agree), or a
                run or a token store, which contain one.

        Raises:
            BertkitError: files are missing, damaged, contradictory, or not those of a BERT model.
        """
        path = Path(from_home(path))
        read = read_directory(path) if path.is_dir() else (read_vocabulary(path), {})
        vocabulary, settings = read
        settings.setdefault("lowercase", not has_capitals(vocabulary))
        return cls.from_vocabulary(vocabulary, **settings)

    def save(self, directory: Path | str, max_length: int | None = None) -> None:
        """Write vocab.txt, tokenizer.json and tokenizer_config.json, as transformers reads them.

        Added tokens are in the last two, as vocab.txt only has those of which words are made.
        transformers cuts a text at `max_length` tokens, the most that a model reads.

        Raises:
            BertkitError: the directory cannot be written.
        """
        strip_accents = None if self.strip_accents == self.lowercase else self.strip_accents
        names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
        config: dict[str, Any] = {
            "tokenizer_class": "BertTokenizer",
            "do_lower_case": self.lowercase,
            "strip_accents": strip_accents,
            "tokenize_chinese_chars": True,
            **dict(zip(names, SPECIAL_TOKENS, strict=True)),
            **({"model_max_length": max_length} if max_length else {}),
        }
        if self.added:
            tokens = self._pipeline.get_added_tokens_decoder().items()
            config["added_tokens_decoder"] = {str(n): token.__getstate__() for n, token in tokens}
        directory = Path(from_home(directory))
        write_text(directory / "vocab.txt", "".join(f"{token}\n" for token in self._pieces))
        write_text(directory / "tokenizer.json", self._pipeline.to_str(pretty=True) + "\n")
        write_json(directory / "tokenizer_config.json", config)

    @property
    def size(self) -> int:
        """The number of tokens in the vocabulary."""
        return len(self.vocabulary)

    @cached_property
    def continuation(self) -> np.ndarray:
        """(size,) bool: True for the tokens that continue a word ("##ing")."""
        return np.array([token.startswith(CONTINUATION) for token in self.vocabulary])

    @cached_property
    def _id_objects(self) -> np.ndarray:
        """(size,) ids as Python objects, which lists share: a new object takes 32 bytes."""
        return np.array(range(self.size), dtype=object)

    @cached_property
    def content_hash(self) -> str:
        """The SHA-256, as hex, of everything that determines the ids of a text."""
        rules = [self.lowercase, self.strip_accents, *(t.__getstate__() for t in self.added)]
        return hashlib.sha256(json.dumps([rules, self.vocabulary]).encode()).hexdigest()

    def made(self, content_hash: str) -> bool:
        """Return whether this is the `content_hash`, now or in an earlier version."""
        rules = [self.lowercase, self.strip_accents]
        earlier = (
            [[*rules, "google", 200], self.vocabulary],
            [[*rules, "hf", 100], self.vocabulary],
        )
        hashes = (hashlib.sha256(json.dumps(facts).encode()).hexdigest() for facts in earlier)
        return content_hash == self.content_hash or content_hash in hashes

    def encode(self, text: str) -> Encoding:
        """Return the tokens of a text with their ids and offsets, without [CLS] and [SEP]."""
        if not isinstance(text, str):
            raise InputTypeError(f"encode takes one text, not {type(text).__name__}")
        if self._compiled is not None and not (self.added and self._may_have_added(text)):
            quick, [length], array = self._compiled.encode([text], with_spans=True)
            if length >= 0:
                ids, spans = quick.tolist(), list(zip(*array.T.tolist(), strict=True))
                return Encoding(ids, [self.vocabulary[index] for index in ids], spans)
        whole = self._pipeline.encode(without_surrogates(text), add_special_tokens=False)
        return Encoding(whole.ids, [self.vocabulary[i] for i in whole.ids], whole.offsets)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, without [CLS] and [SEP].

        It uses one core; to use more, prepare a corpus with several processes.
        """
        ids, lengths = self.encode_arrays(texts)
        every, ends = self._id_objects[ids].tolist(), lengths.cumsum().tolist()
        return [every[start:end] for start, end in pairwise([0, *ends])]

    def encode_arrays(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return what `encode_batch` does as arrays: the fast path for corpora.

        Returns:
            (tokens,) int32, the ids of one text after the other; and (texts,) int64, the number of
            tokens of each.
        """
        if type(texts) is not list or set(map(type, texts)) != {str}:  # fast where all is well
            texts = list(checked_texts(texts))
        if self._compiled is None:
            return joined_lists(self._encode_lists(texts))
        held = [i for i, t in enumerate(texts) if self._may_have_added(t)] if self.added else []
        plain = list(texts) if held else texts
        for i in held:
            plain[i] = ""
        ids, lengths, _ = self._compiled.encode(plain)
        lengths[held] = -1
        if (left := np.flatnonzero(lengths < 0)).size:
            lists = self._encode_lists([texts[i] for i in left])
            positions = np.repeat(np.maximum(lengths, 0).cumsum()[left], list(map(len, lists)))
            ids = np.insert(ids, positions, joined_lists(lists)[0])
            lengths[left] = list(map(len, lists))
        return ids, lengths

    def _encode_lists(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode texts without compiled code."""
        whole = [without_surrogates(text) for text in texts]
        encodings = self._pipeline.encode_batch_fast(whole, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def encode_pair(self, text: str, pair: str | None = None) -> PairEncoding:
        """Encode `[CLS] text [SEP]` or `[CLS] text [SEP] pair [SEP]` without truncation.

        A second text without any token is left out, as in the published code.
        """
        ids, segment_ids, offsets, text_index = [self.cls_id], [0], [(0, 0)], [-1]
        for segment, part in enumerate((text,) if pair is None else (text, pair)):
            encoding = self.encode(part)
            if segment and not encoding.ids:
                break
            ids += [*encoding.ids, self.sep_id]
            segment_ids += [segment] * (len(encoding.ids) + 1)
            offsets += [*encoding.offsets, (0, 0)]
            text_index += [*[segment] * len(encoding.ids), -1]
        return PairEncoding(ids, segment_ids, offsets, text_index)

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = False) -> str:
        """Join tokens into text, at "##" without a space; case and accents are not restored.

        Raises:
            BertkitError: an id is outside of the vocabulary.
        """
        tokens = []
        special = {*SPECIAL_TOKENS, *(token.content for token in self.added if token.special)}
        for index in ids:
            if not 0 <= index < self.size:
                raise BertkitError(f"id {index} is outside of the vocabulary of {self.size} tokens")
            token = self.vocabulary[index]
            if not (skip_special_tokens and token in special):
                tokens.append(token)
        return " ".join(tokens).replace(f" {CONTINUATION}", "").removeprefix(CONTINUATION)

    def __repr__(self) -> str:
        casing = "uncased" if self.lowercase else "cased"
        return f"Tokenizer({self.size} tokens, {casing})"

    def __reduce__(self) -> tuple[type[Tokenizer], tuple[Any, ...]]:
        """Pickle the vocabulary and the rules, not the library's objects or remembered words."""
        return Tokenizer, (self._pieces, self.lowercase, self.strip_accents, self.added)


def pattern_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern of the beginnings of some texts, which is quick also for thousands."""
    tree: dict[str, Any] = {}
    for text in texts:
        branch = tree
        for letter in text[:50]:
            branch = branch.setdefault(letter, {})
        branch[""] = {}  # longer texts need not be looked at

    def expression(branch: dict[str, Any]) -> str:
        parts = [re.escape(letter) + expression(more) for letter, more in branch.items()]
        return "" if "" in branch else f"(?:{'|'.join(parts)})"

    return re.compile(expression(tree) if tree else "(?!)")


def joined_lists(lists: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Return the items of lists, one list after the other, and the length of each list."""
    lengths = np.array(list(map(len, lists)), dtype=np.int64)
    every = chain.from_iterable(lists)
    return np.fromiter(every, dtype=np.int32, count=int(lengths.sum())), lengths


# Compiled code ------------------------------------------------------------------------------------

WORDPIECE_SOURCE = Path(__file__).with_name("wordpiece.c")
PAGE, PAGES = 256, 0x110000 // 256
MOST_BYTES, IN_CONTEXT = 15, 255
LONG_TEXT = 10_000
"""The characters of a text from which its rules are computed while other threads need not wait."""


def compiled_library(source: Path, name: str) -> ctypes.CDLL | None:
    """Return a library next to its C source; None if there is none of this source and system."""
    try:
        code = ctypes.CDLL(str(source.with_name(f"libbertkit-{name}.so")))
        code.bertkit_source.restype = ctypes.c_char_p
        made_from = hashlib.sha256(source.read_bytes()).hexdigest().encode()
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
    """What characters become, as wordpiece.c reads it: pages of rules, set when they are needed."""

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
            code_point, size_of = ctypes.c_int64(ord(character)), ctypes.c_int64(size)
            with self._lock:  # for this character only, as others may wait
                if code.bertkit_set_rule(self.pointers, code_point, encoded, size_of):
                    raise MemoryError
                self._known[ord(character)] = True


character_pages = cache(CharacterPages)
"""The pages for a combination of settings, which all tokenizers share."""


class CompiledTokenizer:
    """The compiled counterpart of a `Tokenizer`; `special_ids` are those of SPECIAL_TOKENS."""

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

    def encode(
        self, texts: Sequence[str], *, with_spans: bool = False
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the ids of texts, (tokens,), the number of tokens of each, and their spans.

        The number is -1 if a text is left to the library; spans are (tokens, 2), of characters.
        """
        text, ends = utf8_of(texts)
        lengths = np.empty(len(texts), dtype=np.int64)
        code, tokenizer = self._code, self._tokenizer
        rest = (ctypes.c_int64(len(texts)), pointer(lengths), ctypes.c_int64(with_spans))
        while True:
            done = 0
            with self._lock:
                while done < len(texts):
                    location = (text, pointer(ends), ctypes.c_int64(done))
                    done = code.bertkit_encode(tokenizer, *location, *rest)
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
                    return ids, lengths, spans.reshape(-1, 2)
            for text_left in texts[done:]:  # all at once, as encoding starts again
                if len(text_left) > LONG_TEXT:
                    self._pages.learn(text_left)


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
