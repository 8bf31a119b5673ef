"""Tokenize blocks of documents: the step of preparation that workers do.

`tokenize_block` depends on nothing but its arguments, so any process of any machine may run it, in
any order, and again after a failure.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bertkit.corpus.store import DocumentArrays, token_type
from bertkit.errors import BertkitError
from bertkit.text.sentences import split_sentences
from bertkit.tokenizer.wordpiece import Tokenizer

MAX_SENTENCE_TOKENS = 512
"""The longest sentence in tokens; a longer one is split and counted, and no token is lost."""
MAX_STRING = 50_000
"""The maximum number of characters that are tokenized at once, which bounds the memory."""


class TokenizedBlock(NamedTuple):
    """The tokenized documents of both splits, with the size of their text and what was counted."""

    splits: dict[str, DocumentArrays]
    text_bytes: int
    counts: Counter[str]


@lru_cache(maxsize=4)
def loaded_tokenizer(folder: Path, content_hash: str) -> Tokenizer:
    """Return the tokenizer in a store, which a worker loads once."""
    tokenizer = Tokenizer.load(folder)
    if tokenizer.content_hash != content_hash:
        raise BertkitError(f"{folder} is not the tokenizer of this store; start again elsewhere")
    return tokenizer


def tokenize_block(
    documents: Sequence[str],
    tokenizer_folder: Path,
    tokenizer_hash: str,
    language: str,
    held_out: float,
) -> TokenizedBlock:
    """Split documents into sentences and token ids: the work of the workers."""
    tokenizer = loaded_tokenizer(tokenizer_folder, tokenizer_hash)
    counts: Counter[str] = Counter()
    sentences: list[str] = []
    owned: list[int] = []
    for document in documents:
        pieces = split_sentences(document, language)
        if len(document) > MAX_STRING:
            pieces = list(cut_strings(pieces))
        sentences += pieces
        owned.append(len(pieces))
    ids, lengths = tokenizer.encode_arrays(sentences)
    owners = np.repeat(np.arange(len(documents)), owned)
    counts["sentence without any token"] = int((lengths == 0).sum())
    counts["sentence cut in pieces (nothing lost)"] = int((lengths > MAX_SENTENCE_TOKENS).sum())
    cuts = -(-lengths // MAX_SENTENCE_TOKENS)  # the pieces of each sentence, none if it is empty
    last = np.cumsum(cuts)[cuts > 0] - 1
    sizes = np.full(cuts.sum(), MAX_SENTENCE_TOKENS)
    sizes[last] = (lengths - (cuts - 1) * MAX_SENTENCE_TOKENS)[cuts > 0]
    documents_of = np.repeat(owners, cuts)
    document_lengths = np.bincount(documents_of, minlength=len(documents))
    counts["document without any token"] = int((document_lengths == 0).sum())
    kept = np.array([is_held_out(document, held_out) for document in documents], dtype=bool)
    splits = {}
    for split, chosen in (("train", ~kept), ("held_out", kept)):
        of_sentences = chosen[documents_of]
        if of_sentences.any():
            splits[split] = DocumentArrays(
                ids[np.repeat(of_sentences, sizes)].astype(token_type(tokenizer.size)),
                sizes[of_sentences],
                document_lengths[chosen & (document_lengths > 0)],
            )
    text_bytes = sum(len(document.encode()) for document in documents)
    return TokenizedBlock(splits, text_bytes, +counts)


def is_held_out(document: str, share: float) -> bool:
    """Return whether a document is held out, by a hash of its text, so that copies agree."""
    digest = hashlib.blake2b(document.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") < share * 2**64


def cut_strings(sentences: Iterable[str]) -> Iterator[str]:
    """Yield sentences, splitting those above MAX_STRING characters, if possible at a space."""
    for sentence in sentences:
        start = 0
        while len(sentence) - start > MAX_STRING:
            limit = start + MAX_STRING
            space = sentence.rfind(" ", start + MAX_STRING // 2, limit)
            end = space if space > 0 else limit
            yield sentence[start:end]
            start = end
            while start < len(sentence) and sentence[start].isspace():
                start += 1
        yield sentence[start:]
