"""Converts GBNF to llguidance's Lark dialect.

llguidance splits text into lexemes and takes the longest match of the lexemes that are possible, whereas a GBNF rule
may end anywhere. A rule without recursion, a literal, or repeated characters become one lexeme, which is fast, unless
a match of that lexeme could go on into text that may follow it, or that may follow another lexeme with the same
beginning. Such lexemes are split further, ultimately into single characters, for which a longer match is impossible.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from midstream.grammar.gbnf import (
    EMPTY,
    SURROGATES,
    Characters,
    Choice,
    Dispatch,
    GbnfError,
    Literal,
    Node,
    Ranges,
    Reference,
    Repetition,
    Sequence,
    Tokens,
    children,
    parse_gbnf,
    references,
    with_parts,
)

# Larger and deeper rules are not made lexemes, and larger repetitions are analyzed as if they were unlimited.
_MAX_SIZE, _MAX_DEPTH, _MAX_COPIES = 2000, 60, 64
_LARK = re.compile(r"(?m)^\s*(?:%llguidance\b|start\s*:(?!:=))")
_ROOT = Reference("root")


def to_lark(text: str, tokens: Mapping[str, int]) -> str:
    """Return a grammar in Lark syntax; one that is already Lark is unchanged.

    Args:
        tokens: Ids of the tokens that can be named.

    Raises:
        GbnfError: The text is neither GBNF nor Lark.
    """
    if _LARK.search(text):
        return text
    return _Converter(*parse_gbnf(text, tokens)).lark()


@dataclass(frozen=True, slots=True)
class _Lexeme:
    """Properties of a lexeme's matches; sets of characters are bit masks.

    Attributes:
        first: The characters with which a match can begin.
        inner: The characters that can follow others in a match.
        extensions: The characters that can follow a complete match in a longer match, or in the beginning of one.
        can_be_empty: Whether it matches the empty text.
        repeated: If the lexeme matches any number of characters of one class, from zero or one on, this class;
            otherwise None.
    """

    first: int
    inner: int
    extensions: int
    can_be_empty: bool
    repeated: int | None


class _Converter:
    def __init__(self, rules: Mapping[str, Node], dispatch: Dispatch | None) -> None:
        self._rules = rules
        self._dispatch = dispatch
        self._alphabet = _Alphabet(rules)
        self._named = {
            name
            for name, (size, depth) in _sizes(rules).items()
            if size <= _MAX_SIZE and depth <= _MAX_DEPTH and not (dispatch and name == "root")
        }
        parts = (part for rule in rules.values() for part in with_parts(rule))
        self._token_ids = dict.fromkeys(number for part in parts if isinstance(part, Tokens) for number in part.ids)
        self._split: set[Node] = set()
        self._known: dict[Node, _Lexeme] = {}
        self._firsts: dict[int, int] = {}
        self._units: list[Node] = []
        self._numbers: dict[Node, int] = {}

    def lark(self) -> str:
        """Return the grammar in Lark syntax."""
        while conflicts := self._conflicts(follow := self._follow()):
            self._split |= conflicts
            self._named -= {node.name for node in conflicts if isinstance(node, Reference)}
        self._check_tokens(follow)
        names = {name: f"r{number}" for number, name in enumerate(self._rules)}
        lines = ["%llguidance {}"]
        if self._dispatch is None:
            lines.append(f"start: {self._terms(_ROOT, names)}")
        else:
            lines += self._dispatching(self._dispatch, names)
        for name in self._used_rules():
            if self._dispatch is not None and name == "root":
                continue
            if name in self._named:
                lines.append(f"{names[name].upper()}: /{self._regex(self._rules[name])}/")
            else:
                lines.append(f"{names[name]}: {self._terms(self._rules[name], names)}")
        return "\n".join(lines)

    def _dispatching(self, dispatch: Dispatch, names: Mapping[str, str]) -> list[str]:
        """Return the rules of free text with tags. A lazy rule ends where its text first matches."""
        marks = [self._regex(Literal(text)) for text in (*(tag for tag, _ in dispatch.tags), *dispatch.excluded)]
        but = rf" & ~/(.|\n)*({'|'.join(marks)})(.|\n)*/" if marks else ""
        calls = [f"tag{i} {self._terms(Reference(rule), names)}" for i, (_, rule) in enumerate(dispatch.tags)]
        start = f"({' | '.join(calls)})* FREE" if dispatch.loops and calls else " | ".join(["FREE", *calls])
        tags = [f"tag{i}[lazy]: FREE /{self._regex(Literal(tag))}/" for i, (tag, _) in enumerate(dispatch.tags)]
        return [f"start: {start}", *tags, rf"FREE: /(.|\n)*/{but}"]

    def is_unit(self, node: Node) -> bool:
        """Return whether a node is one lexeme."""
        if isinstance(node, Reference):
            return node.name in self._named
        if isinstance(node, Repetition):
            return isinstance(node.item, Characters) and node.most is None and node not in self._split
        return isinstance(node, Characters | Tokens) or (isinstance(node, Literal) and node not in self._split)

    def lexeme(self, node: Node) -> _Lexeme:
        """Return the properties of a unit's matches."""
        found = self._known.get(node)
        if found is None and isinstance(node, Literal):
            first = self._alphabet.masks(node.text[0])[0]
            inner = _union(self._alphabet.masks("".join(set(node.text[1:]))))
            found = self._known[node] = _Lexeme(first, inner, extensions=0, can_be_empty=False, repeated=None)
        elif found is None and isinstance(node, Tokens):
            # Any text may be a token of those that are not excluded; no text is one of the others.
            first = self._alphabet.all if node.is_excluded else 0
            found = self._known[node] = _Lexeme(first, inner=0, extensions=0, can_be_empty=False, repeated=None)
        elif found is None:
            found = self._known[node] = _Automaton(self._rules, self._alphabet, node).lexeme()
        return found

    def unit_mask(self, node: Node) -> int:
        """Return a mask with only the bit of this unit set."""
        number = self._numbers.setdefault(node, len(self._units))
        if number == len(self._units):
            self._units.append(node)
        return 1 << number

    def units(self, mask: int) -> Iterator[Node]:
        """Yield the units in a mask of units."""
        return (self._units[number] for number in _bits(mask))

    def _used_rules(self) -> list[str]:
        """Return the rules that the grammar needs, beginning with `root`; lexemes contain the rules that they use."""
        used, waiting = {"root": None}, ["root"]
        while waiting:
            name = waiting.pop()
            for other in references(self._rules[name]) if name not in self._named else ():
                if other not in used:
                    used[other] = None
                    waiting.append(other)
        return list(used)

    def _follow(self) -> _Follow:
        return _Follow(self, {name: self._rules[name] for name in self._used_rules() if name not in self._named})

    def _conflicts(self, follow: _Follow) -> set[Node]:
        """Return the lexemes to split: those whose matches could go on into text that follows the end of a lexeme."""
        # Literals and other units by first character. Since there may be many literals, they are counted by the units
        # that follow them.
        literals: dict[int, Counter[int]] = defaultdict(Counter)
        others: dict[int, int] = defaultdict(int)
        for node, following in follow.units.items():
            for bit in _bits(self.lexeme(node).first):
                if isinstance(node, Literal):
                    literals[bit][following] += 1
                else:
                    others[bit] |= self.unit_mask(node)
        found: set[Node] = set()
        for node, following in follow.units.items():
            lexeme = self.lexeme(node)
            if not lexeme.inner:
                continue
            bits = list(_bits(lexeme.first))
            alike = _union(others[bit] for bit in bits) & follow.neighbors[node]
            num_own = {following: int(isinstance(node, Literal))}
            if (
                (node in follow.repeated and lexeme.extensions & lexeme.first)
                or any(self._hides_end(node, other, follow.units[other]) for other in self.units(alike))
                or any(
                    count > num_own.get(after, 0) and self._first_of(after) & lexeme.inner
                    for bit in bits
                    for after, count in literals[bit].items()
                )
            ):
                found.add(node)
        return found

    def _first_of(self, units: int) -> int:
        """Return the characters with which the units in a mask begin."""
        if units not in self._firsts:
            self._firsts[units] = _union(self.lexeme(other).first for other in self.units(units))
        return self._firsts[units]

    def _hides_end(self, node: Node, ended: Node, following: int) -> bool:
        """Return whether a match of `node` could go on where a unit that follows the lexeme `ended` begins.

        Args:
            node: A lexeme that can begin where `ended` can begin, or `ended` itself.
            following: The units that can follow `ended`, as a mask.
        """
        characters = self.lexeme(node).extensions if node == ended else self.lexeme(node).inner
        return bool(self._first_of(following) & characters) and any(
            self.lexeme(other).first & characters & ~self._shared(ended, other, node) for other in self.units(following)
        )

    def _shared(self, one: Node, other: Node, continued: Node) -> int:
        """Return the characters with which `other` can begin after `one`, but which `continued` may match instead.

        White space that follows white space is an example. The same is assumed of any lexeme that may follow itself,
        except directly in a sequence, because most such grammars would be ambiguous otherwise.
        """
        left, right = self.lexeme(one), self.lexeme(other)
        is_loop = left.repeated is not None and right.repeated is not None
        if one == other or (is_loop and right.can_be_empty and not (right.repeated or 0) & ~(left.repeated or 0)):
            return left.extensions
        if is_loop and left.can_be_empty and not (left.repeated or 0) & ~(right.repeated or 0):
            return -1 if continued in (one, other) else 0
        return 0

    def _terms(self, node: Node, names: Mapping[str, str]) -> str:
        """Return a node as part of a Lark rule."""
        if isinstance(node, Reference):
            return names[node.name].upper() if node.name in self._named else names[node.name]
        if isinstance(node, Tokens):
            return self._tokens(node)
        if self.is_unit(node):
            return f"/{self._regex(node)}/"
        if isinstance(node, Literal):
            return self._terms(node.characters, names)
        if isinstance(node, Repetition):
            return f"({self._terms(node.item, names)}){_bounds(node)}" if node.most != 0 else '""'
        joint = " | " if isinstance(node, Choice) else " "
        return f"({joint.join(self._terms(item, names) for item in children(node))})" if children(node) else '""'

    def _tokens(self, node: Tokens) -> str:
        """Return the terms of a set of tokens.

        Of terms that contain the same token, the library tries only one, so each token that the grammar names has a
        term of its own.
        """
        if not node.is_excluded:
            return f"({' | '.join(f'<[{number}]>' for number in node.ids)})"
        named = ",".join(map(str, sorted(self._token_ids)))
        options = [f"<[^{named}]>" if named else "<[*]>", *(f"<[{n}]>" for n in self._token_ids if n not in node.ids)]
        return f"({' | '.join(options)})"

    def _check_tokens(self, follow: _Follow) -> None:
        """Raise GbnfError if a token may be one of a set or text, of which the library tries only the former."""
        for node, neighbors in follow.neighbors.items():
            if isinstance(node, Tokens) and node.is_excluded:
                texts = (other for other in self.units(neighbors) if not isinstance(other, Tokens))
                if next(texts, None) is not None:
                    raise GbnfError("where all tokens but some may follow, text may not: it consists of tokens, too")

    def _regex(self, node: Node) -> str:
        """Return a node without recursion as a regular expression."""
        if isinstance(node, Reference):
            return self._regex(self._rules[node.name])
        if isinstance(node, Literal):
            return "".join(f"\\x{{{ord(c):x}}}" for c in node.text)
        if isinstance(node, Characters):
            return _class(node.ranges)
        if isinstance(node, Repetition):
            return f"(?:{self._regex(node.item)}){_bounds(node)}" if node.most != 0 else ""
        joint = "|" if isinstance(node, Choice) else ""
        return f"(?:{joint.join(map(self._regex, children(node)))})"


