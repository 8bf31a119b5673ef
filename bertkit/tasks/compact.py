"""Tuning with only the word embeddings that the training data uses, to the same result.

A piece that never occurs has a gradient of 0 in every step. Adam's averages of it stay 0, so its
row only shrinks by weight decay, each step by 1 - learning rate x decay. So the rows that occur are
tuned in a small matrix, and the others are shrunk once at the end. On small data sets with a
vocabulary of 30,522 this spares most of the optimizer's work: the word embeddings are half of the
parameters of a small BERT.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from bertkit.model.encoder import Encoder
from bertkit.tasks.task import Items


class CompactEmbeddings:
    """The rows of an encoder's word embeddings that some items use, put in the place of all.

    Args:
        encoder: is changed; `restore` gives it back whole.
        items: everything it will be tuned on.
    """

    def __init__(self, encoder: Encoder, items: Items) -> None:
        self.encoder = encoder
        self.whole = encoder.word_embeddings
        seen = np.zeros(self.whole.num_embeddings, dtype=bool)
        for item in items.items:
            for part in item.parts:
                for sequence in part.sequences:
                    seen[sequence.ids] = True
        self.used = torch.from_numpy(np.flatnonzero(seen)).to(self.whole.weight.device)
        self.table = np.cumsum(seen) - 1
        """(vocabulary,) id -> row of the small matrix, for `make_batch`."""
        rows = self.whole.weight.detach()[self.used].clone()
        encoder.word_embeddings = nn.Embedding(rows.shape[0], rows.shape[1], _weight=rows)

    @torch.no_grad()
    def restore(self, shrinkage: float) -> None:
        """Put the tuned rows back; all others times `shrinkage`, what decay left of them."""
        tuned = self.encoder.word_embeddings.weight
        self.whole.weight.mul_(shrinkage)
        self.whole.weight[self.used] = tuned.to(self.whole.weight.dtype)
        self.encoder.word_embeddings = self.whole
