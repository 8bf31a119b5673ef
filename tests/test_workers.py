"""Worker processes: the order of results, and what happens when one of them dies."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from bertkit.errors import BertkitError
from bertkit.processes import Workers
from bertkit.tokenizer.wordpiece import SPECIAL_TOKENS, Tokenizer
from tests.conftest import python

DIED = r"a worker process of `test` died .*fewer --processes"
LARGE = 50_000_000


def pool(work: Any, processes: int = 2) -> Workers[Any, Any]:
    return Workers(work, processes, command="test", flag="--processes")


def square(number: int) -> int:
    time.sleep(0.02 * (number % 3))  # later ones are done before
    return number * number


class LargeSecond:
    """Work whose second result is larger than a pipe holds, and is made once `gate` exists."""

    def __init__(self, gate: Path) -> None:
        self.gate = gate

    def __call__(self, number: int) -> bytes:
        while number and not self.gate.exists():
            time.sleep(0.01)
        return bytes(LARGE if number else 1)


def fail(number: int) -> int:
    raise KeyError(number)


def refuse(number: int) -> int:
    raise BertkitError(f"shard {number} is damaged")


def die(number: int) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return number


class DiesAtTheStart:
    """Work whose unpickling kills the worker, as memory that runs out while it imports."""

    def __reduce__(self) -> Any:
        return die, (0,)

    def __call__(self, number: int) -> int:
        return number


@pytest.mark.parametrize("processes", [1, 3])
def test_results_come_in_the_order_of_the_blocks_each_time(processes: int) -> None:
    with pool(square, processes) as workers:
        for count in (7, 0, 2):
            found = list(workers.run(range(count)))
            assert found == [(number, number * number) for number in range(count)]
    assert multiprocessing.active_children() == []


def test_blocks_are_read_only_a_little_ahead() -> None:
    read = []

    def blocks() -> Iterator[int]:
        for number in range(100):
            read.append(number)
            yield number

    with pool(square) as workers:
        results = workers.run(blocks())
        for _ in range(10):
            next(results)
    assert 10 <= len(read) <= 16
    assert multiprocessing.active_children() == []


class OddError(Exception):
    """An exception that pickle cannot make again."""

    def __init__(self, number: int, reason: str) -> None:
        super().__init__(f"{number} is {reason}")


def fail_oddly(number: int) -> None:
    raise OddError(number, "odd")


def test_what_fails_in_a_worker_is_raised_here() -> None:
    with pool(fail_oddly) as workers, pytest.raises(RuntimeError, match="OddError: 3 is odd"):
        list(workers.run([3]))
    with pool(fail) as workers, pytest.raises(KeyError) as caught:
        list(workers.run([3]))
    assert "in fail" in "".join(caught.value.__notes__), "says where"
    with pool(refuse) as workers, pytest.raises(BertkitError, match=r"^shard 3 is damaged$"):
        list(workers.run([3]))


def test_a_script_needs_no_guard(tmp_path: Path) -> None:
    """Workers do not run it again, which would start workers of their own, or write its files."""
    script = tmp_path / "script.py"
    script.write_text(
        "from bertkit import learn_vocabulary\n"
        "print('begun')\n"
        "texts = (f'word{i % 99} ' * 9_000 for i in range(50))\n"
        "print(len(learn_vocabulary(texts, 60, processes=2)))\n"
    )
    assert python(script, check=True).stdout.split() == ["begun", "60"]


def test_threads_may_start_workers_at_once() -> None:
    script = sys.modules["__main__"]

    def squares(_: int) -> list[int]:
        with pool(square) as workers:
            return [result for _, result in workers.run(range(3))]

    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(squares, range(3))) == [[0, 1, 4]] * 3
    assert sys.modules["__main__"] is script


class ThreadsOfEncoding:
    """Work that counts the threads that the `tokenizers` library adds to a worker."""

    def __init__(self) -> None:
        self.tokenizer = Tokenizer.from_vocabulary(SPECIAL_TOKENS, lowercase=True, compat="hf")

    def __call__(self, texts: list[str]) -> int:
        before = len([*Path("/proc/self/task").iterdir()])
        self.tokenizer.encode_batch(texts)
        return len([*Path("/proc/self/task").iterdir()]) - before


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads cannot be counted")
def test_a_worker_uses_one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a thread for each core in each worker, their number would be the cores' square."""
    monkeypatch.setenv("RAYON_NUM_THREADS", "6")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    with pool(ThreadsOfEncoding()) as workers:
        assert [threads for _, threads in workers.run([["a text"] * 50] * 3)] == [0, 0, 0]


