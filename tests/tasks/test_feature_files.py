"""Files of features, read back by the libraries of their formats."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import safetensors
from safetensors.numpy import load_file

from bertkit.errors import BertkitError
from bertkit.model.directory import load_encoder
from bertkit.tasks import feature_files
from bertkit.tasks.feature_files import npy_header, write_features
from bertkit.tasks.features import Extraction, TextFeatures, extract
from bertkit.tokens.tokenizer import Tokenizer

TEXTS = ["River stone, meadow.", "", "walking zebra", "x" * 30, "lantern\t\u200b"]


@pytest.fixture(params=["tokens", "mean"])
def some(
    request: pytest.FixtureRequest, pretrained: Path, tokenizer: Tokenizer
) -> list[TextFeatures]:
    return list(
        extract(load_encoder(pretrained), tokenizer, TEXTS, Extraction(pooling=request.param))
    )


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_safetensors(some: list[TextFeatures], tmp_path: Path, dtype: str) -> None:
    path = tmp_path / "deep" / "f.safetensors"
    some = [text._replace(vectors=text.vectors.astype(dtype)) for text in some]
    write_features(path, iter(some), details={"layers": "last"})
    tensors = load_file(path)
    assert sorted(tensors, key=int) == [str(n) for n in range(len(some))]
    for n, text in enumerate(some):
        assert tensors[str(n)].dtype == dtype
        np.testing.assert_array_equal(tensors[str(n)], text.vectors)
    with safetensors.safe_open(path, framework="np") as file:
        details = {name: json.loads(value) for name, value in file.metadata().items()}
    assert details["layers"] == "last"
    if some[0].pieces:
        assert details["pieces"] == [text.pieces for text in some]
        assert details["offsets"] == [[list(o) for o in text.offsets] for text in some]
    else:
        assert "pieces" not in details
    assert [file.name for file in path.parent.iterdir()] == ["f.safetensors"]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_npy(some: list[TextFeatures], tmp_path: Path, dtype: str) -> None:
    some = [text._replace(vectors=text.vectors.astype(dtype)) for text in some]
    write_features(tmp_path / "f.npy", some, details={"pooling": "?"})
    rows = np.load(tmp_path / "f.npy", mmap_mode="r")
    assert (rows.dtype, rows.ndim) == (np.dtype(dtype), 2)
    index = json.loads((tmp_path / "f.json").read_text())
    bounds = index["boundaries"]
    assert bounds[-1] == len(rows)
    for n, text in enumerate(some):
        np.testing.assert_array_equal(rows[bounds[n] : bounds[n + 1]], text.vectors)
    assert index["pooling"] == "?"
    assert index.get("pieces", []) == ([text.pieces for text in some] if some[0].pieces else [])


def test_the_npy_header_does_not_grow() -> None:
    kind = np.dtype(np.float32)
    assert len(npy_header(0, 768, kind)) == len(npy_header(10**15, 768, kind))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_parquet(
    some: list[TextFeatures], tmp_path: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr(feature_files, "GROUP_ROWS", 4)
    some = [text._replace(vectors=text.vectors.astype(dtype)) for text in some]
    write_features(tmp_path / "f.parquet", some, details={"layers": "last"})
    table = parquet.read_table(tmp_path / "f.parquet")
    assert parquet.ParquetFile(tmp_path / "f.parquet").num_row_groups > 1
    assert json.loads(table.schema.metadata[b"bertkit"]) == {"layers": "last"}
    columns = table.to_pydict()
    vectors = np.concatenate([text.vectors for text in some])
    np.testing.assert_array_equal(np.array(columns["vector"], dtype=dtype), vectors)
    assert columns["text"] == [n for n, text in enumerate(some) for _ in text.vectors]
    if some[0].pieces:
        assert columns["piece"] == [piece for text in some for piece in text.pieces]
        spans = list(zip(columns["start"], columns["end"], strict=True))
        assert spans == [span for text in some for span in text.offsets]
        assert columns["token"][:3] == [0, 1, 2]
    else:
        assert list(columns) == ["text", "vector"]


def test_files_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = TextFeatures(np.ones((1, 2), dtype=np.float32), ["x"], [(0, 1)], 1)
    with pytest.raises(BertkitError, match="no format is called 'parket'; did you mean 'parquet'"):
        write_features(tmp_path / "f.parket", [one])
    with pytest.raises(BertkitError, match="no text"):
        write_features(tmp_path / "f.npy", [])
    monkeypatch.setattr(feature_files, "LONGEST_HEADER", 100)
    with pytest.raises(BertkitError, match="choose parquet or npy"):
        write_features(tmp_path / "f.safetensors", [one] * 9)

    def broken() -> Iterator[TextFeatures]:
        yield one
        raise BertkitError("the input ends here")

    for name in feature_files.WRITERS:
        with pytest.raises(BertkitError, match="the input ends here"):
            write_features(tmp_path / f"f.{name}", broken())
    assert list(tmp_path.iterdir()) == []
