"""Muon (Jordan et al. 2024): an optimizer that orthogonalizes the updates of weight matrices."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from bertkit.errors import BertkitError
from bertkit.model.native.library import has_bf16
from bertkit.training.optimizer import AdamW

MUON_MOMENTUM = 0.95
"""The decay rate of Muon's running average of gradients, with which it also looks ahead."""
MUON_SCALE = 0.2
"""The root mean square of Muon's updates, in learning rates; AdamW's is usually 0.2 to 0.4."""


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

    The arguments are those of `AdamW`, with the `names` of the parameters in each group.

    Raises:
        BertkitError: FSDP2 divides the matrices among processes (code "muon-sharded").
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
            if (params := [one for one in group["params"] if (one in self.parts) == by_muon])
        ]
        if any(hasattr(matrix, "device_mesh") for matrix in self.parts):
            raise BertkitError(
                "training.optimizer = muon needs whole matrices, which --strategy fsdp divides "
                "among processes; choose adamw, or --strategy ddp",
                code="muon-sharded",
            )
        super().__init__(split, **options)

    def initial_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the state of a parameter before its first update: zero averages."""
        if parameter not in self.parts:
            return super().initial_state(parameter)
        return {"momentum": torch.zeros_like(parameter, memory_format=torch.preserve_format)}

    def update(self, given: list[Any], group: dict[str, Any]) -> None:
        """Update parameters of one group; matrices of the same shape are orthogonalized at once."""
        if given[0] not in self.parts:
            super().update(given, group)
            return
        shapes: dict[torch.Size, list[tuple[Tensor, ...]]] = {}
        for weight in given:
            stacked = (weight.detach(), weight.grad, self.state[weight]["momentum"])
            chunks = [one.chunk(self.parts[weight]) for one in stacked]
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
