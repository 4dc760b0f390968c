"""Code shared by the endpoints of Anthropic's API: errors in its format."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable
from urllib.parse import quote

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from midstream.errors import MidstreamError
from router.protocols.anthropic.errors import error_body, http_status
from router.protocols.openai.endpoints import shown
from router.protocols.openai.errors import Names
from router.protocols.retries import retry_headers

# Handles a request, given an id for it.
Endpoint = Callable[[Request, str], Awaitable[Response]]


def mapped(endpoint: Endpoint) -> Callable[[Request], Awaitable[Response]]:
    """Wrap an endpoint to return errors in Anthropic's format."""

    async def call(request: Request) -> Response:
        request_id = uuid.uuid4().hex
        try:
            return await endpoint(request, request_id)
        except ClientDisconnect:
            return Response(status_code=499)
        except Exception as error:  # noqa: BLE001 (it is logged)
            return error_response(shown(error), request_id)

    return call


def error_response(error: MidstreamError, request_id: str = "", names: Names | None = None) -> Response:
    """Return an error in Anthropic's format; `names` are the client's names for native fields."""
    body = error_body(error, request_id, names)
    named = {"request-id": quote(request_id)} if request_id else {}
    return JSONResponse(body, http_status(error), headers=named | retry_headers(error))
