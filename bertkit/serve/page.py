"""The page at /: its files, and what a browser may do with them."""

from __future__ import annotations

from pathlib import Path

from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

HEADERS = {
    "content-security-policy": "default-src 'self'; object-src 'none'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
"""Nothing is loaded from, or sent to, another host; no script or style stands in the page itself;
after an update of the package the browser takes the new files."""
MEDIA_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
"""Given here: the types that Python knows depend on the machine."""


def page_routes(web: Path) -> list[Route]:
    """A route for each file of the page; none where the folder has no index.html.

    One by one and not as a mounted folder, which would take every path that no other route has,
    and answer a wrong method with 404.

    Args:
        web: the folder; index.html is served at /.
    """
    if not (web / "index.html").is_file():
        return []
    files = sorted(path for path in web.iterdir() if path.suffix in MEDIA_TYPES)
    return [file_route(path) for path in files]


def file_route(path: Path) -> Route:
    """The route of one file."""

    async def file(request: Request) -> Response:
        return FileResponse(path, headers=HEADERS, media_type=MEDIA_TYPES[path.suffix])

    where = "/" if path.name == "index.html" else f"/{path.name}"
    return Route(where, file, include_in_schema=False)
