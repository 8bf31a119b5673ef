"""The encoder's pre-training heads: the two heads of paper section 3.1."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bertkit.model.encoder import Encoder, ModelConfig, activation, initialize
from bertkit.pretraining_data.batch import Packed
from bertkit.shapes import Hidden, NextLogits, Pooled, Rows, TargetIndices, VocabularyLogits


class LanguageHead(nn.Module):
    """A head that maps hidden states at target positions to logits over the vocabulary.

    It predicts the token at the position (masked language model) or the adjacent one (causal
    language model). The decoder is the word embedding matrix itself ("tied"), with a separate bias.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.dense = nn.Linear(config.hidden_size, config.embedding_width)
        self.norm = nn.LayerNorm(config.embedding_width, eps=config.layer_norm_eps)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))
        initialize(self, config)

    def forward(self, hidden: Hidden, word_embeddings: nn.Embedding) -> VocabularyLogits:
        """Return (targets, vocabulary) logits for hidden states (targets, width)."""
        product = aligned_linear if hidden.is_cuda else F.linear
        return product(self.transform(hidden), word_embeddings.weight, self.bias)

    def transform(self, hidden: Rows) -> Tensor:
        """Return (targets, embedding width): what is multiplied by the word embeddings."""
        return self.norm(activation(self.dense(hidden), self.config))


ALIGNMENT = 64
"""CUDA's fast matrix products need sizes that are multiples of 8, and 64 fills their tiles."""


def aligned_linear(x: Rows, weight: Tensor, bias: Tensor) -> Tensor:
    """Return what `F.linear` does, computed with a number of columns that is a multiple of 64.

    BERT's vocabulary of 30,522 tokens is not a multiple of 8. The weights, (columns, width), get
    rows of zeros for the product only; parameters, results and gradients are those of `F.linear`.
    """
    columns = len(weight)
    missing = -columns % ALIGNMENT
    if not missing:
        return F.linear(x, weight, bias)
    weight, bias = F.pad(weight, (0, 0, 0, missing)), F.pad(bias, (0, missing))
    return F.linear(x, weight, bias)[:, :columns]


class NextSentenceHead(nn.Module):
    """A head that maps the pooled [CLS] to logits for "B follows A" (0) and "it does not" (1).

    The order of labels is Google's. Label 1 means a random B, or, in sentence-order prediction,
    that A and B are swapped.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, 2)
        initialize(self, config)

    def forward(self, pooled: Pooled) -> NextLogits:
        """Return (sequences, 2) logits."""
        return self.dense(pooled)


class PretrainingOutput(NamedTuple):
    """The logits from which the pre-training losses are computed."""

    mlm_logits: VocabularyLogits
    nsp_logits: NextLogits | None
    """None if the model has no head for sentence pairs."""


class PretrainingModel(nn.Module):
    """An encoder with its pre-training heads.

    Args:
        config: the model's sizes.
        pairs: whether to add a head for sentence pairs. Without it the pooler is not trained.
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
        """Return the logits at the target positions and those of each sentence pair.

        The targets are (targets,) indices into the tokens of the batch. The vocabulary projection,
        the largest matrix of the network, never runs on the 85 % of tokens that carry no loss, nor
        does most of the last layer.
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
    """Return the number of parameters of the encoder and its pooler, computed from the sizes.

    The paper's 110M and 340M are base and large without heads and with a vocabulary of 30,522. With
    `heads`, the two pre-training heads are included; the tied decoder is counted once.
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
