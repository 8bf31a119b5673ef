"""Combine requests into batches: each model has a bounded queue and threads that serve it.

As soon as a thread is free, it takes waiting requests, oldest first, up to a budget of tokens.
While it computes, the next batch gathers. So batches grow with the load, and a request to an idle
model starts at once. torch releases the interpreter lock while it computes.

On a CPU two threads share the queue, each with half of the cores, since a single thread with all
cores would wait for the slowest core after every matrix product. If half of the cores is a single
core, a request that arrives alone is computed on both cores by `all_cores`. There is one such
thread for all models, which also loads them: with more OpenMP workers than cores, the workers would
sleep after every product instead of waiting for the next one.

Clients whose requests were answered in one batch are likely to send their next requests at about
the same time. The thread then waits a few milliseconds until as many requests have arrived.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, TypeVar

import torch

from bertkit.serve.admission import Limits, Metrics, RefusedError, too_many_tokens
from bertkit.tasks.sequences import LEAST_TOKENS, set_threads

T = TypeVar("T")
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


class AllCores:
    """A thread that computes one call at a time with all cores."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.free = threading.Lock()
        self.pool = ThreadPoolExecutor(1, "all cores", initializer=set_threads, initargs=(threads,))

    def compute(self, function: Callable[[], T]) -> Future[T] | None:
        """Start a call and return its future, or return None if the thread is busy."""

        def run() -> T:
            try:
                return function()
            finally:
                self.free.release()

        return self.pool.submit(run) if self.free.acquire(blocking=False) else None


@cache
def all_cores() -> AllCores:
    """Return the process's single thread, made at the first call with torch's thread count."""
    return AllCores(torch.get_num_threads())


@dataclass(eq=False)
class QueuedRequest:
    """A request in the queue."""

    work: Any
    """An operation of `bertkit.serve.operations`; a batch has one."""
    prepared: PreparedRequest
    answer: asyncio.Future[Any]
    arrived: float
    alone: bool = False
    """Whether the model had no other request when this one was taken."""


