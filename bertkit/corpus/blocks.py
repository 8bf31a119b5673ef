"""Tokenize blocks of documents: the pure step of preparation.

`tokenize_block` depends on nothing but its arguments, so any process of any machine may run it, in
any order, and again after a failure.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from bertkit.corpus.store import token_type
from bertkit.corpus.writers import DocumentArrays
from bertkit.text.sentences import split_sentences
from bertkit.tokenizer.wordpiece import Tokenizer

TOKENIZE_CHARACTERS = 250_000
MAX_SENTENCE_TOKENS = 512
"""The longest sentence in tokens; a longer one is split and counted, and no token is lost."""
MAX_STRING = 50_000
"""The maximum number of characters given to the tokenizer at once, which bounds its memory."""


class TokenizedBlock(NamedTuple):
    """The tokenised documents of both splits, with the size of their text and what was counted."""

    splits: dict[str, DocumentArrays]
    text_bytes: int
    counts: Counter[str]


def is_held_out(document: str, share: float) -> bool:
    """Return whether a document is held out, by a hash of its text, so that copies agree."""
    digest = hashlib.blake2b(document.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little") < share * 2**64


def cut_strings(sentences: Iterable[str]) -> Iterator[str]:
    """Yield sentences, splitting those above MAX_STRING characters, if possible at a space."""
    for sentence in sentences:
        start = 0
        while len(sentence) - start > MAX_STRING:
            max_length = start + MAX_STRING
            space = sentence.rfind(" ", start + MAX_STRING // 2, max_length)
            end = space if space > 0 else max_length
            yield sentence[start:end]
            start = end
            while start < len(sentence) and sentence[start].isspace():
                start += 1
        yield sentence[start:]


def tokenize_block(
    documents: Sequence[str], tokenizer: Tokenizer, language: str, held_out: float
) -> TokenizedBlock:
    """Split documents into sentences and token ids: the work of the worker processes."""
    counts: Counter[str] = Counter()
    sentences: list[str] = []
    owners: list[int] = []
    for index, document in enumerate(documents):
        pieces = list(cut_strings(split_sentences(document, language)))
        sentences.extend(pieces)
        owners.extend([index] * len(pieces))
    ids: dict[str, list[list[int]]] = {"train": [], "held_out": []}
    document_lengths: dict[str, list[int]] = {"train": [], "held_out": []}
    split_of = ["held_out" if is_held_out(text, held_out) else "train" for text in documents]
    last_owner = -1
    with_tokens = 0
    for owner, sentence in zip(owners, tokenizer.encode_batch(sentences), strict=True):
        if not sentence:
            counts["sentence without any token"] += 1
            continue
        split = split_of[owner]
        if owner != last_owner:
            document_lengths[split].append(0)
            last_owner = owner
            with_tokens += 1
        if len(sentence) > MAX_SENTENCE_TOKENS:
            counts["sentence cut in pieces (nothing lost)"] += 1
        for start in range(0, len(sentence), MAX_SENTENCE_TOKENS):
            ids[split].append(sentence[start : start + MAX_SENTENCE_TOKENS])
            document_lengths[split][-1] += 1
    if with_tokens < len(documents):
        counts["document without any token"] += len(documents) - with_tokens
    splits = {
        split: to_arrays(ids[split], document_lengths[split], tokenizer.size)
        for split in ids
        if document_lengths[split]
    }
    text_bytes = sum(len(text.encode("utf-8", "surrogatepass")) for text in documents)
    return TokenizedBlock(splits, text_bytes, counts)


def to_arrays(
    ids: Sequence[Sequence[int]], document_lengths: Sequence[int], vocabulary_size: int
) -> DocumentArrays:
    """Convert the ids of each sentence to flat arrays."""
    lengths = np.fromiter((len(sentence) for sentence in ids), dtype=np.int64, count=len(ids))
    tokens = np.fromiter(
        (token for sentence in ids for token in sentence),
        dtype=token_type(vocabulary_size),
        count=int(lengths.sum()),
    )
    return DocumentArrays(tokens, lengths, np.asarray(document_lengths, dtype=np.int64))
