"""Requests become batches: a bounded queue per model, and the threads that work through it.

A thread takes what is there as soon as it is free, oldest first, up to a budget of tokens. While
it computes, the next batch gathers; so batches grow with the load, and a request to an idle model
starts at once. torch releases the interpreter lock while it computes.

On a CPU two threads share the queue, each with half of the cores. One thread with all of them
would have to wait for the slowest core after every product, and some core is always needed for
requests and answers. Where half of the cores is a single one, a request that arrives alone is
computed by both cores in `compute_thread`. There is one such thread for all models, which also
loads them: each thread that computes with several cores keeps OpenMP workers of its own, and two
such threads would have more workers than cores, which then sleep after every product instead of
waiting for the next one.

Where several requests were answered together, their clients are likely to send the next ones at
about the same time. The thread then waits some milliseconds for them, until as many have arrived.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import cache
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from bertkit.predict.engine import LEAST_TOKENS, compute_with
from bertkit.serve.limits import Limits, RefusedError, too_many
from bertkit.serve.metrics import Metrics

OperationResult = TypeVar("OperationResult")


class ComputeThread:
    """The thread; it ends with the process, whatever it does then.

    Args:
        threads: that it computes with.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.free = threading.Lock()
        self.asked: SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = SimpleQueue()
        threading.Thread(target=self._work, name="alone", daemon=True).start()

    def compute(self, function: Callable[[], OperationResult]) -> Future[OperationResult] | None:
        """Begin a call in the thread; None, and nothing is begun, where it is busy."""
        if not self.free.acquire(blocking=False):
            return None
        future: Future[OperationResult] = Future()
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
def compute_thread() -> ComputeThread:
    """The thread, with as many cores as torch has where it is asked for first."""
    return ComputeThread(torch.get_num_threads())


BATCHING_LOG = logging.getLogger("bertkit.serve")
AT_ONCE = 2
"""Requests that begin, or get their results, in one iteration of the event loop. Each takes about a
millisecond; whoever connects meanwhile waits for these few and not for all."""
SLOWEST_RETRY = 60
"""Most seconds that a refused client is told to wait."""


class PreparedRequest(NamedTuple):
    """A request that is ready to be computed."""

    content: Any
    """For `Work.run`."""
    tokens: int
    """Of all sequences."""
    inputs: int
    windowed: int = 0
    """Inputs that take more than one window."""
    cut: dict[str, int] | None = None
    """What was lost -> of how many inputs."""


class Operation(Protocol):
    """Something that a model does; requests for the same work are computed together."""

    def run(self, many: Sequence[Any]) -> list[Any]:
        """One result for each content, in order."""


@dataclass(eq=False)
class QueuedRequest:
    """A request in the queue."""

    work: Operation
    prepared: PreparedRequest
    answer: asyncio.Future[Any]
    arrived: float
    first: bool = False
    """Whether the model had nothing else to do when it was taken."""


class Turns:
    """Lets a few requests begin in each iteration of the event loop, in the order they came."""

    def __init__(self) -> None:
        self.waiting: deque[asyncio.Future[None]] = deque()

    async def take(self) -> None:
        """Return once it is this request's turn."""
        loop = asyncio.get_running_loop()
        turn = loop.create_future()
        self.waiting.append(turn)
        if len(self.waiting) == 1:
            loop.call_soon(self._next, loop)
        await turn

    def _next(self, loop: asyncio.AbstractEventLoop) -> None:
        for _ in range(min(AT_ONCE, len(self.waiting))):
            turn = self.waiting.popleft()
            if not turn.done():  # its client has left
                turn.set_result(None)
        if self.waiting:
            loop.call_soon(self._next, loop)


