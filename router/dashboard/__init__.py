"""The dashboard: a page that shows the state of every process, and its feed.

The page loads files only from this router: its styles and scripts are served here, and its content security policy
forbids all other sources. The feed sends the stream of GetStatus as server-sent events, each with a JSON object. It
requires the router's authentication; the page sends the bearer token that its user has typed.
"""

from __future__ import annotations

import contextlib
import json
import mimetypes
from collections.abc import AsyncIterator
from pathlib import Path

from google.protobuf.json_format import MessageToDict
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from midstream.errors import MidstreamError
from protos import status_pb2
from router.protocols.openai.errors import error_body, http_status
from router.protocols.retries import retry_headers
from router.protocols.streaming import SSE_HEADERS
from router.status import StatusFeed

_STATIC = Path(__file__).with_name("static")
_HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def dashboard_routes(status: StatusFeed) -> list[Route]:
    """Return `/dashboard`, its static files, and `/dashboard/feed`."""

    async def feed(request: Request) -> Response:
        states = status.watch()
        try:
            first = await anext(states)
        except MidstreamError as error:
            return JSONResponse(error_body(error), http_status(error), headers={**_HEADERS, **retry_headers(error)})
        return StreamingResponse(_events(first, states), headers=_HEADERS | SSE_HEADERS)

    files = [Route(f"/dashboard/static/{path.name}", page(path)) for path in sorted(_STATIC.iterdir())]
    return [Route("/dashboard", page(_STATIC / "index.html")), Route("/dashboard/feed", feed), *files]


def page(path: Path) -> Response:
    """Return an ASGI app that serves a static file; its content security policy allows only the router's files."""
    media_type, _ = mimetypes.guess_type(path.name)
    # The body is kept in memory, so that no request has to open a file.
    return Response(path.read_bytes(), headers=_HEADERS, media_type=media_type)


async def _events(
    first: status_pb2.SystemStatus, states: AsyncIterator[status_pb2.SystemStatus]
) -> AsyncIterator[bytes]:
    yield _event(first)
    with contextlib.suppress(
        MidstreamError
    ):  # the router is draining; the page reconnects, to another router if there is one
        async for state in states:
            yield _event(state)


def _event(state: status_pb2.SystemStatus) -> bytes:
    values = MessageToDict(state, always_print_fields_with_no_presence=True)
    return f"data: {json.dumps(values, separators=(',', ':'))}\n\n".encode()