class _Alphabet:
    """Bit masks of sets of characters; characters that occur in exactly the same classes and literals share one bit.

    Attributes:
        all: The mask of all characters.
    """

    def __init__(self, rules: Mapping[str, Node]) -> None:
        self._masks: dict[Ranges, int] = {}
        for node in (part for rule in rules.values() for part in with_parts(rule)):
            if isinstance(node, Characters):
                self._masks[node.ranges] = 0
            elif isinstance(node, Literal):
                self._masks |= {((ord(c), ord(c)),): 0 for c in set(node.text)}
        # For each character at which ranges begin or end, the sets to which these belong, as a bit mask.
        changes: dict[int, int] = {}
        for number, ranges in enumerate(self._masks):
            for edge in (edge for first, last in ranges for edge in (first, last + 1)):
                changes[edge] = changes.get(edge, 0) ^ (1 << number)
        found, current = set[int](), 0
        for edge in sorted(changes):
            current ^= changes[edge]
            found.add(current)
        self.all = (1 << len(found)) - 1
        names = list(self._masks)
        for bit, sets in enumerate(found):
            for number in _bits(sets):
                self._masks[names[number]] |= 1 << bit

    def mask(self, node: Characters) -> int:
        return self._masks[node.ranges]

    def masks(self, text: str) -> list[int]:
        """Return the mask of each character."""
        return [self._masks[((ord(c), ord(c)),)] for c in text]


