"""Models for fine-tuning (paper section 4): the encoder with one new linear layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from bertkit.model.encoder import Encoder, ModelConfig, initialize
from bertkit.model.native import Dropout
from bertkit.pretraining_data.batch import Packed
from bertkit.shapes import ClassLogits


def in_fp32(layer: nn.Linear, hidden: Tensor) -> Tensor:
    """Apply a layer in fp32, outside autocast: in bf16 different inputs would get equal scores."""
    with torch.autocast(hidden.device.type, enabled=False):
        return layer(hidden.float())


class LinearModel(nn.Module):
    """An encoder, dropout and one linear layer, with `classes` outputs."""

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

    def forward(self, packed: Packed) -> ClassLogits:
        """Return (tokens, classes) logits."""
        return in_fp32(self.classifier, self.dropout(self.encoder(packed)))


class SpanModel(nn.Module):
    """An encoder with a start and an end vector (paper section 4.2); no dropout on top.

    [CLS] represents "no answer", but in a left-to-right encoder it attends to no other token.
    The logits of [CLS] and of the last token, [SEP], are then swapped.
    """

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


TaskModel = ClassificationModel | TokenClassificationModel | SpanModel
