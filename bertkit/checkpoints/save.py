"""Writing of self-contained model directories, which `huggingface` reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from bertkit.checkpoints.families import (
    OWN_FIELDS,
    choose_class,
    family_fields,
    family_names,
    has_pooler,
    parameter_names,
)
from bertkit.checkpoints.weights import write_tensors
from bertkit.errors import BertkitError
from bertkit.files import new_folder, write_json
from bertkit.model.encoder import Encoder, ModelConfig, check_vocabulary
from bertkit.model.heads import PretrainingModel

if TYPE_CHECKING:
    from bertkit.checkpoints.card import Card
    from bertkit.tokenizer.wordpiece import Tokenizer

SAVED_HEADS = {
    "classification": ("sequence", ""),
    "multi-label-classification": ("sequence", "multi_label_classification"),
    "regression": ("sequence", "regression"),
    "multiple-choice": ("choice", ""),
    "token-classification": ("token", ""),
    "question-answering": ("span", ""),
}
"""Task -> head (a key of `families.CLASSES`) and transformers' `problem_type`."""


def known_elsewhere(config: ModelConfig, task: str) -> bool:
    """Return whether transformers has a class for a network with the head of a task."""
    return choose_class(config, SAVED_HEADS[task][0]) != ("bertkit", "bertkit")


def save_model(
    directory: Path,
    model: nn.Module,
    tokenizer: Tokenizer,
    details: Mapping[str, Any],
    *,
    extra: Callable[[Path], object] = lambda folder: None,
    pooler: bool = True,
    card: Card | None = None,
) -> None:
    """Write a complete model directory, or, after any error, nothing.

    Args:
        directory: the directory to create; an existing model directory is replaced.
        model: a model with a `config`, unwrapped (not compiled or distributed), on any device.
        tokenizer: the model's tokenizer.
        details: the content of `bertkit.json`; "labels", a list of names, also go to `config.json`.
        extra: a function that writes more files into the folder it is given.
        pooler: whether the pooler, if there is one, was trained; an untrained one is not written.
        card: the model card; None writes none. A card that its user has edited is kept.

    Raises:
        BertkitError: the tokenizer has more tokens than the model has embeddings, the directory
            holds something other than a model, or it cannot be written.
    """
    config = model.config
    assert isinstance(config, ModelConfig)
    check_vocabulary(config, tokenizer.size)
    check_free(directory)
    with new_folder(directory) as folder:
        described = model_details(model, config, details, tokenizer.pad_id)
        write_json(folder / "config.json", described)
        family, (architecture,) = described["model_type"], described["architectures"]
        wanted = pooler and has_pooler(family, architecture)
        tensors = foreign_tensors(model, family, architecture, pooler=wanted)
        write_tensors(folder / "model.safetensors", tensors, format="pt")
        tokenizer.save(folder, config.max_position_embeddings)
        write_json(folder / "bertkit.json", dict(details))
        extra(folder)
        if card is not None:
            from bertkit.checkpoints.card import write_card

            write_card(folder, card, replaced=directory)


def check_free(directory: Path) -> None:
    """Raise a BertkitError unless a folder is absent, empty or a model directory."""
    signs = ("bertkit.json", "*.safetensors", "*.bin")  # not only models have a config.json
    weights = any(path for sign in signs for path in directory.glob(sign))
    if directory.exists() and not (weights and (directory / "config.json").is_file()):
        empty = directory.is_dir() and not any(directory.iterdir())
        if not empty:
            raise BertkitError(f"{directory} exists and is not a model directory; choose another")


def model_details(
    model: nn.Module, config: ModelConfig, details: Mapping[str, Any], pad_id: int
) -> dict[str, Any]:
    """Return the content of `config.json` for a model and its `bertkit.json` details."""
    fields = dataclasses.asdict(config)
    for name in OWN_FIELDS:
        del fields[name]
    fields["hidden_act"] = {"gelu": "gelu", "gelu_tanh": "gelu_new"}[config.hidden_act]
    head = getattr(model, "classifier", getattr(model, "qa_outputs", None))
    if isinstance(head, nn.Linear):
        kind, problem = SAVED_HEADS[details.get("task", "classification")]
        fields |= {"problem_type": problem} if problem else {}
        labels = details.get("labels") or [f"LABEL_{i}" for i in range(head.out_features)]
        if len(labels) != head.out_features:
            raise BertkitError(
                f"{len(labels)} label names for {head.out_features} classes; give one per class"
            )
        fields["id2label"] = {str(number): label for number, label in enumerate(labels)}
        fields["label2id"] = {label: number for number, label in enumerate(labels)}
    else:
        kind = "encoder"
        if isinstance(model, PretrainingModel):
            kind = "words" if model.nsp is None else "pairs"
        elif hasattr(model, "rtd"):
            kind = "replaced"
    family, architecture = choose_class(config, kind)
    unread = details.get("pooling") == "pooler" and not has_pooler(family, architecture)
    if unread:  # transformers would leave the pooler out
        family = architecture = "bertkit"
    fields |= family_fields(config, family)
    return {"architectures": [architecture], "model_type": family, "pad_token_id": pad_id, **fields}


def foreign_tensors(
    model: nn.Module, family: str, architecture: str = "", *, pooler: bool = True
) -> dict[str, Tensor]:
    """Return a model's parameters by a family's names, in fp32 on the CPU.

    The tied decoder and ELECTRA's generator are excluded, and a pooler that no loss has trained.
    transformers' class, `architecture`, matters if its head has special names.
    """
    names, tensors = parameter_names(model), {}
    without_pairs = hasattr(model, "rtd") or getattr(model, "nsp", model) is None
    own_pooler = "pooler." if isinstance(model, Encoder) else "encoder.pooler."
    left_out = ("generator.", own_pooler) if without_pairs or not pooler else ("generator.",)
    for own, tensor in model.state_dict().items():
        if own.startswith(left_out):
            continue
        parts = tensor.detach().to("cpu", torch.float32).chunk(len(names[own]))
        for name, part in zip(names[own], parts, strict=True):
            tensors[name] = part.clone(memory_format=torch.contiguous_format)
    config = model.config
    assert isinstance(config, ModelConfig)
    if family == "albert" and not config.embedding_size:  # ALBERT always has this matrix
        tensors["bert.embeddings_project.weight"] = torch.eye(config.hidden_size)
        tensors["bert.embeddings_project.bias"] = torch.zeros(config.hidden_size)
    return family_names(tensors, family, architecture, bare=isinstance(model, Encoder))
