"""A grammar as rules, from which everything that can never be completed is removed before it is written as Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

_encode = json.JSONEncoder(ensure_ascii=False).encode
_PLAIN = re.compile(r"[A-Za-z0-9 _.,:;{}\[\]-]*")  # most texts
# More rules and terminals than these would take the library too long.
MAX_RULES = 30_000


@dataclass(frozen=True, slots=True)
class Terminal:
    """A text or an expression, in Lark's syntax for terminals."""

    lark: str


@dataclass(frozen=True, slots=True)
class Name:
    """A rule, by name."""

    name: str


@dataclass(frozen=True, slots=True)
class Many:
    """A sequence that occurs `least` to `most` times; None means any number."""

    items: Sequence
    least: int = 0
    most: int | None = None


# What matches one value.
Value = Terminal | Name
Symbol = Value | Many
Sequence = tuple[Symbol, ...]
Rules = dict[str, list[Sequence]]


# A terminal that no text matches; it is removed with all that contains it.
NOTHING = Terminal("")


def text(value: str) -> Terminal:
    """Return the terminal of one text."""
    if _PLAIN.fullmatch(value):
        return Terminal(f'"{value}"')
    # The library does not accept the control character DEL in a literal.
    return Terminal(_encode(value).replace("\x7f", "\\u007f"))


def expression(value: str) -> str:
    """Return an expression in Lark's syntax."""
    return f"/{value.replace('/', chr(92) + '/')}/"


def without_dead_ends(rules: Rules, root: str, is_empty: Callable[[Terminal], bool]) -> Rules:  # noqa: C901 (one loop after another)
    """Return the rules without sequences that no text completes, and without unused rules; none if there is no text.

    Args:
        is_empty: Returns whether no text matches a terminal.
    """
    empty: dict[str, bool] = {}

    def needed(items: Sequence) -> set[str] | None:
        """Return the rules that a sequence needs; None if a terminal of it matches no text."""
        names = set[str]()
        for item in items:
            if isinstance(item, Terminal):
                lark = item.lark
                if lark not in empty:
                    empty[lark] = is_empty(item)
                if empty[lark]:
                    return None
            elif isinstance(item, Name):
                names.add(item.name)
            elif item.least:
                inner = needed(item.items)
                if inner is None:
                    return None
                names |= inner
        return names

    needs = {name: [needed(sequence) for sequence in sequences] for name, sequences in rules.items()}
    # Each rule is looked at again whenever one that it uses turns out to be finite.
    users: dict[str, list[str]] = {}
    for name, options in needs.items():
        for used in {used for option in options if option for used in option}:
            users.setdefault(used, []).append(name)
    finite: set[str] = set()
    waiting = list(rules)
    while waiting:
        name = waiting.pop()
        if name not in finite and any(option is not None and option <= finite for option in needs[name]):
            finite.add(name)
            waiting += users.get(name, ())

    def trimmed(sequence: Sequence) -> Sequence:
        if not any(isinstance(item, Many) for item in sequence):
            return sequence
        return tuple(item for item in sequence if not isinstance(item, Many) or completes(item.items))

    def completes(items: Sequence) -> bool:
        names = needed(items)
        return names is not None and names <= finite

    kept: Rules = {}
    reached = [root] if root in finite else []
    while reached:
        name = reached.pop()
        if name in kept:
            continue
        kept[name] = [
            trimmed(sequence)
            for sequence, option in zip(rules[name], needs[name], strict=True)
            if option is not None and option <= finite
        ]
        reached += _names(item for sequence in kept[name] for item in sequence)
    return kept


def _names(items: Iterable[Symbol]) -> Iterator[str]:
    for item in items:
        if isinstance(item, Name):
            yield item.name
        elif isinstance(item, Many):
            yield from _names(item.items)


class Writer:
    """Writes rules in Lark's syntax."""

    def __init__(self, rules: Rules, prefix: str) -> None:
        """`prefix` begins all names; it must be lower case."""
        self._rules = rules
        self._prefix = prefix
        self._terminals: dict[str, str] = {}
        self._short: dict[str, str] = {}
        self._waiting: list[str] = []

    def lines(self, root: str) -> tuple[str, list[str]]:
        """Return the name of the root's rule, and the lines of all rules and terminals."""
        first, lines = self._name(root), []
        while self._waiting:
            name = self._waiting.pop()
            options = dict.fromkeys(self._sequence(sequence) for sequence in self._rules[name])
            lines.append(f"{self._short[name]}: {' | '.join(options)}")
        lines += [f"{name}: {lark}" for lark, name in self._terminals.items()]
        return first, lines

    def _name(self, rule: str) -> str:
        """Return the name of a rule, which is written later."""
        if rule not in self._short:
            self._short[rule] = f"{self._prefix}{len(self._short)}"
            self._waiting.append(rule)
        return self._short[rule]

    def _sequence(self, items: Sequence) -> str:
        return " ".join(map(self._symbol, items)) or '""'

    def _symbol(self, item: Symbol) -> str:
        if isinstance(item, Name):
            item = self._shortcut(item)
        if isinstance(item, Name):
            return self._name(item.name)
        if isinstance(item, Terminal):
            if item.lark.startswith(('"', "%json", "<[")):
                return item.lark
            return self._terminals.setdefault(item.lark, f"{self._prefix.upper()}T{len(self._terminals)}")
        if item.most == 0:
            return '""'  # the library refuses {0,0}
        inner = f"({self._sequence(item.items)})"
        if item.most is None:
            suffix = "*" if not item.least else "+" if item.least == 1 else f"{{{item.least},}}"
        else:
            suffix = "?" if (item.least, item.most) == (0, 1) else f"{{{item.least},{item.most}}}"
        return inner + suffix

    def _shortcut(self, rule: Name) -> Name | Terminal:
        """Return what is at the end of a chain of rules that only stand for another one, or for a terminal."""
        for _ in range(len(self._rules)):
            sequences = self._rules[rule.name]
            if len(sequences) != 1 or len(sequences[0]) != 1 or isinstance(sequences[0][0], Many):
                return rule
            item = sequences[0][0]
            if isinstance(item, Terminal):
                return item
            rule = item
        return rule
