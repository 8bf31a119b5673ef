"""Encoder layers for inference in compiled code (native.c), for x86-64 with AVX512 or AVX2.

With AVX2 they are computed in fp32 and int8 only. The code is compiled when bertkit is installed,
if there is a C compiler (hatch_build.py). Without it, and on other processors,
`bertkit.model.encoder.Layer` computes the same with torch's operators.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bertkit.model.native.compiled import (
    MODES,
    call_compiled,
    compiled,
    element_size,
    threads_for,
    uses_tiles,
)
from bertkit.pretraining_data.batch import Hidden, Packed, Rows, TargetIndices

if TYPE_CHECKING:
    from bertkit.model.encoder import Layer, ModelConfig

ELEMENT_TYPES = {
    ("fp32", 4): torch.float32,
    ("bf16", 2): torch.bfloat16,
    ("int8", 1): torch.int8,
    ("int8", 2): torch.int16,
}
"""The types that native.c multiplies, by mode and bytes."""
NEEDED = {torch.bfloat16: "avx512_bf16", torch.int8: "avx512_vnni"}
"""The CPU feature that products of a type need, beyond those of the library."""
LARGEST_WEIGHTS = {torch.int8: 127, torch.int16: 511}
"""The largest integer of a weight, by the type in which native.c multiplies integers."""
MOST_INPUTS = 4096
"""For more inputs, sums of products of 16-bit integers might exceed 32 bits."""
ZERO, GELU_ZERO = 128, 16
"""The zero points of 8-bit integers, which native.c has, too."""
HEAD_WIDTH_STEP, MAX_HEAD_WIDTH = 16, 256
"""The width of a head must be a multiple of the first and at most the second."""
ROWS_PER_THREAD = 8
"""The minimum number of rows for which another thread pays off."""


def fields_of(kind: type[Any], *names: str) -> list[tuple[str, type[Any]]]:
    """Return the members of a struct that have the same type."""
    return [(name, kind) for name in names]


class ProductStruct(ctypes.Structure):
    """The weights of a matrix product, as native.c lays them out."""

    _fields_ = (
        *fields_of(ctypes.c_void_p, "weight", "bias", "scale", "shift"),
        *fields_of(ctypes.c_int64, "inputs", "outputs"),
    )


class LayerStruct(ctypes.Structure):
    """A layer; see native.c."""

    _fields_ = (
        *fields_of(ctypes.c_int64, "mode", "attention_mode", "heads", "head_width"),
        *fields_of(ctypes.c_int64, "direction", "gelu_tanh"),
        *fields_of(ProductStruct, "query_key_value", "attention_output", "intermediate", "output"),
        *fields_of(ctypes.c_void_p * 2, "attention_norm", "output_norm"),
        ("epsilon", ctypes.c_double),
    )


class BatchStruct(ctypes.Structure):
    """A batch; see native.c."""

    _fields_ = (
        *fields_of(ctypes.c_void_p, "hidden", "boundaries", "rows", "projected", "out"),
        *fields_of(ctypes.c_int64, "sequences", "count"),
    )


def element_type(mode: str) -> torch.dtype | None:
    """Return the type that compiled products multiply in a mode; None if there are none here."""
    element, able = ELEMENT_TYPES.get((mode, element_size(mode))), torch.cpu.get_capabilities()
    return element if element not in NEEDED or able.get(NEEDED[element]) else None


def is_supported(config: ModelConfig, precision: str) -> bool:
    """Return whether the compiled code computes layers of this shape here, and is the fastest."""
    width, kind = config.hidden_size // config.num_attention_heads, element_type(precision)
    inputs = max(config.hidden_size, config.intermediate_size)
    only_torch_has_amx = torch.cpu.get_capabilities().get("amx_bf16") and not uses_tiles()
    return (
        kind is not None
        and not (kind == torch.bfloat16 and only_torch_has_amx)
        and width % HEAD_WIDTH_STEP == 0
        and width <= MAX_HEAD_WIDTH
        and config.intermediate_size % HEAD_WIDTH_STEP == 0
        and (kind != torch.int16 or inputs <= MOST_INPUTS)
    )


def quantize_outputs(weight: Tensor, largest: int = 127) -> tuple[Tensor, Tensor]:
    """Return (outputs, inputs) whole numbers up to the largest, and their (outputs,) scales."""
    scales = weight.abs().amax(dim=1).clamp_min(1e-12) / largest
    return (weight / scales[:, None]).round_(), scales


WORKSPACES = threading.local()
"""Its attribute `workspace` is the memory in which this thread's last layer was computed."""


def workspace(size: int) -> Tensor:
    """Return at least `size` bytes, which a thread keeps: new memory arrives page by page."""
    if not hasattr(WORKSPACES, "workspace") or len(WORKSPACES.workspace) < size:
        WORKSPACES.workspace = torch.empty(size, dtype=torch.uint8, device="cpu")
    return WORKSPACES.workspace


