"""The one spelling of a value."""

from __future__ import annotations

from collections.abc import Iterable
from decimal import Decimal

from midstream.grammar.json_schema.grammar import Sequence, Symbol, text
from midstream.grammar.json_schema.style import Style, json_text

_PLAIN_DIGITS = 30


def spelled_parts(value: object, style: Style) -> Sequence:
    """Return the terminals of a value, in any notation."""
    if not style.has_quotes and not style.is_call:
        return (text(spelled(value, style)),)
    if isinstance(value, str):
        return style.quoted(value) if style.has_quotes else (text(spelled(value, style)),)
    inner = style.of_values
    if isinstance(value, dict):
        members = ((*style.key(name), *spelled_parts(item, inner)) for name, item in value.items())
        return style.around(_joined(members, style))
    if isinstance(value, list):
        return (style.mark("["), *_joined((spelled_parts(item, inner) for item in value), style), style.mark("]"))
    return (text(spelled(value, style)),)


def _joined(parts: Iterable[Sequence], style: Style) -> Sequence:
    found: list[Symbol] = []
    for part in parts:
        found += (style.between, *part) if found else part
    return tuple(found)


def spelled(value: object, style: Style) -> str:
    """Return the JSON text of a value."""
    if isinstance(value, str):
        return json_text(value)
    if isinstance(value, Decimal):
        return _decimal(value)
    if isinstance(value, dict):
        members = (f"{spelled(name, style)}{style.key_separator}{spelled(item, style)}" for name, item in value.items())
        return f"{{{style.item_separator.join(members)}}}"
    if isinstance(value, list):
        return f"[{style.item_separator.join(spelled(item, style) for item in value)}]"
    if value is None or isinstance(value, bool):
        return style.word(value)
    return str(value)


def _decimal(value: Decimal) -> str:
    """Return the shortest spelling of a number, without an exponent unless it is very large or small."""
    value = value.normalize()
    return f"{value:f}" if -_PLAIN_DIGITS < value.adjusted() < _PLAIN_DIGITS else f"{value:e}"
