"""How output looks to OpenAI's clients: a choice is a sequence, whole or the part of it in one event."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Protocol

from midstream.chunk import Chunk, FinishReason, Usage
from midstream.extras import LogProbs
from router.protocols.openai.tool_calls import CallPart, Reader
from router.protocols.openai.tools import Tools

# The text of one token.
Spell = Callable[[int], str]
# JSON has no infinity; OpenAI and vLLM say this of tokens that cannot be.
_LOWEST_LOG_PROB = -9999.0


class Shape(Protocol):
    """One of the two endpoints.

    Attributes:
        prefix: Of the response's id.
        name: The response's `object`, and chunk_name that of one event.
    """

    prefix: str
    name: str
    chunk_name: str

    def opening(self, index: int) -> dict[str, object] | None:
        """What the first event of a choice says before any output."""

    def part(self, index: int, chunk: Chunk) -> dict[str, object]:
        """A piece of a choice."""

    def whole(self, index: int, chunk: Chunk) -> dict[str, object]:
        """A complete choice."""

    def read_again(self, index: int, text: str) -> None:
        """Takes in text that the client has, so that what follows is read as it would have been."""


class CompletionShape:
    """/v1/completions."""

    prefix, name, chunk_name = "cmpl-", "text_completion", "text_completion"

    def __init__(self, spell: Spell, *, with_log_probs: bool, returns_ids: bool) -> None:
        self._spell = spell
        self._with_log_probs = with_log_probs
        self._returns_ids = returns_ids
        self._offsets: dict[int, int] = {}

    def opening(self, index: int) -> dict[str, object] | None:
        """Nothing."""
        return None

    def part(self, index: int, chunk: Chunk) -> dict[str, object]:
        """Text and log probabilities."""
        log_probs = chunk.extras.log_probs if chunk.extras and self._with_log_probs else None
        choice: dict[str, object] = {"index": index, "text": chunk.text}
        choice["logprobs"] = self._log_probs(index, chunk, log_probs) if log_probs else None
        if self._returns_ids:
            choice["token_ids"] = list(chunk.token_ids)
        return {**choice, **_ending(chunk)}

    whole = part

    def read_again(self, index: int, text: str) -> None:
        """Text is shown as it is."""

    def _log_probs(self, index: int, chunk: Chunk, log_probs: LogProbs) -> dict[str, object]:
        token_ids = list(chunk.token_ids)
        values, tops = self._rows(log_probs)
        # An echoed prompt is in the tokens, and its log probabilities, if any, are elsewhere.
        num_prompt = len(token_ids) - len(values)
        if num_prompt > 0:
            prompt = chunk.extras.prompt_log_probs if chunk.extras else None
            known, known_tops = self._rows(prompt) if prompt else ([], [])
            missing = [None] * max(num_prompt - len(known), 0)
            values = [*missing, *known[-num_prompt:], *values]
            tops = [*missing, *known_tops[-num_prompt:], *tops]
        tokens = [self._spell(token) for token in token_ids]
        offset, offsets = self._offsets.get(index, 0), []
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        self._offsets[index] = offset
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}

    def _rows(self, rows: LogProbs) -> tuple[list[float | None], list[dict[str, float] | None]]:
        values = [_finite(value) for value in rows.token_log_probs]
        tops = [{self._spell(token): value for token, value in _top(rows, row)} for row in range(len(values))]
        return list(values), list(tops)


class ChatShape:
    """/v1/chat/completions."""

    prefix, name, chunk_name = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def __init__(self, spell: Spell, tools: Tools, *, returns_ids: bool) -> None:
        self._spell = spell
        self._tools = tools
        self._returns_ids = returns_ids
        self._readers: dict[int, Reader] = {}
        self._num_calls: dict[int, int] = {}

    def opening(self, index: int) -> dict[str, object] | None:
        """Whose turn it is."""
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def part(self, index: int, chunk: Chunk) -> dict[str, object]:
        """A delta."""
        content, parts = self._read(index, chunk.text, is_final=chunk.is_sequence_final)
        delta: dict[str, object] = {}
        if content or not (parts or chunk.is_sequence_final):
            delta["content"] = content
        if parts:
            delta["tool_calls"] = [_call_fields(part, in_stream=True) for part in parts]
        return {"index": index, "delta": delta, **self._beside(index, chunk)}

    def whole(self, index: int, chunk: Chunk) -> dict[str, object]:
        """A message."""
        content, parts = self._read(index, chunk.text, is_final=True)
        message: dict[str, object] = {"role": "assistant", "content": content, "refusal": None}
        if parts:
            message["content"] = content or None
            message["tool_calls"] = [_call_fields(part, in_stream=False) for part in parts]
        return {"index": index, "message": message, **self._beside(index, chunk)}

    def read_again(self, index: int, text: str) -> None:
        """Finds the calls that the client has."""
        self._read(index, text, is_final=False)

    def _read(self, index: int, text: str, *, is_final: bool) -> tuple[str, list[CallPart]]:
        if self._tools.reader is None:
            return text, []
        reader = self._readers.get(index)
        if reader is None:
            reader = self._readers[index] = self._tools.reader()
        content, parts = reader.read(text, is_final=is_final)
        self._num_calls[index] = self._num_calls.get(index, 0) + len(parts)
        return content, parts

    def _beside(self, index: int, chunk: Chunk) -> dict[str, object]:
        fields = {"logprobs": self._log_probs(chunk), **_ending(chunk)}
        if self._returns_ids:
            fields["token_ids"] = list(chunk.token_ids)
        if self._num_calls.get(index) and not self._tools.is_named and fields["finish_reason"] == FinishReason.STOP:
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
        token = self._spell(token_id)
        # Part of a character has bytes that its spelling does not tell.
        data = None if "\ufffd" in token else list(token.encode())
        return {"token": token, "logprob": _finite(value), "bytes": data}


def usage_fields(usage: Usage) -> dict[str, object]:
    """OpenAI's `usage`."""
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
    """Why it ended; vLLM's `stop_reason` says at what."""
    if not chunk.is_sequence_final:
        return {"finish_reason": None}
    return {"finish_reason": str(chunk.finish_reason or FinishReason.STOP), "stop_reason": chunk.matched_stop}


def _call_fields(part: CallPart, *, in_stream: bool) -> dict[str, object]:
    function: dict[str, object] = {"arguments": part.arguments}
    call: dict[str, object] = {"index": part.index} if in_stream else {}
    if part.name is not None:
        call |= {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function"}
        function["name"] = part.name
    return {**call, "function": function}
