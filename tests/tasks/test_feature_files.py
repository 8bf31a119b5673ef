"""Files of features, read back by the libraries of their formats."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import safetensors
from bertkit.predict.feature_files import feature_format, npy_header, write_features
from safetensors.numpy import load_file

from bertkit.errors import BertkitError
from bertkit.files import read_json, sha256_file
from bertkit.predict import feature_files
from bertkit.predict.features import Extraction, TextFeatures, extract
from bertkit.tokenizer.wordpiece import Tokenizer
from tests.conftest import load_encoder

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
    lists = {
        name: json.loads(tensors.pop(name).tobytes())
        for name in ("tokens", "offsets")
        if name in tensors
    }
    assert sorted(tensors, key=int) == [str(n) for n in range(len(some))]
    for n, text in enumerate(some):
        assert tensors[str(n)].dtype == dtype
        np.testing.assert_array_equal(tensors[str(n)], text.vectors)
    with safetensors.safe_open(path, framework="np") as file:
        details = {name: json.loads(value) for name, value in file.metadata().items()}
    assert details == {"layers": "last"}
    if some[0].tokens:
        assert lists["tokens"] == [text.tokens for text in some]
        assert lists["offsets"] == [[list(o) for o in text.offsets] for text in some]
    else:
        assert lists == {}
    assert [file.name for file in path.parent.iterdir()] == ["f.safetensors"]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_npy(some: list[TextFeatures], tmp_path: Path, dtype: str) -> None:
    some = [text._replace(vectors=text.vectors.astype(dtype)) for text in some]
    write_features(tmp_path / "f.npy", some, details={"pooling": "?"})
    rows = np.load(tmp_path / "f.npy", mmap_mode="r")
    assert (rows.dtype, rows.ndim) == (np.dtype(dtype), 2)
    index = json.loads((tmp_path / "f.npy.json").read_text())
    assert index["sha256"] == sha256_file(tmp_path / "f.npy")
    bounds = index["boundaries"]
    assert bounds[-1] == len(rows)
    for n, text in enumerate(some):
        np.testing.assert_array_equal(rows[bounds[n] : bounds[n + 1]], text.vectors)
    assert index["pooling"] == "?"
    assert index.get("tokens", []) == ([text.tokens for text in some] if some[0].tokens else [])


def one_text(value: float, piece: str = "x") -> TextFeatures:
    return TextFeatures(np.full((1, 2), value, dtype=np.float32), [piece], [(0, 1)], 1)


def test_npy_replaces_its_own_files_only(tmp_path: Path) -> None:
    (tmp_path / "f.json").write_text("mine")
    for value in (1, 2):
        write_features(tmp_path / "f.npy", [one_text(value, 'ü"')] * 2)
    assert (tmp_path / "f.json").read_text() == "mine"
    rows, index = np.load(tmp_path / "f.npy"), read_json(tmp_path / "f.npy.json")
    assert index["sha256"] == sha256_file(tmp_path / "f.npy")
    assert rows.tolist() == [[2, 2], [2, 2]]
    assert index["tokens"] == [['ü"'], ['ü"']]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["f.json", "f.npy", "f.npy.json"]


def test_an_npy_never_has_the_index_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "f.npy"
    write_features(path, [one_text(1)])

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(feature_files, "write_feature_index", killed)
        with pytest.raises(KeyboardInterrupt):
            write_features(path, [one_text(2)])
    assert [file.name for file in tmp_path.iterdir()] == ["f.npy"], "not the old index"
    assert np.load(path).tolist() == [[2, 2]]


def test_a_run_that_fails_leaves_the_files_of_the_one_before(tmp_path: Path) -> None:
    def broken() -> Iterator[TextFeatures]:
        yield one_text(2)
        raise BertkitError("the input ends here")

    for name in feature_files.FEATURE_WRITERS:
        write_features(tmp_path / f"f.{name}", [one_text(1)])
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    for name in feature_files.FEATURE_WRITERS:
        with pytest.raises(BertkitError, match="the input ends here"):
            write_features(tmp_path / f"f.{name}", broken())
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
    assert np.load(tmp_path / "f.npy").tolist() == [[1, 1]]


@pytest.mark.parametrize(
    ("name", "wanted"),
    [("only.json", "npy"), ("vec", "npy"), ("f.npy", "parquet"), ("f.parquet", "safetensors")],
)
def test_endings_that_say_another_format(tmp_path: Path, name: str, wanted: str) -> None:
    with pytest.raises(BertkitError, match=f"does not fit the format {wanted}; .*ending .{wanted}"):
        write_features(tmp_path / name, [one_text(1)], wanted)
    assert list(tmp_path.iterdir()) == []
    assert feature_format(tmp_path / "f.bin", "parquet") == "parquet"
    assert feature_format(tmp_path / "F.NPY", "npy") == "npy"


def test_the_header_of_safetensors_is_bounded_and_checked_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The longest header that is let through is one that the library reads."""
    taken = []

    def many(most: int) -> Iterator[TextFeatures]:
        for number in range(most):
            taken.append(number)
            yield one_text(1, "x" * 100)

    path = tmp_path / "f.safetensors"
    monkeypatch.setattr(feature_files, "MAX_TENSORS_HEADER", 1000)
    with pytest.raises(BertkitError, match=r"hold more than \d+ such texts; choose parquet or npy"):
        write_features(path, many(10**6))
    most = len(taken) - 1
    assert 10 < most < 20
    write_features(path, many(most))
    assert len(load_file(path)) == most + 2
    length = int.from_bytes(path.read_bytes()[:8], "little")
    assert 900 < length < 1000 + 512
    assert length % 8 == 0


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
    if some[0].tokens:
        assert columns["token"] == [piece for text in some for piece in text.tokens]
        spans = list(zip(columns["start"], columns["end"], strict=True))
        assert spans == [span for text in some for span in text.offsets]
        assert columns["position"][:3] == [0, 1, 2]
    else:
        assert list(columns) == ["text", "vector"]


def test_files_that_cannot_be_written(tmp_path: Path) -> None:
    one = one_text(1)
    with pytest.raises(BertkitError, match="there is no format 'parket'; did you mean 'parquet'"):
        write_features(tmp_path / "f.parket", [one])
    with pytest.raises(BertkitError, match="no text"):
        write_features(tmp_path / "f.npy", [])

    def broken() -> Iterator[TextFeatures]:
        yield one
        raise BertkitError("the input ends here")

    for name in feature_files.FEATURE_WRITERS:
        with pytest.raises(BertkitError, match="the input ends here"):
            write_features(tmp_path / f"f.{name}", broken())
    assert list(tmp_path.iterdir()) == []
