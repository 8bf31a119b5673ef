"""The queue: what goes together, who is refused, and that nothing accepted is lost."""

from __future__ import annotations

import asyncio
import gc
import math
import threading
import time
import weakref
from collections.abc import Coroutine, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bertkit.errors import BertkitError
from bertkit.serve import batching as one
from bertkit.serve.batching import MAX_RETRY_SECONDS, PreparedRequest, Worker
from bertkit.serve.limits import Limits, RefusedError
from bertkit.serve.metrics import Metrics


class Doubling:
    """Doubles numbers, once it may; remembers its batches."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.allowed = threading.Event()
        self.allowed.set()
        self.begun = threading.Event()

    def run(self, many: Sequence[int]) -> list[int]:
        self.begun.set()
        assert self.allowed.wait(20)
        self.batches.append(list(many))
        if any(number < 0 for number in many):
            raise ValueError("negative")
        return [2 * number for number in many]


workers: list[Worker] = []


@pytest.fixture(autouse=True)
def closing() -> Iterator[None]:
    yield
    while workers:
        workers.pop().close()


def worker(lanes: int = 1, **limits: Any) -> Worker:
    workers.append(
        Worker(
            "m",
            Limits(**{"max_delay": 0.0, "max_queue_tokens": 200_000, **limits}),
            Metrics(),
            lanes,
        )
    )
    return workers[-1]


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    async def bounded() -> Any:
        return await asyncio.wait_for(coroutine, 30)

    return asyncio.run(bounded())


async def gather_behind(
    own: Worker, work: Doubling, sizes: Sequence[int], others: Sequence[Doubling] = ()
) -> list[Any]:
    """Answers to requests 0, 1, ... that gather while a first one, 99, is at work."""
    work.allowed.clear()
    first = asyncio.create_task(own.ask(work, PreparedRequest(99, 1, 1)))
    await asyncio.to_thread(work.begun.wait, 20)
    tasks = [
        asyncio.create_task(own.ask(others[i] if others else work, PreparedRequest(i, size, 1)))
        for i, size in enumerate(sizes)
    ]
    await asyncio.sleep(0.01)
    work.allowed.set()
    await first
    return await asyncio.gather(*tasks, return_exceptions=True)


def test_requests_that_wait_are_computed_together_and_get_their_own_answers() -> None:
    work = Doubling()
    assert run(gather_behind(worker(), work, [10] * 5)) == [0, 2, 4, 6, 8]
    assert work.batches == [[99], [0, 1, 2, 3, 4]]


def test_lanes_share_what_waits() -> None:
    """While one has a batch, the other takes the next; then each takes about half of all."""
    work, own = Doubling(), worker(lanes=2)

    async def ask() -> list[int]:
        work.allowed.clear()
        at_work = []
        for number in (97, 98):  # a batch for each lane
            work.begun.clear()
            at_work.append(asyncio.create_task(own.ask(work, PreparedRequest(number, 1, 1))))
            await asyncio.to_thread(work.begun.wait, 20)
        tasks = [asyncio.create_task(own.ask(work, PreparedRequest(i, 10, 1))) for i in range(6)]
        await asyncio.sleep(0.01)
        work.allowed.set()
        await asyncio.gather(*at_work)
        return await asyncio.gather(*tasks)

    assert run(ask()) == [0, 2, 4, 6, 8, 10]
    assert sorted(i for batch in work.batches for i in batch) == [*range(6), 97, 98]
    sizes = [len(batch) for batch in work.batches if batch[0] < 90]
    assert len(sizes) > 1, "one lane took everything"
    assert own.at_work == []


def test_a_model_does_not_wait_for_another_one_that_has_all_cores() -> None:
    """Each has a request alone; the second is computed by its lane."""
    blocked, work = Doubling(), Doubling()
    first, second = worker(lanes=2), worker(lanes=2)

    async def ask() -> int:
        blocked.allowed.clear()
        waiting = asyncio.create_task(first.ask(blocked, PreparedRequest(1, 1, 1)))
        await asyncio.to_thread(blocked.begun.wait, 20)
        found = await second.ask(work, PreparedRequest(2, 1, 1))
        assert not waiting.done()
        blocked.allowed.set()
        await waiting
        return found

    assert run(ask()) == 4


def test_a_large_request_has_all_cores_though_another_is_at_work() -> None:
    names = []

    class Named(Doubling):
        def run(self, many: Sequence[int]) -> list[int]:
            names.append(threading.current_thread().name)
            return super().run(many)

    work, own = Named(), worker(lanes=2)
    own.cores = 8  # so that small ones stay in their lanes
    run(gather_behind(own, work, [10, 100_000]))
    assert names == ["model m", "model m", "alone"]


def test_a_request_alone_has_all_cores_and_others_have_half(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[str, int]] = []

    class Looking(Doubling):
        def run(self, many: Sequence[int]) -> list[int]:
            seen.append((threading.current_thread().name, torch.get_num_threads()))
            return super().run(many)

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    one.compute_thread.cache_clear()
    try:
        work, own = Looking(), worker(lanes=2)
        assert run(own.ask(work, PreparedRequest(1, 1, 1))) == 2
        name, threads = seen.pop()
        assert (name.startswith("alone"), threads) == (True, 2)
        run(gather_behind(own, work, [10, 10, 10]))
        assert {threads for name, threads in seen if name.startswith("model")} == {1}
    finally:
        one.compute_thread.cache_clear()
        torch.set_num_threads(before)


def test_a_batch_ends_at_the_budget_and_nobody_overtakes() -> None:
    work = Doubling()
    run(gather_behind(worker(max_batch_tokens=100), work, [60, 30, 20, 5, 200, 10]))
    assert work.batches == [[99], [0, 1], [2, 3], [4], [5]]


def test_only_the_same_work_goes_together() -> None:
    work, other = Doubling(), Doubling()
    own = worker()
    assert run(gather_behind(own, work, [1] * 4, [work, other, work, other])) == [0, 2, 4, 6]
    assert work.batches == [[99], [0, 2]]
    assert other.batches == [[1, 3]]


def test_one_that_fails_does_not_harm_the_others() -> None:
    work = Doubling()

    async def ask() -> list[Any]:
        own = worker()
        work.allowed.clear()
        tasks = [
            asyncio.create_task(own.ask(work, PreparedRequest(n, 1, 1))) for n in (5, 1, -1, 3)
        ]
        await asyncio.to_thread(work.begun.wait, 20)
        await asyncio.sleep(0.01)
        work.allowed.set()
        return await asyncio.gather(*tasks, return_exceptions=True)

    found = run(ask())
    assert isinstance(found[2], ValueError)
    assert [found[0], found[1], found[3]] == [10, 2, 6]


def test_a_full_queue_refuses_with_the_seconds_to_wait() -> None:
    work = Doubling()
    own = worker(max_queue_tokens=100)
    found = run(gather_behind(own, work, [60, 40, 1, 101]))
    assert found[:2] == [0, 2]
    assert [found[2].status, found[3].status] == [429, 413]
    assert 1 <= int(found[2].headers["retry-after"]) <= MAX_RETRY_SECONDS
    assert "retry-after" not in found[3].headers
    assert own.tokens == 0


def test_the_wait_that_is_told_follows_the_measured_rate() -> None:
    own = worker()
    own.rate, own.tokens = 100.0, 1234
    assert own.seconds_to_wait() == 13
    own.tokens = 10**9
    assert own.seconds_to_wait() == MAX_RETRY_SECONDS


async def in_time(own: Worker, work: Doubling, number: int) -> Any:
    async with own.deadline():
        return await own.ask(work, PreparedRequest(number, 10, 1))


def test_a_deadline_ends_the_wait_and_frees_the_queue() -> None:
    work = Doubling()
    own = worker(deadline=0.1)

    async def ask() -> list[Any]:
        work.allowed.clear()
        tasks = [asyncio.create_task(in_time(own, work, 1))]
        await asyncio.to_thread(work.begun.wait, 20)
        tasks += [asyncio.create_task(in_time(own, work, number)) for number in (2, 3)]
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert own.tokens == 0
        assert not own.waiting
        work.allowed.set()
        return [*found, await own.ask(work, PreparedRequest(4, 1, 1))]

    found = run(ask())
    assert [error.status for error in found[:3]] == [503] * 3
    assert all("retry-after" in error.headers for error in found[:3])
    assert found[3] == 8
    assert work.batches == [[1], [4]]  # nobody waits for 2 and 3 any more


def test_closing_answers_what_waits_and_takes_no_more() -> None:
    work = Doubling()
    own = worker()

    async def ask() -> list[Any]:
        work.allowed.clear()
        tasks = [asyncio.create_task(own.ask(work, PreparedRequest(n, 1, 1))) for n in range(6)]
        await asyncio.to_thread(work.begun.wait, 20)
        closing = asyncio.create_task(asyncio.to_thread(own.close))
        while not own.closed:
            await asyncio.sleep(0.001)
        with pytest.raises(RefusedError, match="shutting down") as refused:
            await own.ask(work, PreparedRequest(9, 1, 1))
        assert refused.value.status == 503
        work.allowed.set()
        await closing
        return await asyncio.gather(*tasks)

    assert run(ask()) == [0, 2, 4, 6, 8, 10]
    assert not own.alive


def test_a_request_to_an_idle_model_does_not_linger() -> None:
    """With a linger of an hour the test would not end."""
    work = Doubling()
    own = worker(max_delay=3_600_000.0)

    async def ask() -> list[Any]:
        return [await own.ask(work, PreparedRequest(n, 1, 1)) for n in range(3)]

    assert run(ask()) == [0, 2, 4]
    own.closed = True  # does not linger at the end, either
    own.close()


def test_after_a_batch_of_several_the_clients_are_awaited() -> None:
    work = Doubling()
    own = worker(max_delay=3_600_000.0)

    async def ask() -> list[Any]:
        await gather_behind(own, work, [1] * 3)
        tasks = []
        for number in range(3):  # one after the other, as clients come back
            tasks.append(asyncio.create_task(own.ask(work, PreparedRequest(number, 1, 1))))
            await asyncio.sleep(0.005)
        return await asyncio.gather(*tasks)

    assert run(ask()) == [0, 2, 4]
    assert work.batches[-1] == [0, 1, 2]


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(0, 3)), min_size=1, max_size=30),
    st.integers(1, 100),
    st.integers(1, 3),
)
def test_every_request_is_answered_once_with_its_own_answer(
    requests: list[tuple[int, int]], budget: int, lanes: int
) -> None:
    works = [Doubling() for _ in range(4)]
    own = Worker("m", Limits(max_batch_tokens=budget, max_delay=0.0), Metrics(), lanes)

    async def ask() -> list[int]:
        return await asyncio.gather(
            *(
                own.ask(works[w], PreparedRequest(i, size, 1))
                for i, (size, w) in enumerate(requests)
            )
        )

    assert run(ask()) == [2 * i for i in range(len(requests))]
    own.close()
    for number, work in enumerate(works):
        done = [i for batch in work.batches for i in batch]
        wanted = [i for i, (_, w) in enumerate(requests) if w == number]
        assert done == wanted if lanes == 1 else sorted(done) == wanted
        for batch in work.batches:
            assert len(batch) == 1 or sum(requests[i][0] for i in batch) <= budget


@pytest.mark.parametrize("value", [-1, math.inf, math.nan])
@pytest.mark.parametrize(
    "name", ["max_queue_tokens", "max_batch_tokens", "deadline", "max_bytes", "max_delay"]
)
def test_limits_must_make_sense(name: str, value: Any) -> None:
    with pytest.raises(BertkitError, match=f"--{name.replace('_', '-')} must be"):
        Limits(**{name: value})
    if name in ("deadline", "max_delay"):  # the clock of a thread ends long before a float does
        with pytest.raises(BertkitError, match="must be at most"):
            Limits(**{name: 1e308})


def test_a_wrong_number_of_results_is_an_error_of_each_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    work, own = Doubling(), worker()
    monkeypatch.setattr(work, "run", lambda many: [])

    async def ask() -> Any:
        async with own.deadline():
            return await own.ask(work, PreparedRequest(1, 1, 1))

    with pytest.raises(RuntimeError, match="0 results for 1"):
        run(ask())
    monkeypatch.undo()
    assert run(ask()) == 2


def test_what_fails_beside_the_model_does_not_end_its_thread(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    work, own = Doubling(), worker()
    monkeypatch.setattr(own.metrics, "computed", lambda *given: 1 / 0)
    assert run(own.ask(work, PreparedRequest(1, 1, 1))) == 2
    assert run(own.ask(work, PreparedRequest(2, 1, 1))) == 4
    assert own.alive
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_model_whose_thread_has_died_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    work, own = Doubling(), worker()
    monkeypatch.setattr(own, "_take", lambda before: 1 / 0)
    asking = own.ask(work, PreparedRequest(1, 1, 1))  # the thread still waits for this one
    assert run(asking) == 2
    own.threads[0].join(20)
    with pytest.raises(RefusedError, match="has died"):
        run(own.ask(work, PreparedRequest(1, 1, 1)))


def test_a_call_whose_caller_is_gone_is_left_out() -> None:
    thread, gone = one.ComputeThread(1), Future[None]()
    gone.cancel()
    assert thread.free.acquire(timeout=10)
    thread.asked.put((lambda: None, gone))
    assert thread.free.acquire(timeout=10), "the thread is free again"
    thread.free.release()
    found = thread.compute(lambda: 7)
    assert found is not None
    assert found.result(timeout=10) == 7


def test_a_thread_that_waits_keeps_nothing_of_its_last_call() -> None:
    class Large:
        """What a call reads and returns."""

    given, thread = Large(), one.ComputeThread(1)
    function = partial(lambda held: held, given)
    found = thread.compute(function)
    assert found is not None
    assert found.result(timeout=10) is given
    alive = weakref.ref(given)
    del given, function, found
    end = time.monotonic() + 10
    while alive() is not None and time.monotonic() < end:
        gc.collect()
        time.sleep(0.01)
    assert alive() is None
