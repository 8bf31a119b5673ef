"""Reading of Google's BERT checkpoints without TensorFlow.

A checkpoint in TensorFlow's V2 format has a prefix, such as `bert_model.ckpt`, and two files or
more. `.index` is a sorted table in LevelDB's format (github.com/google/leveldb,
doc/table_format.md) from variable names to descriptions, which are protocol buffers
(tensorflow/core/protobuf/tensor_bundle.proto). `.data-00000-of-00001` has the bytes of the tensors.
The checksums in them are not verified, as Python would take minutes for a BERT.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from bertkit.checkpoints.names import own_tensors
from bertkit.checkpoints.names.bert import BERT
from bertkit.checkpoints.weights import check_finite_weights
from bertkit.errors import BertkitError

STRING = 7
DTYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype("<f4"),
    2: np.dtype("<f8"),
    3: np.dtype("<i4"),
    9: np.dtype("<i8"),
    10: np.dtype("?"),
    19: np.dtype("<f2"),
}
"""The types of tensorflow/core/framework/types.proto that occur in a BERT."""
ENDS = (
    ("LayerNorm/weight", "LayerNorm/gamma"),
    ("LayerNorm/bias", "LayerNorm/beta"),
    ("_embeddings/weight", "_embeddings"),
    ("predictions/bias", "predictions/output_bias"),
    ("seq_relationship/weight", "seq_relationship/output_weights"),
    ("seq_relationship/bias", "seq_relationship/output_bias"),
    ("/weight", "/kernel"),
)
"""Suffixes of Hugging Face's names (with slashes), and Google's; the first match applies."""
MAGIC = struct.pack("<Q", 0xDB4775248B80FB57)
FOOTER_BYTES = 48

ProtoFields = dict[int, list[int | bytes]]


class Entry(NamedTuple):
    """The type, shape and location of a tensor: a decoded BundleEntryProto."""

    dtype: int
    shape: tuple[int, ...]
    shard: int
    offset: int
    size: int
    sliced: bool


def google_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Read the weights of a Google checkpoint, without the optimizer's, by bertkit's names.

    Raises:
        BertkitError: a file is missing, damaged or cut short; the message names it.
    """
    prefix = find_prefix(path)
    arrays = read_checkpoint(prefix)
    tensors = {}
    for variable in list(arrays):
        array = arrays.pop(variable)  # so that memory holds the weights once
        plain = array.T if variable.endswith("/kernel") else array
        tensor = torch.from_numpy(plain.astype(np.float32, order="C"))
        check_finite_weights(tensor, variable, prefix)
        tensors[hugging_face_name(variable)] = tensor
    return own_tensors(tensors, BERT, prefix)


def hugging_face_name(variable: str) -> str:
    """Translate the name of a variable in a Google checkpoint."""
    for ours, google in ENDS:
        if variable.endswith(google):
            variable = variable.removesuffix(google) + ours
            break
    return re.sub(r"/layer_(\d+)/", r"/layer/\1/", variable).replace("/", ".")


def find_prefix(path: Path) -> Path:
    """Return the prefix of a checkpoint, from the prefix itself or its directory."""
    if not path.is_dir():
        return path
    found = sorted(path.glob("*.index"))
    if len(found) != 1:
        names = ", ".join(file.stem for file in found) or "none"
        raise BertkitError(f"{path} must hold one checkpoint (*.index), found: {names}")
    return found[0].with_suffix("")


def read_checkpoint(prefix: Path) -> dict[str, np.ndarray]:
    """Read the variables of a checkpoint but those of the optimizer.

    `prefix` is the path of the index without `.index`.
    """
    path = prefix.with_name(f"{prefix.name}.index")
    shards, entries = read_index(path)
    arrays = {}
    for name, entry in entries.items():
        slot = name == "global_step" or name.endswith(("/adam_m", "/adam_v"))
        if entry.dtype != STRING and not slot:
            data = prefix.with_name(f"{prefix.name}.data-{entry.shard:05d}-of-{shards:05d}")
            arrays[name] = read_tensor(data, name, entry)
    return arrays


def read_tensor(path: Path, name: str, entry: Entry) -> np.ndarray:
    """Read one tensor, and check its size."""
    if entry.sliced or entry.dtype not in DTYPES:
        kind = "partitioned" if entry.sliced else f"of TensorFlow's type {entry.dtype}"
        raise BertkitError(f"{path}: variable {name} is {kind}; that is not supported")
    dtype = DTYPES[entry.dtype]
    try:
        with path.open("rb") as file:
            if file.seek(0, 2) < entry.offset + entry.size:
                raise BertkitError(f"{path} ends before the end of {name}; copy it again")
            file.seek(entry.offset)
            data = file.read(entry.size)
    except OSError as error:
        raise BertkitError(f"cannot read {path} ({error.strerror}); check the path") from None
    if entry.size != math.prod(entry.shape) * dtype.itemsize:
        raise BertkitError(f"{path}: {name} has {entry.size} bytes for shape {entry.shape}")
    return np.frombuffer(data, dtype=dtype).reshape(entry.shape)


