"""The optimizer: AdamW or BERT's original Adam, its two parameter groups, and gradient clipping.

Paper section A.2: Adam with beta1 0.9, beta2 0.999 and weight decay 0.01. Without bias
correction it follows Google's `optimization.py` where that goes beyond this text.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from bertkit.errors import BertkitError

BETAS = (0.9, 0.999)
"""The decay rates of the two running averages."""
EPSILON = 1e-6
"""The constant added to the square root of the second average."""
PAST_BIAS_CORRECTION = 2.0**40
"""A step at which 1 - beta ** step is exactly 1; in float32, adding 1 does not change it."""


class AdamW:
    """AdamW (Loshchilov and Hutter 2019), or the Adam that BERT was trained with, fused by torch.

    With gradient g, learning rate r and weight decay d, an update of a parameter p is

        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g * g
        p = p - r * (m' / (sqrt(v') + epsilon) + d * p)

    where m' and v' are m and v, corrected for their start at zero: divided by 1 - beta ** step.
    BERT was trained without that correction, so its early updates are larger: the first is 0.1 /
    sqrt(0.001) = 3.2 learning rates instead of 1. There every parameter starts at a step so late
    that the corrections are 1.

    `torch.optim.AdamW` computes the same numbers by the same kernel, but the first one that a
    process makes imports torch's compiler, which takes seconds.

    Args:
        groups: dictionaries with `params`, the parameters, and their `weight_decay`.
        learning_rate: the learning rate of the first update; see `set_learning_rate`.
        bias_correction: whether to correct the averages.
    """

    def __init__(
        self, groups: list[dict[str, Any]], *, learning_rate: float, bias_correction: bool
    ) -> None:
        self.param_groups = [{**group, "lr": learning_rate} for group in groups]
        self.bias_correction = bias_correction
        self.state: dict[Tensor, dict[str, Tensor]] = {}

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            given = [parameter for parameter in group["params"] if parameter.grad is not None]
            for parameter in given:
                if parameter not in self.state:
                    self.state[parameter] = self.initial_state(parameter)
            if given:
                self.update(given, group)

    def update(self, given: list[Any], group: dict[str, Any]) -> None:
        """Update parameters of one group, which all have a gradient and a state."""
        steps, averages, squares = (
            [self.state[parameter][name] for parameter in given]
            for name in ("step", "exp_avg", "exp_avg_sq")
        )
        torch._foreach_add_(steps, 1)
        torch._fused_adamw_(
            *(given, [parameter.grad for parameter in given], averages, squares, [], steps),
            lr=group["lr"],
            beta1=BETAS[0],
            beta2=BETAS[1],
            weight_decay=group["weight_decay"],
            eps=EPSILON,
            amsgrad=False,
            maximize=False,
        )

    def initial_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the state of a parameter before its first update: zero averages and a step."""
        first = 0.0 if self.bias_correction else PAST_BIAS_CORRECTION
        return {
            "step": torch.tensor(first, dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
        }

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Divide the parameters into weights, which decay, and biases and LayerNorms, which do not.

    A parameter does not decay if the last part of its name starts with `bias` or ends with `_bias`,
    or if it belongs to an `nn.LayerNorm`. A tied parameter appears once, under its first name; a
    frozen one (`requires_grad` false) is in neither group. Each group is a dictionary with
    `params`, in the order of the model, their `names` and `weight_decay`.
    """
    groups: list[dict[str, Any]] = [
        {"params": [], "names": [], "weight_decay": weight_decay},
        {"params": [], "names": [], "weight_decay": 0.0},
    ]
    normalised = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, nn.LayerNorm)
        for parameter in module.parameters(recurse=False)
    }
    for name, parameter in trainable_parameters(model):
        own_name = name.rpartition(".")[2]
        exempt = (
            id(parameter) in normalised or own_name.startswith("bias") or own_name.endswith("_bias")
        )
        groups[exempt]["params"].append(parameter)
        groups[exempt]["names"].append(name)
    return groups


def trainable_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Return the name and value of each parameter that is trained, tied ones once."""
    return ((name, value) for name, value in model.named_parameters() if value.requires_grad)


def build_optimizer(
    model: nn.Module,
    *,
    learning_rate: float,
    weight_decay: float = 0.01,
    bias_correction: bool = True,
    optimizer: str = "adamw",
) -> AdamW:
    """Build an optimizer, "adamw" or "muon", over the two `parameter_groups`.

    The model has to be on the device that it is trained on. For the other arguments see `AdamW`.

    Raises:
        BertkitError: the model has no trainable parameter, or Muon is to update matrices that
            FSDP2 divides among processes.
    """
    groups = parameter_groups(model, weight_decay)
    if not any(group["params"] for group in groups):
        raise BertkitError("the model has no parameter to train; unfreeze some of them")
    kind = AdamW
    if optimizer == "muon":
        from bertkit.training.muon import Muon

        kind = Muon
    return kind(groups, learning_rate=learning_rate, bias_correction=bias_correction)


def set_learning_rate(optimizer: AdamW, value: float) -> None:
    """Set the learning rate of the next update in every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = value


def clip_gradients(model: nn.Module, maximum: float) -> Tensor:
    """Scale all gradients together so that their joint 2-norm is at most `maximum`.

    Returns:
        The norm before clipping, a scalar on the gradients' device: reading it here would make the
        host wait for the device. It is not finite if a gradient is not finite.
    """
    norm = nn.utils.clip_grad_norm_(model.parameters(), maximum)
    # with sharded weights (FSDP2), each rank has a part of the norm
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm
