"""Files of features (paper section 5.3), written one text at a time as they are computed.

| format      | content                                                                            |
|-------------|------------------------------------------------------------------------------------|
| safetensors | a tensor for each text, "0", "1", ...; tensors "tokens" and "offsets": JSON, UTF-8 |
| parquet     | a row per token: text, position, token, start, end, vector; pooled: text, vector   |
| npy         | one array (rows, width); `NAME.npy.json` has the first row of each text            |

Only the header of safetensors grows in memory, up to the 100 MB that the format allows.
"""

from __future__ import annotations

import io
import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from bertkit.errors import BertkitError, nearest
from bertkit.files import BLOCK_BYTES, disk_errors, escaped, sha256_file, write_atomic
from bertkit.predict.features import TextFeatures
from bertkit.predict.tables import require_utf8
from bertkit.text.documents import optional_library
from bertkit.text.lines import cut_blocks

MAX_TENSORS_HEADER = 100_000_000 - 512
"""The maximum header size of safetensors in bytes, less the entries after the last text."""
TOKEN_FIELDS = ("tokens", "offsets")
"""The fields of `TextFeatures` that are written in addition to the vectors."""
NAMES = {"float32": "F32", "float16": "F16"}
"""NumPy's dtype names -> those of safetensors."""
GROUP_ROWS = 8192
"""The approximate number of rows that are written to a Parquet file at a time."""


def write_features(
    path: Path,
    texts: Iterable[TextFeatures],
    format: str = "auto",  # noqa: A002
    details: Mapping[str, Any] | None = None,
) -> None:
    """Write the features of texts to a file, either completely or not at all.

    The texts are consumed one after the other. The format is one from the module's table, or "auto"
    to choose it by the file's suffix; `details` describe in JSON values how the vectors were made.

    Raises:
        BertkitError: the format is unknown or does not match the suffix, there is no text or more
            than the format can hold, a library is missing, or the file cannot be written.
    """
    chosen = feature_format(path, format)
    rows = iter(texts)
    first = next(rows, None)
    if first is None:
        raise BertkitError(f"there is no text to write to {path}; check the input")
    if chosen == "parquet":
        require_utf8(path)
    FEATURE_WRITERS[chosen](path, chain([first], rows), first, dict(details or {}))


def feature_format(path: Path, format: str) -> str:  # noqa: A002
    """Return the requested format, or the one of the file's suffix if it is "auto".

    Raises:
        BertkitError: the format is unknown, or the file's suffix belongs to another one.
    """
    ending = path.suffix.removeprefix(".").lower()
    found = ending if format == "auto" else format
    if found not in FEATURE_WRITERS:
        raise BertkitError(
            f"{path}: give --format or another ending; there is no format "
            f"'{found}'{nearest(found, FEATURE_WRITERS)}"
        )
    if found != ending and (found == "npy" or ending in FEATURE_WRITERS):  # npy adds a second file
        raise BertkitError(f"{path} does not fit the format {found}; use the ending .{found}")
    return found


class JsonList:
    """A JSON array of at least one item that is built up in a file."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.size = 1  # of the whole array, including the bracket that `copy_to` adds

    def append(self, value: Any) -> None:
        """Append an item to the array."""
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        self.size += self.file.write(("[" if self.size == 1 else ",").encode() + text.encode())

    def copy_to(self, file: BinaryIO) -> None:
        """Write the array to another file."""
        self.file.seek(0)
        shutil.copyfileobj(self.file, file, BLOCK_BYTES)
        file.write(b"]")


@contextmanager
def json_lists(path: Path, names: Iterable[str]) -> Iterator[dict[str, JsonList]]:
    """Provide arrays by name, stored in anonymous temporary files in the folder of `path`."""
    with disk_errors(path), ExitStack() as files:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield {
            name: JsonList(files.enter_context(tempfile.TemporaryFile(dir=path.parent)))
            for name in names
        }


class TensorsHeader:
    """The header of a safetensors file, with the metadata and each tensor's type and offsets."""

    def __init__(self, details: Mapping[str, Any]) -> None:
        metadata = {name: json.dumps(value) for name, value in details.items()}
        self.text = bytearray(json.dumps({"__metadata__": metadata}).encode().removesuffix(b"}"))
        self.end = 0

    def add(self, name: str, kind: str, shape: Sequence[int], size: int) -> None:
        """Add an entry for the next tensor, whose data take `size` bytes."""
        entry = {"dtype": kind, "shape": list(shape), "data_offsets": [self.end, self.end + size]}
        self.text += f',"{name}":{json.dumps(entry, separators=(",", ":"))}'.encode()
        self.end += size

    def whole(self) -> bytes:
        """Return the header's length and the header, padded so that the tensors are aligned."""
        text = bytes(self.text) + b"}"
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text


def write_safetensors(
    path: Path, texts: Iterable[TextFeatures], first: TextFeatures, details: dict[str, Any]
) -> None:
    """Write safetensors, with the vectors in a temporary file until all shapes are known."""
    names = TOKEN_FIELDS if first.tokens else ()
    header = TensorsHeader(details)

    def write(temporary: Path) -> None:
        with json_lists(path, names) as lists, tempfile.TemporaryFile(dir=path.parent) as numbers:
            for number, text in enumerate(texts):
                size = write_numbers(numbers, text.vectors)
                header.add(str(number), NAMES[text.vectors.dtype.name], text.vectors.shape, size)
                if len(header.text) > MAX_TENSORS_HEADER:
                    raise BertkitError(
                        f"{path}: safetensors cannot hold more than {number:,} such texts; choose "
                        f"parquet or npy"
                    )
                for name in names:
                    lists[name].append(getattr(text, name))
            for name in names:
                header.add(name, "U8", [lists[name].size], lists[name].size)
            numbers.seek(0)
            with temporary.open("wb") as file:
                file.write(header.whole())
                shutil.copyfileobj(numbers, file, BLOCK_BYTES)
                for name in names:
                    lists[name].copy_to(file)

    write_atomic(path, write)


