"""Work on executors: the order of results, how far items are read ahead, and dead workers."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from bertkit.errors import BertkitError
from bertkit.processes import (
    cpu_quota,
    interruptible,
    map_in_order,
    open_executor,
    usable_cores,
)

SCRIPT = """
import os, sys, time
from bertkit.processes import map_in_order, open_executor
from tests.test_processes import note_process

if __name__ == "__main__":
    with open_executor(2) as pool:
        for _ in map_in_order(note_process, [sys.argv[1]] * 1000, pool):
            pass
"""


def square(number: int) -> int:
    time.sleep(0.02 * (number % 3))
    return number**2


def die(number: int, at: int) -> int:
    if number == at:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def die_while_sending(number: int) -> bytes:
    """End the worker in the middle of its result."""
    if number == 5:

        def half(self: Connection, content: bytes, write: Any = None) -> None:
            os.write(self.fileno(), content[: len(content) // 2])
            os._exit(3)

        Connection._send = half  # type: ignore[attr-defined]
    return b"x" * 1000


def fail(number: int) -> int:
    raise BertkitError(f"item {number} is bad", code="bad")


def note_process(folder: str) -> None:
    Path(folder, str(os.getpid())).touch()
    time.sleep(0.1)


def is_running(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def counted(most: int, read: list[int]) -> Iterator[int]:
    for number in range(most):
        read.append(number)
        yield number


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_results_are_in_order_and_items_are_read_slightly_ahead(processes: int) -> None:
    read: list[int] = []
    with open_executor(processes) as pool:
        results = map_in_order(square, counted(200, read), pool)
        assert [next(results) for _ in range(10)] == [n**2 for n in range(10)]
        assert len(read) < 30
        assert list(results) == [n**2 for n in range(10, 200)]


@pytest.mark.slow
def test_a_worker_that_dies_and_one_that_raises() -> None:
    with open_executor(2) as pool, pytest.raises(BertkitError, match=r"^a worker process died"):
        list(map_in_order(partial(die, at=5), range(20), pool))
    began = time.monotonic()
    with open_executor(2) as pool, pytest.raises(BertkitError, match=r"^a worker process died"):
        list(map_in_order(die_while_sending, range(20), pool))
    assert time.monotonic() - began < 20
    with open_executor(2) as pool, pytest.raises(BertkitError, match=r"^item 0 is bad$") as caught:
        list(map_in_order(fail, range(20), pool))
    assert caught.value.code == "bad"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_workers_end_with_the_process_that_started_them(tmp_path: Path, number: int) -> None:
    script, folder = tmp_path / "script.py", tmp_path / "pids"
    script.write_text(SCRIPT)
    folder.mkdir()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, script, folder]
    started = subprocess.Popen(command, stderr=subprocess.DEVNULL, env=environment)
    while len(pids := [*folder.iterdir()]) < 2:
        time.sleep(0.05)
    started.send_signal(number)
    started.wait(20)
    end = time.monotonic() + 20
    while any(is_running(int(pid.name)) for pid in pids):
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_long_call_can_be_interrupted() -> None:
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        interruptible(partial(time.sleep, 60))
    assert interruptible(lambda: 3) == 3


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, math.inf),
        ({"cpu.max": "max 100000"}, math.inf),
        ({"cpu.max": "150000 100000"}, 1.5),
        ({"cpu/cpu.cfs_quota_us": "50000", "cpu/cpu.cfs_period_us": "100000"}, 0.5),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, math.inf),
    ],
)
def test_a_container_has_the_cores_of_its_quota(
    files: dict[str, str], cores: float, tmp_path: Path
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    assert cpu_quota(tmp_path) == cores
    assert 1 <= usable_cores() <= (os.cpu_count() or 1)
