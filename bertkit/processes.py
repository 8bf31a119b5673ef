"""The processes of a run: the rank of this one, and workers that share its work.

`map_in_order` applies a function to many items on any `concurrent.futures.Executor`: a pool of
processes on this machine by default, or the workers of dask.distributed, Ray or Slurm. Text is read
once, by the process that collects the results; workers turn blocks of it into counts, token ids or
verdicts.
"""

from __future__ import annotations

import atexit
import math
import multiprocessing
import os
import pickle
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import (
    BrokenExecutor,
    CancelledError,
    Executor,
    Future,
    ProcessPoolExecutor,
)
from contextlib import contextmanager, suppress
from functools import lru_cache
from itertools import chain, islice
from pathlib import Path
from threading import Thread, Timer
from typing import TYPE_CHECKING, Any, TypeVar

from bertkit.errors import BertkitError

if TYPE_CHECKING:
    import numpy as np


def rank() -> int:
    """Return the rank of this process in its run; 0 if it is the only one."""
    return int(os.environ.get("RANK", "0"))


def is_alone() -> bool:
    """Return whether this process is the only one of its run."""
    return os.environ.get("WORLD_SIZE", "1") == "1"


def usable_cores() -> int:
    """Return the number of cores that this process may use, by its affinity and its quota."""
    known = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if known else os.cpu_count() or 1
    return math.ceil(min(cores, cpu_quota()))


def cpu_quota(root: Path = Path("/sys/fs/cgroup")) -> float:
    """Return the cores that a container's control group (v2, v1) grants; infinity if all."""
    for names in (["cpu.max"], ["cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"]):
        with suppress(OSError, ValueError):  # "max" is no number
            texts = " ".join((root / name).read_text() for name in names)
            quota, period = map(int, texts.split())
            return quota / period if quota > 0 else math.inf
    return math.inf


def memory_bytes() -> int | None:
    """Return the machine's memory in bytes; None if the system does not report it."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None


MAX_PROCESSES = 1024
"""The maximum number of processes that a command starts, far beyond any machine's cores."""


def check_process_count(count: int, flag: str) -> None:
    """Refuse a number of processes that is negative, or so large that it stops the machine."""
    if not 0 <= count <= MAX_PROCESSES:
        raise BertkitError(
            f"{flag} must be from 0 to {MAX_PROCESSES:,}, got {count}", code="number"
        )


Item = TypeVar("Item")
Result = TypeVar("Result")
PENDING_PER_WORKER = 3
"""How many items a worker has waiting, so that it need not wait for the next one."""
UNKNOWN_WORKERS = 64
"""The assumed number of workers of an executor that does not tell it."""
CHECK_SECONDS = 1.0
"""How often the process that waits for a result checks that all workers are alive."""
DEAD_WORKER = (
    "a worker process died, which happens when memory runs out: run the same command again, with "
    "fewer --processes if memory is short (in a script, start processes below "
    "`if __name__ == '__main__':`)"
)


@contextmanager
def open_executor(processes: int, executor: Executor | None = None) -> Iterator[Executor | None]:
    """Yield the caller's executor, or a new pool of processes (0: one per core); None for one."""
    check_process_count(processes, "--processes")
    workers = processes or usable_cores()
    if executor is not None or workers == 1:
        yield executor
        return
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def map_in_order(
    function: Callable[[Item], Result], items: Iterable[Item], executor: Executor | None
) -> Iterator[Result]:
    """Yield `function(item)` of each item, in order, reading items only slightly ahead.

    A worker of the executor unpickles the function once, so it may hold a lot. Without an executor
    or for a single item, the function is called in this process. The workers must see the same
    files, as those of `dask.distributed.Client(...).get_executor()` on a shared file system do.
    """
    following = iter(items)
    first = list(islice(following, 2))
    following = chain(first, following)
    if executor is None or len(first) < 2:
        yield from map(function, following)
        return
    payload = pickle.dumps(function)
    most = PENDING_PER_WORKER * getattr(executor, "_max_workers", UNKNOWN_WORKERS)
    pending: deque[Future[Result]] = deque()
    try:
        while True:
            for item in islice(following, most - len(pending)):
                pending.append(executor.submit(_call, payload, item))
            if not pending:
                return
            yield _result(pending.popleft(), executor)
    except (BrokenExecutor, CancelledError) as error:
        _end_workers(executor)
        pending.clear()  # a broken pool ends them itself, and its thread stops at a cancelled one
        raise BertkitError(DEAD_WORKER, code="worker") from error
    finally:
        for future in pending:
            future.cancel()


def _result(future: Future[Result], executor: Executor) -> Result:
    """Wait for a result; a worker that dies while it sends one goes unnoticed by its pool."""
    while True:
        try:
            return future.result(CHECK_SECONDS)
        except TimeoutError:
            if future.done():
                raise  # the function's own
            if any(worker.exitcode is not None for worker in _workers(executor)):
                raise BrokenExecutor from None


def _workers(executor: Executor) -> list[Any]:
    """Return the processes of a local pool; [] for any other executor."""
    return list((getattr(executor, "_processes", None) or {}).values())


def _end_workers(executor: Executor) -> None:
    """Kill the processes of a local pool in which one died, so that it can be shut down."""
    for worker in _workers(executor):
        worker.kill()
    if results := getattr(executor, "_result_queue", None):
        results._writer.close()  # the last one: the pool no longer waits for the rest of a result


def _call(payload: bytes, item: Any) -> Any:
    """Call a pickled function in a worker."""
    return _unpickled(payload)(item)


_unpickled = lru_cache(maxsize=4)(pickle.loads)


TERM_SECONDS = 30.0
"""How long a worker goes on after SIGTERM."""


def _start_worker() -> None:
    """Leave signals to the process that collects the results, and end with it if it is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # a scheduler sends SIGTERM to all processes of a run: the results are needed a little longer
    signal.signal(signal.SIGTERM, lambda *_: Timer(TERM_SECONDS, os._exit, (1,)).start())
    atexit.register(os._exit, 0)  # at once: nothing is left to be torn down
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # or each worker starts a thread for each core
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    Thread(target=follow, daemon=True).start()


def interruptible(work: Callable[[], Result]) -> Result:
    """Run a library's long call in a thread, which Ctrl-C abandons at once."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=run, daemon=True).start()
    return future.result()


SHARD_ORDER, PAIRS, MASKS, FINE_TUNING, DATA_SPLIT = range(5)
"""Purposes of random numbers; two purposes never share any."""


def keyed_rng(
    seed: int, purpose: int, *, epoch: int = 0, window: int = 0, row: int = 0
) -> np.random.Generator:
    """Return the random generator of a purpose at a position, the same in any process."""
    import numpy as np

    counter = np.array([0, row, window, epoch], dtype=np.uint64)
    key = np.array([seed, purpose], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(counter=counter, key=key))
