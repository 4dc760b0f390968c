"""Errors in OpenAI's format, with the HTTP statuses to which its clients react: they retry 408, 409, 429 and 5xx."""

from __future__ import annotations

from collections.abc import Mapping

from midstream.errors import ContextLengthError, MidstreamError, StatusCode

_STATUSES: dict[StatusCode, tuple[int, str]] = {
    StatusCode.INVALID_ARGUMENT: (400, "invalid_request_error"),
    StatusCode.OUT_OF_RANGE: (400, "invalid_request_error"),
    # Clients would retry status 501, which cannot succeed.
    StatusCode.UNIMPLEMENTED: (400, "invalid_request_error"),
    StatusCode.UNAUTHENTICATED: (401, "authentication_error"),
    StatusCode.PERMISSION_DENIED: (403, "permission_error"),
    StatusCode.NOT_FOUND: (404, "not_found_error"),
    StatusCode.ALREADY_EXISTS: (409, "conflict_error"),
    StatusCode.ABORTED: (409, "conflict_error"),
    StatusCode.RESOURCE_EXHAUSTED: (429, "rate_limit_error"),
    StatusCode.CANCELLED: (499, "cancelled_error"),
    StatusCode.UNAVAILABLE: (503, "service_unavailable_error"),
    StatusCode.DEADLINE_EXCEEDED: (504, "timeout_error"),
}
# For one request, native fields that clients can set by several fields -> the field that the client sent.
Names = Mapping[str, str]
# Native fields that have other names in OpenAI's and vLLM's APIs; for all others, the last part of the path is the
# same.
_PARAMS = {
    "chat": "messages",
    "client_id": "user",
    "from_token_by_sequence": "Last-Event-ID",
    "lora.name": "model",
    "prompt_tuning.name": "model",
    "prompt_tuning.table": "messages",  # only images make a table
    "token_ids": "prompt",
    "guided_decoding": "response_format",
    "speculative": "prediction",
    "sampling.beam_width": "n",
    "sampling.embedding_bias": "logit_bias",
    "sampling.num_return_sequences": "n",
    "stopping.stop_words": "stop",
    "output.exclude_input_from_output": "echo",
    "output.log_probs": "logprobs",
    "output.prompt_log_probs": "logprobs",
}


def http_status(error: MidstreamError) -> int:
    return _STATUSES.get(error.code, (500, ""))[0]


def error_body(error: MidstreamError, names: Names | None = None) -> dict[str, object]:
    """Return the body of an error; `names` are the client's names for native fields."""
    kind = _STATUSES.get(error.code, (500, "server_error"))[1]
    code = "model_not_found" if error.code is StatusCode.NOT_FOUND and error.field == "model" else None
    if error.code is StatusCode.UNIMPLEMENTED:
        code = "unsupported"
    if isinstance(error, ContextLengthError):
        code = "context_length_exceeded"
    param = param_of(error.field, names)
    message = f"{param}: {error.message}" if param else error.message
    return {"error": {"message": message, "type": kind, "param": param or None, "code": code}}


def param_of(field: str, names: Names | None = None) -> str:
    """Return the client's name for a native field: the entry in `names` for the field or for an enclosing field,
    otherwise OpenAI's name.
    """
    outer = field
    while names and outer:
        if outer in names:
            return names[outer]
        outer = outer.rpartition(".")[0]
    if field in _PARAMS:
        return _PARAMS[field]
    section, dot, name = field.partition(".")
    if dot and section in ("guided_decoding", "speculative"):
        return _PARAMS[section]
    if field.endswith(".image.data"):
        return field.removeprefix("chat.").replace(".parts[", ".content[").replace(".image.data", ".image_url.url")
    return name if dot and section in ("sampling", "stopping", "output") else field.removeprefix("chat.")
