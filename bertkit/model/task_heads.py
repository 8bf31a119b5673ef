"""Models for fine-tuning (paper section 4): the encoder with one new linear layer.

For the ablation in the paper's section 5.1, a new BiLSTM can be inserted between the encoder and
the linear layer; see `add_bilstm`. The end of an answer can be scored given its start; see
`add_conditional_end`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bertkit.checkpoints.pretrained import load_model
from bertkit.checkpoints.weights import read_tensors
from bertkit.model.bilstm import BiLSTM
from bertkit.model.encoder import Dropout, Encoder, ModelConfig, initialize
from bertkit.model.features import HEAD_FILE, bilstm_units, in_fp32, take_head
from bertkit.pretraining_data.batch import Packed
from bertkit.shapes import ClassLogits

PAIR_WIDTH = 64
"""The width of the query and the key of a token in `add_conditional_end`."""


class LinearModel(nn.Module):
    """An encoder, dropout and one linear layer, with `classes` outputs."""

    def __init__(self, config: ModelConfig, classes: int) -> None:
        super().__init__()
        self.config = config
        self.encoder = Encoder(config)
        self.bilstm: BiLSTM | None = None
        self.dropout = Dropout(config.hidden_dropout_prob)
        self.classifier = nn.Linear(config.hidden_size, classes)
        initialize(self.classifier, config)


class ClassificationModel(LinearModel):
    """An encoder, dropout on the pooled [CLS], and one linear layer (paper section 4.1).

    In an ELECTRA model [CLS] also gets dropout before it is pooled, as in transformers. With a
    BiLSTM, the final states of its two directions replace the pooled [CLS].
    """

    def forward(self, packed: Packed) -> ClassLogits:
        """Return (sequences, classes) logits."""
        if self.bilstm is None:
            summaries = self.encoder.summary_tokens(packed)
            summary = self.encoder(packed, summaries)
            electra = self.config.pooler_act == "gelu"
            pooled = self.encoder.pool(self.dropout(summary) if electra else summary)
        else:
            hidden = self.encoder(packed)
            forward, backward = self.bilstm(hidden, packed).chunk(2, dim=-1)
            ends = forward[packed.last_tokens], backward[packed.first_tokens]
            pooled = torch.cat(ends, dim=-1)
        return in_fp32(self.classifier, self.dropout(pooled))


class TokenClassificationModel(LinearModel):
    """An encoder with dropout and one linear layer on every token (paper section 5.3)."""

    def forward(self, packed: Packed) -> ClassLogits:
        """Return (tokens, classes) logits."""
        hidden = self.encoder(packed)
        if self.bilstm is not None:
            hidden = self.bilstm(hidden, packed)
        return in_fp32(self.classifier, self.dropout(hidden))


class SpanModel(nn.Module):
    """An encoder with a start and an end vector (paper section 4.2); no dropout on top.

    [CLS] represents "no answer", but in a left-to-right encoder it attends to no other token.
    The logits of [CLS] and of the last token, [SEP], are then swapped. With a BiLSTM this is not
    necessary, because its output at [CLS] depends on the whole sequence.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = Encoder(config)
        self.bilstm: BiLSTM | None = None
        self.pair_outputs: nn.Linear | None = None
        self.qa_outputs = nn.Linear(config.hidden_size, 2)
        initialize(self.qa_outputs, config)

    def forward(self, packed: Packed) -> ClassLogits:
        """Return (tokens, 2) logits: whether a token is the answer's first, and its last, token.

        After `add_conditional_end` the token's query and key follow: (tokens, 2 + 2 * PAIR_WIDTH).
        """
        hidden = self.encoder(packed)
        if self.bilstm is not None:
            hidden = self.bilstm(hidden, packed)
        logits = in_fp32(self.qa_outputs, hidden)
        if self.pair_outputs is not None:
            logits = torch.cat([logits, in_fp32(self.pair_outputs, hidden)], dim=-1)
        if self.config.direction != "left_to_right" or self.bilstm is not None:
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


def add_bilstm(model: TaskModel, units: int = 0) -> TaskModel:
    """Insert a BiLSTM before the linear layer; both are initialised by torch's generator.

    The paper does not give its size; here it has two layers, and in each direction as many units as
    the encoder is wide unless `units` says otherwise. The model is changed in place and returned.
    """
    config = model.config
    units = units or config.hidden_size
    model.bilstm = BiLSTM(config.hidden_size, units, config.hidden_dropout_prob)
    name = "qa_outputs" if isinstance(model, SpanModel) else "classifier"
    wide = nn.Linear(2 * units, getattr(model, name).out_features)
    initialize(wide, config)
    setattr(model, name, wide)
    return model


def add_conditional_end(model: TaskModel) -> SpanModel:
    """Let the score of an answer's end depend on its start, as the paper's does not.

    A new linear layer gives each token a query and a key. The score of token j as the end of an
    answer that starts at token i is its end logit plus `query_i . key_j / sqrt(PAIR_WIDTH)`; this
    is the biaffine scorer of Dozat and Manning (2017). The model is changed in place and returned.
    """
    assert isinstance(model, SpanModel)
    model.pair_outputs = nn.Linear(model.config.hidden_size, 2 * PAIR_WIDTH)
    initialize(model.pair_outputs, model.config)
    return model


def extra_head(model: nn.Module) -> str:
    """Return the name of a fine-tuned model's head that other libraries do not have, or ""."""
    if getattr(model, "pair_outputs", None) is not None:
        return "conditional"
    return "bilstm" if getattr(model, "bilstm", None) is not None else ""


def load_with_head(directory: Path, model: TaskModel, head: str) -> TaskModel:
    """Load a fine-tuned model with an `extra_head`, which `features.save_with_head` wrote.

    The weights of `model`, which has the same sizes, are replaced.

    Raises:
        BertkitError: a file is missing or damaged, or the head does not fit the encoder.
    """
    tensors = read_tensors(directory / HEAD_FILE)
    with torch.device("meta"):  # size and weights come from the file
        if head == "conditional" and isinstance(model, SpanModel):
            model = add_conditional_end(model)
        else:
            model = add_bilstm(model, bilstm_units(tensors))
    model.encoder = load_model(directory, Encoder, trainable=False).model  # its pooler is unused
    take_head(model, tensors, f"'{head}'", directory)
    return model.eval()
