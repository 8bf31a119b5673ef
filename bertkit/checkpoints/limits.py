"""Checks of untrusted model directories against the sizes of their files, before memory is used.

A `config.json` of a hundred bytes can demand any number of parameters, and a `pytorch_model.bin`,
an archive of a pickle and its tensors, can unpack to any number of bytes.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from bertkit.errors import BertkitError
from bertkit.model.encoder import ModelConfig
from bertkit.model.heads import count_parameters
from bertkit.processes import memory_bytes

MAX_LAYERS = 10_000
"""Layers that share weights (ALBERT) take no extra bytes, so nothing else limits their number."""
TIED = 2
"""A file may refer to the same bytes twice: the word embeddings are also the decoder."""


def check_parameters(config: ModelConfig, files: Iterable[Path], source: object) -> None:
    """Check that the weight files are large enough for the parameters that a config demands.

    A floating-point number takes at least one byte, and the pooler may be absent. If a file is
    missing, the sizes are not compared, as reading the files will report it.

    Raises:
        BertkitError: the config demands too many parameters or layers, or the weights are larger
            than the machine's memory.
    """
    square = config.hidden_size * config.hidden_size + config.hidden_size
    wanted = count_parameters(config) - square
    sizes = [path.stat().st_size if path.is_file() else None for path in files]
    held = sum(size or 0 for size in sizes)
    if wanted > held and sizes and None not in sizes:
        raise BertkitError(
            f"{source}: the config asks for {readable_count(wanted)} parameters, but the weights "
            f"have {held:,} bytes; they do not belong together or are truncated; copy both again"
        )
    if config.num_hidden_layers > MAX_LAYERS:
        raise BertkitError(
            f"{source}: the config asks for {readable_count(config.num_hidden_layers)} layers; at "
            f"most {MAX_LAYERS:,} are supported"
        )
    memory = memory_bytes()
    if memory is not None and held > memory:
        raise BertkitError(
            f"{source}: the weights have {held:,} bytes, but this machine has a memory of "
            f"{memory:,}; load them on a larger one"
        )


def readable_count(number: int) -> str:
    """Format a count in digits, or as a power of ten if it is unrealistically large."""
    if number < 10**18:
        return f"{number:,}"
    return f"more than 10^{int((number.bit_length() - 1) * math.log10(2))}"


def check_archive(file: IO[bytes], path: Path) -> None:
    """Check that a `pytorch_model.bin` does not unpack to more bytes than it has.

    torch stores tensors uncompressed, but its reader also unpacks compressed ones. The file is open
    and is positioned at its start, both before and after the call.

    Raises:
        BertkitError: an entry is compressed, or the entries overlap.
    """
    zipped = zipfile.is_zipfile(file)
    file.seek(0)
    if not zipped:
        return  # the format before torch 1.6: a pickle and the bytes of its tensors
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
    file.seek(0)
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise BertkitError(f"{path} holds compressed data, which torch never writes; copy it again")
    if sum(entry.file_size for entry in entries) > path.stat().st_size:
        raise BertkitError(f"{path}: its entries claim more bytes than it has; copy it again")


def check_finite_weights(tensor: Tensor, name: str, source: object) -> None:
    """Check that a tensor has only finite numbers, as predictions would be NaN otherwise.

    This reads the tensor once and allocates no memory.

    Raises:
        BertkitError: a number is NaN or infinite; the message names the tensor.
    """
    if tensor.numel() and not all(map(math.isfinite, (end.item() for end in tensor.aminmax()))):
        raise BertkitError(
            f"{source}: {name} has NaN or infinite numbers; its training diverged or the file is "
            "damaged, so take another checkpoint or copy it again"
        )


def check_content(content: Mapping[Any, Any], path: Path) -> None:
    """Reject sparse, meta or expanded tensors, and names that are not strings.

    An expanded tensor views the same number many times, and would take far more memory if copied.

    Raises:
        BertkitError: there is such a tensor or name, or they need over twice the file size.
    """
    total = 0
    for name, value in content.items():
        if not isinstance(name, str):
            raise BertkitError(f"{path}: {name!r:.40} is not a tensor name; remake the file")
        if isinstance(value, Tensor):
            if value.layout != torch.strided or value.device.type != "cpu":
                raise BertkitError(f"{path}: {name} is sparse or without data; remake the file")
            total += value.numel() * value.itemsize
    size = path.stat().st_size
    if total > TIED * size:
        raise BertkitError(
            f"{path}: its tensors would take {readable_count(total)} bytes, and the file has "
            f"{size:,}; copy it again"
        )
