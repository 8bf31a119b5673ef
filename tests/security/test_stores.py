"""Token stores, checkpoints and TensorFlow indexes of someone who means harm."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bertkit.corpus.store import TokenStore
from bertkit.errors import BertkitError
from bertkit.files import read_json, sha256_file, write_json
from bertkit.training.optimizer import (
    PROGRESS,
    checkpoints,
    digest,
    load_checkpoint,
    save_checkpoint,
)
from tests.conftest import Bomb


@pytest.fixture
def copy(store: TokenStore, tmp_path: Path) -> Path:
    """A store to be damaged."""
    return shutil.copytree(store.folder, tmp_path / "store")


def use(folder: Path) -> None:
    """Read everything in a store."""
    for split in ("train", "held_out"):
        opened = TokenStore(folder, split)
        assert opened.tokens + opened.sentences + opened.documents >= 0
        assert opened.content_hash
        assert len(opened.unigrams) == opened.tokenizer.size
        for index in range(len(opened.shards)):
            opened.arrays(index)


def change(folder: Path, **fields: Any) -> None:
    """Give the first shard of a store's manifest other values."""
    manifest = read_json(folder / "manifest.json")
    manifest["shards"][0] |= fields
    write_json(folder / "manifest.json", manifest)


@pytest.mark.parametrize(
    "name", ["../secret", "/etc/passwd", "a/b", "..", "", "a\0b", "a.b", "a\n", 5, None, ["a"]]
)
def test_shards_lie_in_their_store(name: Any, copy: Path) -> None:
    """Whole shards elsewhere do not help: names that lead out are refused before a file is read."""
    for file in copy.glob("train-00000-000.*.npy"):
        shutil.copy(file, copy.parent / file.name.replace("train-00000-000", "secret"))
    use(copy)
    change(copy, name=name)
    with pytest.raises(BertkitError, match=r"manifest of .* is damaged .* not a valid shard name"):
        use(copy)


VALUES = st.one_of(
    st.sampled_from([None, True, 0, -1, 10**12, 10**30, 1.5, float("nan"), "", "../x", [], {}]),
    st.integers() | st.floats() | st.text(max_size=5) | st.lists(st.integers(), max_size=2),
    st.dictionaries(st.sampled_from(["tokens", "sentences", "documents"]), st.integers()),
)


@pytest.mark.slow
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_a_changed_manifest_ends_in_a_store_or_in_one_line(data: Any, store: TokenStore) -> None:
    manifest = read_json(store.folder / "manifest.json")
    places = [manifest, manifest["shards"][0]]
    places += [manifest["shards"][0]["bytes"], manifest["shards"][0]["sha256"]]
    place = data.draw(st.sampled_from(places))
    place[data.draw(st.sampled_from(sorted(place)))] = data.draw(VALUES)
    with tempfile.TemporaryDirectory() as folder:
        other = Path(folder) / "store"
        shutil.copytree(store.folder, other)
        (other / "manifest.json").write_text(json.dumps(manifest))
        try:
            use(other)
        except BertkitError as error:
            assert len(str(error).splitlines()) == 1  # noqa: PT017 - either may happen


def replace_array(folder: Path, kind: str, array: np.ndarray, **options: Any) -> None:
    """Another array for the first shard, with a checksum to match."""
    manifest = read_json(folder / "manifest.json")
    shard = manifest["shards"][0]
    path = folder / f"{shard['name']}.{kind}.npy"
    np.save(path, array, **options)
    shard["bytes"][kind] = path.stat().st_size
    shard["sha256"][kind] = sha256_file(path)
    write_json(folder / "manifest.json", manifest)


def test_arrays_are_what_the_manifest_says(copy: Path, store: TokenStore) -> None:
    """The checksums of all these are right."""
    arrays = store.arrays(0)
    tokens, sentences = np.array(arrays.tokens), np.array(arrays.sentences)
    outside, backwards = tokens.copy(), sentences.copy()
    outside[5] = store.vocabulary_size
    backwards[1], backwards[2] = sentences[2], sentences[1]
    beyond = sentences.copy()
    beyond[-1] += 1
    for kind, array, message in (
        ("tokens", tokens.astype(np.float32), "holds float32"),
        ("tokens", tokens[:-1], "instead of uint16"),
        ("tokens", tokens[None], "instead of uint16"),
        ("tokens", outside, "outside of the .* tokens"),
        ("sentences", backwards, "inconsistent offsets"),
        ("sentences", beyond, "inconsistent offsets"),
    ):
        replace_array(copy, kind, array)
        with pytest.raises(BertkitError, match=message):
            use(copy)
        replace_array(copy, kind, {"tokens": tokens, "sentences": sentences}[kind])
        use(copy)


def test_arrays_of_objects_and_of_terabytes_are_refused(copy: Path, tmp_path: Path) -> None:
    objects = np.array([Bomb(tmp_path / "ran")], dtype=object)
    replace_array(copy, "tokens", objects, allow_pickle=True)
    with pytest.raises(BertkitError, match="is not an array of numbers"):
        use(copy)
    assert not (tmp_path / "ran").exists()
    replace_array(copy, "tokens", np.zeros(3, dtype=np.uint16))
    path = next(copy.glob("train-*.tokens.npy"))
    header = path.read_bytes().replace(b"(3,), }          ", b"(9000000000000,), }")
    path.write_bytes(header)
    change(copy, tokens=9 * 10**12)
    manifest = read_json(copy / "manifest.json")
    manifest["shards"][0]["bytes"]["tokens"] = path.stat().st_size
    manifest["shards"][0]["sha256"]["tokens"] = sha256_file(path)
    write_json(copy / "manifest.json", manifest)
    with pytest.raises(BertkitError, match=r"is not an array of numbers|instead of"):
        use(copy)


def test_files_of_a_checkpoint_lie_beside_it(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 3, {"model": {"a": torch.ones(2)}}, {})
    assert checkpoints(tmp_path) == [(3, path)]
    content = read_json(path / PROGRESS)
    del content["sha256"]
    for name in ("../model.safetensors", "/model.safetensors", ".."):
        content["files"] = {name: {"bytes": 1, "sha256": "0"}}
        write_json(path / PROGRESS, {**content, "sha256": digest(content)})
        with pytest.raises(BertkitError, match="is not a file next to it"):
            load_checkpoint(path, 3)
