"""The processes of a run: which one this is, and worker processes that share its work.

A worker applies one function to many blocks, and the results come in the order of the blocks. Text
is read once, by the process that collects the results (appendix A.2 trains on one corpus for
everyone); workers turn blocks of it into counts, token ids, verdicts or batches.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from threading import Thread, current_thread, main_thread
from typing import Any, Generic, TypeVar

from bertkit.errors import BertkitError


def rank() -> int:
    """The number of this process among those of its run; alone it is 0."""
    return int(os.environ.get("RANK", "0"))


def is_alone() -> bool:
    """Whether this process is the only one of its run."""
    return os.environ.get("WORLD_SIZE", "1") == "1"


Block = TypeVar("Block")
WorkResult = TypeVar("WorkResult")

AHEAD = 2
"""Blocks for each worker that are in flight or done before their results are asked for."""


class Workers(Generic[Block, WorkResult]):
    """Processes that each apply one function. If one of them is killed, nothing waits for it.

    Every worker has a pipe of its own, which ends with the worker, even in the middle of a result.
    A queue that several processes share, as in `concurrent.futures` and torch's DataLoader, may
    stay locked or half read forever then. Leaving the block kills the workers, which hold nothing.

    Args:
        work: is pickled once for each worker.
        processes: how many; they start with the first block.
        command: what they work for, and
        flag: how its user chooses their number; both for the error.
    """

    def __init__(
        self, work: Callable[[Block], WorkResult], processes: int, *, command: str, flag: str
    ) -> None:
        self.work, self.processes, self.command, self.flag = work, processes, command, flag
        self.started: dict[Connection, Any] = {}
        """Our end of each worker's pipe, and its process."""

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
        """Yield (block, result) in the order of `blocks`, which are read only a little ahead.

        Raises:
            BertkitError: a worker process died.
            Exception: of `work`, as it was raised in the worker.
        """
        self._start()
        numbered, idle = enumerate(blocks), deque(self.started)
        given: deque[tuple[int, Block]] = deque()
        busy: dict[Connection, int] = {}
        done: dict[int, WorkResult] = {}
        while True:
            while idle and len(given) <= AHEAD * self.processes:
                if (item := next(numbered, None)) is None:
                    break
                pipe = idle.popleft()
                with self._watching(pipe):
                    pipe.send(item[1])
                busy[pipe] = item[0]
                given.append(item)
            if not given:
                return
            number, block = given[0]
            for ready in wait([*busy], timeout=0 if number in done else None):
                assert isinstance(ready, Connection)
                done[busy.pop(ready)] = self._receive(ready)
                idle.append(ready)
            if number in done:
                given.popleft()
                yield block, done.pop(number)

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        with signals_held():
            while len(self.started) < self.processes:
                ours, theirs = context.Pipe()
                process = context.Process(target=serve, args=(theirs, self.work), daemon=True)
                with self._watching(ours):
                    process.start()
                self.started[ours] = process
                theirs.close()

    def _receive(self, pipe: Connection) -> WorkResult:
        with self._watching(pipe):
            well, answer = pipe.recv()
        if not well:
            raise answer
        result: WorkResult = answer
        return result

    @contextmanager
    def _watching(self, pipe: Connection) -> Iterator[None]:
        """Talk with a worker; the end of its pipe is its own end."""
        try:
            yield
        except (EOFError, OSError) as error:
            how = f"as it began: {error}"
            if (process := self.started.pop(pipe, None)) is not None:
                process.join()
                code = process.exitcode
                how = signal.Signals(-code).name if code < 0 else f"with status {code}"
            raise BertkitError(
                f"a worker process of `{self.command}` died ({how}), which happens when memory "
                f"runs out; run the same command again, with fewer {self.flag} if memory is short"
            ) from None


def serve(pipe: Connection, work: Callable[[Any], Any]) -> None:
    """What a worker process does until it is killed, or the other end of the pipe is closed."""
    start_worker()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # which may be sent to every process of a run
    answer: tuple[bool, Any]
    while True:
        try:
            block = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            answer = True, work(block)
        except Exception as error:
            if not isinstance(error, BertkitError):
                error.add_note(f"in a worker process:\n{traceback.format_exc()}")
            answer = False, error
        try:
            pipe.send(answer)
        except OSError:
            return


@contextmanager
def signals_held() -> Iterator[None]:
    """Start processes that no signal to the whole group kills before they can ignore it.

    They are born with Ctrl-C and SIGTERM blocked. This process handles those after the block, even
    if the system delivers them to another of its threads: a worker whose parent stops between
    starting it and sending it its work would print a traceback.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    from multiprocessing import resource_tracker

    resource_tracker.ensure_running()  # by itself it would start in the block, and unblock both
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


def start_worker(*, interrupted: bool = False) -> None:
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


def interruptible(work: Callable[[], WorkResult]) -> WorkResult:
    """Do a library's long work in a thread, so that Ctrl-C ends the wait for it at once.

    The thread is left behind then, and ends with the process.
    """
    future: Future[WorkResult] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=run, daemon=True).start()
    return future.result()
