"""Encoder layers optimized for inference on a CPU.

Compiled code computes the layers where it is faster (`bertkit.model.native`). Elsewhere
`InferenceLayer` does it with torch's operators: weights are converted once to the layout of
oneDNN's kernels; GELU and the residual sum are fused into the matrix products. There are three
modes, whose hidden states are fp32 in compiled code:

| mode | weights                      | activations                                       |
|------|------------------------------|---------------------------------------------------|
| fp32 | fp32                         | fp32                                              |
| bf16 | bf16                         | bf16                                              |
| int8 | int8, one scale per output   | int8 in products, with one scale per token found  |
|      |                              | dynamically; bf16 in attention (fp32 if the CPU   |
|      |                              | has no bf16), and fp32 elsewhere                  |

In every mode, even in int8, a token's result does not depend on the batch that contains it, but for
the last bits of the projection of factorised embeddings (ALBERT), which torch computes.
"""

from __future__ import annotations

import copy
from typing import Never

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bertkit.errors import BertkitError, check_known
from bertkit.model.attention import self_attention
from bertkit.model.cpu import MODES, has_bf16, has_products
from bertkit.model.encoder import Encoder, Layer, ModelConfig, gelu_form
from bertkit.model.native import (
    GELU_ZERO,
    NativeLayer,
    element_type,
    is_supported,
    quantize_outputs,
)
from bertkit.pretraining_data.batch import Packed
from bertkit.shapes import Hidden, Rows, TargetIndices

BLOCK = 512
"""The number of tokens that the position-wise part processes at a time, so that its working set
stays in the cache and memory is reused instead of allocated again."""

FEW_ROWS, STEP_OF_FEW, ROW_STEP = 64, 8, 32
"""Row counts of products are rounded up to a multiple of 8 up to 64, and of 32 beyond. oneDNN
compiles and keeps code for every row count, half a megabyte for each weight shape: batches of real
texts would produce all counts, and memory would grow for as long as a server runs."""


def prepare_encoder(encoder: Encoder, mode: str) -> None:
    """Replace an encoder's layers by inference layers on the CPU; it can then not be trained.

    The encoder is in evaluation mode and has fp32 weights; the mode is one of `MODES`.

    Raises:
        BertkitError: the mode is unknown, or the processor does not support it.
    """
    check_mode(mode, encoder.config)
    assert not isinstance(encoder.layers, PreparedLayers), "the encoder is prepared already"
    native = is_supported(encoder.config, mode)
    made: dict[int, PreparedLayer] = {}  # a shared layer is prepared once, and again as the last
    layers, remaining = [], encoder.stack
    encoder.layers = nn.ModuleList()  # so that each layer is freed once its replacement is made
    while remaining:
        layer = remaining.pop(0)
        assert isinstance(layer, Layer)
        last = not remaining
        if id(layer) not in made and native:
            made[id(layer)] = NativeLayer(layer, mode)
        elif not native and (last or id(layer) not in made):
            made[id(layer)] = InferenceLayer(layer, mode, torch.float32 if last else None)
        layers.append(made[id(layer)])
    encoder.layers = PreparedLayers(layers)


class PreparedLayers(nn.ModuleList):
    """Layers for inference, whose weights have the layout of this process's libraries."""

    def __reduce__(self) -> Never:
        """Refuse to be pickled or copied."""
        raise TypeError("a model loaded for prediction cannot be copied; load it in each process")


def check_mode(mode: str, config: ModelConfig | None = None) -> None:
    """Raise a BertkitError if a mode is unknown or not supported here, for a network if given."""
    check_known("precision", mode, MODES)
    if mode not in possible_modes(config):
        raise BertkitError(
            "int8 needs a processor with AVX512-VNNI and a torch built with oneDNN, or with AVX2 "
            "and no AVX512, bertkit's compiled code and a network that it supports; choose auto, "
            "fp32 or bf16"
        )


def possible_modes(config: ModelConfig | None = None) -> list[str]:
    """Return the modes that this processor supports, for networks of any shape or a given one."""
    by_torch = has_products() and torch.cpu.get_capabilities().get("avx512_vnni", False)
    compiled = is_supported(config, "int8") if config else element_type("int8") is not None
    return [mode for mode in MODES if mode != "int8" or by_torch or compiled]


def norm(layer: nn.LayerNorm, dtype: torch.dtype) -> nn.LayerNorm:
    """Return a copy of a LayerNorm in another precision, without gradients."""
    return copy.deepcopy(layer).to(dtype).requires_grad_(False)


