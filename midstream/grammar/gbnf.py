"""Parses GBNF, the grammars of llama.cpp, and those of XGrammar, which differ in few respects.

In the latter, a sequence may go on in the next line, names may have dots, a lookahead `(= …)` only describes what
follows, and `TagDispatch` is free text with rules for what follows its tags. Tokens are written `<[5]>`, `<name>` and
`!<…>` in the former, and `Token(5)`, `ExcludeToken(5)` and `TokenTagDispatch` in the latter.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import permutations

_MAX_CHARACTER = 0x10FFFF
SURROGATES = (0xD800, 0xDFFF)
_ESCAPES = {
    "n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "e": "\x1b", "0": "\0",
}  # fmt: skip
_HEX_ESCAPES = {"x": 2, "u": 4, "U": 8}
_NAME, _DOTTED_NAME = re.compile(r"[\w-]+"), re.compile(r"[\w-]+(?:\.[\w-]+)+")
_RULE = re.compile(r"([\w-]+(?:\.[\w-]+)*)[ \t]*::=")
_DISPATCH, _TOKEN_DISPATCH = "TagDispatch", "TokenTagDispatch"
_TOKENS = {"Token": False, "ExcludeToken": True}
_TRUE = {"true": True, "false": False}
_TOKEN = re.compile(r"(!?)<(?:\[([0-9]{1,9})\]|([^<>\s]+))>")
_NUMBER = re.compile(r"[0-9]{1,9}")
_SPACE, _SPACE_AND_LINES = re.compile(r"(?:[ \t]|#[^\r\n]*)*"), re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")

# Inclusive ranges of code points, in ascending order.
Ranges = tuple[tuple[int, int], ...]


class GbnfError(ValueError):
    """The text is not a grammar."""


@dataclass(frozen=True, slots=True)
class Characters:
    """One character in any of the ranges."""

    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Literal:
    """Two or more characters."""

    text: str

    @property
    def characters(self) -> Sequence:
        return Sequence(tuple(Characters(((ord(c), ord(c)),)) for c in self.text))


@dataclass(frozen=True, slots=True)
class Tokens:
    """One token of those with these ids; with `is_excluded`, one of all others."""

    ids: tuple[int, ...]
    is_excluded: bool = False


@dataclass(frozen=True, slots=True)
class Reference:
    """A reference to another rule."""

    name: str


@dataclass(frozen=True, slots=True)
class Sequence:
    """The items, one after another."""

    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """One of the items."""

    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Repetition:
    """`least` to `most` repetitions of an item; `most` is None if their number is unlimited."""

    item: Node
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Free text in which each tag is followed by its rule; it is the whole of the rule `root`.

    Attributes:
        tags: Each tag with the name of its rule.
        loops: Whether free text follows a rule; otherwise, the text ends with it.
        excluded: Texts that the free text does not contain.
    """

    tags: tuple[tuple[str, str], ...]
    loops: bool
    excluded: tuple[str, ...]


Node = Characters | Literal | Tokens | Reference | Sequence | Choice | Repetition
EMPTY = Sequence(())


def parse_gbnf(text: str, tokens: Mapping[str, int]) -> tuple[dict[str, Node], Dispatch | None]:
    """Return the rules by name, and what takes the place of the rule `root` if it dispatches tags.

    Args:
        tokens: Ids of the tokens that can be named.

    Raises:
        GbnfError: The text is not a grammar; the message says where, or which rule is missing.
    """
    return _Parser(text, tokens).rules()