def read_index(path: Path) -> tuple[int, dict[str, Entry]]:
    """Return the number of data files, and the entry of each tensor by name."""
    try:
        table = dict(read_table(path.read_bytes()))
        header = decode_fields(table.pop(b""))
        entries = {key.decode(): read_entry(value) for key, value in table.items()}
        return decode_number(header, 1), entries
    except OSError as error:
        raise BertkitError(f"cannot read {path} ({error.strerror}); check the path") from None
    except (IndexError, KeyError, ValueError, TypeError, struct.error) as error:
        raise BertkitError(
            f"{path} is not a checkpoint index, or is damaged ({error}); copy it again"
        ) from error


def read_entry(data: bytes) -> Entry:
    """Decode a BundleEntryProto."""
    fields = decode_fields(data)
    shape = decode_fields(fields.get(2, [b""])[-1])
    dimensions = [decode_fields(raw) for raw in shape.get(2, [])]
    return Entry(
        dtype=decode_number(fields, 1),
        shape=tuple(decode_number(dimension, 1) for dimension in dimensions),
        shard=decode_number(fields, 3),
        offset=decode_number(fields, 4),
        size=decode_number(fields, 5),
        sliced=7 in fields,
    )


def decode_number(fields: ProtoFields, field: int) -> int:
    """Return a number field of a protocol buffer; 0 if it is absent."""
    value = fields.get(field, [0])[-1]
    if not isinstance(value, int):
        raise ValueError(f"field {field} is not a number")
    return value


def decode_fields(data: int | bytes) -> ProtoFields:
    """Decode a protocol buffer to field number -> values (numbers or bytes)."""
    if not isinstance(data, bytes):
        raise ValueError("a number where a message should be")
    fields: ProtoFields = {}
    position = 0
    while position < len(data):
        tag, position = read_varint(data, position)
        value: int | bytes
        if tag & 7 == 0:
            value, position = read_varint(data, position)
        elif tag & 7 == 2:
            size, position = read_varint(data, position)
            value, position = data[position : position + size], position + size
        else:
            layout = {1: "<Q", 5: "<I"}[tag & 7]
            (value,) = struct.unpack_from(layout, data, position)
            position += struct.calcsize(layout)
        fields.setdefault(tag >> 3, []).append(value)
    if position != len(data):
        raise ValueError("a field ends beyond its message")
    return fields


def read_varint(data: bytes, position: int) -> tuple[int, int]:
    """Decode a number of seven bits a byte; return it and the position after it."""
    value = shift = 0
    while True:
        byte = data[position]
        value |= (byte & 127) << shift
        position, shift = position + 1, shift + 7
        if byte < 128:
            return value, position
        if shift > 63:
            raise ValueError("a number is too long")


def read_table(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield the keys and values of a table, in order.

    A table consists of blocks of sorted keys and values, a "meta index" block, an index block (the
    last key of each block -> its handle), and a footer with the handles of the last two. A handle
    is an offset and a size.

    Raises:
        IndexError, ValueError, struct.error: the bytes are not a table, or are damaged.
    """
    if data[-8:] != MAGIC or len(data) < FOOTER_BYTES:
        raise ValueError("not a table")
    footer, position = data[-FOOTER_BYTES:], 0
    for _ in range(2):  # skip the handle of the meta index
        _, position = read_varint(footer, position)
    before = -1
    for _, handle in read_block(data, footer[position:]):
        offset, _ = read_varint(handle, 0)
        if offset <= before:  # the index could refer to one block many times
            raise ValueError("the blocks are not in order")
        before = offset
        yield from read_block(data, handle)


def read_block(data: bytes, handle: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield the keys and values of the block that a handle points to.

    A key is stored as the number of bytes it shares with the previous key, and its other bytes.
    After the block are one byte for the compression (0: none) and a checksum.
    """
    offset, position = read_varint(handle, 0)
    size, _ = read_varint(handle, position)
    block, compression = data[offset : offset + size], data[offset + size]
    if compression:
        raise ValueError("it is compressed, which is not supported")
    end = size - 4 - 4 * struct.unpack("<I", block[-4:])[0]
    key, position = b"", 0
    while position < end:
        shared, position = read_varint(block, position)
        rest, position = read_varint(block, position)
        length, position = read_varint(block, position)
        key = key[:shared] + block[position : position + rest]
        yield key, block[position + rest : position + rest + length]
        position += rest + length
