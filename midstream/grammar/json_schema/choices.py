"""Choices between schemas: `anyOf`, `oneOf`, `if`, `not` and dependencies.

A conjunction with choices is split into one conjunction for each combination of options, one choice after the other.
`oneOf` is such a choice only if no value can match two of its options: their types, listed values, numbers or
properties must differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import Any

from midstream.grammar.json_schema.conjunction import Conjunction, conjunction, equal, list_of, map_of
from midstream.grammar.json_schema.demands import Demands, demands
from midstream.grammar.json_schema.document import Document, Schema
from midstream.grammar.json_schema.errors import UnenforceableError
from midstream.grammar.json_schema.negation import RESTRICTING, negation

# In this order.
_CHOICES = ("anyOf", "oneOf", "if", "dependentRequired", "dependentSchemas", "dependencies", "not")
_MAX_ALTERNATIVES, _MAX_LEAVES = 1000, 64


def alternatives(document: Document, whole: Conjunction) -> list[Conjunction] | None:
    """Split a conjunction at its first choice; return None if there is none left."""
    for keyword in _CHOICES:
        for schema, _ in whole.having(keyword):
            for name in _choices(schema, keyword):
                mark = (id(schema), name)
                if mark in whole.settled:
                    continue
                # Options are made once, since schemas are known by their identity.
                options = document.once(mark, partial(_options, document, schema, keyword, name))
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


def _options(document: Document, schema: Schema, keyword: str, name: str) -> list[tuple[object, ...]]:
    """Return the options of a choice, each of which consists of schemas that apply together."""
    if keyword == "anyOf":
        options: list[tuple[object, ...]] = [(option,) for option in list_of(schema, keyword)]
    elif keyword == "oneOf":
        options = _exclusive_options(document, schema)
    elif keyword == "not":
        options = [(negation(schema[keyword], "not"),)]
    elif keyword == "if":
        options = [(schema["if"], schema.get("then", True)), (negation(schema["if"], "if"), schema.get("else", True))]
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
            return _completed(document, options)
        except UnenforceableError:
            if not document.is_lenient:
                raise
    return [(option,) for option in options]


def _completed(document: Document, options: Sequence[object]) -> list[tuple[object, ...]]:
    leaves = [_leaves(document, option) for option in options]
    needed: list[set[str]] = [set() for _ in options]
    for one, other in combinations(range(len(options)), 2):
        for first in leaves[one]:
            for second in leaves[other]:
                tags = _distinction(document, first, second)
                if tags is None:
                    reason = f"options {one + 1} and {other + 1} may match the same value"
                    hint = "use anyOf, or give each option a property with another constant"
                    raise UnenforceableError(f"oneOf: {reason}; {hint}")
                needed[one] |= tags
                needed[other] |= tags
    return [
        (option, {"required": sorted(tags)}) if tags else (option,)
        for option, tags in zip(options, needed, strict=True)
    ]


def _leaves(document: Document, option: object) -> list[_Leaf]:
    start = conjunction(document, [option])
    waiting, found = [] if start is None else [start], list[_Leaf]()
    while waiting:
        whole = waiting.pop()
        options = alternatives(document, whole)
        if options is None:
            found.append(_Leaf(whole, demands(document, whole)))
        else:
            waiting += options
        if len(found) + len(waiting) > _MAX_LEAVES:
            raise UnenforceableError("oneOf has too many alternatives")
    return found


def _distinction(document: Document, one: _Leaf, other: _Leaf) -> set[str] | None:
    """Return the properties that must be there so that no value matches both; None if a value may match both."""
    common = _common_types(one.demands.types, other.demands.types)
    if not common or _have_other_values(document, one, other):
        return set()
    if common == {"integer"} or common == {"number", "integer"}:
        numbers, others = one.demands.numbers, other.demands.numbers
        if others.low is not None:
            numbers = numbers.raised(others.low, is_open=others.is_low_open)
        if others.high is not None:
            numbers = numbers.lowered(others.high, is_open=others.is_high_open)
        return set() if numbers.is_empty else None
    if common != {"object"}:
        return None
    if _lacks(document, one, other) and _lacks(document, other, one):
        return set()
    tags, other_tags = _tags(document, one), _tags(document, other)
    for name in tags.keys() & other_tags.keys():
        if not any(equal(a, b) for a in tags[name] for b in other_tags[name]):
            return {name}
    return None


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


def _lacks(document: Document, one: _Leaf, other: _Leaf) -> bool:
    """Return whether the objects that are written for `one` never have all properties that `other` requires."""
    if document.opens_objects and not any(schema.get("additionalProperties") is False for schema in one.whole.schemas):
        return False
    listed = {name for schema in one.whole.schemas for name in schema.get("properties", {})}
    is_open = any(
        schema.get("additionalProperties", False) is not False or "patternProperties" in schema
        for schema in one.whole.schemas
    )
    required = {name for schema in other.whole.schemas for name in schema.get("required", [])}
    return bool(listed) and not is_open and not required <= listed


def _tags(document: Document, leaf: _Leaf) -> dict[str, Sequence[Any]]:
    """Return the properties of which the possible values are listed."""
    found: dict[str, Sequence[Any]] = {}
    for schema in leaf.whole.schemas:
        properties = schema.get("properties", {})
        for name, part in properties.items() if isinstance(properties, Mapping) else ():
            document.enter(schema, part)
            if not isinstance(part, Mapping) or not {"const", "enum", "$ref", "allOf"} & part.keys():
                continue
            whole = conjunction(document, [part])
            if whole is not None and alternatives(document, whole) is None:
                values = demands(document, whole).values
                if values is not None:
                    found[name] = values
    return found


def _common_types(one: set[str], other: set[str]) -> set[str]:
    common = one & other
    numeric = {"integer", "number"}
    return common | {"integer"} if one & numeric and other & numeric else common
