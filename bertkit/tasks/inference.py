"""Inference: one function that runs any network on any sequences (`run_model`).

Sequences are sorted by length, so that a batch has similar lengths, and packed by a token budget; a
batch that does not fit into a GPU's memory is halved. On a CPU, each thread computes batches of its
own if there are enough of them; on a GPU, a batch is read back after the next one is launched.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bertkit.errors import NOT_FINITE, BertkitError
from bertkit.model.encoder import Encoder
from bertkit.model.native import PreparedLayers, check_mode, prepare_encoder
from bertkit.model.outputs import ClassificationModel
from bertkit.tasks.task import ItemPart, Items, TaskBatch, make_batch, split_parts
from bertkit.training.device import autocast, choose_precision, in_halves

CPU_TOKENS, GPU_TOKENS = 8192, 65_536
"""The maximum tokens of a batch without gradients; only large batches keep a GPU busy."""
THREAD_TOKENS = 2048  # the maximum tokens of a batch if every thread computes separate batches
BATCHES_PER_THREAD = 4
"""The desired number of batches per thread, so that all threads finish at about the same time."""
LEAST_TOKENS = 400  # the minimum tokens of a batch for which a separate thread pays off

thread_state = threading.local()
"""Its attribute `threads` is the argument of this thread's last call of `compute_with`."""


