"""Errors in Anthropic's format, with the HTTP statuses to which its clients react: they retry 408, 409, 429 and 5xx."""

from __future__ import annotations

from midstream.errors import ContextLengthError, MidstreamError, StatusCode
from router.protocols.openai.errors import Names, param_of

_STATUSES: dict[StatusCode, tuple[int, str]] = {
    StatusCode.INVALID_ARGUMENT: (400, "invalid_request_error"),
    StatusCode.OUT_OF_RANGE: (400, "invalid_request_error"),
    StatusCode.UNIMPLEMENTED: (400, "invalid_request_error"),
    StatusCode.UNAUTHENTICATED: (401, "authentication_error"),
    StatusCode.PERMISSION_DENIED: (403, "permission_error"),
    StatusCode.NOT_FOUND: (404, "not_found_error"),
    StatusCode.ALREADY_EXISTS: (409, "invalid_request_error"),
    StatusCode.RESOURCE_EXHAUSTED: (429, "rate_limit_error"),
    StatusCode.CANCELLED: (499, "api_error"),
    StatusCode.UNAVAILABLE: (529, "overloaded_error"),
    StatusCode.DEADLINE_EXCEEDED: (504, "timeout_error"),
}
_PARAMS = {"stop": "stop_sequences", "response_format": "output_config.format", "user": "metadata.user_id"}


def http_status(error: MidstreamError) -> int:
    return _STATUSES.get(error.code, (500, ""))[0]


def error_body(error: MidstreamError, request_id: str = "", names: Names | None = None) -> dict[str, object]:
    """Return the body of an error; `names` are the client's names for native fields."""
    kind = _STATUSES.get(error.code, (500, "api_error"))[1]
    param = param_of(error.field, names)
    param = _PARAMS.get(param, param)
    message = f"{param}: {error.message}" if param else error.message
    if isinstance(error, ContextLengthError):
        message = f"prompt is too long: {error.message}"  # clients match this text
    described: dict[str, object] = {"type": kind, "message": message}
    if error.code is StatusCode.UNIMPLEMENTED and param == "thread":
        # With these details, the tool runners of Anthropic's clients repeat the call without `thread`.
        described["details"] = {"error_code": "thread_unsupported_request"}
    body: dict[str, object] = {"type": "error", "error": described}
    return {**body, "request_id": request_id} if request_id else body
