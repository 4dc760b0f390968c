"""Validates finished outputs against their schemas, with exact numbers, as the standard says."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from decimal import Decimal, getcontext
from functools import lru_cache
from itertools import islice
from typing import Any

from jsonschema.exceptions import SchemaError as InvalidSchemaError
from jsonschema.exceptions import ValidationError

from midstream.grammar.json_schema.document import Document, read_whole
from midstream.grammar.json_schema.errors import SchemaError

_MAX_ERRORS, _MAX_MESSAGE = 5, 300
_MAX_DOCUMENTS = 32
_MAX_EXPONENT = 400
# Parts of ECMA's expressions that Python writes in another way, outside and within classes.
_ECMA = re.compile(r"\\k<(\w+)>|\\.|\[\^?|\]|\$|\(\?<(?=[A-Za-z_])", re.DOTALL)
_OUTSIDE = {"$": r"\Z", "(?<": "(?P<", r"\d": "[0-9]", r"\D": "[^0-9]", r"\w": "[A-Za-z0-9_]", r"\W": "[^A-Za-z0-9_]"}
_INSIDE = {r"\d": "0-9", r"\w": "A-Za-z0-9_", "[": r"\["}


def problems(schema: str, text: str) -> list[str]:
    """Return why a JSON text does not match a schema, each with the place in the value; nothing if it does."""
    getcontext().prec = 2 * _MAX_EXPONENT
    try:
        value = json.loads(text, parse_float=_exact, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        return [f"is not complete JSON: {error}"]
    try:
        return [_shown(error) for error in islice(_document(schema).errors(value, _KEYWORDS), _MAX_ERRORS)]
    except (SchemaError, InvalidSchemaError) as error:
        return [f"the schema is invalid: {str(error).strip().partition(chr(10))[0][:_MAX_MESSAGE]}"]
    except Exception as error:  # noqa: BLE001 (a schema can break the validator in many ways)
        return [f"cannot be validated: {type(error).__name__}: {str(error)[:_MAX_MESSAGE]}"]


@lru_cache(_MAX_DOCUMENTS)
def _document(schema: str) -> Document:
    document = Document(read_whole(schema))
    document.check()
    return document


class _Number(Decimal):
    """A number that messages show as it is in JSON."""

    __repr__ = Decimal.__str__


def _exact(text: str) -> Decimal | int:
    """Return the value of a number with a point or an exponent; 1.0 is an integer in JSON schemas."""
    number = _Number(text)
    if abs(number.adjusted()) > _MAX_EXPONENT:
        raise ValueError("a number is too large or too small")
    return int(number) if number == number.to_integral_value() else number


def _refuse(name: str) -> object:
    raise ValueError(f"{name} is not valid in JSON")


def _shown(error: ValidationError) -> str:
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error.absolute_path)
    return f"{f'{place.removeprefix(chr(46))}: ' if place else ''}{error.message[:_MAX_MESSAGE]}"


def _pattern(validator: Any, pattern: str, instance: object, schema: object) -> Iterator[ValidationError]:
    if isinstance(instance, str) and not re.search(_python(pattern), instance):
        yield ValidationError(f"{instance!r} does not match {pattern!r}")


def _pattern_properties(
    validator: Any, patterns: dict[str, Any], instance: object, schema: object
) -> Iterator[ValidationError]:
    for pattern, part in patterns.items() if isinstance(instance, dict) else ():
        for name, value in instance.items() if isinstance(instance, dict) else ():
            if re.search(_python(pattern), name):
                yield from validator.descend(value, part, path=name, schema_path=pattern)


_KEYWORDS = {"pattern": _pattern, "patternProperties": _pattern_properties}


@lru_cache(256)
def _python(pattern: str) -> str:
    """Return an ECMA 262 expression in Python's syntax."""
    is_inside = False

    def replaced(found: re.Match[str]) -> str:
        nonlocal is_inside
        mark = found[0]
        if is_inside:
            is_inside = mark != "]"
            return _INSIDE.get(mark, mark)
        is_inside = mark.startswith("[")
        return f"(?P={found[1]})" if found[1] else _OUTSIDE.get(mark, mark)

    return _ECMA.sub(replaced, pattern)
