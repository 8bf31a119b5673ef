"""Ctrl-C and SIGTERM as a request: finish the update, save, end."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class StopRequest:
    """Set by Ctrl-C or SIGTERM: the run saves after the current update and ends."""

    def __init__(self) -> None:
        self.signal: int | None = None

    @contextmanager
    def listening(self) -> Iterator[StopRequest]:
        """Catch both signals inside the block; a second one acts as usual."""
        before = {name: signal.getsignal(name) for name in (signal.SIGINT, signal.SIGTERM)}

        def remember(number: int, frame: Any) -> None:
            self.signal = number
            signal.signal(number, before[signal.Signals(number)])

        try:
            for name in before:
                signal.signal(name, remember)
        except ValueError:  # not the main thread: the caller handles signals
            before = {}
        try:
            yield self
        finally:
            for name, handler in before.items():
                signal.signal(name, handler)
