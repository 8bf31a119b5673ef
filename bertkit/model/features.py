"""Hidden states of chosen layers as features (paper section 5.3 and table 7)."""

from __future__ import annotations

import torch
from torch import Tensor

from bertkit.errors import BertkitError, check_known
from bertkit.model.encoder import Encoder, ModelConfig
from bertkit.pretraining_data.batch import Packed

LAYERS = (
    "embeddings",
    "second-to-last",
    "last",
    "sum",
    "sum-last-four",
    "concat-last-four",
)
"""Names for choices of hidden states; `sum` excludes the embeddings."""


def check_layers(layers: str, config: ModelConfig) -> None:
    """Raise a BertkitError if a choice of layers is unknown or the model has too few for it."""
    check_known("choice of layers", layers, LAYERS)
    needed = 4 if layers.endswith("last-four") else 2 if layers == "second-to-last" else 1
    if config.num_hidden_layers < needed:
        raise BertkitError(
            f"'{layers}' needs {needed} layers and the model has {config.num_hidden_layers}; "
            "choose last"
        )


def feature_width(layers: str, config: ModelConfig) -> int:
    """Return the width of a token's feature vector."""
    return config.hidden_size * (4 if layers.startswith("concat") else 1)


def combine(states: list[Tensor], layers: str) -> Tensor:
    """Combine the states of all layers into one vector per token, (..., `feature_width`).

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
    """Run an encoder without gradients, and `combine` its states to (tokens, `feature_width`)."""
    with torch.no_grad():
        only_first = layers == "embeddings"
        states = [encoder.embed(packed)] if only_first else encoder.layers_of(packed)
    return combine(states, layers)
