"""Processes: which one of a run this is, worker processes, and results in the order of the work.

Text is read once, by the process that collects the results (appendix A.2 trains on one corpus for
everyone); workers turn blocks of it into counts, ids or verdicts.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

Work = TypeVar("Work")
Result = TypeVar("Result")


def rank() -> int:
    """The number of this process among those of its run, by torchrun's variable; alone it is 0."""
    return int(os.environ.get("RANK", "0"))


def is_alone() -> bool:
    """Whether this process is the only one of its run, by torchrun's variable."""
    return os.environ.get("WORLD_SIZE", "1") == "1"


def begin_worker(*, interrupted: bool = False) -> None:
    """Tie this worker process to the one that started it: it ends when that one was killed.

    Args:
        interrupted: Ctrl-C, which reaches every process of a terminal, ends the worker, too;
            otherwise it is for the process that collects.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL if interrupted else signal.SIG_IGN)
    parent = multiprocessing.parent_process()

    def follow() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    Thread(target=follow, daemon=True).start()


def run_in_order(
    blocks: Iterable[Work], submit: Callable[[Work], Future[Result]], ahead: int
) -> Iterator[tuple[Work, Result]]:
    """Yield (block, result) in the order of `blocks`; at most `ahead` + 1 are in flight."""
    waiting: deque[tuple[Work, Future[Result]]] = deque()
    for block in blocks:
        waiting.append((block, submit(block)))
        if len(waiting) > ahead:
            first, future = waiting.popleft()
            yield first, future.result()
    for first, future in waiting:
        yield first, future.result()
