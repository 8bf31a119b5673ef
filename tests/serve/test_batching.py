"""The queue: what is computed together, who is refused, and that nothing accepted is lost."""

from __future__ import annotations

import asyncio
import gc
import math
import threading
import time
import weakref
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bertkit.errors import BertkitError
from bertkit.serve import batching
from bertkit.serve.admission import Limits, Metrics, RefusedError
from bertkit.serve.batching import MAX_RETRY_SECONDS, PreparedRequest, Worker


class Doubling:
    """Doubles numbers, once it is allowed to; remembers its batches."""

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


def make_worker(threads: int = 1, **limits: Any) -> Worker:
    own = Limits(**{"max_delay": 0.0, "max_queue_tokens": 200_000, **limits})
    workers.append(Worker("m", own, Metrics(), threads))
    return workers[-1]


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    async def bounded() -> Any:
        return await asyncio.wait_for(coroutine, 30)

    return asyncio.run(bounded())


async def ask(worker: Worker, work: Doubling, number: int, tokens: int = 1) -> Any:
    async def prepare() -> PreparedRequest:
        return PreparedRequest(number, tokens, 1)

    return (await worker.answer(work, tokens, prepare))[1]


async def ask_behind(
    worker: Worker, work: Doubling, sizes: Sequence[int], others: Sequence[Doubling] = ()
) -> list[Any]:
    """Answers to requests 0, 1, ... that gather while a first request, 99, is computed."""
    work.allowed.clear()
    work.begun.clear()
    first = asyncio.create_task(ask(worker, work, 99))
    await asyncio.to_thread(work.begun.wait, 20)
    tasks = [
        asyncio.create_task(ask(worker, others[i] if others else work, i, size))
        for i, size in enumerate(sizes)
    ]
    await asyncio.sleep(0.01)
    work.allowed.set()
    await first
    return await asyncio.gather(*tasks, return_exceptions=True)


def test_waiting_requests_are_computed_together_and_get_their_own_answers() -> None:
    work = Doubling()
    assert run(ask_behind(make_worker(), work, [10] * 5)) == [0, 2, 4, 6, 8]
    assert work.batches == [[99], [0, 1, 2, 3, 4]]


def test_threads_share_what_waits() -> None:
    work, worker = Doubling(), make_worker(threads=2)

    async def ask_all() -> list[int]:
        work.allowed.clear()
        computed = []
        for number in (97, 98):  # a batch for each thread
            work.begun.clear()
            computed.append(asyncio.create_task(ask(worker, work, number)))
            await asyncio.to_thread(work.begun.wait, 20)
        tasks = [asyncio.create_task(ask(worker, work, i, 10)) for i in range(6)]
        await asyncio.sleep(0.01)
        work.allowed.set()
        await asyncio.gather(*computed)
        return await asyncio.gather(*tasks)

    assert run(ask_all()) == [0, 2, 4, 6, 8, 10]
    sizes = [len(batch) for batch in work.batches if batch[0] < 90]
    assert len(sizes) > 1, "one thread took everything"


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
    batching.all_cores.cache_clear()
    try:
        work, worker = Looking(), make_worker(threads=2)
        assert run(ask(worker, work, 1)) == 2
        name, threads = seen.pop()
        assert (name.startswith("all cores"), threads) == (True, 2)
        run(ask_behind(worker, work, [10, 10, 10]))
        assert {threads for name, threads in seen if name.startswith("model")} == {1}
    finally:
        batching.all_cores.cache_clear()
        torch.set_num_threads(before)


def test_a_batch_ends_at_the_budget_and_no_request_overtakes() -> None:
    work = Doubling()
    run(ask_behind(make_worker(max_batch_tokens=100), work, [60, 30, 20, 5, 200, 10]))
    assert work.batches == [[99], [0, 1], [2, 3], [4], [5]]


def test_only_the_same_operation_shares_a_batch() -> None:
    work, other = Doubling(), Doubling()
    found = run(ask_behind(make_worker(), work, [1] * 4, [work, other, work, other]))
    assert found == [0, 2, 4, 6]
    assert (work.batches, other.batches) == ([[99], [0, 2]], [[1, 3]])


def test_a_request_that_fails_does_not_harm_the_others() -> None:
    work = Doubling()

    async def ask_all() -> list[Any]:
        worker = make_worker()
        work.allowed.clear()
        tasks = [asyncio.create_task(ask(worker, work, n)) for n in (5, 1, -1, 3)]
        await asyncio.to_thread(work.begun.wait, 20)
        await asyncio.sleep(0.01)
        work.allowed.set()
        return await asyncio.gather(*tasks, return_exceptions=True)

    found = run(ask_all())
    assert isinstance(found[2], ValueError)
    assert [found[0], found[1], found[3]] == [10, 2, 6]


