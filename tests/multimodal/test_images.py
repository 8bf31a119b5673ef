"""Images as vectors: every kind of feature file and of picture, and what is refused."""

from __future__ import annotations

import os
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from bertkit.checkpoints.weights import write_tensors
from bertkit.datasets.columns import LabelSetColumns, TextColumns
from bertkit.errors import BertkitError
from bertkit.multimodal import images as module
from bertkit.multimodal.images import (
    PatchGrid,
    count_pixels,
    cut_into_patches,
    open_features,
    read_image,
)
from bertkit.text.lines import TextCounts

GRID = PatchGrid(8, 4)
FEATURES = np.random.default_rng(0).normal(size=(4, 3, 5)).astype(np.float32)


def refused(code: str, call: Callable[[], Any]) -> str:
    with pytest.raises(BertkitError) as found:
        call()
    assert found.value.code == code, found.value
    return str(found.value)


def write_features(path: Path, rows: np.ndarray) -> Path:
    """Write features in the format of the file's ending, numbered by their row."""
    if path.suffix == ".npy":
        np.save(path, rows)
    elif path.suffix == ".safetensors":
        write_tensors(path, {"features": torch.from_numpy(rows)})
    else:
        pq.write_table(pa.table({"other": [1] * len(rows), "vectors": rows.tolist()}), path)
    return path


@pytest.mark.parametrize("ending", ["npy", "safetensors", "parquet"])
def test_features_by_row_number(tmp_path: Path, ending: str) -> None:
    features = open_features(write_features(tmp_path / f"f.{ending}", FEATURES), "image")
    for row in (0, 3):
        np.testing.assert_array_equal(features.vectors(str(row), "t:1"), FEATURES[row])
        assert features.vectors(row, "t:1").dtype == np.float32
    for key in ("4", "-1", "x", "1.0", "9" * 30, "0" * 18 + "9"):
        message = refused("image-missing", lambda key=key: features.vectors(key, "t.csv:7"))
        assert message.startswith("t.csv:7: ")


def test_one_vector_an_image(tmp_path: Path) -> None:
    for ending in ("npy", "parquet"):
        path = write_features(tmp_path / f"f.{ending}", FEATURES[:, 0])
        np.testing.assert_array_equal(
            open_features(path, "image").vectors(2, "t:1"), FEATURES[2, :1]
        )


def test_features_by_key_may_differ_in_their_number(tmp_path: Path) -> None:
    tensors = {"a": torch.ones(2, 5), "b": torch.zeros(4, 5, dtype=torch.float16)}
    write_tensors(tmp_path / "f.safetensors", tensors)
    lists = {name: tensor.tolist() for name, tensor in tensors.items()}
    table = pa.table({"image": list(lists), "vectors": list(lists.values())})
    pq.write_table(table, tmp_path / "f.parquet")
    for ending in ("safetensors", "parquet"):
        features = open_features(tmp_path / f"f.{ending}", "image")
        assert features.vectors("a", "t:1").tolist() == [[1.0] * 5] * 2
        assert features.vectors("b", "t:1").shape == (4, 5)
        refused("image-missing", lambda features=features: features.vectors("0", "t:1"))


