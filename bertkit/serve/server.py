"""The server process: its socket, uvicorn, its log, and a shutdown that loses no request.

After SIGTERM, SIGINT or SIGHUP, new requests, including those to /ready, get 503, so that a load
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
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from logging.handlers import QueueHandler, QueueListener
from queue import Full, Queue
from threading import current_thread, main_thread
from types import FrameType

import uvicorn
from fastapi import FastAPI

from bertkit.errors import BertkitError
from bertkit.serve.connections import Connection
from bertkit.serve.service import Service

LOGGERS = ("bertkit.serve", "uvicorn.error", "asyncio")
MAX_LOG_LINES = 10_000
"""The maximum number of log lines that may wait to be written; later ones are dropped."""
STANDARD_ERROR = 2


class JsonLogFormatter(logging.Formatter):
    """Formats each log record as a JSON object with its time, level, event and fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line."""
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
    """A handler that writes to standard error without a lock, which could delay the exit."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line; it is lost if standard error is closed."""
        line = f"{self.format(record)}\n".encode(errors="backslashreplace")
        with suppress(OSError):
            while line:
                line = line[os.write(STANDARD_ERROR, line) :]


class DroppingHandler(QueueHandler):
    """Queues log lines for the thread that writes them; drops those that find no room."""

    queue: Queue[logging.LogRecord]

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        """Return the record unchanged, since the writing thread formats it."""
        return record

    def enqueue(self, record: logging.LogRecord) -> None:
        """Queue a line unless the queue is full."""
        with suppress(Full):
            self.queue.put_nowait(record)


def write_log(*, requests: bool = True) -> None:
    """Configure the server's loggers to write to standard error."""
    lines: Queue[logging.LogRecord] = Queue(MAX_LOG_LINES)
    out = Unbuffered()
    out.setFormatter(JsonLogFormatter())
    QueueListener(lines, out).start()  # its thread ends with the process
    for name in LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [DroppingHandler(lines)], False
        logger.setLevel(logging.INFO if requests else logging.WARNING)


def finish_log() -> None:
    """Wait until all lines are written, at most two seconds."""
    end = time.monotonic() + 2.0
    for handler in logging.getLogger(LOGGERS[0]).handlers:
        assert isinstance(handler, DroppingHandler)
        while handler.queue.unfinished_tasks and time.monotonic() < end:
            time.sleep(0.005)


BACKLOG = 2048
"""The maximum number of connections that may wait to be accepted; uvicorn's default."""
ACCEPTED_AT_ONCE = 16
"""The maximum number of connections accepted in one iteration of the event loop, so that excess
connections are closed before the process runs out of file descriptors."""
SEND_BUFFER = 128 << 10
"""The bytes of a response that the kernel buffers per connection. Without this limit it buffers
megabytes, which clients that do not read would occupy."""
KEEP_ALIVE = 75
"""Seconds until an idle connection is closed: late enough that clients and proxies do it first."""
SWITCH_INTERVAL = 2e-4
"""The seconds after which a waiting thread gets the interpreter lock. A model's thread needs it
briefly after every matrix product; with Python's default of 5 ms it would mostly wait."""


class Server(uvicorn.Server):
    """uvicorn's server with a shutdown that first answers the accepted requests."""

    def __init__(self, config: uvicorn.Config, serving: Service) -> None:
        super().__init__(config)
        self.serving = serving
        self.since = 0.0
        """The monotonic time of the first signal."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Start the shutdown at the first signal; stop at once at the second."""
        first = not self.serving.draining
        self.serving.draining = True
        super().handle_exit(sig, frame)
        if first:
            self.since = time.monotonic()
        self.should_exit = self.force_exit = not first

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals inside the block, then write the log before they are raised again."""
        with super().capture_signals(), handle_hangup(self.handle_exit):
            yield
            finish_log()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to accept connections.

        asyncio uses one number both for connections accepted at once and for the kernel's queue, so
        the queue's length is set here.
        """
        await super().startup(sockets)
        for listening in sockets or []:
            listening.listen(BACKLOG)

    async def on_tick(self, counter: int) -> bool:
        """Return whether to stop; uvicorn calls this ten times a second."""
        limits, elapsed = self.serving.limits, time.monotonic() - self.since
        late = elapsed >= limits.grace + limits.deadline
        if self.serving.draining and elapsed >= limits.grace:
            self.should_exit |= late or not self.serving.in_flight
        return await super().on_tick(counter)


@contextmanager
def handle_hangup(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Handle SIGHUP, which a closed terminal sends, unless the caller ignores it as nohup does."""
    number = getattr(signal, "SIGHUP", None)  # Windows lacks it
    main = current_thread() is main_thread()  # the only one that may set handlers
    if not main or number is None or signal.getsignal(number) is signal.SIG_IGN:
        yield
        return
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


MAX_PORT = 65_535


def open_socket(host: str, port: int) -> socket.socket:
    """Return a listening socket, so that the address stays reserved while models are loaded."""
    if not 0 <= port <= MAX_PORT:
        raise BertkitError(f"--port must be from 0 to {MAX_PORT:,}, got {port}")
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
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise BertkitError(
            f"cannot listen at {host}:{port}: {reason}; choose another --host or --port"
        ) from error
    return found


def socket_url(listening: socket.socket) -> str:
    """Return the URL of a listening socket."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def make_server(app: FastAPI, serving: Service) -> Server:
    """Return the server for an application.

    It uses asyncio's event loop even if uvloop is installed: uvloop accepts one connection per
    iteration, so new connections would wait for seconds when many arrive at once.
    """
    config = uvicorn.Config(
        app,
        loop="asyncio",
        http=partial(Connection, serving.connections),  # type: ignore[arg-type]  # for a class
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
    """Serve requests until a signal arrives; the signal is raised again at the end."""
    sys.setswitchinterval(SWITCH_INTERVAL)
    gc.collect()
    gc.freeze()  # else a full collection traverses all models and libraries: 200 ms
    make_server(app, serving).run([listening])
