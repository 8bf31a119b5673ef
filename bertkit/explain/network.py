"""What happens inside the encoder for one sequence, with every attention weight.

The kernels of `bertkit/model/attention.py` never hold the weights, so they are computed here once
more from each layer's query and key (Vaswani et al. 2017, section 3.2.1). With them the layer is
finished by hand, and the result is held against the encoder's own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from bertkit.examples.packed import Packed
from bertkit.model.attention import visible
from bertkit.model.encoder import Encoder, Layer, activation
from bertkit.shapes import Hidden

PARTS = ("piece", "position", "segment", "sum", "after LayerNorm")
"""Vectors of the embeddings, in the order of `Inside.embeddings`."""


@dataclass(frozen=True)
class Inside:
    """What one sequence does in an encoder; the tokens are those of the sequence."""

    embeddings: np.ndarray
    """(tokens, 5) lengths of the vectors of `PARTS`."""
    attention: np.ndarray
    """(layers, heads, tokens, tokens) the weight of each token (last) for each token."""
    norms: np.ndarray
    """(layers + 1, tokens) lengths of the hidden states, those after the embeddings first."""
    last: Tensor
    """(tokens, width) the last hidden states."""
    difference: float
    """The largest difference of hidden states by these weights from the encoder's own."""

    @cached_property
    def entropy(self) -> np.ndarray:
        """(layers, heads, tokens) of each token's weights, in nats."""
        weights = self.attention
        return -(weights * np.log(np.where(weights > 0, weights, 1))).sum(-1)


@torch.inference_mode()
def look_inside(encoder: Encoder, packed: Packed) -> Inside:
    """Run one sequence, dropout off, and keep what happens on the way.

    Raises:
        BertkitError: the sequence is longer than the model has positions.
    """
    states = encoder.layers_of(packed)
    weights, difference = [], 0.0
    for layer, (before, after) in zip(encoder.stack, pairwise(states), strict=True):
        assert isinstance(layer, Layer)
        own_weights, value = attention_weights(layer, before)
        again = finish(layer, before, own_weights, value)
        difference = max(difference, float((again - after).abs().max()))
        weights.append(own_weights)
    return Inside(
        embeddings=embedding_norms(encoder, packed),
        attention=torch.stack(weights).numpy(),
        norms=torch.stack(states).norm(dim=-1).numpy(),
        last=states[-1],
        difference=difference,
    )


def attention_weights(layer: Layer, hidden: Hidden) -> tuple[Tensor, Tensor]:
    """The weights of one sequence, (heads, tokens, tokens), and the values that they weigh.

    Args:
        layer: in evaluation mode.
        hidden: (tokens, width) what goes into the layer.

    Returns:
        Weights, and values (tokens, heads, head width).
    """
    config = layer.config
    projected = layer.query_key_value(hidden).unflatten(-1, (3, config.num_attention_heads, -1))
    query, key, value = projected.unbind(1)
    scores = torch.einsum("qhd,khd->hqk", query, key) / math.sqrt(query.shape[-1])
    seen = visible(len(hidden), config.direction, hidden.device)
    return scores.masked_fill(~seen, -math.inf).softmax(dim=-1), value


def finish(layer: Layer, hidden: Hidden, weights: Tensor, value: Tensor) -> Hidden:
    """The layer's output, (tokens, width), from attention weights."""
    attended = torch.einsum("hqk,khd->qhd", weights, value).flatten(1)
    hidden = layer.attention_norm(layer.attention_output(attended) + hidden)
    expanded = activation(layer.intermediate(hidden), layer.config)
    return layer.output_norm(layer.output(expanded) + hidden)


def embedding_norms(encoder: Encoder, packed: Packed) -> np.ndarray:
    """(tokens, 5) the lengths of `PARTS`."""
    parts = [
        encoder.word_embeddings(packed.ids),
        encoder.position_embeddings(packed.position_ids),
        encoder.segment_embeddings(packed.segment_ids),
    ]
    parts += [torch.stack(parts).sum(0), encoder.embeddings(packed)]
    return torch.stack([part.norm(dim=-1) for part in parts], dim=1).numpy()
