"""Google's checkpoints as whole pre-training models, to compare and to write."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from bertkit.checkpoints.huggingface import load_into, require_all_weights
from bertkit.checkpoints.save import foreign_tensors
from bertkit.checkpoints.tensorflow import (
    google_name,
    google_tensors,
    write_checkpoint,
    write_google_config,
)
from bertkit.model.heads import PretrainingModel


def load_google_checkpoint(path: Path, hidden_act: str = "gelu") -> PretrainingModel:
    """The model with both heads; the config has one "gelu" for both GELUs."""
    config, tensors = google_tensors(path)
    config = dataclasses.replace(config, hidden_act=hidden_act)
    return require_all_weights(load_into(config, tensors, PretrainingModel, path), path)


def save_google_checkpoint(model: PretrainingModel, prefix: Path) -> None:
    """Write the config and the weights as Google's code names them."""
    write_google_config(model.config, prefix.parent)
    variables = {}
    for name, tensor in foreign_tensors(model, "bert").items():
        variable = google_name(name)
        array = tensor.numpy()
        variables[variable] = array.T if variable.endswith("/kernel") else array
    write_checkpoint(prefix, variables)
