"""The shards of a large store as a table, so that opening the store does not parse each of them.

A manifest lists up to a few hundred shards as JSON. A store of more has format 2: the list is the
file `shards.npy`, mapped into memory, and the manifest has the file's checksum. A row becomes a
`ShardInfo`, with the checks of that class, when its shard is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np

from bertkit.corpus.shards import ARRAYS, SPLITS, ShardInfo
from bertkit.errors import BertkitError
from bertkit.files import map_array, sha256_file

LONGEST_NAME = 200
"""Bytes of the longest name of a shard."""


def row_type(name_bytes: int) -> np.dtype:
    """The type of a table's rows."""
    columns: list[Any] = [
        ("name", f"S{name_bytes}"),
        ("split", np.uint8),  # place in SPLITS
        ("documents", np.int64),
        ("sentences", np.int64),
        ("tokens", np.int64),
        ("bytes", np.int64, (len(ARRAYS),)),
        ("sha256", np.uint8, (len(ARRAYS), 32)),
    ]
    return np.dtype(columns)


def to_rows(shards: Sequence[ShardInfo]) -> np.ndarray:
    """(shards,) the table of a store's shards."""
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
    """The shards of one split; each is made of its row when it is asked for.

    Args:
        rows: (shards,) of `row_type`.
        path: of the table, for messages.
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
        """One shard, or some of them.

        Raises:
            BertkitError: the row is no shard's.
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
        """Documents, sentences or tokens of all shards."""
        return int(self.rows[field].sum())

    def checksums(self) -> str:
        """The checksums of all files, in order, as hex."""
        return self.rows["sha256"].tobytes().hex()


def read_index(path: Path, sha256: str, split: str) -> ShardIndex:
    """The shards of a split.

    Raises:
        BertkitError: the table is missing, corrupt or none.
    """
    again = "run the same `bertkit prepare` again"
    if not path.is_file():
        raise BertkitError(f"{path} is missing; {again}")
    if sha256_file(path) != sha256:
        raise BertkitError(f"{path} is corrupt (its checksum is wrong); {again}")
    rows = map_array(path)
    width = rows.dtype["name"].itemsize if "name" in (rows.dtype.names or ()) else 0
    if not 1 <= width <= LONGEST_NAME or rows.dtype != row_type(width) or rows.ndim != 1:
        raise BertkitError(f"{path} is no table of shards; {again}")
    if len(rows) and rows["split"].max() >= len(SPLITS):
        raise BertkitError(f"{path} has a shard of an unknown split; {again}")
    return ShardIndex(rows[rows["split"] == SPLITS.index(split)], path)
