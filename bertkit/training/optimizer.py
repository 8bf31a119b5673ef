"""The optimizers, AdamW, BERT's original Adam and Muon, and gradient clipping.

Paper section A.2: Adam with beta1 0.9, beta2 0.999 and weight decay 0.01. Without bias
correction it follows Google's `optimization.py` where that goes beyond this text.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from bertkit.errors import BertkitError
from bertkit.model.native.compiled import has_bf16

BETAS = (0.9, 0.999)
"""The decay rates of the two running averages."""
EPSILON = 1e-6
"""The constant added to the square root of the second average."""
PAST_BIAS_CORRECTION = 2.0**40
"""A step at which 1 - beta ** step is exactly 1; in float32, adding 1 does not change it."""
MUON_MOMENTUM = 0.95
"""The decay rate of Muon's running average of gradients, with which it also looks ahead."""
MUON_SCALE = 0.2
"""The root mean square of Muon's updates, in learning rates; AdamW's is usually 0.2 to 0.4."""


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
            trained = [parameter for parameter in group["params"] if parameter.grad is not None]
            for parameter in trained:
                if parameter not in self.state:
                    self.state[parameter] = self.initial_state(parameter)
            if trained:
                self.update(trained, group)

    def update(self, trained: list[Any], group: dict[str, Any]) -> None:
        """Update parameters of one group, which all have a gradient and a state."""
        steps, averages, squares = (
            [self.state[parameter][name] for parameter in trained]
            for name in ("step", "exp_avg", "exp_avg_sq")
        )
        torch._foreach_add_(steps, 1)
        torch._fused_adamw_(
            *(trained, [parameter.grad for parameter in trained], averages, squares, [], steps),
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


class Muon(AdamW):
    """Muon (Jordan et al. 2024) for the weight matrices of the layers, AdamW for everything else.

    With gradient g, learning rate r and weight decay d, an update of a matrix p of m x n is

        b = 0.95 * b + 0.05 * g
        p = (1 - r * d) * p - r * s * sqrt(max(m, n)) * orthogonal(0.95 * b + 0.05 * g)

    where `orthogonal` sets all singular values to about 1 (see `orthogonalize`), so that a step
    moves the matrix in every direction that the gradient has, not only in the strongest ones. The
    factor s * sqrt(max(m, n)) makes the root mean square of an update s times the learning rate,
    whatever the shape, as Liu et al. (2025) propose: one learning rate serves both optimizers.

    The query, key and value weights of a layer are one parameter here, but three matrices.
    """

    def __init__(self, groups: list[dict[str, Any]], **options: Any) -> None:
        self.parts: dict[Tensor, int] = {
            parameter: 3 if "query_key_value" in name else 1
            for group in groups
            for name, parameter in zip(group["names"], group["params"], strict=True)
            if is_layer_matrix(name, parameter)
        }
        """Each parameter that Muon updates -> the number of matrices stacked in it."""
        split = [
            {"params": params, "weight_decay": group["weight_decay"]}
            for group in groups
            for by_muon in (False, True)
            if (params := [p for p in group["params"] if (p in self.parts) == by_muon])
        ]
        super().__init__(split, **options)

    def initial_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the state of a parameter before its first update: zero averages."""
        if parameter not in self.parts:
            return super().initial_state(parameter)
        return {"momentum": torch.zeros_like(parameter, memory_format=torch.preserve_format)}

    def update(self, trained: list[Any], group: dict[str, Any]) -> None:
        """Update parameters of one group; matrices of the same shape are orthogonalized at once."""
        if trained[0] not in self.parts:
            super().update(trained, group)
            return
        shapes: dict[torch.Size, list[tuple[Tensor, ...]]] = {}
        for weight in trained:
            stacked = (weight.detach(), weight.grad, self.state[weight]["momentum"])
            chunks = [tensor.chunk(self.parts[weight]) for tensor in stacked]
            shapes.setdefault(chunks[0][0].shape, []).extend(zip(*chunks, strict=True))
        for shape, parts in shapes.items():
            weights, gradients, momenta = ([part[i] for part in parts] for i in range(3))
            torch._foreach_lerp_(momenta, gradients, 1 - MUON_MOMENTUM)
            ahead = torch.stack(torch._foreach_lerp(gradients, momenta, MUON_MOMENTUM))
            # In bf16 where that is fast, because rounding matters little.
            dtype = torch.bfloat16 if ahead.is_cuda or has_bf16() else ahead.dtype
            moves = orthogonalize(ahead.to(dtype)).to(ahead.dtype).unbind()
            torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
            rate = group["lr"] * MUON_SCALE * math.sqrt(max(shape))
            torch._foreach_add_(weights, moves, alpha=-rate)


def is_layer_matrix(name: str, parameter: Tensor) -> bool:
    """Whether a parameter is a weight matrix between hidden states, which Muon updates."""
    return parameter.ndim == 2 and (".layers." in name or name.endswith("mlm.dense.weight"))


def orthogonalize(matrices: Tensor) -> Tensor:
    """Replace the singular values of (n, rows, columns) matrices by values between 0.7 and 1.2.

    This is Muon's Newton-Schulz iteration: with its fifth-order polynomial, five steps suffice
    where singular values differ by a factor of about a hundred; much smaller ones grow less.
    """
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if is_tall else matrices
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315)
        x = torch.baddbmm(x, polynomial, x, beta=3.4445)
    return x.mT if is_tall else x


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Divide the trained parameters into weights, which decay, and biases and LayerNorms."""
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
        last = name.rpartition(".")[2]
        exempt = id(parameter) in normalised or last.startswith("bias") or last.endswith("_bias")
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
    """Build "adamw" or "muon" for a model that is on the device that it is trained on."""
    groups = parameter_groups(model, weight_decay)
    if not any(group["params"] for group in groups):
        raise BertkitError("the model has no parameter to train; unfreeze some of them")
    kind = Muon if optimizer == "muon" else AdamW
    return kind(groups, learning_rate=learning_rate, bias_correction=bias_correction)


def set_learning_rate(optimizer: AdamW, value: float) -> None:
    """Set the learning rate of the next update in every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = value


def clip_gradients(model: nn.Module, maximum: float) -> Tensor:
    """Scale all gradients so that their joint 2-norm is at most `maximum`; return the norm before.

    It is a tensor, because reading it would make the host wait for the device.
    """
    return nn.utils.clip_grad_norm_(model.parameters(), maximum)