class InferenceLayer(nn.Module):
    """An encoder layer for inference, without dropout and gradients; see `encoder.Layer`.

    It has a copy of the weights. Without `output_type`, the output has the dtype of the mode.
    """

    def __init__(self, layer: Layer, mode: str, output_type: torch.dtype | None) -> None:
        super().__init__()
        self.config = layer.config
        self.dtype = torch.bfloat16 if mode == "bf16" else torch.float32
        linears = [layer.query_key_value, layer.attention_output, layer.intermediate, layer.output]
        products: list[FloatProduct | Int8Product]
        if mode == "int8":
            attended = torch.bfloat16 if has_bf16() else torch.float32
            products = [Int8Product(linears[0], attended), *map(Int8Product, linears[1:3])]
            products.append(Int8Product(linears[3], after_gelu=True))
        else:
            products = [FloatProduct(linear, self.dtype) for linear in linears]
        self.query_key_value, self.attention_output, self.intermediate, self.output = products
        self.attention_norm = norm(layer.attention_norm, self.dtype)
        self.output_norm = norm(layer.output_norm, self.dtype)
        self.output_type = output_type or self.dtype

    def forward(self, hidden: Hidden, packed: Packed, rows: TargetIndices | None = None) -> Rows:
        """Map (tokens, width) to (tokens, width), or to (rows, width) for the chosen tokens."""
        return self.attend(self.project(hidden), hidden, packed, rows)

    def project(self, hidden: Hidden) -> Tensor:
        """Return (tokens, 3 width): the queries, keys and values of tokens."""
        blocks = torch.split(hidden.to(self.dtype), BLOCK)
        return concatenate([self.query_key_value(round_up_rows(x))[: len(x)] for x in blocks])

    def attend(
        self, projected: Tensor, hidden: Hidden, packed: Packed, rows: TargetIndices | None
    ) -> Rows:
        """Return the layer's output, given its input and what `project` returned for it."""
        config = self.config
        heads = projected.view(len(projected), 3, config.num_attention_heads, -1)
        attended = self_attention(heads, packed, direction=config.direction).flatten(1)
        if rows is not None:
            attended, hidden = attended.index_select(0, rows), hidden.index_select(0, rows)
        return self.complete(attended, hidden.to(self.dtype))

    def complete(self, attended: Rows, hidden: Rows) -> Rows:
        """Return the output at some tokens, given their attention and the layer's input there."""
        pairs = zip(torch.split(attended, BLOCK), torch.split(hidden, BLOCK), strict=True)
        made = [
            self.after_attention(round_up_rows(a), round_up_rows(h))[: len(a)] for a, h in pairs
        ]
        return concatenate(made).to(self.output_type)

    def after_attention(self, attended: Tensor, hidden: Tensor) -> Tensor:
        """Compute the position-wise part of the layer, which follows attention: (rows, width)."""
        hidden = self.attention_norm(self.attention_output(attended, residual=hidden))
        expanded = self.intermediate(hidden, gelu=gelu_form(self.config))
        return self.output_norm(self.output(expanded, residual=hidden))


PreparedLayer = InferenceLayer | NativeLayer