class _Parser:
    """Parses GBNF. Unlike in llama.cpp, the alternatives of a rule may also begin on new lines."""

    def __init__(self, text: str, tokens: Mapping[str, int]) -> None:
        self._text = text
        self._tokens = tokens
        self._at = 0
        self._names = {found[1] for found in _RULE.finditer(text)}
        self._dotted = {name for name in self._names if "." in name}

    def rules(self) -> tuple[dict[str, Node], Dispatch | None]:
        rules: dict[str, Node] = {}
        dispatch: Dispatch | None = None
        self._skip(_SPACE_AND_LINES)
        while self._at < len(self._text):
            name = self._dotted_name() or self._take(_NAME, "the name of a rule")
            if name in rules:
                raise GbnfError(f"the rule {name[:64]!r} is defined twice")
            self._skip(_SPACE)
            self._expect("::=")
            self._skip(_SPACE_AND_LINES)
            if name == "root" and self._text.startswith(f"{_DISPATCH}(", self._at):
                dispatch = self._dispatch()
                rules[name] = _analyzed(dispatch)
            else:
                rules[name] = self._choice(is_nested=False)
            self._skip(_SPACE_AND_LINES)
        if "root" not in rules:
            raise GbnfError("the grammar has no rule 'root'")
        for name in (name for node in rules.values() for name in references(node)):
            if name not in rules:
                raise GbnfError(f"the rule {name[:64]!r} is not defined")
        return rules, dispatch

    def _dotted_name(self) -> str:
        """Consume and return a name with dots, if there is a rule of this name; otherwise, a dot is any character."""
        found = _DOTTED_NAME.match(self._text, self._at)
        if found is None or found[0] not in self._dotted:
            return ""
        self._at = found.end()
        return found[0]

    def _dispatch(self) -> Dispatch:
        tags: list[tuple[str, str]] = []
        loops, excluded = True, tuple[str, ...]()
        self._at += len(_DISPATCH) + 1
        self._skip(_SPACE_AND_LINES)
        while self._peek() != ")":
            if self._peek() == "(":
                tags.append(self._tag())
            else:
                option = self._option()
                if option == "loop_after_dispatch":
                    loops = self._flag()
                elif option == "excludes":
                    excluded = self._texts()
                else:
                    raise GbnfError(f"{_DISPATCH} has the unknown argument {option[:64]!r}")
            self._skip(_SPACE_AND_LINES)
            if self._peek() == ",":
                self._at += 1
                self._skip(_SPACE_AND_LINES)
        self._expect(")")
        for one, other in permutations([tag for tag, _ in tags], 2):
            if other.startswith(one):
                raise GbnfError(f"the tag {other[:64]!r} begins with the tag {one[:64]!r}")
        return Dispatch(tuple(tags), loops, excluded)

    def _tag(self) -> tuple[str, str]:
        self._expect("(")
        self._skip(_SPACE_AND_LINES)
        tag = self._quoted()
        if not tag:
            raise self._error("a tag that is not empty")
        return tag, self._dispatched().name

    def _dispatched(self) -> Reference:
        """Read the rule after a tag, up to the end of the pair."""
        self._skip(_SPACE_AND_LINES)
        self._expect(",")
        self._skip(_SPACE_AND_LINES)
        rule = self._dotted_name() or self._take(_NAME, "the name of a rule")
        self._skip(_SPACE_AND_LINES)
        self._expect(")")
        return Reference(rule)

    def _option(self) -> str:
        """Read the name of an argument, and the sign after it."""
        option = self._take(_NAME, "a tag in parentheses, loop_after_dispatch or excludes")
        self._skip(_SPACE_AND_LINES)
        self._expect("=")
        self._skip(_SPACE_AND_LINES)
        return option

    def _flag(self) -> bool:
        value = self._take(_NAME, "true or false")
        if value not in _TRUE:
            raise self._error("true or false")
        return _TRUE[value]

    def _texts(self) -> tuple[str, ...]:
        """Read texts in parentheses."""
        found: list[str] = []
        self._expect("(")
        self._skip(_SPACE_AND_LINES)
        while self._peek() != ")":
            found.append(self._quoted())
            self._skip(_SPACE_AND_LINES)
            if self._peek() == ",":
                self._at += 1
                self._skip(_SPACE_AND_LINES)
        self._at += 1
        return tuple(filter(None, found))

    def _choice(self, *, is_nested: bool) -> Node:
        items = [self._sequence(is_nested=is_nested)]
        while True:
            end = self._at
            self._skip(_SPACE_AND_LINES)
            if self._peek() != "|":
                self._at = end
                return items[0] if len(items) == 1 else Choice(tuple(items))
            self._at += 1
            self._skip(_SPACE_AND_LINES)
            items.append(self._sequence(is_nested=is_nested))

    def _sequence(self, *, is_nested: bool) -> Node:
        items: list[Node] = []
        while (character := self._peek()) and character not in "|)":
            if self._text.startswith("(=", self._at):
                self._skip_lookahead()
            else:
                items.append(self._repeated(self._item()))
            end = self._at
            self._skip(_SPACE_AND_LINES)
            if not is_nested and _RULE.match(self._text, self._at):
                self._at = end  # the next rule
                break
        return items[0] if len(items) == 1 else Sequence(tuple(items))

    def _skip_lookahead(self) -> None:
        """Read a lookahead, which XGrammar does not enforce."""
        self._at += 2
        self._skip(_SPACE_AND_LINES)
        self._choice(is_nested=True)
        self._skip(_SPACE_AND_LINES)
        self._expect(")")

    def _item(self) -> Node:
        character = self._peek()
        if self._begins(_DISPATCH):
            raise GbnfError(f"{_DISPATCH} must be all of the rule 'root'")
        if self._begins(_TOKEN_DISPATCH):
            return self._token_dispatch()
        if character in ("<", "!") or any(map(self._begins, _TOKENS)):
            return self._token()
        if character == '"':
            return self._literal()
        if character == "[":
            return self._class()
        if character == ".":
            self._at += 1
            return Characters(((0, _MAX_CHARACTER),))
        if character == "(":
            self._at += 1
            self._skip(_SPACE_AND_LINES)
            item = self._choice(is_nested=True)
            self._skip(_SPACE_AND_LINES)
            self._expect(")")
            return item
        name = self._dotted_name() or self._take(_NAME, "a literal, a character class, a group or the name of a rule")
        return Reference(name)

    def _begins(self, name: str) -> bool:
        """Return whether arguments of `name` follow, which is no rule."""
        return self._text.startswith(f"{name}(", self._at) and name not in self._names

    def _token(self) -> Node:
        """Read a token in angle brackets, or a set of tokens."""
        for name, is_excluded in _TOKENS.items():
            if self._begins(name):
                self._at += len(name)
                ids = self._ids()
                if not ids:
                    raise GbnfError(f"{name} must have at least one id")
                return Tokens(ids, is_excluded)
        found = _TOKEN.match(self._text, self._at)
        if found is None:
            raise self._error("a token such as <[5]> or <name>")
        number = int(found[2]) if found[2] else self._tokens.get(f"<{found[3]}>")
        if number is None:
            raise GbnfError(f"<{found[3][:64]}> is not one of the tokenizer's added tokens; give its id, as in <[5]>")
        self._at = found.end()
        return Tokens((number,), bool(found[1]))

    def _ids(self) -> tuple[int, ...]:
        """Read ids in parentheses."""
        found: list[int] = []
        self._expect("(")
        self._skip(_SPACE_AND_LINES)
        while self._peek() != ")":
            found.append(int(self._take(_NUMBER, "the id of a token")))
            self._skip(_SPACE_AND_LINES)
            if self._peek() != ")":
                self._expect(",")
                self._skip(_SPACE_AND_LINES)
        self._at += 1
        return tuple(dict.fromkeys(found))

    def _token_dispatch(self) -> Node:
        """Read free tokens in which a rule follows each token that is listed."""
        calls: list[Node] = []
        ids: list[int] = []
        loops, excluded = True, tuple[int, ...]()
        self._at += len(_TOKEN_DISPATCH) + 1
        self._skip(_SPACE_AND_LINES)
        while self._peek() != ")":
            if self._peek() == "(":
                self._at += 1
                self._skip(_SPACE_AND_LINES)
                ids.append(int(self._take(_NUMBER, "the id of a token")))
                calls.append(Sequence((Tokens((ids[-1],)), self._dispatched())))
            elif (option := self._option()) == "loop_after_dispatch":
                loops = self._flag()
            elif option == "excludes":
                excluded = self._ids()
            else:
                raise GbnfError(f"{_TOKEN_DISPATCH} has the unknown argument {option[:64]!r}")
            self._skip(_SPACE_AND_LINES)
            if self._peek() == ",":
                self._at += 1
                self._skip(_SPACE_AND_LINES)
        self._at += 1
        if len(set(ids)) < len(ids) or set(ids) & set(excluded):
            raise GbnfError(f"{_TOKEN_DISPATCH} lists a token twice")
        free = Repetition(Tokens((*ids, *excluded), is_excluded=True), 0, None)
        if not calls:
            return free
        call = Choice(tuple(calls))
        return Sequence((free, Repetition(Sequence((call, free)) if loops else call, 0, None if loops else 1)))

    def _repeated(self, item: Node) -> Node:
        while True:
            self._skip(_SPACE)
            character = self._peek()
            if character and character in "*+?":
                self._at += 1
                item = Repetition(item, int(character == "+"), 1 if character == "?" else None)
            elif character == "{":
                self._at += 1
                item = Repetition(item, *self._bounds())
            else:
                return item

    def _bounds(self) -> tuple[int, int | None]:
        self._skip(_SPACE_AND_LINES)
        least = int(self._take(_NUMBER, "a number"))
        most: int | None = least
        self._skip(_SPACE_AND_LINES)
        if self._peek() == ",":
            self._at += 1
            self._skip(_SPACE_AND_LINES)
            most = None if self._peek() == "}" else int(self._take(_NUMBER, "a number or '}'"))
            self._skip(_SPACE_AND_LINES)
        self._expect("}")
        if most is not None and most < least:
            raise self._error("a maximum that is not below the minimum")
        return least, most

    def _literal(self) -> Node:
        text = self._quoted()
        if len(text) == 1:
            return Characters(((ord(text), ord(text)),))
        return Literal(text) if text else EMPTY

    def _quoted(self) -> str:
        """Read a text in quotes."""
        self._expect('"')
        characters: list[str] = []
        while self._peek() != '"':
            characters.append(self._character())
        self._at += 1
        return "".join(characters)

    def _class(self) -> Node:
        self._at += 1
        is_negated = self._peek() == "^"
        self._at += is_negated
        ranges: list[tuple[int, int]] = []
        while self._peek() != "]":
            first = last = ord(self._character())
            if self._peek() == "-" and self._text[self._at + 1 : self._at + 2] != "]":
                self._at += 1
                last = ord(self._character())
                if last < first:
                    raise self._error("a range in ascending order")
            ranges.append((first, last))
        self._at += 1
        found = _united(ranges)
        return Characters(_complement(found) if is_negated else found)

    def _character(self) -> str:
        """Read one character, which may be escaped."""
        character = self._peek()
        if not character:
            raise self._error("the end of a literal or of a character class")
        self._at += 1
        if character != "\\":
            return character
        kind = self._peek()
        self._at += 1
        if kind in _HEX_ESCAPES:
            digits = self._text[self._at : self._at + _HEX_ESCAPES[kind]]
            if len(digits) < _HEX_ESCAPES[kind] or not re.fullmatch("[0-9a-fA-F]+", digits):
                raise self._error(f"{_HEX_ESCAPES[kind]} hexadecimal digits")
            number = int(digits, 16)
            if number > _MAX_CHARACTER or SURROGATES[0] <= number <= SURROGATES[1]:
                raise self._error("the code of a character")
            self._at += len(digits)
            return chr(number)
        if kind in _ESCAPES:
            return _ESCAPES[kind]
        if kind and kind.isascii() and kind.isprintable() and not kind.isalnum():
            return kind
        self._at -= 1
        raise self._error('an escape sequence such as \\n, \\" or \\x41')

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _skip(self, pattern: re.Pattern[str]) -> None:
        found = pattern.match(self._text, self._at)
        self._at = found.end() if found else self._at

    def _take(self, pattern: re.Pattern[str], wanted: str) -> str:
        found = pattern.match(self._text, self._at)
        if found is None:
            raise self._error(wanted)
        self._at = found.end()
        return found[0]

    def _expect(self, text: str) -> None:
        if not self._text.startswith(text, self._at):
            raise self._error(repr(text))
        self._at += len(text)

    def _error(self, wanted: str) -> GbnfError:
        line = self._text.count("\n", 0, self._at) + 1
        column = self._at - self._text.rfind("\n", 0, self._at)
        return GbnfError(f"line {line}, column {column}: expected {wanted}")


