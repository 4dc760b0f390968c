"""Lines of a batch: validation of the input lines, and their results."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass

from midstream.errors import InvalidArgumentError
from router.protocols.batches.batch import Batch
from router.protocols.long_json import parse_long_json, render_long_json

MAX_LINES = 50_000
_MAX_ERRORS = 100
_MAX_CUSTOM_ID = 512
_INLINE_BYTES = 32 << 10
_FIELDS = frozenset({"custom_id", "method", "url", "body"})
_USAGES = {"input_tokens": ("prompt_tokens", "input_tokens"), "output_tokens": ("completion_tokens", "output_tokens")}


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a batch's input file.

    Attributes:
        number: Index of the line, from 0.
        body: JSON text, which takes a fraction of the memory of the parsed values.
    """

    number: int
    custom_id: str
    body: bytes


@dataclass(frozen=True, slots=True)
class Outcome:
    """A line of a batch's output file or error file.

    Attributes:
        usage: Numbers of tokens, with the keys of Batch.usage.
    """

    text: str
    is_error: bool
    usage: dict[str, int]


def read_line(number: int, data: bytes, endpoint: str) -> Line:
    """Parse a line of the input file. Raises InvalidArgumentError if it is not a request to the batch's endpoint."""
    fields = _parse(data)
    if not isinstance(fields, dict):
        raise InvalidArgumentError("must be an object")
    unknown = sorted(fields.keys() - _FIELDS)
    if unknown:
        raise InvalidArgumentError("is not a field of a line", field=unknown[0][:64])
    custom_id, body = fields.get("custom_id"), fields.get("body")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= _MAX_CUSTOM_ID:
        raise InvalidArgumentError(f"must be 1 to {_MAX_CUSTOM_ID} characters", field="custom_id")
    if fields.get("method") != "POST":
        raise InvalidArgumentError("must be POST", field="method")
    if fields.get("url") != endpoint:
        raise InvalidArgumentError(f"must be {endpoint}, the batch's endpoint", field="url")
    if not isinstance(body, dict):
        raise InvalidArgumentError("must be an object", field="body")
    for name in ("stream", "background"):
        if body.get(name):
            raise InvalidArgumentError("must not be set in a batch", field=f"body.{name}")
    return Line(number, custom_id, render_long_json(body))


async def read_line_soon(number: int, data: bytes, endpoint: str) -> Line:
    """Return the result of `read_line`, which runs in a thread if the line is long."""
    if len(data) <= _INLINE_BYTES:
        return read_line(number, data, endpoint)
    return await asyncio.to_thread(read_line, number, data, endpoint)


def _parse(data: bytes) -> object:
    try:
        return parse_long_json(data)
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"is not JSON: {error}", field="") from None


async def check_lines(
    lines: AsyncIterator[bytes], endpoint: str, max_bytes: int
) -> tuple[int, list[dict[str, object]]]:
    """Validate the input file; return its number of lines and the validation errors (none if the batch can run).

    Args:
        max_bytes: Maximum size of a line.
    """
    errors: list[dict[str, object]] = []
    seen: set[bytes] = set()
    count = 0
    async for data in lines:
        try:
            if len(data) > max_bytes:
                raise InvalidArgumentError(f"has more than {max_bytes} bytes", field="")
            line = await read_line_soon(count, data, endpoint)
            name = hashlib.blake2b(line.custom_id.encode("utf-8", "surrogatepass"), digest_size=16).digest()
            if name in seen:
                raise InvalidArgumentError("is already used by an earlier line", field="custom_id")
            seen.add(name)
        except InvalidArgumentError as error:
            errors.append(_error("invalid_line", error.message, error.field, count + 1))
        count += 1
        if count > MAX_LINES:
            errors.append(_error("too_many_lines", f"has more than {MAX_LINES} lines", "input_file_id", None))
        if len(errors) >= _MAX_ERRORS or count > MAX_LINES:
            return count, errors
    if not count:
        errors.append(_error("empty_file", "has no lines", "input_file_id", None))
    return count, errors


def _error(code: str, message: str, param: str, line: int | None) -> dict[str, object]:
    return {"code": code, "message": message, "param": param or None, "line": line}


def answered(batch: Batch, line: Line, status: int, request_id: str, body: dict[str, object]) -> Outcome:
    """Return the outcome of a line whose request was answered, with a result or an error."""
    response = {"status_code": status, "request_id": request_id, "body": body}
    is_error = status != 200 or has_failed(body)
    return Outcome(_text(batch, line, response, None), is_error, usage_of(body) if status == 200 else {})


def has_failed(body: Mapping[str, object]) -> bool:
    """Return whether a body is a failed response of `/v1/responses`, which has the HTTP status 200."""
    return body.get("object") == "response" and body.get("status") == "failed"


def unanswered(batch: Batch, line: Line, code: str, message: str) -> Outcome:
    """Return the outcome of a line whose request was not completed."""
    return Outcome(_text(batch, line, None, {"code": code, "message": message}), True, {})


def _text(batch: Batch, line: Line, response: object, error: object) -> str:
    name = hashlib.blake2b(f"{batch.id}/{line.number}".encode(), digest_size=16).hexdigest()
    fields = {"id": f"batch_req_{name}", "custom_id": line.custom_id, "response": response, "error": error}
    return json.dumps(fields, separators=(",", ":")) + "\n"


def usage_of(body: dict[str, object]) -> dict[str, int]:
    """Return the token usage in the response of any endpoint, with the keys of Batch.usage."""
    usage = body.get("usage")
    if not isinstance(usage, dict):
        return {}
    found = {name: int(next((usage[key] for key in keys if key in usage), 0)) for name, keys in _USAGES.items()}
    found["total_tokens"] = found["input_tokens"] + found["output_tokens"]
    for kind, name in (("prompt", "cached"), ("input", "cached"), ("completion", "reasoning"), ("output", "reasoning")):
        details = usage.get(f"{kind}_tokens_details")
        if isinstance(details, dict):
            found[f"{name}_tokens"] = int(details.get(f"{name}_tokens") or 0)
    return found
