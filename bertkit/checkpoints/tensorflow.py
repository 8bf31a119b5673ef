"""Reading and writing of Google's BERT checkpoints without TensorFlow.

A checkpoint in TensorFlow's V2 format has a prefix, such as `bert_model.ckpt`, and at least two
files: `.index`, a sorted table in LevelDB's format (github.com/google/leveldb, doc/table_format.md)
from variable names to descriptions, and `.data-00000-of-00001`, the bytes of the tensors. The
descriptions are protocol buffers (tensorflow/core/protobuf/tensor_bundle.proto). Every block of the
table and every tensor has a checksum, and all that are read are verified.
"""

from __future__ import annotations

import dataclasses
import math
import re
import struct
from collections.abc import Mapping
from glob import escape
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from bertkit.checkpoints.families import OWN_FIELDS
from bertkit.checkpoints.huggingface import read_model_config
from bertkit.checkpoints.limits import TIED, check_finite_weights, check_parameters, readable_count
from bertkit.checkpoints.sstable import masked_crc32c, read_table, read_varint, varint, write_table
from bertkit.errors import BertkitError
from bertkit.files import check_file_size, write_atomic, write_json
from bertkit.model.encoder import ModelConfig

STRING = 7
TENSORFLOW_DTYPES: dict[int, np.dtype[Any]] = {
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

MAX_SSTABLE_BYTES = 1 << 24
"""The maximum size of an index, in which each variable takes about a hundred bytes."""

FIXED_FIELD_6 = bytes([6 << 3 | 5])
"""The protocol buffer tag before a checksum: field 6, four bytes."""

ProtoFields = dict[int, list[int | bytes]]


class Entry(NamedTuple):
    """The type, shape, location and checksum of a tensor: a decoded BundleEntryProto."""

    dtype: int
    shape: tuple[int, ...]
    shard: int
    offset: int
    size: int
    crc32c: int
    sliced: bool


def google_tensors(path: Path) -> tuple[ModelConfig, dict[str, torch.Tensor]]:
    """Read a Google checkpoint: the model config, and the tensors by Hugging Face's names.

    Raises:
        BertkitError: a file is missing, damaged or cut short, or is not that of a BERT.
    """
    prefix = find_prefix(path)
    config = read_model_config(prefix.parent / "bert_config.json")
    check_parameters(config, data_files(prefix), path)
    tensors = {}
    arrays = read_checkpoint(prefix, slots=False)
    for variable in list(arrays):
        array = arrays.pop(variable)  # so that memory holds the weights once
        plain = array.T if variable.endswith("/kernel") else array
        tensor = torch.from_numpy(plain.astype(np.float32, order="C"))
        check_finite_weights(tensor, variable, prefix)
        tensors[from_google_name(variable)] = tensor
    return config, tensors


def write_google_config(config: ModelConfig, folder: Path) -> None:
    """Write `bert_config.json`, with "gelu" for either GELU of the model.

    Raises:
        BertkitError: Google's code does not support the network.
    """
    fields, plain = dataclasses.asdict(config), ModelConfig(vocab_size=1)
    unlike = [name for name in OWN_FIELDS if fields.pop(name) != getattr(plain, name)]
    if unlike:
        raise BertkitError(
            f"Google's code does not support {' or '.join(unlike)}; write a model directory, or "
            "export with --to onnx"
        )
    write_json(folder / "bert_config.json", {**fields, "hidden_act": "gelu"})


def find_prefix(path: Path) -> Path:
    """Return the prefix of a checkpoint, given the prefix, the index file or the directory."""
    if path.is_dir():
        found = sorted(path.glob("*.index"))
        if len(found) != 1:
            names = ", ".join(file.stem for file in found) or "none"
            raise BertkitError(f"{path} must hold one checkpoint (*.index), found: {names}")
        return found[0].with_suffix("")
    return path.with_suffix("") if path.suffix == ".index" else path


def data_files(prefix: Path) -> list[Path]:
    """Return the files that hold the tensors of a checkpoint."""
    return sorted(prefix.parent.glob(f"{escape(prefix.name)}.data-*-of-*"))


def read_checkpoint(prefix: Path, *, slots: bool = True) -> dict[str, np.ndarray]:
    """Read all variables of a checkpoint except strings, which are not weights.

    `prefix` is the path of the index without `.index`. Without `slots`, the optimizer's variables
    (`adam_m`, `adam_v`, `global_step`) are left out.

    Raises:
        BertkitError: a file is missing, damaged or cut short; the message names file and variable.
    """
    path = prefix.with_name(f"{prefix.name}.index")
    check_file_size(path, MAX_SSTABLE_BYTES)
    shards, entries = read_bundle_index(path)
    wanted = sum(entry.size for entry in entries.values())
    held = sum(file.stat().st_size for file in data_files(prefix))
    if held and wanted > TIED * held:
        raise BertkitError(
            f"{path} asks for tensors of {readable_count(wanted)} bytes, but the data files have "
            f"{held:,}; copy the checkpoint again"
        )
    arrays = {}
    for name, entry in entries.items():
        slot = name == "global_step" or name.endswith(("/adam_m", "/adam_v"))
        if entry.dtype == STRING or (slot and not slots):
            continue
        data = prefix.with_name(f"{prefix.name}.data-{entry.shard:05d}-of-{shards:05d}")
        arrays[name] = read_tensor(data, name, entry)
    return arrays


def read_tensor(path: Path, name: str, entry: Entry) -> np.ndarray:
    """Read one tensor, and check its size and checksum."""
    if entry.sliced or entry.dtype not in TENSORFLOW_DTYPES:
        kind = "partitioned" if entry.sliced else f"of TensorFlow's type {entry.dtype}"
        raise BertkitError(f"{path}: variable {name} is {kind}; that is not supported")
    dtype = TENSORFLOW_DTYPES[entry.dtype]
    if entry.size != math.prod(entry.shape) * dtype.itemsize or max(entry.shape, default=0) >> 48:
        raise BertkitError(f"{path}: {name} has {entry.size} bytes for shape {entry.shape}")
    try:
        with path.open("rb") as file:
            if file.seek(0, 2) < entry.offset + entry.size:
                raise BertkitError(f"{path} ends before the end of {name}; copy it again")
            file.seek(entry.offset)
            data = file.read(entry.size)
    except OSError as error:
        raise BertkitError(f"cannot read {path} ({error.strerror}); check the path") from None
    if masked_crc32c(data) != entry.crc32c:
        raise BertkitError(f"{path}: the checksum of {name} is wrong; copy the file again")
    return np.frombuffer(data, dtype=dtype).reshape(entry.shape)


def read_bundle_index(path: Path) -> tuple[int, dict[str, Entry]]:
    """Return the number of data files, and the entry of each tensor by name."""
    try:
        table = dict(read_table(path.read_bytes()))
        header = decode_fields(table.pop(b""))
        if decode_number(header, 2):
            raise BertkitError("it was written on a big-endian machine")
        entries = {key.decode(): read_entry(value) for key, value in table.items()}
    except BertkitError as error:
        raise BertkitError(
            f"{path}: {error}; copy the file again, or convert it with transformers"
        ) from None
    except OSError as error:
        raise BertkitError(f"cannot read {path} ({error.strerror}); check the path") from None
    except (IndexError, KeyError, ValueError, TypeError, struct.error) as error:
        raise BertkitError(
            f"{path} is not a checkpoint index, or is damaged; copy it again"
        ) from error
    return decode_number(header, 1), entries


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
        crc32c=decode_number(fields, 6),
        sliced=7 in fields,
    )


