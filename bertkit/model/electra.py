"""Replaced-token detection (ELECTRA, Clark et al. 2020): a small generator, a discriminator.

The generator fills in masked pieces, and draws them from its probabilities; the discriminator, the
model that is kept, says of every token whether it is the original. The two share their embeddings
(section 3.2 of that paper). No gradient goes through the drawing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from bertkit.model.encoder import (
    Encoder,
    Layer,
    ModelConfig,
    activation,
    initialize,
    layer_sequence,
    run_layers,
)
from bertkit.model.heads import LanguageHead
from bertkit.pretraining_data.batch import Packed
from bertkit.shapes import Hidden, TargetIndices, VocabularyLogits


class ReplacedTokenOutput(NamedTuple):
    """What the two losses are computed from."""

    mlm_logits: VocabularyLogits
    """Of the generator, at the targets."""
    replaced_logits: Tensor
    """(tokens,) of the discriminator: above 0 where it takes a token for a replaced one."""
    replaced: Tensor
    """(tokens,) 1.0 where the token is not the original; a lucky draw is an original."""


class Generator(nn.Module):
    """A narrow encoder on the discriminator's embeddings, with a masked-language head.

    Args:
        config: of the discriminator.
        share: of its width and its heads.
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
        """Logits (targets, vocabulary), from embeddings (tokens, embedding width)."""
        stack = layer_sequence(self.layers, self.config)
        return self.mlm(run_layers(stack, self.projection(embeddings), packed, targets), words)


class ReplacedTokenHead(nn.Module):
    """Hidden states → one logit a token: a layer with GELU, then a linear one."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.output = nn.Linear(config.hidden_size, 1)
        initialize(self, config)

    def forward(self, hidden: Hidden) -> Tensor:
        """(tokens, width) to (tokens,)."""
        return self.output(activation(self.dense(hidden), self.config)).squeeze(-1)


class ReplacedTokenModel(nn.Module):
    """Generator and discriminator in training.

    Args:
        config: of the discriminator.
        share: width of the generator as a share of the discriminator's.
    """

    def __init__(self, config: ModelConfig, share: float) -> None:
        super().__init__()
        self.config = config
        self.encoder = Encoder(config)
        self.encoder.pooler.requires_grad_(False)  # no loss is on it
        self.rtd = ReplacedTokenHead(config)
        self.generator = Generator(config, share)

    def forward(
        self, packed: Packed, target_positions: TargetIndices, target_ids: TargetIndices
    ) -> ReplacedTokenOutput:
        """Fill the masks in, and judge the result.

        Draws from torch's generator: the training loop seeds it at every step.

        Args:
            packed: masked at the targets.
            target_positions: (targets,) indices into the tokens of the batch.
            target_ids: (targets,) the true ids there.
        """
        encoder = self.encoder
        logits = self.generator(
            encoder.embeddings(packed), packed, target_positions, encoder.word_embeddings
        )
        with torch.no_grad():
            drawn = torch.multinomial(logits.float().softmax(-1), 1).squeeze(1)
        ids = packed.ids.index_copy(0, target_positions, drawn)
        replaced = torch.zeros(len(ids), device=ids.device)
        replaced[target_positions] = (drawn != target_ids).float()
        hidden = encoder(replace(packed, ids=ids))
        return ReplacedTokenOutput(logits, self.rtd(hidden), replaced)

    def whole_generator(self) -> tuple[Encoder, LanguageHead]:
        """The generator as a model of its own, on the same weights, and its head."""
        whole, shared = Encoder(self.generator.config), self.encoder
        whole.word_embeddings = shared.word_embeddings
        whole.position_embeddings = shared.position_embeddings
        whole.segment_embeddings = shared.segment_embeddings
        whole.embedding_norm = shared.embedding_norm
        whole.projection, whole.layers = self.generator.projection, self.generator.layers
        return whole, self.generator.mlm


def generator_config(config: ModelConfig, share: float) -> ModelConfig:
    """The generator's sizes: as deep as the discriminator, heads of the same width."""
    heads = max(1, round(config.num_attention_heads * share))
    width = heads * config.hidden_size // config.num_attention_heads
    return replace(
        config,
        hidden_size=width,
        num_attention_heads=heads,
        intermediate_size=max(1, config.intermediate_size * width // config.hidden_size),
        embedding_size=config.embedding_width,
    )
