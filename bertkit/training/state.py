"""The state of a pre-training run: the network, its optimizer and its position in the data.

The weights are initialized at random or taken from an existing model, such as one whose vocabulary
was extended.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from bertkit.errors import BertkitError
from bertkit.model.encoder import ModelConfig
from bertkit.model.heads import count_parameters
from bertkit.pretraining_data.sampler import START, AnyPosition
from bertkit.tokenizer.wordpiece import Tokenizer
from bertkit.training.device import check_memory
from bertkit.training.optimizer import (
    PAST_BIAS_CORRECTION,
    AdamW,
    build_optimizer,
    trainable_parameters,
)
from bertkit.training.recipe import ModelSize, PretrainRecipe

if TYPE_CHECKING:
    from bertkit.checkpoints.pretrained import PretrainedWeights


@dataclass
class TrainState:
    """A network in training, on its device, with its optimizer and progress."""

    model: Any
    optimizer: AdamW
    loss_fn: Callable[..., Any]
    """(model, batch) → sums; compiled if that was requested."""
    eval_loss_fn: Callable[..., Any]
    """The uncompiled loss, used for evaluation."""
    step: int = 0
    """The number of updates made."""
    position: AnyPosition = START
    """The position of the next example of the phase."""


def build_train_state(
    recipe: PretrainRecipe, model: Any, device: torch.device, *, compiled: bool
) -> TrainState:
    """Build the loss and the optimizer for a network that is already on its device.

    Raises:
        BertkitError: compiling is not supported on the device.
    """
    loss_fn = eval_loss_fn = recipe.objectives.function()
    if compiled:
        from bertkit.training.parallel import compile_training

        loss_fn = partial(loss_fn, cross_entropy=compile_training(model, device))
    optimizer = build_optimizer(
        model,
        learning_rate=recipe.training.learning_rate,
        weight_decay=recipe.training.weight_decay,
        bias_correction=recipe.training.bias_correction,
        optimizer=recipe.training.optimizer,
    )
    return TrainState(model, optimizer, loss_fn, eval_loss_fn)


class InitialNetwork(NamedTuple):
    """A network before its first update."""

    recipe: PretrainRecipe
    """The recipe, with the sizes of the model that the weights come from."""
    model: nn.Module
    digest: str = ""
    """The SHA-256 of the weights; "" if they are random."""
    start: str = ""
    """Where the weights are from, for the model card; "" if they are random."""
    inherited: Mapping[str, Any] = {}
    """The metadata that the model card takes over."""


def random_network(
    recipe: PretrainRecipe, tokenizer: Tokenizer, device: torch.device, parts: int
) -> InitialNetwork:
    """Initialize a new network with torch's random generator.

    Raises:
        BertkitError: the device has too little memory for one of the `parts` that FSDP2 divides the
            network into.
    """
    config = recipe.config(tokenizer.size)
    check_memory(count_parameters(config, heads=True) // parts, device)
    return InitialNetwork(recipe, recipe.objectives.model(config))


def check_initial_model(
    found: PretrainedWeights, recipe: PretrainRecipe, tokenizer: Tokenizer
) -> None:
    """Check that a run can begin with the weights of a model.

    Raises:
        BertkitError: the model's tokenizer is not that of the text, or its direction or its number
            of positions or of segments does not fit the recipe.
    """
    path, positions = found.path, found.config.max_position_embeddings
    if found.config.type_vocab_size == 1 and recipe.objectives.pair != "single-segment":
        raise BertkitError(
            f"{path} has one segment (type_vocab_size 1), and training examples have two; give "
            "--objectives.pair single-segment"
        )
    if found.tokenizer.content_hash != tokenizer.content_hash:
        home = path / "model" if (path / "model").is_dir() else path  # of a run
        raise BertkitError(
            f"{path} has another tokenizer than the store; prepare the text with --tokenizer {home}"
        )
    if found.config.direction != recipe.objectives.direction:
        raise BertkitError(
            f"{path} is {found.config.direction} and the recipe's objectives.token = "
            f"{recipe.objectives.token} trains a {recipe.objectives.direction} model; choose the "
            "same direction"
        )
    if max(recipe.phases.lengths) > positions:
        raise BertkitError(
            f"{path} has {positions} positions, and phases.lengths has "
            f"{max(recipe.phases.lengths)}; give lengths of at most {positions} (--phases.lengths)",
            code="number",
        )


def pretrained_network(
    path: Path, recipe: PretrainRecipe, tokenizer: Tokenizer, say: Callable[[str], None]
) -> InitialNetwork:
    """Build the recipe's network with the weights of an existing model.

    The sizes come from the model; dropout and everything else come from the recipe. New and unused
    weights are reported by `say`.

    Raises:
        BertkitError: the model does not exist, or does not fit; see `check_initial_model`.
    """
    from bertkit.checkpoints.card import inherited_metadata, start_text
    from bertkit.checkpoints.pretrained import model_folder, read_pretrained
    from bertkit.checkpoints.weights import shown_names

    found = read_pretrained(path)
    check_initial_model(found, recipe, tokenizer)
    sizes: dict[str, Any] = {
        name: getattr(found.config, name)
        for name in ModelSize.__dataclass_fields__
        if name != "dropout"
    }
    recipe = replace(recipe, model=replace(recipe.model, **sizes))
    config = replace(
        found.config,
        hidden_dropout_prob=recipe.model.dropout,
        attention_probs_dropout_prob=recipe.model.dropout,
        pooler_act=ModelConfig.pooler_act,  # the pair objective uses BERT's pooler
    )
    tensors = dict(found.tensors)
    if (found.pair == "sop") != (recipe.objectives.pair == "sop"):
        tensors = {n: t for n, t in tensors.items() if not n.startswith("nsp.")}
    given = replace(found, config=config, tensors=tensors)
    loaded = given.build(recipe.objectives.model, keep_head=True)
    pairs = recipe.objectives.has_pairs
    unused = [*loaded.unexpected_keys, *(name for name in found.tensors if name not in tensors)]
    if not pairs:  # nothing would train the pooler, so it is not saved
        unused += [name for name in tensors if "pooler." in name and name not in unused]
    missing = [name for name in loaded.missing_keys if pairs or "pooler." not in name]
    new = f"; new: {shown_names(missing)}" if missing else ""
    left = f"; unused: {shown_names(unused)}" if unused else ""
    say(f"weights loaded from {path}{new}{left}")
    return InitialNetwork(
        recipe,
        loaded.model.train(),
        found.digest,
        start_text(found.path, found.digest),
        inherited_metadata(model_folder(found.path)),
    )


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by name, a tied one once, under its first name.

    The tensors share memory with the model.
    """
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) not in seen:
            seen.add(id(value))
            tensors[name] = value.detach()
    return tensors


