"""Parses values that are not JSON: Python literals, and Gemma's with their own quotes. Nothing is evaluated."""

from __future__ import annotations

import re

_MAX_DEPTH = 64
_NUMBER = re.compile(r"[+-]?(\d[\d_]*\.?\d*|\.\d+)([eE][+-]?\d+)?")
_WORD = re.compile(r"[A-Za-z_][\w.\-]*")
_WORDS: dict[str, object] = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\n": "", "0": "\0"}
_AFTER_VALUE = re.compile(r"\s*([,:)\]}]|\Z)")
# The beginning of a set: a text or number, and no colon.
_SET = re.compile(r"""\s*("[^"\\]*"|'[^'\\]*'|[-+.\d]+)\s*[,}]""")
_CODED = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})")


class LiteralError(ValueError):
    """The text is not a literal."""


class Literals:
    """Parses the literals in a text one after another."""

    def __init__(self, text: str, quote: str = "", *, ends_late: bool = False) -> None:
        """`quote` is a delimiter of strings without escapes, in addition to Python's quotes. If `ends_late`, a quote
        ends a string only where the value may end, since models write quotes in strings without escapes.
        """
        self.position = 0
        self._text = text
        self._quote = quote
        self._ends_late = ends_late
        self._depth = 0

    def skip(self, mark: str = "") -> bool:
        """Skip white space and then `mark`; return whether `mark` was found."""
        while self._text[self.position : self.position + 1].isspace():
            self.position += 1
        if not mark or not self._text.startswith(mark, self.position):
            return False
        self.position += len(mark)
        return True

    def expect(self, mark: str) -> None:
        """Skip white space and then `mark`. Raises LiteralError if `mark` does not come next."""
        if not self.skip(mark):
            raise LiteralError(f"{mark} expected at {self.position}")

    def at_end(self) -> bool:
        """Return whether only white space follows."""
        self.skip()
        return self.position == len(self._text)

    def word(self) -> str:
        """Return the next name, which may contain dots and hyphens. Raises LiteralError if no name comes next."""
        self.skip()
        return self._match(_WORD)

    def value(self) -> object:
        """Return the next value. Raises LiteralError if no literal comes next, or it is nested too deeply."""
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise LiteralError("is nested too deeply")
        value = self._value()
        self._depth -= 1
        return value

    def _value(self) -> object:
        self.skip()
        if self._quote and self.skip(self._quote):
            return self._quoted()
        for quote in ('"""', "'''", '"', "'"):
            if self.skip(quote):
                return self._string(quote)
        if self.skip("["):
            return self.items("]")
        if self.skip("("):
            return self.items(")")
        if self.skip("{"):
            return self.items("}") if _SET.match(self._text, self.position) else self.fields("}")
        if _WORD.match(self._text, self.position):
            name = self.word()
            if name not in _WORDS:
                raise LiteralError(f"{name} is not a literal")
            return _WORDS[name]
        return self._number()

    def items(self, end: str) -> list[object]:
        """Return the values up to `end`, which is consumed."""
        values: list[object] = []
        while not self.skip(end):
            values.append(self.value())
            if not self.skip(","):
                self.expect(end)
                break
        return values

    def fields(self, end: str, separator: str = ":") -> dict[str, object]:
        """Return keys (bare or quoted) and values up to `end`, which is consumed."""
        values: dict[str, object] = {}
        while not self.skip(end):
            self.skip()
            is_bare = _WORD.match(self._text, self.position)
            key = self.word() if is_bare else self.value()
            if not isinstance(key, str):
                raise LiteralError("a key must be text")
            self.expect(separator)
            values[key] = self.value()
            if not self.skip(","):
                self.expect(end)
                break
        return values

    def _number(self) -> int | float:
        text = self._match(_NUMBER).replace("_", "")
        try:
            number = float(text)
            if not text.lstrip("+-").isdigit():
                if abs(number) == float("inf"):
                    raise LiteralError("is not a number")
                return number
            return int(text)
        except (ValueError, OverflowError):
            raise LiteralError("is not a number") from None

    def _quoted(self) -> str:
        end = self._text.find(self._quote, self.position)
        if end == -1:
            raise LiteralError("unterminated string")
        text = self._text[self.position : end]
        self.position = end + len(self._quote)
        return text

    def _string(self, quote: str) -> str:
        parts: list[str] = []
        text, end = self._text, self._end_of_string(quote)
        while True:
            if end == -1:
                raise LiteralError("unterminated string")
            escape = text.find("\\", self.position, end)
            if escape == -1:
                parts.append(text[self.position : end])
                self.position = end + len(quote)
                return "".join(parts)
            parts.append(text[self.position : escape])
            self.position = escape + 1
            parts.append(self._escaped())
            if self.position > end:
                end = self._end_of_string(quote)

    def _end_of_string(self, quote: str) -> int:
        """Return the position of the quote that ends the string, regardless of escapes; -1 if there is none."""
        end = self._text.find(quote, self.position)
        while self._ends_late and end != -1 and not _AFTER_VALUE.match(self._text, end + len(quote)):
            end = self._text.find(quote, end + 1)
        return end

    def _escaped(self) -> str:
        coded = _CODED.match(self._text, self.position)
        if coded:
            self.position = coded.end()
            number = int(next(filter(None, coded.groups())), 16)
            if number > 0x10FFFF or 0xD800 <= number < 0xE000:
                raise LiteralError("is not a character")
            return chr(number)
        mark = self._text[self.position : self.position + 1]
        self.position += 1
        if mark in ('"', "'", "\\", "/"):
            return mark
        return _ESCAPES.get(mark, "\\" + mark)

    def _match(self, pattern: re.Pattern[str]) -> str:
        found = pattern.match(self._text, self.position)
        if found is None:
            raise LiteralError(f"unexpected text at {self.position}")
        self.position = found.end()
        return found[0]
