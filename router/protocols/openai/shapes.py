"""Output in OpenAI's format. A choice is a complete sequence, or the part of it in one event."""

from __future__ import annotations

import codecs
from collections.abc import Callable
from typing import Protocol

from midstream.chunk import Chunk, FinishReason, Usage
from midstream.extras import Extras, LogProbs
from router.parsers.events import CallArguments, CallBegin, Event, ReasoningDelta, TextDelta
from router.protocols.conversation import Conversation, SequenceReader

# Returns the bytes of one token.
Spell = Callable[[int], bytes]
# JSON has no infinity; OpenAI and vLLM report this value for impossible tokens.
_LOWEST_LOG_PROB = -9999.0


class Shape(Protocol):
    """The output format of one of the two endpoints.

    Attributes:
        prefix: Prefix of the id of a response.
        name: The field `object` of a response; `chunk_name` is that of an event.
        request_id: Id of the job; it is set before any output is read.
        envelope: Additional fields of a response, and of each event.
    """

    prefix: str
    name: str
    chunk_name: str
    request_id: str
    envelope: dict[str, object]

    def opening(self, index: int) -> dict[str, object] | None:
        """Return the content of a choice's first event, which precedes all output."""

    def part(self, index: int, chunk: Chunk) -> dict[str, object]:
        """Return a delta of a choice, for one event."""

    def whole(self, index: int, chunk: Chunk) -> dict[str, object]:
        """Return a complete choice."""

    def read_again(self, index: int, text: str) -> None:
        """Process text that the client already has, to restore the parser's state."""

    def begin_at(self, index: int, num_characters: int, partial: bytes) -> None:
        """Unless the choice has begun, continue it after `num_characters` characters and the bytes of an incomplete
        one.
        """

    def text_offset(self, index: int) -> tuple[int, bytes] | None:
        """Return the arguments of `begin_at` for the output that follows; None if offsets are not reported."""


class CompletionShape:
    """Output in the format of /v1/completions."""

    prefix, name, chunk_name = "cmpl-", "text_completion", "text_completion"
    request_id = ""

    def __init__(self, spell: Spell, *, with_log_probs: bool, returns_ids: bool) -> None:
        self.envelope: dict[str, object] = {}
        self._spell = spell
        self._with_log_probs = with_log_probs
        self._returns_ids = returns_ids
        self._offsets: dict[int, _TextOffset] = {}

    def opening(self, index: int) -> dict[str, object] | None:
        """Return None: there is no content before the output."""
        return None

    def part(self, index: int, chunk: Chunk) -> dict[str, object]:
        """Return text and log probabilities."""
        choice: dict[str, object] = {"index": index, "text": chunk.text}
        choice["logprobs"] = self._log_probs(index, chunk, chunk.extras) if chunk.extras else None
        if self._returns_ids:
            choice["token_ids"] = list(chunk.token_ids)
        return {**choice, **_ending(chunk)}

    whole = part

    def read_again(self, index: int, text: str) -> None:
        """Do nothing: the text is not parsed."""

    def begin_at(self, index: int, num_characters: int, partial: bytes) -> None:
        """Set where a choice continues, unless it has begun."""
        self._offsets.setdefault(index, _TextOffset(num_characters, partial))

    def text_offset(self, index: int) -> tuple[int, bytes] | None:
        """Return the arguments of `begin_at` for the output that follows; None if there are no log probabilities."""
        offset = self._offsets.get(index)
        return None if offset is None else offset.state

    def _log_probs(self, index: int, chunk: Chunk, extras: Extras) -> dict[str, object] | None:
        log_probs, prompt = extras.log_probs, extras.prompt_log_probs
        if not self._with_log_probs or not (log_probs or prompt):
            return None
        token_ids = list(chunk.token_ids)
        values, tops = self._rows(log_probs) if log_probs else ([], [])
        # `token_ids` includes an echoed prompt; its log probabilities, if requested, are in `prompt_log_probs`.
        num_prompt = len(token_ids) - len(values)
        if num_prompt > 0:
            known, known_tops = self._rows(prompt) if prompt else ([], [])
            missing = [None] * max(num_prompt - len(known), 0)
            values = [*missing, *known[-num_prompt:], *values]
            tops = [*missing, *known_tops[-num_prompt:], *tops]
        pieces = [self._spell(token) for token in token_ids]
        offset = self._offsets.setdefault(index, _TextOffset())
        return {
            "tokens": [_entry_name(piece) for piece in pieces],
            "token_logprobs": values,
            "top_logprobs": tops,
            "text_offset": [offset.before(piece) for piece in pieces],
        }

    def _rows(self, rows: LogProbs) -> tuple[list[float | None], list[dict[str, float] | None]]:
        values = [_finite(value) for value in rows.token_log_probs]
        tops = [
            {_entry_name(self._spell(token)): value for token, value in _top(rows, row)} for row in range(len(values))
        ]
        return list(values), list(tops)


class _TextOffset:
    """Counts the complete characters of a text that is given as bytes."""

    def __init__(self, num_characters: int = 0, partial: bytes = b"") -> None:
        """Start after `num_characters` characters and the bytes of an incomplete one."""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_characters = num_characters + len(self._decoder.decode(partial))

    @property
    def state(self) -> tuple[int, bytes]:
        """Arguments of `__init__` that continue from here."""
        return self._num_characters, self._decoder.getstate()[0]

    def before(self, piece: bytes) -> int:
        """Add a token's bytes; return the offset of the character that the token begins or continues."""
        offset = self._num_characters
        self._num_characters += len(self._decoder.decode(piece))
        return offset


