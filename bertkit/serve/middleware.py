"""The checks that every request passes (host, token, sizes, shutdown), its metrics and log line.

This is plain ASGI middleware, since it must see the body's size before anything reads the body.
"""

from __future__ import annotations

import asyncio
import hmac
import random
import re
import time
from collections.abc import Collection, Iterator
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from fastapi import HTTPException
from starlette._utils import get_route_path
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bertkit.serve.batching import Turns
from bertkit.serve.limits import LOG, Limits, RefusedError, answer_too_large
from bertkit.serve.service import Service, notes

REQUEST_ID = re.compile(r"[\w.:/+=-]{1,128}", re.ASCII)
GUARDED = ("/v1/", "/metrics")
"""Path prefixes that require the token; other paths reveal nothing about the models' work."""
ALWAYS = ("/health", "/ready")
"""Paths that are served under any host name and when there are too many connections."""
POLICY = (b"content-security-policy", b"default-src 'self' 'unsafe-inline' data: blob:")
"""The policy for /docs and /redoc, which set none: nothing may be loaded from another host."""
SMALL = 1 << 16
"""Responses of up to this many bytes are sent however much other clients have not read."""
PART = 1 << 18
"""The bytes of a response that are passed to uvicorn at a time."""
PATIENCE = 8
"""A refused request's body of up to this many times `Limits.max_bytes` is read and discarded, so
that its sender sees the response."""
LEFT = 499
"""The status that metrics and log show if the client has disconnected; it is never sent."""
FAILED = "the server failed; see its log for the reason"


