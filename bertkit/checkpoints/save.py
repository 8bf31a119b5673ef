"""Writing of complete model directories, which transformers loads and `pretrained` reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from bertkit.checkpoints.names import (
    BERTKIT,
    OWN_FIELDS,
    Family,
    choose_class,
    file_tensors,
    has_pooler,
)
from bertkit.checkpoints.weights import write_tensors
from bertkit.errors import BertkitError
from bertkit.files import new_folder, write_json
from bertkit.model.encoder import Encoder, ModelConfig, check_vocabulary
from bertkit.model.heads import PretrainingModel, ReplacedTokenModel

if TYPE_CHECKING:
    from bertkit.tokenizer.wordpiece import Tokenizer

SAVED_HEADS = {
    "classification": ("sequence", ""),
    "multi-label-classification": ("sequence", "multi_label_classification"),
    "regression": ("sequence", "regression"),
    "multiple-choice": ("choice", ""),
    "token-classification": ("token", ""),
    "question-answering": ("span", ""),
}
"""Task -> head (a key of `Family.classes`) and transformers' `problem_type`."""


def save_model(
    directory: Path, model: nn.Module, tokenizer: Tokenizer, details: Mapping[str, Any]
) -> None:
    """Write a complete model directory, or, after any error, nothing.

    Args:
        directory: the directory to create; an existing model directory is replaced.
        model: a model with a `config`, unwrapped (not compiled or distributed), on any device.
        tokenizer: the model's tokenizer.
        details: the content of `bertkit.json`; "labels", a list of names, also go to `config.json`.
    """
    config = model.config
    assert isinstance(config, ModelConfig)
    check_vocabulary(config, tokenizer.size)
    check_free(directory)
    with new_folder(directory) as folder:
        family, architecture = saved_class(model, details)
        write_json(folder / "config.json", config_fields(model, details, tokenizer.pad_id))
        pooler = has_pooler(family, architecture)
        tensors = foreign_tensors(model, family, architecture, pooler=pooler)
        write_tensors(folder / "model.safetensors", tensors, format="pt")
        tokenizer.save(folder, config.max_position_embeddings)
        write_json(folder / "bertkit.json", dict(details))


def check_free(directory: Path) -> None:
    """Raise a BertkitError unless a folder is absent, empty or a model directory."""
    signs = ("bertkit.json", "*.safetensors", "*.bin")  # not only models have a config.json
    weights = any(path for sign in signs for path in directory.glob(sign))
    empty = directory.is_dir() and not any(directory.iterdir())
    is_model = weights and (directory / "config.json").is_file()
    if directory.exists() and not (empty or is_model):
        raise BertkitError(f"{directory} exists and is not a model directory; choose another")


def head_of(model: nn.Module, details: Mapping[str, Any]) -> str:
    """Return the head of a model, a key of `Family.classes`."""
    if hasattr(model, "classifier") or hasattr(model, "qa_outputs"):
        return SAVED_HEADS[details.get("task", "classification")][0]
    if isinstance(model, PretrainingModel):
        return "words" if model.nsp is None else "pairs"
    return "replaced" if hasattr(model, "rtd") else "encoder"


def saved_class(model: nn.Module, details: Mapping[str, Any]) -> tuple[Family, str]:
    """Return the family and transformers' class of a model, `BERTKIT` if transformers has none."""
    config = model.config
    assert isinstance(config, ModelConfig)
    family, architecture = choose_class(config, head_of(model, details))
    if details.get("pooling") == "pooler" and not has_pooler(family, architecture):
        return BERTKIT, "bertkit"  # transformers would leave the pooler out
    return family, architecture


def config_fields(model: nn.Module, details: Mapping[str, Any], pad_id: int) -> dict[str, Any]:
    """Return the content of `config.json` for a model and its `bertkit.json` details."""
    config = model.config
    assert isinstance(config, ModelConfig)
    family, architecture = saved_class(model, details)
    fields = {k: v for k, v in dataclasses.asdict(config).items() if k not in OWN_FIELDS}
    fields["hidden_act"] = {"gelu": "gelu", "gelu_tanh": "gelu_new"}[config.hidden_act]
    head = getattr(model, "classifier", getattr(model, "qa_outputs", None))
    if isinstance(head, nn.Linear):
        if problem := SAVED_HEADS[details.get("task", "classification")][1]:
            fields["problem_type"] = problem
        labels = details.get("labels") or [f"LABEL_{i}" for i in range(head.out_features)]
        if len(labels) != head.out_features:
            raise BertkitError(
                f"{len(labels)} label names for {head.out_features} classes; give one per class"
            )
        fields["id2label"] = {str(number): label for number, label in enumerate(labels)}
        fields["label2id"] = {label: number for number, label in enumerate(labels)}
    return {
        "architectures": [architecture],
        "model_type": family.model_type,
        "pad_token_id": pad_id,
        **fields,
        **family.write_config(config),
    }


def foreign_tensors(
    model: nn.Module, family: Family, architecture: str = "", *, pooler: bool = True
) -> dict[str, Tensor]:
    """Return a model's parameters by a family's names, in fp32 on the CPU.

    ELECTRA's generator is excluded, and a pooler that no loss has trained. transformers' class,
    `architecture`, matters if its head has special names.
    """
    bare = isinstance(model, Encoder)
    without_pairs = hasattr(model, "rtd") or getattr(model, "nsp", model) is None
    excluded = ["generator."]
    if without_pairs or not pooler:
        excluded.append("pooler." if bare else "encoder.pooler.")
    tensors = {
        f"encoder.{name}" if bare else name: tensor.detach().to("cpu", torch.float32)
        for name, tensor in model.state_dict().items()
        if not name.startswith(tuple(excluded))
    }
    return file_tensors(tensors, family, architecture, bare=bare)


def save_generator(
    directory: Path, model: ReplacedTokenModel, tokenizer: Tokenizer, details: Mapping[str, Any]
) -> None:
    """Write an ELECTRA's generator as a separate masked language model."""
    with torch.device("meta"):
        generator = PretrainingModel(model.generator.config, pairs=False)
    generator.encoder, generator.mlm = model.whole_generator()
    save_model(directory, generator, tokenizer, details)
