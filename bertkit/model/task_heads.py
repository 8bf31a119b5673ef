"""What a task adds to the encoder (paper section 4): one linear layer.

Where the recipe of the paper's section 5.1 asks for it, a BiLSTM that is new, too, stands between
encoder and linear layer; see `add_bilstm`.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from bertkit.checkpoints.huggingface import load_model
from bertkit.checkpoints.weights import read_tensors
from bertkit.model.bilstm import BiLSTM
from bertkit.model.cpu import Dropout
from bertkit.model.encoder import Encoder, ModelConfig, initialize
from bertkit.model.features import HEAD_FILE, bilstm_units, in_fp32, take_head
from bertkit.pretraining_data.batch import Packed
from bertkit.shapes import ClassLogits


class ClassificationModel(nn.Module):
    """Encoder, dropout on the pooled [CLS], and one linear layer (paper section 4.1).

    An ELECTRA's [CLS] gets dropout before it is pooled, too, as in transformers' class for it. With
    a BiLSTM, the last states of its two directions are what is pooled.
    """

    def __init__(self, config: ModelConfig, classes: int) -> None:
        super().__init__()
        self.config = config
        self.encoder = Encoder(config)
        self.bilstm: BiLSTM | None = None
        self.dropout = Dropout(config.hidden_dropout_prob)
        self.classifier = nn.Linear(config.hidden_size, classes)
        initialize(self.classifier, config)

    def forward(self, packed: Packed) -> ClassLogits:
        """Logits (sequences, classes)."""
        if self.bilstm is None:
            summaries = self.encoder.summary_tokens(packed)
            summary = self.encoder(packed, summaries)
            electra = self.config.pooler_act == "gelu"
            pooled = self.encoder.pool(self.dropout(summary) if electra else summary)
        else:
            forward, backward = self.bilstm(self.encoder(packed), packed).chunk(2, dim=-1)
            ends = forward[packed.last_tokens], backward[packed.first_tokens]
            pooled = torch.cat(ends, dim=-1)
        return in_fp32(self.classifier, self.dropout(pooled))


class TokenClassificationModel(nn.Module):
    """Encoder, dropout and one linear layer on every token (paper section 5.3)."""

    def __init__(self, config: ModelConfig, classes: int) -> None:
        super().__init__()
        self.config = config
        self.encoder = Encoder(config)
        self.bilstm: BiLSTM | None = None
        self.dropout = Dropout(config.hidden_dropout_prob)
        self.classifier = nn.Linear(config.hidden_size, classes)
        initialize(self.classifier, config)

    def forward(self, packed: Packed) -> ClassLogits:
        """Logits (tokens, classes)."""
        hidden = self.encoder(packed)
        if self.bilstm is not None:
            hidden = self.bilstm(hidden, packed)
        return in_fp32(self.classifier, self.dropout(hidden))


class SpanModel(nn.Module):
    """Encoder and a start and an end vector (paper section 4.2); no dropout on top.

    [CLS] stands for no answer, and in a network that reads left to right it has seen nothing: the
    logits of the last token, [SEP], then stand in the place of [CLS], and the other way round. A
    BiLSTM has seen all at [CLS], too.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = Encoder(config)
        self.bilstm: BiLSTM | None = None
        self.qa_outputs = nn.Linear(config.hidden_size, 2)
        initialize(self.qa_outputs, config)

    def forward(self, packed: Packed) -> ClassLogits:
        """Logits (tokens, 2) of being the answer's first and last token."""
        hidden = self.encoder(packed)
        if self.bilstm is not None:
            hidden = self.bilstm(hidden, packed)
        logits = in_fp32(self.qa_outputs, hidden)
        if self.config.direction != "left_to_right" or self.bilstm is not None:
            return logits
        order = torch.arange(len(logits), device=logits.device)
        order[packed.first_tokens] = packed.last_tokens.to(order.dtype)
        order[packed.last_tokens] = packed.first_tokens.to(order.dtype)
        return logits[order]


TaskModel = ClassificationModel | TokenClassificationModel | SpanModel


def add_bilstm(model: TaskModel, units: int = 0) -> TaskModel:
    """Put a BiLSTM between encoder and linear layer, both drawn from torch's generator.

    The paper does not give its size; here it has two layers.

    Args:
        model: is changed and given back.
        units: of each direction; 0 for as many as the encoder is wide.
    """
    config = model.config
    units = units or config.hidden_size
    model.bilstm = BiLSTM(config.hidden_size, units, config.hidden_dropout_prob)
    name = "qa_outputs" if isinstance(model, SpanModel) else "classifier"
    wide = nn.Linear(2 * units, getattr(model, name).out_features)
    initialize(wide, config)
    setattr(model, name, wide)
    return model


def load_bilstm_model(directory: Path, model: TaskModel) -> TaskModel:
    """A tuned model with a BiLSTM, as `features.save_with_head` wrote it.

    Args:
        directory: of the model.
        model: of the same sizes; its weights are replaced.

    Raises:
        BertkitError: a file is missing or damaged, or head and encoder do not belong together.
    """
    tensors = read_tensors(directory / HEAD_FILE)
    with torch.device("meta"):  # the file decides how large it is, and brings the weights
        model = add_bilstm(model, bilstm_units(tensors))
    model.encoder = load_model(directory, Encoder).model  # nothing here reads its pooler
    take_head(model, tensors, "a BiLSTM", directory)
    return model.eval()
