"""Pages on the HTTP port: a chat at `/` and the API reference at `/docs`; also `/version`.

The pages need no key, since they contain no data; they call the API with the key that their user has typed.
static/vendor contains unchanged files of npm packages, with their licences
(docs/decisions/dependencies.md).
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
    """Return `/`, `/docs`, their static files, and `/version`."""

    async def version(request: Request) -> Response:
        return JSONResponse({"version": __version__})

    files = [Route(STATIC_PREFIX + str(path.relative_to(_STATIC)), page(path)) for path in sorted(_STATIC.rglob("*.*"))]
    return [
        Route("/", page(_STATIC / "chat.html")),
        Route("/docs", page(_STATIC / "docs.html")),
        Route("/version", version),
        *files,
    ]
