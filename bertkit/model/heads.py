"""Pre-training networks: BERT's heads (paper section 3.1) and replaced-token detection.

In replaced-token detection (ELECTRA, Clark et al. 2020) a small generator replaces masked tokens by
samples from its distribution; the discriminator, which is the model to keep, predicts for every
token whether it is the original. They share their embeddings (section 3.2 of that paper). No
gradient flows through the sampling.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bertkit.model.encoder import (
    Encoder,
    Layer,
    ModelConfig,
    activation,
    as_residual,
    initialize,
    layer_sequence,
    run_layers,
)
from bertkit.pretraining_data.batch import (
    Hidden,
    NextLogits,
    Packed,
    Pooled,
    Rows,
    TargetIndices,
    VocabularyLogits,
)


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


class ReplacedTokenOutput(NamedTuple):
    """The tensors from which the two losses are computed."""

    mlm_logits: VocabularyLogits
    """The generator's logits at the targets."""
    replaced_logits: Tensor
    """(tokens,) the discriminator's logits; above 0 if it considers the token replaced."""
    replaced: Tensor
    """(tokens,) 1.0 if the token differs from the original; 0.0 otherwise, also at a target whose
    sample is the original."""


class Generator(nn.Module):
    """A narrow encoder on top of the discriminator's embeddings, with a masked-language-model head.

    Its width and number of heads are a `share` of those of the discriminator, whose config it gets.
    """

    def __init__(self, config: ModelConfig, share: float) -> None:
        super().__init__()
        self.config = generator_config(config, share)
        width = self.config.hidden_size
        self.projection = nn.Linear(config.embedding_width, width)
        depth = 1 if config.share_layers else config.num_hidden_layers
        self.layers = nn.ModuleList(Layer(self.config) for _ in range(depth))
        self.mlm = LanguageHead(self.config)
        initialize(self, self.config)

    def forward(
        self, embeddings: Hidden, packed: Packed, targets: TargetIndices, words: nn.Embedding
    ) -> VocabularyLogits:
        """Return (targets, vocabulary) logits from embeddings (tokens, embedding width)."""
        stack = layer_sequence(self.layers, self.config)
        hidden = as_residual(self.projection(embeddings))
        return self.mlm(run_layers(stack, hidden, packed, targets), words)


class ReplacedTokenHead(nn.Module):
    """A head that gives one logit per token: a linear layer with GELU and a linear output layer."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.output = nn.Linear(config.hidden_size, 1)
        initialize(self, config)

    def forward(self, hidden: Hidden) -> Tensor:
        """Map hidden states (tokens, width) to logits (tokens,)."""
        return self.output(activation(self.dense(hidden), self.config)).squeeze(-1)


class ReplacedTokenModel(nn.Module):
    """The generator and the discriminator, for pre-training; see `Generator` for the arguments."""

    def __init__(self, config: ModelConfig, share: float) -> None:
        super().__init__()
        self.config = config
        self.encoder = Encoder(config)
        self.encoder.pooler.requires_grad_(False)  # no loss depends on it
        self.rtd = ReplacedTokenHead(config)
        self.generator = Generator(config, share)

    def forward(
        self, packed: Packed, target_positions: TargetIndices, target_ids: TargetIndices
    ) -> ReplacedTokenOutput:
        """Replace the masked tokens by the generator's samples, and run the discriminator.

        The batch is masked at the targets: (targets,) indices into its tokens, with their original
        ids. Samples come from torch's random generator, which the training loop seeds at every
        step.
        """
        encoder = self.encoder
        logits = self.generator(
            encoder.embeddings(packed), packed, target_positions, encoder.word_embeddings
        )
        with torch.no_grad():
            drawn = sample_rows(logits.float().softmax(-1))
        ids = packed.ids.index_copy(0, target_positions, drawn)
        replaced = torch.zeros(len(ids), device=ids.device)
        replaced[target_positions] = (drawn != target_ids).float()
        hidden = encoder(replace(packed, ids=ids))
        return ReplacedTokenOutput(logits, self.rtd(hidden), replaced)

    def whole_generator(self) -> tuple[Encoder, LanguageHead]:
        """Return the generator as a separate encoder that shares its weights, and its head."""
        with torch.device("meta"):  # every tensor but the pooler, which is unused, is replaced
            whole, shared = Encoder(self.generator.config), self.encoder
        whole.word_embeddings = shared.word_embeddings
        whole.position_embeddings = shared.position_embeddings
        whole.segment_embeddings = shared.segment_embeddings
        whole.embedding_norm = shared.embedding_norm
        whole.projection, whole.layers = self.generator.projection, self.generator.layers
        return whole, self.generator.mlm


def sample_rows(probabilities: Tensor) -> Tensor:
    """Draw an index from each row of (rows, classes) probabilities.

    The draws are those of `torch.multinomial(probabilities, 1)`, which computes them in the same
    way but first checks its input, and so makes the host wait for a GPU.
    """
    return (probabilities / torch.empty_like(probabilities).exponential_()).argmax(dim=-1)


def generator_config(config: ModelConfig, share: float) -> ModelConfig:
    """Return the generator's config: the discriminator's depth and head width, but fewer heads."""
    heads = max(1, round(config.num_attention_heads * share))
    width = heads * config.hidden_size // config.num_attention_heads
    return replace(
        config,
        hidden_size=width,
        num_attention_heads=heads,
        intermediate_size=max(1, config.intermediate_size * width // config.hidden_size),
        embedding_size=config.embedding_width,
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
