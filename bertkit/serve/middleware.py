"""The checks that every request passes (host, token, size of the body) and its metrics.

This is plain ASGI middleware, since it must see the body's size before anything reads the body.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import Collection
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette._utils import get_route_path
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bertkit.serve.limits import Limits, RefusedError
from bertkit.serve.metrics import Metrics

LOG = logging.getLogger("bertkit.serve")
GUARDED = ("/v1/", "/metrics")
"""Path prefixes that require the token; other paths reveal nothing about the models' work."""
UNCHECKED = ("/health", "/ready")
"""Paths that are served under any host name."""
CLIENT_LEFT = 499
"""The status that the metrics show if the client has disconnected; it is never sent."""


class RequestMiddleware:
    """Middleware that admits or refuses each request and counts it in the metrics.

    See `bertkit.serve.app.make_app` for the arguments.
    """

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
    """Return a request's body, which is limited in size and time."""
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
