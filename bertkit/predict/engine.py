"""Fast inference for every head: a model in one of three precisions, batches by token budget.

On a CPU the layers are prepared once (`bertkit.model.inference`); on a GPU the packed batches run
under autocast. Inputs are sorted by length within what is given at once, so that neighbours are
alike, and outputs come back in the order of the inputs. Memory follows the token budget and what
is given at once, not the length of a file: `bertkit predict` reads it piece by piece.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch

from bertkit.errors import BertkitError
from bertkit.model.inference import check_mode, prepare_encoder
from bertkit.model.task_heads import TaskModel
from bertkit.tasks.task import Items, run_model
from bertkit.training.device import choose_precision


def choose_mode(name: str, device: torch.device) -> str:
    """The precision called `name`, checked; "auto" is bf16 where the device is made for it.

    Args:
        name: "fp32", "bf16", "int8" (CPUs only) or "auto".
        device: where to compute.

    Raises:
        BertkitError: there is no such precision, or the device lacks it.
    """
    if device.type == "cpu" and name != "auto":
        check_mode(name)
        return name
    if name == "int8":
        raise BertkitError(f"int8 is for CPUs; choose bf16 or fp32 for {device}")
    return choose_precision(name, device)


THREAD_TOKENS = 2048
"""Tokens in a batch where each thread has its own."""
BATCHES_PER_THREAD = 4
"""So that all end at about the same time, where there are tokens enough."""
LEAST_TOKENS = 400
"""Batches smaller than this are not worth a thread of their own."""


told = threading.local()
"""`threads`: what `compute_with` was called with in this thread."""


class Engine:
    """A model that predicts and is trained no more.

    Args:
        model: with any head; it is changed and moved to the device.
        device: where to compute.
        mode: "fp32", "bf16" or "int8", as `choose_mode` gives it.
    """

    def __init__(self, model: TaskModel, device: torch.device, mode: str) -> None:
        self.model = model.to(device).eval()
        self.device, self.mode = device, mode
        self.threads = 1
        if device.type == "cpu":
            prepare_encoder(self.model.encoder, mode)
            self.threads = torch.get_num_threads()

    def run(
        self, items: Items, progress: Callable[[int], None] = lambda done: None
    ) -> list[list[np.ndarray]]:
        """Outputs for every part, in the order of the items; see `run_model`.

        Args:
            items: sequences of a task.
            progress: is told how many parts are done.

        Raises:
            BertkitError: an output is NaN or infinite.
        """
        # prepared layers compute in their own precision, without autocast
        precision = "fp32" if self.device.type == "cpu" else self.mode
        run = partial(run_model, self.model, items, self.device, precision=precision)
        threads, tokens = shares(items.tokens, self.threads)
        if threads == 1:
            outputs = run(progress=progress)
        else:
            with one_thread_each(threads) as pool:
                outputs = run(progress=progress, tokens=tokens, each=pool.map)
        for parts in outputs:
            check_outputs(*parts)
        return outputs


def check_outputs(*outputs: np.ndarray) -> None:
    """Refuse outputs from which no answer can be made.

    Raises:
        BertkitError: one is NaN or infinite.
    """
    if not all(np.isfinite(output).all() for output in outputs):
        raise BertkitError(
            "the model's outputs have NaN or infinite numbers: its weights are finite but too "
            "large; use another checkpoint of the model"
        )


def shares(tokens: int, threads: int) -> tuple[int, int]:
    """How threads share some work.

    Args:
        tokens: of all sequences.
        threads: of the caller, where `compute_with` has not said it for this thread.

    Returns:
        How many of them compute batches of their own, and the tokens of such a batch; (1, 0) where
        they had better work on the same batch.
    """
    threads = getattr(told, "threads", threads)
    if threads == 1 or tokens < threads * LEAST_TOKENS:
        return 1, 0
    share = tokens // (threads * BATCHES_PER_THREAD)
    return threads, min(THREAD_TOKENS, max(LEAST_TOKENS, share))


@contextmanager
def one_thread_each(workers: int) -> Iterator[ThreadPoolExecutor]:
    """Workers that compute with one thread each.

    A batch for each thread is faster than all threads on one batch: they need not wait for each
    other after every operation.

    Args:
        workers: with how many threads the caller computes, too, afterwards. It must be told: where
            another thread has such workers at that time, torch says 1.
    """
    try:
        with ThreadPoolExecutor(workers, initializer=set_threads, initargs=(1,)) as pool:
            yield pool
    finally:
        set_threads(workers)  # what a worker sets is what new threads begin with


def compute_with(threads: int) -> None:
    """Let this thread compute with so many from now on: torch, and `shares`."""
    told.threads = threads
    set_threads(threads)


def set_threads(threads: int) -> None:
    """Let torch compute with so many threads what is called in this one."""
    torch.get_num_threads()  # a thread's first call takes over what any other one has set last
    torch.set_num_threads(threads)


def check_change(
    metric: str, exact: Mapping[str, float], fast: Mapping[str, float], bound: float, mode: str
) -> None:
    """Refuse a precision that costs more than it may.

    Args:
        metric: that decides.
        exact: scores in fp32, as fractions of 1.
        fast: scores in the precision, on the same labelled inputs.
        bound: how much lower the metric may be, as a fraction.
        mode: the precision.

    Raises:
        BertkitError: says by how much the metric falls.
    """
    lost = exact[metric] - fast[metric]
    if lost > bound:
        raise BertkitError(
            f"{mode} lowers {metric} from {100 * exact[metric]:.2f} to {100 * fast[metric]:.2f}, "
            f"and the bound is {100 * bound:.2f} points; choose bf16 or fp32, or another bound"
        )
