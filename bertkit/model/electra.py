"""Replaced-token detection (ELECTRA, Clark et al. 2020): a small generator and a discriminator.

The generator replaces masked tokens by samples from its distribution; the discriminator, which is
the model to keep, predicts for every token whether it is the original. They share their embeddings
(section 3.2 of that paper). No gradient flows through the sampling.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from bertkit.checkpoints.save import save_model
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
from bertkit.model.heads import LanguageHead, PretrainingModel
from bertkit.pretraining_data.batch import Packed
from bertkit.shapes import Hidden, TargetIndices, VocabularyLogits

if TYPE_CHECKING:
    from bertkit.checkpoints.card import Card
    from bertkit.tokenizer.wordpiece import Tokenizer


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


def save_generator(
    directory: Path,
    model: ReplacedTokenModel,
    tokenizer: Tokenizer,
    details: Mapping[str, Any],
    card: Card | None = None,
) -> None:
    """Write the generator as a separate masked language model; see `save_model`."""
    with torch.device("meta"):
        generator = PretrainingModel(model.generator.config, pairs=False)
    generator.encoder, generator.mlm = model.whole_generator()
    save_model(directory, generator, tokenizer, details, card=card)


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
