"""Converts a schema's `pattern` (ECMA 262, as JSON Schema prescribes) to an expression of JSON strings.

The result matches the one spelling of each string that the grammar allows: characters as they are, except those that
JSON requires to be escaped. So a class that excludes a character excludes its escapes, too.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from midstream.grammar.json_schema.errors import SchemaError, UnenforceableError

# Characters that JSON strings must escape, with the expression of their escape.
_ESCAPES = {code: rf"\\u{code:04x}" for code in range(0x20)} | {
    0x08: r"\\b", 0x09: r"\\t", 0x0A: r"\\n", 0x0C: r"\\f", 0x0D: r"\\r", 0x22: r'\\"', 0x5C: r"\\\\",
}  # fmt: skip
# A character that stands for itself, and any character.
PLAIN = r'[^"\\\x00-\x1F]'
CHARACTER = rf'({PLAIN}|\\["\\bfnrt]|\\u00(0[0-7be-f]|1[0-9a-f]))'
ANY = f"{CHARACTER}*"
_SPACES = (
    (9, 13), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029), (0x202F, 0x202F),
    (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF),
)  # fmt: skip
_LINE_ENDS = ((10, 10), (13, 13), (0x2028, 0x2029))
_DIGITS = ((48, 57),)
_WORDS = ((48, 57), (65, 90), (95, 95), (97, 122))
_CLASSES = {"d": _DIGITS, "w": _WORDS, "s": _SPACES}
_CONTROLS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13, "0": 0}
_HEXADECIMAL = re.compile(r"x([0-9A-Fa-f]{2})|u\{([0-9A-Fa-f]{1,6})\}|u([0-9A-Fa-f]{4})")
_PROPERTY = re.compile(r"([pP])\{([A-Za-z_=]+)\}")
_COUNT = re.compile(r"\{(\d+)(,(\d*))?\}")
_MAX_COUNT = 100_000
_MAX_DEPTH = 50
_MAX_KNOWN = 64  # results that are kept
# Unicode's names of general categories, which all begin with their short form's first letter.
_CATEGORY = re.compile(r"(?:General_Category=|gc=)?([CLMNPSZ][a-z]?)")
_UNSUPPORTED_GROUPS = {"?=": "a lookahead", "?!": "a lookahead", "?<=": "a lookbehind", "?<!": "a lookbehind"}


@dataclass(frozen=True, slots=True)
class _Set:
    """A set of characters: an item of a class in the syntax of Rust's expressions, and a test of membership."""

    rust: str
    has: Callable[[int], bool]


@dataclass(frozen=True, slots=True)
class _Anchor:
    is_start: bool


@dataclass(frozen=True, slots=True)
class _Sequence:
    items: tuple[_Node, ...]


@dataclass(frozen=True, slots=True)
class _Choice:
    options: tuple[_Sequence, ...]


@dataclass(frozen=True, slots=True)
class _Repetition:
    item: _Node
    suffix: str


_Node = _Set | _Anchor | _Sequence | _Choice | _Repetition


@lru_cache(_MAX_KNOWN)
def string_pattern(pattern: str) -> str:
    """Return the expression of the JSON spellings, without quotes, of all strings in which `pattern` is found.

    Raises:
        SchemaError: The pattern is invalid, or uses what a grammar cannot express.
    """
    tree = _Parser(pattern).parse()
    return _group("|".join(_whole(sequence) for option in tree.options for sequence in _spread(option)))


