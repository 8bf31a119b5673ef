"""Read the model to export, of any type that bertkit reads, with its own head or a chosen one.

The task types of fine-tuned models are those of paper section 4; a pre-trained model has the heads
of section 3.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bertkit.checkpoints.pretrained import (
    PretrainedWeights,
    model_folder,
    read_pretrained,
    require_all_weights,
    resolve_model,
    tuned_tensors,
)
from bertkit.checkpoints.sentence_transformers import TextPooling, is_embedder
from bertkit.checkpoints.weights import shown_names
from bertkit.errors import BertkitError, check_known
from bertkit.export.padded import OUTPUTS, Discriminator, PaddedModel
from bertkit.model.encoder import Encoder, ModelConfig
from bertkit.model.heads import PretrainingModel
from bertkit.predict.embeddings import read_embedder
from bertkit.predict.load import is_tuned
from bertkit.tasks.saved import load_task_model
from bertkit.tasks.task import Task
from bertkit.tokenizer.wordpiece import Tokenizer

EXPORT_HEADS = ("auto", "encoder", "embedding")
CPU = torch.device("cpu")


@dataclass(frozen=True)
class ExportSource:
    """A model to export, on the CPU, in fp32 and in evaluation mode, with its head and settings."""

    path: Path
    head: str
    """A key of `bertkit.export.padded.OUTPUTS`."""
    model: Any
    tokenizer: Tokenizer
    details: Mapping[str, Any]
    """The content of `bertkit.json`; for other libraries' models, derived from their config."""
    task: Task | None = None
    """The task of a fine-tuned model; else None."""
    pooling: TextPooling | None = None
    """The pooling settings of the head "embedding"; else None."""
    pooler: bool = True
    """For the heads "encoder" and "embedding": whether the files have weights for the pooler."""

    @property
    def encoder(self) -> Encoder:
        """The model's encoder."""
        found = self.model if isinstance(self.model, Encoder) else self.model.encoder
        assert isinstance(found, Encoder)
        return found

    @property
    def config(self) -> ModelConfig:
        """The encoder's configuration."""
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
        every = OUTPUTS[self.head]
        return every[:1] if self.head == "encoder" and not self.pooler else every

    def padded(self) -> PaddedModel:
        """Return the model with padded inputs and the outputs of other libraries.

        Raises:
            BertkitError: the model has no padded form (see `PaddedModel`).
        """
        padded = PaddedModel(self.model, self.head, self.outputs, self.pooling)
        return padded.eval().requires_grad_(False)


def read_export_source(
    path: Path, *, head: str = "auto", pooling: str = "auto", normalize: bool | None = None
) -> ExportSource:
    """Read a model directory, a run, a directory of sentence-transformers or a Google checkpoint.

    The head is "auto" for that which the model was trained with; "encoder" is possible for any
    model, and "embedding" for any model directory. For the latter see `load_embedder` about
    `pooling` and `normalize`.

    Raises:
        BertkitError: there is no model, the model is damaged, or the head is unknown.
    """
    check_known("head", head, EXPORT_HEADS)
    path = resolve_model(path)
    if head == "embedding" or (head == "auto" and is_embedder(path)):
        bare, tokenizer, settings = read_embedder(path, pooling=pooling, normalize=normalize)
        details, pooler = {"task": "embedding"}, not bare.missing_keys
        return ExportSource(
            path, "embedding", bare.model, tokenizer, details, None, settings, pooler
        )
    if pooling != "auto" or normalize is not None:
        raise BertkitError("--pooling and --normalize require --head embedding; add it")
    if head == "auto" and is_tuned(model_folder(path)):
        loaded = load_task_model(path, CPU)
        kind, model = loaded.task.task_type, loaded.model.float()
        return ExportSource(path, kind, model, loaded.tokenizer, loaded.details, loaded.task)
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
    details = {"task": "features"}
    pooler = not loaded.missing_keys
    return ExportSource(
        start.path, "encoder", loaded.model, start.tokenizer, details, pooler=pooler
    )


def pretrained_source(start: PretrainedWeights) -> ExportSource:
    """Return a pre-trained model with the heads that its weights contain."""
    build: Any
    if "discriminator_predictions.dense.weight" in start.tensors:
        head, build = "replaced", Discriminator
    elif "cls.predictions.bias" in start.tensors:
        pairs = "cls.seq_relationship.weight" in start.tensors
        head = "pretraining" if pairs else "words"
        build = partial(PretrainingModel, pairs=pairs)
    elif "cls.seq_relationship.weight" in start.tensors:
        raise BertkitError(
            f"{start.path} has the next-sentence head without that of masked tokens; no format has "
            "a place for it: give --head encoder to export the model without it"
        )
    else:
        return encoder_source(start)
    loaded = start.build(build, keep_head=True, copy=False)
    pooler = head == "pretraining"  # only the head on pairs reads it
    model: nn.Module = require_all_weights(loaded, start.path, pooler=pooler)
    return ExportSource(start.path, head, model, start.tokenizer, start.details, pooler=False)
