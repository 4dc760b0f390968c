"""Writes the rules of a schema: one for each combination of schemas that applies to a value."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections import deque
from collections.abc import Sequence as Items
from decimal import Decimal
from os.path import commonprefix
from typing import Any

from midstream.grammar.json_schema.arrays import array_rules
from midstream.grammar.json_schema.choices import alternatives
from midstream.grammar.json_schema.conjunction import Conjunction, conjunction, without_keywords
from midstream.grammar.json_schema.demands import Demands, demands
from midstream.grammar.json_schema.document import Document, Schema
from midstream.grammar.json_schema.errors import SchemaError, UnenforceableError
from midstream.grammar.json_schema.grammar import MAX_RULES, Name, Rules, Sequence, Terminal, Value, expression, text
from midstream.grammar.json_schema.keywords import KEYWORDS
from midstream.grammar.json_schema.negation import EXCLUDED
from midstream.grammar.json_schema.numbers import FRACTION, INTEGER, NUMBER, PLAIN, decimals, integers, spellings
from midstream.grammar.json_schema.objects import object_rules
from midstream.grammar.json_schema.spelling import spelled, spelled_parts
from midstream.grammar.json_schema.strings import string_conditions
from midstream.grammar.json_schema.style import Style

# The library's own code for multiples computes in double precision, and needs a state for each remainder.
_MAX_EXACT, _MAX_DIGITS, _MAX_STEP = 2**53, 15, 10_000
_PLAIN_DIGITS = 30
# Keywords that are left out, each group alone and then all of them, if a lenient schema cannot be enforced.
_RELAXED = (
    ("pattern",),
    ("uniqueItems",),
    ("contains", "minContains", "maxContains"),
    ("not", "if", "then", "else", EXCLUDED),
    ("dependentSchemas", "dependencies"),
    ("multipleOf",),
    ("propertyNames",),
    ("patternProperties",),
    ("minProperties", "maxProperties"),
)
# Characters that have a meaning in expressions, and those that are easily mistaken.
_encode = json.JSONEncoder(ensure_ascii=False).encode
_QUICK = re.compile(r"[A-Za-z0-9_ :,;=]*")  # texts that need no escapes
_SPECIAL = re.compile(r"[^A-Za-z0-9_ \":,!@%<>=;'~`]")


class RuleMaker:
    """Makes the rules of the values of a schema; see Maker."""

    def __init__(self, document: Document, style: Style) -> None:
        self.document = document
        self.style = style
        self.rules: Rules = {}
        self._names: dict[object, str] = {}
        self._quick = {
            "string": Terminal(string_conditions()),
            "number": Terminal(expression(NUMBER)),
            "integer": Terminal(expression(INTEGER)),
            "boolean": Terminal(expression(f"{style.word(True)}|{style.word(False)}")),
            "null": text(style.word(None)),
        }
        self._waiting: deque[tuple[str, Conjunction, Style]] = deque()

    def make(self, schema: object) -> str:
        """Make the rules of a schema, and of all values in it; return the name of its rule.

        Raises:
            SchemaError: The schema is invalid, or cannot be enforced.
        """
        root = self._name(conjunction(self.document, [schema]), self.style.of_root).name
        while self._waiting:
            name, whole, style = self._waiting.popleft()
            self.rules[name] = self._sequences(whole, style)
            if len(self.rules) > MAX_RULES:
                raise SchemaError("is too large")
        return root

    def value(self, schemas: Items[object]) -> Value:
        if len(schemas) == 1 and isinstance(schemas[0], dict) and not self.style.has_quotes:
            found = self._quick_value(schemas[0])
            if found is not None:
                return found
        return self._name(conjunction(self.document, schemas), self.style)

    def _quick_value(self, schema: dict[str, Any]) -> Terminal | None:
        """Return the terminal of the values of a schema that has only a type, or only lists texts; None of others. Most
        schemas are such, and this saves most of the work.
        """
        keywords = KEYWORDS & schema.keys()
        if keywords == {"type"}:
            kind = schema["type"]
            return self._quick.get(kind) if isinstance(kind, str) else None
        return _quickly_listed(schema) if keywords in ({"enum"}, {"enum", "type"}) else None

    def add(self, sequences: list[Sequence]) -> Name:
        name = f"rule {len(self.rules)} {len(self._names)}"
        self.rules[name] = sequences
        return Name(name)

    def _name(self, whole: Conjunction | None, style: Style) -> Name:
        key: object = None if whole is None else (whole.key, style.is_call)
        name = self._names.get(key)
        if name is None:
            name = self._names[key] = f"value {len(self._names)}"
            if whole is None:
                self.rules[name] = []
            else:
                self._waiting.append((name, whole, style))
        return Name(name)

    def _sequences(self, whole: Conjunction, style: Style) -> list[Sequence]:
        try:
            return self._exact_sequences(whole, style)
        except UnenforceableError:
            if not self.style.is_lenient:
                raise
        for keywords in (*_RELAXED, [keyword for group in _RELAXED for keyword in group]):
            with contextlib.suppress(UnenforceableError):
                return self._exact_sequences(without_keywords(self.document, whole, keywords), style)
        raise UnenforceableError("its keywords cannot be enforced")

    def _exact_sequences(self, whole: Conjunction, style: Style) -> list[Sequence]:
        options = alternatives(self.document, whole)
        if options is not None:
            return [(self._name(option, style),) for option in options]
        found = demands(self.document, whole)
        if found.values is not None:
            if style.is_call or style.has_quotes:
                return [spelled_parts(value, style) for value in found.values]
            return [(_listed(found.values, style),)] if found.values else []
        sequences: list[Sequence] = []
        if any(isinstance(value, dict | list) for value in found.excluded) and {"object", "array"} & found.types:
            raise UnenforceableError("not with an object or an array as a value cannot be enforced")
        if "object" in found.types:
            sequences += object_rules(self, whole, style)
        if "array" in found.types:
            sequences += array_rules(self, whole)
        return [*sequences, *_scalars(found, style)]


def _scalars(found: Demands, style: Style) -> list[Sequence]:
    """Return the terminals of the values that are neither objects nor arrays."""
    words = [None] * ("null" in found.types) + [True, False] * ("boolean" in found.types)
    kept = [word for word in words if not any(word is value for value in found.excluded)]
    sequences: list[Sequence] = [(text(style.word(word)),) for word in kept]
    if "string" in found.types and style.has_quotes:
        sequences.append(style.quoted(None))
    elif "string" in found.types and (found.max_length is None or found.min_length <= found.max_length):
        conditions = string_conditions(
            min_length=found.min_length,
            max_length=found.max_length,
            patterns=found.patterns,
            formats=found.formats,
            excluded=[value for value in found.excluded if isinstance(value, str)],
            excluded_patterns=found.excluded_patterns,
        )
        sequences.append((Terminal(conditions),))
    if found.types & {"integer", "number"}:
        sequences += _numbers(found)
    return sequences


def _numbers(found: Demands) -> list[Sequence]:
    """Return the terminals of the numbers in a range, or of its integers."""
    out = [value for value in found.excluded if isinstance(value, int | Decimal) and not isinstance(value, bool)]
    if found.multiples:
        if out or found.is_fractional:
            raise UnenforceableError("not beside multipleOf cannot be enforced")
        return _multiples(found)
    if "number" in found.types:
        own = [FRACTION] if found.is_fractional else []
        but = f" & {expression(PLAIN)} & ~{expression('|'.join(map(spellings, out)))}" if out else ""
        options = [" & ".join(map(expression, [*parts, *own])) for parts in decimals(found.numbers)]
        return [(Terminal(option + but),) for option in options]
    if found.is_fractional:
        return []
    options = integers(*found.numbers.integers())
    whole = [str(int(value)) for value in out if value == int(value)]
    but = f" & ~{expression('(' + '|'.join(whole) + ')')}" if whole else ""
    return [(Terminal(expression(spelling) + but),) for spelling in options]


def _multiples(found: Demands) -> list[Sequence]:
    """Return the terminal of the multiples of a number: the library has its own code for these."""
    step, is_integer = found.multiples[0], "integer" in found.types
    for other in [*found.multiples[1:], *([Decimal(1)] if is_integer else [])]:
        step = _common_multiple(step, other)
    numbers = found.numbers
    low = _inside(numbers.low, step, 1, is_open=numbers.is_low_open)
    high = _inside(numbers.high, step, -1, is_open=numbers.is_high_open)
    if low is not None and high is not None and low > high:
        return []
    bounds = {"multipleOf": step, "minimum": low, "maximum": high}
    given = {name: value for name, value in bounds.items() if value is not None}
    if int("".join(map(str, step.normalize().as_tuple().digits))) > _MAX_STEP or any(map(_is_inexact, given.values())):
        raise UnenforceableError("multipleOf with such large or long numbers cannot be enforced")
    shown = ", ".join(f"{json.dumps(name)}: {value:f}" for name, value in given.items())
    return [(Terminal(f'%json {{"type": "{"integer" if is_integer else "number"}", {shown}}}'),)]


def _is_inexact(number: Decimal) -> bool:
    """Return whether a number may differ in double precision."""
    return abs(number) >= _MAX_EXACT or len(number.as_tuple().digits) > _MAX_DIGITS


def _inside(bound: Decimal | None, step: Decimal, direction: int, *, is_open: bool) -> Decimal | None:
    """Return the first multiple of `step` inside a bound."""
    if bound is None:
        return None
    number = (bound / step).to_integral_value()
    while number * step * direction < bound * direction or (is_open and number * step == bound):
        number += direction
    return (number * step).normalize() if number else Decimal(0)


def _common_multiple(one: Decimal, other: Decimal) -> Decimal:
    """Return the least common multiple."""
    places = max(-int(one.as_tuple().exponent), -int(other.as_tuple().exponent), 0)
    scale = Decimal(10) ** places
    return Decimal(math.lcm(int(one * scale), int(other * scale))) / scale


def _listed(values: Items[Any], style: Style) -> Terminal:
    """Return the terminal of listed values, each in one spelling."""
    if set(map(type, values)) <= {str} and _QUICK.fullmatch("".join(values)):
        return _quick_terminal(values)
    spellings = dict.fromkeys(spelled(value, style) for value in values)
    return Terminal(expression("(" + "|".join(map(_plain, spellings)) + ")"))


def _quickly_listed(schema: Schema) -> Terminal | None:
    """Return the terminal of the texts that a schema lists, if it says nothing else, and none needs an escape."""
    values = schema["enum"]
    if schema.get("type", "string") != "string" or not isinstance(values, list) or not values:
        return None
    is_quick = set(map(type, values)) == {str} and _QUICK.fullmatch("".join(values))
    return _quick_terminal(values) if is_quick else None


def _quick_terminal(values: Items[str]) -> Terminal:
    """Return the terminal of texts that need no escapes."""
    # The shorter the expression, the faster the library parses it.
    start = commonprefix(values)  # noqa: RUF071 (of characters)
    size = len(start)
    rest = "|".join(dict.fromkeys([value[size:] for value in values]))
    return Terminal(f'/"{start}({rest})"/')


def _plain(spelling: str) -> str:
    """Return the expression of one JSON text."""
    return _SPECIAL.sub(lambda found: rf"\x{{{ord(found[0]):X}}}", spelling)