class SingleQuery:
    """Attention in which one token of each sequence looks at all, for a last layer in fp32.

    A score is q (W_k x + b_k) = (q W_k) x + q b_k, whose last term is the same for all tokens, and
    the result is W_v (sum of weights * x) + b_v. So keys and values are computed for no token, only
    two products for each query: a fifteenth of the work for a sentence of fifteen tokens.
    """

    def __init__(self, layer: Layer) -> None:
        linear, self.heads = layer.query_key_value, layer.config.num_attention_heads
        assert linear.bias is not None
        self.query, key, value = linear.weight.detach().chunk(3)
        self.query_bias, _, self.value_bias = linear.bias.detach().chunk(3)
        self.key = key.view(self.heads, -1, key.shape[1])  # (heads, head width, width)
        self.value = value.view(self.key.shape).transpose(1, 2)  # (heads, width, head width)

    def __call__(self, hidden: Tensor, queries: Rows) -> Rows:
        """Return (sequences, width): the attention of `queries` to the tokens of their sequence.

        `hidden` is the layer's input, (sequences, length, width), and `queries` its rows at the
        tokens that attend, (sequences, width).
        """
        sequences, width = queries.shape
        query = F.linear(queries, self.query, self.query_bias).view(sequences, self.heads, -1)
        asked = torch.bmm(query.transpose(0, 1), self.key).transpose(0, 1)  # (.., heads, width)
        scale = (width // self.heads) ** -0.5
        weights = (torch.bmm(asked, hidden.transpose(1, 2)) * scale).softmax(dim=-1)
        mixed = torch.bmm(weights, hidden).transpose(0, 1)  # (heads, sequences, width)
        attended = torch.bmm(mixed, self.value).transpose(0, 1).reshape(sequences, width)
        return attended + self.value_bias


def concatenate(parts: list[Tensor]) -> Tensor:
    """Concatenate tensors along their first dimension, without a copy if there is only one."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def round_up_rows(rows: Tensor) -> Tensor:
    """Append rows of zeros to (rows, width), so that few different row counts occur."""
    step = STEP_OF_FEW if len(rows) <= FEW_ROWS else ROW_STEP
    missing = -len(rows) % step
    return F.pad(rows, (0, 0, 0, missing)) if missing else rows


class FloatProduct:
    """A matrix product in fp32 or bf16, with GELU or the residual sum fused if possible."""

    def __init__(self, linear: nn.Linear, dtype: torch.dtype) -> None:
        assert linear.bias is not None
        weight = linear.weight.detach().to(dtype).contiguous()
        self.bias = linear.bias.detach().to(dtype)
        self.fused = has_products(dtype)
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight) if self.fused else weight

    def __call__(
        self, x: Tensor, *, gelu: str | None = None, residual: Tensor | None = None
    ) -> Tensor:
        """Return (rows, outputs), followed by GELU ("none": with erf, or "tanh") or a sum."""
        if not self.fused:
            y = F.linear(x, self.weight, self.bias)
            return product_epilogue(y, gelu, residual)
        if residual is not None:
            return torch.ops.mkldnn._linear_pointwise.binary(
                x, residual, self.weight, self.bias, "add"
            )
        operation = "none" if gelu is None else "gelu"
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, operation, [], gelu)


def product_epilogue(y: Tensor, gelu: str | None, residual: Tensor | None) -> Tensor:
    """Apply what follows a product: a GELU, a residual sum, or nothing."""
    if residual is not None:
        return y.add_(residual)
    return y if gelu is None else F.gelu(y, approximate=gelu)


class Int8Product:
    """A matrix product computed in 8-bit integers, with floating-point input and output.

    With w = sw * qw for each output and x = sx * (qx - zero) for each token, x w + b is
    sx * sw * (qx - zero) qw + b, where the product of integers is exact.
    """

    def __init__(
        self, linear: nn.Linear, dtype: torch.dtype = torch.float32, *, after_gelu: bool = False
    ) -> None:
        assert linear.bias is not None
        weight = linear.weight.detach().float()
        self.dtype, self.after_gelu = dtype, after_gelu
        integers, self.scales = quantize_outputs(weight)
        integers = integers.to(torch.int8).contiguous()
        self.weight = torch.ops.onednn.qlinear_prepack(integers, None)
        self.zeros = torch.zeros(len(weight), dtype=torch.int32, device="cpu")
        self.bias = linear.bias.detach().float()

    def __call__(
        self, x: Tensor, *, gelu: str | None = None, residual: Tensor | None = None
    ) -> Tensor:
        """See `FloatProduct`."""
        integers, scales, zero = quantize(x, after_gelu=self.after_gelu)
        y = torch.ops.onednn.qlinear_pointwise(
            integers, 1.0, zero, self.weight, self.scales, self.zeros, None,
            1.0, 0, torch.float32, "none", [], "",
        )  # fmt: skip
        torch.addcmul(self.bias, y, scales, out=y)
        return product_epilogue(y, gelu, residual).to(self.dtype)


def quantize(x: Tensor, *, after_gelu: bool) -> tuple[Tensor, Tensor, int]:
    """Quantize each row to 8-bit integers, so that x is about scale * (integers - zero).

    If x, (rows, inputs), is the output of a GELU, few negative values are needed.

    Returns:
        The (rows, inputs) uint8 integers, the (rows, 1) scales, and the zero point.
    """
    x = x.float()  # bf16 has too little precision for 255 steps
    if after_gelu:
        zero = GELU_ZERO
        above, below = x.amax(dim=1, keepdim=True), x.amin(dim=1, keepdim=True)
        scales = torch.maximum(above / (255 - zero), below / -zero)
    else:
        zero = 128
        scales = x.abs().amax(dim=1, keepdim=True) / 127
    scales.clamp_min_(1e-12)  # a row may be all zeros
    shifted = (x * scales.reciprocal()).add_(zero + 0.5)
    # The detour through int16 is faster: torch has no fast conversion from float to uint8.
    return shifted.to(torch.int16).to(torch.uint8), scales, zero