class RequestMiddleware:
    """Middleware that admits or refuses each request and records it in metrics and log.

    See `bertkit.serve.app.make_app` for the arguments.
    """

    def __init__(
        self, app: ASGIApp, serving: Service, token: str = "", hosts: Collection[str] = ()
    ) -> None:
        self.app, self.serving, self.limits = app, serving, serving.limits
        self.token = token.encode()
        self.hosts = {host.lower() for host in hosts}
        self.turns = Turns()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if scope["method"] == "HEAD":  # handled as GET; uvicorn omits the body
            scope = {**scope, "method": "GET"}
        started, body = time.perf_counter(), BoundedBody(receive, self.limits)
        noted: dict[str, Any] = {}
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request = given if REQUEST_ID.fullmatch(given) else f"{random.getrandbits(64):016x}"
        answer = BoundedResponse(send, self.serving, request, body)
        self._count(1)
        context = notes.set(noted)
        try:
            problem = next(self._problems(scope, headers), None)
            if problem is None:
                if get_route_path(scope).startswith("/v1/"):
                    await self.turns.take()
                await self.app(scope, body.receive, answer.send)
            else:
                await self._refuse(problem, headers, scope, receive, answer.send)
        except asyncio.CancelledError:
            if not body.gone:
                raise
            answer.status = LEFT
        except Exception:
            LOG.exception("request failed", extra={"fields": {"id": request}})
            if answer.status:  # the response has started; uvicorn closes the connection
                raise
            await json_response(RefusedError(500, FAILED))(scope, receive, answer.send)
        finally:
            body.stop_watching()
            answer.end()
            notes.reset(context)
            self._count(-1)
            self._note(scope, request, answer.status, time.perf_counter() - started, noted)

    def _problems(self, scope: Scope, headers: Headers) -> Iterator[RefusedError]:
        """Yield the reasons why a request is refused, if any."""
        path = get_route_path(scope)  # without the prefix of a larger application
        length = headers.get("content-length", "")
        if length and "transfer-encoding" in headers:  # the next request's start is unclear
            yield RefusedError(400, "send content-length or transfer-encoding, not both").closing()
        if path in ALWAYS:
            return
        if self.serving.connections.full:
            full = RefusedError(503, "all connections are in use; try again later", retry_after=1)
            yield full.closing()
        if self.hosts and not self._is_own(headers.get("host", "")):
            yield RefusedError(
                421,
                "the host header does not name this server; use the server's IP address, or start "
                "it with --allowed-hosts or a token",
            )
        if self.token and path.startswith(GUARDED):
            scheme, _, known = headers.get("authorization", "").partition(" ")
            right = hmac.compare_digest(known.strip().encode(), self.token)
            if scheme.lower() != "bearer" or not right:
                yield RefusedError(
                    401, "the token is missing or wrong; send Authorization: Bearer ..."
                )
        if self.serving.draining and path.startswith("/v1/"):
            yield RefusedError(503, "the server is shutting down; ask another one", retry_after=1)
        if length.isdecimal() and int(length) > self.limits.max_bytes:
            yield too_large(self.limits.max_bytes)
        if path.startswith("/v1/") and self.serving.unread > self.limits.max_unread:
            yield unread()

    def _is_own(self, host: str) -> bool:
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

    async def _refuse(
        self, problem: RefusedError, headers: Headers, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Send an error response; a body that is still arriving is read first unless very large."""
        length = headers.get("content-length", "")
        maximum = PATIENCE * self.limits.max_bytes
        if length.isdecimal() and 0 < int(length) <= maximum:
            try:
                async with asyncio.timeout(self.limits.deadline):
                    while (await receive()).get("more_body"):
                        pass
            except TimeoutError:
                problem.closing()
        elif scope["method"] != "GET" and length != "0":
            problem.closing()
        await json_response(problem)(scope, receive, send)

    def _count(self, change: int) -> None:
        self.serving.in_flight += change
        self.serving.metrics.in_flight.set(self.serving.in_flight)

    def _note(
        self, scope: Scope, request: str, status: int, seconds: float, noted: dict[str, Any]
    ) -> None:
        """Record a request in the metrics and the log; neither contains any text of the request."""
        route = getattr(scope.get("route"), "path", None) or "other"
        self.serving.metrics.answered(route, status, seconds)
        line = {
            "id": request,
            "method": scope["method"],
            "route": route,
            "status": status,
            "milliseconds": round(1000 * seconds, 2),
            "client": (scope.get("client") or ["?"])[0],
            **noted,
        }
        LOG.info("request", extra={"fields": line})


def unread() -> RefusedError:
    """Return the error for a response for which no memory is left."""
    return RefusedError(
        503, "too many responses have not been read by clients yet; try again later", retry_after=1
    )


def too_large(maximum: int) -> RefusedError:
    """Return the error for a body with more than `maximum` bytes."""
    return RefusedError(
        413, f"the body is larger than {maximum:,} bytes; send fewer or shorter inputs"
    )


def json_response(problem: RefusedError) -> JSONResponse:
    """Return the response to a refused request."""
    return JSONResponse(problem.body(), problem.status, problem.headers)


class BoundedBody:
    """A request's body, limited in size and time; afterwards, it watches for a disconnect."""

    def __init__(self, receive: Receive, limits: Limits) -> None:
        self.parts, self.limits = receive, limits
        self.size = 0
        self.end = asyncio.get_running_loop().time() + limits.deadline
        self.watcher: asyncio.Task[None] | None = None
        self.gone = False
        """Whether the client has disconnected, so that the task that answers it was cancelled."""

    async def receive(self) -> Message:
        """Return the next ASGI message."""
        if self.watcher is not None:
            return await self.parts()
        try:
            async with asyncio.timeout_at(self.end):
                message = await self.parts()
        except TimeoutError:
            late = f"the body did not arrive within {self.limits.deadline:g} s"
            raise HTTPException(408, late, {"connection": "close"}) from None
        if message["type"] == "http.disconnect":  # in the middle of the body
            self.gone = True
            raise asyncio.CancelledError
        self.size += len(message.get("body", b""))
        if self.size > self.limits.max_bytes:
            raise HTTPException(413, too_large(self.limits.max_bytes).message)
        if not message.get("more_body"):
            answering = asyncio.current_task()
            assert answering is not None
            self.watcher = asyncio.create_task(self._watch(answering))
        return message

    def stop_watching(self) -> None:
        """Stop watching for a disconnect, since the response starts."""
        if self.watcher is not None:
            self.watcher.cancel()

    async def _watch(self, answering: asyncio.Task[Any]) -> None:
        """Cancel the answering task when the next message says that the client has left."""
        await self.parts()
        self.gone = True
        answering.cancel()


class BoundedResponse:
    """A response that is limited in size and gets the headers common to all responses."""

    def __init__(self, send: Send, serving: Service, request: str, body: BoundedBody) -> None:
        self.client, self.serving, self.request, self.body = send, serving, request, body
        self.status = self.length = 0
        self.withheld = False
        """Whether an error response was sent instead."""

    async def send(self, message: Message) -> None:
        """Send the next ASGI message."""
        if self.withheld:
            return
        if message["type"] == "http.response.start":
            headers = dict(message.get("headers", ()))
            length = int(headers.get(b"content-length", 0))
            if message["status"] < 400 and (problem := self._problem(length)):
                await json_response(problem)({"type": "http"}, self.body.receive, self.send)
                self.withheld = True
                return
            self.body.stop_watching()
            self.status = message["status"]
            own = [(b"x-request-id", self.request.encode())]
            if headers.get(b"content-type", b"").startswith(b"text/html"):
                own += [] if POLICY[0] in headers else [POLICY]
            if self.serving.draining:
                own.append((b"connection", b"close"))
            message["headers"] = [*message.get("headers", ()), *own]
            self.length = length
            self.serving.unread += length
        whole = message.get("body", b"")
        last = max(0, len(whole) - 1) // PART * PART
        for start in range(0, last, PART):  # uvicorn waits until the part before is read
            part = {"body": whole[start : start + PART], "more_body": True}
            await self.client({**message, **part})
        await self.client({**message, "body": whole[last:]} if last else message)

    def end(self) -> None:
        """Mark the response as finished, so that its bytes are not counted as unread."""
        self.serving.unread -= self.length
        self.length = 0

    def _problem(self, length: int) -> RefusedError | None:
        """Return why a response of `length` bytes cannot be sent, or None."""
        limits = self.serving.limits
        if length > limits.max_answer:
            return answer_too_large(limits.max_answer)
        too_much = self.serving.unread + length > limits.max_unread
        return unread() if length > SMALL and too_much else None
