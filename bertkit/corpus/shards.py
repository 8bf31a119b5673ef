"""The shards of a token store: their manifest entries, and their arrays after integrity checks.

`bertkit.corpus.store` describes the arrays. A manifest lists up to a few hundred shards as JSON. A
larger store has format 2: the list is the file `shards.npy`, which is mapped into memory so that
opening the store does not parse every entry, and the manifest holds the checksum of that file.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, overload

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
        """Check every field, as a manifest may be damaged or untrusted and names become paths.

        Raises:
            ValueError: a field is invalid; names the field.
        """
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
    """Compare a shard's files with the manifest.

    Raises:
        BertkitError: a file is missing, has another size (torn) or checksum (corrupt).
    """
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
    """Map a shard's arrays into memory and check them against the manifest.

    Args:
        folder: the store's folder.
        shard: the shard's entry in the manifest.
        vocabulary_size: the vocabulary size; every id must be smaller.
        contents: whether to read all values; otherwise only types and sizes are checked.

    Raises:
        BertkitError: an array has another type or size, an id is outside of the vocabulary, or
            offsets do not increase from the start to the end of the shard.
    """
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


LONGEST_NAME = 200
"""The maximum length of a shard's name in bytes."""


def row_type(name_bytes: int) -> np.dtype:
    """Return the dtype of the table's rows."""
    columns: list[Any] = [
        ("name", f"S{name_bytes}"),
        ("split", np.uint8),  # index in SPLITS
        ("documents", np.int64),
        ("sentences", np.int64),
        ("tokens", np.int64),
        ("bytes", np.int64, (len(ARRAYS),)),
        ("sha256", np.uint8, (len(ARRAYS), 32)),
    ]
    return np.dtype(columns)


def shard_rows(shards: Sequence[ShardInfo]) -> np.ndarray:
    """Return (shards,) rows of `row_type`: the table of a store's shards."""
    names = [shard.name.encode() for shard in shards]
    rows = np.zeros(len(shards), dtype=row_type(max(map(len, names), default=1)))
    rows["name"] = names
    rows["split"] = [SPLITS.index(shard.split) for shard in shards]
    for field in ("documents", "sentences", "tokens"):
        rows[field] = [getattr(shard, field) for shard in shards]
    for place, kind in enumerate(ARRAYS):
        rows["bytes"][:, place] = [shard.bytes[kind] for shard in shards]
        sums = b"".join(bytes.fromhex(shard.sha256[kind]) for shard in shards)
        rows["sha256"][:, place] = np.frombuffer(sums, np.uint8).reshape(-1, 32)
    return rows


class ShardIndex(Sequence[ShardInfo]):
    """The shards of one split; each entry is made from its row when it is accessed.

    Args:
        rows: (shards,) rows of `row_type`.
        path: the file of the table, for messages.
    """

    def __init__(self, rows: np.ndarray, path: Path) -> None:
        self.rows = rows
        self.path = path

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, place: int) -> ShardInfo: ...

    @overload
    def __getitem__(self, place: slice) -> ShardIndex: ...

    def __getitem__(self, place: int | slice) -> ShardInfo | ShardIndex:
        """Return one shard, or a `ShardIndex` of several.

        Raises:
            BertkitError: the row is damaged.
        """
        if isinstance(place, slice):
            return ShardIndex(self.rows[place], self.path)
        row = self.rows[place]
        try:
            return ShardInfo(
                name=row["name"].decode(),
                split=SPLITS[row["split"]],
                documents=int(row["documents"]),
                sentences=int(row["sentences"]),
                tokens=int(row["tokens"]),
                bytes=dict(zip(ARRAYS, row["bytes"].tolist(), strict=True)),
                sha256={kind: row["sha256"][at].tobytes().hex() for at, kind in enumerate(ARRAYS)},
            )
        except (ValueError, IndexError) as error:
            raise BertkitError(
                f"{self.path} is damaged ({error}); run the same `bertkit prepare` again"
            ) from None

    def total(self, field: str) -> int:
        """Return the number of documents, sentences or tokens in all shards."""
        return int(self.rows[field].sum())

    def checksums(self) -> str:
        """Return the checksums of all files, in order, as hex."""
        return self.rows["sha256"].tobytes().hex()


def read_shard_index(path: Path, sha256: str, split: str) -> ShardIndex:
    """Read the shards of a split from the table and check its checksum, given as hex.

    Raises:
        BertkitError: the table is missing or corrupt, or the file is not such a table.
    """
    again = "run the same `bertkit prepare` again"
    if not path.is_file():
        raise BertkitError(f"{path} is missing; {again}")
    if sha256_file(path) != sha256:
        raise BertkitError(f"{path} is corrupt (its checksum is wrong); {again}")
    rows = map_array(path)
    width = rows.dtype["name"].itemsize if "name" in (rows.dtype.names or ()) else 0
    if not 1 <= width <= LONGEST_NAME or rows.dtype != row_type(width) or rows.ndim != 1:
        raise BertkitError(f"{path} is not a table of shards; {again}")
    if len(rows) and rows["split"].max() >= len(SPLITS):
        raise BertkitError(f"{path} has a shard of an unknown split; {again}")
    return ShardIndex(rows[rows["split"] == SPLITS.index(split)], path)