class Worker:
    """One model's queue and the threads that work through it."""

    def __init__(self, name: str, limits: Limits, metrics: Metrics, threads: int = 1) -> None:
        self.name, self.limits, self.metrics = name, limits, metrics
        self.users = self.admitted = 0
        """The number of requests inside `answer`, and of their tokens."""
        self.waiting: deque[QueuedRequest] = deque()
        self.waiting_tokens = 0
        self.computing: list[int] = []
        """The number of tokens in each batch that is being computed."""
        self.closed = False
        self.rate = 0.0
        """Tokens per second of one thread, as an exponential moving average over its batches."""
        self.changed = threading.Condition()
        self.cores = max(1, torch.get_num_threads() // threads)
        """The number of cores that each thread computes with."""
        self.all_cores = all_cores() if threads > 1 else None
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

    async def answer(
        self, work: Any, tokens: int, prepare: Callable[[], Awaitable[PreparedRequest]]
    ) -> tuple[PreparedRequest, Any]:
        """Admit a request of about so many tokens, prepare it and wait for its result."""
        self.check_room(tokens, tokens)
        self.users += 1
        self.admitted += tokens
        try:
            async with asyncio.timeout(self.limits.deadline):
                prepared = await prepare()
                self.check_room(prepared.tokens, prepared.tokens - tokens)
                self.admitted += prepared.tokens - tokens
                tokens = prepared.tokens
                return prepared, await self._queue(work, prepared)
        except TimeoutError:
            message = f"not answered within {self.limits.deadline:g} s; try again later"
            raise RefusedError(503, message, retry_after=self.seconds_to_wait()) from None
        finally:
            self.users -= 1
            self.admitted -= tokens

    def check_room(self, tokens: int, more: int) -> None:
        """Check that `more` tokens can be admitted for a request of `tokens` tokens."""
        if tokens > self.limits.max_queue_tokens:
            raise too_many_tokens(tokens, self.limits.max_queue_tokens)
        if more > 0 and self.admitted + more > self.limits.max_queue_tokens:
            raise RefusedError(
                429,
                f"{self.admitted:,} tokens already wait for the model '{self.name}'; try again "
                "later",
                retry_after=self.seconds_to_wait(),
            )

    def seconds_to_wait(self) -> int:
        """Return the expected seconds until all is computed, 1 to `MAX_RETRY_SECONDS`."""
        expected = self.admitted / (self.rate * len(self.threads)) if self.rate else 1.0
        return min(MAX_RETRY_SECONDS, max(1, math.ceil(expected)))

    async def _queue(self, work: Any, prepared: PreparedRequest) -> Any:
        """Queue a request and return its result; if cancelled, the request leaves the queue."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        job = QueuedRequest(work, prepared, answer, time.perf_counter())
        with self.changed:
            if self.closed or not self.alive:
                raise RefusedError(503, "the server is shutting down; try again", retry_after=1)
            self.waiting.append(job)
            self.waiting_tokens += prepared.tokens
            self.changed.notify_all()
        try:
            return await answer
        finally:
            if answer.cancelled():
                with self.changed:
                    if job in self.waiting:
                        self.waiting.remove(job)
                        self.waiting_tokens -= prepared.tokens

    def close(self, seconds: float = 10.0) -> None:
        """Accept no more requests, and wait up to `seconds` for the threads to finish the queue."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()
        end = time.monotonic() + seconds
        for thread in self.threads:
            thread.join(max(0.0, end - time.monotonic()))

    async def retire(self) -> None:
        """Close the worker once all requests inside `answer` are done."""
        while self.users:
            await asyncio.sleep(0.05)
        await asyncio.to_thread(self.close)

    def _work(self) -> None:
        """Compute batches until the worker is closed and its queue is empty."""
        set_threads(self.cores)
        before = 0
        while jobs := self._take(before):
            before = len(jobs)
            self._answer(jobs)
            del jobs  # the texts of clients are not kept until the next request

    def _answer(self, jobs: Sequence[QueuedRequest]) -> None:
        """Compute a batch, deliver its results and record its metrics."""
        tokens = sum(job.prepared.tokens for job in jobs)
        started = time.perf_counter()
        results = self._compute(jobs, tokens)
        seconds = time.perf_counter() - started
        with self.changed:
            self.computing.remove(tokens)
            rate = tokens / max(seconds, 1e-6)
            self.rate = 0.8 * self.rate + 0.2 * rate if self.rate else rate
        deliver(jobs, results)
        waits = [started - job.arrived for job in jobs]
        self.metrics.computed(self.name, tokens, waits, seconds)

    def _compute(self, jobs: Sequence[QueuedRequest], tokens: int) -> list[Any]:
        """Return the results, computed on this thread's cores or, for a single request, on all."""
        if self.all_cores and len(jobs) == 1:
            alone = self.cores == 1 and jobs[0].alone  # no OpenMP workers would fall asleep
            if alone or tokens >= self.all_cores.threads * LEAST_TOKENS:
                future = self.all_cores.compute(lambda: compute_jobs(jobs))
                if future is not None:
                    return future.result()
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
            share = -(-(self.waiting_tokens + sum(self.computing)) // len(self.threads))
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
            self.waiting_tokens -= tokens
            if taken:
                taken[0].alone = not (left or self.computing)
                self.computing.append(tokens)
        return taken


def compute_jobs(jobs: Sequence[QueuedRequest]) -> list[Any]:
    """Return a result or an exception for each job; a failing job does not affect the others."""
    try:
        return jobs[0].work.run([job.prepared.content for job in jobs])
    except Exception as error:
        if len(jobs) == 1:
            return [error]
    return [result for job in jobs for result in compute_jobs([job])]


def deliver(jobs: Sequence[QueuedRequest], results: Sequence[Any]) -> None:
    """Hand each request its result or exception, in the thread of its event loop."""

    def set_results() -> None:
        for job, result in zip(jobs, results, strict=True):
            if job.answer.done():  # its deadline has passed
                continue
            if isinstance(result, Exception):
                job.answer.set_exception(result)
            else:
                job.answer.set_result(result)

    with suppress(RuntimeError):  # the loop has ended, so nobody waits
        jobs[0].answer.get_loop().call_soon_threadsafe(set_results)
