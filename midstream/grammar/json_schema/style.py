"""How JSON is formatted: by default as by Python's json.dumps, or as the keyword `x-guidance` says."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from midstream.grammar.json_schema.errors import SchemaError
from midstream.grammar.json_schema.grammar import Terminal, expression, text

_FLEXIBLE = r"[ \n\r\t]*"
_KNOWN = ("whitespace_flexible", "whitespace_pattern", "item_separator", "key_separator", "coerce_one_of", "lenient",
          "open_objects")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Style:
    """The text between values.

    Attributes:
        space: Expression of the white space around all of it; empty for none.
        coerces_one_of: Whether `oneOf` is treated as `anyOf`.
        is_lenient: Whether what cannot be enforced is ignored.
        opens_objects: Whether objects that list properties may have others, unless they say otherwise.
    """

    item_separator: str = ", "
    key_separator: str = ": "
    space: str = ""
    coerces_one_of: bool = False
    is_lenient: bool = False
    opens_objects: bool = False

    @classmethod
    def read(cls, value: object) -> Style:
        """Read `x-guidance`. If white space were flexible by default, a small model might generate nothing else."""
        if not isinstance(value, Mapping):
            raise SchemaError("x-guidance must be an object")
        for name in value:
            if name not in _KNOWN:
                raise SchemaError(
                    f"x-guidance has the unknown setting {str(name)[:40]!r}; known are {', '.join(_KNOWN)}"
                )
        is_flexible = bool(value.get("whitespace_flexible", "whitespace_pattern" in value))
        space = str(value.get("whitespace_pattern", _FLEXIBLE)) if is_flexible else ""
        return cls(
            str(value.get("item_separator", "," if space else ", ")),
            str(value.get("key_separator", ":" if space else ": ")),
            space,
            bool(value.get("coerce_one_of", False)),
            bool(value.get("lenient", False)),
            bool(value.get("open_objects", False)),
        )

    def mark(self, character: str) -> Terminal:
        """Return the terminal of a bracket."""
        if not self.space:
            return text(character)
        before, after = ("", self.space) if character in "[{" else (self.space, "")
        return Terminal(expression(f"{before}{re.escape(character)}{after}"))

    @property
    def between(self) -> Terminal:
        """The terminal between two items."""
        if not self.space:
            return text(self.item_separator)
        return Terminal(expression(f"{self.space}{re.escape(self.item_separator)}{self.space}"))

    @property
    def _colon(self) -> str:
        if not self.space:
            return text(self.key_separator).lark
        return expression(f"{self.space}{re.escape(self.key_separator)}{self.space}")

    def key(self, spelling: str) -> Terminal:
        """Return the terminal of a property's name, of which `spelling` is the JSON text, and of what follows it."""
        if not self.space:
            return text(spelling + self.key_separator)
        return Terminal(f"({text(spelling).lark} {self._colon})")

    def keys(self, conditions: str) -> Terminal:
        """Return the terminal of all names that meet `conditions`, in Lark's syntax for terminals, and of what follows
        them.
        """
        return Terminal(f"({conditions}) {self._colon}")
