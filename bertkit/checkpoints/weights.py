"""Files of weights: safetensors, sharded or not, and the older `pytorch_model.bin`.

The latter is a pickle, which torch's restricted loader turns into tensors without running code.
Files are read, not memory-mapped: overwriting a mapped file would change the predictions of a model
in use, and truncating it would kill the process.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from bertkit.errors import BertkitError
from bertkit.files import read_object

WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
"""The files that may hold a model's weights, in order of preference."""
MAX_INDEX_BYTES = 1 << 26
MAX_HEADER_BYTES = 1 << 24
"""The maximum size of a safetensors header, in which each tensor takes about a hundred bytes."""
SAFETENSORS_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""The safetensors format's names of dtypes."""


def write_tensors(path: Path, tensors: Mapping[str, Tensor], **metadata: str) -> None:
    """Write one safetensors file, with permissions like those of its folder.

    Raises:
        OSError: the file cannot be written, for example because the disk is full.
    """
    try:
        save_file({name: t.contiguous() for name, t in tensors.items()}, path, metadata or None)
    except SafetensorError as error:
        code = re.search(r"os error (\d+)", str(error))
        if code is None:
            raise
        raise OSError(int(code[1]), str(error), str(path)) from error
    path.chmod(path.parent.stat().st_mode & 0o666)  # safetensors lets only the owner read


def load_state(directory: Path) -> dict[str, Tensor]:
    """Read all weights of a directory as fp32, by Hugging Face's current names.

    Raises:
        BertkitError: there are no weights, a file is damaged, a tensor is not a weight or has NaN
            or infinite numbers, two tensors belong to one parameter, or the decoder is not tied.
    """
    from bertkit.checkpoints.families import canonical_name
    from bertkit.checkpoints.limits import check_finite_weights

    state: dict[str, Tensor] = {}
    for path, names in weight_files(directory).items():
        content = read_tensors(path)
        if missing := [name for name in names if name not in content]:
            raise BertkitError(f"{path} lacks {shown_names(missing)}, which the index lists")
        for name in list(content):
            tensor = content.pop(name)  # so that 16-bit tensors are freed once converted
            if name.endswith("embeddings.position_ids"):
                continue  # 0, 1, 2, ...: a constant that older files store
            if not is_floating_point(tensor):
                raise BertkitError(
                    f"{path}: {name} is not a floating-point tensor of at least 8 bits; remake it"
                )
            known = canonical_name(name)
            if known in state:
                raise BertkitError(f"{path}: {name} is a second {known}; remake the file")
            state[known] = tensor.float()
            check_finite_weights(state[known], name, path)
    return untied(state, directory)


def is_floating_point(tensor: object) -> bool:
    """Return whether a value is a tensor that torch can convert to fp32; 4-bit types are not."""
    if not isinstance(tensor, Tensor) or tensor.dtype == torch.float4_e2m1fn_x2:
        return False
    return tensor.is_floating_point()


def untied(state: dict[str, Tensor], source: Path) -> dict[str, Tensor]:
    """Remove the copies of the tied decoder and its bias, which older files contain.

    A copy that differs from its original raises a BertkitError.
    """
    for copy, original in (
        ("cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"),
        ("cls.predictions.decoder.bias", "cls.predictions.bias"),
    ):
        if copy in state:
            tensor = state.pop(copy)
            if not torch.equal(state.setdefault(original, tensor), tensor):
                raise BertkitError(f"{source}: {copy} differs from {original}; BERT ties them")
    return state


def weight_files(directory: Path) -> dict[Path, list[str]]:
    """Return the files that hold the weights, each with the tensor names that an index lists."""
    for name in WEIGHT_FILES:
        path = directory / name
        if path.is_file():
            return indexed_files(path) if path.suffix == ".json" else {path: []}
    raise BertkitError(f"{directory} holds no weights: none of {', '.join(WEIGHT_FILES)}")


