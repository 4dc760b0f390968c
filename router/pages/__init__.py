"""The pages that a browser finds on the HTTP port: a chat at `/`, the API at `/docs`; and `/version`.

The pages need no token; they contain no data. What they ask the API for, they ask with a token that their reader types.
"""

from __future__ import annotations

from pathlib import Path

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from midstream import __version__
from router.dashboard import page

STATIC_PREFIX = "/static/"
_STATIC = Path(__file__).with_name("static")


def page_routes() -> list[Route]:
    """Return `/`, `/docs`, what they load, and `/version`."""

    async def version(request: Request) -> Response:
        return JSONResponse({"version": __version__})

    files = [Route(STATIC_PREFIX + path.name, page(path)) for path in sorted(_STATIC.iterdir())]
    return [
        Route("/", page(_STATIC / "chat.html")),
        Route("/docs", page(_STATIC / "docs.html")),
        Route("/version", version),
        *files,
    ]