def literal(text: str) -> str:
    """Return the expression of the JSON spelling, without quotes, of one text."""
    return "".join(_character(ord(character)) for character in text)


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._position = self._depth = 0

    def parse(self) -> _Choice:
        tree = self._choice()
        if self._position < len(self._text):
            raise SchemaError("has an unmatched )")
        return tree

    def _peek(self) -> str:
        return self._text[self._position : self._position + 1]

    def _take(self) -> str:
        if self._position >= len(self._text):
            raise SchemaError("ends too early")
        self._position += 1
        return self._text[self._position - 1]

    def _match(self, expression: re.Pattern[str]) -> re.Match[str] | None:
        found = expression.match(self._text, self._position)
        if found is not None:
            self._position = found.end()
        return found

    def _choice(self) -> _Choice:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise SchemaError("is nested too deeply")
        options = [self._sequence()]
        while self._peek() == "|":
            self._take()
            options.append(self._sequence())
        self._depth -= 1
        return _Choice(tuple(options))

    def _sequence(self) -> _Sequence:
        items: list[_Node] = []
        while self._peek() not in ("", "|", ")"):
            item = self._item()
            if isinstance(item, _Anchor):
                items.append(item)
                continue
            suffix = self._quantifier()
            items.append(_Repetition(item, suffix) if suffix else item)
        return _Sequence(tuple(items))

    def _quantifier(self) -> str:
        character = self._peek()
        if character in ("*", "+", "?") and character:
            suffix = self._take()
        elif found := self._match(_COUNT):
            low, has_comma, high = found.groups()
            if high and int(high) < int(low):
                raise SchemaError(f"has the invalid repetition {found[0]}")
            if max(int(low), int(high or 0)) > _MAX_COUNT:
                raise UnenforceableError(f"has the repetition {found[0]}; up to {_MAX_COUNT} can be enforced")
            suffix = f"{{{int(low)}}}" if has_comma is None else f"{{{int(low)},{int(high) if high else ''}}}"
        else:
            return ""
        if self._peek() == "?":  # laziness does not change what matches
            self._take()
        if self._peek() in ("*", "+") or (self._peek() == "{" and _COUNT.match(self._text, self._position)):
            raise SchemaError("has a repetition of a repetition")
        return suffix

    def _item(self) -> _Node:
        character = self._take()
        if character == "^":
            return _Anchor(is_start=True)
        if character == "$":
            return _Anchor(is_start=False)
        if character == "(":
            return self._rest_of_group()
        if character == "[":
            return self._rest_of_class()
        if character == ".":
            return _complement(_ranges(_LINE_ENDS))
        if character == "\\":
            return self._escape(in_class=False)
        if character in ("*", "+", "?"):
            raise SchemaError(f"has nothing to repeat before {character}")
        return _one(ord(character))

    def _rest_of_group(self) -> _Choice:
        if self._peek() == "?":
            rest = self._text[self._position : self._position + 3]
            for mark, name in _UNSUPPORTED_GROUPS.items():
                if rest.startswith(mark):
                    raise UnenforceableError(f"has {name} ({mark}…), which is not supported")
            if rest.startswith("?:"):
                self._position += 2
            elif found := re.compile(r"\?<[A-Za-z_$][\w$]*>").match(self._text, self._position):
                self._position = found.end()
            else:
                raise UnenforceableError(f"has a group ({rest}…), which is not supported")
        choice = self._choice()
        if self._peek() != ")":
            raise SchemaError("has an unmatched (")
        self._take()
        return choice

    def _rest_of_class(self) -> _Set:
        is_negated = self._peek() == "^"
        if is_negated:
            self._take()
        items: list[_Set] = []
        while self._peek() != "]":
            first = self._class_item()
            is_range = self._peek() == "-" and self._text[self._position + 1 : self._position + 2] not in ("]", "")
            if not is_range:
                items.append(_one(first) if isinstance(first, int) else first)
                continue
            self._take()
            last = self._class_item()
            if not isinstance(first, int) or not isinstance(last, int) or last < first:
                raise SchemaError("has an invalid range in a class")
            items.append(_ranges(((first, last),)))
        self._take()
        union = _union(items)
        return _complement(union) if is_negated else union

    def _class_item(self) -> int | _Set:
        """Return a character, or a set of them."""
        character = self._take()
        if character != "\\":
            return ord(character)
        found = self._escape(in_class=True)
        return _only(found) if isinstance(found, _Set) else ord(character)

    def _escape(self, *, in_class: bool) -> _Set:
        if found := self._match(_HEXADECIMAL):
            return _one(self._code(int(found[1] or found[2] or found[3], 16)))
        if found := self._match(_PROPERTY):
            return _property(found[2], is_negated=found[1] == "P")
        character = self._take()
        if character.lower() in _CLASSES:
            named = _ranges(_CLASSES[character.lower()])
            return _complement(named) if character.isupper() else named
        if character == "b" and in_class:
            return _one(8)
        if character == "c" and self._peek().isalpha():
            return _one(ord(self._take()) % 32)
        if character in _CONTROLS and not (character == "0" and self._peek().isdigit()):
            return _one(_CONTROLS[character])
        if character.isalnum():
            kinds = {"b": "a word boundary", "B": "a word boundary", "k": "a reference to a group"}
            what = "a reference to a group" if character.isdigit() else kinds.get(character, "an unknown escape")
            raise UnenforceableError(f"has {what} (\\{character}), which is not supported")
        return _one(ord(character))

    def _code(self, code: int) -> int:
        """Return a character's code, given that or the first half of a surrogate pair."""
        if 0xD800 <= code < 0xDC00 and self._text.startswith("\\u", self._position):
            low = int(self._text[self._position + 2 : self._position + 6], 16)
            self._position += 6
            code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00)
        if 0xD800 <= code < 0xE000 or code > 0x10FFFF:
            raise SchemaError(f"has the invalid character U+{code:04X}")
        return code


