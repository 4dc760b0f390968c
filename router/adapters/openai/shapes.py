"""How output looks to OpenAI's clients: a choice is a sequence, whole or the part of it in one event."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from midstream.chunk import Chunk, FinishReason, Usage
from midstream.extras import LogProbs

# The text of one token.
Spell = Callable[[int], str]


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


class CompletionShape:
    """/v1/completions."""

    prefix, name, chunk_name = "cmpl-", "text_completion", "text_completion"

    def __init__(self, spell: Spell) -> None:
        self._spell = spell
        self._offsets: dict[int, int] = {}

    def opening(self, index: int) -> dict[str, object] | None:
        """Nothing."""
        return None

    def part(self, index: int, chunk: Chunk) -> dict[str, object]:
        """Text and log probabilities."""
        log_probs = chunk.extras.log_probs if chunk.extras else None
        return {
            "index": index,
            "text": chunk.text,
            "logprobs": self._log_probs(index, chunk, log_probs) if log_probs else None,
            **_ending(chunk),
        }

    whole = part

    def _log_probs(self, index: int, chunk: Chunk, log_probs: LogProbs) -> dict[str, object]:
        token_ids = list(chunk.token_ids)
        values: list[float | None] = list(log_probs.token_log_probs)
        tops: list[dict[str, float] | None] = [
            {self._spell(token): value for token, value in _top(log_probs, row)} for row in range(len(values))
        ]
        # An echoed prompt is in the tokens, and its log probabilities, if any, are elsewhere.
        num_prompt = len(token_ids) - len(values)
        if num_prompt > 0:
            prompt = chunk.extras.prompt_log_probs if chunk.extras else None
            known = list(prompt.token_log_probs)[-num_prompt:] if prompt else []
            values = [None] * (num_prompt - len(known)) + known + values
            tops = [*(None for _ in range(num_prompt)), *tops]
        tokens = [self._spell(token) for token in token_ids]
        offset, offsets = self._offsets.get(index, 0), []
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        self._offsets[index] = offset
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}


class ChatShape:
    """/v1/chat/completions."""

    prefix, name, chunk_name = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def __init__(self, spell: Spell) -> None:
        self._spell = spell

    def opening(self, index: int) -> dict[str, object] | None:
        """Whose turn it is."""
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def part(self, index: int, chunk: Chunk) -> dict[str, object]:
        """A delta."""
        delta = {"content": chunk.text} if chunk.text or not chunk.is_sequence_final else {}
        return {"index": index, "delta": delta, "logprobs": self._log_probs(chunk), **_ending(chunk)}

    def whole(self, index: int, chunk: Chunk) -> dict[str, object]:
        """A message."""
        message = {"role": "assistant", "content": chunk.text, "refusal": None}
        return {"index": index, "message": message, "logprobs": self._log_probs(chunk), **_ending(chunk)}

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
        return {"token": token, "logprob": value, "bytes": data}


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
    return list(zip(log_probs.top_token_ids[part], log_probs.top_log_probs[part], strict=True))


def _ending(chunk: Chunk) -> dict[str, object]:
    """Why it ended; vLLM's `stop_reason` says at what."""
    if not chunk.is_sequence_final:
        return {"finish_reason": None}
    return {"finish_reason": str(chunk.finish_reason or FinishReason.STOP), "stop_reason": chunk.matched_stop}
