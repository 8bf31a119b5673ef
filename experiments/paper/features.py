"""The networks that only the paper's study needs: a BiLSTM on an encoder, fine-tuned or frozen.

Section 5.1 puts a BiLSTM on a left-to-right network. Section 5.3 freezes the encoder and reads its
layers with a BiLSTM of two layers with 768 units in each direction.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence

from bertkit.model.encoder import ModelConfig
from bertkit.model.outputs import ClassificationModel, SpanModel, TokenClassificationModel
from bertkit.pretraining_data.batch import Packed

LAYERS = (
    "embeddings",
    "second-to-last",
    "last",
    "weighted-sum",
    "weighted-sum-last-four",
    "concat-last-four",
)


class BiLSTM(nn.Module):
    """A two-layer bidirectional LSTM over each sequence of a packed batch."""

    def __init__(self, width: int, units: int, dropout: float) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, units, num_layers=2, bidirectional=True, dropout=dropout)

    def forward(self, hidden: Tensor, packed: Packed) -> Tensor:
        """Map (tokens, width) to (tokens, 2 * units), the forward direction first."""
        with torch.autocast(hidden.device.type, enabled=False):
            rows = torch.split(hidden.float(), list(packed.lengths))
            outputs, _ = self.lstm(pack_sequence(rows, enforce_sorted=False))
            padded, lengths = pad_packed_sequence(outputs, batch_first=True)
        return torch.cat([row[:n] for row, n in zip(padded, lengths.tolist(), strict=True)])


def widened(layer: nn.Linear, config: ModelConfig) -> nn.Linear:
    """Return a new linear layer on the outputs of a BiLSTM as wide as the encoder."""
    wide = nn.Linear(2 * config.hidden_size, layer.out_features)
    nn.init.normal_(wide.weight, std=config.initializer_range)
    nn.init.zeros_(wide.bias)
    return wide


class BiLSTMClassifier(ClassificationModel):
    """A classifier that reads the final states of a BiLSTM's two directions."""

    def __init__(self, config: ModelConfig, classes: int) -> None:
        super().__init__(config, classes)
        self.bilstm = BiLSTM(config.hidden_size, config.hidden_size, config.hidden_dropout_prob)
        self.classifier = widened(self.classifier, config)

    def forward(self, packed: Packed) -> Tensor:
        """Return (sequences, classes) logits."""
        states = self.bilstm(self.encoder(packed), packed)
        forward, backward = states.chunk(2, dim=-1)
        ends = torch.cat([forward[packed.last_tokens], backward[packed.first_tokens]], dim=-1)
        logits: Tensor = self.classifier(self.dropout(ends))
        return logits


class BiLSTMSpans(SpanModel):
    """A model that answers with spans, with a BiLSTM below the start and the end vector."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.bilstm = BiLSTM(config.hidden_size, config.hidden_size, config.hidden_dropout_prob)
        self.qa_outputs = widened(self.qa_outputs, config)

    def forward(self, packed: Packed) -> Tensor:
        """Return (tokens, 2) logits: whether a token is the answer's first, and its last, token."""
        logits: Tensor = self.qa_outputs(self.bilstm(self.encoder(packed), packed))
        return logits


class FeatureTagger(TokenClassificationModel):
    """A frozen encoder, chosen layers of which a BiLSTM and a linear layer read.

    The encoder stays in evaluation mode, without dropout, even in training.
    """

    def __init__(self, config: ModelConfig, classes: int, layers: str, units: int) -> None:
        super().__init__(config, classes)
        self.encoder.requires_grad_(False)
        self.layers = layers
        count = 4 if layers.endswith("last-four") else config.num_hidden_layers
        self.mix = nn.Parameter(torch.zeros(count)) if layers.startswith("weighted") else None
        self.scale = nn.Parameter(torch.ones(1)) if layers.startswith("weighted") else None
        width = config.hidden_size * (4 if layers.startswith("concat") else 1)
        self.bilstm = BiLSTM(width, units, config.hidden_dropout_prob)
        self.classifier = nn.Linear(2 * units, classes)
        nn.init.normal_(self.classifier.weight, std=config.initializer_range)
        nn.init.zeros_(self.classifier.bias)

    def train(self, mode: bool = True) -> FeatureTagger:
        """Set the training mode of everything but the encoder."""
        super().train(mode)
        self.encoder.eval()
        return self

    def features(self, packed: Packed) -> Tensor:
        """Return the chosen layers, (tokens, width); weighted sums are those of ELMo."""
        with torch.no_grad():
            states = [state.float() for state in self.encoder.layers_of(packed)]
        if self.layers == "embeddings":
            return states[0]
        if self.layers in ("last", "second-to-last"):
            return states[-1 if self.layers == "last" else -2]
        chosen = states[-4:] if self.layers.endswith("last-four") else states[1:]
        if self.mix is None or self.scale is None:
            return torch.cat(chosen, dim=-1)
        return self.scale * torch.einsum("l,ltw->tw", self.mix.softmax(0), torch.stack(chosen))

    def forward(self, packed: Packed) -> Tensor:
        """Return (tokens, classes) logits."""
        logits: Tensor = self.classifier(self.dropout(self.bilstm(self.features(packed), packed)))
        return logits


def build_with_head(task: Any, head: str, units: int, config: ModelConfig) -> nn.Module:
    """Return a new network for a task with one of the study's heads (see `Run.head`)."""
    plain = task.build(config)
    if head in LAYERS:
        return FeatureTagger(config, plain.classifier.out_features, head, units)
    if isinstance(plain, SpanModel):
        return BiLSTMSpans(config)
    return BiLSTMClassifier(config, plain.classifier.out_features)
