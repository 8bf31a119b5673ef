"""Dropout (Srivastava et al. 2014; paper section A.2) that is fast on a CPU.

There torch draws one double for every element, one after the other, which takes longer than the
matrix product before it. Sixteen random bits an element are as good and four times as fast: the
probability is rounded to a multiple of 1/65536 (0.1 becomes 0.100006), and the kept values are
scaled by exactly that, so the mean is preserved. Elsewhere torch's own dropout is used.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

STEPS = 1 << 16


class Dropout(nn.Module):
    """Sets elements to 0 with `probability` while training; scales the others to keep the mean."""

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.probability = probability

    def forward(self, hidden: Tensor) -> Tensor:
        """`hidden`, thinned while training; any shape."""
        if not self.training or self.probability == 0.0:
            return hidden
        if hidden.device.type != "cpu":
            return torch.dropout(hidden, self.probability, train=True)
        mask = keep_mask(hidden.shape, self.probability, hidden.dtype)
        return hidden * mask * keep_scale(self.probability)

    def extra_repr(self) -> str:
        """The probability, for `print(model)`."""
        return f"probability={self.probability}"


def keep_mask(shape: torch.Size, probability: float, dtype: torch.dtype) -> Tensor:
    """Ones of `shape` on the CPU, zeros with `probability`; from torch's default generator.

    In `dtype`, that of the product: converting booleans takes longer than the product itself.
    """
    count = math.prod(shape)
    words = torch.empty(-(-count // 4), dtype=torch.int64)
    words.random_(-(1 << 63), None)  # None: all 64 bits, where the default leaves the sign 0
    uniform = words.view(torch.int16)[:count].view(shape)
    ones = torch.empty(shape, dtype=dtype)
    return torch.ge(uniform, round(probability * STEPS) - STEPS // 2, out=ones)


def keep_scale(probability: float) -> float:
    """What kept elements are multiplied with: one over the exact probability of being kept."""
    return STEPS / (STEPS - round(probability * STEPS))