@pytest.mark.parametrize("work", [die, DiesAtTheStart()])
def test_a_worker_that_dies_is_noticed(work: Any) -> None:
    with pool(work) as workers, pytest.raises(BertkitError, match=DIED):
        list(workers.run(range(5)))
    assert multiprocessing.active_children() == []


class LargeWork:
    """Work that a pipe does not hold at once."""

    def __init__(self) -> None:
        self.data = bytes(LARGE)

    def __call__(self, number: int) -> int:
        return number


def test_a_worker_that_is_killed_while_it_starts_is_noticed() -> None:
    def kill() -> None:
        while not (started := multiprocessing.active_children()):
            time.sleep(0.001)
        os.kill(started[0].pid or 0, signal.SIGKILL)

    with ThreadPoolExecutor(1) as threads, pool(LargeWork()) as workers:
        killed = threads.submit(kill)
        with pytest.raises(BertkitError, match=DIED):
            list(workers.run(range(5)))
        killed.result()
    assert multiprocessing.active_children() == []


def test_a_worker_that_is_killed_while_it_waits_is_noticed() -> None:
    with pool(square) as workers:
        results = workers.run(range(100))
        next(results)
        for process in workers.started.values():
            process.kill()
            process.join()
        with pytest.raises(BertkitError, match=DIED):
            list(results)


def test_a_worker_that_is_killed_in_the_middle_of_a_result_is_noticed(tmp_path: Path) -> None:
    """A queue that is shared would be half read forever."""
    gate = tmp_path / "gate"  # or the second result may be read together with the first
    with pool(LargeSecond(gate)) as workers:
        results = workers.run([0, 1])
        assert next(results) == (0, b"\0")
        gate.touch()
        _, second = workers.started
        assert second.poll(60), "it has begun to write, and waits for a reader"
        workers.started[second].kill()
        with pytest.raises(BertkitError, match=r"died \(SIGKILL\)"):
            next(results)


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="the system has no process groups")
def test_signals_to_all_processes_leave_the_workers_alone() -> None:
    """Ctrl-C reaches every process of a terminal; what to do is for the one that collects."""
    with pool(square) as workers:
        results = workers.run(range(20))
        next(results)
        for process in workers.started.values():
            os.kill(process.pid, signal.SIGINT)
            os.kill(process.pid, signal.SIGTERM)
        assert [block for block, _ in results] == list(range(1, 20))


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no /proc")
def test_free_memory_is_kept_until_it_is_much() -> None:
    """Blocks between small ones that stay: freed, they are gaps of the heap."""
    script = """
import numpy as np
from bertkit.processes import KeptHeap, resident_bytes

def gaps(megabytes):
    freed, kept = [], []
    for _ in range(megabytes):
        freed.append(np.ones(131_072))
        kept.append(np.ones(1000))
    return kept

heap = KeptHeap()
heap.after_update()
needed = resident_bytes()
small = gaps(int(needed / 1e7))
heap.after_update()
assert resident_bytes() > 1.05 * needed, "what is free is kept"
large = gaps(int(needed / 1e6))
assert resident_bytes() > 1.8 * needed
heap.after_update()
print(resident_bytes() / needed)
"""
    assert float(python("-c", script, check=True).stdout) < 1.3
