"""What stands on the encoder in pre-training: the two heads of paper section 3.1."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from bertkit.examples.packed import Packed
from bertkit.model.encoder import Encoder, ModelConfig, activation, initialize
from bertkit.shapes import (
    Hidden,
    NextLogits,
    Pooled,
    TargetIndices,
    VocabularyLogits,
)


class MaskedLanguageHead(nn.Module):
    """Hidden states at masked positions → logits over the vocabulary.

    The decoder is the word embedding matrix itself ("tied"), with a bias of its own.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))
        initialize(self, config)

    def forward(self, hidden: Hidden, word_embeddings: nn.Embedding) -> VocabularyLogits:
        """Logits (targets, vocabulary) of `hidden` rows (targets, width)."""
        transformed = self.norm(activation(self.dense(hidden), self.config))
        return F.linear(transformed, word_embeddings.weight, self.bias)


class NextSentenceHead(nn.Module):
    """Pooled [CLS] → logits of (0 = B follows A, 1 = B is random), Google's order of labels."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, 2)
        initialize(self, config)

    def forward(self, pooled: Pooled) -> NextLogits:
        """Logits (sequences, 2)."""
        return self.dense(pooled)


class PretrainingOutput(NamedTuple):
    """What the two objectives are computed from."""

    mlm_logits: VocabularyLogits
    nsp_logits: NextLogits


class PretrainingModel(nn.Module):
    """Encoder with both pre-training heads."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = Encoder(config)
        self.mlm = MaskedLanguageHead(config)
        self.nsp = NextSentenceHead(config)

    def forward(self, packed: Packed, target_positions: TargetIndices) -> PretrainingOutput:
        """Logits at the target positions, and of each sequence's second sentence.

        The vocabulary projection, the largest matrix of the network, never runs on the 85 % of
        tokens that carry no loss, nor does the larger part of the last layer.

        Args:
            packed: the batch.
            target_positions: (targets,) indices into the tokens of the batch.
        """
        firsts = packed.first_tokens
        hidden = self.encoder(packed, torch.cat([firsts, target_positions]))
        first, targets = hidden.split([len(firsts), len(target_positions)])
        return PretrainingOutput(
            mlm_logits=self.mlm(targets, self.encoder.word_embeddings),
            nsp_logits=self.nsp(self.encoder.pool(first)),
        )


def count_parameters(config: ModelConfig, *, heads: bool = False) -> int:
    """Trainable numbers of the encoder with its pooler, from the sizes alone.

    110M and 340M of the paper are base and large without heads and with a vocabulary of 30,522.

    Args:
        config: the sizes.
        heads: count the two pre-training heads too; the tied decoder is counted once.
    """
    width, inner = config.hidden_size, config.intermediate_size
    norm = 2 * width
    square = width * width + width
    rows = config.vocab_size + config.max_position_embeddings + config.type_vocab_size
    feed_forward = width * inner + inner + inner * width + width
    layer = 4 * square + norm + feed_forward + norm
    encoder = rows * width + norm + config.num_hidden_layers * layer + square
    mlm = square + norm + config.vocab_size
    nsp = 2 * width + 2
    return encoder + (mlm + nsp if heads else 0)
