"""The server process: its socket, uvicorn, its log, and a shutdown that loses no request.

After SIGTERM or SIGINT new requests, also to /ready, are answered with 503, so that a load
balancer sends them elsewhere. Once the accepted requests are answered and `Limits.grace` is over,
the socket is closed. A second signal ends the process at once.

The log is one JSON object per line on standard error and never contains the text of a request. A
thread of its own writes it, so the server continues if nobody reads standard error.
"""

from __future__ import annotations

import gc
import json
import logging
import math
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from logging.handlers import QueueHandler, QueueListener
from queue import Full, Queue
from types import FrameType

import uvicorn
from fastapi import FastAPI

from bertkit.errors import BertkitError
from bertkit.serve.service import Service

LOGGERS = ("bertkit.serve", "uvicorn.error", "asyncio")
MOST_LINES = 10_000
"""That wait to be written; later ones are dropped, and counted."""
STANDARD_ERROR = 2


class JsonLogFormatter(logging.Formatter):
    """Time, level, event, and the fields of the record."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


class Unbuffered(logging.Handler):
    """Writes to the standard error, with no lock that the end of the process would wait for."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line; it is lost where the standard error is closed."""
        line = f"{self.format(record)}\n".encode(errors="backslashreplace")
        with suppress(OSError):
            while line:
                line = line[os.write(STANDARD_ERROR, line) :]


class Waiting(QueueHandler):
    """Lines on their way to the thread that writes them.

    Args:
        lines: bounded.
    """

    def __init__(self, lines: Queue[logging.LogRecord]) -> None:
        super().__init__(lines)
        self.lines = lines
        self.dropped = 0

    @property
    def waiting(self) -> int:
        """Lines that are not written yet."""
        return self.lines.unfinished_tasks

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        """The record as it is: the other thread formats it."""
        return record

    def enqueue(self, record: logging.LogRecord) -> None:
        """Hand over a line, or drop it."""
        try:
            if self.dropped:
                fields = {"levelname": "WARNING", "fields": {"lines": self.dropped}}
                told = {"msg": "lines of the log were dropped, nobody read them", **fields}
                self.lines.put_nowait(logging.makeLogRecord(told))
                self.dropped = 0
            self.lines.put_nowait(record)
        except Full:
            self.dropped += 1


def write_log(*, requests: bool = True) -> None:
    """Let the server's loggers write to the standard error.

    Args:
        requests: whether every request gets a line; else only trouble does.
    """
    lines: Queue[logging.LogRecord] = Queue(MOST_LINES)
    out = Unbuffered()
    out.setFormatter(JsonLogFormatter())
    QueueListener(lines, out).start()  # its thread ends with the process
    for name in LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [Waiting(lines)], False
        logger.setLevel(logging.INFO if requests else logging.WARNING)


def finish_log(seconds: float = 2.0) -> None:
    """Wait until all lines are written, but no longer than some seconds."""
    end = time.monotonic() + seconds
    for handler in logging.getLogger(LOGGERS[0]).handlers:
        while isinstance(handler, Waiting) and handler.waiting and time.monotonic() < end:
            time.sleep(0.005)


BACKLOG = 2048
"""Connections that may wait to be accepted; as uvicorn has it."""
ACCEPTED_AT_ONCE = 16
"""Connections accepted in one iteration of the event loop, so that those too many are closed before
the process runs out of files."""
SEND_BUFFER = 128 << 10
"""Bytes of an answer that the kernel takes on each connection. Left to itself it takes megabytes,
which clients that do not read would hold."""
KEEP_ALIVE = 75
"""Seconds; longer than clients and proxies keep an idle connection, so that they close it first."""
SWITCH_INTERVAL = 2e-4
"""Seconds after which a thread that waits for the interpreter gets it. A model's thread needs it
for a moment after every product; with Python's 5 ms it would wait most of the time."""


class Server(uvicorn.Server):
    """uvicorn with a time of farewell.

    Args:
        config: with the application.
        serving: what the application serves.
    """

    def __init__(self, config: uvicorn.Config, serving: Service) -> None:
        super().__init__(config)
        self.serving = serving
        self.since = 0.0
        """When the signal came."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal: the first one only begins the end."""
        first = not self.serving.draining
        self.serving.draining = True
        super().handle_exit(sig, frame)
        if first:
            self.since = time.monotonic()
        self.should_exit = self.force_exit = not first

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals, and raise them again at the end, once the log is written."""
        with super().capture_signals():
            yield
            finish_log()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept connections.

        asyncio has one number for those accepted at once and for those that wait in the kernel.
        """
        await super().startup(sockets)
        for listening in sockets or []:
            listening.listen(BACKLOG)

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: whether it is time to go."""
        limits, elapsed = self.serving.limits, time.monotonic() - self.since
        late = elapsed >= limits.grace + limits.deadline
        if self.serving.draining and elapsed >= limits.grace:
            self.should_exit |= late or not self.serving.in_flight
        return await super().on_tick(counter)


def open_socket(host: str, port: int) -> socket.socket:
    """A socket that listens, so that nobody else takes its address while models are loaded.

    Raises:
        BertkitError: the address is taken, or none of this machine.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        found = socket.socket(family, kind, protocol)
        try:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            found.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
            found.bind(address)
            found.listen(BACKLOG)
        except BaseException:
            found.close()
            raise
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise BertkitError(
            f"cannot listen at {host}:{port}: {reason}; choose another --host or --port"
        ) from error
    return found


def address_of(listening: socket.socket) -> str:
    """The URL of a socket."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def make_server(app: FastAPI, serving: Service) -> Server:
    """The server of an application.

    asyncio's event loop, also where uvloop is installed: that accepts one connection in each
    iteration, so that new ones wait for seconds where many come at once.
    """
    config = uvicorn.Config(
        app,
        loop="asyncio",
        http=serving.connections,  # type: ignore[arg-type]  # it is called as a class would be
        ws="none",
        backlog=ACCEPTED_AT_ONCE,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=math.ceil(serving.limits.deadline),
    )
    return Server(config, serving)


def serve_until_stopped(app: FastAPI, serving: Service, listening: socket.socket) -> None:
    """Answer requests until a signal comes; the signal is raised again at the end."""
    sys.setswitchinterval(SWITCH_INTERVAL)
    gc.collect()
    gc.freeze()  # a full collection would go through all of the models and libraries: 200 ms
    make_server(app, serving).run([listening])
