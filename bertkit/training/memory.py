"""Batches that do not fit into a device's memory: training names them, prediction divides them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from bertkit.errors import BertkitError
from bertkit.pretraining_data.batch import Packed

BatchOutput = TypeVar("BatchOutput")

OUT_OF_MEMORY = "out-of-memory"
"""The code of the errors about a batch that did not fit."""
FAILED_ALLOCATION = ("out of memory", "STATUS_ALLOC_FAILED")
"""What CUDA, Apple's MPS, cuBLAS and cuDNN say when an allocation fails."""


def lacks_memory(error: BaseException) -> bool:
    """Return whether an error says that a GPU has too little free memory."""
    if not isinstance(error, RuntimeError):
        return False
    return isinstance(error, torch.OutOfMemoryError) or any(
        words in str(error) for words in FAILED_ALLOCATION
    )


def batch_too_large(packed: Packed, advice: Callable[[Sequence[int]], str]) -> BertkitError:
    """Return the error that names a batch which does not fit, with advice for its lengths."""
    sizes = packed.lengths
    return BertkitError(
        f"the device has too little free memory for a batch of {len(sizes):,} sequences with "
        f"{sum(sizes):,} tokens, the longest of {max(sizes):,}; {advice(sizes)}",
        code=OUT_OF_MEMORY,
    )


def in_halves(
    compute: Callable[[Any], BatchOutput],
    inputs: Sequence[Any],
    tokens: Callable[[Any], int] = lambda part: int(part.tokens),
) -> list[BatchOutput]:
    """Compute a batch, or its halves one after the other if the device has too little memory.

    It is for batches without gradients, whose outputs do not depend on how inputs are distributed.
    `compute` gets the inputs or a slice of them, and its outputs are returned in order: one if the
    whole batch fits. `tokens` gives the number of tokens of an input, for the error.

    Raises:
        BertkitError: one input alone does not fit (code "out-of-memory").
    """
    try:
        return [compute(inputs)]
    except RuntimeError as error:
        if not lacks_memory(error):
            raise
        if len(inputs) == 1:
            raise BertkitError(
                f"the device has too little free memory for one input of {tokens(inputs[0]):,} "
                "tokens; try shorter inputs, a smaller model, or --device cpu",
                code=OUT_OF_MEMORY,
            ) from error
    # outside of `except`, where the error would keep the tensors of the failed batch
    middle = len(inputs) // 2
    return [
        output
        for half in (inputs[:middle], inputs[middle:])
        for output in in_halves(compute, half, tokens)
    ]
