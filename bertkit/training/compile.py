"""Training with compiled layers (`torch.compile`), for long runs on CUDA.

Dropout, residual, LayerNorm and GELU become a few fused kernels, forward and backward. Only the
layers are compiled: they are most of the work and share their code, so it is compiled once and not
once per layer. Matrix products and attention stay the library's own kernels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from bertkit.errors import BertkitError
from bertkit.model.encoder import Encoder
from bertkit.pretraining_data.buckets import on_rounded_batches

SHAPES = 64
"""How often torch may compile the same code: a handful of shapes in each phase, and the last layer
apart, which computes chosen rows. Beyond that it would go on without compiled code."""


def compile_layers(encoder: Encoder, objective: Any, device: torch.device) -> Any:
    """Compile the layers of an encoder in place; names and values of parameters stay.

    Code is made for exact shapes (`dynamic=False`), so batches are rounded up to a few. The first
    update of a shape waits for the compiler.

    Args:
        encoder: to be trained.
        objective: (model, `PretrainingBatch`) → sums, of a model with that encoder.
        device: where it is trained.

    Returns:
        The objective on rounded batches, for `train_steps`.

    Raises:
        BertkitError: the device is not CUDA.
    """
    if device.type != "cuda":
        raise BertkitError(f"compiled training is for CUDA devices; leave it off for {device}")
    import torch._dynamo

    torch._dynamo.config.recompile_limit = SHAPES
    for layer in encoder.layers:
        compile_in_training(layer)
    return on_rounded_batches(objective, encoder.config.max_position_embeddings)


def compile_in_training(layer: nn.Module, **options: Any) -> None:
    """Give a layer compiled code that runs while it is in training mode.

    In evaluation it runs as it is written: batches of many shapes would all be compiled.

    Args:
        layer: is changed.
        options: of `torch.compile`.
    """
    written = layer.forward
    compiled = torch.compile(written, dynamic=False, **options)

    def forward(*inputs: Any) -> Any:
        return (compiled if layer.training else written)(*inputs)

    layer.forward = forward