class _Follow:
    """The units that may follow each unit of a grammar's rules.

    Attributes:
        units: The units that may follow each unit, as bit masks.
        repeated: The units that occur twice in a row in a sequence or repetition.
        neighbors: For each unit, the units that can begin where it can begin, including itself, as a bit mask.
    """

    def __init__(self, converter: _Converter, rules: Mapping[str, Node]) -> None:
        self._converter = converter
        self.units: dict[Node, int] = {}
        self.repeated: set[Node] = set()
        # For each rule, the units with which it can begin, and whether it can be empty.
        self._edges = dict.fromkeys(rules, (0, False))
        while self._changes_edges(rules):
            pass
        self._after = dict.fromkeys(rules, 0)
        before: dict[str, int] | None = None
        while before != self._after:
            before = dict(self._after)
            for name, node in rules.items():
                self._visit(node, self._after[name])
        if not rules:
            self._visit(_ROOT, 0)
        self.neighbors = dict.fromkeys(self.units, 0)
        self._find_neighbors()

    def _find_neighbors(self) -> None:
        """Set `neighbors`. If two lexemes may match the same text, the units that follow one may begin where those that
        follow the other begin.
        """
        literals = _union(self._converter.unit_mask(node) for node in self.units if isinstance(node, Literal))
        masks = {self._edge(_ROOT)[0], *self.units.values()}
        waiting = [(mask, mask) for mask in masks]
        while waiting:
            some, others = waiting.pop()
            for node in self._converter.units(some):
                is_new = others & ~self.neighbors[node]
                self.neighbors[node] |= others
                # No two literals have the same text, and a literal is longer than a character.
                if isinstance(node, Literal):
                    continue
                for other in self._converter.units(is_new & ~(literals if isinstance(node, Characters) else 0)):
                    if other != node and self._converter.lexeme(node).first & self._converter.lexeme(other).first:
                        waiting.append((self.units[node], self.units[other]))
                        waiting.append((self.units[other], self.units[node]))

    def _changes_edges(self, rules: Mapping[str, Node]) -> bool:
        is_new = False
        for name in list(rules)[::-1]:
            found = self._edge(rules[name])
            is_new |= found != self._edges[name]
            self._edges[name] = found
        return is_new

    def _edge(self, node: Node) -> tuple[int, bool]:
        """Return the units with which a node can begin, and whether it can be empty."""
        if self._converter.is_unit(node):
            return self._converter.unit_mask(node), self._converter.lexeme(node).can_be_empty
        if isinstance(node, Reference):
            return self._edges[node.name]
        if isinstance(node, Literal):
            return self._edge(node.characters)
        if isinstance(node, Repetition):
            first, can_be_empty = self._edge(node.item)
            return (0, True) if node.most == 0 else (first, can_be_empty or node.least == 0)
        first = 0
        for item in children(node):
            part, can_be_empty = self._edge(item)
            first |= part
            if isinstance(node, Sequence) and not can_be_empty:
                return first, False
        return first, isinstance(node, Sequence) or any(self._edge(item)[1] for item in children(node))

    def _visit(self, node: Node, after: int) -> None:
        """Record which units can follow each unit in a node, given the units that can follow the node."""
        if self._converter.is_unit(node):
            self.units[node] = self.units.get(node, 0) | after
        elif isinstance(node, Reference):
            self._after[node.name] |= after
        elif isinstance(node, Literal):
            self._visit(node.characters, after)
        elif isinstance(node, Sequence):
            self._visit_sequence(node, after)
        elif isinstance(node, Choice):
            for item in node.items:
                self._visit(item, after)
        elif isinstance(node, Repetition):
            if node.least > 1:
                self._note_pair(node.item, node.item)
            self._visit(node.item, after | (self._edge(node.item)[0] if node.most != 1 else 0))

    def _visit_sequence(self, node: Sequence, after: int) -> None:
        next_item: Node | None = None
        for item in reversed(node.items):
            self._visit(item, after)
            self._note_pair(item, next_item)
            first, can_be_empty = self._edge(item)
            after = first | (after if can_be_empty else 0)
            next_item = item

    def _note_pair(self, item: Node, next_item: Node | None) -> None:
        if item == next_item:
            units = self._converter.units(self._edge(item)[0])
            self.repeated |= {unit for unit in units if not self._converter.lexeme(unit).can_be_empty}