def test_damaged_feature_files(tmp_path: Path) -> None:
    np.save(tmp_path / "four.npy", np.zeros((1, 2, 3, 4)))
    np.save(tmp_path / "text.npy", np.array([["a"]]))
    np.save(tmp_path / "object.npy", np.array([[None]]), allow_pickle=True)
    (tmp_path / "torn.npy").write_bytes((tmp_path / "four.npy").read_bytes()[:90])
    (tmp_path / "torn.parquet").write_bytes(b"PAR1")
    (tmp_path / "torn.safetensors").write_bytes(b"torn")
    for name, rows in (("negative.npy", -8), ("overflow.npy", 2**62 // 3)):
        header = {"descr": "<f4", "fortran_order": False, "shape": (rows, 3, 5)}
        with (tmp_path / name).open("wb") as file:
            np.lib.format.write_array_header_1_0(file, header)
    np.savez(tmp_path / "several.npz", FEATURES)
    (tmp_path / "several.npz").rename(tmp_path / "several.npy")
    pq.write_table(pa.table({"image": ["a", "a"], "v": [[1.0]] * 2}), tmp_path / "twice.parquet")
    pq.write_table(pa.table({"a": [1]}), tmp_path / "none.parquet")
    write_tensors(tmp_path / "whole.safetensors", {"a": torch.ones(2, dtype=torch.int64)})
    names = [path.name for path in tmp_path.iterdir()]
    for name in (*names, "absent.npy", "features.pt"):
        refused("image-features", lambda name=name: open_features(tmp_path / name, "image"))


def test_keys_that_are_floats_are_those_of_the_data(tmp_path: Path) -> None:
    pq.write_table(pa.table({"image": [10.0, 11.0], "v": [[1.0], [2.0]]}), tmp_path / "f.parquet")
    features = open_features(tmp_path / "f.parquet", "image")
    for key in (11, 11.0, "11", np.float64(11)):
        assert features.vectors(key, "t").tolist() == [[2]]


def test_keys_in_a_column_of_another_name_are_not_ignored(tmp_path: Path) -> None:
    table = pa.table({"id": [1, 0], "v": [[1.0], [2.0]]})
    pq.write_table(table, tmp_path / "f.parquet")
    assert open_features(tmp_path / "f.parquet", "id").vectors("1", "t").tolist() == [[1]]
    with pytest.raises(BertkitError, match="the name 'image', or remove it"):
        open_features(tmp_path / "f.parquet", "image")


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "f.npy"
    np.save(path, FEATURES)
    assert open_features(path, "image").rows == 4
    np.save(path, FEATURES[:1])
    assert open_features(path, "image").rows == 1


def test_lists_of_numbers() -> None:
    for value in (FEATURES[0], FEATURES[0].tolist(), str(FEATURES[0].tolist())):
        np.testing.assert_allclose(read_image(value, "t:1", GRID), FEATURES[0])
    assert read_image([1, 2], "t:1", None).tolist() == [[1.0, 2.0]]
    for wrong in (
        [[1, 2], [3]],
        [],
        [[]],
        [["a"]],
        {"a": 1},
        FEATURES,
        "[[1], [2, 3]]",
        3 + 1j,
        17,
        torch.ones(3, requires_grad=True),
    ):
        refused("image-shape", lambda wrong=wrong: read_image(wrong, "t:1", GRID))
    for wrong in ([[float("nan")]], [float("inf"), 1.0], [1e300], [None]):
        message = refused("image-nan", lambda wrong=wrong: read_image(wrong, "t.csv:3", GRID))
        assert message.startswith("t.csv:3: ")


def test_patches_are_the_squares_of_a_picture() -> None:
    pixels = np.arange(6 * 6 * 3, dtype=np.uint8).reshape(6, 6, 3)
    patches = cut_into_patches(pixels, 2)
    assert patches.shape == (9, 12)
    for row in range(3):
        for column in range(3):
            square = pixels[2 * row : 2 * row + 2, 2 * column : 2 * column + 2]
            assert patches[3 * row + column].tolist() == square.flatten().tolist()


def test_pictures_from_files_bytes_and_pixels(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    path = tmp_path / "a.png"
    Image.fromarray(pixels).save(path)
    wanted = cut_into_patches(pixels, 4)
    content = path.read_bytes()
    whole = {"bytes": content, "path": None}  # of a Hugging Face data set
    named = {"bytes": None, "path": "a.png"}
    buffers = bytearray(content), memoryview(content)
    for value in (path, "a.png", content, *buffers, pixels, whole, named, Image.fromarray(pixels)):
        found = read_image(value, "t:1", GRID, folder=tmp_path)
        assert found.dtype == np.uint8
        np.testing.assert_array_equal(found, wanted)
    for mode in ("L", "RGBA", "P"):
        Image.fromarray(pixels).convert(mode).save(path)
        assert read_image(path, "t:1", GRID).shape == (4, 48)
    Image.fromarray(pixels).resize((31, 17)).save(tmp_path / "b.jpg")
    assert read_image(tmp_path / "b.jpg", "t:1", GRID).shape == (4, 48)
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe.png")
        refused("image-file", lambda: read_image(tmp_path / "pipe.png", "t:1", GRID))


def test_pictures_with_odd_metadata_are_read_without_a_warning() -> None:
    """A warning is an error in the tests."""
    pixels, file = np.arange(8 * 16 * 3, dtype=np.uint8).reshape(16, 8, 3), BytesIO()
    exif = Image.Exif()
    exif[274] = 6  # to be turned by 90 degrees
    Image.fromarray(pixels).save(file, "PNG", exif=exif)
    turned = Image.fromarray(pixels).rotate(-90, expand=True)
    read, opened = read_image(file.getvalue(), "t:1", GRID), Image.open(file)
    np.testing.assert_array_equal(read, read_image(turned, "t:1", GRID))
    np.testing.assert_array_equal(read, read_image(opened, "t:1", GRID))
    assert opened.size == (8, 16)  # the caller's picture stays as it is
    deep = Image.fromarray(np.linspace(0, 65535, 64, dtype=np.uint16).reshape(8, 8))
    refused("image-file", lambda: read_image(deep, "t:1", GRID))
    broken = BytesIO()
    Image.fromarray(pixels).save(broken, "JPEG", exif=b"Exif\0\0II*\0\xff\xff\xff\xff")
    assert read_image(broken.getvalue(), "t:1", GRID).shape == (4, 48)


def test_pixels_are_counted_from_the_head_of_a_picture() -> None:
    file = BytesIO()
    Image.fromarray(np.zeros((7, 5), np.uint8)).save(file, "PNG")
    assert count_pixels(file.getvalue()) == 35
    assert count_pixels(file.getvalue()[:50]) in (0, 35), "the rest is torn"
    assert count_pixels(b"no picture") == 0


def test_sizes_that_are_refused() -> None:
    for size, patch in ((0, 1), (16, 0), (16, 7), (16, 32), (8192, 16), (4096, 1024)):
        refused("image-size", PatchGrid(size, patch).check)


def test_bad_pictures_name_the_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Image.fromarray(np.zeros((64, 64), np.uint8)).save(tmp_path / "a.png")
    content = (tmp_path / "a.png").read_bytes()
    (tmp_path / "torn.png").write_bytes(content[: len(content) // 2])
    (tmp_path / "text.png").write_text("no picture")
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(tmp_path / "a.gif")
    deep = np.linspace(0, 65535, 64, dtype=np.uint16).reshape(8, 8)
    Image.fromarray(deep).save(tmp_path / "deep.png")
    for name in ("absent.png", "torn.png", "text.png", "a.gif", ".", "deep.png"):
        message = refused(
            "image-file", lambda name=name: read_image(name, "t.csv:2", GRID, folder=tmp_path)
        )
        assert message.startswith("t.csv:2: ")
    refused("image-file", lambda: read_image(b"", "t:1", GRID))
    for empty in (np.zeros((0, 5, 3), np.uint8), np.zeros((5, 0), np.uint8)):
        refused("image-file", lambda empty=empty: read_image(empty, "t:1", GRID))
    refused("image-kind", lambda: read_image(content, "t:1", None))
    monkeypatch.setattr(module, "MOST_PIXELS", 64 * 64 - 1)
    refused("image-file", lambda: read_image(content, "t:1", GRID))


def test_numbers_of_images_that_a_table_holds_as_floats(tmp_path: Path) -> None:
    np.save(tmp_path / "f.npy", FEATURES)
    features = open_features(tmp_path / "f.npy", "")
    np.testing.assert_array_equal(features.vectors(1.0, "t:1"), features.vectors("1", "t:1"))


def test_rows_of_a_file_get_their_images(tmp_path: Path) -> None:
    np.save(tmp_path / "f.npy", FEATURES)
    file = tmp_path / "t.csv"
    file.write_text("text,image,label\none,3,a\ntwo,,b\n,1,b\nthree,0,a\n")
    columns = TextColumns(image_column="image", image_features=str(tmp_path / "f.npy"))
    counts = TextCounts()
    found = list(columns.read(file, counts))
    assert [given.text for given in found] == ["one", "three"]
    np.testing.assert_array_equal(found[0].image, FEATURES[3])
    assert counts.skipped == {"empty 'image'": 1, "empty 'text'": 1}
    file.write_text("text,image,label\none,3,a\ntwo,4,b\n")
    message = refused("image-missing", lambda: list(columns.read(file, TextCounts())))
    assert message.startswith(f"{file}:3: ")


def test_texts_of_one_image_share_it(tmp_path: Path) -> None:
    Image.new("RGB", (9, 9)).save(tmp_path / "a.png")
    write_features(tmp_path / "f.parquet", FEATURES)
    (tmp_path / "t.csv").write_text("text,image,row,label\na,a.png,2,x\nb,a.png,2,y\nc,a.png,1,y\n")
    one, other, _ = TextColumns(image_column="image").read(tmp_path / "t.csv", TextCounts())
    assert np.shares_memory(one.image, other.image)
    columns = TextColumns(image_column="row", image_features=str(tmp_path / "f.parquet"))
    one, other, third = columns.read(tmp_path / "t.csv", TextCounts())
    assert np.shares_memory(one.image, other.image)
    np.testing.assert_array_equal([one.image, third.image], FEATURES[[2, 1]])


def test_paths_are_relative_to_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sub").mkdir()
    Image.fromarray(np.full((8, 8, 3), 7, np.uint8)).save(tmp_path / "sub" / "a.png")
    file = tmp_path / "sub" / "t.jsonl"
    file.write_text('{"text": "one", "image": "a.png", "labels": ["x"]}\n')
    monkeypatch.chdir(tmp_path)
    columns = LabelSetColumns(image_column="image", label="labels", image_size=8, patch_size=4)
    [given] = columns.read(file, TextCounts())
    assert (given.image == 7).all()
    assert given.label == ("x",)


def test_columns_that_cannot_be_combined(tmp_path: Path) -> None:
    refused("image-pair", lambda: TextColumns(pair="b", image_column="c"))
    for sizes in ((224, 15), (0, 0), (16, 32), (8192, 16)):
        refused(
            "image-size",
            lambda sizes=sizes: TextColumns(
                image_column="c", image_size=sizes[0], patch_size=sizes[1]
            ),
        )
    (tmp_path / "t.csv").write_text("text,label\none,a\n")
    for columns in (TextColumns(image_features="f.npy"), TextColumns(image_size=32)):
        refused(
            "image-column",
            lambda columns=columns: list(columns.read(tmp_path / "t.csv", TextCounts())),
        )
