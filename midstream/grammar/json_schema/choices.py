"""Choices between schemas: `anyOf`, `oneOf`, `if`, `not` and dependencies.

A conjunction with choices is split into one conjunction for each combination of options, one choice after the other.
`oneOf` is such a choice only if no value can match two of its options: their types, listed values, numbers or
properties must differ.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations, product

from midstream.grammar.json_schema.conjunction import Conjunction, conjunction, equal, least, list_of, map_of, size_of
from midstream.grammar.json_schema.demands import Demands, demands
from midstream.grammar.json_schema.document import Document, Schema
from midstream.grammar.json_schema.errors import UnenforceableError
from midstream.grammar.json_schema.negation import EXCLUDED, EXCLUDED_PATTERNS, FRACTIONAL, RESTRICTING, Negation

# In this order.
_CHOICES = ("anyOf", "oneOf", "if", "dependentRequired", "dependentSchemas", "dependencies", "not")
_MAX_ALTERNATIVES, _MAX_LEAVES, _MAX_DEPTH = 1000, 64, 3
# Keywords beside `oneOf` that help to tell its options apart.
_BESIDE = frozenset(
    ("type", "enum", "const", "properties", "required", "additionalProperties", "patternProperties", "minimum",
     "maximum", "exclusiveMinimum", "exclusiveMaximum", "minLength", "maxLength", "minItems", "maxItems",
     "minProperties", "maxProperties")
)  # fmt: skip
_LIMITS = {
    "string": ("minLength", "maxLength"),
    "array": ("minItems", "maxItems"),
    "object": ("minProperties", "maxProperties"),
}
# Keywords that restrict values of any type, and those of one type.
_GENERAL = frozenset(("enum", "const", EXCLUDED))
_NUMERIC = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", FRACTIONAL))
_RESTRICTING = {
    "integer": _NUMERIC,
    "number": _NUMERIC,
    "string": frozenset(("minLength", "maxLength", "pattern", "format", EXCLUDED_PATTERNS)),
    "array": frozenset(
        ("items", "prefixItems", "additionalItems", "unevaluatedItems", "minItems", "maxItems", "uniqueItems",
         "contains")
    ),
    "object": frozenset(
        ("properties", "patternProperties", "additionalProperties", "unevaluatedProperties", "required",
         "minProperties", "maxProperties", "propertyNames")
    ),
}  # fmt: skip
# What to add to each of two alternatives.
_Distinction = tuple[list[object], list[object]]


def alternatives(document: Document, whole: Conjunction, *, is_wide: bool = False) -> list[Conjunction] | None:
    """Split a conjunction at its first choice; return None if there is none left. With `is_wide`, the alternatives of
    `oneOf` are its options as they are, so that no value that matches is left out.
    """
    for keyword in _CHOICES:
        for schema, _ in whole.having(keyword):
            for name in _choices(schema, keyword):
                mark = (id(schema), name)
                if mark in whole.settled:
                    continue
                # Options are made once, since schemas are known by their identity.
                key = (*mark, is_wide)
                options = document.once(key, partial(_options, document, schema, keyword, name, is_wide=is_wide))
                if len(options) > _MAX_ALTERNATIVES:
                    raise UnenforceableError(f"{keyword} has too many alternatives")
                settled = whole.settled | {mark}
                found = []
                for option in options:
                    # What is negated evaluates no members.
                    is_else = keyword == "if" and option is options[1]
                    parts = () if keyword == "not" else option[1:] if is_else else option
                    own = {id(part): id(schema) for part in parts}
                    found.append(conjunction(document, [*whole.schemas, *option], settled, {**own, **whole.parents}))
                return [option for option in found if option is not None]
    return None


def _choices(schema: Schema, keyword: str) -> list[str]:
    """Return the name of each choice that a keyword makes."""
    if keyword in ("anyOf", "oneOf", "not"):
        return [keyword]
    if keyword == "if":
        return [keyword] if schema.get("then", True) is not True or schema.get("else", True) is not True else []
    return [f"{keyword} {name}" for name in map_of(schema, keyword)]


def _options(document: Document, schema: Schema, keyword: str, name: str, *, is_wide: bool) -> list[tuple[object, ...]]:
    """Return the options of a choice, each of which consists of schemas that apply together."""
    if keyword == "anyOf" or (keyword == "oneOf" and is_wide):
        options: list[tuple[object, ...]] = [(option,) for option in list_of(schema, keyword)]
    elif keyword == "oneOf":
        options = _exclusive_options(document, schema)
    elif keyword == "not":
        options = [(Negation(document, "not").of(schema[keyword]),)]
    elif keyword == "if":
        other = Negation(document, "if").of(schema["if"])
        options = [(schema["if"], schema.get("then", True)), (other, schema.get("else", True))]
    else:
        trigger = name.partition(" ")[2]
        needed = map_of(schema, keyword)[trigger]
        then = {"required": needed} if isinstance(needed, list) else needed
        options = [({"properties": {trigger: False}, RESTRICTING: True},), ({"required": [trigger]}, then)]
    for option in options:
        for part in option:
            document.enter(schema, part)
    return options


@dataclass(frozen=True, slots=True)
class _Leaf:
    """One alternative of an option, without further choices."""

    whole: Conjunction
    demands: Demands


def _exclusive_options(document: Document, schema: Schema) -> list[tuple[object, ...]]:
    """Return the options of `oneOf`, completed so that no value matches two of them.

    Raises:
        UnenforceableError: A value may match two options.
    """
    options: list[object] = list_of(schema, "oneOf")
    for option in options:
        document.enter(schema, option)
    if not document.coerces_one_of:
        try:
            return _Exclusion(document, schema, options).completed()
        except UnenforceableError:
            if not document.is_lenient:
                raise
    return [(option,) for option in options]


class _Exclusion:
    """Completes the options of `oneOf`, so that no value that is written matches two of them.

    Two options need nothing more if their types, listed values, ranges, sizes or properties differ. Otherwise, both
    exclude types of which they match all values; or each excludes a property that the other requires; or both require a
    property of which the possible values differ. If none of this is enough, each excludes what matches the other.
    """

    def __init__(self, document: Document, schema: Schema, options: list[object]) -> None:
        self._document = document
        self._options = options
        # What all options have in common.
        beside = {name: value for name, value in schema.items() if name in _BESIDE}
        document.enter(schema, beside)
        self._leaves = [_leaves(document, [beside, option]) for option in options]
        self._added: list[list[object]] = [[] for _ in options]

    def completed(self) -> list[tuple[object, ...]]:
        for pair in combinations(range(len(self._options)), 2):
            if not self._tell_apart(*pair):
                self._negate(*pair)
        found = []
        for option, added in zip(self._options, self._added, strict=True):
            distinct = list({json.dumps(part, default=str, sort_keys=True): part for part in added}.values())
            found.append((option, *distinct))
        return found

    def _tell_apart(self, one: int, other: int) -> bool:
        """Complete two options by what distinguishes all their alternatives; return False if that is not known."""
        needed: list[object] = []
        other_needed: list[object] = []
        for first in self._leaves[one]:
            for second in self._leaves[other]:
                distinction = _distinction(self._document, first, second)
                if distinction is None:
                    return False
                needed += distinction[0]
                other_needed += distinction[1]
        self._added[one] += needed
        self._added[other] += other_needed
        return True

    def _negate(self, one: int, other: int) -> None:
        """Exclude from each of two options what matches the other."""
        for place, excluded in ((one, other), (other, one)):
            names = {
                name for leaf in self._leaves[place] for schema in leaf.whole.schemas
                for name in schema.get("properties", {})
            }  # fmt: skip
            negation = Negation(self._document, "oneOf", is_partial=True, names=sorted(names))
            try:
                self._added[place].append(negation.of(self._options[excluded]))
            except UnenforceableError as error:
                reason = f"options {one + 1} and {other + 1} may match the same value ({error})"
                hint = "use anyOf, or give each option a property with another constant"
                raise UnenforceableError(f"oneOf: {reason}; {hint}") from None


def _leaves(document: Document, schemas: Sequence[object]) -> list[_Leaf]:
    start = conjunction(document, schemas)
    waiting, found = [] if start is None else [start], list[_Leaf]()
    while waiting:
        whole = waiting.pop()
        options = alternatives(document, whole, is_wide=True)
        if options is None:
            found.append(_Leaf(whole, demands(document, whole)))
        else:
            waiting += options
        if len(found) + len(waiting) > _MAX_LEAVES:
            raise UnenforceableError("oneOf has too many alternatives")
    return found


def _distinction(document: Document, one: _Leaf, other: _Leaf, depth: int = 0) -> _Distinction | None:
    """Return the schemas to add to two alternatives so that no value matches both; None if a value may."""
    common = _common_types(one.demands.types, other.demands.types)
    if not common or _have_other_values(document, one, other):
        return [], []
    added: _Distinction = ([], [])
    shared = set[str]()
    for kind in common:
        if kind == "object":
            distinction = _objects_apart(document, one, other, depth)
            if distinction is not None:
                added = distinction
                continue
        elif _are_apart(kind, one, other):
            continue
        if not (_accepts_all(kind, one) and _accepts_all(kind, other)):
            return None
        shared.add(kind)
    if not shared:
        return added
    left = Negation(document, "oneOf").of({"type": sorted(shared)})
    return [*added[0], left], [*added[1], left]


def _are_apart(kind: str, one: _Leaf, other: _Leaf) -> bool:
    """Return whether no value of a type other than object matches both alternatives."""
    if kind in ("integer", "number"):
        numbers, others = one.demands.numbers, other.demands.numbers
        if others.low is not None:
            numbers = numbers.raised(others.low, is_open=others.is_low_open)
        if others.high is not None:
            numbers = numbers.lowered(others.high, is_open=others.is_high_open)
        return numbers.is_empty
    if kind not in _LIMITS:
        return False
    (low, high), (other_low, other_high) = _limits(kind, one), _limits(kind, other)
    return (high is not None and other_low > high) or (other_high is not None and low > other_high)


def _limits(kind: str, leaf: _Leaf) -> tuple[int, int | None]:
    """Return the least and the greatest size of the values of a type."""
    least_name, most_name = _LIMITS[kind]
    low, high = 0, None
    for schema in leaf.whole.schemas:
        low = max(low, size_of(schema, least_name) or 0)
        high = least(high, size_of(schema, most_name))
    return low, high


def _accepts_all(kind: str, leaf: _Leaf) -> bool:
    """Return whether all values of a type match an alternative, which may be one of a `oneOf` within an option."""
    if any(name == "oneOf" for _, name in leaf.whole.settled):
        return False
    restricting = _GENERAL | _RESTRICTING.get(kind, frozenset())
    return all(restricting.isdisjoint(schema) for schema in leaf.whole.schemas)


def _objects_apart(document: Document, one: _Leaf, other: _Leaf, depth: int) -> _Distinction | None:
    """Return the schemas to add to two alternatives so that no object matches both."""
    if _are_apart("object", one, other):
        return [], []
    missing, other_missing = _missing(one, other), _missing(other, one)
    if (missing and _is_closed(one)) or (other_missing and _is_closed(other)):
        return [], []
    if missing and other_missing and not document.opens_objects:
        # Objects that do not say otherwise are written without other properties.
        return [_without(missing)], [_without(other_missing)]
    parts, other_parts = _properties(one), _properties(other)
    for name in parts.keys() & other_parts.keys():
        if _have_no_common_value(document, parts[name], other_parts[name], depth):
            return [{"required": [name]}], [{"required": [name]}]
    return None


def _have_no_common_value(document: Document, schemas: list[object], others: list[object], depth: int) -> bool:
    """Return whether no value matches both all of `schemas` and all of `others`."""
    if depth >= _MAX_DEPTH:
        return False
    try:
        leaves, other_leaves = _leaves(document, schemas), _leaves(document, others)
        pairs = product(leaves, other_leaves)
        return all(_distinction(document, *pair, depth + 1) == ([], []) for pair in pairs)
    except UnenforceableError:
        return False


def _properties(leaf: _Leaf) -> dict[str, list[object]]:
    """Return the schemas of each property."""
    found: dict[str, list[object]] = {}
    for schema in leaf.whole.schemas:
        properties = schema.get("properties", {})
        for name, part in properties.items() if isinstance(properties, Mapping) else ():
            found.setdefault(name, []).append(part)
    return found


def _without(name: str) -> Schema:
    """Return the schema of objects without a property."""
    return {"properties": {name: False}, RESTRICTING: True}


def _have_other_values(document: Document, one: _Leaf, other: _Leaf) -> bool:
    """Return whether the values of one are listed, and none of them matches the other."""
    for first, second in ((one, other), (other, one)):
        values, others = first.demands.values, second.demands.values
        if values is None:
            continue
        if others is not None:
            return not any(equal(a, b) for a in values for b in others)
        if not any(all(document.is_valid(value, part) for part in second.whole.schemas) for value in values):
            return True
    return False


def _missing(one: _Leaf, other: _Leaf) -> str:
    """Return a property that `other` requires, and that objects of `one` do not list; empty if there is none, or if
    these objects may have other properties.
    """
    schemas = one.whole.schemas
    listed = {name for schema in schemas for name, part in schema.get("properties", {}).items() if part is not False}
    is_open = any(
        schema.get("additionalProperties", False) is not False or "patternProperties" in schema for schema in schemas
    )
    if is_open or not (listed or _is_closed(one)):
        return ""
    required = (name for schema in other.whole.schemas for name in schema.get("required", []))
    return next((name for name in required if name not in listed), "")


def _is_closed(leaf: _Leaf) -> bool:
    """Return whether its objects cannot have other properties than those that are listed."""
    return any(
        schema.get("additionalProperties") is False and "patternProperties" not in schema
        for schema in leaf.whole.schemas
    )


def _common_types(one: set[str], other: set[str]) -> set[str]:
    common = one & other
    numeric = {"integer", "number"}
    return common | {"integer"} if one & numeric and other & numeric else common
