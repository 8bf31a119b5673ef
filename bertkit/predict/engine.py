"""Fast inference for every head, in one of three precisions and with batches by token budget.

On a CPU the layers are prepared once (`bertkit.model.inference`). On a GPU the weights are
converted to bf16 once, and a batch is read back after the next one is launched. The inputs of one
call are sorted by length, so that a batch has similar lengths, and outputs are returned in the
order of the inputs. Memory depends on the token budget and on the size of a call, not on the length
of a file: `bertkit predict` reads files in chunks.
"""

from __future__ import annotations

import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import numpy as np
import torch

from bertkit.console import Console
from bertkit.errors import BertkitError
from bertkit.model.encoder import Encoder
from bertkit.model.inference import PreparedLayers, check_mode, prepare_encoder
from bertkit.model.task_heads import TaskModel
from bertkit.tasks.task import Items, run_model
from bertkit.training.device import choose_precision


def choose_mode(name: str, device: torch.device) -> str:
    """Check a precision, and resolve "auto" to bf16 if the device supports it natively, else fp32.

    The others are "fp32", "bf16", "int8" (CPUs only) and "bf16-residual", which differs from "bf16"
    in training only.

    Raises:
        BertkitError: the precision is unknown, or the device does not support it.
    """
    if name == "bf16-residual":
        name = "bf16"
    if device.type == "cpu" and name != "auto":
        check_mode(name)
        return name
    if name == "int8":
        raise BertkitError(f"int8 is for CPUs; choose bf16 or fp32 for {device}")
    return choose_precision(name, device)


THREAD_TOKENS = 2048
"""The maximum number of tokens in a batch if every thread computes separate batches."""
BATCHES_PER_THREAD = 4
"""The desired number of batches per thread, so that all threads finish at about the same time."""
LEAST_TOKENS = 400
"""The minimum number of tokens in a batch for which a separate thread pays off."""


thread_state = threading.local()
"""Its attribute `threads` is the argument of this thread's last call of `compute_with`."""


class Engine:
    """A model with any task head that is prepared for prediction and can no longer be trained.

    It is changed and moved to the device; the mode is a result of `choose_mode`.
    """

    def __init__(self, model: TaskModel, device: torch.device, mode: str) -> None:
        self.model = model.to(device).eval()
        self.device = device
        self.threads = prepare_for(device, self.model.encoder, mode)

    def run(
        self, items: Items, progress: Callable[[int], None] = lambda done: None
    ) -> list[list[np.ndarray]]:
        """Return the outputs for every part, in the order of the items; see `run_model`.

        Raises:
            BertkitError: an output is NaN or infinite.
        """
        with batch_map(items.tokens, self.threads) as (each, tokens):
            return run_model(
                self.model, items, self.device, progress=progress, tokens=tokens, each=each
            )


def prepare_for(device: torch.device, encoder: Encoder, mode: str) -> int:
    """Prepare an encoder for prediction on its device; return the number of threads to use.

    On a CPU its layers are replaced (`bertkit.model.inference`); on a GPU its weights are converted
    to bf16 once in that mode, and hidden states are bf16, too. It can then no longer be trained.
    An encoder that has been prepared already is left as it is.
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
    """Make forked processes compute with one thread.

    OpenMP's other threads do not exist there, and a computation would wait for them for ever.
    """
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=partial(torch.set_num_threads, 1))


def shares(tokens: int, threads: int) -> tuple[int, int]:
    """Decide how to distribute work over threads.

    Args:
        tokens: the number of tokens in all sequences.
        threads: the caller's number of threads; if it is not 1 and this thread has called
            `compute_with`, that number counts.

    Returns:
        The number of threads that compute separate batches, and the tokens per batch; (1, 0) if it
        is faster that all threads work on the same batch.
    """
    threads = 1 if threads == 1 else getattr(thread_state, "threads", threads)  # 1 on a GPU
    if threads == 1 or tokens < threads * LEAST_TOKENS:
        return 1, 0
    share = tokens // (threads * BATCHES_PER_THREAD)
    return threads, min(THREAD_TOKENS, max(LEAST_TOKENS, share))


@contextmanager
def batch_map(tokens: int, threads: int) -> Iterator[tuple[Callable[..., Iterable[Any]], int]]:
    """Provide a version of `map` over batches, which may use threads, and the tokens of a batch.

    The latter are 0 for the default of the device; see `prediction_tokens`, and `shares` for the
    arguments.
    """
    workers, size = shares(tokens, threads)
    if workers == 1:
        yield map, 0
        return
    with one_thread_each(workers) as pool:
        yield pool.map, size


@contextmanager
def one_thread_each(workers: int) -> Iterator[ThreadPoolExecutor]:
    """Provide a pool of workers that compute with one torch thread each.

    One batch per thread is faster than all threads on one batch, because the threads do not have to
    wait for each other after every operation.

    Args:
        workers: the number of workers, and of torch threads to restore afterwards. It is passed
            explicitly because torch.get_num_threads() returns 1 while another pool is active.
    """
    try:
        with ThreadPoolExecutor(workers, initializer=set_threads, initargs=(1,)) as pool:
            yield pool
    finally:
        set_threads(workers)  # new threads would inherit the workers' setting


def compute_with(threads: int) -> None:
    """Set the number of threads that torch and `shares` use in the calling thread."""
    thread_state.threads = threads
    set_threads(threads)


def set_threads(threads: int) -> None:
    """Set the number of threads that torch uses for operations of the calling thread."""
    torch.get_num_threads()  # its first call in a thread adopts the last setting of any thread
    torch.set_num_threads(threads)


def count_bar(console: Console, title: str, unit: str) -> Callable[[int, int], None]:
    """Return a `progress` function of (done, total) that shows a bar, closed when all is done."""

    def show(done: int, total: int) -> None:
        if done:
            console.update({"done": done})
        else:
            console.start(total, title=title, unit=unit)
        if done == total:
            console.close()

    return show


def warn_caller(message: str) -> None:
    """Warn, and name the line of the user's code that called bertkit."""
    frame, level = sys._getframe(1), 2
    while frame.f_back and frame.f_globals.get("__name__", "").startswith("bertkit."):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
