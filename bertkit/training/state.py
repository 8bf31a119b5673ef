"""The state of a network and its optimizer as tensors by name, and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from bertkit.errors import BertkitError
from bertkit.training.optimizer import (
    PAST_BIAS_CORRECTION,
    OriginalAdam,
    initial_state,
    trainable_parameters,
)

MOMENTS = ("exp_avg", "exp_avg_sq", "step")


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name, a tied one once, under its first name.

    The tensors are the model's own, not copies.
    """
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) not in seen:
            seen.add(id(value))
            tensors[name] = value.detach()
    return tensors


def restore_model(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Write saved values into a model, bit by bit; the inverse of `model_tensors`.

    Raises:
        BertkitError: a tensor is missing, unexpected, or of another shape or type. Nothing has
            been changed then.
    """
    own = model_tensors(model)
    check_tensors("model", own, tensors)
    for name, value in own.items():
        put(value, tensors[name])


def put(own: Tensor, saved: Tensor) -> None:
    """Write a saved tensor into one of this process, which may hold only a part of it (FSDP2)."""
    if hasattr(own, "device_mesh") and not hasattr(saved, "device_mesh"):
        from bertkit.training.parallel import part_of

        saved = part_of(saved, own)
    own.copy_(saved)


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """An AdamW's state as "exp_avg.NAME", "exp_avg_sq.NAME" and "step.NAME".

    NAME is the parameter's in the model. A parameter that never had a gradient has no state yet
    and is written with the state it would start from, so that nothing can be missing unseen. The
    hyperparameters are not saved: they come from the recipe and the schedule.
    """
    tensors: dict[str, Tensor] = {}
    for name, parameter in trainable_parameters(model):
        state = optimizer.state.get(parameter) or initial_state(optimizer, parameter)
        tensors |= {f"{moment}.{name}": state[moment] for moment in MOMENTS}
    return tensors


def restore_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]
) -> None:
    """Give an optimizer its saved state, bit by bit; the inverse of `optimizer_tensors`.

    Raises:
        BertkitError: a tensor is missing, unexpected, or of another shape or type. Nothing has
            been changed then.
    """
    fresh = {
        name: initial_state(optimizer, parameter) for name, parameter in trainable_parameters(model)
    }
    expected = {f"{key}.{name}": state[key] for name, state in fresh.items() for key in MOMENTS}
    check_tensors("optimizer", expected, tensors)
    original = isinstance(optimizer, OriginalAdam)
    if any((tensors[f"step.{name}"] >= PAST_BIAS_CORRECTION) != original for name in fresh):
        raise BertkitError(
            f"the optimizer checkpoint was made {'with' if original else 'without'} bias "
            f"correction, but this run is {'without' if original else 'with'} it; "
            "resume with the recipe this checkpoint was made with"
        )
    for name, value in expected.items():
        put(value, tensors[name])
    for name, parameter in trainable_parameters(model):
        optimizer.state[parameter] = fresh[name]


def check_tensors(owner: str, expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> None:
    """Raise a BertkitError unless both have the same names, shapes and types."""
    advice = "resume with the recipe this checkpoint was made with"
    for problem, names in (
        ("lacks", expected.keys() - found.keys()),
        ("has the unexpected", found.keys() - expected.keys()),
    ):
        if names:
            raise BertkitError(f"the {owner} checkpoint {problem} {listed(names)}; {advice}")
    for name, value in expected.items():
        other = found[name]
        if (value.shape, value.dtype) != (other.shape, other.dtype):
            raise BertkitError(
                f"{name} in the {owner} checkpoint is {described(other)}, "
                f"but this {owner} needs {described(value)}; {advice}"
            )


def listed(names: Iterable[str]) -> str:
    """The first three names in order, and how many more."""
    ordered = sorted(names)
    more = f" and {len(ordered) - 3} more" if len(ordered) > 3 else ""
    return ", ".join(ordered[:3]) + more


def described(value: Tensor) -> str:
    """Type and shape of a tensor, such as `float32 (768, 768)`."""
    shape = ", ".join(str(size) for size in value.shape)
    return f"{str(value.dtype).removeprefix('torch.')} ({shape})"
