"""Reads a schema, with exact numbers, and resolves its references."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from functools import cached_property
from typing import Any, TypeVar

from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError
from jsonschema.validators import extend, validator_for
from referencing import Registry
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012, specification_with

from midstream.grammar.json_schema.errors import SchemaError, UnenforceableError

Schema = Mapping[str, Any]
_T = TypeVar("_T")
_ROOT = "urn:midstream:schema"


def read_json(text: str, position: int = 0) -> tuple[Any, int]:
    """Return the JSON value that begins at `position`, with exact numbers, and its end. Raises SchemaError if there is
    none.
    """
    try:
        return _DECODER.raw_decode(text, position)
    except ValueError as error:
        raise SchemaError(f"is not JSON: {error}") from None


def read_whole(text: str) -> Any:
    """Return the JSON value that is all of a text, as `read_json` does."""
    start = len(text) - len(text.lstrip())
    value, end = read_json(text, start)
    if text[end:].strip():
        raise SchemaError(f"is not JSON: text follows it at character {end}")
    return value


class Document:
    """A schema document.

    Attributes:
        root: The schema.
    """

    def __init__(self, root: object) -> None:
        """`root` is the schema as `read_json` returns it. Raises SchemaError if it is not one."""
        if not isinstance(root, dict | bool):
            raise SchemaError("must be an object or a boolean")
        self.root: Any = root
        root = root if isinstance(root, dict) else {}
        dialect = str(root.get("$schema", "")).removesuffix("#")
        known = specification_with(dialect, default=DRAFT202012) if dialect else DRAFT202012
        self._validator = validator_for({"$schema": root.get("$schema", "")}, default=Draft202012Validator)
        # References replace their siblings before draft 2019-09.
        self.refs_replace_siblings = known.name in ("draft-03", "draft-04", "draft-06", "draft-07")
        self._resource = known.create_resource(self.root)
        self._resolvers: dict[int, Any] = {}  # by the id of a schema
        self._made: dict[object, Any] = {}
        self.coerces_one_of = self.opens_objects = self.is_lenient = False

    @cached_property
    def _resolver(self) -> Any:
        """The root's resolver; few schemas need it."""
        registry: Registry[Any] = Registry().with_resource(_ROOT, self._resource).crawl()
        resolver = registry.resolver(_ROOT)
        has_id = isinstance(self.root, dict) and isinstance(self.root.get("$id"), str)
        return resolver.in_subresource(self._resource) if has_id else resolver

    def resolve(self, schema: Schema, keyword: str) -> Any:
        """Return the schema to which a reference leads. Raises SchemaError if there is none."""
        reference = schema[keyword]
        if not isinstance(reference, str):
            raise SchemaError(f"{keyword} must be a text")
        anchor = reference.removeprefix("#")
        if keyword == "$dynamicRef" and self._num_dynamic_anchors(anchor) > 1:
            raise UnenforceableError(f"$dynamicRef to one of several anchors {anchor!r} cannot be enforced")
        resolver = self._base(schema)
        try:
            found = resolver.lookup(reference)
        except (Unresolvable, ValueError):
            raise SchemaError(f"{keyword}: {reference!r} is not in this document") from None
        if isinstance(found.contents, dict):
            self._enter(found.contents, found.resolver)
        return found.contents

    def _num_dynamic_anchors(self, name: str) -> int:
        """Return the number of schemas to which a dynamic reference may lead."""
        number, waiting = 0, [self.root]
        while waiting:
            item = waiting.pop()
            if isinstance(item, dict):
                number += item.get("$dynamicAnchor") == name
                waiting += item.values()
            elif isinstance(item, list):
                waiting += item
        return number

    def enter(self, parent: Schema, schema: object) -> None:
        """Note that `schema` is within `parent`, so that its references are relative to the same base."""
        if not isinstance(schema, dict) or id(schema) in self._resolvers:
            return
        # Only identifiers change the base, so that most schemas need no resolver of their own.
        if id(parent) in self._resolvers or "$id" in schema:
            self._enter(schema, self._base(parent))

    def _enter(self, schema: dict[str, Any], resolver: Any) -> None:
        is_ignored = self.refs_replace_siblings and "$ref" in schema
        if isinstance(schema.get("$id"), str) and schema is not self.root and not is_ignored:
            resolver = resolver.in_subresource(DRAFT202012.create_resource(schema))
        self._resolvers[id(schema)] = resolver

    def once(self, key: object, make: Callable[[], _T]) -> _T:
        """Return the result of the first call with this key, which stays in memory as long as this document."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]  # type: ignore[no-any-return]

    def is_valid(self, value: object, schema: Schema) -> bool:
        """Return whether a value matches a schema of this document."""
        return bool(self._validator(schema, _resolver=self._base(schema)).is_valid(value))

    def check(self) -> None:
        """Raise jsonschema's SchemaError if the document is not a valid schema of its draft."""
        self._validator.check_schema(self.root)

    def errors(self, value: object, keywords: Mapping[str, Any]) -> Iterator[ValidationError]:
        """Yield why a value does not match the document, where `keywords` replaces the validator's own functions."""
        validator = extend(self._validator, keywords)(self.root, _resolver=self._resolver)
        yield from validator.iter_errors(value)

    def _base(self, schema: Schema) -> Any:
        found = self._resolvers.get(id(schema))
        return self._resolver if found is None else found


def _refuse(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_float=Decimal, parse_constant=_refuse)
