"""The negation of a schema, as a schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from midstream.grammar.json_schema.errors import SchemaError, UnenforceableError

# Our own keyword: values that are excluded.
EXCLUDED = "\0excluded"
# Our own keyword, in schemas that only restrict properties: they do not list an object's properties.
RESTRICTING = "\0restricting"
_TYPES = ("null", "boolean", "number", "string", "array", "object")
_ANNOTATIONS = frozenset(
    ("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment")
)
_BOUNDS = {
    "minimum": ("number", "exclusiveMaximum"),
    "maximum": ("number", "exclusiveMinimum"),
    "exclusiveMinimum": ("number", "maximum"),
    "exclusiveMaximum": ("number", "minimum"),
}
_SIZES = {
    "minLength": ("string", "maxLength", -1),
    "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1),
    "maxItems": ("array", "minItems", 1),
    "minProperties": ("object", "maxProperties", -1),
    "maxProperties": ("object", "minProperties", 1),
}


def negation(schema: object, keyword: str) -> object:
    """Return a schema that matches exactly the values that `schema` does not.

    Raises:
        SchemaError: It cannot be expressed; the message names the keyword that negates it.
    """
    if isinstance(schema, bool):
        return not schema
    if not isinstance(schema, Mapping):
        raise SchemaError(f"{keyword} must be a schema")
    options = [
        option for name, value in schema.items() if name not in _ANNOTATIONS
        for option in _violations(schema, name, value, keyword)
    ]  # fmt: skip
    return options[0] if len(options) == 1 else {"anyOf": options} if options else False


def _violations(schema: Mapping[str, Any], name: str, value: Any, keyword: str) -> list[object]:  # noqa: C901 (a table)
    """Return the schemas of the values that violate one keyword of a schema."""
    if name == "type":
        kept = value if isinstance(value, list) else [value]
        if "integer" in kept and "number" not in kept:
            raise UnenforceableError(f"{keyword} with the type integer cannot be enforced")
        others = [kind for kind in _TYPES if kind not in kept]
        return [{"type": others}] if others else []
    if name in ("const", "enum"):
        return [{EXCLUDED: [value] if name == "const" else value}]
    if name == "required":
        return [{"type": "object", "properties": {item: False}, RESTRICTING: True} for item in value]
    if name == "properties":
        return [
            {"type": "object", "required": [item], "properties": {item: negation(part, keyword)}, RESTRICTING: True}
            for item, part in value.items()
            if part is not True and part != {}
        ]
    if name == "anyOf":
        return [{"allOf": [negation(part, keyword) for part in value]}]
    if name == "allOf":
        return [negation(part, keyword) for part in value]
    if name == "not":
        return [value]
    if name in _BOUNDS:
        kind, opposite = _BOUNDS[name]
        return [{"type": kind, opposite: value}]
    if name in _SIZES:
        kind, opposite, step = _SIZES[name]
        limit = value + step
        return [{"type": kind, opposite: limit}] if limit >= 0 else []
    raise UnenforceableError(f"{keyword} with {name} cannot be enforced")
