"""MMBT: BERT reads the vectors of an image as tokens (Kiela et al. 2019).

    python -m experiments.multimodal.mmbt [--model DIRECTORY] [--epochs 12] [--seeds 3]

A linear layer projects the vectors of an image to the width of token embeddings, and they take the
place of tokens after [CLS]: `[CLS] image [SEP] text [SEP]`. From there on they are tokens: they get
position and segment embeddings, LayerNorm and dropout, and each layer reads them beside the text.
The vectors of patches also get embeddings of their row and their column.

The command trains four models from the same initial weights and prints their accuracy on questions
about held-out digits (see `digits.py`): one reads the question alone, one the image alone, and two
read both, as the eight rows of pixels or as patches of 2 x 2 pixels.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bertkit.model.encoder import Encoder, initialize
from bertkit.pretraining_data.batch import Packed, pack
from bertkit.tokenizer.wordpiece import Tokenizer
from experiments.multimodal.digits import (
    ANSWERS,
    Examples,
    as_patches,
    initial_encoder,
    questions,
    summary,
    train,
)

PATCH_SIZE = 2
PATCHES_PER_SIDE = 4


class MMBT(nn.Module):
    """A classifier of an image with a text.

    Args:
        encoder: a BERT encoder, whose weights are trained further.
        tokenizer: the encoder's tokenizer.
        classes: the number of classes.
        width: the width of an image's vectors.
        side: for images of `side` x `side` patches; 0 for vectors without rows and columns.
    """

    def __init__(
        self, encoder: Encoder, tokenizer: Tokenizer, classes: int, width: int, side: int = 0
    ) -> None:
        super().__init__()
        config, embedding_width = encoder.config, encoder.config.embedding_width
        self.encoder, self.tokenizer, self.side = encoder, tokenizer, side
        self.projection = nn.Linear(width, embedding_width)
        self.rows = nn.Embedding(max(1, side), embedding_width)
        self.columns = nn.Embedding(max(1, side), embedding_width)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.classifier = nn.Linear(config.hidden_size, classes)
        for new in (self.projection, self.rows, self.columns, self.classifier):
            initialize(new, config)

    def forward(self, texts: Sequence[Sequence[int]], images: Tensor | None) -> Tensor:
        """Return (texts, classes) logits.

        Args:
            texts: the token ids of each text, without special tokens.
            images: (texts, vectors, width); None to read the texts alone.
        """
        count = 0 if images is None else images.shape[1]
        packed = self.pack(texts, count)
        embeddings = self.encoder.word_embeddings(packed.ids)
        if images is not None:
            after_cls = packed.first_tokens.long()[:, None] + 1 + torch.arange(count)
            projected = self.embed(images).flatten(0, 1)
            embeddings = embeddings.index_copy(0, after_cls.flatten(), projected)
        cls = self.encoder(packed, packed.first_tokens, token_embeddings=embeddings)
        return self.classifier(self.dropout(self.encoder.pool(cls)))

    def pack(self, texts: Sequence[Sequence[int]], count: int) -> Packed:
        """Return the sequences of some texts, with `count` [PAD] in the place of an image."""
        cls, sep, pad = (getattr(self.tokenizer, f"{name}_id") for name in ("cls", "sep", "pad"))
        if not count:
            return pack([[cls, *text, sep] for text in texts])
        first = [cls, *[pad] * count, sep]
        return pack(
            [[*first, *text, sep] for text in texts],
            [[0] * len(first) + [1] * (len(text) + 1) for text in texts],
        )

    def embed(self, images: Tensor) -> Tensor:
        """Return images (images, vectors, width) as (images, vectors, embedding width)."""
        embedded = self.projection(images)
        if not self.side:
            return embedded
        number = torch.arange(images.shape[1])
        return embedded + self.rows(number // self.side) + self.columns(number % self.side)


class Contestant(NamedTuple):
    """What a model may see of a question about an image."""

    reads_text: bool
    reads_image: bool
    side: int


CONTESTANTS = {
    "question only": Contestant(True, False, 0),
    "image only, patches": Contestant(False, True, PATCHES_PER_SIDE),
    "MMBT, rows of pixels": Contestant(True, True, 0),
    "MMBT, patches": Contestant(True, True, PATCHES_PER_SIDE),
}


def accuracy(model: MMBT, examples: Examples, *, reads_image: bool) -> float:
    """Return the share of examples that are answered correctly."""
    right = 0
    with torch.inference_mode():
        for rows in torch.arange(len(examples)).split(256):
            images = examples.images[rows] if reads_image else None
            logits = model([examples.texts[row] for row in rows], images)
            right += int((logits.argmax(-1) == examples.labels[rows]).sum())
    return right / len(examples)


def run(contestant: Contestant, folder: str, epochs: int, seed: int, most: int = 10_000) -> float:
    """Train a contestant; return its accuracy on held-out images, with at most `most` of both."""
    encoder, tokenizer = initial_encoder(folder)

    def vectors(images: np.ndarray) -> np.ndarray:
        return as_patches(images, PATCH_SIZE) if contestant.side else images

    data, held_out = (
        questions(tokenizer, vectors, held_out=held_out, most=most) for held_out in (False, True)
    )
    if not contestant.reads_text:
        data, held_out = (replace(split, texts=[[]] * len(split)) for split in (data, held_out))
    torch.manual_seed(seed)
    width = data.images.shape[-1]
    model = MMBT(encoder, tokenizer, len(ANSWERS), width, contestant.side)

    def loss_of(rows: list[int]) -> Tensor:
        images = data.images[rows] if contestant.reads_image else None
        return F.cross_entropy(model([data.texts[row] for row in rows], images), data.labels[rows])

    train(model, loss_of, len(data), epochs, seed)
    return accuracy(model, held_out, reads_image=contestant.reads_image)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train all contestants with all seeds, and print their accuracy."""
    parser = argparse.ArgumentParser(description="Questions about digits, answered by MMBT.")
    parser.add_argument("--model", default="", help="a model directory; else random weights")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--images", type=int, default=10_000, help="the most images of each split")
    options = parser.parse_args(arguments)
    for name, contestant in CONTESTANTS.items():
        accuracies = [
            run(contestant, options.model, options.epochs, seed, options.images)
            for seed in range(options.seeds)
        ]
        print(f"{name}: accuracy {summary(accuracies)}", flush=True)


if __name__ == "__main__":
    main()
