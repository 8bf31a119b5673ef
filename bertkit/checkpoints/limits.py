"""What a model directory may ask for, compared with what is on disk before memory is taken.

A `config.json` of a hundred bytes can ask for any number of parameters, and a `pytorch_model.bin`,
an archive of a pickle and its tensors, can unpack to any number of bytes.
"""

from __future__ import annotations

import math
import os
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from bertkit.errors import BertkitError
from bertkit.model.encoder import ModelConfig
from bertkit.model.heads import count_parameters

MOST_LAYERS = 10_000
"""Shared weights (ALBERT) take no bytes a layer, so nothing else limits their number."""


TIED = 2
"""A file may name the same bytes twice: the word embeddings are also the decoder."""


def check_parameters(config: ModelConfig, files: Iterable[Path], source: object) -> None:
    """Compare the parameters that a config asks for with the bytes that hold them.

    A floating-point number takes a byte or more, and a pooler may be absent.

    Args:
        config: of the directory.
        files: the weights; where one is missing, nothing is said, as reading will name it.
        source: names the directory in the message.

    Raises:
        BertkitError: says both numbers. A config that asks for 10^12 parameters ends here.
    """
    square = config.hidden_size * config.hidden_size + config.hidden_size
    wanted = count_parameters(config) - square
    sizes = [path.stat().st_size if path.is_file() else None for path in files]
    held = sum(size or 0 for size in sizes)
    if wanted > held and sizes and None not in sizes:
        raise BertkitError(
            f"{source}: the config asks for {readable_count(wanted)} parameters, but the weights "
            f"have {held:,} bytes; they do not belong together, or are cut short; copy both again"
        )
    if config.num_hidden_layers > MOST_LAYERS:
        raise BertkitError(
            f"{source}: the config asks for {readable_count(config.num_hidden_layers)} layers; at "
            f"most {MOST_LAYERS:,} are read"
        )
    memory = memory_bytes()
    if memory is not None and held > memory:
        raise BertkitError(
            f"{source}: the weights have {held:,} bytes, and this machine has a memory of "
            f"{memory:,}; load them on a larger one"
        )


def readable_count(number: int) -> str:
    """A count in digits; a power of ten where it is longer than any real one."""
    if number < 10**18:
        return f"{number:,}"
    return f"more than 10^{int((number.bit_length() - 1) * math.log10(2))}"


def memory_bytes() -> int | None:
    """The machine's memory; None where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None


def check_archive(file: IO[bytes], path: Path) -> None:
    """Refuse a `pytorch_model.bin` that would unpack to more than it is.

    torch stores tensors as they are, and yet its reader unpacks compressed ones.

    Args:
        file: open, and at its beginning before and after.
        path: names it in the message.

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
        raise BertkitError(f"{path} claims more bytes than it has; copy it again")


def check_finite(tensor: Tensor, name: str, source: object) -> None:
    """Refuse weights that are no numbers: every answer would be none.

    Reads the tensor once and takes no memory.

    Raises:
        BertkitError: some number is NaN or infinite; names the tensor.
    """
    if tensor.numel() and not all(map(math.isfinite, (end.item() for end in tensor.aminmax()))):
        raise BertkitError(
            f"{source}: {name} has NaN or infinite numbers; its training diverged or the file is "
            "damaged, so take another checkpoint or copy it again"
        )


def check_content(content: Mapping[Any, Any], path: Path) -> None:
    """Refuse tensors that are none, or that grow when they are copied.

    A tensor can be a view of one number a billion times, or sparse, or have no data at all.

    Raises:
        BertkitError: names the tensor.
    """
    total = 0
    for name, value in content.items():
        if not isinstance(name, str):
            raise BertkitError(f"{path}: {name!r:.40} is no name of a tensor; remake the file")
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
