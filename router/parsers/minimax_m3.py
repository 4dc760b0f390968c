"""MiniMax M3: a section of `<invoke name="...">`, in which each argument is an element of its own name. Elements in it
are the properties of an object, or the items of an array if the schema says so. A mark precedes each tag.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from router.parsers.machine import Call, Offer, Schema
from router.parsers.sections import Sections
from router.parsers.tagged_values import alternatives, properties_of, value_of

MARK = "]<]minimax[>["
BEGIN, END = f"{MARK}<tool_call>", f"{MARK}</tool_call>"
CALL, CALL_END = f"{MARK}<invoke name=", f"{MARK}</invoke>"
THINKING = ("<mm:think>", "</mm:think>")
_NAME = re.compile(r"""("|'|)([^>"']+)\1>""")
_OPENING = re.compile(rf"\s*{re.escape(MARK)}<([^/<>\s][^<>]*)>")
_MAX_DEPTH = 64
# An element: its text, or the elements in it with their names.
_Element = str | list[tuple[str, "_Element"]]


class _MalformedError(Exception):
    """The text is not a sequence of elements."""


def _read(body: str, offer: Offer) -> Call | None:
    found = _NAME.match(body)
    name = found[2].strip() if found else ""
    if found is None or name not in offer.tools:
        return None
    try:
        elements, position = _elements(body, found.end())
    except _MalformedError:
        return None
    if body[position:].strip():
        return None
    schema = offer.tools[name]
    return Call(name, json.dumps(_object(elements, properties_of(schema), schema), ensure_ascii=False))


def _elements(text: str, position: int, depth: int = 0) -> tuple[list[tuple[str, _Element]], int]:
    """Return the elements from a position on, and the position after them."""
    found: list[tuple[str, _Element]] = []
    while opening := _OPENING.match(text, position):
        name, start = opening[1], opening.end()
        inner, after = _elements(text, start, depth + 1) if depth < _MAX_DEPTH else ([], start)
        closing = f"{MARK}</{name}>"
        end = text.find(MARK, after)
        if end == -1 or not text.startswith(closing, end) or (inner and text[after:end].strip()):
            raise _MalformedError
        found.append((name, inner or text[start:end]))
        position = end + len(closing)
    return found, position


def _object(elements: list[tuple[str, _Element]], known: Mapping[str, object], root: Schema) -> dict[str, object]:
    """Return the value of elements that are properties; those of the same name are the items of an array."""
    found: dict[str, list[object]] = {}
    for name, element in elements:
        found.setdefault(name, []).append(_value(element, known.get(name), root))
    return {name: values[0] if len(values) == 1 else values for name, values in found.items()}


def _value(element: _Element, schema: object, root: Schema) -> object:
    options = [option for option in alternatives(schema, root) if isinstance(option, Mapping)]
    array = next((option for option in options if _is(option, "array")), None)
    whole = next((option for option in options if _is(option, "object")), None)
    if isinstance(element, str):
        # The template writes an empty array or object as an empty element.
        if not element.strip() and not any(_is(option, "string") for option in options):
            return [] if array is not None else {} if whole is not None else value_of(element, schema, root)
        return value_of(element, schema, root)
    if array is not None:
        return [_value(item, array.get("items"), root) for _, item in element]
    properties = whole.get("properties") if whole is not None else None
    return _object(element, properties if isinstance(properties, Mapping) else {}, root)


def _is(schema: Mapping[str, object], kind: str) -> bool:
    kinds = schema.get("type")
    return kind in kinds if isinstance(kinds, list) else kinds == kind


script = Sections(begin=BEGIN, end=END, call=CALL, call_end=CALL_END, read=_read).script
