"""What stands on the encoder in pre-training: the two heads of paper section 3.1."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from bertkit.model.encoder import Encoder, ModelConfig, activation, initialize
from bertkit.pretraining_data.batch import Packed
from bertkit.shapes import Hidden, NextLogits, Pooled, TargetIndices, VocabularyLogits


class LanguageHead(nn.Module):
    """Hidden states at chosen positions → logits over the vocabulary.

    Of the piece there (masked language model) or of the next one (left to right). The decoder is
    the word embedding matrix itself ("tied"), with a bias of its own.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.dense = nn.Linear(config.hidden_size, config.embedding_width)
        self.norm = nn.LayerNorm(config.embedding_width, eps=config.layer_norm_eps)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))
        initialize(self, config)

    def forward(self, hidden: Hidden, word_embeddings: nn.Embedding) -> VocabularyLogits:
        """Logits (targets, vocabulary) of `hidden` rows (targets, width)."""
        transformed = self.norm(activation(self.dense(hidden), self.config))
        return F.linear(transformed, word_embeddings.weight, self.bias)


class NextSentenceHead(nn.Module):
    """Pooled [CLS] → logits of (0 = B follows A, 1 = it does not), Google's order of labels.

    Label 1 is a random B, or, for sentence-order prediction, A and B in the wrong order.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, 2)
        initialize(self, config)

    def forward(self, pooled: Pooled) -> NextLogits:
        """Logits (sequences, 2)."""
        return self.dense(pooled)


class PretrainingOutput(NamedTuple):
    """What the objectives are computed from."""

    mlm_logits: VocabularyLogits
    nsp_logits: NextLogits | None
    """None of a model without an objective on sentence pairs."""


class PretrainingModel(nn.Module):
    """Encoder with its pre-training heads.

    Args:
        config: the sizes.
        pairs: whether there is a head on sentence pairs. Without it the pooler is not trained.
    """

    def __init__(self, config: ModelConfig, *, pairs: bool = True) -> None:
        super().__init__()
        self.config = config
        self.encoder = Encoder(config)
        self.mlm = LanguageHead(config)
        self.nsp = NextSentenceHead(config) if pairs else None
        if not pairs:
            self.encoder.pooler.requires_grad_(False)

    def forward(self, packed: Packed, target_positions: TargetIndices) -> PretrainingOutput:
        """Logits at the target positions, and of each sequence's second sentence.

        The vocabulary projection, the largest matrix of the network, never runs on the 85 % of
        tokens that carry no loss, nor does the larger part of the last layer.

        Args:
            packed: the batch.
            target_positions: (targets,) indices into the tokens of the batch.
        """
        words = self.encoder.word_embeddings
        if self.nsp is None:
            return PretrainingOutput(self.mlm(self.encoder(packed, target_positions), words), None)
        summaries = self.encoder.summary_tokens(packed)
        hidden = self.encoder(packed, torch.cat([summaries, target_positions]))
        summary, targets = hidden.split([len(summaries), len(target_positions)])
        return PretrainingOutput(
            mlm_logits=self.mlm(targets, words), nsp_logits=self.nsp(self.encoder.pool(summary))
        )


def count_parameters(config: ModelConfig, *, heads: bool = False) -> int:
    """Trainable numbers of the encoder with its pooler, from the sizes alone.

    110M and 340M of the paper are base and large without heads and with a vocabulary of 30,522.

    Args:
        config: the sizes.
        heads: count the two pre-training heads too; the tied decoder is counted once.
    """
    width, inner, narrow = config.hidden_size, config.intermediate_size, config.embedding_width
    norm = 2 * width
    square = width * width + width
    rows = config.vocab_size + config.max_position_embeddings + config.type_vocab_size
    embeddings = rows * narrow + 2 * narrow
    if config.embedding_size:
        embeddings += narrow * width + width
    feed_forward = width * inner + inner + inner * width + width
    layer = 4 * square + norm + feed_forward + norm
    layers = 1 if config.share_layers else config.num_hidden_layers
    encoder = embeddings + layers * layer + square
    mlm = width * narrow + narrow + 2 * narrow + config.vocab_size
    nsp = 2 * width + 2
    return encoder + (mlm + nsp if heads else 0)