def test_a_full_queue_refuses_with_the_seconds_to_wait() -> None:
    worker = make_worker(max_queue_tokens=101)
    found = run(ask_behind(worker, Doubling(), [60, 40, 1, 102]))
    assert found[:2] == [0, 2]
    assert [found[2].status, found[3].status] == [429, 413]
    assert 1 <= int(found[2].headers["retry-after"]) <= MAX_RETRY_SECONDS
    assert "retry-after" not in found[3].headers
    assert worker.admitted == 0


def test_a_deadline_ends_the_wait_and_frees_the_queue() -> None:
    work = Doubling()
    worker = make_worker(deadline=0.1)

    async def ask_all() -> list[Any]:
        work.allowed.clear()
        tasks = [asyncio.create_task(ask(worker, work, 1))]
        await asyncio.to_thread(work.begun.wait, 20)
        tasks += [asyncio.create_task(ask(worker, work, number)) for number in (2, 3)]
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert worker.admitted == worker.waiting_tokens == 0
        work.allowed.set()
        return [*found, await ask(worker, work, 4)]

    found = run(ask_all())
    assert [error.status for error in found[:3]] == [503] * 3
    assert all("retry-after" in error.headers for error in found[:3])
    assert found[3] == 8
    assert work.batches == [[1], [4]]  # nobody waits for 2 and 3 any more


@pytest.mark.slow
def test_nothing_of_a_request_stays_after_its_answer() -> None:
    """Not even until the next request: texts of clients may be secret, and large."""

    class Text:
        pass

    class Reading:
        def run(self, many: Sequence[Text]) -> list[None]:
            return [None] * len(many)

    async def ask_once() -> weakref.ref[Text]:
        text = Text()

        async def prepare() -> PreparedRequest:
            return PreparedRequest(text, 1, 1)

        await make_worker().answer(Reading(), 1, prepare)
        return weakref.ref(text)

    text, end = run(ask_once()), time.monotonic() + 5
    while text() is not None:
        assert time.monotonic() < end
        gc.collect()
        time.sleep(0.01)


def test_closing_answers_what_waits_and_accepts_no_more() -> None:
    work = Doubling()
    worker = make_worker()

    async def ask_all() -> list[Any]:
        work.allowed.clear()
        tasks = [asyncio.create_task(ask(worker, work, n)) for n in range(6)]
        await asyncio.to_thread(work.begun.wait, 20)
        closing = asyncio.create_task(asyncio.to_thread(worker.close))
        while not worker.closed:
            await asyncio.sleep(0.001)
        with pytest.raises(RefusedError) as refused:
            await ask(worker, work, 9)
        assert refused.value.status == 503
        work.allowed.set()
        await closing
        return await asyncio.gather(*tasks)

    assert run(ask_all()) == [0, 2, 4, 6, 8, 10]
    assert not worker.alive


def test_clients_are_awaited_only_after_a_batch_of_several() -> None:
    """A delay of an hour, so that the test would not end if a request alone waited for it."""
    work, worker = Doubling(), make_worker(max_delay=3_600_000.0)

    async def ask_all() -> list[Any]:
        alone = [await ask(worker, work, n) for n in range(3)]
        await ask_behind(worker, work, [1] * 3)
        tasks = []
        for number in range(3):  # one after the other, as clients come back
            tasks.append(asyncio.create_task(ask(worker, work, number)))
            await asyncio.sleep(0.005)
        return [*alone, *await asyncio.gather(*tasks)]

    assert run(ask_all()) == [0, 2, 4, 0, 2, 4]
    assert work.batches[-1] == [0, 1, 2]


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(0, 3)), min_size=1, max_size=30),
    st.integers(1, 100),
    st.integers(1, 3),
)
def test_each_request_is_answered_once_with_its_own_answer(
    requests: list[tuple[int, int]], budget: int, threads: int
) -> None:
    works = [Doubling() for _ in range(4)]
    worker = Worker("m", Limits(max_batch_tokens=budget, max_delay=0.0), Metrics(), threads)

    async def ask_all() -> list[int]:
        asked = (ask(worker, works[w], i, size) for i, (size, w) in enumerate(requests))
        return await asyncio.gather(*asked)

    assert run(ask_all()) == [2 * i for i in range(len(requests))]
    worker.close()
    for number, work in enumerate(works):
        done = [i for batch in work.batches for i in batch]
        wanted = [i for i, (_, w) in enumerate(requests) if w == number]
        assert done == wanted if threads == 1 else sorted(done) == wanted
        for batch in work.batches:
            assert len(batch) == 1 or sum(requests[i][0] for i in batch) <= budget


@pytest.mark.parametrize("value", [-1, math.inf, math.nan, 1e308])
@pytest.mark.parametrize("name", ["max_queue_tokens", "deadline", "max_delay"])
def test_limits_are_checked(name: str, value: Any) -> None:
    if name != "max_queue_tokens" or value != 1e308:  # the clock of a thread ends before that
        with pytest.raises(BertkitError, match=f"--{name.replace('_', '-')} must be"):
            Limits(**{name: value})
