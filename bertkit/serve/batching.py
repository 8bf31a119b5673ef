"""Combine requests into batches: each model has a bounded queue and threads that serve it.

As soon as a thread is free, it takes waiting requests, oldest first, up to a budget of tokens.
While it computes, the next batch gathers. So batches grow with the load, and a request to an idle
model starts at once. torch releases the interpreter lock while it computes.

On a CPU two threads share the queue, each with half of the cores. A single thread with all cores
would have to wait for the slowest core after every matrix product, and one core is always needed
for requests and responses. If half of the cores is a single core, a request that arrives alone is
computed on both cores by `compute_thread`. There is one such thread for all models, which also
loads them: every thread that computes with several cores keeps its own OpenMP workers, and with two
such threads there would be more workers than cores. The workers would then sleep after every
product instead of waiting for the next one.

Clients whose requests were answered in one batch are likely to send their next requests at about
the same time. The thread then waits a few milliseconds until as many requests have arrived.
"""

from __future__ import annotations

import asyncio
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
from bertkit.serve.limits import LOG, Limits, RefusedError, too_many
from bertkit.serve.metrics import Metrics

OperationResult = TypeVar("OperationResult")


class ComputeThread:
    """A thread that runs one call at a time; as a daemon, it ends with the process."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.free = threading.Lock()
        self.asked: SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = SimpleQueue()
        threading.Thread(target=self._work, name="alone", daemon=True).start()

    def compute(self, function: Callable[[], OperationResult]) -> Future[OperationResult] | None:
        """Start a call and return its future, or return None if the thread is busy."""
        if not self.free.acquire(blocking=False):
            return None
        future: Future[OperationResult] = Future()
        self.asked.put((function, future))
        return future

    def _work(self) -> None:
        compute_with(self.threads)
        while True:
            self._compute(*self.asked.get())  # a method, so that nothing is kept while it waits

    def _compute(self, function: Callable[[], Any], future: Future[Any]) -> None:
        if not future.set_running_or_notify_cancel():  # its caller is gone
            self.free.release()
            return
        try:
            outcome, error = function(), None
        except BaseException as raised:  # the future raises it again for its caller
            outcome, error = None, raised
        self.free.release()
        if error is None:
            future.set_result(outcome)
        else:
            future.set_exception(error)
            error = None  # it refers to this frame


@cache
def compute_thread() -> ComputeThread:
    """Return the process's single thread, made at the first call with torch's thread count."""
    return ComputeThread(torch.get_num_threads())


AT_ONCE = 2
"""The number of requests that start, or receive their results, in one iteration of the event loop.
Each takes about a millisecond, so a client that connects meanwhile waits only for these few."""
MAX_RETRY_SECONDS = 60
"""The maximum of the seconds after which a refused client is told to try again."""


class PreparedRequest(NamedTuple):
    """A request that is ready to be computed."""

    content: Any
    """What `Operation.run` receives for this request."""
    tokens: int
    """The number of tokens in all sequences."""
    inputs: int
    windowed: int = 0
    """The number of inputs that need more than one window."""
    cut: dict[str, int] | None = None
    """A description of what was lost -> the number of inputs affected."""


class Operation(Protocol):
    """A computation that a model offers; requests for the same operation share batches."""

    def run(self, many: Sequence[Any]) -> list[Any]:
        """Return one result for each request's content, in order."""


@dataclass(eq=False)
class QueuedRequest:
    """A request in the queue."""

    work: Operation
    prepared: PreparedRequest
    answer: asyncio.Future[Any]
    arrived: float
    first: bool = False
    """Whether the model had no other request when this one was taken."""


class Turns:
    """A queue that starts a few requests per iteration of the event loop, in order of arrival."""

    def __init__(self) -> None:
        self.waiting: deque[asyncio.Future[None]] = deque()

    async def take(self) -> None:
        """Wait until it is this request's turn."""
        loop = asyncio.get_running_loop()
        turn = loop.create_future()
        self.waiting.append(turn)
        if len(self.waiting) == 1:
            loop.call_soon(self._next, loop)
        await turn

    def _next(self, loop: asyncio.AbstractEventLoop) -> None:
        for _ in range(min(AT_ONCE, len(self.waiting))):
            turn = self.waiting.popleft()
            if not turn.done():  # its client has disconnected
                turn.set_result(None)
        if self.waiting:
            loop.call_soon(self._next, loop)


