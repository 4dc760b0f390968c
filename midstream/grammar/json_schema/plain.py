"""Schemas of the most common keywords, which the library compiles as our own rules do, in less time.

Only those are listed here of which the library's grammar has the same texts as ours, except that it spells the control
character DEL as an escape, and accepts -0 where a range of integers contains 0 and negative numbers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from midstream.grammar.json_schema.errors import SchemaError
from midstream.grammar.json_schema.formats import FORMATS
from midstream.grammar.json_schema.keywords import KEYWORDS, UNUSUAL
from midstream.grammar.json_schema.patterns import string_pattern
from midstream.grammar.json_schema.style import Style

_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), check_circular=False).encode
_MAX_SAFE, _MAX_SIZE = 2**53, 2**31
# The library takes longer for more values than for our rules.
_MAX_VALUES = 20
# Texts that are spelled without escapes.
_SIMPLE = re.compile(r'[^"\\\x00-\x1f\x7f\ud800-\udfff]*')
_OF_ROOT = frozenset(("$schema", "$defs", "definitions", "x-guidance", "$id", "id"))
# A part of an expression that matches an escape of JSON, so that the library, which adds these, must not see it.
_ESCAPED = re.compile(r'["]|\\\\')
_REFERENCE = re.compile(r"#/(\$defs|definitions)/([A-Za-z0-9_]+)")


def plain_schema(root: object, style: Style) -> str | None:
    """Return a schema, as JSON, that the library compiles to the same texts as our own rules; None if it has keywords
    of which that is not known.
    """
    if style.space or style.notation != "json" or not isinstance(root, Mapping):
        return None
    found = _Walk(root, style).copied()
    return None if found is None else _encode(found)


class _Walk:
    """Copies a schema."""

    def __init__(self, root: Mapping[str, Any], style: Style) -> None:
        self._root = root
        self._style = style
        self._found: dict[str, Any] = {}  # the schemas that are referred to, by the name that they get

    def copied(self) -> dict[str, Any] | None:
        own = {name: value for name, value in self._root.items() if name not in _OF_ROOT}
        found = self._schema(own)
        if found is None:
            return None
        settings = {
            "whitespace_flexible": False,
            "item_separator": self._style.item_separator,
            "key_separator": self._style.key_separator,
        }
        return {**found, **({"$defs": self._found} if self._found else {}), "x-guidance": settings}

    def _schema(self, schema: object) -> dict[str, Any] | None:
        if not isinstance(schema, dict):
            return None
        if "$ref" in schema:
            return self._reference(schema["$ref"]) if KEYWORDS & schema.keys() == {"$ref"} else None
        if "anyOf" in schema:
            return self._choice(schema["anyOf"]) if KEYWORDS & schema.keys() == {"anyOf"} else None
        kind = schema.get("type")
        if kind is None and ("enum" in schema or "const" in schema):
            kind = "string"
        if isinstance(kind, list):
            return self._nullable(schema, kind)
        if not isinstance(kind, str) or kind not in UNUSUAL or not UNUSUAL[kind].isdisjoint(schema):
            return None
        if kind == "string":
            return _string(schema)
        if kind == "object":
            return self._object(schema)
        if kind == "array":
            return self._array(schema)
        return _integer(schema) if kind == "integer" else {"type": kind}

    def _reference(self, target: object) -> dict[str, Any] | None:
        found = _REFERENCE.fullmatch(target) if isinstance(target, str) else None
        if found is None:
            return None
        group = self._root.get(found[1])
        name = f"{found[1].strip('$')}_{found[2]}"
        if name not in self._found:
            self._found[name] = None  # so that what refers to itself is told
            self._found[name] = self._schema(group.get(found[2]) if isinstance(group, dict) else None)
        return {"$ref": f"#/$defs/{name}"} if self._found[name] is not None else None

    def _choice(self, options: object) -> dict[str, Any] | None:
        found = [self._schema(option) for option in options] if isinstance(options, list) else []
        return {"anyOf": found} if found and None not in found else None

    def _nullable(self, schema: dict[str, Any], kinds: list[object]) -> dict[str, Any] | None:
        if len(kinds) != 2 or "null" not in kinds or kinds[0] == kinds[1] or "enum" in schema or "const" in schema:
            return None
        return self._choice([{**schema, "type": next(kind for kind in kinds if kind != "null")}, {"type": "null"}])

    def _array(self, schema: dict[str, Any]) -> dict[str, Any] | None:
        sizes = _sizes(schema, "minItems", "maxItems")
        if schema.get("uniqueItems", False) is not False:
            return None
        items = self._schema(schema.get("items"))
        return None if sizes is None or items is None else {"type": "array", "items": items, **sizes}

    def _object(self, schema: dict[str, Any]) -> dict[str, Any] | None:
        properties, required = schema.get("properties"), schema.get("required", [])
        others = schema.get("additionalProperties", self._style.opens_objects)
        if others is not False or not isinstance(properties, dict) or not isinstance(required, list):
            return None
        if not properties or not all(isinstance(name, str) and name in properties for name in required):
            return None
        if not _SIMPLE.fullmatch("".join(properties)):
            return None
        found = {}
        for name, part in properties.items():
            found[name] = self._schema(part)
            if found[name] is None:
                return None
        return {"type": "object", "properties": found, "required": required, "additionalProperties": False}


def _string(schema: dict[str, Any]) -> dict[str, Any] | None:
    if "enum" in schema or "const" in schema:
        values = [schema["const"]] if "const" in schema else schema["enum"]
        if not isinstance(values, list) or not 0 < len(values) <= _MAX_VALUES:
            return None
        if len(KEYWORDS & schema.keys()) > 1 + ("type" in schema):
            return None
        is_simple = all(type(value) is str for value in values) and _SIMPLE.fullmatch("".join(values))
        return {"enum": values} if is_simple else None
    if len(schema) == 1:
        return schema
    name, sizes = schema.get("format", ""), _sizes(schema, "minLength", "maxLength")
    if sizes is None or not isinstance(name, str):
        return None
    found = FORMATS.get(name)
    if "pattern" not in schema and found is None:
        return {"type": "string", **sizes}
    if sizes or (found is not None and "pattern" in schema):
        return None
    if found is None:
        found = _unescaped_pattern(schema["pattern"])
        if found is None:
            return None
    return {"type": "string", "pattern": f"^({found})$"}


def _unescaped_pattern(pattern: object) -> str | None:
    """Return the expression of the strings in which a pattern is found, if none of them needs escapes."""
    try:
        found = string_pattern(pattern) if isinstance(pattern, str) else None
    except SchemaError:
        return None
    return None if found is None or _ESCAPED.search(found) else found


def _integer(schema: dict[str, Any]) -> dict[str, Any] | None:
    if not isinstance(schema.get("format", ""), str):
        return None
    bounds: dict[str, Any] = {name: schema[name] for name in ("minimum", "maximum") if name in schema}
    if not all(type(value) is int and abs(value) <= _MAX_SAFE for value in bounds.values()):
        return None
    if len(bounds) == 2 and bounds["minimum"] > bounds["maximum"]:
        return None
    return {"type": "integer", **bounds}


def _sizes(schema: dict[str, Any], least: str, most: str) -> dict[str, int] | None:
    """Return the limits of a size; None if they are unusual."""
    found = {name: schema[name] for name in (least, most) if name in schema}
    if not found:
        return found
    if not all(type(value) is int and 0 <= value < _MAX_SIZE for value in found.values()):
        return None
    return found if len(found) < 2 or found[least] <= found[most] else None
