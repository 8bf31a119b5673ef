"""What is computed from hidden states: the models of tasks, and the vectors of tokens and texts.

A model for fine-tuning is the encoder with one new linear layer (paper section 4). The paper uses
the state of [CLS] as the vector of a text (section 4.1). Without fine-tuning the mean over all
tokens is the better vector; sentence-transformers (Reimers and Gurevych 2019, section 3) fine-tunes
models for either.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from bertkit.errors import BertkitError, check_known
from bertkit.model.encoder import Encoder, Layer, ModelConfig, initialize
from bertkit.model.native import Dropout
from bertkit.pretraining_data.batch import ClassLogits, Packed, Pooled


def in_fp32(layer: nn.Linear, hidden: Tensor) -> Tensor:
    """Apply a layer in fp32, outside autocast: in bf16 different inputs would get equal scores."""
    with torch.autocast(hidden.device.type, enabled=False):
        return layer(hidden.float())


class LinearModel(nn.Module):
    """An encoder, dropout and one linear layer, with `classes` outputs."""

    head = "sequence"  # a key of `Family.classes`, unless a task says another one

    def __init__(self, config: ModelConfig, classes: int) -> None:
        super().__init__()
        self.config = config
        self.encoder = Encoder(config)
        self.dropout = Dropout(config.hidden_dropout_prob)
        self.classifier = nn.Linear(config.hidden_size, classes)
        initialize(self.classifier, config)


class ClassificationModel(LinearModel):
    """An encoder, dropout on the pooled [CLS], and one linear layer (paper section 4.1).

    In an ELECTRA model [CLS] also gets dropout before it is pooled, as in transformers.
    """

    def forward(self, packed: Packed) -> ClassLogits:
        """Return (sequences, classes) logits."""
        summary = self.encoder(packed, self.encoder.summary_tokens(packed))
        electra = self.config.pooler_act == "gelu"
        pooled = self.encoder.pool(self.dropout(summary) if electra else summary)
        return in_fp32(self.classifier, self.dropout(pooled))


class TokenClassificationModel(LinearModel):
    """An encoder with dropout and one linear layer on every token (paper section 5.3)."""

    head = "token"

    def forward(self, packed: Packed) -> ClassLogits:
        """Return (tokens, classes) logits."""
        return in_fp32(self.classifier, self.dropout(self.encoder(packed)))


class SpanModel(nn.Module):
    """An encoder with a start and an end vector (paper section 4.2); no dropout on top.

    [CLS] represents "no answer", but in a left-to-right encoder it attends to no other token.
    The logits of [CLS] and of the last token, [SEP], are then swapped.
    """

    head = "span"

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = Encoder(config)
        self.qa_outputs = nn.Linear(config.hidden_size, 2)
        initialize(self.qa_outputs, config)

    def forward(self, packed: Packed) -> ClassLogits:
        """Return (tokens, 2) logits: whether a token is the answer's first, and its last, token."""
        logits = in_fp32(self.qa_outputs, self.encoder(packed))
        if self.config.direction != "left_to_right":
            return logits
        order = torch.arange(len(logits), device=logits.device)
        order[packed.first_tokens] = packed.last_tokens.to(order.dtype)
        order[packed.last_tokens] = packed.first_tokens.to(order.dtype)
        return logits[order]