class Worker:
    """One model's queue and the threads that work through it.

    Args:
        name: of the model.
        limits: of the queue and of a batch.
        metrics: are told of every batch.
        lanes: threads that share the queue.
    """

    def __init__(self, name: str, limits: Limits, metrics: Metrics, lanes: int = 1) -> None:
        self.name, self.limits, self.metrics = name, limits, metrics
        self.waiting: deque[QueuedRequest] = deque()
        self.tokens = 0
        """Of the jobs that wait."""
        self.users = 0
        """Requests within `deadline`."""
        self.closed = False
        self.rate = 0.0
        """Tokens a second of one lane, in the batches so far; the latest count most."""
        self.changed = threading.Condition()
        self.cores = max(1, torch.get_num_threads() // lanes)
        """That a lane computes with."""
        self.alone: ComputeThread | None = compute_thread() if lanes > 1 else None
        self.at_work: list[int] = []
        """Tokens of the batches that are computed."""
        metrics.begin(name)
        self.lanes = [
            threading.Thread(target=self._work, name=f"model {name}", daemon=True)
            for _ in range(lanes)
        ]
        for lane in self.lanes:
            lane.start()

    @property
    def alive(self) -> bool:
        """Whether no thread has died or ended."""
        return all(lane.is_alive() for lane in self.lanes)

    def check_room(self, tokens: int) -> None:
        """Refuse a request for which there is no room.

        Raises:
            RefusedError: 413 where it could never be taken, 429 where others wait, 503 at the end.
        """
        if tokens > self.limits.max_queue_tokens:
            raise too_many(tokens, self.limits.max_queue_tokens)
        if self.closed or not self.alive:
            reason = "the server is shutting down" if self.closed else "the model's thread has died"
            raise RefusedError(503, f"{reason}; ask another server", retry_after=1)
        if self.tokens + tokens > self.limits.max_queue_tokens:
            raise RefusedError(
                429,
                f"{self.tokens:,} tokens wait for the model '{self.name}' already; try again later",
                retry_after=self.seconds_to_wait(),
            )

    def seconds_to_wait(self) -> int:
        """In which the queue may be expected to be worked through."""
        expected = self.tokens / (self.rate * len(self.lanes)) if self.rate else 1.0
        return min(SLOWEST_RETRY, max(1, math.ceil(expected)))

    @asynccontextmanager
    async def deadline(self) -> AsyncIterator[None]:
        """Bound what is done for a request.

        Raises:
            RefusedError: 503 where the deadline has passed.
        """
        self.users += 1
        try:
            async with asyncio.timeout(self.limits.deadline):
                yield
        except TimeoutError:
            raise RefusedError(
                503,
                f"not answered within {self.limits.deadline:g} s; try again later",
                retry_after=self.seconds_to_wait(),
            ) from None
        finally:
            self.users -= 1

    async def ask(self, work: Operation, prepared: PreparedRequest) -> Any:
        """The result for a request, once its turn has come; it leaves the queue if cancelled.

        Raises:
            RefusedError: see `check_room`.
        """
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        job = QueuedRequest(work, prepared, answer, time.perf_counter())
        with self.changed:
            self.check_room(prepared.tokens)
            self.waiting.append(job)
            self.tokens += prepared.tokens
            self.changed.notify_all()
            self.metrics.queued(self.name, len(self.waiting), self.tokens)
        try:
            return await answer
        finally:
            self._forget(job)

    def close(self, seconds: float = 10.0) -> None:
        """Compute what waits, take nothing more, and end the threads."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()
        end = time.monotonic() + seconds
        for lane in self.lanes:
            lane.join(max(0.0, end - time.monotonic()))

    async def retire(self) -> None:
        """Close, once those who have begun to use it are done."""
        while self.users:
            await asyncio.sleep(0.05)
        await asyncio.to_thread(self.close)

    def _forget(self, job: QueuedRequest) -> None:
        """Take a job that nobody waits for any more out of the queue."""
        if not job.answer.cancelled():
            return
        with self.changed:
            if job in self.waiting:
                self.waiting.remove(job)
                self.tokens -= job.prepared.tokens
                self.metrics.queued(self.name, len(self.waiting), self.tokens)

    def _work(self) -> None:
        """Batch after batch, until closed and empty."""
        compute_with(self.cores)
        together = 0
        while jobs := self._take(together):
            together = len(jobs)
            try:
                self._answer(jobs)
            except Exception as error:
                BATCHING_LOG.exception("batch failed", extra={"fields": {"model": self.name}})
                deliver(jobs, [error] * len(jobs))

    def _answer(self, jobs: Sequence[QueuedRequest]) -> None:
        """Compute a batch."""
        tokens = sum(job.prepared.tokens for job in jobs)
        started = time.perf_counter()
        try:
            results = self._compute(jobs, tokens)
        finally:
            with self.changed:
                self.at_work.remove(tokens)
        seconds = time.perf_counter() - started
        now = tokens / max(seconds, 1e-6)
        with self.changed:
            self.rate = now if not self.rate else 0.8 * self.rate + 0.2 * now
        deliver(jobs, results)
        waits = [started - job.arrived for job in jobs]
        self.metrics.computed(self.name, tokens, waits, seconds)

    def _compute(self, jobs: Sequence[QueuedRequest], tokens: int) -> list[Any]:
        """The results: by this lane's cores, or, of a single request, by all of them.

        All are worth it where nothing else is computed for this model, if a lane has no helpers
        that would sleep then; and where the request is so large that they can share it out.
        """
        if self.alone and len(jobs) == 1:
            first = self.cores == 1 and jobs[0].first
            if first or tokens >= self.alone.threads * LEAST_TOKENS:
                found = self.alone.compute(lambda: results_of(jobs))
                if found is not None:
                    return found.result()
        return results_of(jobs)

    def _take(self, before: int) -> list[QueuedRequest]:
        """The next batch; none at the end.

        Args:
            before: requests in the batch before.
        """
        max_delay = self.limits.max_delay / 1000
        with self.changed:
            soon = self.changed.wait_for(lambda: self.waiting or self.closed, max_delay)
            if soon and before > 1 and max_delay:
                self.changed.wait_for(lambda: len(self.waiting) >= before or self.closed, max_delay)
            self.changed.wait_for(lambda: self.waiting or self.closed)
            taken: list[QueuedRequest] = []
            left: deque[QueuedRequest] = deque()
            share = -(-(self.tokens + sum(self.at_work)) // len(self.lanes))
            room = min(self.limits.max_batch_tokens, share)
            for job in self.waiting:
                fits = not taken or job.prepared.tokens <= room
                if fits and job.work is self.waiting[0].work:
                    taken.append(job)
                    room -= job.prepared.tokens
                else:
                    left.append(job)
                    room = room if fits else 0  # nobody overtakes one that did not fit
            self.waiting = left
            tokens = sum(job.prepared.tokens for job in taken)
            self.tokens -= tokens
            if taken:
                taken[0].first = not (left or self.at_work)
                self.at_work.append(tokens)
            self.metrics.queued(self.name, len(left), self.tokens)
        return taken


def results_of(jobs: Sequence[QueuedRequest]) -> list[Any]:
    """A result or an exception for each job; one that fails does not harm the others."""
    work = jobs[0].work
    try:
        results = work.run([job.prepared.content for job in jobs])
        if len(results) != len(jobs):
            raise RuntimeError(f"{len(results)} results for {len(jobs)} requests")
        return results
    except Exception as error:
        if len(jobs) == 1:
            return [error]
    return [result for job in jobs for result in results_of([job])]


def deliver(jobs: Sequence[QueuedRequest], results: Sequence[Any]) -> None:
    """Give each request its result, in the thread of its event loop."""
    loop = jobs[0].answer.get_loop()

    def give(start: int) -> None:
        end = start + AT_ONCE
        for job, result in zip(jobs[start:end], results[start:end], strict=True):
            if job.answer.done():  # its deadline has passed
                continue
            if isinstance(result, Exception):
                job.answer.set_exception(result)
            else:
                job.answer.set_result(result)
        if end < len(jobs):
            loop.call_soon(give, end)

    with suppress(RuntimeError):  # the loop has ended, and nobody waits
        loop.call_soon_threadsafe(give, 0)
