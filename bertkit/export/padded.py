"""The network in the form that other libraries run: padded ids with a mask, for every head.

bertkit itself computes on packed sequences. Here, inputs have the names, order and meaning of
Hugging Face's models, and padding is at the end of a sequence. The layers are those of
`bertkit.model.encoder` with the same weights. Only attention is written differently, as three
operations that every exporter supports.

| head                       | outputs, and their shapes                                          |
|----------------------------|--------------------------------------------------------------------|
| classification, regression | logits (batch, classes); multi-label-classification, too           |
| multiple-choice            | logits (batch, choices); the inputs are (batch, choices, length)   |
| token-classification       | logits (batch, length, classes)                                    |
| question-answering         | start_logits, end_logits (batch, length)                           |
| pretraining                | prediction_logits (batch, length, vocabulary) and                  |
|                            | seq_relationship_logits (batch, 2)                                 |
| words                      | logits (batch, length, vocabulary) of a masked language model      |
| encoder                    | last_hidden_state (batch, length, width) and, where the model has  |
|                            | it, pooler_output (batch, width)                                   |
| embedding                  | sentence_embedding (batch, width)                                  |
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bertkit.checkpoints.pretrained import (
    PretrainedWeights,
    model_folder,
    read_pretrained,
    require_all_weights,
    resolve_model,
    tuned_tensors,
)
from bertkit.checkpoints.save import shown_names
from bertkit.checkpoints.sentence_transformers import TextPooling, is_embedder
from bertkit.errors import BertkitError, check_known
from bertkit.model.encoder import Encoder, Layer, ModelConfig, activation
from bertkit.model.heads import PretrainingModel
from bertkit.model.outputs import SUMMARIES, token_weights
from bertkit.predict.embeddings import read_embedder
from bertkit.tasks.task import Task
from bertkit.tasks.types import is_tuned, load_task_model
from bertkit.tokenizer.wordpiece import Tokenizer

EXPORT_HEADS = ("auto", "encoder", "embedding")
PADDED_INPUTS = ("input_ids", "attention_mask", "token_type_ids")

OF_TEXTS = ("classification", "multi-label-classification", "regression", "multiple-choice")
"""Heads that are one linear layer on the pooled summary."""
TOKEN_HEADS = ("token-classification", "words")
OUTPUTS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys((*OF_TEXTS, *TOKEN_HEADS), ("logits",)),
    "question-answering": ("start_logits", "end_logits"),
    "pretraining": ("prediction_logits", "seq_relationship_logits"),
    "encoder": ("last_hidden_state", "pooler_output"),
    "embedding": ("sentence_embedding",),
}
"""Head → the names of its outputs in transformers (for "embedding", in sentence-transformers)."""
OUTPUTS_LIKE = {
    "sequence": "classification",
    "choice": "multiple-choice",
    "token": "token-classification",
    "span": "question-answering",
}
"""Head of a task type that `OUTPUTS` does not know -> the head with such outputs."""
TOKEN_OUTPUTS = ("start_logits", "end_logits", "prediction_logits", "last_hidden_state")


def is_token_output(head: str, output: str) -> bool:
    """Return whether an output has a row for each token, not one for each sequence."""
    return output in TOKEN_OUTPUTS or head in TOKEN_HEADS


class PaddedModel(nn.Module):
    """A bertkit model (in evaluation mode, fp32, on the CPU) with the inputs and outputs above."""

    def __init__(
        self,
        model: nn.Module,
        head: str,
        outputs: tuple[str, ...],
        pooling: TextPooling | None = None,
    ) -> None:
        super().__init__()
        self.model, self.head, self.pooling = model, head, pooling
        self.after = nn.Sequential(*(pooling.modules if pooling else ()))
        encoder = model if isinstance(model, Encoder) else model.encoder
        assert isinstance(encoder, Encoder)
        self.config, self.encoder = encoder.config, encoder
        self.outputs = outputs

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor
    ) -> tuple[Tensor, ...]:
        """Return the outputs in the order of `outputs`.

        The inputs are int64 (batch, length), or (batch, choices, length) for multiple choice: ids,
        a mask with 1 for tokens and 0 for padding after them, and segments 0 or 1.
        """
        if self.head == "multiple-choice":
            shape = input_ids.shape[:2]
            rows = (input_ids, attention_mask, token_type_ids)
            hidden = self.hidden(*(tensor.flatten(0, 1) for tensor in rows))
            [scores] = self.read(hidden, attention_mask.flatten(0, 1))
            return (scores.view(shape),)
        return self.read(self.hidden(input_ids, attention_mask, token_type_ids), attention_mask)

    def hidden(self, ids: Tensor, mask: Tensor, segments: Tensor) -> Tensor:
        """Return the (batch, length, width) hidden states after the last layer."""
        encoder = self.encoder
        positions = encoder.position_embeddings.weight[: ids.shape[1]]
        embedded = encoder.word_embeddings(ids) + encoder.segment_embeddings(segments) + positions
        hidden = encoder.embedding_norm(embedded)
        if encoder.projection is not None:
            hidden = encoder.projection(hidden)
        attention_bias = padding_bias(mask)
        for layer in encoder.stack:
            assert isinstance(layer, Layer)
            hidden = padded_layer(layer, hidden, attention_bias)
        return hidden

    def read(self, hidden: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        """Return the head's outputs for the hidden states."""
        model: Any = self.model
        if self.head == "embedding":
            return (self.embedding(hidden, mask),)
        if self.head == "token-classification":
            return (model.classifier(hidden),)
        if self.head == "question-answering":
            return model.qa_outputs(hidden).unbind(-1)
        pooled = self.encoder.pool(hidden[:, 0])
        if self.head == "encoder":
            return (hidden, pooled)[: len(self.outputs)]
        if self.head in OF_TEXTS:
            return (model.classifier(pooled),)
        logits = model.mlm(hidden.flatten(0, 1), self.encoder.word_embeddings)
        logits = logits.view(*mask.shape, -1)
        return (logits,) if self.head == "words" else (logits, model.nsp(pooled))

    def embedding(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """Return (batch, width) vectors: pooled, after the modules, and normalised if asked."""
        assert self.pooling is not None
        parts = []
        real = mask.to(hidden.dtype)
        positions, tokens = torch.arange(mask.shape[1]), real.sum(1, keepdim=True).clamp(min=1.0)
        for mode in self.pooling.pooling.split("+"):
            if mode in SUMMARIES:
                parts.append(self.encoder.pool(hidden[:, 0]) if mode == "pooler" else hidden[:, 0])
            elif mode == "max":
                parts.append(hidden.masked_fill(mask[:, :, None] == 0, -math.inf).amax(1))
            else:
                weights = token_weights(mode, real, positions, tokens, self.config.direction)
                parts.append((hidden * weights[:, :, None]).sum(1))
        vectors = self.after(torch.cat(parts, dim=-1))
        if self.pooling.normalize:
            vectors = vectors / vectors.norm(dim=1, keepdim=True).clamp(min=1e-12)
        return vectors


def padding_bias(mask: Tensor) -> Tensor:
    """Return the (batch, 1, 1, length) bias on attention scores: 0 for tokens, else very negative.

    It is finite, so that a row of padding alone gets arbitrary numbers instead of NaN.
    """
    return (1.0 - mask.to(torch.float32))[:, None, None, :] * (torch.finfo(torch.float32).min / 4)


def padded_layer(layer: Layer, hidden: Tensor, attention_bias: Tensor) -> Tensor:
    """Apply one layer to (batch, length, width) states; see `bertkit.model.encoder.Layer`."""
    batch, length, width = hidden.shape
    heads = layer.config.num_attention_heads
    projected = layer.query_key_value(hidden).view(batch, length, 3, heads, width // heads)
    query, key, value = projected.permute(2, 0, 3, 1, 4).unbind(0)
    scores = query @ key.transpose(-1, -2) / math.sqrt(width // heads) + attention_bias
    attended = (scores.softmax(-1) @ value).transpose(1, 2).reshape(batch, length, width)
    hidden = layer.attention_norm(layer.attention_output(attended) + hidden)
    expanded = activation(layer.intermediate(hidden), layer.config)
    return layer.output_norm(layer.output(expanded) + hidden)


@dataclass(frozen=True)
class ExportSource:
    """A model to export, on the CPU, in fp32 and in evaluation mode, with its head and settings."""

    path: Path
    head: str
    """A key of `OUTPUTS`."""
    model: Any
    tokenizer: Tokenizer
    details: Mapping[str, Any]
    """The content of `bertkit.json`; for other libraries' models, derived from their config."""
    task: Task | None = None
    """The task of a fine-tuned model."""
    pooling: TextPooling | None = None
    """The settings of the head "embedding"."""
    pooler: bool = True
    """For the heads "encoder" and "embedding": whether the files have weights for the pooler."""

    @property
    def encoder(self) -> Encoder:
        return self.model if isinstance(self.model, Encoder) else self.model.encoder

    @property
    def config(self) -> ModelConfig:
        return self.encoder.config

    @property
    def max_length(self) -> int:
        """The maximum number of tokens in a sequence."""
        positions = self.config.max_position_embeddings
        wanted = self.pooling.max_length if self.pooling else getattr(self.task, "max_length", 0)
        return min(wanted or positions, positions)

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of the outputs."""
        names = OUTPUTS[self.head]
        return names[:1] if self.head == "encoder" and not self.pooler else names

    def padded(self) -> PaddedModel:
        """Return the model with padded inputs and the outputs of other libraries."""
        padded = PaddedModel(self.model, self.head, self.outputs, self.pooling)
        return padded.eval().requires_grad_(False)


def read_export_source(
    model: Path | str, *, head: str = "auto", pooling: str = "auto", normalize: bool | None = None
) -> ExportSource:
    """Read a model directory, a run, a directory of sentence-transformers or a Google checkpoint.

    The head is "auto" for that which the model was trained with; "encoder" is possible for any
    model, and "embedding" for any model directory: see `load_embedder` about its settings.
    """
    check_known("head", head, EXPORT_HEADS)
    source = find_source(resolve_model(model), head, pooling, normalize)
    if source.config.direction != "bidirectional":
        raise BertkitError(f"{source.path} reads from left to right; export a bidirectional model")
    return source


def find_source(path: Path, head: str, pooling: str, normalize: bool | None) -> ExportSource:
    """Read the model with the head that is asked for; see `read_export_source`."""
    if head == "embedding" or (head == "auto" and is_embedder(path)):
        bare, tokenizer, settings = read_embedder(path, pooling=pooling, normalize=normalize)
        details, pooler = {"task": "embedding"}, not bare.missing_keys
        return ExportSource(
            path, "embedding", bare.model, tokenizer, details, None, settings, pooler
        )
    if pooling != "auto" or normalize is not None:
        raise BertkitError("--pooling and --normalize require --head embedding; add it")
    if head == "auto" and is_tuned(model_folder(path)):
        loaded = load_task_model(path, torch.device("cpu"))
        kind = loaded.task.task_type
        kind = kind if kind in OUTPUTS else OUTPUTS_LIKE[loaded.task.head]
        network = loaded.model.float()
        return ExportSource(path, kind, network, loaded.tokenizer, loaded.details, loaded.task)
    start = read_pretrained(path)
    if head != "auto":
        return encoder_source(start)
    if tuned := tuned_tensors(start.tensors):
        raise BertkitError(
            f"{path} holds the head of a fine-tuned model ({shown_names(tuned)}), but no file "
            "names its task and labels; export only the encoder: --head encoder"
        )
    return pretrained_source(start)


def encoder_source(start: PretrainedWeights) -> ExportSource:
    """Return the encoder alone; if the pooler's weights are missing, it is not an output."""
    loaded = start.build(Encoder, keep_head=False, copy=False)
    pooler, details = not loaded.missing_keys, {"task": "features"}
    source = start.path, "encoder", loaded.model, start.tokenizer, details
    return ExportSource(*source, pooler=pooler)


def pretrained_source(start: PretrainedWeights) -> ExportSource:
    """Return a pre-trained model with its heads for language, or else the encoder alone."""
    if "mlm.bias" not in start.tensors:
        return encoder_source(start)
    pairs = "nsp.dense.weight" in start.tensors
    loaded = start.build(partial(PretrainingModel, pairs=pairs), keep_head=True, copy=False)
    model = require_all_weights(loaded, start.path, pooler=pairs)  # only the head on pairs reads it
    head = "pretraining" if pairs else "words"
    return ExportSource(start.path, head, model, start.tokenizer, start.details, pooler=False)