class ScaledLinear(nn.Linear):
    """A linear layer with the outputs of a plain one, whose parameters are divided by `unit`.

    This multiplies the learning rate of the layer by `unit`, because Adam's updates do not depend
    on the scale of the gradients. The state dict has the weights of the plain layer, exactly for
    units that are powers of two, so `load_state_dict(state_dict())` is not the identity.
    """

    def __init__(self, plain: nn.Linear, unit: float) -> None:
        super().__init__(plain.in_features, plain.out_features, device=plain.weight.device)
        self.unit = unit
        with torch.no_grad():
            self.weight.copy_(plain.weight / unit)
            self.bias.copy_(plain.bias / unit)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map (rows, inputs) to (rows, outputs)."""
        return super().forward(hidden) * self.unit

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not keep_vars:  # else the parameters themselves are wanted
            for name in ("weight", "bias"):
                destination[prefix + name] = destination[prefix + name] * self.unit


# Pooling and layers -------------------------------------------------------------------------------

LAYERS = (
    "embeddings",
    "second-to-last",
    "last",
    "sum",
    "sum-last-four",
    "concat-last-four",
)
"""Names for choices of hidden states; `sum` excludes the embeddings."""
POOLINGS = ("cls", "mean", "pooler", "lasttoken", "max", "mean_sqrt_len", "weightedmean")
"""cls: the last layer's state of [CLS] (of the last [SEP] if the model reads left to right);
mean: the mean of the last layer's states, including [CLS] and [SEP]; pooler: the pooler's output,
computed from cls; lasttoken: the state of the last [SEP]; max: the maximum of each number;
mean_sqrt_len: the sum divided by the square root of the number of tokens; weightedmean: the
mean with weights 1, 2, 3, ... Several of them but pooler are concatenated: "cls+mean"."""
SUMMARIES = ("cls", "pooler")


def check_pooling(pooling: str) -> None:
    """Raise a BertkitError if a pooling is unknown."""
    for mode in pooling.split("+"):
        known = POOLINGS if mode == pooling else [name for name in POOLINGS if name != "pooler"]
        check_known("pooling", mode, known)


def summary_vectors(encoder: Encoder, packed: Packed, pooling: str) -> Pooled:
    """Return (sequences, width) vectors for "cls" or "pooler", skipping rows that are not needed.

    The last layer is computed only for the summary tokens, except for its attention.
    """
    summary = encoder(packed, encoder.summary_tokens(packed))
    return encoder.pool(summary) if pooling == "pooler" else summary


def token_weights(mode: str, counted: Any, positions: Any, tokens: Any, direction: str) -> Any:
    """Return the weight of each token in its text's vector, for tensors or arrays of any shape.

    `counted` is 1 for a token, less for one that is in several windows, and 0 for one left to
    another window and for padding; `positions` are the indices of tokens in a text of `tokens`
    tokens, [CLS] and [SEP] included. For max, the tokens of weights above 0 count.
    """
    if mode == "cls" and direction == "bidirectional":
        return counted * (positions == 0)
    if mode in ("cls", "lasttoken"):
        return counted * (positions == tokens - 1)
    if mode == "weightedmean":
        return counted * (positions + 1) * 2 / (tokens * (tokens + 1))
    if mode == "max":
        return counted
    return counted / tokens ** (0.5 if mode == "mean_sqrt_len" else 1.0)


def weighted_vectors(encoder: Encoder, packed: Packed, pooling: str, weights: Tensor) -> Pooled:
    """Return (sequences, modes x width) vectors for poolings over tokens, in fp32.

    The weights, (tokens, modes), are those of each token in its sequence's sum; for the maximum,
    tokens of weight 0 do not count.
    """
    states, vectors = encoder(packed).float(), []
    for mode, column in zip(pooling.split("+"), weights[:, :, None].unbind(1), strict=True):
        sums = states.new_zeros(len(packed.first_tokens), states.shape[-1])
        if mode == "max":
            index, counted = packed.owners[:, None].expand_as(states), column == 0
            sums = sums.fill_(-math.inf)
            sums.scatter_reduce_(0, index, states.masked_fill(counted, -math.inf), "amax")
        else:
            sums.index_add_(0, packed.owners, states * column)
        vectors.append(sums)
    return torch.cat(vectors, dim=1)


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


def attention_weights(layer: Layer, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Return the attention of one sequence, whose input to the layer is `hidden` (tokens, width).

    These are the weights (heads, tokens, tokens), and the values that they weigh (tokens, heads,
    head width).
    """
    heads = layer.config.num_attention_heads
    query, key, value = layer.query_key_value(hidden).unflatten(-1, (3, heads, -1)).unbind(1)
    scores = torch.einsum("qhd,khd->hqk", query, key) / math.sqrt(query.shape[-1])
    if layer.config.direction == "left_to_right":
        scores += torch.full(scores.shape[1:], -math.inf, device=scores.device).triu(1)
    return scores.softmax(dim=-1), value
