"""The keywords that restrict values; all others are annotations."""

from midstream.grammar.json_schema.negation import EXCLUDED, EXCLUDED_PATTERNS, FRACTIONAL, RESTRICTING

# Keywords that restrict values of any type, or change what references mean.
_GENERAL = frozenset(
    ("enum", "const", "allOf", "anyOf", "oneOf", "not", "if", "then", "else", "$ref", "$dynamicRef", "$recursiveRef",
     "$id", "id", "dependentRequired", "dependentSchemas", "dependencies")
)  # fmt: skip
# With those of one type, except for the most common ones.
UNUSUAL = {
    "string": _GENERAL - {"enum", "const"},
    "integer": _GENERAL | {"multipleOf", "exclusiveMinimum", "exclusiveMaximum"},
    "boolean": _GENERAL,
    "null": _GENERAL,
    "array": _GENERAL
    | {"prefixItems", "additionalItems", "unevaluatedItems", "contains", "minContains", "maxContains"},
    "object": _GENERAL
    | {"patternProperties", "propertyNames", "unevaluatedProperties", "minProperties", "maxProperties"},
}
KEYWORDS = frozenset(
    (EXCLUDED, EXCLUDED_PATTERNS, FRACTIONAL, RESTRICTING, "type", "multipleOf", "minimum", "maximum",
     "exclusiveMinimum", "exclusiveMaximum", "minLength", "maxLength", "pattern", "format", "items", "minItems",
     "maxItems", "uniqueItems", "properties", "required", "additionalProperties")
).union(*UNUSUAL.values())  # fmt: skip
