"""What a pre-training run trains: the network, its optimizer and its objective (paper, A.2)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bertkit.corpus.store import TokenStore
from bertkit.errors import BertkitError
from bertkit.model.encoder import ModelConfig
from bertkit.model.heads import count_parameters
from bertkit.model.weights import some
from bertkit.training.devices import check_memory
from bertkit.training.optimizer import build_optimizer
from bertkit.training.recipe import PretrainRecipe


@dataclass(frozen=True)
class Trained:
    """A network that is ready to be trained, on its device."""

    recipe: PretrainRecipe
    """As given, but for the sizes of a model to go on from."""
    config: ModelConfig
    model: Any
    optimizer: torch.optim.Optimizer
    objective: Callable[..., Any]
    """For updates; compiled where that was asked for."""
    written: Callable[..., Any]
    """The same as it is written, for evaluation."""
    start: str
    """A digest of the weights that it begins with; "" for random ones."""


def set_up(
    recipe: PretrainRecipe,
    store: TokenStore,
    start: Path | None,
    device: torch.device,
    *,
    parts: int,
    compiled: bool,
    say: Callable[[str], None],
) -> Trained:
    """Build or load the network, and all that belongs to it.

    Args:
        recipe: what to do.
        store: its tokenizer is the model's.
        start: a model to go on from.
        device: where the network will be.
        parts: into how many FSDP2 shares it out; 1 for one that every process has whole.
        compiled: compile the layers, for CUDA.
        say: is told which weights of `start` are new or left behind.

    Raises:
        BertkitError: the device's memory is too small, or `start` does not fit.
    """
    torch.manual_seed(recipe.training.seed)
    digest = ""
    model: Any
    if start is None:
        config = recipe.config(store.tokenizer.size)
        check_memory(count_parameters(config, heads=True) // parts, device)
        model = recipe.objectives.model(config)
    else:
        from bertkit.training.continuing import begin_with

        found = begin_with(start, recipe, store.tokenizer)
        recipe, config, model = found.recipe, found.config, found.network
        digest = found.start.digest
        new = f"; new: {some(found.new)}" if found.new else ""
        unused = f"; left behind: {some(found.unused)}" if found.unused else ""
        say(f"the weights are those of {start}{new}{unused}")
    model.to(device)
    if parts > 1:
        from bertkit.training.parallel import share_out

        share_out(model, device)
    objective = written = recipe.objectives.function()
    if compiled:
        from bertkit.training.compiled import compile_layers

        if recipe.objectives.words == "replaced":
            raise BertkitError("--compile does not know objectives.words = replaced; leave it")
        objective = compile_layers(model.encoder, objective, device)
    optimizer = build_optimizer(
        model,
        learning_rate=recipe.training.learning_rate,
        weight_decay=recipe.training.weight_decay,
        bias_correction=recipe.training.bias_correction,
    )
    return Trained(recipe, config, model, optimizer, objective, written, digest)
