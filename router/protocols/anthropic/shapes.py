"""Responses in Anthropic's format: a message of content blocks, either complete or as events."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable

from midstream.chunk import Chunk, FinishReason, Usage
from router.parsers.events import CallArguments, CallBegin, CallEnd, Event, ReasoningDelta, TextDelta
from router.parsers.machine import parse_json
from router.protocols.own_fields import own_fields_of

Fields = dict[str, object]
# An event without meaning. Not all clients count it as activity.
PING: Fields = {"type": "ping"}
# An event within a message that changes nothing, and that all clients count as activity. The last event replaces the
# number of tokens; it is 0 because some clients (langchain-anthropic) add the numbers of all events.
NO_CHANGE: Fields = {
    "type": "message_delta",
    "delta": {"stop_reason": None, "stop_sequence": None},
    "usage": {"output_tokens": 0},
}


class MessageWriter:
    """Writes one message.

    Attributes:
        blocks: Content blocks so far; the `input` of a tool call is a parsed object once the call has ended.
    """

    def __init__(
        self, request_id: str, model: str, *, shows_thinking: bool, max_tokens: int = 0, context_length: int = 0
    ) -> None:
        """`max_tokens` is the client's limit, `context_length` the model's for prompt and answer; 0 means none."""
        self.blocks: list[Fields] = []
        self._max_tokens = max_tokens
        self._context_length = context_length
        self._request_id = request_id
        self._model = model
        self._shows_thinking = shows_thinking
        self._is_open = False
        self._input = ""

    def begin(self, num_prompt_tokens: int) -> list[Fields]:
        """Return the events that precede all output; the number of cached tokens becomes known only at the end."""
        message = self.message(None, None, usage_fields(Usage(num_prompt_tokens), 0))
        return [{"type": "message_start", "message": message}, PING]

    def add(self, events: Iterable[Event]) -> list[Fields]:
        """Return Anthropic's events for parser events."""
        written: list[Fields] = []
        for event in events:
            if isinstance(event, (TextDelta, ReasoningDelta, CallArguments)) and not event.text:
                continue
            if isinstance(event, TextDelta):
                written += self._block("text", {"text": ""})
                written.append(self._delta("text", "text_delta", event.text))
            elif isinstance(event, ReasoningDelta):
                if self._shows_thinking:
                    written += self._block("thinking", {"thinking": "", "signature": ""})
                    written.append(self._delta("thinking", "thinking_delta", event.text))
            elif isinstance(event, CallBegin):
                written += self._close()
                written += self._block("tool_use", {"id": event.call_id, "name": event.name, "input": {}})
            elif isinstance(event, CallArguments):
                self._input += event.text
                written.append(self._shown_delta("input_json_delta", "partial_json", event.text))
            elif isinstance(event, CallEnd):
                written += self._close()
        return written

    def end(self, chunk: Chunk, stop_words: Iterable[str], usage: Fields) -> list[Fields]:
        """Return the events that follow all output."""
        reason, word = self.stop(chunk, stop_words)
        delta = {"stop_reason": reason, "stop_sequence": word}
        last = {"type": "message_delta", "delta": delta, "usage": usage, **own_fields_of(chunk)}
        return [*self._close(), last, {"type": "message_stop"}]

    def stop(self, chunk: Chunk, stop_words: Iterable[str]) -> tuple[str, str | None]:
        """Return the stop reason, and the matched stop sequence if there is one."""
        if chunk.finish_reason is FinishReason.LENGTH:
            return ("model_context_window_exceeded" if self._has_filled_context(chunk) else "max_tokens"), None
        if chunk.matched_stop in tuple(stop_words):
            return "stop_sequence", str(chunk.matched_stop)
        has_calls = any(block["type"] == "tool_use" for block in self.blocks)
        return ("tool_use" if has_calls else "end_turn"), None

    def _has_filled_context(self, chunk: Chunk) -> bool:
        """Return whether a message ended before `max_tokens`, at the end of the model's context."""
        usage = chunk.usage or Usage()
        is_full = 0 < self._context_length <= usage.prompt_tokens + usage.completion_tokens
        return is_full and usage.completion_tokens < self._max_tokens

    def message(self, reason: str | None, word: str | None, usage: Fields) -> Fields:
        """Return the message with the content so far."""
        return {
            "id": f"msg_{self._request_id}",
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": list(self.blocks),
            "stop_reason": reason,
            "stop_sequence": word,
            "usage": usage,
        }

    def _block(self, kind: str, fields: Fields) -> list[Fields]:
        """Open a content block of `kind`, unless the open block is already of that kind."""
        if self._is_open and self.blocks[-1]["type"] == kind:
            return []
        written = self._close()
        self.blocks.append({"type": kind, **fields})
        self._is_open, self._input = True, ""
        start = {"type": "content_block_start", "index": len(self.blocks) - 1, "content_block": dict(self.blocks[-1])}
        return [*written, start]

    def _close(self) -> list[Fields]:
        if not self._is_open:
            return []
        self._is_open = False
        block, index = self.blocks[-1], len(self.blocks) - 1
        written: list[Fields] = []
        if block["type"] == "thinking":
            # Clients send the signature back, but this service does not read it.
            digest = hashlib.blake2b(f"{self._request_id}/{index}".encode(), digest_size=24).digest()
            block["signature"] = base64.b64encode(digest).decode()
            written.append(self._shown_delta("signature_delta", "signature", block["signature"]))
        elif block["type"] == "tool_use":
            block["input"] = _object(self._input)
        return [*written, {"type": "content_block_stop", "index": index}]

    def _delta(self, field: str, kind: str, text: str) -> Fields:
        known = self.blocks[-1][field]
        assert isinstance(known, str)
        self.blocks[-1][field] = known + text
        return self._shown_delta(kind, field, text)

    def _shown_delta(self, kind: str, field: str, value: object) -> Fields:
        delta = {"type": kind, field: value}
        return {"type": "content_block_delta", "index": len(self.blocks) - 1, "delta": delta}


def usage_fields(usage: Usage, num_kept: int) -> Fields:
    """Return Anthropic's `usage`; `num_kept` is the number of prompt tokens retained in the cache."""
    created = max(num_kept - usage.cached_tokens, 0)
    return {
        "input_tokens": max(usage.prompt_tokens - usage.cached_tokens - created, 0),
        "cache_creation_input_tokens": created,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "service_tier": "standard",
    }


def _object(text: str) -> Fields:
    """Return a call's arguments; empty if they are incomplete, for example truncated by max_tokens."""
    try:
        value = parse_json(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
