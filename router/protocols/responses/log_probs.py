"""The log probabilities of the tokens of a message.

A stream that is read again must have the same events, however its tokens arrive. So a token belongs to the delta that
has its first character, or the character that it continues; tokens of other text, such as the reasoning's, to none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Set
from dataclasses import dataclass, field

from midstream.chunk import Chunk
from router.protocols.openai.shapes import Details, Spell, TextOffset, token_entries


@dataclass(slots=True)
class TokenLogProbs:
    """The log probabilities of a response's tokens that are not in a delta yet.

    Attributes:
        spell: Returns the bytes of a token.
        skipped_ids: Tokens that the text omits.
        num_top: Number of the most likely tokens to report for each token.
    """

    spell: Spell
    skipped_ids: Set[int]
    num_top: int
    _offset: TextOffset = field(default_factory=TextOffset)
    _entries: deque[tuple[int, dict[str, object]]] = field(default_factory=deque)

    def add(self, chunk: Chunk) -> None:
        """Add the tokens of a chunk."""
        log_probs = chunk.extras.log_probs if chunk.extras is not None else None
        if log_probs is None:
            return
        entries = token_entries(chunk.token_ids, log_probs, self.spell, Details(self.num_top))
        for token_id, entry in zip(chunk.token_ids, entries, strict=False):
            if token_id not in self.skipped_ids:
                self._entries.append((self._offset.before(self.spell(token_id)), entry))

    def take(self, positions: Iterable[int]) -> list[dict[str, object]]:
        """Return the entries of the tokens that begin at or continue these characters of the model's text, in order."""
        found = []
        for position in positions:
            while self._entries and self._entries[0][0] <= position:
                begin, entry = self._entries.popleft()
                if begin == position:
                    found.append(entry)
        return found
