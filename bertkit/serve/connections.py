"""What clients' connections may cost: uvicorn's HTTP/1.1 with deadlines, and a cap on their number.

uvicorn itself bounds the time between two requests only. Here a client must also send a request's
head in time, and read its answer in time; it may close its own side before it has the answer; and
where there are too many connections, the one that has been idle longest makes room.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import h11
from uvicorn import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from bertkit.serve.limits import LOG, Limits

RESERVE = 16
"""Connections beyond the cap; on these only /health and /ready are answered."""
SPARE_FILES = 48
"""Open files that connections leave to the rest of the process, and to those about to be closed."""
LEAST = 8
"""Connections that are taken whatever the limit on open files."""
PROBES = (1.0, 1.0, 5.0)
"""Seconds between the checks whether a client that closed its side still waits."""
REPORT = 1.0
"""Seconds in which the connections that are closed share one line of the log."""


class Connections:
    """All connections of a server; called by uvicorn to make each.

    Args:
        limits: of the server.
    """

    def __init__(self, limits: Limits) -> None:
        self.deadline = limits.deadline
        self.cap = min(limits.max_connections, available_files())
        self.open: set[Connection] = set()
        self.idle: dict[Connection, None] = {}
        """Those without a request at work, idle for longest first."""
        self.writing: set[Connection] = set()
        """Those with bytes that the client has not read."""
        self.closed: Counter[str] = Counter()
        """Reason -> connections that were closed, since the last line of the log."""

    def __call__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> Connection:
        """A new connection."""
        return Connection(self, config, server_state, app_state, _loop)

    @property
    def full(self) -> bool:
        """Whether only the reserve is left."""
        return len(self.open) > self.cap

    def add(self, new: Connection) -> None:
        """Take a connection; where there are too many, close the one that was idle longest."""
        self.open.add(new)
        if self.full and self.idle:
            next(iter(self.idle)).drop("idle, to make room")
        elif len(self.open) > self.cap + RESERVE:
            new.drop("beyond the cap")

    def remove(self, old: Connection) -> None:
        """Forget a connection that has ended."""
        self.open.discard(old)
        self.idle.pop(old, None)
        self.writing.discard(old)

    def count(self, reason: str) -> None:
        """Note that a connection is closed; a line of the log soon gives the number."""
        if not self.closed:
            asyncio.get_running_loop().call_later(REPORT, self._report)
        self.closed[reason] += 1

    def _report(self) -> None:
        fields = {"open": len(self.open), "cap": self.cap, "closed": dict(self.closed)}
        LOG.warning("connections closed", extra={"fields": fields})
        self.closed.clear()


class Connection(H11Protocol):
    """One connection.

    Args:
        pool: all connections.
        config: uvicorn's.
        server_state: uvicorn's.
        app_state: uvicorn's.
        loop: the running one where absent.
    """

    def __init__(
        self,
        pool: Connections,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, loop)
        self.pool = pool
        self.half_closed = False
        """Whether the client has closed its side."""
        self.timers: dict[str, asyncio.TimerHandle] = {}
        """What the client is late with when they end."""

    @property
    def working(self) -> bool:
        """Whether a request has come whose answer has not been given."""
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has connected: it must send a request in time."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # so that any unread byte is timed
        self.pool.add(self)
        self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is over."""
        super().connection_lost(exc)
        self.pool.remove(self)
        for timer in self.timers.values():
            timer.cancel()

    def data_received(self, data: bytes) -> None:
        """Bytes of a request, or of several."""
        super().data_received(data)
        self._await_request()

    def on_response_complete(self) -> None:
        """An answer was given; the next request may have come already."""
        if self not in self.pool.writing:
            self._untime("answer not read")
        super().on_response_complete()
        if self.conn.trailing_data[0]:  # of the next head
            self._await_request()
        self._sort()
        if self.half_closed and not self.working:
            self.transport.close()

    def eof_received(self) -> bool:  # type: ignore[override]  # asyncio's own allows it
        """The client closes its side, and may wait for the answer or have left altogether.

        Returns: whether to keep the connection.
        """
        if not self.working or self.cycle.more_body:
            return False
        self.half_closed = True
        if self.cycle.scope["http_version"] == "1.1":
            self.loop.call_later(PROBES[0], self._probe, 1)
        return True

    def pause_writing(self) -> None:
        """The client does not read as fast as it is written to."""
        super().pause_writing()
        self.pool.writing.add(self)
        self._sort()
        self._time("answer not read")

    def resume_writing(self) -> None:
        """The client has read what there was; where that was a part only, the time goes on."""
        super().resume_writing()
        self.pool.writing.discard(self)
        self._sort()
        if not self.working:
            self._untime("answer not read")

    def drop(self, reason: str) -> None:
        """Close at once, whatever was not sent."""
        if not self.transport.is_closing() or self in self.pool.writing:
            self.pool.count(reason)
            self.pool.remove(self)
            self.transport.abort()

    def _sort(self) -> None:
        """Note whether it is idle."""
        if self.working or self in self.pool.writing or self.transport.is_closing():
            self.pool.idle.pop(self, None)
        else:
            self.pool.idle.setdefault(self)

    def _await_request(self) -> None:
        """Time a head that is to come, or has begun to."""
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

    def _probe(self, number: int) -> None:
        """Send an interim answer, which a client that has left makes fail.

        Nothing else tells it from one that only closed its side.
        """
        if self.transport.is_closing() or not self.working or self.cycle.response_started:
            return
        interim = h11.InformationalResponse(status_code=100, headers=[], reason="Continue")
        self.transport.write(self.conn.send(interim))
        if number < len(PROBES):
            self.loop.call_later(PROBES[number], self._probe, number + 1)

    def _should_upgrade(self) -> bool:
        """Never: there is HTTP only."""
        return False


def available_files() -> int:
    """Connections that the limit on open files leaves room for."""
    if sys.platform == "win32":  # which has none
        return sys.maxsize
    import resource

    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most == resource.RLIM_INFINITY:
        return sys.maxsize
    used = len(list(Path("/dev/fd").iterdir()))
    return max(LEAST, most - used - SPARE_FILES - RESERVE)
