"""Fast kernels behind one door: attention, residual sums, dropout, and layers for inference.

`encoder.py` calls these functions and does not know which kernel computes them: compiled code
(`compiled`, `layers`), Triton (`triton_kernels`) or torch's operators.

Attention (Vaswani et al. 2017, section 3.2.1) is the only part of the encoder's layers
that reads sequence boundaries, and padding exists only inside a kernel.

| kernel    | used for                        | method                                        |
|-----------|---------------------------------|-----------------------------------------------|
| compiled  | CPU, x86-64                     | native.c, a sequence and a head at a time      |
| grouped   | CPU otherwise                   | one call of torch per run of equal lengths     |
| triton    | CUDA on Hopper, 16 bits, heads  | `triton_kernels`                              |
|           | of 16, 32 or 64                 |                                               |
| flash     | CUDA since Ampere, 16 bits,     | torch's flash attention on the packed tokens  |
|           | heads of 8, 16, ... or 256      |                                               |
| padded    | everything else                 | pads query, key, value; masks the padded keys |
"""

from __future__ import annotations

import os
import shutil
import sysconfig
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Never, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from bertkit.errors import BertkitError, check_known
from bertkit.model.native.compiled import (
    MODES,
    AddNorm,
    CompiledAttention,
    has_bf16,
    has_compiled_attention,
    has_compiled_steps,
    keep_mask,
    keep_scale,
)
from bertkit.model.native.layers import NativeLayer, element_type, is_supported
from bertkit.pretraining_data.batch import Heads, Packed

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


def has_triton() -> bool:
    """Return whether Triton can compile kernels: it needs a C compiler and Python's headers."""
    if torch.version.cuda is None or find_spec("triton") is None:
        return False
    compiler = os.environ.get("CC") or any(map(shutil.which, ("cc", "gcc", "clang")))
    return bool(compiler) and Path(sysconfig.get_path("include"), "Python.h").is_file()


HAS_TRITON = has_triton()
if HAS_TRITON:
    from bertkit.model.native.triton_kernels import WIDTHS, dropout_mask, packed_attention

FLASH_ARGUMENTS = (
    *("query", "key", "value", "cum_seq_q", "cum_seq_k", "max_q", "max_k"),
    *("dropout_p", "is_causal", "return_debug_mask"),
)
"""The first arguments of torch's operator for flash attention on packed tokens, in their order.

The operator is private, because torch's public functions for packed tokens have no dropout
(`varlen_attn`, `flex_attention`) or wrap this one (jagged nested tensors)."""


def attention(projected: Tensor, packed: Packed, *, causal: bool, dropout: float = 0.0) -> Heads:
    """Return softmax(query key^T / sqrt(head width)) value, computed within each sequence.

    Args:
        projected: (tokens, 3, heads, head width) queries, keys and values.
        packed: the batch, which holds the sequence boundaries.
        causal: whether a token sees only itself and the tokens before it in its sequence.
        dropout: the probability of setting an attention weight to 0; pass 0 for evaluation.
    """
    return KERNELS[choose_kernel(projected)](projected, packed, causal, dropout)


def has_flash() -> bool:
    """Return whether this torch has flash attention, with the arguments that `flash` passes."""
    operator = getattr(torch.ops.aten, "_flash_attention_forward", None)
    built = torch.version.cuda is None or torch.backends.cuda.is_flash_attention_available()
    if operator is None or not built:
        return False
    names = tuple(argument.name for argument in operator.default._schema.arguments)
    return names[: len(FLASH_ARGUMENTS)] == FLASH_ARGUMENTS


HAS_FLASH = has_flash()
"""Determined at import, because compiled layers cannot read an operator's schema."""


def choose_kernel(query: Tensor) -> str:
    """Return the name of the fastest kernel for tensors like this one, (..., head width)."""
    if query.device.type == "cpu":
        return "compiled" if has_compiled_attention(query) else "grouped"
    if query.device.type != "cuda" or query.dtype not in (torch.float16, torch.bfloat16):
        return "padded"
    major, _ = torch.cuda.get_device_capability(query.device)
    if HAS_TRITON and major == 9 and query.shape[-1] in WIDTHS:
        return "triton"
    flash = HAS_FLASH and major >= 8 and query.shape[-1] % 8 == 0 and query.shape[-1] <= 256
    return "flash" if flash else "padded"


