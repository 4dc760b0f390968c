"""A client's position in a stream, encoded in event ids.

An id is `REQUEST/PART/PART...`, with a part for each prompt. A part has for each sequence: the next token offset; then
`:` and a number of characters, if the text is parsed for tool calls or the text offsets of tokens are reported; then
`x` and the bytes of an incomplete character in hexadecimal, if any; then `f`, if the sequence has ended.
"""

from __future__ import annotations

import re
from dataclasses import replace
from urllib.parse import quote, unquote

from midstream.chunk import Chunk, FinishReason
from midstream.errors import InvalidArgumentError

_ONE = r"\d{1,9}(:\d{1,9}(x([0-9A-F]{2}){1,3})?)?f?"
_PART = re.compile(rf"({_ONE}(,{_ONE})*)?", re.ASCII)


class Position:
    """A client's position in the sequences of one prompt.

    Attributes:
        offsets: Next token offset of each sequence.
        characters: Number of characters of each sequence's text, if text is parsed or its offsets are reported;
            otherwise empty.
        partial: Bytes of the incomplete character that follows them.
        ended: Sequences that have ended.
    """

    def __init__(self, text: str = "") -> None:
        parts = [part.removesuffix("f").partition(":") for part in text.split(",")] if text else []
        self.offsets = {i: int(tokens) for i, (tokens, _, _) in enumerate(parts)}
        counts = {i: count.partition("x") for i, (_, colon, count) in enumerate(parts) if colon}
        self.characters = {i: int(count) for i, (count, _, _) in counts.items()}
        self.partial = {i: bytes.fromhex(partial) for i, (_, x, partial) in counts.items() if x}
        self.ended = {i for i, part in enumerate(text.split(",")) if part.endswith("f")}
        self._skipped: dict[int, tuple[int, int]] = {}

    def __str__(self) -> str:
        size = max(self.offsets, default=-1) + 1
        return ",".join(map(self._one, range(size)))

    def _one(self, index: int) -> str:
        count = f":{self.characters[index]}" if index in self.characters else ""
        count += f"x{self.partial[index].hex().upper()}" if self.partial.get(index) else ""
        return f"{self.offsets.get(index, 0)}{count}{'f' if index in self.ended else ''}"

    @property
    def next_offsets(self) -> list[int]:
        """Offset of the next token of each sequence, up to the last sequence with output."""
        return [self.offsets.get(i, 0) for i in range(max(self.offsets, default=-1) + 1)]

    def advance(self, chunk: Chunk, *, counts_characters: bool) -> None:
        index = chunk.sequence_index
        self.offsets[index] = max(chunk.next_offset, self.offsets.get(index, 0))
        if counts_characters:
            self.characters[index] = self.characters.get(index, 0) + len(chunk.text)
        if chunk.is_sequence_final:
            self.ended.add(index)

    def is_within(self, chunk: Chunk) -> bool:
        """Return whether the position lies in a sequence that is read again and ends with this chunk, or does so for
        another reason than its own end.
        """
        offset = self.offsets.get(chunk.sequence_index, 0)
        return chunk.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH) or offset <= chunk.next_offset

    def known_part(self, chunk: Chunk) -> tuple[str, Chunk]:
        """Split a chunk of a sequence that is read again: return the text that the client has, and the rest."""
        index = chunk.sequence_index
        characters, offset = self._skipped.get(index, (self.characters.get(index, 0), self.offsets.get(index, 0)))
        text = chunk.text[:characters]
        self._skipped[index] = (characters - len(text), offset)
        num_tokens = min(max(offset - chunk.token_offset, 0), len(chunk.token_ids))
        extras = chunk.extras
        if num_tokens and extras is not None and extras.log_probs is not None:
            extras = replace(extras, log_probs=extras.log_probs.without(num_tokens))
        rest = replace(
            chunk,
            token_offset=chunk.token_offset + num_tokens,
            token_ids=chunk.token_ids[num_tokens:],
            text=chunk.text[len(text) :],
            extras=extras,
        )
        return text, rest


def event_prefix(request_id: str) -> str:
    """Return the prefix of the ids of a job's events, which precedes the positions."""
    return quote(request_id, safe="") + "/"


def read_event_id(text: str, num_prompts: int) -> tuple[str, list[Position]]:
    """Parse an event id; return the request id and a position for each prompt. Raises InvalidArgumentError if `text` is
    not an event id of a request with this number of prompts.
    """
    name, *parts = text.split("/")
    if len(parts) != num_prompts or not all(map(_PART.fullmatch, parts)):
        raise InvalidArgumentError("is not an event id of this stream", field="Last-Event-ID")
    return unquote(name), [Position(part) for part in parts]
