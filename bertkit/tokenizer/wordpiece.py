"""Convert text to WordPiece ids and back (BERT, section 3, "Input/Output Representations").

`compat="google"` gives the ids of google-research/bert, in compiled code (`compiled.py`). Where it
is missing, and for the few texts that it leaves alone, `normalize.py` finds the same words, and the
`tokenizers` library's WordPiece model their tokens, which are cached. `compat="hf"` is the
library's own BERT pipeline: it treats some 138,000 code points differently (private use, one CJK
block, newer marks and punctuation), keeps "[MASK]" in raw text as one token, and makes words above
100 characters [UNK], where Google's limit is 200 (`tokenization.py`, line 303).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from functools import cached_property, partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tokenizers.models import WordPiece

from bertkit.errors import BertkitError, InputTypeError, checked_texts
from bertkit.files import from_home, write_json, write_text
from bertkit.tokenizer.compiled import CompiledTokenizer, character_pages, wordpiece_library
from bertkit.tokenizer.files import (
    CONTINUATION,
    MAX_WORD_CHARACTERS,
    SPECIAL_TOKENS,
    check_compat,
    check_tokens,
    has_capitals,
    make_pipeline,
    read_directory,
    read_vocabulary,
)
from bertkit.tokenizer.normalize import align_words, replace_surrogates, split_words

__all__ = ["SPECIAL_TOKENS", "Encoding", "PairEncoding", "Tokenizer"]

REMEMBERED_WORDS = 1 << 18  # about 50 MB
MAX_CACHED_CHARACTERS = 64  # of a word; longer words rarely occur again


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


class WordIds(dict[str, tuple[int, ...]]):
    """A cache of the ids of each normalised word, computed once by the WordPiece model."""

    def __init__(self, model: Any, unk_id: int) -> None:
        super().__init__()
        self.model = model
        self.unk_id = unk_id

    def __missing__(self, word: str) -> tuple[int, ...]:
        try:
            ids = tuple(token.id for token in self.model.tokenize(word))
        except UnicodeEncodeError:  # a lone surrogate is in no vocabulary
            ids = (self.unk_id,)
        if len(word) <= MAX_CACHED_CHARACTERS:
            if len(self) >= REMEMBERED_WORDS:
                self.clear()
            self[word] = ids
        return ids


class Tokenizer:
    """A vocabulary and the rules by which text is split into its tokens.

    Use `load` or `from_vocabulary`, which check their arguments, to create one.

    Attributes:
        vocabulary: the tokens in the order of their ids.
        lowercase, strip_accents: whether words are lower-cased, and stripped of accents.
        compat: "google" or "hf".
        max_word_characters: the longest word; longer ones become one [UNK].
        pad_id, unk_id, cls_id, sep_id, mask_id: the ids of the special tokens.
    """

    def __init__(
        self,
        vocabulary: Sequence[str],
        lowercase: bool,
        strip_accents: bool,
        compat: str,
        max_word_characters: int,
    ) -> None:
        self.vocabulary = list(vocabulary)
        self.lowercase = lowercase
        self.strip_accents = strip_accents
        self.compat = compat
        self.max_word_characters = max_word_characters
        ids = {token: index for index, token in enumerate(self.vocabulary)}
        self.pad_id, self.unk_id, self.cls_id, self.sep_id, self.mask_id = (
            ids[token] for token in SPECIAL_TOKENS
        )
        self._model = WordPiece(
            ids, unk_token=SPECIAL_TOKENS[1], max_input_chars_per_word=max_word_characters
        )
        self._word_ids = WordIds(self._model, self.unk_id)

    @cached_property
    def _compiled(self) -> CompiledTokenizer | None:
        """The compiled code for "google"; None if it is not there."""
        if self.compat == "hf" or wordpiece_library() is None:
            return None
        pages = character_pages(self.lowercase, self.strip_accents)
        return CompiledTokenizer(self.vocabulary, self.unk_id, self.max_word_characters, pages)

    @classmethod
    def from_vocabulary(
        cls,
        vocabulary: Sequence[str],
        *,
        lowercase: bool,
        compat: str = "google",
        max_word_characters: int | None = None,
        strip_accents: bool | None = None,
    ) -> Tokenizer:
        """Make a tokenizer from the tokens in the order of their ids.

        Args:
            vocabulary: the tokens, which must include the SPECIAL_TOKENS; those that continue a
                word start with "##".
            lowercase: whether text is lower-cased.
            compat: "google" for the original code's ids, "hf" for those of transformers.
            max_word_characters: the longest word; by default 200 for google and 100 for hf.
            strip_accents: whether accents are stripped; by default as `lowercase`, as in BERT.

        Raises:
            BertkitError: a special token is missing, or an entry is empty, repeated or padded
                with spaces; the message counts entries from 1, as lines of vocab.txt.
        """
        check_tokens(vocabulary, "the vocabulary")
        check_compat(compat, "tokenizer")
        if max_word_characters is None:
            max_word_characters = MAX_WORD_CHARACTERS[compat]
        if type(max_word_characters) is not int or not 1 <= max_word_characters < 1 << 32:
            raise BertkitError(
                f"max_word_characters is {max_word_characters!r}; it must be an integer above 0"
            )
        return cls(
            vocabulary,
            lowercase=lowercase,
            strip_accents=lowercase if strip_accents is None else strip_accents,
            compat=compat,
            max_word_characters=max_word_characters,
        )

    @classmethod
    def load(
        cls, path: Path | str, *, lowercase: bool | None = None, compat: str | None = None
    ) -> Tokenizer:
        """Load a model directory (bertkit's, Hugging Face's or Google's) or a bare vocab.txt.

        If the files do not set them, casing is inferred from the vocabulary (an uncased one has no
        capital letter), and compat is "hf" for a Hugging Face directory that bertkit did not write,
        else "google". As in transformers, tokenizer_config.json overrides tokenizer.json.

        Args:
            path: a vocab.txt, or a folder with vocab.txt or tokenizer.json (both must agree), or a
                run or a token store, which contain one.
            lowercase: whether text is lower-cased; overrides the files.
            compat: "google" or "hf"; overrides the files.

        Raises:
            BertkitError: files are missing, damaged, contradictory, or not those of a BERT model.
        """
        path = Path(from_home(path))
        found = read_directory(path) if path.is_dir() else (read_vocabulary(path), {})
        vocabulary, settings = found
        if compat is not None and compat != settings.get("compat"):
            settings |= {"compat": compat, "max_word_characters": None}
        if lowercase is not None and lowercase != settings.get("lowercase"):
            settings |= {"lowercase": lowercase, "strip_accents": None}
        settings.setdefault("lowercase", not has_capitals(vocabulary))
        return cls.from_vocabulary(vocabulary, **settings)

    def save(self, directory: Path | str, max_length: int | None = None) -> None:
        """Write vocab.txt, tokenizer.json and tokenizer_config.json, as transformers reads them.

        transformers has the hf rules only: its ids equal a google tokenizer's on ordinary text and
        differ on the code points and words of 101 to 200 characters that this module names above.
        It cuts a text at `max_length` tokens, the most that a model reads, where truncation is on.

        Raises:
            BertkitError: the directory cannot be written.
        """
        strip_accents = None if self.strip_accents == self.lowercase else self.strip_accents
        names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
        config = {
            "tokenizer_class": "BertTokenizer",
            "do_lower_case": self.lowercase,
            "strip_accents": strip_accents,
            "tokenize_chinese_chars": True,
            **dict(zip(names, SPECIAL_TOKENS, strict=True)),
            "bertkit_compat": self.compat,
            "max_word_characters": self.max_word_characters,
            **({"model_max_length": max_length} if max_length else {}),
        }
        directory = Path(from_home(directory))
        write_text(directory / "vocab.txt", "".join(f"{token}\n" for token in self.vocabulary))
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
        rules = [self.lowercase, self.strip_accents, self.compat, self.max_word_characters]
        return hashlib.sha256(json.dumps([rules, self.vocabulary]).encode()).hexdigest()

    def encode(self, text: str) -> Encoding:
        """Return the tokens of a text with their ids and offsets, without [CLS] and [SEP]."""
        if not isinstance(text, str):
            raise InputTypeError(f"encode takes one text, not {type(text).__name__}")
        if self.compat == "hf":
            found = self._pipeline.encode(replace_surrogates(text), add_special_tokens=False)
            return Encoding(found.ids, found.tokens, found.offsets)
        if self._compiled is not None:
            quick = self._compiled.encode([text], with_spans=True)
            if quick.lengths[0] >= 0:
                found_ids = quick.ids.tolist()
                spans = list(zip(*quick.spans.T.tolist(), strict=True))
                return Encoding(found_ids, [self.vocabulary[index] for index in found_ids], spans)
        ids: list[int] = []
        offsets: list[tuple[int, int]] = []
        for word in align_words(text, lowercase=self.lowercase, strip_accents=self.strip_accents):
            word_ids = self._word_ids[word.text]
            ids += word_ids
            if len(word_ids) == 1:
                offsets.append((word.starts[0], word.ends[-1]))
                continue
            begin = 0
            for index in word_ids:
                token = self.vocabulary[index]
                end = begin + len(token) - (len(CONTINUATION) if begin else 0)
                offsets.append((word.starts[begin], word.ends[end - 1]))
                begin = end
        return Encoding(ids, [self.vocabulary[index] for index in ids], offsets)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, without [CLS] and [SEP].

        It uses one core with "google"; to use more, prepare a corpus with several processes.
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
        found = self._compiled.encode(texts)
        ids, lengths = found.ids, found.lengths
        if (left := np.flatnonzero(lengths < 0)).size:
            lists = self._encode_lists([texts[i] for i in left])
            places = np.repeat(np.maximum(lengths, 0).cumsum()[left], [len(one) for one in lists])
            ids = np.insert(ids, places, joined_lists(lists)[0])
            lengths[left] = [len(one) for one in lists]
        return ids, lengths

    def _encode_lists(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode texts without compiled code."""
        if self.compat == "hf":
            found = self._pipeline.encode_batch_fast(
                [replace_surrogates(text) for text in texts], add_special_tokens=False
            )
            return [encoding.ids for encoding in found]
        words_of = partial(split_words, lowercase=self.lowercase, strip_accents=self.strip_accents)
        ids_of = self._word_ids.__getitem__
        return [list(chain.from_iterable(map(ids_of, words_of(text)))) for text in texts]

    def encode_pair(self, text: str, pair: str | None = None) -> PairEncoding:
        """Encode `[CLS] text [SEP]` or `[CLS] text [SEP] pair [SEP]` without truncation.

        A second text without any token is left out, as in the published code.
        """
        ids, segment_ids, offsets, text_index = [self.cls_id], [0], [(0, 0)], [-1]
        for segment, part in enumerate((text,) if pair is None else (text, pair)):
            found = self.encode(part)
            if segment and not found.ids:
                break
            ids += [*found.ids, self.sep_id]
            segment_ids += [segment] * (len(found.ids) + 1)
            offsets += [*found.offsets, (0, 0)]
            text_index += [*[segment] * len(found.ids), -1]
        return PairEncoding(ids, segment_ids, offsets, text_index)

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = False) -> str:
        """Join tokens into text, at "##" without a space; case and accents are not restored.

        Raises:
            BertkitError: an id is outside of the vocabulary.
        """
        tokens = []
        for index in ids:
            if not 0 <= index < self.size:
                raise BertkitError(f"id {index} is outside of the vocabulary of {self.size} tokens")
            token = self.vocabulary[index]
            if not (skip_special_tokens and token in SPECIAL_TOKENS):
                tokens.append(token)
        return " ".join(tokens).replace(f" {CONTINUATION}", "").removeprefix(CONTINUATION)

    @cached_property
    def _pipeline(self) -> Any:
        """The library's own BERT pipeline, which "hf" runs and tokenizer.json holds."""
        return make_pipeline(
            self._model, lowercase=self.lowercase, strip_accents=self.strip_accents
        )

    def __repr__(self) -> str:
        casing = "uncased" if self.lowercase else "cased"
        return f"Tokenizer({self.size} tokens, {casing}, compat={self.compat!r})"

    def __reduce__(self) -> tuple[type[Tokenizer], tuple[Any, ...]]:
        """Pickle the vocabulary and the rules, not the library's objects or the cached words."""
        rules = (self.lowercase, self.strip_accents, self.compat, self.max_word_characters)
        return Tokenizer, (self.vocabulary, *rules)


def joined_lists(lists: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Return the items of lists, one list after the other, and the length of each list."""
    lengths = np.array([len(one) for one in lists], dtype=np.int64)
    every = chain.from_iterable(lists)
    return np.fromiter(every, dtype=np.int32, count=int(lengths.sum())), lengths