def _only(found: _Set) -> int | _Set:
    """Return the only character of a set that has just one."""
    single = re.fullmatch(r"\\x\{([0-9A-F]+)\}", found.rust)
    return int(single[1], 16) if single else found


def _one(code: int) -> _Set:
    return _Set(rf"\x{{{code:X}}}", lambda other: other == code)


def _ranges(ranges: tuple[tuple[int, int], ...]) -> _Set:
    rust = "".join(rf"\x{{{low:X}}}-\x{{{high:X}}}" for low, high in ranges)
    return _Set(rust, lambda code: any(low <= code <= high for low, high in ranges))


def _union(items: list[_Set]) -> _Set:
    return _Set("".join(item.rust for item in items), lambda code: any(item.has(code) for item in items))


def _complement(item: _Set) -> _Set:
    return _Set(f"[^{item.rust}]" if item.rust else r"\x{0}-\x{10FFFF}", lambda code: not item.has(code))


def _property(name: str, *, is_negated: bool) -> _Set:
    category = _CATEGORY.fullmatch(name)

    def has(code: int) -> bool:
        # Characters that JSON escapes are in no script of their own, and in these categories.
        return category is not None and unicodedata.category(chr(code)).startswith(category[1])

    if is_negated:
        return _Set(rf"\P{{{name}}}", lambda code: not has(code))
    return _Set(rf"\p{{{name}}}", has)


def _spread(sequence: _Sequence) -> list[_Sequence]:
    """Return the alternatives of a sequence, so that anchors in groups at its ends are at the ends of alternatives."""
    items = sequence.items
    for place in (0, len(items) - 1):
        if items and isinstance(items[place], _Choice) and _has_anchor(items[place]):
            choice = items[place]
            assert isinstance(choice, _Choice)
            spread = [_Sequence((*items[:place], *option.items, *items[place + 1 :])) for option in choice.options]
            return [found for option in spread for found in _spread(option)]
    return [sequence]


def _has_anchor(node: _Node) -> bool:
    if isinstance(node, _Anchor):
        return True
    if isinstance(node, _Repetition):
        return _has_anchor(node.item)
    parts = node.items if isinstance(node, _Sequence) else node.options if isinstance(node, _Choice) else ()
    return any(map(_has_anchor, parts))


def _whole(sequence: _Sequence) -> str:
    """Return the expression of the whole strings in which a sequence is found."""
    items = list(sequence.items)
    before = after = ANY
    while items and isinstance(items[0], _Anchor) and items[0].is_start:
        items.pop(0)
        before = ""
    while items and isinstance(items[-1], _Anchor) and not items[-1].is_start:
        items.pop()
        after = ""
    return before + "".join(map(_expression, items)) + after


def _expression(node: _Node) -> str:
    if isinstance(node, _Set):
        return _set(node)
    if isinstance(node, _Repetition):
        return _group(_expression(node.item)) + node.suffix
    if isinstance(node, _Sequence):
        return "".join(map(_expression, node.items))
    if isinstance(node, _Choice):
        return _group("|".join(map(_expression, node.options)))
    raise UnenforceableError(f"has {'^' if node.is_start else '$'} in the middle, which is not supported")


def _set(node: _Set) -> str:
    single = _only(node)
    if isinstance(single, int):
        return _character(single)
    escapes = [escape for code, escape in _ESCAPES.items() if node.has(code)]
    if node.rust and not escapes:
        return f"[{node.rust}]"
    options = [f"[[{node.rust}]&&{PLAIN}]"] if node.rust else []
    if len(escapes) == len(_ESCAPES):
        return rf'([[{node.rust}]&&{PLAIN}]|\\["\\bfnrt]|\\u00(0[0-7be-f]|1[0-9a-f]))'
    options += escapes
    if not options:
        raise SchemaError("has an empty class, which matches nothing")
    return _group("|".join(options)) if len(options) > 1 else options[0]


def _character(code: int) -> str:
    if code in _ESCAPES:
        return _ESCAPES[code]
    return chr(code) if chr(code).isalnum() and code < 0x80 else rf"\x{{{code:X}}}"


def _group(expression: str) -> str:
    return f"({expression})"
