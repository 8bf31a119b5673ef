"""The one thread that computes with all cores: it loads models and takes requests that come alone.

One for all models. Each thread that computes with several cores keeps OpenMP's helpers of its own;
with two such threads they would be more than the cores, and then they sleep after every product
instead of waiting for the next one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import cache
from queue import SimpleQueue
from typing import Any, TypeVar

import torch

from bertkit.predict.engine import compute_with

Result = TypeVar("Result")


class Alone:
    """The thread; it ends with the process, whatever it does then.

    Args:
        threads: that it computes with.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.free = threading.Lock()
        self.asked: SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = SimpleQueue()
        threading.Thread(target=self._work, name="alone", daemon=True).start()

    def compute(self, function: Callable[[], Result]) -> Future[Result] | None:
        """Begin a call in the thread; None, and nothing is begun, where it is busy."""
        if not self.free.acquire(blocking=False):
            return None
        future: Future[Result] = Future()
        self.asked.put((function, future))
        return future

    def _work(self) -> None:
        compute_with(self.threads)
        while True:
            function, future = self.asked.get()
            try:
                outcome, error = function(), None
            except BaseException as raised:  # it is raised again by whoever waits
                outcome, error = None, raised
            self.free.release()
            if error is None:
                future.set_result(outcome)
            else:
                future.set_exception(error)


@cache
def alone() -> Alone:
    """The thread, with as many cores as torch has where it is asked for first."""
    return Alone(torch.get_num_threads())
