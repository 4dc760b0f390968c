"""Calls written as JSON objects, `{"name": ..., "arguments": {...}}`; used by several formats."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from router.parsers.machine import Call, parse_json

_SPACE = re.compile(r"\s*")
_DECODER = json.JSONDecoder()


def read_call(value: object) -> Call | None:
    """Return the call in a JSON value. Llama's key for the arguments is `parameters`, other formats' `arguments`;
    Command's key for the name is `tool_name`.
    """
    if not isinstance(value, dict):
        return None
    name = value.get("name", value.get("tool_name"))
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        try:
            arguments = parse_json(arguments)
        except ValueError:
            return None
    arguments = {} if arguments is None else arguments
    call_id = value.get("id")
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    try:
        text = json.dumps(arguments, ensure_ascii=False)
    except RecursionError:
        return None
    return Call(name, text, call_id if isinstance(call_id, str) else None)


def read_keyed_call(value: object) -> Call | None:
    """Return the call in a JSON value of which the only key is the name, and its value the arguments."""
    if not isinstance(value, dict) or len(value) != 1:
        return None
    ((name, arguments),) = value.items()
    return read_call({"name": name, "arguments": arguments})


# Returns the call in a JSON value, if it is one.
ReadCall = Callable[[object], Call | None]


def read_calls(text: str, read: ReadCall = read_call) -> list[Call] | None:
    """Return the calls in `text`, a JSON object or an array of objects."""
    try:
        value = parse_json(text)
    except ValueError:
        return None
    calls = [read(item) for item in (value if isinstance(value, list) else [value])]
    found = [call for call in calls if call is not None]
    return found if len(found) == len(calls) else None


def split_calls(text: str, read: ReadCall = read_call) -> tuple[list[Call], str]:
    """Return the complete calls of an array that is cut off, and the remaining text. If the text is not an array of
    calls, return no calls and the whole text.
    """
    calls = list[Call]()
    mark, position = "[", 0
    while text.startswith(mark, position):
        position = _after_space(text, position + 1)
        try:
            _, end = _DECODER.raw_decode(text, position)
            value = parse_json(text[position:end])
        except (ValueError, RecursionError):
            break
        call = read(value)
        if call is None:
            return [], text
        calls.append(call)
        mark, position = ",", _after_space(text, end)
    return (calls, text[position:]) if calls else ([], text)


def _after_space(text: str, position: int) -> int:
    found = _SPACE.match(text, position)
    return found.end() if found else position
