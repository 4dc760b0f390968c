"""Code shared by the endpoints of OpenAI's APIs: errors in its format, and query parameters."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from urllib.parse import quote

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from midstream.errors import ExecutionError, InvalidArgumentError, MidstreamError
from router.protocols.openai.errors import Names, error_body, http_status
from router.protocols.retries import retry_headers

logger = logging.getLogger(__name__)

Endpoint = Callable[[Request], Awaitable[Response]]

# A query parameter that Azure's clients always send; the API has one version.
_API_VERSION = "api-version"


def mapped(endpoint: Endpoint, parameters: Collection[str] | None = None) -> Endpoint:
    """Wrap an endpoint to return errors in OpenAI's format, and to refuse query parameters other than `parameters`,
    unless these are None.
    """

    async def call(request: Request) -> Response:
        try:
            if parameters is not None:
                check_parameters(request.query_params, parameters)
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


def error_response(error: MidstreamError, names: Names | None = None, request_id: str = "") -> Response:
    """Return an error in OpenAI's format.

    Args:
        names: The client's names for native fields.
        request_id: Id of the request that failed; empty if there is none yet.
    """
    return JSONResponse(
        error_body(error, names), http_status(error), headers=retry_headers(error) | id_header(request_id)
    )


def id_header(request_id: str) -> dict[str, str]:
    """Return the response header with a request's id."""
    return {"x-request-id": quote(request_id, safe="")} if request_id else {}


def check_parameters(query: Mapping[str, str], known: Collection[str]) -> None:
    """Raise InvalidArgumentError if a query parameter is neither in `known` nor the version of the API."""
    for name in query:
        if name not in known and name != _API_VERSION:
            raise InvalidArgumentError("is not a parameter of this endpoint; leave it out", field=name[:128])


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
