"""How values are written: as JSON, by default as by Python's json.dumps, or as the keyword `x-guidance` says.

Two notations of calls are not JSON. In `python`, the root is an object that is written as keyword arguments,
`a=1, b="x"`, with Python's words for true, false and null. In `gemma`, keys have no quotes, and strings are written as
they are between quotes of their own, which may be a token: `{a:1,b:<|"|>x<|"|>}`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from midstream.grammar.json_schema.errors import SchemaError, UnenforceableError
from midstream.grammar.json_schema.grammar import NOTHING, Sequence, Terminal, expression, text

_SIMPLE = re.compile(r"[A-Za-z0-9 _.,:;/-]*")  # most strings
_encode = json.JSONEncoder(ensure_ascii=False).encode
_ANY = r"(.|\n)*"

_FLEXIBLE = r"[ \n\r\t]*"
_KNOWN = ("whitespace_flexible", "whitespace_pattern", "item_separator", "key_separator", "coerce_one_of", "lenient",
          "open_objects", "notation", "quote")  # fmt: skip
_NOTATIONS = ("json", "python", "gemma")
_PYTHON_WORDS = {True: "True", False: "False", None: "None"}
_BARE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ANY_BARE = "[A-Za-z_][A-Za-z0-9_]*"


@dataclass(frozen=True, slots=True)
class Style:
    """The text between values.

    Attributes:
        space: Expression of the white space around all of it; empty for none.
        coerces_one_of: Whether `oneOf` is treated as `anyOf`.
        is_lenient: Whether what cannot be enforced is ignored.
        opens_objects: Whether objects that list properties may have others, unless they say otherwise.
        notation: One of json, python and gemma.
        quote: The text around strings in the notation gemma, or the id of its token.
        is_call: Whether objects are written as keyword arguments.
    """

    item_separator: str = ", "
    key_separator: str = ": "
    space: str = ""
    coerces_one_of: bool = False
    is_lenient: bool = False
    opens_objects: bool = False
    notation: str = "json"
    quote: str | int = ""
    is_call: bool = False

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
        notation, quote = value.get("notation", "json"), value.get("quote", "")
        if notation not in _NOTATIONS or (notation == "gemma") != bool(quote) or not isinstance(quote, str | int):
            raise SchemaError(f"x-guidance: notation must be one of {', '.join(_NOTATIONS)}, the last with quote")
        return cls(
            str(value.get("item_separator", "," if space else ", ")),
            str(value.get("key_separator", ":" if space else ": ")),
            space,
            bool(value.get("coerce_one_of", False)),
            bool(value.get("lenient", False)),
            bool(value.get("open_objects", False)),
            notation,
            quote,
        )

    @property
    def of_root(self) -> Style:
        """How the root is written."""
        return replace(self, is_call=True, key_separator="=") if self.notation == "python" else self

    @property
    def of_values(self) -> Style:
        """How values within the root are written."""
        return replace(self, is_call=False, key_separator=": ") if self.is_call else self

    @property
    def has_quotes(self) -> bool:
        """Whether strings are written as they are, between quotes of their own."""
        return self.notation == "gemma"

    def word(self, value: bool | None) -> str:
        """Return the spelling of true, false or null."""
        return _PYTHON_WORDS[value] if self.notation == "python" else json.dumps(value)

    def around(self, sequence: Sequence) -> Sequence:
        """Return an object of which `sequence` are the members."""
        return sequence if self.is_call else (self.mark("{"), *sequence, self.mark("}"))

    def quoted(self, value: str | None) -> Sequence:
        """Return a text, or any text if None, between the notation's own quotes."""
        if isinstance(self.quote, int):
            mark = Terminal(f"<[{self.quote}]>")
            inner = Terminal(expression(_ANY)) if value is None else text(value)
            return (mark, inner, mark) if value != "" else (mark, mark)
        mark = text(self.quote)
        if value is not None:
            return (text(f"{self.quote}{value}{self.quote}"),) if self.quote not in value else (NOTHING,)
        without = f"{expression(_ANY)} & ~{expression(f'{_ANY}{re.escape(self.quote)}{_ANY}')}"
        return (Terminal(f"({mark.lark} ({without}) {mark.lark})"),)

    def _has_bare(self, name: str) -> bool:
        return (self.is_call or self.has_quotes) and _BARE.fullmatch(name) is not None

    def mark(self, character: str) -> Terminal:
        """Return the terminal of a bracket."""
        if not self.space:
            return text(character)
        mark = text(character).lark
        return Terminal(f"({mark} {self._space})" if character in "[{" else f"({self._space} {mark})")

    @property
    def between(self) -> Terminal:
        """The terminal between two items."""
        if not self.space:
            return text(self.item_separator)
        return Terminal(f"({self._space} {text(self.item_separator).lark} {self._space})")

    @property
    def _colon(self) -> str:
        if not self.space:
            return text(self.key_separator).lark
        return f"{self._space} {text(self.key_separator).lark} {self._space}"

    @property
    def _space(self) -> str:
        """The white space, which is no other than JSON's."""
        own = expression(self.space)
        return own if self.space == _FLEXIBLE else f"({own} & {expression(_FLEXIBLE)})"

    def key(self, name: str) -> Sequence:
        """Return a property's name, and what follows it."""
        if self._has_bare(name):
            return (text(name + self.key_separator),)
        if self.has_quotes:
            return (*self.quoted(name), text(self.key_separator))
        spelling = json_text(name)
        if not self.space:
            return (text(spelling + self.key_separator),)
        return (Terminal(f"({text(spelling).lark} {self._colon})"),)

    def keys(self, conditions: str, names: Iterable[str], *, are_restricted: bool) -> Terminal:
        """Return the terminal of names other than `names`, and of what follows them.

        Args:
            conditions: The conditions that their JSON texts meet, in Lark's syntax for terminals.
            are_restricted: Whether there are other conditions than that.

        Raises:
            UnenforceableError: Names without quotes cannot be restricted.
        """
        if not (self.is_call or self.has_quotes):
            return Terminal(f"({conditions}) {self._colon}")
        if are_restricted:
            raise UnenforceableError("restricted names of properties cannot be enforced in this format of calls")
        listed = "|".join(filter(_BARE.fullmatch, names))
        but = f" & ~{expression(listed)}" if listed else ""
        return Terminal(f"({expression(_ANY_BARE)}{but}) {self._colon}")


def json_text(value: str) -> str:
    """Return the JSON text of a string, with U+FFFD for lone surrogates."""
    if _SIMPLE.fullmatch(value):
        return f'"{value}"'
    return _encode(value).encode(errors="replace").decode()
