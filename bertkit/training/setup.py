"""What a pre-training run trains: the network, its optimizer and its objective (paper, A.2).

The weights are drawn at random or come from an existing model, such as one whose vocabulary was
extended.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bertkit.checkpoints.weights import shown_names
from bertkit.corpus.store import TokenStore
from bertkit.errors import BertkitError
from bertkit.model.encoder import ModelConfig
from bertkit.model.heads import count_parameters
from bertkit.training.device import check_memory
from bertkit.training.optimizer import build_optimizer
from bertkit.training.recipe import PretrainRecipe


@dataclass(frozen=True)
class TrainState:
    """A network that is ready to be trained, on its device, with everything an update needs."""

    recipe: PretrainRecipe
    """As given, but with the sizes of the model that the run is initialised from."""
    config: ModelConfig
    model: Any
    optimizer: torch.optim.Optimizer
    objective: Callable[..., Any]
    """For updates; compiled where that was asked for."""
    eval_loss_fn: Callable[..., Any]
    """The uncompiled loss, used for evaluation."""
    start: str
    """A digest of the initial weights; "" if they are random."""


def build_train_state(
    recipe: PretrainRecipe,
    store: TokenStore,
    start: Path | None,
    device: torch.device,
    *,
    parts: int,
    compiled: bool,
    say: Callable[[str], None],
) -> TrainState:
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
        from bertkit.training.initialize import init_from

        found = init_from(start, recipe, store.tokenizer)
        recipe, config, model = found.recipe, found.config, found.network
        digest = found.start.digest
        new = f"; new: {shown_names(found.missing_keys)}" if found.missing_keys else ""
        unused = (
            f"; left behind: {shown_names(found.unexpected_keys)}" if found.unexpected_keys else ""
        )
        say(f"the weights are those of {start}{new}{unused}")
    model.to(device)
    if parts > 1:
        from bertkit.training.parallel import apply_fsdp

        apply_fsdp(model, device)
    objective = written = recipe.objectives.function()
    if compiled:
        if recipe.objectives.words == "replaced":
            raise BertkitError("--compile does not support ELECTRA; remove --compile")
        from bertkit.training.compile import compile_layers

        objective = compile_layers(model.encoder, objective, device)
    optimizer = build_optimizer(
        model,
        learning_rate=recipe.training.learning_rate,
        weight_decay=recipe.training.weight_decay,
        bias_correction=recipe.training.bias_correction,
    )
    return TrainState(recipe, config, model, optimizer, objective, written, digest)
