"""The process: a socket, uvicorn, and an end that loses no request.

After SIGTERM or SIGINT new requests are answered with 503, /ready too, so that whoever spreads the
load goes elsewhere. Once what was accepted is answered, and `Limits.grace` is over, the socket is
closed. A second signal ends at once.
"""

from __future__ import annotations

import math
import socket
import sys
import time
from types import FrameType

import uvicorn
from fastapi import FastAPI

from bertkit.errors import BertkitError
from bertkit.serve.serving import Serving

BACKLOG = 2048
"""Connections that may wait to be taken; as uvicorn has it."""
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

    def __init__(self, config: uvicorn.Config, serving: Serving) -> None:
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


def serve_until_stopped(app: FastAPI, serving: Serving, listening: socket.socket) -> None:
    """Answer requests until a signal comes; the signal is raised again at the end."""
    sys.setswitchinterval(SWITCH_INTERVAL)
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        http="h11",  # bounds what it keeps of a request's head, as httptools does not
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=math.ceil(serving.limits.deadline),
    )
    Server(config, serving).run([listening])
