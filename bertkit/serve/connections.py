"""Limits for client connections: uvicorn's HTTP/1.1 protocol with deadlines and a maximum number.

uvicorn itself limits only the time between two requests. Here a client must also send a request's
head and read its response in time. If there are too many connections, the one that has been idle
longest is closed.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from uvicorn import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from bertkit.serve.limits import LOG, Limits

RESERVE = 16
"""The number of connections beyond the cap, on which only /health and /ready are answered."""
SPARE_FILES = 48
"""Open files kept free for the rest of the process and for connections about to be closed."""
MIN_CONNECTIONS = 8
"""The number of connections that are accepted even if the limit on open files is lower."""
REPORT = 1.0
"""The seconds for which closed connections are collected into one log line."""


class Connections:
    """All connections of a server."""

    def __init__(self, limits: Limits) -> None:
        self.deadline = limits.deadline
        self.cap = min(limits.max_connections, available_files())
        self.open: set[Connection] = set()
        self.idle: dict[Connection, None] = {}
        """The connections without a request in progress, longest idle first."""
        self.writing: set[Connection] = set()
        """The connections with bytes that the client has not read yet."""
        self.closed: Counter[str] = Counter()
        """Reason -> the number of connections closed for it since the last log line."""

    @property
    def full(self) -> bool:
        """Whether only the reserved connections are left."""
        return len(self.open) > self.cap

    def add(self, new: Connection) -> None:
        """Add a connection; if there are too many, close the one that has been idle longest."""
        self.open.add(new)
        if self.full and self.idle:
            next(iter(self.idle)).drop("idle, to make room")
        elif len(self.open) > self.cap + RESERVE:
            new.drop("beyond the cap")

    def remove(self, old: Connection) -> None:
        """Remove a connection that has ended."""
        self.open.discard(old)
        self.idle.pop(old, None)
        self.writing.discard(old)

    def count(self, reason: str) -> None:
        """Count a closed connection; a log line gives the totals after `REPORT` seconds."""
        if not self.closed:
            asyncio.get_running_loop().call_later(REPORT, self._report)
        self.closed[reason] += 1

    def _report(self) -> None:
        fields = {"open": len(self.open), "cap": self.cap, "closed": dict(self.closed)}
        LOG.warning("connections closed", extra={"fields": fields})
        self.closed.clear()


class Connection(H11Protocol):
    """One client connection."""

    def __init__(
        self,
        pool: Connections,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.pool = pool
        self.timers: dict[str, asyncio.TimerHandle] = {}
        """What the client must do in time -> the timer that closes the connection."""

    @property
    def working(self) -> bool:
        """Whether a request has arrived whose response is not complete."""
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Register a new connection; its client must send a request in time."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # so that the deadline applies to any unread byte
        self.pool.add(self)
        self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        """Remove the connection and cancel its timers."""
        super().connection_lost(exc)
        self.pool.remove(self)
        for timer in self.timers.values():
            timer.cancel()

    def data_received(self, data: bytes) -> None:
        """Process received bytes, which may belong to several requests."""
        super().data_received(data)
        self._await_request()

    def on_response_complete(self) -> None:
        """Continue after a complete response; the next request may have arrived already."""
        if self not in self.pool.writing:
            self._untime("answer not read")
        super().on_response_complete()
        if self.conn.trailing_data[0]:  # part of the next request's head
            self._await_request()
        self._sort()

    def pause_writing(self) -> None:
        """Start the deadline for a client that reads more slowly than the server writes."""
        super().pause_writing()
        self.pool.writing.add(self)
        self._sort()
        self._time("answer not read")

    def resume_writing(self) -> None:
        """Stop the deadline if the client has read its whole response; for a part it continues."""
        super().resume_writing()
        self.pool.writing.discard(self)
        self._sort()
        if not self.working:
            self._untime("answer not read")

    def drop(self, reason: str) -> None:
        """Close the connection at once and discard unsent bytes."""
        if not self.transport.is_closing() or self in self.pool.writing:
            self.pool.count(reason)
            self.pool.remove(self)
            self.transport.abort()

    def _sort(self) -> None:
        """Update whether the connection is listed as idle."""
        if self.working or self in self.pool.writing or self.transport.is_closing():
            self.pool.idle.pop(self, None)
        else:
            self.pool.idle.setdefault(self)

    def _await_request(self) -> None:
        """Start the deadline for the next request's head, or stop it while a request is open."""
        self._sort()
        if self.working:
            self._untime("no request")
        else:
            self._time("no request")

    def _time(self, what: str) -> None:
        if what not in self.timers:
            self.timers[what] = self.loop.call_later(self.pool.deadline, self.drop, what)

    def _untime(self, what: str) -> None:
        if timer := self.timers.pop(what, None):
            timer.cancel()

    def _should_upgrade(self) -> bool:
        """Ignore an `upgrade` header; uvicorn would log a warning for each request that has one."""
        return False


def available_files() -> int:
    """Return the number of connections that the limit on open files allows."""
    if sys.platform == "win32":  # Windows has no such limit
        return sys.maxsize
    import resource

    maximum, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if maximum == resource.RLIM_INFINITY:
        return sys.maxsize
    used = len(list(Path("/dev/fd").iterdir()))
    return max(MIN_CONNECTIONS, maximum - used - SPARE_FILES - RESERVE)
