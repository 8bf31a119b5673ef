"""What every request passes: token, size, shutting down; and what is noted of it.

A plain ASGI middleware, since it must see the body's size before anything reads it.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import random
import re
import time
from typing import Any

from fastapi import HTTPException
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bertkit.serve.limits import Limits, RefusedError
from bertkit.serve.serving import Serving, notes

LOG = logging.getLogger("bertkit.serve")
REQUEST_ID = re.compile(r"[\w.:/+=-]{1,128}", re.ASCII)
GUARDED = ("/v1/", "/metrics")
"""Where the token is asked for; the rest tells nothing of the models' work."""
PATIENCE = 8
"""Times the largest body that is read, and thrown away, so that its sender sees the answer."""
LEFT = 499
"""The status in metrics and log where the client has left; nobody is sent it."""
FAILED = "the server failed; its log has the reason"


class Gate:
    """Lets a request in, or answers itself; notes each in metrics and log.

    Args:
        app: behind it.
        serving: whether requests are taken.
        token: that is asked for; none where empty.
    """

    def __init__(self, app: ASGIApp, serving: Serving, token: str = "") -> None:
        self.app, self.serving, self.limits = app, serving, serving.limits
        self.token = token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started, noted, body = time.perf_counter(), dict[str, Any](), Body(receive, self.limits)
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request = given if REQUEST_ID.fullmatch(given) else f"{random.getrandbits(64):016x}"
        state = {"status": 0}

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                body.stop_watching()
                state["status"] = message["status"]
                own = [(b"x-request-id", request.encode())]
                if self.serving.draining:
                    own.append((b"connection", b"close"))
                message["headers"] = [*message.get("headers", ()), *own]
            await send(message)

        self._count(1)
        context = notes.set(noted)
        try:
            problem = self._problem(scope, headers)
            if problem is None:
                await self.app(scope, body.receive, answer)
            else:
                await self._refuse(problem, headers, scope, receive, answer)
        except asyncio.CancelledError:
            if not body.gone:
                raise
            state["status"] = LEFT
        except Exception:
            LOG.exception("request failed", extra={"fields": {"id": request}})
            if state["status"]:  # the answer has begun; uvicorn closes the connection
                raise
            await as_json(RefusedError(500, FAILED))(scope, receive, answer)
        finally:
            body.stop_watching()
            notes.reset(context)
            self._count(-1)
            self._note(scope, request, state["status"], time.perf_counter() - started, noted)

    def _problem(self, scope: Scope, headers: Headers) -> RefusedError | None:
        """Why a request is not let in."""
        path = scope["path"]
        if self.token and path.startswith(GUARDED):
            scheme, _, known = headers.get("authorization", "").partition(" ")
            right = hmac.compare_digest(known.strip().encode(), self.token)
            if scheme.lower() != "bearer" or not right:
                return RefusedError(
                    401, "the token is missing or wrong; send Authorization: Bearer ..."
                )
        if self.serving.draining and path.startswith("/v1/"):
            return RefusedError(503, "the server is shutting down; ask another one", retry_after=1)
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length) > self.limits.max_bytes:
            return too_large(self.limits.max_bytes)
        return None

    async def _refuse(
        self, problem: RefusedError, headers: Headers, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Answer; a body that is on its way is read first, unless it is very large."""
        length = headers.get("content-length", "")
        most = PATIENCE * self.limits.max_bytes
        if length.isdecimal() and 0 < int(length) <= most:
            try:
                async with asyncio.timeout(self.limits.deadline):
                    while (await receive()).get("more_body"):
                        pass
            except TimeoutError:
                problem.headers["connection"] = "close"
        elif scope["method"] not in {"GET", "HEAD"} and length != "0":
            problem.headers["connection"] = "close"
        await as_json(problem)(scope, receive, send)

    def _count(self, change: int) -> None:
        self.serving.in_flight += change
        self.serving.metrics.in_flight.set(self.serving.in_flight)

    def _note(
        self, scope: Scope, request: str, status: int, seconds: float, noted: dict[str, Any]
    ) -> None:
        """Metrics and a line of the log; neither holds any text of the request."""
        route = getattr(scope.get("route"), "path", None) or "other"
        self.serving.metrics.answered(route, status, seconds)
        client = (scope.get("client") or ["?"])[0]
        line = {
            "id": request,
            "method": scope["method"],
            "route": route,
            "status": status,
            "milliseconds": round(1000 * seconds, 2),
            "client": client,
            **noted,
        }
        LOG.info("request", extra={"fields": line})


def too_large(most: int) -> RefusedError:
    """A body beyond the limit."""
    return RefusedError(
        413, f"the body is larger than {most:,} bytes; send fewer or shorter inputs"
    )


def as_json(problem: RefusedError) -> JSONResponse:
    """The answer to a refused request."""
    return JSONResponse(problem.body(), problem.status, problem.headers)


class Body:
    """A request's body, bounded in size and time; then it is watched whether its sender leaves.

    Args:
        receive: gives its parts.
        limits: most bytes, whatever the headers say, and the deadline.
    """

    def __init__(self, receive: Receive, limits: Limits) -> None:
        self.parts, self.limits = receive, limits
        self.size = 0
        self.end = asyncio.get_running_loop().time() + limits.deadline
        self.watching: asyncio.Task[None] | None = None
        self.gone = False
        """Whether the sender has left, and the task that answers was cancelled."""

    async def receive(self) -> Message:
        """The next part.

        Raises:
            HTTPException: 413 as soon as there are too many bytes, 408 where they do not come.
        """
        if self.watching is not None:
            return await self.parts()
        try:
            async with asyncio.timeout_at(self.end):
                message = await self.parts()
        except TimeoutError:
            late = f"the body did not come within {self.limits.deadline:g} s"
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
            self.watching = asyncio.create_task(self._watch(answering))
        return message

    def stop_watching(self) -> None:
        """The answer begins."""
        if self.watching is not None:
            self.watching.cancel()

    async def _watch(self, answering: asyncio.Task[Any]) -> None:
        """Once the body is there, the next message says that the sender has left."""
        await self.parts()
        self.gone = True
        answering.cancel()
