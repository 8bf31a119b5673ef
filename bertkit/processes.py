"""The processes of a run: the rank of this one, and workers that share its work.

`map_in_order` applies a function to many items on any `concurrent.futures.Executor`: a pool of
processes on this machine by default, or the workers of dask.distributed, Ray or Slurm. Text is read
once, by the process that collects the results; workers turn blocks of it into counts, token ids or
verdicts.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import pickle
import signal
import sys
import traceback
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
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from queue import SimpleQueue
from threading import Lock, Thread, current_thread, main_thread
from types import ModuleType
from typing import Any, Generic, TypeVar

from bertkit.errors import BertkitError


def rank() -> int:
    """Return the rank of this process in its run; 0 if it is the only one."""
    return int(os.environ.get("RANK", "0"))


def is_alone() -> bool:
    """Return whether this process is the only one of its run."""
    return os.environ.get("WORLD_SIZE", "1") == "1"


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    known = hasattr(os, "sched_getaffinity")
    return len(os.sched_getaffinity(0)) if known else os.cpu_count() or 1


def memory_bytes() -> int | None:
    """Return the machine's memory in bytes; None if the system does not report it."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None


MAX_PROCESSES = 1024
"""The maximum number of processes that a command starts, far beyond any machine's cores."""


def check_process_count(count: int, flag: str) -> None:
    """Check a number of processes, before starting too many of them stops the machine.

    Raises:
        BertkitError: the number is negative or above `MAX_PROCESSES`; the message names the flag.
    """
    if not 0 <= count <= MAX_PROCESSES:
        raise BertkitError(
            f"{flag} must be from 0 to {MAX_PROCESSES:,}, got {count}", code="number"
        )


def worker_count(processes: int) -> int:
    """Return the number of worker processes for a number of processes that share the work.

    The latter is 0 for one per usable core. One process does the work itself: it has 0 workers.

    Raises:
        BertkitError: the number is negative or too large.
    """
    check_process_count(processes, "--processes")
    count = processes or usable_cores()
    return count if count > 1 else 0


def resident_bytes(field: str = "VmRSS") -> float | None:
    """Return this process's memory in bytes (VmRSS, RssAnon or, at its peak, VmHWM), or None."""
    try:
        with open("/proc/self/status", encoding="ascii") as lines:  # noqa: PTH123
            found = [line.split()[1] for line in lines if line.startswith(f"{field}:")]
    except OSError:
        return None
    return float(found[0]) * 1024 if found else None


class KeptHeap:
    """The freed memory that the C library (glibc) keeps for the tensors of the next update.

    By default it returns blocks of more than 32 megabytes, and free memory at the end of the heap,
    to the system at once; the next update gets them back page by page, which takes as long as
    computing their contents. But tensors whose sizes differ from update to update do not fit the
    gaps that others left, so the heap would grow for hours. All of its free memory is returned
    when the process has come to hold `MAX_GROWTH` times what an update needs. If this is not
    `active`, and with other C libraries, nothing happens.
    """

    def __init__(self, *, active: bool = True) -> None:
        library = ctypes.CDLL(None) if active and sys.platform == "linux" else None
        set_option = getattr(library, "mallopt", None)  # musl has none
        self.trim = getattr(library, "malloc_trim", None)
        self.needed = 0.0
        """The resident bytes, without files, after the first update since memory was returned."""
        if set_option is not None:
            set_option(M_MMAP_MAX, 0)
            set_option(M_TRIM_THRESHOLD, (1 << 31) - 1)

    def after_update(self) -> None:
        """Return the free memory to the system if there is too much of it."""
        if self.trim is None:
            return
        resident = resident_bytes("RssAnon") or 0.0  # mapped shards are not of the heap
        self.needed = self.needed or resident
        if resident > MAX_GROWTH * self.needed:
            self.trim(0)
            self.needed = 0.0


M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
"""Options of glibc's `mallopt`, by their numbers in malloc.h."""
MAX_GROWTH = 1.5


