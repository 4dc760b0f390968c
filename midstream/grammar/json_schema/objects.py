"""The rules of objects: the listed properties in their order, then others."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from midstream.grammar.json_schema.choices import alternatives
from midstream.grammar.json_schema.conjunction import Conjunction, conjunction, least, list_of, map_of, size_of
from midstream.grammar.json_schema.demands import demands
from midstream.grammar.json_schema.document import Schema
from midstream.grammar.json_schema.errors import SchemaError, UnenforceableError
from midstream.grammar.json_schema.grammar import Many, Name, Sequence, Terminal, Value
from midstream.grammar.json_schema.maker import Maker
from midstream.grammar.json_schema.negation import RESTRICTING
from midstream.grammar.json_schema.strings import string_conditions
from midstream.grammar.json_schema.style import Style

_MAX_PATTERNS = 5
_MAX_STATES = 20_000


@dataclass(frozen=True, slots=True)
class _Property:
    """A property that is named by the schema."""

    key: Sequence
    value: Value
    is_required: bool


@dataclass(frozen=True, slots=True)
class _Others:
    """Properties that are not named, by the conditions that their names meet."""

    key: Terminal
    value: Value


def object_rules(maker: Maker, whole: Conjunction, style: Style) -> list[Sequence]:
    """Return the sequences of the objects that match a conjunction without choices."""
    members = _Members(maker, whole, style)
    required = list(dict.fromkeys(name for schema in whole.schemas for name in _names(schema, "required")))
    low, high = 0, None
    for schema in whole.schemas:
        low = max(low, size_of(schema, "minProperties") or 0)
        high = least(high, size_of(schema, "maxProperties"))
    needed = frozenset(required)
    names = list(dict.fromkeys([*members.listed, *required, *(members.names() or ())]))
    properties = [_Property(style.key(name), members.value(name), name in needed) for name in names]
    others = members.others(names) if members.names() is None else []
    chain = _Chain(maker, properties, others, low, high)
    return [style.around(chain.start())]


def _names(schema: Mapping[str, Any], keyword: str) -> list[str]:
    if isinstance(schema.get(keyword), bool):  # draft 3
        return []
    names = list_of(schema, keyword)
    if not all(isinstance(name, str) for name in names):
        raise SchemaError(f"{keyword} must be a list of names")
    return names


class _Members:
    """The schemas of an object's properties.

    Attributes:
        listed: The names in `properties`.
    """

    def __init__(self, maker: Maker, whole: Conjunction, style: Style) -> None:
        self._maker = maker
        self._style = style
        self._whole = whole
        self.listed = list(dict.fromkeys(name for schema in whole.schemas for name in map_of(schema, "properties")))
        self._patterns = {
            pattern: re.compile(_python(pattern))
            for schema in whole.schemas
            for pattern in map_of(schema, "patternProperties")
        }
        for schema in whole.schemas:
            for keyword in ("properties", "patternProperties"):
                for part in map_of(schema, keyword).values():
                    maker.document.enter(schema, part)
            for keyword in ("additionalProperties", "unevaluatedProperties", "propertyNames"):
                maker.document.enter(schema, schema.get(keyword))
        says = any({"additionalProperties", "unevaluatedProperties"} & schema.keys() for schema in whole.schemas)
        # A schema that only forbids a property, or is part of a condition, does not describe the object.
        is_described = any(
            RESTRICTING not in schema
            and (
                any(part is not False for part in map_of(schema, "properties").values())
                or map_of(schema, "patternProperties")
            )
            for schema in whole.schemas
        )
        # What lists its properties and says nothing about others has no others; see docs/requests.md.
        self._is_closed = is_described and not says and not maker.style.opens_objects
        self._limits = self._name_limits()

    def value(self, name: str) -> Value:
        """Return the rule of the values of a property."""
        if not self._is_name(name):
            return self._maker.value([False])
        found = {pattern for pattern, expression in self._patterns.items() if expression.search(name)}
        return self._maker.value(self._schemas(name, found))

    def names(self) -> list[str] | None:
        """Return the only names that are possible; None if there are others."""
        return self._limits.values if self._limits is not None and self._limits.values is not None else None

    def others(self, names: list[str]) -> list[_Others]:
        """Return the properties other than `names`, by the patterns that their names match."""
        if len(self._patterns) > _MAX_PATTERNS:
            raise UnenforceableError(f"patternProperties with more than {_MAX_PATTERNS} patterns cannot be enforced")
        found = []
        for chosen in product((True, False), repeat=len(self._patterns)):
            matching = [pattern for pattern, is_chosen in zip(self._patterns, chosen, strict=True) if is_chosen]
            schemas = self._schemas(None, set(matching))
            if not matching and self._is_closed:
                continue
            if any(schema is False for schema in schemas):
                continue
            limits = self._limits
            conditions = string_conditions(
                min_length=limits.min_length if limits else 0,
                max_length=limits.max_length if limits else None,
                patterns=[*matching, *(limits.patterns if limits else ())],
                formats=limits.formats if limits else (),
                excluded=[*names, *(value for value in (limits.excluded if limits else ()) if isinstance(value, str))],
                excluded_patterns=[pattern for pattern in self._patterns if pattern not in matching],
            )
            is_restricted = limits is not None or bool(self._patterns)
            key = self._style.keys(conditions, names, are_restricted=is_restricted)
            found.append(_Others(key, self._maker.value(schemas)))
        return found

    def _schemas(self, name: str | None, matching: set[str]) -> list[object]:
        """Return the schemas of a property with a name, or of one that is not named; `matching` are the patterns that
        its name matches.
        """
        found: list[object] = []
        evaluated = False
        for schema in self._whole.schemas:
            own = self._own(schema, name, matching)
            if not own and "additionalProperties" in schema:
                own.append(schema["additionalProperties"])
            evaluated |= bool(own) and RESTRICTING not in schema
            found += own
        for schema, value in self._whole.having("unevaluatedProperties"):
            is_seen = evaluated if self._whole.covers(schema) else bool(self._own(schema, name, matching))
            if not is_seen and (self._whole.covers(schema) or "additionalProperties" not in schema):
                found.append(value)
        return found

    @staticmethod
    def _own(schema: Schema, name: str | None, matching: set[str]) -> list[object]:
        """Return the schemas that one schema has for a property, except for those that are not named."""
        listed, patterns = map_of(schema, "properties"), map_of(schema, "patternProperties")
        own = [listed[name]] if name is not None and name in listed else []
        return [*own, *(part for pattern, part in patterns.items() if pattern in matching)]

    def _name_limits(self) -> Any:
        """Return what `propertyNames` demands of names; None if that is nothing."""
        schemas = [value for _, value in self._whole.having("propertyNames")]
        whole = conjunction(self._maker.document, [*schemas, {"type": "string"}] if schemas else [])
        if not schemas:
            return None
        if whole is None:
            return demands(self._maker.document, Conjunction(({"enum": []},)))
        if alternatives(self._maker.document, whole) is not None:
            raise UnenforceableError("propertyNames with alternatives cannot be enforced")
        found = demands(self._maker.document, whole)
        is_free = not (found.min_length or found.max_length or found.patterns or found.formats or found.excluded)
        return None if is_free and found.values is None else found

    def _is_name(self, name: str) -> bool:
        values = (value for _, value in self._whole.having("propertyNames"))
        return all(self._maker.document.is_valid(name, value) for value in values)


def _python(pattern: str) -> str:
    """Return a pattern in Python's syntax, to test names that the schema itself has."""
    try:
        re.compile(pattern)
    except re.error as error:
        raise SchemaError(f"patternProperties: {pattern!r}: {error}") from None
    return pattern