class NativeLayer(nn.Module):
    """An encoder layer for inference in compiled code; see `encoder.Layer`.

    A token's result is the same, bit for bit, whatever else is in the batch and however many
    threads compute it.

    Args:
        layer: the layer whose weights are copied, of a shape that `is_supported`.
        precision: "fp32", "bf16" or "int8"; see native.c.
    """

    def __init__(self, layer: Layer, precision: str) -> None:
        super().__init__()
        config = layer.config
        bf16 = precision != "fp32" and element_type("bf16") is not None
        mode = element_type(precision)
        assert mode is not None, "the layer is not supported"
        self.projected_type = torch.bfloat16 if bf16 else torch.float32
        self.tensors: list[Tensor] = []  # what the struct points to
        self.width = config.hidden_size
        self.struct = LayerStruct(
            mode=MODES.index(precision),
            attention_mode=int(bf16),
            heads=config.num_attention_heads,
            head_width=config.hidden_size // config.num_attention_heads,
            direction=-int(config.direction == "left_to_right"),
            gelu_tanh=config.hidden_act == "gelu_tanh",
            query_key_value=self._product(layer.query_key_value, mode),
            attention_output=self._product(layer.attention_output, mode),
            intermediate=self._product(layer.intermediate, mode),
            output=self._product(layer.output, mode, GELU_ZERO),
            attention_norm=self._norm(layer.attention_norm),
            output_norm=self._norm(layer.output_norm),
            epsilon=config.layer_norm_eps,
        )

    def _keep(self, tensor: Tensor) -> int:
        """Keep a tensor for as long as the layer, and return its address."""
        self.tensors.append(tensor.detach().contiguous())
        return self.tensors[-1].data_ptr()

    def _norm(self, norm: nn.LayerNorm) -> ctypes.Array[ctypes.c_void_p]:
        return (ctypes.c_void_p * 2)(
            *(self._keep(t.float().clone()) for t in (norm.weight, norm.bias))
        )

    def _product(self, linear: nn.Linear, mode: torch.dtype, zero: int = ZERO) -> ProductStruct:
        """Return a product, whose outputs are padded to whole panels."""
        weight = linear.weight.detach().float()
        code = compiled()
        (outputs, inputs), group, size = weight.shape, 4 // mode.itemsize, code.bertkit_panel()
        missing = -outputs % size
        panels = torch.zeros(
            (outputs + missing) // size, inputs // group, size, group, dtype=mode, device="cpu"
        )
        product = ProductStruct(inputs=inputs, outputs=outputs, weight=self._keep(panels))
        product.bias = self._keep(F.pad(linear.bias.float(), (0, missing)))
        if mode in LARGEST_WEIGHTS:
            weight, scales = quantize_outputs(weight, LARGEST_WEIGHTS[mode])
            product.scale = self._keep(F.pad(scales, (0, missing)))
        if mode == torch.int8:
            sums = weight.sum(dim=1).to(torch.int32) * zero
            product.shift = self._keep(F.pad(sums, (0, missing)))
        for panel, rows in zip(panels, torch.split(weight, size), strict=True):
            panel[:, : len(rows)].copy_(rows.view(len(rows), -1, group).transpose(0, 1))
        return product

    def forward(self, hidden: Hidden, packed: Packed, rows: TargetIndices | None = None) -> Rows:
        """Map (tokens, width) to (tokens, width), or to (rows, width) for the chosen tokens."""
        return self.run_stack([self], hidden, packed, rows)

    @staticmethod
    def run_stack(
        stack: Sequence[NativeLayer],
        hidden: Hidden,
        packed: Packed,
        rows: TargetIndices | None,
        projected: Tensor | None = None,
    ) -> Rows:
        """Run hidden states through layers, and return the chosen rows of the last one's output.

        For one short text, preparing a call takes as long as a part of a layer, so most of it is
        done once for all layers (see `encoder.run_layers`).

        `hidden` is (tokens, width), the first layer's input; `rows` are (rows,) indices of tokens;
        `projected` is what `project` returned for the only layer.
        """
        code, hidden = compiled(), hidden.float().contiguous()
        tokens, boundaries = len(hidden), packed.cu_seqlens.to(torch.int32).contiguous()
        rows = None if rows is None else rows.long().contiguous()
        batch = BatchStruct(boundaries=boundaries.data_ptr(), sequences=len(boundaries) - 1)
        batch.projected = None if projected is None else projected.data_ptr()
        batch.count = tokens
        threads = ctypes.c_int64(threads_for(tokens, ROWS_PER_THREAD))
        for number, layer in enumerate(stack, 1):
            if rows is not None and number == len(stack):
                batch.rows, batch.count = rows.data_ptr(), len(rows)
            out = hidden.new_empty(batch.count, layer.width)
            if not batch.count:
                return out
            batch.hidden, batch.out = hidden.data_ptr(), out.data_ptr()
            arguments = ctypes.byref(layer.struct), ctypes.byref(batch), threads
            memory = workspace(code.bertkit_layer_bytes(*arguments))
            code.bertkit_layer(*arguments, ctypes.c_void_p(memory.data_ptr()))
            hidden = out
        return hidden

    def attend(
        self, projected: Tensor, hidden: Hidden, packed: Packed, rows: TargetIndices | None
    ) -> Rows:
        """Return the layer's output, given its input and what `project` returned."""
        return self.run_stack([self], hidden, packed, rows, projected)

    def project(self, hidden: Hidden) -> Tensor:
        """Return (tokens, 3 width): the queries, keys and values of tokens."""
        hidden = hidden.float().contiguous()
        projected = hidden.new_empty(len(hidden), 3 * self.width, dtype=self.projected_type)
        self._call("project", hidden, len(hidden), projected)
        return projected

    def complete(self, attended: Rows, hidden: Rows) -> Rows:
        """Return the output at some tokens, given their attention and the layer's input there."""
        attended, hidden = attended.float().contiguous(), hidden.float().contiguous()
        out = torch.empty_like(hidden)
        self._call("complete", attended, hidden, len(hidden), out)
        return out

    def _call(self, name: str, *arguments: Tensor | int) -> None:
        """Call a function with the layer, the arguments and memory to work in."""
        layer = ctypes.byref(self.struct)
        memory = workspace(compiled().bertkit_parts_bytes(layer))
        call_compiled(name, layer, *arguments, memory)
