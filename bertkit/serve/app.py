"""The routes, the gate before them and the page, as one ASGI application."""

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
from starlette.responses import Response

import bertkit
from bertkit.serve import routes
from bertkit.serve import routes as more_routes
from bertkit.serve.limits import RefusedError
from bertkit.serve.middleware import RequestMiddleware, json_response
from bertkit.serve.page import page_routes
from bertkit.serve.service import Service, shorten_client_text

WEB = Path(__file__).parent / "web"
"""The page that is served at /, where there is one."""
TRIED = re.compile(r"(str|int|function-.*|constrained-.*|list\[.*)$")
"""How pydantic names the types of a union."""
ABOUT = """Models of BERT's kind over HTTP. Texts of any length: long ones are read through windows.

Every answer that is none has the form `{"error": {"message": ..., "type": ..., "param": ...}}`.
"""


def make_app(
    serving: Service, *, token: str = "", hosts: Collection[str] = (), web: Path = WEB
) -> FastAPI:
    """The application.

    Args:
        serving: the models; they are closed with the application.
        token: that requests to /v1/ and /metrics must carry; none where empty.
        hosts: names under which it is asked, besides addresses; any where empty.
        web: a folder with index.html, served at / where it is there.
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
        redirect_slashes=False,  # it would send back any host name
        openapi_tags=[{"name": name} for name in ("tasks", "pre-training", "embeddings", "inside")],
    )
    for made in (
        routes.task_routes(serving),
        routes.pretraining_routes(serving),
        more_routes.embedding_routes(serving),
        more_routes.inspection_routes(serving),
        more_routes.model_routes(serving, reloading=bool(token)),
        more_routes.state_routes(serving),
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
    """Every error as the same kind of JSON."""

    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, RefusedError)
        return json_response(error)

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return json_response(
            invalid_body(error.errors()[0], request.headers.get("content-type", ""))
        )

    async def by_framework(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        answer = json_response(RefusedError(error.status_code, str(error.detail)))
        answer.headers.update(error.headers or {})
        return answer

    app.add_exception_handler(RefusedError, refused)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, by_framework)


def invalid_body(first: Mapping[str, Any], content_type: str) -> RefusedError:
    """The first thing that is wrong with a body.

    Texts of it are not repeated: they may be long, private, or no valid text at all. Names of
    fields are, in short.

    Args:
        first: as pydantic tells of it.
        content_type: of the request.
    """
    if "json" not in content_type.lower() and first["type"] != "missing":
        return RefusedError(
            422, "the body is not marked as JSON; send content-type: application/json"
        )
    if first["type"] == "json_invalid":
        return RefusedError(400, f"the body is no JSON at character {first['loc'][-1]}")
    # the places in a union say which of its types was tried; they are no fields
    places = [str(part) for part in first["loc"][1:]]
    where = [shorten_client_text(place) for place in places if not TRIED.match(place)]
    param = ".".join(where) or None
    if len(where) < len(places):
        return RefusedError(422, f"{param}: takes a text, texts, ids, or lists of ids", param)
    message = first["msg"].removeprefix("Value error, ")
    return RefusedError(422, f"{param or 'body'}: {message}", param)


def with_token(app: FastAPI) -> Any:
    """The description of the routes, which says that they ask for a token."""
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
