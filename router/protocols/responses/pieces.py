"""Splits a text into the deltas of a stream. How text arrives depends on batching, drafts and failures, but a stream
that is read again must have the same events. So the splits depend only on the text: like most tokens, a piece is a word
or another single character, with any white space before it. A word is complete once the next character is known.
"""

from __future__ import annotations

import re

# Letters and digits of scripts with spaces between words; in all other scripts, each character is a piece.
_WORD = r"[^\W\u2e80-\U0010ffff]"
_MAX_SPACE, _MAX_WORD = 16, 16
_OTHER = r"[\W\u2e80-\U0010ffff]"
_WORDS = rf"{_WORD}{{{_MAX_WORD}}}|{_WORD}{{1,{_MAX_WORD - 1}}}(?={_OTHER})"
_PIECE = re.compile(rf"\s{{{_MAX_SPACE}}}|\s{{0,{_MAX_SPACE - 1}}}(?:{_WORDS}|{_OTHER}(?<!\s))")


class Pieces:
    """Splits a text, as it arrives, into pieces that depend only on the text."""

    def __init__(self) -> None:
        self._held = ""

    def add(self, text: str) -> list[str]:
        """Return the pieces that `text` completes."""
        self._held += text
        pieces: list[str] = []
        start = 0
        while (match := _PIECE.match(self._held, start)) is not None:
            pieces.append(match[0])
            start = match.end()
        self._held = self._held[start:]
        return pieces

    def finish(self) -> list[str]:
        """Return the remaining text once the text has ended."""
        rest, self._held = self._held, ""
        return [rest] if rest else []
