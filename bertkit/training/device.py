"""The device and its precision, memory and speed, and the description of a machine."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import RLock
from typing import Any, TypeVar

import torch

from bertkit.errors import BertkitError, check_known, nearest
from bertkit.model.encoder import residual_dtype
from bertkit.model.native.compiled import has_bf16, library, step_types
from bertkit.processes import memory_bytes, usable_cores

BatchOutput = TypeVar("BatchOutput")

DEVICES = ("auto", "cpu", "cuda", "mps")
PRECISIONS = ("fp32", "bf16", "bf16-residual")
"""The precisions of training; see `autocast`."""
OUT_OF_MEMORY = "out-of-memory"
"""The code of the errors about a batch that did not fit into the device's memory."""
FAILED_ALLOCATION = ("out of memory", "STATUS_ALLOC_FAILED")
"""What CUDA, Apple's MPS, cuBLAS and cuDNN say when an allocation fails."""
RANDOM_NUMBERS = RLock()
"""Held by the thread that trains; another one that is to train waits for it."""


def choose_device(name: str | torch.device = "auto") -> torch.device:
    """Return the device called auto (CUDA or MPS if there is one, else the CPU), cuda:N, ...

    Raises:
        BertkitError: the name is unknown (code "device"), or torch cannot use such a device here
            (code "no-device"); the message gives the reason.
    """
    name = str(name)
    kind, colon, number = name.partition(":")
    indexed = number.isdecimal() if kind == "cuda" else name == "mps:0"
    if kind not in DEVICES or (colon and not indexed):
        raise BertkitError(
            f"no device is called '{name}'{nearest(name, (*DEVICES, 'cuda:0'))}", code="device"
        )
    if kind == "auto":
        if has_cuda():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        if kind == "mps" and not torch.backends.mps.is_available():
            raise RuntimeError("this machine has no Apple GPU")
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:  # the latter if torch is built without CUDA
        reason = f"{(str(error).splitlines() or [''])[0].rstrip('.')} (torch {torch.__version__})"
        raise BertkitError(f"device '{name}': {reason}; or choose cpu", code="no-device") from error
    return torch.device(name)


def has_cuda() -> bool:
    """Return whether torch can use a CUDA device, without torch's warning if it cannot."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # `choose_device` gives the reason
        return torch.cuda.is_available()


def choose_precision(name: str, device: torch.device) -> str:
    """Return the precision called `name`; "auto" is bf16 on devices with bf16 instructions."""
    on_cuda = device.type == "cuda"
    check_known("precision", name, (*PRECISIONS, "auto"))
    gpu_bf16 = on_cuda and torch.cuda.is_bf16_supported(including_emulation=False)
    if name == "auto":
        return "bf16" if gpu_bf16 or (device.type == "cpu" and has_bf16()) else "fp32"
    if name != "fp32" and on_cuda and not gpu_bf16:
        card = torch.cuda.get_device_name(device)
        raise BertkitError(f"{card} does not support bf16; choose precision fp32", code="no-bf16")
    return name


@contextmanager
def autocast(device: torch.device, precision: str) -> Iterator[None]:
    """Provide the context in which a network is trained in a precision.

    In "bf16" matrix products are bf16 (torch's autocast), and the hidden states that layers pass on
    are fp32. In "bf16-residual" they are bf16, too, which halves the memory traffic. Weights,
    gradients and the optimizer state are always fp32.
    """
    assert precision in PRECISIONS, precision  # `choose_precision` resolves "auto"
    enabled = precision != "fp32"
    residual = torch.bfloat16 if precision == "bf16-residual" else torch.float32
    with (
        torch.autocast(device.type, dtype=torch.bfloat16, enabled=enabled),
        residual_dtype(residual if enabled else None),
    ):
        yield


def device_notes(device: torch.device, precision: str) -> list[str]:
    """Return notes about what makes a run on this device slow, one line each."""
    if device.type != "cpu":
        return []
    notes, able = [], torch.cpu.get_capabilities()
    if precision != "fp32" and not (has_bf16() or able.get("bf16")):
        notes.append("this CPU has no instructions for bf16 and may be many times faster in fp32")
    if able.get("avx2") and not library() and "BERTKIT_NATIVE" not in os.environ:
        notes.append(
            "bertkit's compiled code is missing, and training is slower without it; install "
            "bertkit again where there is a C compiler"
        )
    return notes


GPU_WORKERS = 4
"""The default number of loader processes of a rank that trains on a GPU."""


def default_workers(device: torch.device) -> int:
    """Return the number of loader processes: 0 on a CPU, and on a GPU what the cores allow."""
    if device.type == "cpu":
        return 0
    each = usable_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(0, min(GPU_WORKERS, each - 1))


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its work; on a CPU this does nothing."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def environment() -> dict[str, Any]:
    """Return the software and hardware of a run as JSON values, without the host's name."""
    packages = ("bertkit", "numpy", "tokenizers", "safetensors")
    gpus = range(torch.cuda.device_count() if has_cuda() else 0)
    return {
        "command": shlex.join(sys.argv),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            **{name: importlib.metadata.version(name) for name in packages},
        },
        "platform": platform.platform(),
        "cpu": cpu_model(),
        "cores": usable_cores(),
        "threads": torch.get_num_threads(),
        "compiled_steps": sorted({str(x).removeprefix("torch.") for x, _ in step_types()}),
        "memory_gib": round((memory_bytes() or 0) / 2**30, 1) or None,
        "devices": [torch.cuda.get_device_name(number) for number in gpus],
        "cuda": torch.version.cuda,
    }


def cpu_model() -> str:
    """Return the processor's name, or its architecture if the system does not report the name."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def lacks_memory(error: BaseException) -> bool:
    """Return whether an error says that a GPU has too little free memory."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in FAILED_ALLOCATION)
    )


def in_halves(
    compute: Callable[[Any], BatchOutput],
    inputs: Sequence[Any],
    tokens: Callable[[Any], int] = lambda part: int(part.tokens),
) -> list[BatchOutput]:
    """Compute a batch without gradients, or its halves if the device has too little memory.

    `compute` takes the inputs or a slice of them; its outputs are returned in order. `tokens` gives
    the number of tokens of an input, for the error about an input that does not fit alone.
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


@contextmanager
def own_random_numbers(device: torch.device) -> Iterator[None]:
    """Lend torch's random numbers, which all threads share, to a block; restore them after it."""
    with RANDOM_NUMBERS, torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield
