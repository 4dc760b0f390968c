"""Finds stop words in text that arrives in pieces.

The match that ends first wins; among matches that end at the same position, the longest one wins. This depends only on
the text, not on how it is split into tokens or chunks. An Aho-Corasick automaton has a constant cost per character, and
its state determines exactly how much text to hold back: the longest suffix that is a prefix of a stop word. Its nodes
are created when the text first reaches them, so the cost of a request depends on its text, not on the number and length
of its stop words.
"""

from __future__ import annotations

import functools
from bisect import bisect_left, bisect_right
from collections.abc import Sequence


class _Node:
    """A node of the automaton: a prefix of one or more stop words.

    Attributes:
        held: Length of its longest suffix that may still become a stop word.
        children: Next character -> node; None if the node has not been created.
        word: The longest stop word that ends here; empty if there is none.
        fallback: Node of its longest proper suffix that is a prefix of a stop word; the root's is the root.
    """

    __slots__ = ("children", "depth", "fallback", "held", "word", "words")

    def __init__(self, words: Sequence[str], depth: int, fallback: _Node | None) -> None:
        """Create the node of the first `depth` characters of `words`, which are sorted."""
        self.words = words
        self.depth = depth
        self.fallback = fallback or self
        self.children: dict[str, _Node | None] = dict.fromkeys(word[depth] for word in words if len(word) > depth)
        own = words[0] if len(words[0]) == depth else ""
        self.word: str = own or (fallback.word if fallback else "")
        self.held: int = depth if self.children else self.fallback.held

    def next(self, character: str) -> _Node:
        """Return the next node: the longest suffix of this prefix plus `character` that is a prefix of a stop word."""
        node = self
        while character not in node.children:
            if node is node.fallback:
                return node
            node = node.fallback
        return node.children[character] or node._create(character)

    def _create(self, character: str) -> _Node:
        depth = self.depth
        low = bisect_left(self.words, character, key=lambda word: word[depth : depth + 1])
        high = bisect_right(self.words, character, low, key=lambda word: word[depth : depth + 1])
        fallback = self if self is self.fallback else self.fallback.next(character)
        child = self.children[character] = _Node(self.words[low:high], depth + 1, fallback)
        return child


class StopWords:
    """The automaton for a set of words, shared by scanners."""

    def __init__(self, words: tuple[str, ...]) -> None:
        """Create the automaton; no word may be empty."""
        self.root = _Node(sorted(words), 0, None)
        self.first_characters = frozenset(self.root.children)


@functools.lru_cache(maxsize=256)
def stop_words(words: tuple[str, ...]) -> StopWords:
    """Return the automaton for `words`; recent ones are cached."""
    return StopWords(words)


class StopWordScanner:
    """Scans the text of one sequence."""

    __slots__ = ("_held", "_keep_match", "_node", "_words", "match")

    def __init__(self, words: StopWords, *, keep_match: bool) -> None:
        """With `keep_match`, the returned text includes the matched word; otherwise the text ends before the word."""
        self._words = words
        self._node = words.root
        self._keep_match = keep_match
        self._held = ""
        self.match: str | None = None

    def scan(self, text: str, *, can_stop: bool = True) -> str:
        """Scan the next piece of text, and return the text that is final now.

        Args:
            can_stop: If False, a match that ends in this piece is ignored.

        Precondition: `match` is None.
        """
        node = self._node
        if node is self._words.root and self._words.first_characters.isdisjoint(text):
            return text
        text = self._held + text
        for end in range(len(self._held), len(text)):
            node = node.next(text[end])
            word = node.word
            if word and can_stop:
                self.match = word
                self._held = ""
                return text[: end + 1 if self._keep_match else end + 1 - len(word)]
        self._node = node
        certain = len(text) - node.held
        self._held = text[certain:]
        return text[:certain]

    def finish(self) -> str:
        """Return the text that was held back; call this when the sequence has ended."""
        held, self._held = self._held, ""
        return held
