"""Batches with a stream of images beside that of the texts (ViLBERT, Lu et al. 2019, section 2).

Both streams are packed, each with its own boundaries: sequence i of one belongs to sequence i of
the other. An image is a sequence of regions; before them stands one vector for the whole image, the
mean of its regions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from bertkit.multimodal.images import PatchGrid
from bertkit.pretraining_data.batch import Packed, from_arrays, own_fields, to_device
from bertkit.shapes import TargetIndices

BOX = 4
"""The numbers of a box: left, top, right, bottom, as fractions of the image's width and height."""
WHOLE_IMAGE = np.array([[0, 0, 1, 1]], np.float32)
"""The box of a whole image."""
AnyPacked = TypeVar("AnyPacked", bound=Packed)


class Regions(NamedTuple):
    """An image that is a sequence by itself, not a part of its text's."""

    vectors: np.ndarray
    """(regions, width) features, or patches as uint8."""
    boxes: np.ndarray
    """(regions, 4) boxes; zeros if regions have no place."""


@dataclass(frozen=True, kw_only=True)
class PackedRegions(Packed):
    """Images laid end to end; the first token of each is the whole image, and ids have no use."""

    vectors: Tensor
    """(tokens, width) features, or pixels from -1 to 1."""
    boxes: Tensor
    """(tokens, 5) the box of each region, and the share of the image's area that it covers."""


@dataclass(frozen=True, kw_only=True)
class PackedStreams(Packed):
    """Texts laid end to end, and their images."""

    images: PackedRegions
    partners: tuple[int, ...]
    """For each text the next pair, in a circle, with another text and another image; -1 if there is
    none. It stays on the host, which arranges pairs without waiting for a GPU."""


def with_regions(packed: Packed, images: Sequence[Regions]) -> PackedStreams:
    """Return a batch of texts, which are on the CPU, with the image of each, in packed order.

    There may be more or fewer images if the network gets pairs.
    """
    vectors, boxes = [], []
    for image in images:
        found = image.vectors.astype(np.float32)
        found = found / 127.5 - 1 if image.vectors.dtype == np.uint8 else found
        vectors += [found.mean(axis=0, keepdims=True), found]
        boxes += [WHOLE_IMAGE, image.boxes]
    corners = np.concatenate(boxes).astype(np.float32)
    areas = (corners[:, 2:] - corners[:, :2]).prod(axis=1, keepdims=True)
    ids = np.zeros(len(corners), np.int64)
    lengths = np.array([1 + len(image.vectors) for image in images])
    regions = PackedRegions(
        **own_fields(from_arrays(ids, ids, lengths)),
        vectors=torch.from_numpy(np.concatenate(vectors)),
        boxes=torch.from_numpy(np.concatenate([corners, areas], axis=1)),
    )
    partners = find_partners(packed, images) if len(images) == len(packed.lengths) else ()
    return PackedStreams(**own_fields(packed), images=regions, partners=partners)


def find_partners(packed: Packed, images: Sequence[Regions]) -> tuple[int, ...]:
    """Return `PackedStreams.partners`."""
    texts = numbered_arrays(np.split(packed.ids.numpy(), packed.cu_seqlens[1:-1].numpy()))
    pictures = numbered_arrays([image.vectors for image in images])
    found, count = [], len(images)
    for number in range(count):
        differs = np.roll((texts != texts[number]) & (pictures != pictures[number]), -number)
        found.append((number + int(differs.argmax())) % count if differs.any() else -1)
    return tuple(found)


def numbered_arrays(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Return a number for each array, (arrays,), the same for equal ones."""
    known: dict[tuple[tuple[int, ...], bytes], int] = {}
    return np.array([known.setdefault((a.shape, a.tobytes()), len(known)) for a in arrays])


@lru_cache(maxsize=8)
def grid_boxes(grid: PatchGrid) -> np.ndarray:
    """Return the boxes of a picture's patches, (patches, 4)."""
    row, column = np.divmod(np.arange(grid.side**2), grid.side)
    corners = np.stack([column, row, column + 1, row + 1], axis=1)
    return (corners / grid.side).astype(np.float32)


def changed(packed: AnyPacked, **fields: Any) -> AnyPacked:
    """Return a batch of the same lengths with other fields, without waiting for the device."""
    made = replace(packed, **fields)
    made.__dict__["lengths"] = packed.lengths
    return made


def take_sequences(packed: Packed, order: Sequence[int]) -> tuple[Packed, TargetIndices]:
    """Return a batch of some of the sequences, and the index of each of its tokens in the old one.

    A sequence may occur several times in `order`.
    """
    lengths = np.array(packed.lengths)
    starts = np.cumsum(lengths) - lengths
    chosen = lengths[list(order)]
    within = np.arange(chosen.sum()) - np.repeat(np.cumsum(chosen) - chosen, chosen)
    rows = torch.from_numpy(np.repeat(starts[list(order)], chosen) + within)
    kept = from_arrays(within, within, chosen)  # ids and segments are embedded already
    device = packed.cu_seqlens.device
    return kept.to(device), to_device(rows, device)


def draw_rows(packed: Packed, counts: Tensor, total: int, *, last: bool) -> TargetIndices:
    """Draw tokens of each sequence by torch's generator, but never its first.

    Args:
        packed: the batch.
        counts: (sequences,) how many to draw; there must be as many.
        total: the sum of `counts`, which the host knows.
        last: whether the last token may be drawn.
    """
    tokens, device = len(packed.ids), packed.ids.device
    sequence = packed.owners
    apart = packed.position_ids == 0
    if not last:
        apart = apart.index_fill(0, packed.last_tokens.long(), value=True)
    # Sorted, tokens stay in their sequence, in random order, and those that are apart come last.
    order = (sequence + 0.45 * torch.rand(tokens, device=device) + 0.45 * apart).argsort()
    left = packed.position_ids >= counts[sequence]
    return order[left.to(torch.uint8).argsort(stable=True)[:total]]
