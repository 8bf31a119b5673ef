"""Files of features, written while the texts are computed, so that memory does not grow.

| format      | what                                                                              |
|-------------|-----------------------------------------------------------------------------------|
| safetensors | a tensor for each text, "0", "1", ...; pieces and offsets as JSON in its metadata  |
| parquet     | a row for each token: text, token, piece, start, end, vector; pooled: text, vector |
| npy         | one array (rows, width); `NAME.json` beside it says where each text begins         |
"""

from __future__ import annotations

import io
import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from bertkit.errors import BertkitError, nearest
from bertkit.files import write_atomic, write_text
from bertkit.tasks.features import TextFeatures
from bertkit.text.documents import optional_library

LONGEST_HEADER = 100_000_000
"""What safetensors accepts, in bytes."""
NAMES = {"float32": "F32", "float16": "F16"}
"""NumPy's names -> those of safetensors."""
GROUP_ROWS = 8192
"""Rows of a Parquet file that are written together."""


def write_features(
    path: Path,
    texts: Iterable[TextFeatures],
    format: str = "auto",  # noqa: A002
    details: Mapping[str, Any] | None = None,
) -> None:
    """Write the features of texts, whole or not at all.

    Args:
        path: the file; one of the same name is replaced.
        texts: at least one; they are taken one after the other.
        format: one of the table above, or "auto" for the file's ending.
        details: plain JSON values that say how the vectors were made.

    Raises:
        BertkitError: unknown format, no text, a missing library, or a file that cannot be written.
    """
    chosen = feature_format(path, format)
    rows = iter(texts)
    first = next(rows, None)
    if first is None:
        raise BertkitError(f"there is no text to write to {path}; check the input")
    WRITERS[chosen](path, chain([first], rows), first, dict(details or {}))


def feature_format(path: Path, format: str) -> str:  # noqa: A002
    """The format asked for, or that of the file's ending.

    Raises:
        BertkitError: there is none.
    """
    found = path.suffix.removeprefix(".").lower() if format == "auto" else format
    if found not in WRITERS:
        raise BertkitError(
            f"{path}: no format is called '{found}'{nearest(found, WRITERS)}; give --format or "
            "another ending"
        )
    return found


def write_safetensors(
    path: Path, texts: Iterable[TextFeatures], first: TextFeatures, details: dict[str, Any]
) -> None:
    """The numbers go to a nameless file first: the header before them must know all shapes."""

    def write(temporary: Path) -> None:
        header: dict[str, Any] = {}
        tokens: dict[str, list[Any]] = {"pieces": [], "offsets": []}
        end = 0
        with tempfile.TemporaryFile(dir=path.parent) as numbers:
            for number, text in enumerate(texts):
                size = write_numbers(numbers, text.vectors)
                header[str(number)] = {
                    "dtype": NAMES[text.vectors.dtype.name],
                    "shape": list(text.vectors.shape),
                    "data_offsets": [end, end + size],
                }
                end += size
                tokens["pieces"].append(text.pieces)
                tokens["offsets"].append(text.offsets)
            kept = {**details, **tokens} if first.pieces else details
            header["__metadata__"] = {name: json.dumps(value) for name, value in kept.items()}
            start = json.dumps(header, ensure_ascii=False).encode()
            start += b" " * (-len(start) % 8)
            if len(start) > LONGEST_HEADER:
                raise BertkitError(
                    f"{path}: safetensors cannot hold so many texts; choose parquet or npy"
                )
            numbers.seek(0)
            with temporary.open("wb") as file:
                file.write(len(start).to_bytes(8, "little") + start)
                shutil.copyfileobj(numbers, file, 1 << 20)

    write_atomic(path, write)


def write_numbers(file: BinaryIO | Any, vectors: np.ndarray) -> int:
    """Append an array's bytes, little-endian and row by row; how many they are."""
    little = np.ascontiguousarray(vectors, dtype=vectors.dtype.newbyteorder("<"))
    file.write(little.data)
    return little.nbytes


