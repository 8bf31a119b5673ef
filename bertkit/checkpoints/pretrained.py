"""Pre-trained weights from which fine-tuning is initialised (paper section 3.2).

They come from a Hugging Face directory, a run directory of bertkit (its `model/`), or a Google
checkpoint. They are read once; every run of a grid builds its own model from them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bertkit.checkpoints.families import is_optional_weight
from bertkit.checkpoints.hub import download_model, hub_commit, parse_hub_name
from bertkit.checkpoints.huggingface import LoadResult, Model, load_into, load_parts
from bertkit.checkpoints.weights import recorded_recipe
from bertkit.errors import BertkitError
from bertkit.files import from_home, read_optional
from bertkit.model.encoder import ModelConfig, check_vocabulary
from bertkit.tokenizer.wordpiece import Tokenizer

KEPT_WEIGHTS = ("bert.pooler.", "cls.predictions.transform.", "cls.predictions.bias")
"""Weights that are used without the head of a task."""


@dataclass(frozen=True)
class PretrainedWeights:
    """The weights, config and tokenizer of a model, in memory."""

    path: Path
    config: ModelConfig
    tensors: Mapping[str, Tensor]
    """The weights, by Hugging Face's names."""
    tokenizer: Tokenizer
    details: Mapping[str, Any]
    """The content of `bertkit.json`; empty for models that bertkit did not write."""

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of the weights, the vocabulary and the config, in hex."""
        digest = hashlib.sha256(f"{self.tokenizer.content_hash} {self.config}".encode())
        for name in sorted(self.tensors):
            digest.update(name.encode())
            tensor = self.tensors[name].detach().cpu().contiguous()
            digest.update(tensor.flatten().view(torch.uint8).numpy().data)
        return digest.hexdigest()

    @property
    def origin(self) -> str:
        """Where the weights are from: `ORG/NAME@COMMIT` on the hub, else the path."""
        return hub_commit(self.path) or str(self.path)

    @property
    def pair(self) -> str:
        """The objective of the pair head; see `pair_objective`."""
        return pair_objective(self.details, self.config)

    def with_dropout(self, share: float) -> PretrainedWeights:
        """Return the same weights with another dropout probability in the config."""
        config = replace(self.config, hidden_dropout_prob=share, attention_probs_dropout_prob=share)
        return replace(self, config=config)

    def build(
        self, make: Callable[[ModelConfig], Model], *, keep_head: bool, copy: bool = True
    ) -> LoadResult[Model]:
        """Build a model with these weights; missing ones are drawn from torch's generator.

        With `keep_head`, the weights of the head are used, too, and must fit. Without `copy`, the
        model shares the weights, which saves memory if it is not changed.

        Raises:
            BertkitError: weights are missing or do not fit; the message names them.
        """
        kept = {
            name: tensor.clone() if copy else tensor
            for name, tensor in self.tensors.items()
            if keep_head or not is_optional_weight(name) or name.startswith(KEPT_WEIGHTS)
        }
        return load_into(self.config, kept, make, self.path)


def pair_objective(details: Mapping[str, Any], config: ModelConfig) -> str:
    """Return the objective of the pair head, "nsp" or "sop"; by the family if none is recorded."""
    usual = "sop" if config.share_layers else "nsp"  # ALBERT
    recorded = recorded_recipe(details, "objectives").get("pair", usual)
    return "sop" if recorded == "sop" else "nsp"


def read_pretrained(path: Path) -> PretrainedWeights:
    """Read a Hugging Face directory, a model of the hub, a bertkit run or a Google checkpoint.

    Raises:
        BertkitError: there is no such model, a file is missing or damaged, or the tokenizer does
            not fit the model.
    """
    path = resolve_model(path)
    folder, home = model_folder(path), tokenizer_folder(path)
    if (folder / "config.json").is_file():
        config, tensors = load_parts(folder)
    else:
        from bertkit.checkpoints.tensorflow import google_tensors

        config, tensors = google_tensors(folder)
    tokenizer = Tokenizer.load(home)
    check_vocabulary(config, tokenizer.size)
    return PretrainedWeights(path, config, tensors, tokenizer, read_details(home))


def model_folder(path: Path) -> Path:
    """Return the model directory that a path or a hub name means.

    It is the path itself, `model/` inside a run directory, `0_Transformer/` or the like inside a
    directory of an old sentence-transformers, or the folder of a model of the Hugging Face hub (see
    `hub.py`), which is downloaded if the cache does not have it.

    Raises:
        BertkitError: there is no model at the path.
    """
    path = resolve_model(path)
    modules = sorted(path.glob("0_*")) if (path / "modules.json").is_file() else []
    for folder in (path, path / "model", *modules):
        if (folder / "config.json").is_file() or (folder / "bert_config.json").is_file():
            return folder
    if not path.is_dir():  # the prefix of a Google checkpoint
        return path
    raise BertkitError(
        f"{path} holds no model: neither config.json nor bert_config.json; check the path"
    )


def tokenizer_folder(path: Path) -> Path:
    """Return the folder with the tokenizer of a model, given what `model_folder` takes."""
    folder = model_folder(path)
    return folder if folder.is_dir() else folder.parent  # beside a Google checkpoint's files


def resolve_model(path: Path) -> Path:
    """Return a path that exists: the one given, or the folder of the hub's model of that name.

    Raises:
        BertkitError: there is neither.
    """
    path = Path(from_home(path))
    if path.suffix == ".index" and path.is_file():
        path = path.with_suffix("")  # a Google checkpoint
    if path.is_dir() or (path.name and path.with_name(f"{path.name}.index").is_file()):
        return path
    if path.exists():
        raise BertkitError(f"{path} is a file; give the folder of a model")
    if name := parse_hub_name(str(path)):
        return download_model(name)
    raise BertkitError(f"there is no model directory {path}; check the path")


def model_name(folder: Path) -> str:
    """Return the name of a model's folder, or of its parent if the folder is called "model"."""
    return folder.parent.name if folder.name == "model" else folder.name


def read_details(folder: Path) -> dict[str, Any]:
    """Read a model's `bertkit.json`; return {} if there is none.

    Raises:
        BertkitError: the file is damaged.
    """
    return read_optional(folder / "bertkit.json")
