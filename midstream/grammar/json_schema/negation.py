"""The negation of a schema, as a schema."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from midstream.grammar.json_schema.document import Document
from midstream.grammar.json_schema.errors import SchemaError, UnenforceableError

# Our own keyword: values that are excluded.
EXCLUDED = "\0excluded"
# Our own keyword: patterns that a string must not match.
EXCLUDED_PATTERNS = "\0excluded patterns"
# Our own keyword: a number that is no integer.
FRACTIONAL = "\0fractional"
# Our own keyword, in schemas that only restrict properties: they do not list an object's properties.
RESTRICTING = "\0restricting"
_MAX_REFERENCES = 8
# Keywords of which the violation may be left out of a partial negation, since it concerns members.
_OF_MEMBERS = frozenset(
    (
        "items", "prefixItems", "additionalItems", "contains", "minContains", "maxContains", "uniqueItems",
        "patternProperties", "additionalProperties", "propertyNames", "dependentRequired", "dependentSchemas",
        "dependencies", "unevaluatedItems", "unevaluatedProperties",
    )
)  # fmt: skip
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


class Negation:
    """Negates schemas of a document."""

    def __init__(
        self, document: Document, keyword: str, *, is_partial: bool = False, names: Collection[str] = ()
    ) -> None:
        """Prepare to negate.

        Args:
            keyword: The keyword that negates, for errors.
            is_partial: Whether violations by members that cannot be expressed are left out, so that the negation
                matches fewer values than it should, but no others.
            names: The properties that an object may have that does not match a schema without other properties.
        """
        self._document = document
        self._keyword = keyword
        self._is_partial = is_partial
        self._names = names
        self._num_references = 0

    def of(self, schema: object) -> object:
        """Return a schema that matches the values that `schema` does not.

        Raises:
            SchemaError: It cannot be expressed; the message names the keyword that negates it.
        """
        if isinstance(schema, bool):
            return not schema
        if not isinstance(schema, Mapping):
            raise SchemaError(f"{self._keyword} must be a schema")
        if "$ref" in schema and self._document.refs_replace_siblings:
            schema = {"$ref": schema["$ref"]}
        options: list[object] = []
        for name, value in schema.items():
            if name in _ANNOTATIONS:
                continue
            try:
                options += self._violations(schema, name, value)
            except UnenforceableError:
                if not self._is_partial or name not in _OF_MEMBERS:
                    raise
        return options[0] if len(options) == 1 else {"anyOf": options} if options else False

    def _violations(self, schema: Mapping[str, Any], name: str, value: Any) -> list[object]:  # noqa: C901 (a table)
        """Return the schemas of the values that violate one keyword of a schema."""
        if name == "type":
            kept = value if isinstance(value, list) else [value]
            others = [kind for kind in _TYPES if kind not in kept and not (kind == "number" and "integer" in kept)]
            found: list[object] = [{"type": others}] if others else []
            if "integer" in kept and "number" not in kept:
                found.append({"type": "number", FRACTIONAL: True})
            return found
        if name in ("const", "enum"):
            return [{EXCLUDED: [value] if name == "const" else value}]
        if name == "pattern" and isinstance(value, str):
            return [{"type": "string", EXCLUDED_PATTERNS: [value]}]
        if name == "required":
            return [{"type": "object", "properties": {item: False}, RESTRICTING: True} for item in value]
        if name == "properties":
            return [
                {"type": "object", "required": [item], "properties": {item: self.of(part)}, RESTRICTING: True}
                for item, part in value.items()
                if part is not True and part != {}
            ]
        if name == "additionalProperties" and value is False and self._names and "patternProperties" not in schema:
            known = schema.get("properties", {})
            return [{"type": "object", "required": [item]} for item in self._names if item not in known]
        if name == "$ref":
            self._num_references += 1
            if self._num_references > _MAX_REFERENCES:
                raise UnenforceableError(f"{self._keyword} with so many references cannot be enforced")
            return [self.of(self._document.resolve(schema, "$ref"))]
        if name == "anyOf":
            return [{"allOf": [self.of(part) for part in value]}]
        if name == "allOf":
            return [self.of(part) for part in value]
        if name == "not":
            return [value]
        if name in _BOUNDS:
            kind, opposite = _BOUNDS[name]
            return [{"type": kind, opposite: value}]
        if name in _SIZES:
            kind, opposite, step = _SIZES[name]
            limit = value + step
            return [{"type": kind, opposite: limit}] if limit >= 0 else []
        raise UnenforceableError(f"{self._keyword} with {name} cannot be enforced")
