"""Long work ends when it is interrupted."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from bertkit.processes import interruptible

LONG = 600.0


def test_long_work_of_a_library_is_interrupted() -> None:
    go_on = threading.Event()
    threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        interruptible(lambda: go_on.wait(LONG))
    assert time.monotonic() - begin < LONG / 4
    go_on.set()


def test_results_and_errors_come_through() -> None:
    assert interruptible(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        interruptible(lambda: 1 // 0)
