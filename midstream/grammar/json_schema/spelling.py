"""The one spelling of a value."""

from __future__ import annotations

import json
from decimal import Decimal

from midstream.grammar.json_schema.style import Style

_PLAIN_DIGITS = 30
_encode = json.JSONEncoder(ensure_ascii=False).encode


def spelled(value: object, style: Style) -> str:
    """Return the JSON text of a value."""
    if isinstance(value, str):
        return _encode(value).encode(errors="replace").decode()
    if isinstance(value, Decimal):
        return _decimal(value)
    if isinstance(value, dict):
        members = (f"{spelled(name, style)}{style.key_separator}{spelled(item, style)}" for name, item in value.items())
        return f"{{{style.item_separator.join(members)}}}"
    if isinstance(value, list):
        return f"[{style.item_separator.join(spelled(item, style) for item in value)}]"
    return json.dumps(value)


def _decimal(value: Decimal) -> str:
    """Return the shortest spelling of a number, without an exponent unless it is very large or small."""
    value = value.normalize()
    return f"{value:f}" if -_PLAIN_DIGITS < value.adjusted() < _PLAIN_DIGITS else f"{value:e}"
