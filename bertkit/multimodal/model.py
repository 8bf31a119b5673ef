"""The network of MMBT (Kiela et al. 2019, section 3): BERT on the vectors of an image and a text.

The vectors of an image are projected to the width of token embeddings, and stand in their place in
the first segment: `[CLS] image_1 ... image_N [SEP] text [SEP]`. From there on they are tokens: they
get position and segment embeddings, LayerNorm and dropout, and every layer reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bertkit.model.encoder import ModelConfig, initialize
from bertkit.model.task_heads import ClassificationModel
from bertkit.multimodal.images import PatchGrid
from bertkit.multimodal.regions import PackedStreams, Regions, with_regions
from bertkit.pretraining_data.batch import Packed, own_fields
from bertkit.shapes import ClassLogits, Hidden, TokenIndices


@dataclass(frozen=True, kw_only=True)
class PackedImages(Packed):
    """A batch in which some tokens are vectors of images; their ids are placeholders."""

    vectors: Tensor
    """(image tokens, width) features as floating-point numbers, or patches as uint8."""
    vector_rows: TokenIndices
    """(image tokens,) the index of each among all tokens of the batch."""


def with_images(packed: Packed, images: Sequence[Any]) -> PackedImages | PackedStreams:
    """Return a batch with the image of each sequence, whose vectors follow [CLS].

    Args:
        packed: the batch, on the CPU.
        images: for each sequence, in packed order, an array (vectors, width); or, for a network
            with two streams, its regions.
    """
    if isinstance(images[0], Regions):
        return with_regions(packed, images)
    counts = np.array([len(image) for image in images])
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = packed.cu_seqlens[:-1].numpy().astype(np.int64)
    return PackedImages(
        **own_fields(packed),
        vectors=torch.from_numpy(np.concatenate(images)),
        vector_rows=torch.from_numpy(np.repeat(starts, counts) + 1 + within),
    )


class ImageEmbedding(nn.Module):
    """The projection of an image's vectors to token embeddings.

    Patches of pictures also get learned embeddings of their row and of their column.

    Args:
        config: the encoder's config.
        width: the width of a vector.
        grid: how pictures are cut; None for features.
    """

    def __init__(self, config: ModelConfig, width: int, grid: PatchGrid | None) -> None:
        super().__init__()
        self.grid = grid
        self.projection = nn.Linear(width, config.embedding_width)
        if grid is not None:
            self.rows = nn.Embedding(grid.side, config.embedding_width)
            self.columns = nn.Embedding(grid.side, config.embedding_width)
        initialize(self, config)

    def forward(self, vectors: Tensor, numbers: Tensor) -> Hidden:
        """Return (image tokens, embedding width).

        Args:
            vectors: (image tokens, width).
            numbers: (image tokens,) the number of each vector in its image, from 0.
        """
        if self.grid is None:
            return self.projection(vectors)
        embedded = self.projection(vectors / 127.5 - 1)  # from 0 to 255, to -1 to 1
        row, column = numbers // self.grid.side, numbers % self.grid.side
        return embedded + self.rows(row) + self.columns(column)


class ImageTextModel(ClassificationModel):
    """A `ClassificationModel` whose sequences begin with the vectors of an image.

    See `ImageEmbedding` for the width of vectors and the grid.
    """

    def __init__(
        self, config: ModelConfig, classes: int, width: int, grid: PatchGrid | None
    ) -> None:
        super().__init__(config, classes)
        self.image = ImageEmbedding(config, width, grid)

    def forward(self, packed: Packed, words: Tensor | None = None) -> ClassLogits:
        """Return (sequences, classes) logits."""
        assert isinstance(packed, PackedImages), "the batch has no images"
        words = self.encoder.word_embeddings(packed.ids)
        numbers = packed.position_ids[packed.vector_rows] - 1  # [CLS] has the position 0
        vectors = self.image(packed.vectors, numbers).to(words.dtype)
        return super().forward(packed, words.index_copy(0, packed.vector_rows, vectors))
