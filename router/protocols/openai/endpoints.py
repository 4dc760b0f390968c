"""Code shared by the endpoints of OpenAI's APIs: errors in its format, and query parameters."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from midstream.errors import ExecutionError, InvalidArgumentError, MidstreamError
from router.protocols.openai.errors import error_body, headers, http_status

logger = logging.getLogger(__name__)

Endpoint = Callable[[Request], Awaitable[Response]]


def mapped(endpoint: Endpoint) -> Endpoint:
    """Wrap an endpoint to return errors in OpenAI's format."""

    async def call(request: Request) -> Response:
        try:
            return await endpoint(request)
        except ClientDisconnect:
            return Response(status_code=499)
        except Exception as error:  # noqa: BLE001 (it is logged)
            return error_response(shown(error))

    return call


def shown(error: Exception) -> MidstreamError:
    """Return the error that the client gets for a call's error; details of unexpected errors are only logged."""
    if isinstance(error, MidstreamError):
        return error
    if isinstance(error, RecursionError):
        return InvalidArgumentError("the body is nested too deeply")
    logger.error("unexpected error in a call", exc_info=error)
    return ExecutionError("internal error; the log has its details")


def error_response(error: MidstreamError) -> Response:
    """Return an error in OpenAI's format."""
    return JSONResponse(error_body(error), http_status(error), headers=headers(error))


def flag(query: Mapping[str, str], name: str) -> bool:
    """Return a boolean query parameter; false if unset."""
    value = query.get(name, "false").lower()
    if value not in ("true", "false", "1", "0"):
        raise InvalidArgumentError("must be true or false", field=name)
    return value in ("true", "1")


def integer(query: Mapping[str, str], name: str) -> int | None:
    """Return an integer query parameter; None if unset."""
    value = query.get(name)
    if value is None:
        return None
    if not (value.isascii() and value.isdigit() and len(value) < 10):
        raise InvalidArgumentError("must be a whole number", field=name)
    return int(value)


def page_limit(query: Mapping[str, str], default: int, highest: int) -> int:
    limit = integer(query, "limit")
    limit = default if limit is None else limit
    if not 1 <= limit <= highest:
        raise InvalidArgumentError(f"must be in 1..{highest}", field="limit")
    return limit


def is_ascending(query: Mapping[str, str]) -> bool:
    """Return whether the query parameter `order` is asc; desc by default."""
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidArgumentError("must be asc or desc", field="order")
    return order == "asc"