def busy_note() -> list[str]:
    """Return a line that says that the machine is busy, or [] if it is not or does not tell."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if load < usable_cores() + 0.5:
        return []
    cores = "1 core" if usable_cores() == 1 else f"{usable_cores()} cores"
    return [
        f"the machine is busy: {load:.1f} threads have wanted to run on {cores} in the last "
        "minute, so this takes longer than it could"
    ]


Item = TypeVar("Item")
Result = TypeVar("Result")
PENDING_PER_WORKER = 3
"""How many items a worker has waiting, so that it need not wait for the next one."""
UNKNOWN_WORKERS = 64
"""The assumed number of workers of an executor that does not tell it."""


@contextmanager
def open_executor(processes: int, executor: Executor | None = None) -> Iterator[Executor | None]:
    """Yield the caller's executor, or a new pool of processes; None for one process.

    Args:
        processes: the number of worker processes, 0 for one per core; not used with an executor.
        executor: any executor whose workers see the same files, such as
            `dask.distributed.Client(...).get_executor()`; it is not shut down.

    Raises:
        BertkitError: the number is negative or too large.
    """
    workers = worker_count(processes)
    if executor is not None or not workers:
        yield executor
        return
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def map_in_order(
    function: Callable[[Item], Result],
    items: Iterable[Item],
    executor: Executor | None,
    *,
    retries: int = 0,
) -> Iterator[Result]:
    """Yield `function(item)` of each item, in the order of the items.

    Items are taken only slightly ahead of the results, so that there may be any number of them.

    Args:
        function: a function that can be pickled: one at the top level of a module, or a
            `functools.partial` of it. A worker unpickles it once, so it may hold a lot.
        items: the items, which are read in this process.
        executor: the workers; None to call the function in this process, as for a single item.
        retries: how often an item is given to the executor again after the death of its worker. A
            local pool is broken by it, and dask.distributed repeats the work without this.

    Raises:
        BertkitError: a worker died.
        Exception: the function raised it.
    """
    following = iter(items)
    first = list(islice(following, 2))
    following = chain(first, following)
    if executor is None or len(first) < 2:
        yield from map(function, following)
        return
    payload = pickle.dumps(function)
    most = PENDING_PER_WORKER * getattr(executor, "_max_workers", UNKNOWN_WORKERS)
    pending: deque[tuple[Future[Result], Item]] = deque()
    try:
        while True:
            for item in islice(following, most - len(pending)):
                pending.append((_submit(executor, payload, item), item))
            if not pending:
                return
            future, item = pending.popleft()
            for attempt in range(retries + 1):
                try:
                    result = future.result()
                    break
                except (BrokenExecutor, CancelledError) as error:
                    if attempt == retries:
                        raise BertkitError(DEAD_WORKER, code="worker") from error
                    future = _submit(executor, payload, item)
            yield result
    finally:
        for future, _ in pending:
            future.cancel()


DEAD_WORKER = (
    "a worker process died, which happens when memory runs out: run the same command again, with "
    "fewer --processes if memory is short (in a script, start processes below "
    "`if __name__ == '__main__':`)"
)


def _submit(executor: Executor, payload: bytes, item: Item) -> Future[Any]:
    try:
        return executor.submit(_call, payload, item)
    except BrokenExecutor as error:
        raise BertkitError(DEAD_WORKER, code="worker") from error


def _call(payload: bytes, item: Any) -> Any:
    """Call a pickled function in a worker."""
    return _unpickled(payload)(item)


_unpickled = lru_cache(maxsize=4)(pickle.loads)


def _start_worker() -> None:
    """Leave Ctrl-C to the process that collects the results, and end with it if it is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # or each worker starts a thread for each core
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    Thread(target=follow, daemon=True).start()


Block = TypeVar("Block")
WorkResult = TypeVar("WorkResult")

STARTING = Lock()
"""Held while processes start, which changes what all threads see as the user's script."""
AHEAD = 3
"""The number of blocks per worker that are sent before the result of the first is needed."""


