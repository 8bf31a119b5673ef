"""The compiled code (native.c): loading, what it supports on this processor, and calls.

It is compiled when bertkit is installed, if there is a C compiler (hatch_build.py), once for AVX512
and once for AVX2. Without it torch's operators compute the same, more slowly.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bertkit.tokenizer.compiled import compiled_library

SOURCE = Path(__file__).with_name("native.c")
NATIVE_LIBRARIES = {"avx512": {"avx512_dq"}, "avx2": {"avx2", "fma3"}}
"""The names of the sets of instructions for which the code is compiled, the fastest first, and what
the processor needs for each, by torch's names."""
MODES = ("fp32", "bf16", "int8")
"""What matrix products of inference are computed in, in the order of native.c."""
SIZES = (
    *("layer_bytes", "parts_bytes", "attention_bytes"),
    *("panel", "element_size", "rows_of_a_part", "tiles"),
)
"""The functions of the compiled code that return a number."""
C_NUMBERS = {int: ctypes.c_int64, float: ctypes.c_double}
ELEMENTS_PER_THREAD = 1 << 14
"""The minimum number of elements of a step for which another thread pays off."""


@cache
def library() -> ctypes.CDLL | None:
    """Return the compiled code for this processor; None if it was not built from native.c as it is.

    The environment variable BERTKIT_NATIVE=0 switches it off, and BERTKIT_NATIVE=avx2 or avx512
    names the instructions to use; otherwise these are AVX512 with AMX, if the processor has it.
    """
    chosen, able = os.environ.get("BERTKIT_NATIVE", "1"), torch.cpu.get_capabilities()
    for name, needed in NATIVE_LIBRARIES.items():
        if chosen in ("1", name) and all(map(able.get, needed)):
            code = compiled_library(SOURCE, name)
            if code is not None:
                for function in SIZES:
                    getattr(code, f"bertkit_{function}").restype = ctypes.c_int64
                code.bertkit_use_tiles(ctypes.c_int64(chosen == "1"))
                return code
    return None


def compiled() -> ctypes.CDLL:
    """Return the compiled code, where it is known to be there."""
    code = library()
    assert code is not None
    return code


def uses_tiles() -> bool:
    """Return whether compiled products use AMX."""
    code = library()
    return bool(code and code.bertkit_tiles())


def element_size(mode: str) -> int:
    """Return the bytes of an element in compiled products of a mode, 0 if there are none."""
    code = library()
    return code.bertkit_element_size(ctypes.c_int64(MODES.index(mode))) if code else 0


@cache
def step_types() -> dict[tuple[torch.dtype, torch.dtype], tuple[int, int]]:
    """Return the dtypes of activations and residual sums of compiled training steps.

    The values are native.c's names for them; without the compiled code there are none.
    """
    code, fp32, bf16 = library(), torch.float32, torch.bfloat16
    if code is None:
        return {}
    if not element_size("bf16") or not torch.cpu.get_capabilities().get("avx512_bf16"):
        return {(fp32, fp32): (0, 0)}
    return {(fp32, fp32): (0, 0), (bf16, fp32): (1, 0), (bf16, bf16): (1, 1)}


def has_bf16() -> bool:
    """Return whether the CPU multiplies bf16 matrices (AVX512-BF16 or AMX; Arm is untested)."""
    able = torch.cpu.get_capabilities()
    return bool(able.get("avx512_bf16") or able.get("amx_bf16"))


def call_compiled(name: str, *arguments: Any) -> None:
    """Call a function of the compiled code; tensors and numbers become pointers and 64 bits."""

    def converted(argument: Any) -> Any:
        if isinstance(argument, Tensor):
            return ctypes.c_void_p(argument.data_ptr())
        kind = C_NUMBERS.get(type(argument))
        return kind(argument) if kind else argument  # ctypes passes None as a null pointer

    getattr(compiled(), f"bertkit_{name}")(*map(converted, arguments))


def threads_for(count: int, least: int = ELEMENTS_PER_THREAD) -> int:
    """Return the number of threads, at most torch's, that have at least `least` of a count each."""
    return min(torch.get_num_threads(), max(1, count // least))