def grouped(projected: Tensor, packed: Packed, causal: bool, dropout: float) -> Heads:
    """Compute attention with one call of torch for each run of sequences of one length.

    The tensors are split, not sliced: the gradient of `split` is one concatenation, whereas every
    slice would have a full-size tensor of zeros as its gradient.
    """
    runs = packed.equal_lengths
    parts = torch.split(projected, [run.sequences * run.length for run in runs])
    outputs = []
    for run, part in zip(runs, parts, strict=True):
        q, k, v = part.view(*run, *part.shape[1:]).permute(2, 0, 3, 1, 4).unbind()
        output = scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=causal)
        outputs.append(output.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs)


def flash(projected: Tensor, packed: Packed, causal: bool, dropout: float) -> Heads:
    """Compute flash attention on packed tokens (CUDA, fp16 or bf16).

    The state of dropout's random numbers stays on the device and follows `torch.manual_seed`.
    """
    output: Tensor = torch.ops.aten._flash_attention_forward(
        *projected.unbind(1),
        *(packed.cu_seqlens, packed.cu_seqlens, packed.max_seqlen, packed.max_seqlen),
        *(dropout, causal, False),
    )[0]
    return output


def triton(projected: Tensor, packed: Packed, causal: bool, dropout: float) -> Heads:
    """Compute attention by bertkit's own kernels (CUDA on Hopper, fp16 or bf16)."""
    boundaries, longest = packed.cu_seqlens, packed.max_seqlen
    output: Tensor = packed_attention(projected, boundaries, longest, causal, dropout)[0]
    return output


def padding(packed: Packed) -> tuple[Tensor | None, Tensor | None]:
    """Return where tokens lie in a padded batch, and which of its keys are real; cached.

    Nothing here waits for the device: shapes come from `max_seqlen` and the sizes of tensors.

    Returns:
        (tokens,) indices and a (sequences, 1, 1, length) mask; None for both without padding.
    """
    # compiled code would be compiled again for a cache that is filled
    cache = {} if torch.compiler.is_compiling() else packed.attention_cache
    if "padding" in cache:
        return cache["padding"]
    count, longest, tokens = len(packed.cu_seqlens) - 1, packed.max_seqlen, len(packed.ids)
    cache["padding"] = None, None
    if count * longest > tokens:
        lengths = packed.cu_seqlens.diff()
        real = torch.arange(longest, device=lengths.device) < lengths[:, None]
        cache["padding"] = packed.owners * longest + packed.position_ids, real[:, None, None, :]
    return cache["padding"]


def pad_rows(rows: Tensor, inside: Tensor | None, sequences: int, max_length: int) -> Tensor:
    """Return (tokens, heads, head width) rows as (sequences, heads, max_length, head width).

    `inside` is what `padding` returns; the rest is filled with zeros.
    """
    if inside is not None:
        empty = rows.new_zeros(sequences * max_length, *rows.shape[1:])
        rows = empty.index_copy(0, inside, rows)
    return rows.view(sequences, max_length, *rows.shape[1:]).transpose(1, 2)


def padded(projected: Tensor, packed: Packed, causal: bool, dropout: float) -> Heads:
    """Pad to (sequences, heads, max length, width), attend, and remove the padding again."""
    sequences, max_length = len(packed.cu_seqlens) - 1, packed.max_seqlen
    inside, mask = padding(packed)
    if causal:
        mask = None  # all padded keys come after a real query
    elif mask is not None:
        mask = mask.expand(-1, 1, max_length, -1)
    q, k, v = (pad_rows(rows, inside, sequences, max_length) for rows in projected.unbind(1))
    output = scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal
    )
    rows_out = output.transpose(1, 2).flatten(0, 1)
    return rows_out if inside is None else rows_out.index_select(0, inside)


KERNELS: dict[str, Callable[[Tensor, Packed, bool, float], Heads]] = {
    "compiled": CompiledAttention.apply,
    "grouped": grouped,
    "triton": triton,
    "flash": flash,
    "padded": padded,
}


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
