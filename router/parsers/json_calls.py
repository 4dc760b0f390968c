"""Calls written as JSON objects, `{"name": ..., "arguments": {...}}`; used by several formats."""

from __future__ import annotations

import json

from router.parsers.machine import Call, parse_json


def read_call(value: object) -> Call | None:
    """Return the call in a JSON value. Llama's key for the arguments is `parameters`, other formats' `arguments`."""
    if not isinstance(value, dict):
        return None
    name = value.get("name")
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


def read_calls(text: str) -> list[Call] | None:
    """Return the calls in `text`, a JSON object or an array of objects."""
    try:
        value = parse_json(text)
    except ValueError:
        return None
    calls = [read_call(item) for item in (value if isinstance(value, list) else [value])]
    found = [call for call in calls if call is not None]
    return found if len(found) == len(calls) else None
