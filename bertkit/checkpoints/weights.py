"""Files of weights: safetensors, and the legacy `pytorch_model.bin`.

The latter is a pickle, which torch's restricted loader turns into tensors without running code.
Tensors are copied out of the files: overwriting a mapped file would change the predictions of a
model in use, and truncating it would kill the process.
"""

from __future__ import annotations

import math
import pickle
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from bertkit.checkpoints.names import Family, own_tensors
from bertkit.errors import BertkitError

WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")
"""The files that may hold a model's weights, in order of preference."""


def write_tensors(path: Path, tensors: Mapping[str, Tensor], **metadata: str) -> None:
    """Write one safetensors file, with permissions like those of its folder."""
    try:
        save_file({name: t.contiguous() for name, t in tensors.items()}, path, metadata or None)
    except SafetensorError as error:
        code = re.search(r"os error (\d+)", str(error))
        if code is None:
            raise
        raise OSError(int(code[1]), str(error), str(path)) from error  # such as a full disk
    path.chmod(path.parent.stat().st_mode & 0o666)  # safetensors lets only the owner read


def read_weights(directory: Path, family: Family) -> dict[str, Tensor]:
    """Read all weights of a directory as finite fp32, by bertkit's names."""
    path = next((p for name in WEIGHT_FILES if (p := directory / name).is_file()), None)
    if path is None:
        raise BertkitError(f"{directory} holds neither {' nor '.join(WEIGHT_FILES)}")
    # older files store the positions 0, 1, 2, ...
    skipped = "embeddings.position_ids"
    content = {n: t for n, t in read_tensors(path).items() if not n.endswith(skipped)}
    for name, tensor in content.items():
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            raise BertkitError(f"{directory}: {name} is not a floating-point tensor; remake it")
        content[name] = finite_weights(tensor, name, directory)
    return own_tensors(content, family, directory)


def finite_weights(tensor: Tensor, name: str, source: object) -> Tensor:
    """Return a tensor in fp32; a BertkitError if it has NaN or infinity, as predictions would."""
    weights = tensor.float()
    if weights.numel() and not all(math.isfinite(end.item()) for end in weights.aminmax()):
        raise BertkitError(
            f"{source}: {name} has NaN or infinite numbers; its training diverged or the file is "
            "damaged, so take another checkpoint or copy it again"
        )
    return weights


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read the tensors of one file into memory; an error is a BertkitError that names the file."""
    try:
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as file:
                names = list(file.keys())
            return {name: copied_tensor(path, name) for name in names}
        content = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise BertkitError(f"{path} is missing; copy it again") from None
    except OSError as error:
        raise BertkitError(f"cannot read {path}: {error.strerror or error}") from None
    except pickle.UnpicklingError:
        raise BertkitError(
            f"{path} holds Python objects, which bertkit does not run, or is damaged; save the "
            "model's state_dict() as safetensors, or copy the file again"
        ) from None
    except Exception as error:  # each format raises other types
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise BertkitError(f"{path} is damaged ({reason}); copy it again") from error
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise BertkitError(f"{path} holds no named tensors; it is not a model file")
    return content


def copied_tensor(path: Path, name: str) -> Tensor:
    """Read one tensor into memory; its part of the file is mapped only meanwhile."""
    with safe_open(path, framework="pt") as file:
        return file.get_tensor(name).clone()


def shown_names(names: Iterable[str]) -> str:
    """Format the first names of a list, and how many more there are."""
    first, *rest = [*names] or ["none"]
    shown = ", ".join([first, *rest[:2]])
    return f"{shown} and {len(rest) - 2} more" if len(rest) > 2 else shown
