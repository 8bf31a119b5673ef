"""Fast kernels behind one door: attention, residual sums, dropout, and layers for inference.

`encoder.py` calls these functions and does not know which kernel computes them: compiled code
(`compiled`, `layers`), Triton (`triton_kernels`) or torch's operators (`attention`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Never, cast

import torch
from torch import Tensor, nn

from bertkit.errors import BertkitError, check_known
from bertkit.model.native.attention import HAS_TRITON, attention
from bertkit.model.native.compiled import (
    MODES,
    AddNorm,
    has_bf16,
    has_compiled_steps,
    keep_mask,
    keep_scale,
)
from bertkit.model.native.layers import NativeLayer, element_type, is_supported

if HAS_TRITON:
    from bertkit.model.native.triton_kernels import dropout_mask

if TYPE_CHECKING:
    from bertkit.model.encoder import Encoder, Layer, ModelConfig

__all__ = [
    "MODES",
    "Dropout",
    "NativeLayer",
    "PreparedLayers",
    "add_norm",
    "attention",
    "check_mode",
    "has_bf16",
    "possible_modes",
    "prepare_encoder",
]


class Dropout(nn.Module):
    """A dropout layer: in training, elements become 0 with `probability`, others are scaled up."""

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.probability = probability

    def forward(self, hidden: Tensor) -> Tensor:
        """Return `hidden`, of any shape, with dropout applied if the module is in training mode."""
        if not self.training or self.probability == 0.0:
            return hidden
        if hidden.device.type == "cpu":
            mask = keep_mask(hidden.shape, self.probability, hidden.dtype)
            return hidden * mask * keep_scale(self.probability)
        if hidden.is_cuda and HAS_TRITON and torch.compiler.is_compiling():
            return hidden * dropout_mask(hidden, self.probability) / (1 - self.probability)
        return torch.dropout(hidden, self.probability, train=True)

    def extra_repr(self) -> str:
        """Return the probability, for `print(model)`."""
        return f"probability={self.probability}"


def add_norm(x: Tensor, residual: Tensor, norm: nn.LayerNorm, dropout: nn.Module) -> Tensor:
    """Return LayerNorm(dropout(x) + residual), in the dtype of the residual.

    LayerNorm computes its statistics in fp32 even if hidden states are bf16.
    """
    as_made = type(dropout) is Dropout and type(norm) is nn.LayerNorm and not norm._forward_hooks
    fp32 = norm.weight.dtype == torch.float32
    if norm.training and as_made and fp32 and has_compiled_steps(x, residual):
        probability = dropout.probability if dropout.training else 0.0
        y: Tensor = AddNorm.apply(  # type: ignore[no-untyped-call]
            *(x, residual, norm.weight, norm.bias, norm.eps, probability)
        )
        return y
    return norm(dropout(x) + residual).to(residual.dtype)


class PreparedLayers(nn.ModuleList):
    """Layers for inference, whose weights have the layout of this process's libraries."""

    def __reduce__(self) -> Never:
        """Refuse to be pickled or copied."""
        raise TypeError("a model loaded for prediction cannot be copied; load it in each process")


def prepare_encoder(encoder: Encoder, mode: str) -> None:
    """Replace an encoder's layers by compiled ones on the CPU; it can then not be trained.

    The encoder is in evaluation mode and has fp32 weights. Where no compiled code computes its
    layers, they stay as they are, and compute in fp32.

    | mode | weights                    | activations, which are fp32 between products        |
    |------|----------------------------|-----------------------------------------------------|
    | fp32 | fp32                       | fp32                                                |
    | bf16 | bf16                       | bf16                                                |
    | int8 | int8, one scale per output | int8, with one scale per token that is determined   |
    |      |                            | when it is read; bf16 in attention (fp32 if the CPU |
    |      |                            | has no bf16)                                        |

    In every mode a token's result does not depend on the batch that contains it.

    Raises:
        BertkitError: the mode is unknown, or it is int8 and no compiled code computes the layers.
    """
    check_mode(mode, encoder.config)
    if not is_supported(encoder.config, mode):
        return
    made: dict[int, NativeLayer] = {}  # a shared layer is prepared once
    layers, remaining = [], encoder.stack
    encoder.layers = nn.ModuleList()  # so that each layer is freed once its replacement is made
    while remaining:
        layer = remaining.pop(0)
        if id(layer) not in made:
            made[id(layer)] = NativeLayer(cast("Layer", layer), mode)
        layers.append(made[id(layer)])
    encoder.layers = PreparedLayers(layers)


def check_mode(mode: str, config: ModelConfig | None = None) -> None:
    """Raise a BertkitError if a mode is unknown or not supported here, perhaps for a network."""
    check_known("precision", mode, MODES)
    if mode not in possible_modes(config):
        raise BertkitError(
            "int8 needs bertkit's compiled code, a processor with AVX2 or AVX512-VNNI, and heads "
            "whose width is a multiple of 16; choose auto, fp32 or bf16"
        )


def possible_modes(config: ModelConfig | None = None) -> list[str]:
    """Return the modes that this processor supports, for networks of any shape or one config."""
    int8 = is_supported(config, "int8") if config else element_type("int8") is not None
    return [mode for mode in MODES if mode != "int8" or int8]
