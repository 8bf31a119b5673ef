"""What every request passes: limits, host, token and size; the errors, and the metrics.

`RequestMiddleware` is plain ASGI middleware, since it must see the body's size before anything
reads the body.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from starlette._utils import get_route_path
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bertkit.errors import BertkitError, flag

MAX_INPUTS = 2048
"""The maximum number of inputs of one request; the same as OpenAI's limit for embeddings."""
CHARACTERS_PER_TOKEN = 6
"""An upper bound for running text: a text's length divided by it estimates its tokens before it is
tokenized."""
MAX_LIMIT = 1e9
"""Python's clocks accept no wait of many more seconds."""
ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "too_large_error",
    429: "overloaded_error",
    500: "server_error",
    503: "unavailable_error",
}
"""HTTP status -> the error's `type`; "invalid_request_error" for any other status."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits of a server."""

    max_queue_tokens: int = 65_536
    """The maximum number of tokens that wait or are computed for each model; a request beyond that
    is answered with 429."""
    max_batch_tokens: int = 8192
    """The maximum number of tokens in a batch; each model computes up to two batches at a time, and
    a larger request forms a batch by itself."""
    deadline: float = 30.0
    """The seconds within which a request's body must arrive (else 408) and, from then on, within
    which the request must be computed (else 503)."""
    max_bytes: int = 2 << 20
    """The maximum number of bytes of a request's body; a larger one is answered with 413."""
    max_connections: int = 512
    """The maximum number of open connections; requests on further ones are answered with 503."""
    max_delay: float = 2.0
    """The maximum batching delay in milliseconds. After a batch of several requests, a model waits
    up to this long for their clients' next ones; a request to an idle server never waits."""

    def __post_init__(self) -> None:
        """Check that every limit is in range."""
        for name, value in vars(self).items():
            enough = value >= 0 if name == "max_delay" else value > 0
            if not enough or value > MAX_LIMIT:
                raise BertkitError(f"{flag(name)} must be above 0, not {value}")


DEFAULT_LIMITS = Limits()


class RefusedError(Exception):
    """The reason why a request is refused; `param` is the field of the body, as "inputs.0.text"."""

    def __init__(
        self, status: int, message: str, param: str | None = None, retry_after: int | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param = status, message, param
        self.headers = {} if retry_after is None else {"retry-after": str(retry_after)}
        if status == 401:
            self.headers["www-authenticate"] = "Bearer"
        if status == 408:  # the rest of the body would be read as the next request
            self.headers["connection"] = "close"

    def body(self) -> dict[str, Any]:
        """Return the JSON body of the response."""
        kind = ERROR_TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param}}


def check_token(token: str) -> None:
    """Check that a client can send a token in a header."""
    if not isinstance(token, str) or not (token.isascii() and token.isprintable()) or " " in token:
        raise BertkitError("the token must be ASCII letters, digits and signs, without spaces")


def too_many_tokens(tokens: int, maximum: int) -> RefusedError:
    """Return the error for a request with more tokens than a model accepts at a time."""
    return RefusedError(
        413,
        f"the request has about {tokens:,} tokens, but the limit is {maximum:,}; send fewer or "
        "shorter inputs",
    )


def not_finite() -> RefusedError:
    """Return the error for results that contain NaN or infinity."""
    return RefusedError(
        500, "the model computed a number that is not finite; its weights are damaged"
    )


def shorten(text: str) -> str:
    """Return a client's text shortened and escaped to one line, for use in a message."""
    return text[:60].encode("unicode_escape").decode()


# Metrics ------------------------------------------------------------------------------------------

SECOND_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
TOKEN_BUCKETS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 65536)
REQUEST_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128)


class Metrics:
    """The metrics of one server; the names of those it defines begin with `bertkit_`."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"bertkit_{name}", text, labels, registry=self.registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"bertkit_{name}", text, labels, registry=self.registry)

        def histogram(
            name: str, text: str, buckets: Sequence[float], label: str = "model"
        ) -> Histogram:
            full = f"bertkit_{name}"
            return Histogram(full, text, [label], registry=self.registry, buckets=buckets)

        self.requests = counter("requests", "Requests answered.", "route", "status")
        self.inputs = counter("inputs", "Inputs of answered requests.", "model")
        self.seconds = histogram("request_seconds", "Until the response.", SECOND_BUCKETS, "route")
        self.in_flight = gauge("requests_in_flight", "Requests in progress or waiting.")
        self.queue_requests = gauge("queue_requests", "Requests waiting in the queue.", "model")
        self.queue_tokens = gauge("queue_tokens", "Tokens waiting or being computed.", "model")
        self.queue_seconds = histogram("queue_seconds", "Waiting in the queue.", SECOND_BUCKETS)
        self.batch_seconds = histogram("batch_seconds", "Computing a batch.", SECOND_BUCKETS)
        self.batch_tokens = histogram("batch_tokens", "Tokens in a batch.", TOKEN_BUCKETS)
        self.batch_requests = histogram("batch_requests", "Requests in a batch.", REQUEST_BUCKETS)

    def answered(self, route: str, status: int, seconds: float) -> None:
        """Record an answered request."""
        self.requests.labels(route, str(status)).inc()
        self.seconds.labels(route).observe(seconds)

    def computed(self, model: str, tokens: int, waits: Sequence[float], seconds: float) -> None:
        """Record a computed batch."""
        queue_seconds = self.queue_seconds.labels(model)
        for wait in waits:
            queue_seconds.observe(wait)
        self.batch_seconds.labels(model).observe(seconds)
        self.batch_tokens.labels(model).observe(tokens)
        self.batch_requests.labels(model).observe(len(waits))

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)


# Middleware ---------------------------------------------------------------------------------------

LOG = logging.getLogger("bertkit.serve")
GUARDED = ("/v1/", "/metrics")
"""Path prefixes that require the token; other paths reveal nothing about the models' work."""
UNCHECKED = ("/health", "/ready")
"""Paths that are served under any host name."""
CLIENT_LEFT = 499
"""The status that the metrics show if the client has disconnected; it is never sent."""