def _entry_name(piece: bytes) -> str:
    """Return a token's text, or its bytes in OpenAI's notation if it is part of a character, so that names are
    unique.
    """
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + piece.decode(errors="backslashreplace")


class ChatShape:
    """Output in the format of /v1/chat/completions."""

    prefix, name, chunk_name = "chatcmpl-", "chat.completion", "chat.completion.chunk"
    request_id = ""

    def __init__(
        self, spell: Spell, conversation: Conversation, *, returns_ids: bool, service_tier: str | None = None
    ) -> None:
        self.envelope: dict[str, object] = {"service_tier": service_tier} if service_tier else {}
        if service_tier == "auto":
            self.envelope = {"service_tier": "default"}
        self._spell = spell
        self._conversation = conversation
        self._returns_ids = returns_ids
        self._readers: dict[int, SequenceReader] = {}

    def opening(self, index: int) -> dict[str, object] | None:
        """Return the delta with the role."""
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def part(self, index: int, chunk: Chunk) -> dict[str, object]:
        """Return a delta of the message."""
        events = self._read(index, chunk.text, is_final=chunk.is_sequence_final)
        content, reasoning, calls = _joined(events)
        delta: dict[str, object] = {}
        if reasoning:
            delta["reasoning_content"] = reasoning
        if content or not (calls or reasoning or chunk.is_sequence_final):
            delta["content"] = content
        if calls:
            delta["tool_calls"] = [{"index": number, **call} for number, call in calls.items()]
        return {"index": index, "delta": delta, **self._beside(index, chunk)}

    def whole(self, index: int, chunk: Chunk) -> dict[str, object]:
        """Return the complete message."""
        content, reasoning, calls = _joined(self._read(index, chunk.text, is_final=True))
        message: dict[str, object] = {"role": "assistant", "content": content, "refusal": None}
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["content"] = content or None
            message["tool_calls"] = list(calls.values())
        return {"index": index, "message": message, **self._beside(index, chunk)}

    def read_again(self, index: int, text: str) -> None:
        """Parse text that the client already has, to restore the parser's state."""
        self._read(index, text, is_final=False)

    def begin_at(self, index: int, num_characters: int, partial: bytes) -> None:
        """Do nothing, since entries have no offsets."""

    def text_offset(self, index: int) -> tuple[int, bytes] | None:
        """Return None, since entries have no offsets."""
        return None

    def _read(self, index: int, text: str, *, is_final: bool) -> list[Event]:
        if not self._conversation.reads_text:
            return [TextDelta(text)]
        reader = self._readers.get(index)
        if reader is None:
            reader = self._readers[index] = SequenceReader(self._conversation, self.request_id, index)
        return reader.read(text, is_final=is_final)

    def _has_calls(self, index: int) -> bool:
        reader = self._readers.get(index)
        return reader is not None and reader.num_calls > 0

    def _beside(self, index: int, chunk: Chunk) -> dict[str, object]:
        fields = {"logprobs": self._log_probs(chunk), **_ending(chunk)}
        if self._returns_ids:
            fields["token_ids"] = list(chunk.token_ids)
        # OpenAI reports the finish reason "stop" if tool_choice names the function.
        is_named = self._conversation.tools.choice == "named"
        if self._has_calls(index) and not is_named and fields["finish_reason"] == FinishReason.STOP:
            fields["finish_reason"] = "tool_calls"
        return fields

    def _log_probs(self, chunk: Chunk) -> dict[str, object] | None:
        log_probs = chunk.extras.log_probs if chunk.extras else None
        if log_probs is None:
            return None
        content = [
            {**self._entry(token, value), "top_logprobs": [self._entry(*pair) for pair in _top(log_probs, row)]}
            for row, (token, value) in enumerate(zip(chunk.token_ids, log_probs.token_log_probs, strict=False))
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token_id: int, value: float) -> dict[str, object]:
        piece = self._spell(token_id)
        # OpenAI also uses this notation for a part of a character.
        token = piece.decode(errors="backslashreplace")
        return {"token": token, "logprob": _finite(value), "bytes": list(piece)}


def usage_fields(usage: Usage) -> dict[str, object]:
    """Return OpenAI's `usage`."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def _top(log_probs: LogProbs, row: int) -> list[tuple[int, float]]:
    part = slice(row * log_probs.top_k, (row + 1) * log_probs.top_k)
    return list(zip(log_probs.top_token_ids[part], map(_finite, log_probs.top_log_probs[part]), strict=True))


def _finite(log_prob: float) -> float:
    return log_prob if log_prob > _LOWEST_LOG_PROB else _LOWEST_LOG_PROB


def _ending(chunk: Chunk) -> dict[str, object]:
    """Return the finish reason, and vLLM's `stop_reason`."""
    if not chunk.is_sequence_final:
        return {"finish_reason": None}
    return {"finish_reason": str(chunk.finish_reason or FinishReason.STOP), "stop_reason": chunk.matched_stop}


def _joined(events: list[Event]) -> tuple[str, str, dict[int, dict[str, object]]]:
    """Return the content, the reasoning, and the delta of each call by index."""
    content = reasoning = ""
    calls: dict[int, dict[str, object]] = {}
    for event in events:
        if isinstance(event, TextDelta):
            content += event.text
        elif isinstance(event, ReasoningDelta):
            reasoning += event.text
        elif isinstance(event, CallBegin):
            function = {"name": event.name, "arguments": ""}
            calls[event.index] = {"id": event.call_id, "type": "function", "function": function}
        elif isinstance(event, CallArguments) and event.text:
            known = calls.setdefault(event.index, {"function": {"arguments": ""}})["function"]
            assert isinstance(known, dict)
            known["arguments"] += event.text
    return content, reasoning, calls