def _analyzed(dispatch: Dispatch) -> Node:
    """Return a node of which the texts follow each other as in dispatched tags, with any free text."""
    free = Repetition(Characters(((0, _MAX_CHARACTER),)), 0, None)
    calls = tuple(Sequence((Literal(tag), Reference(rule))) for tag, rule in dispatch.tags)
    if not calls:
        return free
    call = Choice(calls) if len(calls) > 1 else calls[0]
    return Sequence((free, Repetition(Sequence((call, free) if dispatch.loops else (call,)), 0, None)))


def children(node: Node) -> tuple[Node, ...]:
    if isinstance(node, Sequence | Choice):
        return node.items
    return (node.item,) if isinstance(node, Repetition) else ()


def with_parts(node: Node) -> Iterator[Node]:
    """Yield a node and all nodes in it."""
    waiting = [node]
    while waiting:
        found = waiting.pop()
        yield found
        waiting += reversed(children(found))


def references(node: Node) -> Iterator[str]:
    """Yield the names of the rules that a node refers to."""
    return (found.name for found in with_parts(node) if isinstance(found, Reference))


def _united(ranges: list[tuple[int, int]]) -> Ranges:
    """Return ranges in ascending order that neither overlap nor touch."""
    found: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if found and first <= found[-1][1] + 1:
            found[-1] = found[-1][0], max(found[-1][1], last)
        else:
            found.append((first, last))
    return tuple(found)


def _complement(ranges: Ranges) -> Ranges:
    edges = [-1, *(edge for item in ranges for edge in item), _MAX_CHARACTER + 1]
    return tuple((low + 1, high - 1) for low, high in zip(edges[::2], edges[1::2], strict=True) if low + 1 < high)