class _Automaton:
    """Glushkov's automaton of a lexeme: its states are the positions of characters in the expression."""

    def __init__(self, rules: Mapping[str, Node], alphabet: _Alphabet, node: Node) -> None:
        self._rules = rules
        self._alphabet = alphabet
        self._masks: list[int] = []
        self._next: list[set[int]] = []
        self._first, self._last, self._can_be_empty = self._build(node)
        self._repeated = self._repeated_characters(node)

    def lexeme(self) -> _Lexeme:
        """Return the properties of its matches."""
        inner = _union(map(self._union, self._next))
        extensions = _union(self._union(self._next[position]) for position in self._last)
        if not all(map(self._are_disjoint, [self._first, *self._next])):
            # The same text may lead to several positions, and the match can be continued from each of them.
            extensions = inner
        return _Lexeme(self._union(self._first), inner, extensions, self._can_be_empty, self._repeated)

    def _repeated_characters(self, node: Node) -> int | None:
        while isinstance(node, Reference):
            node = self._rules[node.name]
        is_loop = isinstance(node, Repetition) and node.most is None and node.least <= 1
        if is_loop and isinstance(node, Repetition) and isinstance(node.item, Characters):
            return self._alphabet.mask(node.item)
        return None

    def _union(self, positions: set[int]) -> int:
        return _union(self._masks[position] for position in positions)

    def _are_disjoint(self, positions: set[int]) -> bool:
        return sum(self._masks[position].bit_count() for position in positions) == self._union(positions).bit_count()

    def _build(self, node: Node) -> tuple[set[int], set[int], bool]:
        """Add a node's positions; return its first and last ones, and whether it can be empty."""
        if isinstance(node, Reference):
            return self._build(self._rules[node.name])
        if isinstance(node, Literal):
            return self._build(node.characters)
        if isinstance(node, Characters):
            self._masks.append(self._alphabet.mask(node))
            self._next.append(set())
            positions = {len(self._masks) - 1}
            return positions, positions, False
        if isinstance(node, Repetition):
            return self._build_repetition(node)
        firsts, lasts, can_be_empty = set[int](), set[int](), isinstance(node, Sequence)
        for item in children(node):
            first, last, is_empty = self._build(item)
            if isinstance(node, Choice):
                firsts |= first
                lasts |= last
                can_be_empty = can_be_empty or is_empty
                continue
            for position in lasts:
                self._next[position] |= first
            firsts |= first if can_be_empty else set()
            lasts = lasts | last if is_empty else last
            can_be_empty = can_be_empty and is_empty
        return firsts, lasts, can_be_empty

    def _build_repetition(self, node: Repetition) -> tuple[set[int], set[int], bool]:
        if node.most == 0:
            return set(), set(), True
        num_copies = node.least if node.most is None else node.most
        if num_copies > 1 and num_copies * self._num_positions(node.item) <= _MAX_COPIES:
            # x{1,3} is x(x(x)?)?, and x{2,} is xxx*.
            rest: Node = EMPTY if node.most is not None else Repetition(node.item, 0, None)
            for number in reversed(range(num_copies)):
                rest = Sequence((node.item, rest))
                rest = rest if number < node.least else Repetition(rest, 0, 1)
            return self._build(rest)
        first, last, can_be_empty = self._build(node.item)
        if node.most != 1:
            for position in last:
                self._next[position] |= first
        return first, last, can_be_empty or node.least == 0

    def _num_positions(self, node: Node) -> int:
        if isinstance(node, Reference):
            return self._num_positions(self._rules[node.name])
        if isinstance(node, Literal):
            return len(node.text)
        num_copies = max(node.least, node.most or 1) if isinstance(node, Repetition) else 1
        return num_copies * sum(self._num_positions(item) for item in children(node)) or 1


