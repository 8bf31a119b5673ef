"""What a task adds to the encoder (paper section 4): one linear layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bertkit.examples.packed import Packed
from bertkit.model.dropout import Dropout
from bertkit.model.encoder import Encoder, ModelConfig, initialize
from bertkit.shapes import ClassLogits


def in_fp32(layer: nn.Linear, hidden: Tensor) -> Tensor:
    """The last layer without autocast: in bf16 different inputs would get equal scores."""
    with torch.autocast(hidden.device.type, enabled=False):
        return layer(hidden.float())


class ClassificationModel(nn.Module):
    """Encoder, dropout on the pooled [CLS], and one linear layer (paper section 4.1)."""

    def __init__(self, config: ModelConfig, classes: int) -> None:
        super().__init__()
        self.config = config
        self.encoder = Encoder(config)
        self.dropout = Dropout(config.hidden_dropout_prob)
        self.classifier = nn.Linear(config.hidden_size, classes)
        initialize(self.classifier, config)

    def forward(self, packed: Packed) -> ClassLogits:
        """Logits (sequences, classes)."""
        pooled = self.encoder.pool(self.encoder(packed, packed.first_tokens))
        return in_fp32(self.classifier, self.dropout(pooled))


class TokenClassificationModel(nn.Module):
    """Encoder, dropout and one linear layer on every token (paper section 5.3)."""

    def __init__(self, config: ModelConfig, classes: int) -> None:
        super().__init__()
        self.config = config
        self.encoder = Encoder(config)
        self.dropout = Dropout(config.hidden_dropout_prob)
        self.classifier = nn.Linear(config.hidden_size, classes)
        initialize(self.classifier, config)

    def forward(self, packed: Packed) -> ClassLogits:
        """Logits (tokens, classes)."""
        return in_fp32(self.classifier, self.dropout(self.encoder(packed)))


class SpanModel(nn.Module):
    """Encoder and a start and an end vector (paper section 4.2); no dropout on top."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = Encoder(config)
        self.qa_outputs = nn.Linear(config.hidden_size, 2)
        initialize(self.qa_outputs, config)

    def forward(self, packed: Packed) -> ClassLogits:
        """Logits (tokens, 2) of being the answer's first and last token."""
        return in_fp32(self.qa_outputs, self.encoder(packed))


TaskModel = ClassificationModel | TokenClassificationModel | SpanModel
