"""Finds stop words in text that arrives in pieces.

The match that ends first wins; of several that end at the same place, the longest one wins. This depends only on the
text, not on how it is split into tokens or chunks. An Aho-Corasick automaton has a constant cost per character, and its
state determines exactly how much text to hold back: the longest suffix that is a prefix of a stop word.
"""

from __future__ import annotations

import functools
from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class _Node:
    """A node of the automaton: a prefix of one or more stop words.

    Attributes:
        held: Length of its longest suffix that may still become a stop word.
        children: Next character -> node index.
        word: The longest stop word that ends here; empty when none does.
        fallback: Node of its longest proper suffix that is a prefix of a stop word.
    """

    held: int
    children: dict[str, int]
    word: str
    fallback: int


class StopWords:
    """The automaton for a set of words. It is immutable and shared by scanners."""

    def __init__(self, words: tuple[str, ...]) -> None:
        """Build the automaton; no word may be empty."""
        self.nodes = _build(words)
        self.first_characters = frozenset(word[0] for word in words)


@functools.lru_cache(maxsize=256)
def stop_words(words: tuple[str, ...]) -> StopWords:
    """Return the automaton for `words`; recent ones are cached."""
    return StopWords(words)


class StopWordScanner:
    """Scans the text of one sequence.

    Attributes:
        match: The stop word that was found; None before that.
    """

    __slots__ = ("_held", "_keep_match", "_node", "_words", "match")

    def __init__(self, words: StopWords, *, keep_match: bool) -> None:
        """With `keep_match`, the returned text includes the matched word; otherwise the text ends before the word."""
        self._words = words
        self._keep_match = keep_match
        self._node = 0
        self._held = ""
        self.match: str | None = None

    def scan(self, text: str, *, can_stop: bool = True) -> str:
        """Scan the next piece of text, and return the text that is final now.

        Args:
            text: The piece.
            can_stop: If False, a match that ends in this piece is ignored.

        Precondition: `match` is None.
        """
        if not self._node and self._words.first_characters.isdisjoint(text):
            return text
        nodes, node = self._words.nodes, self._node
        text = self._held + text
        for end in range(len(self._held), len(text)):
            character = text[end]
            while node and character not in nodes[node].children:
                node = nodes[node].fallback
            node = nodes[node].children.get(character, 0)
            word = nodes[node].word
            if word and can_stop:
                self.match = word
                self._held = ""
                return text[: end + 1 if self._keep_match else end + 1 - len(word)]
        self._node = node
        certain = len(text) - nodes[node].held
        self._held = text[certain:]
        return text[:certain]

    def finish(self) -> str:
        """Return the text that was held back; call this when the sequence has ended."""
        held, self._held = self._held, ""
        return held


def _build(words: tuple[str, ...]) -> tuple[_Node, ...]:
    children: list[dict[str, int]] = [{}]
    depths, ends = [0], [""]
    for word in words:
        node = 0
        for character in word:
            if character not in children[node]:
                children[node][character] = len(children)
                children.append({})
                depths.append(depths[node] + 1)
                ends.append("")
            node = children[node][character]
        ends[node] = word
    fallbacks = [0] * len(children)
    held = [0] * len(children)
    queue = deque(children[0].values())
    while queue:
        node = queue.popleft()
        held[node] = depths[node] if children[node] else held[fallbacks[node]]
        for character, child in children[node].items():
            back = fallbacks[node]
            while back and character not in children[back]:
                back = fallbacks[back]
            fallbacks[child] = children[back].get(character, 0)
            ends[child] = ends[child] or ends[fallbacks[child]]
            queue.append(child)
    return tuple(_Node(*parts) for parts in zip(held, children, ends, fallbacks, strict=True))