def _sizes(rules: Mapping[str, Node]) -> dict[str, tuple[int, int]]:
    """Return the size and depth of each rule without recursion, with its references expanded."""
    sizes: dict[str, tuple[int, int]] = {}
    missing = {name: set(references(node)) for name, node in rules.items()}
    users: dict[str, list[str]] = defaultdict(list)
    for name, others in missing.items():
        for other in others:
            users[other].append(name)
    waiting = [name for name, others in missing.items() if not others]
    while waiting:
        name = waiting.pop()
        sizes[name] = _size(rules[name], sizes)
        for user in users[name]:
            missing[user].discard(name)
            if not missing[user]:
                waiting.append(user)
    return sizes


def _size(node: Node, sizes: Mapping[str, tuple[int, int]]) -> tuple[int, int]:
    """Return the number of characters and operators of a node, and their depth, given those of other rules."""
    if isinstance(node, Reference):
        size, depth = sizes[node.name]
        return size, depth + 1
    if isinstance(node, Literal):
        return len(node.text), 1
    if isinstance(node, Tokens):
        return _MAX_SIZE + 1, 1  # no lexeme contains tokens
    parts = [_size(item, sizes) for item in children(node)]
    return 1 + sum(size for size, _ in parts), 1 + max((depth for _, depth in parts), default=0)


