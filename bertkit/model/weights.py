"""Weights in files: safetensors, sharded or not, and the older `pytorch_model.bin`.

The latter is a pickle; torch's restricted loader makes tensors of it and runs no code.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from bertkit.errors import BertkitError
from bertkit.files import read_json
from bertkit.model.names import canonical_name

WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
"""In order of preference."""


def write_tensors(path: Path, tensors: Mapping[str, Tensor], **metadata: str) -> None:
    """Write one safetensors file, readable by all who may read files made here.

    Raises:
        OSError: the disk is full, as for any other file.
    """
    try:
        save_file({name: t.contiguous() for name, t in tensors.items()}, path, metadata or None)
    except SafetensorError as error:
        code = re.search(r"os error (\d+)", str(error))
        if code is None:
            raise
        raise OSError(int(code[1]), str(error), str(path)) from error
    path.chmod(path.parent.stat().st_mode & 0o666)  # safetensors leaves them to the owner alone


def load_state(directory: Path) -> dict[str, Tensor]:
    """All weights of a directory as fp32, under Hugging Face's names of today.

    Raises:
        BertkitError: no weights, a damaged file, a tensor that is no weight, or a decoder that is
            not the word embeddings.
    """
    tensors: dict[str, Tensor] = {}
    for path, names in weight_files(directory).items():
        content = read_tensors(path)
        if missing := [name for name in names if name not in content]:
            raise BertkitError(f"{path} lacks {some(missing)}, which its index promises")
        tensors.update(content)
    state = {}
    for name, tensor in tensors.items():
        if name.endswith("embeddings.position_ids"):
            continue  # 0, 1, 2, ...: a constant that older files store
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            raise BertkitError(f"{directory}: {name} is no floating-point tensor; remake the file")
        state[canonical_name(name)] = tensor.float()
    return untied(state, directory)


def untied(state: dict[str, Tensor], source: Path) -> dict[str, Tensor]:
    """Drop the copies that older files keep of the tied decoder and its bias."""
    for copy, original in (
        ("cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"),
        ("cls.predictions.decoder.bias", "cls.predictions.bias"),
    ):
        if copy in state:
            tensor = state.pop(copy)
            if not torch.equal(state.setdefault(original, tensor), tensor):
                raise BertkitError(f"{source}: {copy} differs from {original}; BERT's are the same")
    return state


def weight_files(directory: Path) -> dict[Path, list[str]]:
    """The files that hold the weights, each with the names that an index promises in it."""
    for name in WEIGHT_FILES:
        path = directory / name
        if not path.is_file():
            continue
        if path.suffix != ".json":
            return {path: []}
        return files_of_index(path)
    raise BertkitError(f"{directory} holds no weights: none of {', '.join(WEIGHT_FILES)}")


def files_of_index(path: Path) -> dict[Path, list[str]]:
    """The shards that an index lists; they may lie nowhere but beside it."""
    index = read_json(path)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise BertkitError(f"{path} has no weight_map; copy it again")
    files: dict[Path, list[str]] = {}
    for tensor, file in weight_map.items():
        if not isinstance(file, str) or not file or Path(file).name != file or file == "..":
            raise BertkitError(f"{path}: {file!r} is not the name of a file beside it")
        files.setdefault(path.with_name(file), []).append(tensor)
    return files


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of one file."""
    from bertkit.model.checks import check_archive, check_content

    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        check_archive(path)
        content = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise BertkitError(f"{path} is missing; copy it again") from None
    except BertkitError:
        raise
    except Exception as error:  # each format has its own kinds
        if type(error).__name__ == "UnpicklingError":
            raise BertkitError(
                f"{path} holds Python objects, which bertkit does not run, or is damaged; save the "
                "model's state_dict() as safetensors, or copy the file again"
            ) from None
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise BertkitError(f"{path} is damaged ({reason}); copy it again") from error
    if not isinstance(content, dict):
        raise BertkitError(f"{path} holds no named tensors; it is no model file")
    check_content(content, path)
    return content


def some(names: Iterable[str]) -> str:
    """The first names of a list, and how many more there are."""
    first, *rest = names
    shown = ", ".join([first, *rest[:2]])
    return f"{shown} and {len(rest) - 2} more" if len(rest) > 2 else shown