def restore_model(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy saved values into a model exactly; the inverse of `model_tensors`.

    Raises:
        BertkitError: a tensor is missing, unexpected, or of another shape or type. The model is
            unchanged in that case.
    """
    own = model_tensors(model)
    check_tensors("model", own, tensors)
    for name, value in own.items():
        copy_tensor(value, tensors[name])


def copy_tensor(own: Tensor, saved: Tensor) -> None:
    """Copy a saved tensor into this process's tensor, which may be only a shard of it (FSDP2)."""
    if hasattr(own, "device_mesh") and not hasattr(saved, "device_mesh"):
        from bertkit.training.parallel import shard_like

        saved = shard_like(saved, own)
    own.copy_(saved)


def optimizer_tensors(model: nn.Module, optimizer: AdamW) -> dict[str, Tensor]:
    """Return an optimizer's state as "exp_avg.NAME", "exp_avg_sq.NAME" and "step.NAME".

    Muon's matrices have "momentum.NAME" instead. NAME is the name of the parameter in the model. A
    parameter that never had a gradient has no state yet and is saved with its initial state, so
    that a missing tensor is always an error. The hyperparameters are not saved: they come from the
    recipe and the schedule.
    """
    tensors: dict[str, Tensor] = {}
    for name, parameter in trainable_parameters(model):
        state = optimizer.state.get(parameter) or optimizer.initial_state(parameter)
        tensors |= {f"{moment}.{name}": value for moment, value in state.items()}
    return tensors


def restore_optimizer(model: nn.Module, optimizer: AdamW, tensors: Mapping[str, Tensor]) -> None:
    """Restore an optimizer's saved state exactly; the inverse of `optimizer_tensors`.

    Raises:
        BertkitError: a tensor is missing, unexpected, or of another shape or type, or the bias
            correction differs. The optimizer is unchanged in that case.
    """
    fresh = {
        name: optimizer.initial_state(parameter) for name, parameter in trainable_parameters(model)
    }
    expected = {f"{key}.{n}": value for n, state in fresh.items() for key, value in state.items()}
    check_tensors("optimizer", expected, tensors)
    original = not optimizer.bias_correction
    steps = [name for name in expected if name.startswith("step.")]
    if any((tensors[name] >= PAST_BIAS_CORRECTION) != original for name in steps):
        raise BertkitError(
            f"the optimizer checkpoint was made {'with' if original else 'without'} bias "
            f"correction, but this run is {'without' if original else 'with'} it; "
            "resume with the recipe this checkpoint was made with"
        )
    for name, value in expected.items():
        copy_tensor(value, tensors[name])
    for name, parameter in trainable_parameters(model):
        optimizer.state[parameter] = fresh[name]


def check_tensors(owner: str, expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> None:
    """Raise a BertkitError unless both have the same names, shapes and types."""
    from bertkit.checkpoints.weights import shown_names

    advice = "resume with the recipe this checkpoint was made with"
    for problem, names in (
        ("lacks", expected.keys() - found.keys()),
        ("has the unexpected", found.keys() - expected.keys()),
    ):
        if names:
            raise BertkitError(
                f"the {owner} checkpoint {problem} {shown_names(sorted(names))}; {advice}"
            )
    for name, value in expected.items():
        other = found[name]
        if (value.shape, value.dtype) != (other.shape, other.dtype):
            raise BertkitError(
                f"{name} in the {owner} checkpoint is {shape_text(other)}, "
                f"but this {owner} needs {shape_text(value)}; {advice}"
            )


def shape_text(value: Tensor) -> str:
    """Format the type and shape of a tensor, such as `float32 (768, 768)`."""
    shape = ", ".join(str(size) for size in value.shape)
    return f"{str(value.dtype).removeprefix('torch.')} ({shape})"
