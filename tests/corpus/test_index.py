"""The list of many shards as a table: the same store, opened without parsing each."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from benchmarks.reading import write_store
from bertkit.corpus import writers as writing
from bertkit.corpus.shards import (
    ARRAYS,
    ShardIndex,
    ShardInfo,
    read_shard_index,
    row_type,
    shard_rows,
)
from bertkit.corpus.store import TokenStore
from bertkit.errors import BertkitError
from bertkit.files import read_json, sha256_file, write_array, write_json

SHARDS = 40


def entries(count: int = 10) -> list[ShardInfo]:
    """Shards of both splits."""
    sums = [hashlib.sha256(bytes([n])).hexdigest() for n in range(3)]
    return [
        ShardInfo(
            name=f"{'held-out' if n % 4 == 3 else 'train'}-{n:0{1 + n % 3}d}",
            split="held_out" if n % 4 == 3 else "train",
            documents=n,
            sentences=2 * n,
            tokens=(1 << 40) + n,
            bytes={kind: 100 * n + place for place, kind in enumerate(ARRAYS)},
            sha256=dict(zip(ARRAYS, sums, strict=True)),
        )
        for n in range(count)
    ]


def test_rows_hold_what_entries_do(tmp_path: Path) -> None:
    shards = entries()
    path = tmp_path / "shards.npy"
    write_array(path, shard_rows(shards))
    for split in ("train", "held_out"):
        index = read_shard_index(path, sha256_file(path), split)
        expected = [shard for shard in shards if shard.split == split]
        assert list(index) == expected
        assert list(index[1:]) == expected[1:]
        assert index[-1] == expected[-1]
        assert index.total("tokens") == sum(shard.tokens for shard in expected)
        assert index.checksums() == "".join(s.sha256[kind] for s in expected for kind in ARRAYS)
        with pytest.raises(IndexError):
            index[len(expected)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[TokenStore, TokenStore]:
    """The same store with the list in the manifest, and beside it."""
    folder = tmp_path_factory.mktemp("index")
    listed = write_store(folder / "listed", SHARDS, 1500, real=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writing, "INLINE_SHARDS", 5)
        indexed = write_store(folder / "indexed", SHARDS, 1500, real=3)
    return listed, indexed


def test_a_table_changes_nothing_but_the_manifest(pair: tuple[TokenStore, TokenStore]) -> None:
    listed, indexed = pair
    assert isinstance(indexed.shards, ShardIndex)
    assert isinstance(listed.shards, list)
    assert list(indexed.shards) == listed.shards
    assert indexed.content_hash == listed.content_hash
    for field in ("tokens", "documents", "sentences"):
        assert getattr(indexed, field) == getattr(listed, field)
    assert (indexed.unigrams == listed.unigrams).all()
    for index in (0, SHARDS - 1):
        assert (indexed.arrays(index).tokens == listed.arrays(index).tokens).all()
    assert TokenStore(indexed.folder, "held_out").tokens == 0
    manifest = read_json(indexed.folder / "manifest.json")
    assert manifest["format"] == 2
    assert "shards" not in manifest
    assert read_json(listed.folder / "manifest.json")["format"] == 1


@pytest.mark.parametrize("damage", ["missing", "corrupt", "other", "split", "objects"])
def test_damaged_tables_are_named(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "shards.npy"
    rows = shard_rows(entries())
    write_array(path, rows)
    checksum = sha256_file(path)
    if damage == "missing":
        path.unlink()
    elif damage == "corrupt":
        path.write_bytes(path.read_bytes()[:-1] + b"\1")
    elif damage == "other":
        write_array(path, np.zeros(4))
    elif damage == "split":
        rows["split"] = 7
        write_array(path, rows)
    else:
        np.save(path, np.array([{}], dtype=object), allow_pickle=True)
    if damage not in ("missing", "corrupt"):
        checksum = sha256_file(path)
    with pytest.raises(BertkitError, match=r"shards\.npy (is|has) ") as caught:
        read_shard_index(path, checksum, "train")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [("name", b"../secret"), ("name", b""), ("name", b"\xff"), ("tokens", -1), ("bytes", 1 << 60)],
)
def test_rows_are_checked_as_entries_are(field: str, value: object, tmp_path: Path) -> None:
    rows = shard_rows(entries())
    rows[field][2] = value
    index = ShardIndex(rows, tmp_path / "shards.npy")
    assert index[1].name
    with pytest.raises(BertkitError, match=r"shards\.npy is damaged"):
        _ = index[2]


def test_a_manifest_without_its_table(pair: tuple[TokenStore, TokenStore], tmp_path: Path) -> None:
    manifest = read_json(pair[1].folder / "manifest.json")
    for change in ({"shards_sha256": 5}, {"format": 3}, {"format": 1}):
        write_json(tmp_path / "manifest.json", {**manifest, **change})
        with pytest.raises(BertkitError, match=r"shards\.npy is missing|has format|is damaged"):
            TokenStore(tmp_path)
    del manifest["shards_sha256"]
    write_json(tmp_path / "manifest.json", manifest)
    with pytest.raises(BertkitError, match="is damaged"):
        TokenStore(tmp_path)


def test_a_row_is_small() -> None:
    """Fifty thousand shards are ten megabytes."""
    assert row_type(20).itemsize < 200
