"""The ASGI application, with the web page at /, and the server that runs it."""

from __future__ import annotations

import gc
import math
import socket
import sys
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import uvicorn
from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.security import HTTPBearer
from fastapi_offline import FastAPIOffline
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse, Response
from starlette.routing import Route

import bertkit
from bertkit.errors import BertkitError, InputTypeError, short_repr
from bertkit.serve import routes
from bertkit.serve.admission import (
    DEFAULT_LIMITS,
    Limits,
    Metrics,
    RefusedError,
    RequestMiddleware,
    check_token,
    json_response,
    shorten,
)
from bertkit.serve.models import Service, load_models

WEB = Path(__file__).parent / "web"
ABOUT = """BERT-style models over HTTP. Texts may have any length: long texts are read in windows.

Every error response has the form `{"error": {"message": ..., "type": ..., "param": ...}}`.
"""


def serving_app(
    *models: str | Path,
    precision: str = "auto",
    device: str = "auto",
    top: int | None = None,
    token: str = "",
    hosts: Collection[str] = (),
    limits: Limits = DEFAULT_LIMITS,
) -> FastAPI:
    """Return an ASGI application that serves models, for another server or a larger application.

    `bertkit serve` runs the same application in uvicorn.

    Args:
        models: the models' folders or names on the hub, each as MODEL or NAME=MODEL.
        precision: "fp32", "bf16", "int8" or "auto".
        device: "auto", "cpu", "cuda", ...
        top: the number of labels whose probabilities are returned; see `bertkit.load`.
        token: the token that requests to /v1/ and /metrics must carry; "" if no token is required.
        hosts: the host names that are accepted in addition to IP addresses; empty for any name.
        limits: the limits on requests and queues.

    Raises:
        BertkitError: a model cannot be loaded, two have the same name, or no header can carry the
            token.
        InputTypeError: a model is neither a path nor text, or the hosts are no list.
    """
    if wrong := [model for model in models if not isinstance(model, str | Path)]:
        raise InputTypeError(f"give each model as a path or a name, not {short_repr(wrong[0])}")
    if isinstance(hosts, str) or not isinstance(hosts, Collection):
        raise InputTypeError(f"hosts must be a list of names, not {hosts!r}; put it in brackets")
    check_token(token)
    metrics, names = Metrics(), [str(model) for model in models]
    served = load_models(names, limits, metrics, precision=precision, device=device, top=top)
    return make_app(Service(served, limits, metrics), token=token, hosts=hosts)


def make_app(service: Service, *, token: str = "", hosts: Collection[str] = ()) -> FastAPI:
    """Return the ASGI application for a service, which is closed when the application ends."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        service.close()

    app = FastAPIOffline(
        title="bertkit",
        version=bertkit.__version__,
        description=ABOUT,
        lifespan=lifespan,
        redirect_slashes=False,  # a redirect would repeat the host name of the request
    )
    bearer = [Depends(HTTPBearer(auto_error=False))] if token else []  # for /docs only
    for router in (
        routes.prediction_routes(service),
        routes.embedding_routes(service),
        routes.inspection_routes(service),
        routes.model_routes(service, reloading=bool(token)),
    ):
        app.include_router(router, dependencies=bearer)
    app.include_router(routes.state_routes(service))
    app.router.routes.extend(map(file_route, sorted(WEB.iterdir())))
    app.state.service = service
    app.add_middleware(
        RequestMiddleware, limits=service.limits, metrics=service.metrics, token=token, hosts=hosts
    )
    app.add_exception_handler(RequestValidationError, refuse_body)
    app.add_exception_handler(HTTPException, refuse_request)
    return app


async def refuse_request(request: Request, error: Exception) -> Response:
    """Return an error of the framework, such as 404, in the form of every error."""
    assert isinstance(error, HTTPException)
    response = json_response(RefusedError(error.status_code, str(error.detail)))
    response.headers.update(error.headers or {})
    return response


async def refuse_body(request: Request, error: Exception) -> Response:
    """Return the first problem of a body, without its texts, which may be long or private."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    is_json = "json" in request.headers.get("content-type", "").lower()
    if not is_json and first["type"] != "missing":
        message = "the body is not marked as JSON; send content-type: application/json"
        return json_response(RefusedError(422, message))
    if first["type"] == "json_invalid":
        message = f"the body is not valid JSON at character {first['loc'][-1]}"
        return json_response(RefusedError(400, message))
    param = ".".join(shorten(str(part)) for part in first["loc"][1:]) or None
    message = f"{param or 'body'}: {first['msg'].removeprefix('Value error, ')}"
    return json_response(RefusedError(422, message, param))


HEADERS = {
    "content-security-policy": "default-src 'self'; object-src 'none'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
"""The page loads nothing from other hosts, sends nothing to them, and has no inline scripts or
styles; after an update of the package, the browser uses the new files."""


def file_route(path: Path) -> Route:
    """Return the route of a file of the page; mounting its folder would catch all other paths."""

    async def file(request: Request) -> Response:
        return FileResponse(path, headers=HEADERS)

    address = "/" if path.name == "index.html" else f"/{path.name}"
    return Route(address, file, include_in_schema=False)


MAX_PORT = 65_535
KEEP_ALIVE = 75
"""Seconds until an idle connection is closed: late enough that clients and proxies do it first."""
SWITCH_INTERVAL = 2e-4
"""The seconds after which a waiting thread gets the interpreter lock. A model's thread needs it
briefly after every matrix product; with Python's default of 5 ms it would mostly wait."""


def open_socket(host: str, port: int) -> socket.socket:
    """Return a listening socket, so that the address stays reserved while models are loaded."""
    try:
        if not 0 <= port <= MAX_PORT:
            raise ValueError(f"ports are from 0 to {MAX_PORT:,}")
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.create_server(address[:2], family=family, backlog=2048)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise BertkitError(
            f"cannot listen at {host}:{port}: {reason}; choose another --host or --port"
        ) from error
    # asyncio sets it only where the protocol is named; else each response waits for 40 ms
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


def socket_url(listening: socket.socket) -> str:
    """Return the URL of a listening socket."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def make_server(app: FastAPI, *, log_requests: bool = True) -> uvicorn.Server:
    """Return a uvicorn server for an application of `bertkit.serve.app`."""
    limits = app.state.service.limits
    config = uvicorn.Config(
        app,
        loop="asyncio",  # uvloop accepts one connection per iteration, so that many wait
        http="h11",  # which limits the size of a request's head
        ws="none",
        access_log=log_requests,
        server_header=False,
        limit_concurrency=limits.max_connections,
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=math.ceil(limits.deadline),
    )
    return uvicorn.Server(config)


def serve(app: FastAPI, listening: socket.socket, *, log_requests: bool = True) -> None:
    """Serve requests until a signal arrives, and answer those that were accepted before."""
    sys.setswitchinterval(SWITCH_INTERVAL)
    gc.collect()
    gc.freeze()  # else a full collection traverses all models and libraries: 200 ms
    with suppress(KeyboardInterrupt):  # which uvicorn raises again after its shutdown
        make_server(app, log_requests=log_requests).run([listening])