def decode_number(fields: ProtoFields, field: int) -> int:
    """Return a number field of a protocol buffer; 0 if it is absent."""
    value = fields.get(field, [0])[-1]
    if not isinstance(value, int):
        raise ValueError(f"field {field} is not a number")
    return value


def decode_fields(data: int | bytes) -> ProtoFields:
    """Decode a protocol buffer to field number → values (numbers or bytes)."""
    if not isinstance(data, bytes):
        raise ValueError("a number where a message should be")
    fields: ProtoFields = {}
    place = 0
    while place < len(data):
        tag, place = read_varint(data, place)
        value: int | bytes
        if tag & 7 == 0:
            value, place = read_varint(data, place)
        elif tag & 7 == 2:
            size, place = read_varint(data, place)
            value, place = data[place : place + size], place + size
        else:
            layout = {1: "<Q", 5: "<I"}[tag & 7]
            (value,) = struct.unpack_from(layout, data, place)
            place += struct.calcsize(layout)
        fields.setdefault(tag >> 3, []).append(value)
    if place != len(data):
        raise ValueError("a field ends beyond its message")
    return fields


def write_checkpoint(prefix: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Write variables as one data file and then an index, which makes the checkpoint visible.

    Raises:
        BertkitError: an array's dtype is not supported, or the files cannot be written.
    """
    # one data file, and producer version 1
    items = [(b"", encode_field(1, 1) + encode_field(3, encode_field(1, 1)))]

    def write_data(path: Path) -> None:
        with path.open("wb") as file:
            for name in sorted(tensors, key=str.encode):
                array = np.asarray(tensors[name], order="C")
                data, entry = array.tobytes(), bundle_entry(name, array, file.tell())
                file.write(data)
                checksum = struct.pack("<I", masked_crc32c(data))
                items.append((name.encode(), entry + FIXED_FIELD_6 + checksum))

    write_atomic(prefix.with_name(f"{prefix.name}.data-00000-of-00001"), write_data)
    index = write_table(items)
    write_atomic(prefix.with_name(f"{prefix.name}.index"), lambda path: path.write_bytes(index))


def bundle_entry(name: str, array: np.ndarray, offset: int) -> bytes:
    """Encode a BundleEntryProto without its checksum."""
    kinds = [kind for kind, dtype in TENSORFLOW_DTYPES.items() if dtype == array.dtype]
    if not kinds:
        raise BertkitError(f"{name}: numbers of type {array.dtype} cannot go into a checkpoint")
    shape = b"".join(encode_field(2, encode_field(1, size)) for size in array.shape)
    return (
        encode_field(1, kinds[0])
        + encode_field(2, shape)
        + encode_field(4, offset)
        + encode_field(5, array.nbytes)
    )


def encode_field(place: int, value: int | bytes) -> bytes:
    """Encode one field of a protocol buffer: a number or a nested message."""
    if isinstance(value, int):
        return varint(place << 3) + varint(value)
    return varint(place << 3 | 2) + varint(len(value)) + value


def google_name(name: str) -> str:
    """Translate a Hugging Face name to the variable name in a Google checkpoint."""
    variable = re.sub(r"\.layer\.(\d+)\.", r".layer_\1.", name).replace(".", "/")
    for ours, google in ENDS:
        if variable.endswith(ours):
            return variable.removesuffix(ours) + google
    return variable


def from_google_name(variable: str) -> str:
    """Translate the variable name in a Google checkpoint to the Hugging Face name."""
    for ours, google in ENDS:
        if variable.endswith(google):
            variable = variable.removesuffix(google) + ours
            break
    return re.sub(r"/layer_(\d+)/", r"/layer/\1/", variable).replace("/", ".")
