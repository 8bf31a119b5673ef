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
from typing import Any

import numpy as np
import torch

from bertkit.checkpoints.names import BERT, own_tensors
from bertkit.checkpoints.save import finite_weights
from bertkit.errors import BertkitError

DTYPES: dict[Any, np.dtype[Any]] = {
    1: np.dtype("<f4"),
    2: np.dtype("<f8"),
    3: np.dtype("<i4"),
    9: np.dtype("<i8"),
    10: np.dtype("?"),
    19: np.dtype("<f2"),
}
"""The types of tensorflow/core/framework/types.proto that occur in a BERT."""
STRING = 7
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
DTYPE, SHAPE, SHARD, OFFSET, SIZE, SLICES = 1, 2, 3, 4, 5, 7
"""The fields of a BundleEntryProto."""

Fields = dict[int, Any]
"""Field number -> the numbers or the bytes of a decoded protocol buffer."""


def google_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Read the weights of a Google checkpoint (its prefix or its folder), by bertkit's names."""
    if path.is_dir():
        indexes = sorted(path.glob("*.index"))
        if len(indexes) != 1:
            names = ", ".join(file.stem for file in indexes) or "none"
            raise BertkitError(f"{path} must hold one checkpoint (*.index), not: {names}")
        path = indexes[0].with_suffix("")
    arrays = read_checkpoint(path)
    tensors = {}
    for variable in list(arrays):
        array = arrays.pop(variable)  # so that memory holds the weights once
        plain = array.T if variable.endswith("/kernel") else array
        tensor = torch.from_numpy(plain.astype(np.float32, order="C"))
        tensors[hugging_face_name(variable)] = finite_weights(tensor, variable, path)
    return own_tensors(tensors, BERT, path)


def hugging_face_name(variable: str) -> str:
    """Translate the name of a variable in a Google checkpoint."""
    for ours, google in ENDS:
        if variable.endswith(google):
            variable = variable.removesuffix(google) + ours
            break
    return re.sub(r"/layer_(\d+)/", r"/layer/\1/", variable).replace("/", ".")


def read_checkpoint(prefix: Path) -> dict[str, np.ndarray]:
    """Read the variables of a checkpoint but those of the optimizer."""
    path = prefix.with_name(f"{prefix.name}.index")
    try:
        table = dict(read_table(path.read_bytes()))
        shards = decode(table.pop(b""))[1][-1]
        entries = {key.decode(): decode(value) for key, value in table.items()}
        return {
            name: read_tensor(prefix, f"{shards:05d}", name, entry)
            for name, entry in entries.items()
            if name != "global_step"
            and not name.endswith(("/adam_m", "/adam_v"))
            and entry[DTYPE] != [STRING]
        }
    except OSError as error:
        raise BertkitError(f"cannot read {error.filename} ({error.strerror}); copy it") from None
    except (LookupError, ValueError, TypeError, ArithmeticError, struct.error) as error:
        raise BertkitError(
            f"{path} is not a checkpoint index, or is damaged ({error}); copy it again"
        ) from error


def read_tensor(prefix: Path, shards: str, name: str, entry: Fields) -> np.ndarray:
    """Read the tensor that an entry of the index describes."""
    number = {field: entry.get(field, [0])[-1] for field in (SHARD, OFFSET, SIZE)}
    path = prefix.with_name(f"{prefix.name}.data-{number[SHARD]:05d}-of-{shards}")
    [kind] = entry[DTYPE]
    if SLICES in entry or kind not in DTYPES:
        raise BertkitError(f"{path}: {name} is partitioned or of an unknown type ({kind})")
    dimensions = decode(entry[SHAPE][-1]).get(2, []) if SHAPE in entry else []
    shape = tuple(decode(dimension).get(1, [0])[-1] for dimension in dimensions)
    if number[SIZE] != math.prod(shape) * DTYPES[kind].itemsize:
        raise BertkitError(f"{path}: {name} has {number[SIZE]} bytes for shape {shape}")
    with path.open("rb") as file:
        if file.seek(0, 2) < number[OFFSET] + number[SIZE]:
            raise BertkitError(f"{path} ends before the end of {name}; copy it again")
        file.seek(number[OFFSET])
        data = file.read(number[SIZE])
    return np.frombuffer(data, dtype=DTYPES[kind]).reshape(shape)


def decode(data: bytes) -> Fields:
    """Decode a protocol buffer: numbers, and bytes of texts and of messages."""
    fields: Fields = {}
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