def write_numbers(file: BinaryIO | Any, vectors: np.ndarray) -> int:
    """Append an array's bytes, little-endian and row by row, and return their number."""
    little = np.ascontiguousarray(vectors, dtype=vectors.dtype.newbyteorder("<"))
    file.write(little.data)
    return little.nbytes


def write_npy(
    path: Path, texts: Iterable[TextFeatures], first: TextFeatures, details: dict[str, Any]
) -> None:
    """Write an array and its index. The header is written twice, at last with the number of rows.

    The index holds the details, the array's checksum, "boundaries" (the first row of each text,
    then the number of rows) and, unless pooled, the "tokens" and "offsets" of each text. The old
    index is removed before the array is replaced, and the new one is written last, so there is no
    index, or an older array's, if the process was killed in between.
    """
    index = path.with_name(f"{path.name}.json")
    names = TOKEN_FIELDS if first.tokens else ()
    width, kind = first.vectors.shape[1], first.vectors.dtype
    with json_lists(path, ("boundaries", *names)) as lists:

        def write(temporary: Path) -> None:
            rows = 0
            lists["boundaries"].append(rows)
            with temporary.open("wb") as file:
                file.write(npy_header(rows, width, kind))
                for text in texts:
                    write_numbers(file, text.vectors)
                    rows += len(text.vectors)
                    lists["boundaries"].append(rows)
                    for name in names:
                        lists[name].append(getattr(text, name))
                file.seek(0)
                file.write(npy_header(rows, width, kind))
            details["sha256"] = sha256_file(temporary)
            index.unlink(missing_ok=True)

        write_atomic(path, write)
        write_atomic(index, lambda temporary: write_feature_index(temporary, details, lists))


def write_feature_index(
    path: Path, details: Mapping[str, Any], lists: Mapping[str, JsonList]
) -> None:
    """Write one JSON object with the details and the lists."""
    with path.open("wb") as file:
        head = escaped(json.dumps(details, ensure_ascii=False))
        file.write(head.encode().removesuffix(b"}"))
        for name, items in lists.items():
            file.write(f', "{name}": '.encode())
            items.copy_to(file)
        file.write(b"}\n")


def npy_header(rows: int, width: int, kind: np.dtype[Any]) -> bytes:
    """Return the header of an npy file, which has the same length for any number of rows."""
    header = io.BytesIO()
    shape = {"descr": kind.newbyteorder("<").str, "fortran_order": False, "shape": (rows, width)}
    np.lib.format.write_array_header_1_0(header, shape)
    return header.getvalue()


def write_parquet(
    path: Path, texts: Iterable[TextFeatures], first: TextFeatures, details: dict[str, Any]
) -> None:
    """Write a Parquet file, with the details in its metadata under "bertkit"."""
    arrow = optional_library("pyarrow", "Parquet files")
    parquet = optional_library("pyarrow.parquet", "Parquet files")
    width = first.vectors.shape[1]
    number = arrow.float32() if first.vectors.dtype == np.float32 else arrow.float16()
    token_fields = [("position", arrow.int32()), ("token", arrow.string())]
    token_fields += [("start", arrow.int32()), ("end", arrow.int32())]
    fields = [("text", arrow.int64()), *(token_fields if first.tokens else [])]
    schema = arrow.schema(
        [*fields, ("vector", arrow.list_(number, width))], {"bertkit": json.dumps(details)}
    )

    def write(temporary: Path) -> None:
        with parquet.ParquetWriter(temporary, schema, use_dictionary=["token"]) as file:
            numbered = enumerate(texts)
            for group in cut_blocks(numbered, GROUP_ROWS, lambda one: len(one[1].vectors)):
                columns, vectors = feature_columns(group)
                flat = arrow.array(vectors.reshape(-1))
                columns["vector"] = arrow.FixedSizeListArray.from_arrays(flat, width)
                file.write_table(arrow.table([columns[name] for name in schema.names], schema))

    write_atomic(path, write)


def feature_columns(group: list[tuple[int, TextFeatures]]) -> tuple[dict[str, Any], np.ndarray]:
    """Return all columns except the vectors by name, and the vectors, (rows, width)."""
    sizes = [len(text.vectors) for _, text in group]
    spans = [span for _, text in group for span in text.offsets]
    columns = {
        "text": np.repeat([number for number, _ in group], sizes),
        "position": np.concatenate([np.arange(size) for size in sizes]),
        "token": [token for _, text in group for token in text.tokens],
        "start": [start for start, _ in spans],
        "end": [end for _, end in spans],
    }
    return columns, np.concatenate([text.vectors for _, text in group])


FEATURE_WRITERS: dict[
    str, Callable[[Path, Iterable[TextFeatures], TextFeatures, dict[str, Any]], None]
] = {"safetensors": write_safetensors, "parquet": write_parquet, "npy": write_npy}
