"""Writing a token store: its shards, then the manifest, which makes it valid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bertkit.corpus.shards import ARRAYS, ShardInfo
from bertkit.corpus.store import FORMAT, INDEXED_FORMAT
from bertkit.errors import BertkitError
from bertkit.files import map_array, sha256_file, write_array, write_json
from bertkit.tokens.tokenizer import Tokenizer

INLINE_SHARDS = 256
"""The most shards that a manifest lists itself, for people to read; more are in `shards.npy`."""


class DocumentArrays(NamedTuple):
    """Documents in memory on their way into a shard."""

    tokens: np.ndarray
    """(tokens,) ids."""
    sentence_lengths: np.ndarray
    """(sentences,) tokens in each sentence, at least 1."""
    document_lengths: np.ndarray
    """(documents,) sentences in each document, at least 1."""


def offsets(lengths: np.ndarray) -> np.ndarray:
    """(n,) lengths → (n + 1,) uint32 offsets that begin with 0; the sum must be below 2^32."""
    if int(lengths.sum()) >= 1 << 32:
        raise BertkitError("a shard would hold 2^32 tokens or more; lower shard_megabytes")
    result = np.zeros(len(lengths) + 1, dtype=np.uint32)
    np.cumsum(lengths, out=result[1:])
    return result


def write_shard(folder: Path, name: str, split: str, parts: Sequence[DocumentArrays]) -> ShardInfo:
    """Write one shard's three arrays, each atomically, and return its manifest entry."""
    joined = DocumentArrays(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))
    arrays = {
        "tokens": joined.tokens,
        "sentences": offsets(joined.sentence_lengths),
        "documents": offsets(joined.document_lengths),
    }
    paths = {kind: folder / f"{name}.{kind}.npy" for kind in ARRAYS}
    for kind, path in paths.items():
        write_array(path, arrays[kind])
    return ShardInfo(
        name=name,
        split=split,
        documents=len(joined.document_lengths),
        sentences=len(joined.sentence_lengths),
        tokens=len(joined.tokens),
        bytes={kind: path.stat().st_size for kind, path in paths.items()},
        sha256={kind: sha256_file(path) for kind, path in paths.items()},
    )


def write_manifest(
    folder: Path, tokenizer: Tokenizer, shards: Sequence[ShardInfo], details: dict[str, Any]
) -> None:
    """Finish a store: count the training unigrams, then write the manifest, which makes it valid.

    Args:
        folder: the store's folder, all shards in place.
        tokenizer: made the ids; already saved under `tokenizer/`.
        shards: every shard in reading order.
        details: settings, sources and counts to keep beside them.
    """
    unigrams = np.zeros(tokenizer.size, dtype=np.int64)
    for shard in shards:
        if shard.split == "train":
            tokens = map_array(folder / f"{shard.name}.tokens.npy")
            unigrams += np.bincount(tokens, minlength=tokenizer.size)
    write_array(folder / "unigrams.npy", unigrams)
    indexed = len(shards) > INLINE_SHARDS
    write_json(
        folder / "manifest.json",
        {
            "format": INDEXED_FORMAT if indexed else FORMAT,
            "vocabulary_size": tokenizer.size,
            "tokenizer_hash": tokenizer.content_hash,
            "unigrams_sha256": sha256_file(folder / "unigrams.npy"),
            **details,
            **(write_index(folder, shards) if indexed else {}),
            **({} if indexed else {"shards": [asdict(shard) for shard in shards]}),
        },
    )


def write_index(folder: Path, shards: Sequence[ShardInfo]) -> dict[str, str]:
    """Write the table of many shards, and return what the manifest says about it."""
    from bertkit.corpus.index import to_rows

    write_array(folder / "shards.npy", to_rows(shards))
    return {"shards_sha256": sha256_file(folder / "shards.npy")}