def run_model(
    forward: Callable[[TaskBatch], Tensor],
    parts: Sequence[ItemPart],
    device: torch.device,
    *,
    per_token: bool,
    precision: str = "fp32",
    threads: int = 1,
    targets: Callable[..., Any] | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> list[np.ndarray]:
    """Return a network's outputs for every part, in the order of the parts: fp32 arrays.

    Args:
        forward: the network; it returns rows for a batch, (tokens, ...) or (sequences, ...).
        parts: the sequences that must stay in one batch each.
        device: the device of the network.
        per_token: whether `forward` returns a row per token; such parts have one sequence.
        precision: "fp32", "bf16" or "bf16-residual", for networks that are not prepared.
        threads: the number of threads that `prepare_network` returned.
        targets: makes the tensors of a batch that `forward` needs besides the sequences.
        progress: called with the number of parts done.
    """
    order = sorted(range(len(parts)), key=lambda n: -len(parts[n].sequences[0].ids))
    workers, tokens = shares(sum(part.tokens for part in parts), threads)
    tokens = tokens or (CPU_TOKENS if device.type == "cpu" else GPU_TOKENS)

    @torch.inference_mode()
    def launch(group: list[ItemPart]) -> tuple[HostCopy, TaskBatch, list[ItemPart]]:
        batch = make_batch(group, targets).to(device)
        with autocast(device, precision):
            rows = forward(batch)
        return HostCopy(rows.float()), batch, group

    outputs: list[Any] = [None] * len(parts)
    done = 0
    groups = split_parts([parts[n] for n in order], tokens)
    with batch_map(workers) as each:
        launched = chain.from_iterable(each(partial(in_halves, launch), groups))
        for copy, batch, group in one_ahead(launched, device):
            rows = copy.numpy()
            if not np.isfinite(rows).all():
                raise BertkitError(
                    "the model's output is NaN or infinite: its weights are damaged or so large "
                    "that they overflow; use another checkpoint of the model, or train it again",
                    code=NOT_FINITE,
                )
            for output in split_rows(rows, batch, group, per_token):
                outputs[order[done]] = output
                done += 1
            progress(done)
    return outputs


def run_task(
    model: Any,
    items: Items,
    device: torch.device,
    *,
    precision: str = "fp32",
    threads: int = 1,
    progress: Callable[[int], None] = lambda done: None,
) -> list[list[np.ndarray]]:
    """Return a task network's outputs for every item and part; it is left in evaluation mode."""
    if model.training:  # visiting every module takes as long as a layer for a short text
        model.eval()
    rows = iter(
        run_model(
            lambda batch: model(batch.packed),
            list(items.parts()),
            device,
            per_token=not isinstance(model, ClassificationModel),
            precision=precision,
            threads=threads,
            progress=progress,
        )
    )
    return [[next(rows) for _ in item.parts] for item in items.items]


def split_rows(
    rows: np.ndarray, batch: TaskBatch, parts: Sequence[ItemPart], per_token: bool
) -> Iterator[np.ndarray]:
    """Yield the rows of each part: one per token, or one per sequence."""
    boundaries = np.cumsum([0, *batch.packed.lengths])
    first = 0
    for part in parts:
        indices = batch.packed_index[first : first + len(part.sequences)]
        first += len(part.sequences)
        yield rows[slice(*boundaries[indices[0] : indices[0] + 2])] if per_token else rows[indices]


class HostCopy:
    """A tensor on its way from its device to the host, which need not wait for it."""

    def __init__(self, tensor: Tensor) -> None:
        self.host = tensor.to("cpu", non_blocking=tensor.is_cuda)  # into page-locked memory
        self.done: Any = torch.cuda.Event() if tensor.is_cuda else None  # type: ignore[no-untyped-call]
        if self.done is not None:
            self.done.record()

    def numpy(self) -> np.ndarray:
        """Return the values, after waiting for the copy."""
        if self.done is not None:
            self.done.synchronize()
        return self.host.numpy()


def one_ahead(launched: Iterable[Any], device: torch.device) -> Iterator[Any]:
    """Yield launched batches; on a GPU each one only after the next is launched."""
    waiting: list[Any] = []
    for batch in launched:
        waiting.append(batch)
        if device.type == "cpu" or len(waiting) > 1:
            yield waiting.pop(0)
    yield from waiting


# Devices and threads ------------------------------------------------------------------------------


def choose_mode(name: str, device: torch.device) -> str:
    """Check a precision, and resolve "auto" to bf16 if the device supports it natively, else fp32.

    The others are "fp32", "bf16" and "int8" (CPUs only); "bf16-residual" differs in training only.
    """
    name = name.removesuffix("-residual")
    if device.type == "cpu" and name != "auto":
        check_mode(name)
        return name
    if name == "int8":
        raise BertkitError(f"int8 is for CPUs; choose bf16 or fp32 for {device}")
    return choose_precision(name, device)


def prepare_network(device: torch.device, encoder: Encoder, mode: str) -> int:
    """Prepare an encoder for inference on its device; return the number of threads to use.

    On a CPU its layers are compiled; on a GPU its weights are converted to bf16 once in that mode.
    It can then no longer be trained. A prepared encoder is left as it is.
    """
    if device.type != "cpu":
        encoder.to(torch.bfloat16 if mode == "bf16" else torch.float32)
        return 1
    if not isinstance(encoder.layers, PreparedLayers):
        prepare_encoder(encoder, mode)
    survive_forks()
    return torch.get_num_threads()


@cache
def survive_forks() -> None:
    """Make forked processes compute with one thread; OpenMP's other threads do not exist there."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=partial(torch.set_num_threads, 1))


def shares(tokens: int, threads: int) -> tuple[int, int]:
    """Return the threads that compute separate batches, and the tokens of a batch.

    They are (1, 0) if it is faster that all threads work on the same batch.
    """
    threads = 1 if threads == 1 else getattr(thread_state, "threads", threads)  # 1 on a GPU
    if threads == 1 or tokens < threads * LEAST_TOKENS:
        return 1, 0
    share = tokens // (threads * BATCHES_PER_THREAD)
    return threads, min(THREAD_TOKENS, max(LEAST_TOKENS, share))


@contextmanager
def batch_map(workers: int) -> Iterator[Callable[..., Iterable[Any]]]:
    """Provide a version of `map` over batches: with several workers, each has one torch thread.

    One batch per thread is faster than all threads on one batch, because the threads do not have to
    wait for each other after every operation.
    """
    if workers == 1:
        yield map
        return
    try:
        with ThreadPoolExecutor(workers, initializer=set_threads, initargs=(1,)) as pool:
            yield pool.map
    finally:
        set_threads(workers)  # new threads would inherit the workers' setting


def compute_with(threads: int) -> None:
    """Set the number of threads that torch and `run_model` use in the calling thread."""
    thread_state.threads = threads
    set_threads(threads)


def set_threads(threads: int) -> None:
    """Set the number of threads that torch uses for operations of the calling thread."""
    torch.get_num_threads()  # its first call in a thread adopts the last setting of any thread
    torch.set_num_threads(threads)
