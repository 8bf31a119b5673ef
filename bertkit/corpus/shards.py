"""The shards of a token store: their manifest entries, and their arrays after integrity checks."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bertkit.errors import BertkitError
from bertkit.files import map_array, sha256_file

SPLITS = ("train", "held_out")
ARRAYS = ("tokens", "sentences", "documents")


@dataclass(frozen=True)
class ShardInfo:
    """A shard's entry in the manifest."""

    name: str
    split: str
    documents: int
    sentences: int
    tokens: int
    bytes: dict[str, int]
    """The size in bytes of each array's file."""
    sha256: dict[str, str]
    """The SHA-256 of each array's file, as hex."""

    def __post_init__(self) -> None:
        """Check every field, as a manifest may be damaged or untrusted and names become paths."""
        if not isinstance(self.name, str) or not re.fullmatch(r"[\w-]+", self.name):
            raise ValueError(f"{self.name!r:.40} is not a valid shard name")
        if self.split not in SPLITS:
            raise ValueError(f"shard {self.name} has the split {self.split!r:.40}")
        for counts in (vars(self), self.bytes):
            for field in ("documents", "sentences", "tokens"):
                count = counts[field] if isinstance(counts, dict) else None
                if type(count) is not int or not 0 <= count < 1 << 48:
                    raise ValueError(f"shard {self.name}: {field} is {count!r:.40}")
        if not all(re.fullmatch("[0-9a-f]{64}", str(self.sha256[kind])) for kind in ARRAYS):
            raise ValueError(f"shard {self.name}: its checksums are not SHA-256")


class ShardArrays(NamedTuple):
    """A shard's memory-mapped arrays (`bertkit.corpus.store` gives their shapes)."""

    tokens: np.ndarray
    sentences: np.ndarray
    documents: np.ndarray


def token_type(vocabulary_size: int) -> type[np.unsignedinteger[Any]]:
    """Return the smaller of uint16 and uint32 that can hold every id."""
    return np.uint16 if vocabulary_size <= 1 << 16 else np.uint32


def check_shard(folder: Path, shard: ShardInfo, *, checksums: bool = True) -> None:
    """Compare a shard's files with the manifest."""
    repair = "remove its manifest.json and run what made the store again; the rest is kept"
    for kind in ARRAYS:
        path = folder / f"{shard.name}.{kind}.npy"
        if not path.is_file():
            raise BertkitError(f"shard {path} is missing; {repair}")
        size = path.stat().st_size
        if size != shard.bytes[kind]:
            raise BertkitError(
                f"shard {path} is torn: {size:,} bytes instead of {shard.bytes[kind]:,}; {repair}"
            )
        if checksums and sha256_file(path) != shard.sha256[kind]:
            raise BertkitError(f"shard {path} is corrupt (its checksum is wrong); {repair}")


def open_shard(
    folder: Path, shard: ShardInfo, vocabulary_size: int, *, contents: bool = True
) -> ShardArrays:
    """Map a shard's arrays into memory and check them against the manifest."""
    paths = [folder / f"{shard.name}.{kind}.npy" for kind in ARRAYS]
    arrays = ShardArrays(*(map_array(path) for path in paths))
    kinds = (np.dtype(token_type(vocabulary_size)), np.dtype(np.uint32), np.dtype(np.uint32))
    sizes = (shard.tokens, shard.sentences + 1, shard.documents + 1)
    for path, array, kind, size in zip(paths, arrays, kinds, sizes, strict=True):
        if array.dtype != kind or array.shape != (size,):
            raise BertkitError(
                f"{path} holds {array.dtype} {array.shape} instead of {kind} ({size},); "
                "prepare the store again"
            )
    if not contents:
        return arrays
    ends = ((arrays.sentences, shard.tokens), (arrays.documents, shard.sentences))
    whole = all(o[0] == 0 and o[-1] == end and bool((o[1:] > o[:-1]).all()) for o, end in ends)
    if not whole:
        raise BertkitError(
            f"shard {folder / shard.name} has offsets that do not fit it; prepare it again"
        )
    largest = int(arrays.tokens.max(initial=0))
    if largest >= vocabulary_size:
        raise BertkitError(
            f"shard {folder / shard.name} has id {largest:,}, outside of the {vocabulary_size:,} "
            "tokens of the manifest; prepare it again"
        )
    return arrays