def _class(ranges: Ranges) -> str:
    """Return a regular expression for one character of these ranges, without surrogates."""
    kept = [part for item in ranges for part in _without_surrogates(*item)]
    if not kept:
        raise GbnfError("a character class has no characters")
    if len(kept) == 1 and kept[0][0] == kept[0][1]:
        return f"\\x{{{kept[0][0]:x}}}"
    return "[" + "".join(f"\\x{{{first:x}}}-\\x{{{last:x}}}" for first, last in kept) + "]"


def _without_surrogates(first: int, last: int) -> Iterator[tuple[int, int]]:
    for low, high in ((first, min(last, SURROGATES[0] - 1)), (max(first, SURROGATES[1] + 1), last)):
        if low <= high:
            yield low, high


def _bounds(node: Repetition) -> str:
    if node.most is None:
        return {0: "*", 1: "+"}.get(node.least, f"{{{node.least},}}")
    return "?" if (node.least, node.most) == (0, 1) else f"{{{node.least},{node.most}}}"


def _union(masks: Iterable[int]) -> int:
    found = 0
    for mask in masks:
        found |= mask
    return found


def _bits(mask: int) -> Iterator[int]:
    """Yield the numbers of the bits that are set."""
    while mask:
        bit = mask & -mask
        yield bit.bit_length() - 1
        mask ^= bit
