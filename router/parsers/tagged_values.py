"""Converts arguments that are written as text between tags, without JSON quotes, to the types in the tool's schema."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping

from router.parsers.machine import Schema, parse_json

_KINDS_OF: dict[type, set[str]] = {
    str: {"string"},
    bool: {"boolean"},
    int: {"integer", "number"},
    float: {"number"},
    type(None): {"null"},
    list: {"array"},
    dict: {"object"},
}
_WORDS: dict[str, object] = {"true": True, "false": False, "null": None, "none": None}


def arguments_of(values: Iterable[tuple[str, str]], schema: Schema, texts: Collection[str] = ()) -> str:
    """Return a call's arguments as a JSON object; the arguments named in `texts` stay strings, regardless of the
    schema.
    """
    properties = schema.get("properties")
    known = properties if isinstance(properties, Mapping) else {}
    arguments = {name: text if name in texts else _value(text, known.get(name)) for name, text in values}
    return json.dumps(arguments, ensure_ascii=False)


def _value(text: str, schema: object) -> object:
    kinds = _kinds(schema)
    if kinds == {"string"}:
        return text
    stripped = text.strip()
    # Some templates print values as Python does: True and None.
    if stripped.lower() in _WORDS and kinds & {"boolean", "null"}:
        return _WORDS[stripped.lower()]
    try:
        value = parse_json(stripped)
    except ValueError:
        return text
    return text if "string" in kinds and not kinds & _KINDS_OF[type(value)] else value


def _kinds(schema: object) -> set[str]:
    """Return the JSON types that a schema allows; empty if it does not restrict them."""
    if not isinstance(schema, Mapping):
        return set()
    kind = schema.get("type")
    names = kind if isinstance(kind, list) else [kind]
    kinds = {name for name in names if isinstance(name, str)}
    if not kinds and isinstance(schema.get("enum"), list):
        kinds = {"string"} if all(isinstance(item, str) for item in schema["enum"]) else set()
    for name in ("anyOf", "oneOf"):
        options = schema.get(name)
        for option in options if isinstance(options, list) else ():
            kinds |= _kinds(option)
    return kinds