class RequestMiddleware:
    """Middleware that admits or refuses each request and counts it in the metrics."""

    def __init__(
        self,
        app: ASGIApp,
        limits: Limits,
        metrics: Metrics,
        token: str = "",
        hosts: Collection[str] = (),
    ) -> None:
        self.app, self.limits, self.metrics = app, limits, metrics
        self.token = token.encode()
        self.hosts = {host.lower() for host in hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if scope["method"] == "HEAD":  # handled as GET; uvicorn omits the body
            scope = {**scope, "method": "GET"}
        started, status = time.perf_counter(), 0

        async def send_and_note(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        self.metrics.in_flight.inc()
        try:
            self.check(scope)
            body = await read_body(receive, self.limits)
            await answer_while_connected(self.app, scope, body, receive, send_and_note)
        except RefusedError as error:
            await json_response(error)(scope, receive, send_and_note)
        except ClientDisconnect:
            status = CLIENT_LEFT
        except Exception:
            LOG.exception("request failed")
            if status:  # the response has started; uvicorn closes the connection
                raise
            failure = RefusedError(500, "the server failed; see its log for the reason")
            await json_response(failure)(scope, receive, send_and_note)
        finally:
            self.metrics.in_flight.dec()
            route = getattr(scope.get("route"), "path", None) or "other"
            self.metrics.answered(route, status, time.perf_counter() - started)

    def check(self, scope: Scope) -> None:
        """Refuse a request by its head: with another host name, without the token, or too large."""
        path = get_route_path(scope)  # without the prefix of a larger application
        if path in UNCHECKED:
            return
        headers = Headers(scope=scope)
        if self.hosts and not self._is_served_host(headers.get("host", "")):
            raise RefusedError(
                421,
                "the host header does not name this server; use the server's IP address, or start "
                "it with --allowed-hosts or a token",
            )
        if self.token and path.startswith(GUARDED):
            scheme, _, sent = headers.get("authorization", "").partition(" ")
            right = hmac.compare_digest(sent.strip().encode(), self.token)
            if scheme.lower() != "bearer" or not right:
                raise RefusedError(
                    401, "the token is missing or wrong; send Authorization: Bearer ..."
                )
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length) > self.limits.max_bytes:
            raise too_large(self.limits)

    def _is_served_host(self, host: str) -> bool:
        """Return whether a `host` header is absent, an IP address or an accepted name.

        Another site can point its own host name at this server (DNS rebinding), so that its page
        can read the responses in a visitor's browser. It cannot do so with an IP address.
        """
        try:
            parts = urlsplit(f"//{host}")
            name = parts.hostname or ""
            if not host or (parts.netloc == host and "@" not in host and name in self.hosts):
                return True
            ip_address(name)
        except ValueError:
            return False
        return True


def too_large(limits: Limits) -> RefusedError:
    """Return the error for a body that is too large."""
    return RefusedError(413, f"the body is larger than {limits.max_bytes:,} bytes; send less")


async def read_body(receive: Receive, limits: Limits) -> bytes:
    """Read a request's body within the limits of size and time."""
    body, more = bytearray(), True
    try:
        async with asyncio.timeout(limits.deadline):
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
                body += message.get("body", b"")
                if len(body) > limits.max_bytes:
                    raise too_large(limits)
                more = message.get("more_body", False)
    except TimeoutError:
        late = f"the body did not arrive within {limits.deadline:g} s"
        raise RefusedError(408, late) from None
    return bytes(body)


async def answer_while_connected(
    app: ASGIApp, scope: Scope, body: bytes, receive: Receive, send: Send
) -> None:
    """Pass a request on, and abandon it if the client leaves before the response starts."""
    answering, parts, left = asyncio.current_task(), [body], False
    assert answering is not None

    async def replay() -> Message:
        if parts:
            return {"type": "http.request", "body": parts.pop(), "more_body": False}
        return await receive()

    async def watch() -> None:
        nonlocal left
        await receive()
        left = True
        answering.cancel()

    async def send_unwatched(message: Message) -> None:
        watching.cancel()
        await send(message)

    watching = asyncio.create_task(watch())
    try:
        await app(scope, replay, send_unwatched)
    except asyncio.CancelledError:
        if not left:
            raise
        raise ClientDisconnect from None
    finally:
        watching.cancel()


def json_response(error: RefusedError) -> JSONResponse:
    """Return the response to a refused request."""
    return JSONResponse(error.body(), error.status, error.headers)
