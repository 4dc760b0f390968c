"""Schemas that apply to the same value together."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from midstream.grammar.json_schema.document import Document, Schema
from midstream.grammar.json_schema.errors import SchemaError, UnenforceableError
from midstream.grammar.json_schema.numbers import is_too_long

# Characters, items or properties of which no output has as many; the library counts in 32 bits.
_UNREACHED = 1 << 31
_UNEVALUATED = ("unevaluatedItems", "unevaluatedProperties")
# Keywords that evaluate members.
_MEMBERS = frozenset(
    (
        "properties", "patternProperties", "additionalProperties", "unevaluatedProperties",
        "items", "prefixItems", "additionalItems", "unevaluatedItems",
    )
)  # fmt: skip
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_FOLLOWED = frozenset((*_REFERENCES, "allOf"))


@dataclass(frozen=True, slots=True, eq=False)
class Conjunction:
    """Schemas that apply to the same value, without references and without `allOf`.

    Attributes:
        schemas: The schemas.
        settled: The choices that were made: the schema's id and the keyword (with the name of a property, if it has
            several).
        parents: For each schema that is part of another one, by `id`, that other one.
    """

    schemas: tuple[Schema, ...]
    settled: frozenset[tuple[int, str]] = frozenset()
    parents: Mapping[int, int] = field(default_factory=dict)

    @property
    def key(self) -> object:
        """What identifies it."""
        says = any(keyword in schema for schema in self.schemas for keyword in _UNEVALUATED)
        parents = frozenset(self.parents.items()) if says else None
        return frozenset(map(id, self.schemas)), self.settled, parents

    def covers(self, schema: Schema) -> bool:
        """Return whether all schemas that say something about members are part of `schema`, which therefore sees what
        they evaluate.
        """
        return all(self._is_part(id(other), id(schema)) for other in self.schemas if not _MEMBERS.isdisjoint(other))

    def _is_part(self, number: int, whole: int) -> bool:
        while number != whole and number in self.parents:
            number = self.parents[number]
        return number == whole

    def having(self, keyword: str) -> Iterator[tuple[Schema, Any]]:
        """Yield each schema with a keyword, and its value."""
        return ((schema, schema[keyword]) for schema in self.schemas if keyword in schema)


def conjunction(  # noqa: C901 (one loop over what is to be added)
    document: Document,
    schemas: Sequence[object],
    settled: frozenset[tuple[int, str]] = frozenset(),
    parents: Mapping[int, int] | None = None,
) -> Conjunction | None:
    """Follow references and `allOf`. Return None if no value matches.

    Raises:
        SchemaError: A reference leads nowhere, or a schema is neither an object nor a boolean.
    """
    if len(schemas) == 1 and isinstance(schemas[0], dict) and _FOLLOWED.isdisjoint(schemas[0]):
        return Conjunction((schemas[0],), settled, parents or {})  # most schemas are such
    found: dict[int, Schema] = {}
    part_of = dict(parents or {})
    # Each schema, with those that lead to it by references and `allOf` alone.
    waiting: list[tuple[object, frozenset[int]]] = [(schema, frozenset()) for schema in schemas]
    while waiting:
        schema, path = waiting.pop(0)
        if schema is True:
            continue
        if schema is False:
            return None
        if not isinstance(schema, Mapping):
            raise SchemaError(f"{str(schema)[:40]!r} is not a schema, which is an object or a boolean")
        if id(schema) in path:
            raise SchemaError("$ref leads back to itself")
        if id(schema) in found:
            continue
        parts = [document.resolve(schema, keyword) for keyword in _REFERENCES if keyword in schema]
        if not (parts and document.refs_replace_siblings):
            found[id(schema)] = schema
            for part in list_of(schema, "allOf"):
                document.enter(schema, part)
                parts.append(part)
        path |= {id(schema)}
        for part in parts:
            if isinstance(part, Mapping) and id(part) not in found:
                part_of.setdefault(id(part), id(schema))
        waiting = [*((part, path) for part in parts), *waiting]
    return Conjunction(tuple(found.values()), settled, part_of)


def without_keywords(document: Document, whole: Conjunction, keywords: Collection[str]) -> Conjunction:
    """Return a conjunction without some keywords of its schemas."""
    schemas, numbers = list[Schema](), dict[int, int]()
    for schema in whole.schemas:
        kept = schema
        if any(keyword in schema for keyword in keywords):
            left_out = {*keywords, "$id"}  # `enter` keeps the base of references
            kept = document.once(
                ("without", id(schema), tuple(keywords)),
                lambda schema=schema, left_out=left_out: {  # type: ignore[misc]
                    name: value for name, value in schema.items() if name not in left_out
                },
            )
            document.enter(schema, kept)
        schemas.append(kept)
        numbers[id(schema)] = id(kept)
    settled = frozenset((numbers.get(number, number), name) for number, name in whole.settled)
    parents = {numbers.get(part, part): numbers.get(parent, parent) for part, parent in whole.parents.items()}
    return Conjunction(tuple(schemas), settled, parents)


def list_of(schema: Schema, keyword: str) -> list[Any]:
    """Return the value of a keyword that must be a list; empty if it is unset."""
    value = schema.get(keyword, [])
    if not isinstance(value, list):
        raise SchemaError(f"{keyword} must be a list")
    return value


def map_of(schema: Schema, keyword: str) -> Mapping[str, Any]:
    """Return the value of a keyword that must be an object; empty if it is unset."""
    value = schema.get(keyword, {})
    if not isinstance(value, Mapping):
        raise SchemaError(f"{keyword} must be an object")
    return value


def number_of(schema: Schema, keyword: str) -> Decimal | None:
    value = schema.get(keyword)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | Decimal):
        raise SchemaError(f"{keyword} must be a number")
    number = Decimal(value)
    if is_too_long(number):
        raise SchemaError(f"{keyword} has too many digits")
    return number


def size_of(schema: Schema, keyword: str) -> int | None:
    """Return the value of a keyword that must be a whole number; None if it is unset, or a maximum that no output
    reaches. Raises UnenforceableError for a minimum that none reaches.
    """
    value = number_of(schema, keyword)
    if value is None:
        return None
    if value < 0 or value != value.to_integral_value():
        raise SchemaError(f"{keyword} must be a whole number, not negative")
    if value < _UNREACHED:
        return int(value)
    if keyword.startswith("min"):
        raise UnenforceableError(f"{keyword} is larger than any output")
    return None


def least(one: int | None, other: int | None) -> int | None:
    """Return the lower of two limits, where None means none."""
    return other if one is None else one if other is None else min(one, other)


def equal(one: object, other: object) -> bool:
    """Return whether two JSON values are equal, where numbers of different spelling are, but true and 1 are not."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(equal(value, other[name]) for name, value in one.items())
    return one == other