def indexed_files(path: Path) -> dict[Path, list[str]]:
    """Return the shards that an index lists, which must be in the folder of the index."""
    weight_map = read_object(path, MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise BertkitError(f"{path} has no weight_map; copy it again")
    files: dict[Path, list[str]] = {}
    for tensor, file in weight_map.items():
        named = isinstance(file, str) and file and "\0" not in file
        if not named or Path(file).name != file or file == "..":
            raise BertkitError(f"{path}: {file!r} is not the name of a file in its folder")
        files.setdefault(path.with_name(file), []).append(tensor)
    return files


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read the tensors of one file into memory.

    Raises:
        BertkitError: the file is missing, cannot be opened, is damaged or changed while it was
            read, holds something other than tensors, or does not fit into memory.
    """
    from bertkit.checkpoints.limits import check_content

    try:
        with path.open("rb") as file:
            before = file_state(file)
            content = load_content(file, path)
            changed = file_state(file) != before
    except FileNotFoundError:
        raise BertkitError(f"{path} is missing; copy it again") from None
    except OSError as error:
        raise BertkitError(f"cannot read {path}: {error.strerror or error}") from None
    if changed:
        raise BertkitError(f"{path} was changed while it was read; load it again")
    if not isinstance(content, dict):
        raise BertkitError(f"{path} holds no named tensors; it is not a model file")
    check_content(content, path)
    return content


def file_state(file: BufferedReader) -> tuple[int, int]:
    """Return the size and modification time of an open file, which change if it is written to."""
    found = os.fstat(file.fileno())
    return found.st_size, found.st_mtime_ns


def load_content(file: BufferedReader, path: Path) -> object:
    """Read the content of a weight file, which the caller must check."""
    try:
        if path.suffix == ".safetensors":
            return read_safetensors(file)
        from bertkit.checkpoints.limits import check_archive

        check_archive(file, path)
        return torch.load(file, map_location="cpu", weights_only=True)
    except (BertkitError, OSError):
        raise
    except Exception as error:  # each format raises other types
        if type(error).__name__ == "UnpicklingError":
            raise BertkitError(
                f"{path} holds Python objects, which bertkit does not run, or is damaged; save the "
                "model's state_dict() as safetensors, or copy the file again"
            ) from None
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if isinstance(error, MemoryError) or "allocate memory" in str(error):
            raise BertkitError(
                f"{path}: there is not enough memory for its {file_state(file)[0]:,} bytes; free "
                "some, or load it on a larger machine"
            ) from None
        raise BertkitError(f"{path} is damaged ({reason}); copy it again") from error


def read_safetensors(file: BufferedReader) -> dict[str, Tensor]:
    """Read a safetensors file without the safetensors library, which would memory-map it.

    A file consists of the header's length in eight bytes, the header in JSON, and the tensors
    without gaps. Nothing is allocated before the whole header is known to fit the file.

    Raises:
        ValueError: the file is damaged.
    """
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
        raise ValueError(f"its header cannot have {length} bytes")
    entries = tensor_locations(file.read(length), size - 8 - length)
    tensors = {}
    for name, dtype, shape, count in entries:
        data = torch.empty(count, dtype=torch.uint8)
        if count and file.readinto(data.numpy().data) != count:
            raise ValueError(f"it ends before the end of {name}")
        tensors[name] = data.view(dtype).view(shape)
    return tensors


def tensor_locations(header: bytes, size: int) -> list[tuple[str, torch.dtype, list[int], int]]:
    """Return the name, dtype, shape and size in bytes of each tensor in a safetensors header.

    Raises:
        ValueError: the header is invalid, or the tensors do not fill the `size` bytes after it
            exactly.
    """
    described = json.loads(header.decode())
    if not isinstance(described, dict):
        raise ValueError("its header is not a JSON object")
    described.pop("__metadata__", None)
    found = []
    for name, entry in described.items():
        try:
            dtype, shape = SAFETENSORS_DTYPES[entry["dtype"]], list(entry["shape"])
            begin, end = entry["data_offsets"]
        except (KeyError, TypeError, ValueError):
            raise ValueError(f"its header does not describe the tensor {name}") from None
        numbers = [begin, end, *shape]
        if len(numbers) > 64 or any(type(n) is not int or not 0 <= n < 1 << 63 for n in numbers):
            raise ValueError(f"its header gives {name} an invalid shape or offset")
        if end - begin != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"its header gives {name} {end - begin} bytes for the shape {shape}")
        found.append((begin, end, name, dtype, shape))
    found.sort(key=lambda one: one[:2])
    ends = [0, *(end for _, end, *_ in found)]
    if [begin for begin, *_ in found] != ends[:-1] or ends[-1] != size:
        raise ValueError("its tensors do not fill it without gaps")
    return [(name, dtype, shape, end - begin) for begin, end, name, dtype, shape in found]


def recorded_recipe(details: Mapping[str, Any], section: str) -> dict[str, Any]:
    """Return a section of the recipe in a `bertkit.json`; {} if it has none, or other values."""
    recipe = details.get("recipe")
    found = recipe.get(section) if isinstance(recipe, dict) else None
    return found if isinstance(found, dict) else {}


def shown_names(names: Iterable[str]) -> str:
    """Format the first names of a list, and how many more there are."""
    first, *rest = names
    shown = ", ".join([first, *rest[:2]])
    return f"{shown} and {len(rest) - 2} more" if len(rest) > 2 else shown
