"""The ASGI application: the routes, the middleware in front of them, and the web page at /."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi_offline import FastAPIOffline
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse, Response
from starlette.routing import Route

import bertkit
from bertkit.errors import InputTypeError, short_repr
from bertkit.serve import routes
from bertkit.serve.limits import DEFAULT_LIMITS, Limits, RefusedError, check_token
from bertkit.serve.metrics import Metrics
from bertkit.serve.middleware import RequestMiddleware, json_response
from bertkit.serve.models import load_models
from bertkit.serve.service import Service, shorten_client_text

WEB = Path(__file__).parent / "web"
"""The folder of the web page that is served at /."""
TRIED = re.compile(r"(str|int|function-.*|constrained-.*|list\[.*)$")
"""Matches the names by which pydantic's error locations tell the types of a union apart."""
ABOUT = """BERT-style models over HTTP. Texts may have any length: long texts are read in windows.

Every error response has the form `{"error": {"message": ..., "type": ..., "param": ...}}`.
"""


def serving_app(
    *models: str | Path,
    precision: str = "auto",
    device: str = "auto",
    token: str = "",
    hosts: Collection[str] = (),
    limits: Limits = DEFAULT_LIMITS,
) -> FastAPI:
    """Return an ASGI application that serves models, for another server or a larger application.

    `bertkit serve` runs the same application with connection limits, timeouts and a log of its own,
    which another server has to provide.

    Args:
        models: the models' folders or names on the hub, each as MODEL or NAME=MODEL.
        precision: "fp32", "bf16", "int8" or "auto".
        device: "auto", "cpu", "cuda", ...
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
    metrics, given = Metrics(), [str(model) for model in models]
    served = load_models(given, limits, metrics, precision=precision, device=device)
    return make_app(Service(served, limits, metrics), token=token, hosts=hosts)


def make_app(
    serving: Service, *, token: str = "", hosts: Collection[str] = (), web: Path = WEB
) -> FastAPI:
    """Return the ASGI application for a service.

    Args:
        serving: the service with the loaded models; it is closed when the application shuts down.
        token: the token that requests to /v1/ and /metrics must carry; "" if no token is required.
        hosts: the host names that are accepted in addition to IP addresses; empty for any name.
        web: the folder of the web page; if it has an index.html, the page is served at /.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        serving.close()

    app = FastAPIOffline(
        title="bertkit",
        version=bertkit.__version__,
        description=ABOUT,
        lifespan=lifespan,
        redirect_slashes=False,  # a redirect would repeat the host name of the request
        openapi_tags=[
            {"name": name} for name in ("tasks", "pre-training", "embeddings", "inspection")
        ],
    )
    for made in (
        routes.task_routes(serving),
        routes.pretraining_routes(serving),
        routes.embedding_routes(serving),
        routes.inspection_routes(serving),
        routes.model_routes(serving, reloading=bool(token)),
        routes.state_routes(serving),
    ):
        app.include_router(made)
    app.router.routes.extend(page_routes(web))
    app.state.serving = serving
    app.add_middleware(RequestMiddleware, serving=serving, token=token, hosts=hosts)
    add_refusals(app)
    if token:
        app.openapi = with_token(app)  # type: ignore[method-assign]
    return app


def add_refusals(app: FastAPI) -> None:
    """Register handlers that give every error response the same JSON form."""

    async def refuse(request: Request, error: Exception) -> Response:
        if isinstance(error, RequestValidationError):
            error = invalid_body(error.errors()[0], request.headers.get("content-type", ""))
        elif isinstance(error, HTTPException):  # raised by the framework
            answer = json_response(RefusedError(error.status_code, str(error.detail)))
            answer.headers.update(error.headers or {})
            return answer
        assert isinstance(error, RefusedError)
        return json_response(error)

    for kind in (RefusedError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, refuse)


def invalid_body(first: Mapping[str, Any], content_type: str) -> RefusedError:
    """Return the error response for a body that failed validation.

    The message does not repeat texts of the body, which may be long, private or invalid. It does
    name the field, shortened.
    """
    if "json" not in content_type.lower() and first["type"] != "missing":
        return RefusedError(
            422, "the body is not marked as JSON; send content-type: application/json"
        )
    if first["type"] == "json_invalid":
        return RefusedError(400, f"the body is not valid JSON at character {first['loc'][-1]}")
    # for a union, the location also contains the type that was tried, which is not a field
    places = [str(part) for part in first["loc"][1:]]
    named = first["type"] == "extra_forbidden"  # the last one is then a name of the client's own
    where = [shorten_client_text(place) for place in places if named or not TRIED.match(place)]
    param = ".".join(where) or None
    if len(where) < len(places):
        return RefusedError(422, f"{param}: must be a text, texts, ids, or lists of ids", param)
    message = first["msg"].removeprefix("Value error, ")
    return RefusedError(422, f"{param or 'body'}: {message}", param)


def with_token(app: FastAPI) -> Any:
    """Return a replacement for `app.openapi` that marks the guarded routes as requiring a token."""
    plain = app.openapi

    def described() -> dict[str, Any]:
        found = plain()
        schemes = found.setdefault("components", {}).setdefault("securitySchemes", {})
        schemes["token"] = {"type": "http", "scheme": "bearer"}
        for path, methods in found["paths"].items():
            if path.startswith(("/v1/", "/metrics")):
                for method in methods.values():
                    method["security"] = [{"token": []}]
        return found

    return described


HEADERS = {
    "content-security-policy": "default-src 'self'; object-src 'none'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
"""The page loads nothing from other hosts, sends nothing to them, and has no inline scripts or
styles; after an update of the package, the browser uses the new files."""
MEDIA_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
"""Listed here because the types that Python's `mimetypes` knows depend on the machine."""


def page_routes(web: Path) -> list[Route]:
    """Return a route for each file of the page, or no routes if there is no index.html.

    The folder is not mounted as a whole: a mount would catch every path that no other route has,
    and would answer a wrong method with 404.
    """
    if not (web / "index.html").is_file():
        return []
    files = sorted(path for path in web.iterdir() if path.suffix in MEDIA_TYPES)
    return [file_route(path) for path in files]


def file_route(path: Path) -> Route:
    """Return the route of one file."""

    async def file(request: Request) -> Response:
        return FileResponse(path, headers=HEADERS, media_type=MEDIA_TYPES[path.suffix])

    where = "/" if path.name == "index.html" else f"/{path.name}"
    return Route(where, file, include_in_schema=False)
