"""Vectors from hidden states: of tokens, from chosen layers, and of texts, by pooling.

The paper uses the state of [CLS] for a text (section 4.1). Without fine-tuning the mean over all
tokens is the better vector; sentence-transformers (Reimers and Gurevych 2019, section 3) fine-tunes
models for either.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bertkit.errors import BertkitError, check_known
from bertkit.model.encoder import Encoder, ModelConfig
from bertkit.pretraining_data.batch import Packed
from bertkit.shapes import Pooled

LAYERS = (
    "embeddings",
    "second-to-last",
    "last",
    "sum",
    "sum-last-four",
    "concat-last-four",
)
"""Names for choices of hidden states; `sum` excludes the embeddings."""
POOLINGS = ("cls", "mean", "pooler", "mean-last-four")
"""cls: the last layer's state of [CLS] (of the last [SEP] if the model reads left to right);
mean: the mean of the last layer's states, including [CLS] and [SEP]; pooler: the pooler's output,
computed from cls; mean-last-four: the mean over all tokens and over the last four layers."""

OVER_TOKENS = ("mean", "mean-last-four")


def check_pooling(pooling: str, config: ModelConfig) -> None:
    """Raise a BertkitError if a pooling is unknown or the model has too few layers for it."""
    check_known("pooling", pooling, POOLINGS)
    if pooling == "mean-last-four" and config.num_hidden_layers < 4:
        raise BertkitError(
            f"'{pooling}' needs 4 layers and the model has {config.num_hidden_layers}; choose mean"
        )


def summary_vectors(encoder: Encoder, packed: Packed, pooling: str) -> Pooled:
    """Return (sequences, width) vectors for "cls" or "pooler", skipping rows that are not needed.

    The last layer is computed only for the summary tokens, except for its attention.
    """
    summary = encoder(packed, encoder.summary_tokens(packed))
    return encoder.pool(summary) if pooling == "pooler" else summary


def weighted_vectors(encoder: Encoder, packed: Packed, pooling: str, weights: Tensor) -> Pooled:
    """Return (sequences, width) vectors for "mean" or "mean-last-four": weighted sums in fp32.

    The weights, (tokens,), are those of each token in its sequence's sum.
    """
    if pooling == "mean":
        states = encoder(packed).float()
    else:
        states = torch.stack([layer.float() for layer in encoder.layers_of(packed)[-4:]]).mean(0)
    sums = states.new_zeros(len(packed.first_tokens), states.shape[-1])
    return sums.index_add_(0, packed.owners, states * weights[:, None])


def check_layers(layers: str, config: ModelConfig) -> None:
    """Raise a BertkitError if a choice of layers is unknown or the model has too few for it."""
    check_known("choice of layers", layers, LAYERS)
    needed = 4 if layers.endswith("last-four") else 2 if layers == "second-to-last" else 1
    if config.num_hidden_layers < needed:
        raise BertkitError(
            f"'{layers}' needs {needed} layers and the model has {config.num_hidden_layers}; "
            "choose last"
        )


def combine(states: list[Tensor], layers: str) -> Tensor:
    """Combine the states of all layers into one vector per token (paper table 7), (..., width).

    Args:
        states: the states, (..., width), after the embeddings and after each layer.
        layers: one of `LAYERS`.
    """
    if layers == "embeddings":
        return states[0]
    if layers == "second-to-last":
        return states[-2]
    if layers == "last":
        return states[-1]
    chosen = states[-4:] if layers.endswith("last-four") else states[1:]
    if layers.startswith("concat"):
        return torch.cat(chosen, dim=-1)
    return torch.stack(chosen).sum(0)


def encoder_features(encoder: Encoder, packed: Packed, layers: str) -> Tensor:
    """Run an encoder without gradients, and `combine` its states to (tokens, width)."""
    with torch.no_grad():
        only_first = layers == "embeddings"
        states = [encoder.embed(packed)] if only_first else encoder.layers_of(packed)
    return combine(states, layers)
