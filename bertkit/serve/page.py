"""The web page at /: routes for its files, and headers that limit what a browser may do."""

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

    Args:
        web: the folder of the page; its index.html is served at /.
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
