"""What the schemas of a conjunction demand of a value, except of the members of arrays and objects."""

from __future__ import annotations

from dataclasses import dataclass, field
from decimal import Decimal
from functools import partial
from typing import Any

from midstream.grammar.json_schema.conjunction import Conjunction, equal, least, list_of, number_of, size_of
from midstream.grammar.json_schema.document import Document, Schema
from midstream.grammar.json_schema.errors import SchemaError
from midstream.grammar.json_schema.negation import EXCLUDED, EXCLUDED_PATTERNS, FRACTIONAL
from midstream.grammar.json_schema.numbers import Range

# Keywords of schemas whose listed values need no other test than that of their type.
_SIMPLE = frozenset(("type", "enum", "const", "title", "description", "default", "examples", "$comment"))
_KINDS = ((str, "string"), (bool, "boolean"), (type(None), "null"), (list, "array"), (dict, "object"))
TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")


@dataclass(slots=True)
class Demands:
    """The merged keywords of a conjunction without choices.

    Attributes:
        types: The types that the value may have.
        values: The values of `enum` or `const`; None if any value may match.
        numbers: The range of numbers.
        multiples: The values of `multipleOf`.
        excluded: Values that are excluded; `excluded_patterns`: the patterns of strings that are.
        is_fractional: Whether numbers are no integers.
    """

    types: set[str]
    values: list[Any] | None = None
    numbers: Range = field(default_factory=Range)
    multiples: list[Decimal] = field(default_factory=list)
    min_length: int = 0
    max_length: int | None = None
    patterns: list[str] = field(default_factory=list)
    formats: list[str] = field(default_factory=list)
    excluded: list[Any] = field(default_factory=list)
    excluded_patterns: list[str] = field(default_factory=list)
    is_fractional: bool = False


def demands(document: Document, whole: Conjunction) -> Demands:
    """Merge the keywords of a conjunction, except those about the members of arrays and objects."""
    found = Demands(set(TYPES) - {"integer"})
    for schema in whole.schemas:
        found.types = _common_types(found.types, _types_of(schema))
        if found.values is None and ("const" in schema or "enum" in schema):
            found.values = [schema["const"]] if "const" in schema else list_of(schema, "enum")
        if schema.keys() <= _SIMPLE:
            continue
        found.excluded += schema.get(EXCLUDED, [])
        found.excluded_patterns += schema.get(EXCLUDED_PATTERNS, [])
        found.is_fractional = found.is_fractional or FRACTIONAL in schema
        _add_bounds(found, schema)
        found.min_length = max(found.min_length, size_of(schema, "minLength") or 0)
        found.max_length = least(found.max_length, size_of(schema, "maxLength"))
        for keyword, values in (("pattern", found.patterns), ("format", found.formats)):
            if keyword in schema:
                if not isinstance(schema[keyword], str):
                    raise SchemaError(f"{keyword} must be a text")
                # The times of zod have patterns without an offset, which the format requires.
                if (keyword, schema[keyword]) != ("format", "time") or "pattern" not in schema:
                    values.append(schema[keyword])
    if found.values is not None:
        is_free = not (found.excluded or found.excluded_patterns or found.is_fractional)
        is_listed_once = sum(("enum" in schema) + ("const" in schema) for schema in whole.schemas) == 1
        is_simple = is_free and is_listed_once and all(schema.keys() <= _SIMPLE for schema in whole.schemas)
        if is_simple and set(map(type, found.values)) <= {str}:
            found.values = found.values if "string" in found.types else []
            return found
        is_allowed = partial(_has_type, found.types) if is_simple else partial(_is_allowed, document, whole, found)
        found.values = [value for value in found.values if is_allowed(value)]
    return found


def _has_type(types: set[str], value: object) -> bool:
    """Return whether a value has one of the types."""
    if type(value) is str:
        return "string" in types
    if isinstance(value, int | Decimal) and not isinstance(value, bool):
        return "number" in types or ("integer" in types and value == int(value))
    return next(name for kind, name in _KINDS if isinstance(value, kind)) in types


def _add_bounds(found: Demands, schema: Schema) -> None:
    """Add what a schema demands of numbers."""
    for keyword, is_open in (("minimum", False), ("exclusiveMinimum", True)):
        bound = _bound(schema, keyword, "minimum")
        if bound is not None:
            found.numbers = found.numbers.raised(bound, is_open=is_open or schema.get("exclusiveMinimum") is True)
    for keyword, is_open in (("maximum", False), ("exclusiveMaximum", True)):
        bound = _bound(schema, keyword, "maximum")
        if bound is not None:
            found.numbers = found.numbers.lowered(bound, is_open=is_open or schema.get("exclusiveMaximum") is True)
    multiple = number_of(schema, "multipleOf")
    if multiple is not None:
        if multiple <= 0:
            raise SchemaError("multipleOf must be positive")
        found.multiples.append(multiple)


def _types_of(schema: Schema) -> set[str]:
    if "type" not in schema:
        return set(TYPES)
    value = schema["type"]
    names = value if isinstance(value, list) else [value]
    for name in names:
        if name not in TYPES:
            raise SchemaError(f"Invalid type: {str(name)[:40]}; it must be one of {', '.join(TYPES)}")
    return set(names) | ({"integer"} if "number" in names else set())


def _common_types(known: set[str], others: set[str]) -> set[str]:
    """Return the intersection of two sets of types, of which the first has at most one of number and integer."""
    common = known & others
    if "number" in known and "number" not in others and "integer" in others:
        common.add("integer")
    return common


def _is_allowed(document: Document, whole: Conjunction, found: Demands, value: object) -> bool:
    """Return whether a listed value matches all schemas."""
    if any(equal(value, excluded) for excluded in found.excluded):
        return False
    if found.is_fractional and isinstance(value, int | Decimal) and value == int(value):
        return False
    patterns = ({"pattern": pattern} for pattern in found.excluded_patterns)
    if isinstance(value, str) and any(document.is_valid(value, schema) for schema in patterns):
        return False
    return all(document.is_valid(value, _without(schema, whole)) for schema in whole.schemas)


def _without(schema: Schema, whole: Conjunction) -> Schema:
    """Return a schema without the choices that were made, whose options are schemas of the conjunction themselves."""
    settled = {name.partition(" ")[0] for number, name in whole.settled if number == id(schema)}
    dropped = {"$ref", "$dynamicRef", "$recursiveRef", "allOf", EXCLUDED, EXCLUDED_PATTERNS, FRACTIONAL} | settled
    return {name: value for name, value in schema.items() if name not in dropped}


def _bound(schema: Schema, keyword: str, inclusive: str) -> Decimal | None:
    # In draft 4, an exclusive bound is a boolean beside the other keyword.
    return None if isinstance(schema.get(keyword), bool) and keyword != inclusive else number_of(schema, keyword)