class _Chain:
    """Makes the rules of the members between the braces, from each property on, by the number of members before it."""

    def __init__(
        self, maker: Maker, properties: list[_Property], others: list[_Others], low: int, high: int | None
    ) -> None:
        self._maker = maker
        self._properties = properties
        self._others = others
        self._low, self._high = low, high
        # Counts above this make no difference.
        self._top = max(low, 1) if high is None else max(high, 1)
        if len(properties) * self._top > _MAX_STATES:
            raise UnenforceableError("minProperties or maxProperties with so many properties cannot be enforced")
        if others and low > len(properties) + 1:
            # A name that is not listed may be written twice.
            raise UnenforceableError("minProperties cannot be enforced, unless it is at most one more than are listed")
        # By the property with which they begin, and the number of members before it.
        self._known: dict[tuple[int, int], Sequence] = {}

    def start(self) -> Sequence:
        """Return the terms of all members."""
        # From the last property on, so that no deep recursion is needed.
        counts = self._counts()
        for index in reversed(range(len(counts))):
            for count in counts[index]:
                if index == len(self._properties):
                    self._known[index, count] = (self._rest(count),)
                    continue
                options = self._options(index, count)
                # Most properties are required; then nothing else leads to what follows.
                is_alone = len(options) == 1 and len(counts[index]) == 1
                self._known[index, count] = options[0] if is_alone else (self._maker.add(options),)
        return self._known[0, 0]

    def _counts(self) -> list[list[int]]:
        """Return, for each property and the end, the numbers of members that may precede it."""
        found = [[0]]
        for property_ in self._properties:
            following = {min(count + 1, self._top) for count in found[-1] if self._may_have_more(count)}
            found.append(sorted(following if property_.is_required else following.union(found[-1])))
        return found

    def _may_have_more(self, count: int) -> bool:
        return self._high is None or count < self._high

    def _options(self, index: int, count: int) -> list[Sequence]:
        property_ = self._properties[index]
        options: list[Sequence] = []
        if self._may_have_more(count):
            member: Sequence = (*property_.key, property_.value)
            before: Sequence = (self._maker.style.between,) if count else ()
            options.append((*before, *member, *self._known[index + 1, min(count + 1, self._top)]))
        if not property_.is_required:
            options.append(self._known[index + 1, count])
        return options

    def _rest(self, count: int) -> Name:
        """Return the rule of the members that are not named, after `count` members."""
        most = None if self._high is None else self._high - count
        least_left = max(self._low - count, 0)
        # Two members that are not named may have the same name, so that they count as one.
        if least_left > 1 or (most is not None and least_left > most):
            return self._maker.add([])
        members: list[Sequence] = [(item.key, item.value) for item in self._others]
        following = self._maker.add([(self._maker.style.between, *member) for member in members])
        if count or most == 0:
            return self._maker.add([(Many((following,), least_left, most),)] if most != 0 else [()])
        more = Many((following,), max(least_left - 1, 0), None if most is None else most - 1)
        first: list[Sequence] = [(*member, more) for member in members]
        return self._maker.add([*first, *([()] if not least_left else [])])