def write_npy(
    path: Path, texts: Iterable[TextFeatures], first: TextFeatures, details: dict[str, Any]
) -> None:
    """The header is written twice: NumPy leaves room in it for the final number of rows."""
    boundaries = [0]
    pieces: list[list[str]] = []
    offsets: list[list[tuple[int, int]]] = []

    def write(temporary: Path) -> None:
        width, kind = first.vectors.shape[1], first.vectors.dtype
        with temporary.open("wb") as file:
            file.write(npy_header(0, width, kind))
            for text in texts:
                write_numbers(file, text.vectors)
                boundaries.append(boundaries[-1] + len(text.vectors))
                pieces.append(text.pieces)
                offsets.append(text.offsets)
            file.seek(0)
            file.write(npy_header(boundaries[-1], width, kind))

    write_atomic(path, write)
    tokens = {"pieces": pieces, "offsets": offsets} if first.pieces else {}
    index = {**details, "boundaries": boundaries, **tokens}
    write_text(path.with_suffix(".json"), json.dumps(index, ensure_ascii=False) + "\n")


def npy_header(rows: int, width: int, kind: np.dtype[Any]) -> bytes:
    """What stands before the numbers; equally long for any number of rows."""
    header = io.BytesIO()
    shape = {"descr": kind.newbyteorder("<").str, "fortran_order": False, "shape": (rows, width)}
    np.lib.format.write_array_header_1_0(header, shape)
    return header.getvalue()


def write_parquet(
    path: Path, texts: Iterable[TextFeatures], first: TextFeatures, details: dict[str, Any]
) -> None:
    """The details are in the file's metadata, under "bertkit"."""
    arrow = optional_library("pyarrow", "Parquet files")
    parquet = optional_library("pyarrow.parquet", "Parquet files")
    width = first.vectors.shape[1]
    number = arrow.float32() if first.vectors.dtype == np.float32 else arrow.float16()
    token_fields = [("token", arrow.int32()), ("piece", arrow.string())]
    token_fields += [("start", arrow.int32()), ("end", arrow.int32())]
    fields = [("text", arrow.int64()), *(token_fields if first.pieces else [])]
    schema = arrow.schema(
        [*fields, ("vector", arrow.list_(number, width))], {"bertkit": json.dumps(details)}
    )

    def write(temporary: Path) -> None:
        with parquet.ParquetWriter(temporary, schema, use_dictionary=["piece"]) as file:
            for columns, vectors in row_groups(texts):
                flat = arrow.array(vectors.reshape(-1))
                columns["vector"] = arrow.FixedSizeListArray.from_arrays(flat, width)
                file.write_table(arrow.table([columns[name] for name in schema.names], schema))

    write_atomic(path, write)


def row_groups(texts: Iterable[TextFeatures]) -> Iterator[tuple[dict[str, Any], np.ndarray]]:
    """Columns and vectors of some texts at a time, `GROUP_ROWS` rows or a little more."""
    group: list[tuple[int, TextFeatures]] = []
    rows = 0
    for numbered in enumerate(texts):
        group.append(numbered)
        rows += len(numbered[1].vectors)
        if rows >= GROUP_ROWS:
            yield columns_of(group)
            group, rows = [], 0
    if group:
        yield columns_of(group)


def columns_of(group: list[tuple[int, TextFeatures]]) -> tuple[dict[str, Any], np.ndarray]:
    """The columns but the vectors, by name; and the vectors, (rows, width)."""
    sizes = [len(text.vectors) for _, text in group]
    spans = [span for _, text in group for span in text.offsets]
    columns = {
        "text": np.repeat([number for number, _ in group], sizes),
        "token": np.concatenate([np.arange(size) for size in sizes]),
        "piece": [piece for _, text in group for piece in text.pieces],
        "start": [start for start, _ in spans],
        "end": [end for _, end in spans],
    }
    return columns, np.concatenate([text.vectors for _, text in group])


WRITERS: dict[str, Callable[[Path, Iterable[TextFeatures], TextFeatures, dict[str, Any]], None]] = {
    "safetensors": write_safetensors,
    "parquet": write_parquet,
    "npy": write_npy,
}