class Workers(Generic[Block, WorkResult]):
    """Worker processes that each apply one function. A killed worker cannot make the caller hang.

    Every worker has its own pipe, which closes when the worker dies, even in the middle of a
    result. A queue that several processes share, as in `concurrent.futures` and torch's DataLoader,
    may then stay locked or half read forever. Leaving the `with` block kills the workers, which
    hold no state.

    Args:
        work: the function; it is pickled once for each worker.
        processes: the number of workers, which are started with the first block; 0 to do the work
            in this process.
        command: the command that uses them, for the error message.
        flag: the flag that sets their number, for the error message.
    """

    def __init__(
        self, work: Callable[[Block], WorkResult], processes: int, *, command: str, flag: str
    ) -> None:
        self.work, self.processes, self.command, self.flag = work, processes, command, flag
        self.started: dict[Connection, Any] = {}
        """The parent's end of each worker's pipe → the worker process."""

    def __enter__(self) -> Workers[Block, WorkResult]:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.started.values():
            process.kill()
        for pipe, process in self.started.items():
            process.join()
            pipe.close()
        self.started.clear()

    def run(self, blocks: Iterable[Block]) -> Iterator[tuple[Block, WorkResult]]:
        """Yield (block, result) in the order of `blocks`, which are read only slightly ahead.

        Raises:
            BertkitError: a worker process died.
            Exception: `work` raised it in the worker.
        """
        if not self.processes:
            for block in blocks:
                yield block, self.work(block)
            return
        self._start()
        following, given = iter(blocks), deque[tuple[Connection, Block]]()
        loads, done = dict.fromkeys(self.started, 0), {pipe: deque[Any]() for pipe in self.started}
        while True:
            for block in islice(following, AHEAD * self.processes - len(given)):
                pipe = min(loads, key=loads.__getitem__)
                with self._watching(pipe):
                    pipe.send(block)
                loads[pipe] += 1
                given.append((pipe, block))
            if not given:
                return
            source, block = given[0]
            for ready in wait([*self.started], timeout=0 if done[source] else None):
                assert isinstance(ready, Connection)
                with self._watching(ready):
                    well, answer = ready.recv()
                if not well:
                    raise answer
                loads[ready] -= 1
                done[ready].append(answer)
            if done[source]:
                given.popleft()
                yield block, done[source].popleft()

    def _start(self) -> None:
        context, before = multiprocessing.get_context("spawn"), len(self.started)
        # a process would first run the user's script again, which may have no guard against that
        with STARTING, signals_held():
            script, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
            try:
                while len(self.started) < self.processes:
                    ours, theirs = context.Pipe()
                    process = context.Process(target=serve, args=(theirs,), daemon=True)
                    with self._watching(ours):
                        process.start()
                    self.started[ours] = process
                    theirs.close()
            finally:
                sys.modules["__main__"] = script
        # not an argument of the process, which would be written for ever if it died at once
        for pipe in [*self.started][before:]:
            with self._watching(pipe):
                pipe.send(self.work)

    @contextmanager
    def _watching(self, pipe: Connection) -> Iterator[None]:
        """Communicate with a worker in the block; a closed pipe raises an error about its death."""
        try:
            yield
        except (EOFError, OSError) as error:
            how = f"at startup: {error}"
            if (process := self.started.pop(pipe, None)) is not None:
                process.join()
                code = process.exitcode
                how = signal.Signals(-code).name if code < 0 else f"with status {code}"
            raise BertkitError(
                f"a worker process of `{self.command}` died ({how}), which happens when memory "
                f"runs out; run the same command again, with fewer {self.flag} if memory is short"
            ) from None


def serve(pipe: Connection) -> None:
    """Run a worker process: the pipe brings a function, then blocks, until its other end is closed.

    Ctrl-C and SIGTERM may reach every process of a run; the one that collects the results acts.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # or each worker starts a thread for each core
    try:
        work = pipe.recv()
    except (EOFError, OSError):  # who started it is gone
        return
    blocks: SimpleQueue[Any] = SimpleQueue()

    def receive() -> None:
        try:
            while True:
                blocks.put(pipe.recv())
        finally:
            os._exit(1)

    Thread(target=receive, daemon=True).start()  # so that the next block is sent meanwhile
    while True:
        try:
            answer = True, work(blocks.get())
        except Exception as error:
            if not isinstance(error, BertkitError):
                error.add_note(f"in a worker process:\n{traceback.format_exc()}")
            answer = False, picklable(error)
        with suppress(OSError):  # `receive` notices it, too
            pipe.send(answer)


def picklable(error: Exception) -> Exception:
    """Return an exception, or one that says the same if it does not survive a pipe."""
    try:
        ForkingPickler.loads(ForkingPickler.dumps(error))
    except Exception:
        plain = RuntimeError(f"{type(error).__name__}: {error}")
        for note in getattr(error, "__notes__", ()):
            plain.add_note(note)
        return plain
    return error


@contextmanager
def signals_held() -> Iterator[None]:
    """Start processes so that no signal to the whole group kills them before they can ignore it.

    They start with Ctrl-C and SIGTERM blocked. This process handles those after the block, even
    if the system delivers them to another of its threads: a worker whose parent stops between
    starting it and sending it its work would print a traceback.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    from multiprocessing import resource_tracker

    resource_tracker.ensure_running()  # else it would start inside the block and unblock both
    received: list[int] = []
    handlers: dict[int, Any] = {}
    if current_thread() is main_thread():  # the only one that runs Python's handlers
        for number in map(int, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)):
            if signal.getsignal(number) is not None:  # one that Python can put back
                handlers[number] = signal.signal(number, lambda number, _: received.append(number))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number in dict.fromkeys(received):
            signal.raise_signal(number)


def interruptible(work: Callable[[], WorkResult]) -> WorkResult:
    """Run a library's long call in a thread, so that Ctrl-C ends the wait for it at once.

    The thread is then abandoned and ends with the process.
    """
    future: Future[WorkResult] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=run, daemon=True).start()
    return future.result()
