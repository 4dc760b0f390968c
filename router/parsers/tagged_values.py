"""Converts arguments that are written as text between tags, without JSON quotes, to the types in the tool's schema."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping

from router.parsers.literals import LiteralError, Literals
from router.parsers.machine import Schema, parse_json

_KINDS_OF: dict[type, set[str]] = {
    str: {"string"},
    bool: {"boolean"},
    int: {"integer", "number"},
    float: {"number"},
    type(None): {"null"},
    list: {"array"},
    dict: {"object"},
}
_WORDS: dict[str, object] = {"true": True, "false": False, "null": None, "none": None}


def arguments_of(values: Iterable[tuple[str, str]], schema: Schema, texts: Collection[str] = ()) -> str:
    """Return a call's arguments as a JSON object; the arguments named in `texts` stay strings unless their schema
    excludes strings.
    """
    known = properties_of(schema)
    arguments = {name: value_of(text, known.get(name), schema, is_text=name in texts) for name, text in values}
    return json.dumps(arguments, ensure_ascii=False)


def properties_of(root: Schema) -> Mapping[str, object]:
    """Return the schemas of the arguments, by name; `root` may be a reference."""
    options = alternatives(root, root)
    properties = options[0].get("properties") if len(options) == 1 and isinstance(options[0], Mapping) else None
    return properties if isinstance(properties, Mapping) else {}


def alternatives(schema: object, root: Schema) -> list[object]:
    """Return the schemas of which a value must match one: the options of `anyOf` or `oneOf`, or else the schema itself.
    References, and `allOf` of one schema, are resolved.

    Each reference is followed once, so this ends even if schemas refer to themselves.
    """
    found: list[object] = []
    seen: set[str] = set()
    stack = [schema]
    while stack:
        option = stack.pop()
        if not isinstance(option, Mapping) or option.keys() & {"type", "enum", "const"}:
            found.append(option)
            continue
        reference, whole = option.get("$ref"), option.get("allOf")
        options = option.get("anyOf", option.get("oneOf"))
        if isinstance(reference, str):
            if reference not in seen:
                seen.add(reference)
                stack.append(_target(reference, root))
        elif isinstance(whole, list) and len(whole) == 1:
            stack.append(whole[0])
        elif isinstance(options, list) and options:
            stack += reversed(options)
        else:
            found.append(option)
    return found


def _target(reference: str, root: Schema) -> object:
    """Return the schema at a reference such as `#/$defs/NAME`; None if there is none."""
    start, *path = reference.split("/")
    found: object = root if start == "#" else None
    for part in path:
        key = part.replace("~1", "/").replace("~0", "~")
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def value_of(text: str, schema: object, root: Schema, *, is_text: bool = False) -> object:
    """Return the value of a text by its schema, which is a part of `root`; it stays a string if it `is_text` and the
    schema allows strings.
    """
    kinds = {kind for option in alternatives(schema, root) for kind in _kinds(option)}
    if kinds == {"string"} or (is_text and (not kinds or "string" in kinds)):
        return text
    stripped = text.strip()
    # Some templates print values as Python does: True and None.
    word = stripped.lower()
    if word in _WORDS and kinds & {"boolean", "null"}:
        value = _WORDS[word]
    else:
        try:
            value = parse_json(stripped)
        except ValueError:
            value = _literal(stripped) if kinds & {"array", "object"} else None
            if value is None:
                return text
    return text if "string" in kinds and not kinds & _KINDS_OF[type(value)] else value


def _literal(text: str) -> object:
    """Return a list or mapping in Python's notation; None if the text is none."""
    literals = Literals(text)
    try:
        value = literals.value()
    except LiteralError:
        return None
    return value if isinstance(value, list | dict) and literals.at_end() else None


def _kinds(schema: object) -> set[str]:
    """Return the JSON types that a schema without alternatives allows; empty if it does not restrict them."""
    if not isinstance(schema, Mapping):
        return set()
    kind = schema.get("type")
    names = kind if isinstance(kind, list) else [kind]
    kinds = {name for name in names if isinstance(name, str)}
    if kinds:
        return kinds
    listed = [schema["const"]] if "const" in schema else schema.get("enum")
    return {kind for item in listed for kind in _KINDS_OF[type(item)]} if isinstance(listed, list) else set()