class Worker:
    """One model's queue and the threads that work through it."""

    def __init__(self, name: str, limits: Limits, metrics: Metrics, threads: int = 1) -> None:
        self.name, self.limits, self.metrics = name, limits, metrics
        self.waiting: deque[QueuedRequest] = deque()
        self.tokens = 0
        """The number of tokens in the waiting requests."""
        self.users = 0
        """The number of requests inside `deadline`."""
        self.closed = False
        self.rate = 0.0
        """Tokens per second of one thread, as an exponential moving average over its batches."""
        self.changed = threading.Condition()
        self.cores = max(1, torch.get_num_threads() // threads)
        """The number of cores that each thread computes with."""
        self.shared_thread: ComputeThread | None = compute_thread() if threads > 1 else None
        self.at_work: list[int] = []
        """The number of tokens in each batch that is being computed."""
        metrics.begin(name)
        self.threads = [
            threading.Thread(target=self._work, name=f"model {name}", daemon=True)
            for _ in range(threads)
        ]
        for thread in self.threads:
            thread.start()

    @property
    def alive(self) -> bool:
        """Whether all threads are still running."""
        return all(thread.is_alive() for thread in self.threads)

    def check_room(self, tokens: int) -> None:
        """Check that the queue has room for a request of `tokens` tokens."""
        if tokens > self.limits.max_queue_tokens:
            raise too_many(tokens, self.limits.max_queue_tokens)
        if self.closed or not self.alive:
            reason = "the server is shutting down" if self.closed else "the model's thread has died"
            raise RefusedError(503, f"{reason}; ask another server", retry_after=1)
        if self.tokens + tokens > self.limits.max_queue_tokens:
            raise RefusedError(
                429,
                f"{self.tokens:,} tokens already wait for the model '{self.name}'; try again later",
                retry_after=self.seconds_to_wait(),
            )

    def seconds_to_wait(self) -> int:
        """Return the expected seconds until the queue is empty, 1 to `MAX_RETRY_SECONDS`."""
        expected = self.tokens / (self.rate * len(self.threads)) if self.rate else 1.0
        return min(MAX_RETRY_SECONDS, max(1, math.ceil(expected)))

    @asynccontextmanager
    async def deadline(self) -> AsyncIterator[None]:
        """Cancel the work inside the block when the deadline has passed."""
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
        """Queue a request and return its result; if cancelled, the request leaves the queue."""
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
            if answer.cancelled():
                with self.changed:
                    if job in self.waiting:
                        self.waiting.remove(job)
                        self.tokens -= prepared.tokens
                        self.metrics.queued(self.name, len(self.waiting), self.tokens)

    def close(self, seconds: float = 10.0) -> None:
        """Accept no more requests, and wait up to `seconds` for the threads to finish the queue."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()
        end = time.monotonic() + seconds
        for thread in self.threads:
            thread.join(max(0.0, end - time.monotonic()))

    async def retire(self) -> None:
        """Close the worker once all requests inside `deadline` are done."""
        while self.users:
            await asyncio.sleep(0.05)
        await asyncio.to_thread(self.close)

    def _work(self) -> None:
        """Compute batches until the worker is closed and its queue is empty."""
        compute_with(self.cores)
        together = 0
        while jobs := self._take(together):
            together = len(jobs)
            try:
                self._answer(jobs)
            except Exception as error:
                LOG.exception("batch failed", extra={"fields": {"model": self.name}})
                deliver(jobs, [error] * len(jobs))

    def _answer(self, jobs: Sequence[QueuedRequest]) -> None:
        """Compute a batch, deliver its results and record its metrics."""
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
        """Return the results, computed on this thread's cores or, for a single request, on all.

        All cores are used in two cases: the model has no other request and this thread has one
        core, so that no OpenMP workers of its own would fall asleep; or the request is so large
        that it is worth distributing.
        """
        if self.shared_thread and len(jobs) == 1:
            first = self.cores == 1 and jobs[0].first
            if first or tokens >= self.shared_thread.threads * LEAST_TOKENS:
                found = self.shared_thread.compute(lambda: compute_jobs(jobs))
                if found is not None:
                    return found.result()
        return compute_jobs(jobs)

    def _take(self, before: int) -> list[QueuedRequest]:
        """Wait for the next batch and return it; an empty list means that the worker is closed."""
        max_delay = self.limits.max_delay / 1000
        with self.changed:
            soon = self.changed.wait_for(lambda: self.waiting or self.closed, max_delay)
            if soon and before > 1 and max_delay:
                self.changed.wait_for(lambda: len(self.waiting) >= before or self.closed, max_delay)
            self.changed.wait_for(lambda: self.waiting or self.closed)
            taken: list[QueuedRequest] = []
            left: deque[QueuedRequest] = deque()
            share = -(-(self.tokens + sum(self.at_work)) // len(self.threads))
            room = min(self.limits.max_batch_tokens, share)
            for job in self.waiting:
                fits = not taken or job.prepared.tokens <= room
                if fits and job.work is self.waiting[0].work:
                    taken.append(job)
                    room -= job.prepared.tokens
                else:
                    left.append(job)
                    room = room if fits else 0  # no request overtakes one that did not fit
            self.waiting = left
            tokens = sum(job.prepared.tokens for job in taken)
            self.tokens -= tokens
            if taken:
                taken[0].first = not (left or self.at_work)
                self.at_work.append(tokens)
            self.metrics.queued(self.name, len(left), self.tokens)
        return taken


def compute_jobs(jobs: Sequence[QueuedRequest]) -> list[Any]:
    """Return a result or an exception for each job; a failing job does not affect the others."""
    work = jobs[0].work
    try:
        results = work.run([job.prepared.content for job in jobs])
        if len(results) != len(jobs):
            raise RuntimeError(f"{len(results)} results for {len(jobs)} requests")
        return results
    except Exception as error:
        if len(jobs) == 1:
            return [error]
    return [result for job in jobs for result in compute_jobs([job])]


def deliver(jobs: Sequence[QueuedRequest], results: Sequence[Any]) -> None:
    """Hand each request its result or exception, in the thread of its event loop."""
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

    with suppress(RuntimeError):  # the loop has ended, so nobody waits
        loop.call_soon_threadsafe(give, 0)
