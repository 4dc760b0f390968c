"""Output in OpenAI's format. A choice is a complete sequence, or the part of it in one event."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Protocol

from midstream.chunk import Chunk, FinishReason, Usage
from midstream.extras import Extras, LogProbs
from router.parsers.events import CallArguments, CallBegin, Event, ReasoningDelta, TextDelta
from router.protocols.conversation import Conversation, SequenceReader
from router.protocols.own_fields import own_fields_of

# Returns the bytes of one token.
Spell = Callable[[int], bytes]
# JSON has no infinity; OpenAI and vLLM report this value for impossible tokens.
_LOWEST_LOG_PROB = -9999.0


@dataclass(frozen=True, slots=True)
class Details:
    """Which details of tokens the client wants.

    Attributes:
        num_top: Number of the most likely tokens reported with each output token; None for no log probabilities.
        num_prompt_top: The same for the prompt's tokens, in vLLM's `prompt_logprobs`.
        returns_ids: Whether the ids of the prompt's and the output's tokens are returned.
        names_ids: Whether log probabilities name tokens by their ids.
        stop_token_ids: Tokens at which the client wants to stop, in addition to the model's end tokens.
    """

    num_top: int | None = None
    num_prompt_top: int | None = None
    returns_ids: bool = False
    names_ids: bool = False
    stop_token_ids: frozenset[int] = frozenset()

    def ending(self, chunk: Chunk) -> dict[str, object]:
        """Return the finish reason and vLLM's `stop_reason`, which is null if the model ended the text itself.

        Clients know no finish reason for output that was aborted or failed, so it has none; an error follows instead. A
        change of the workers' kind, the result of a validation and the receipt are added to both.
        """
        reason = chunk.finish_reason or FinishReason.STOP
        change = own_fields_of(chunk)
        if not chunk.is_sequence_final or reason.is_failure:
            return {"finish_reason": None, **change}
        matched = chunk.matched_stop
        is_own = isinstance(matched, str) or matched in self.stop_token_ids
        return {"finish_reason": str(reason), "stop_reason": matched if is_own else None, **change}

    def prompt_fields(self, token_ids: Sequence[int], rows: LogProbs | None, spell: Spell) -> dict[str, object]:
        """Return vLLM's fields for a prompt; `rows` are the log probabilities of all its tokens but the first."""
        fields: dict[str, object] = {"prompt_token_ids": list(token_ids)} if self.returns_ids else {}
        if self.num_prompt_top is not None and rows is not None:
            fields["prompt_logprobs"] = [None, *self._prompt_rows(token_ids[1:], rows, spell)]
        return fields

    def _prompt_rows(self, token_ids: Sequence[int], rows: LogProbs, spell: Spell) -> list[dict[str, object]]:
        found: list[dict[str, object]] = []
        for row, token_id in enumerate(token_ids):
            own = (token_id, _finite(rows.token_log_probs[row]))
            ranked = [(rows.token_ranks[row], own), *enumerate(_top(rows, row, self.num_prompt_top), 1)]
            found.append(
                {
                    str(token): {"logprob": value, "rank": rank, "decoded_token": spell(token).decode(errors="replace")}
                    for rank, (token, value) in ranked
                }
            )
        return found


class Shape(Protocol):
    """The output format of one of the two endpoints.

    Attributes:
        prefix: Prefix of the id of a response.
        name: The field `object` of a response; `chunk_name` is that of an event.
        request_id: Id of the job; it is set before any output is read.
        envelope: Additional fields of a response, and of each event.
        details: Which details of tokens the client wants.
        is_prompt_shared: Whether fields about the prompt are in the response, and not in each choice.
        reasoning: The reasoning read so far, in pieces, of each choice that has any.
    """

    prefix: str
    name: str
    chunk_name: str
    request_id: str
    envelope: dict[str, object]
    details: Details
    is_prompt_shared: bool
    reasoning: dict[int, list[str]]

    def opening(self, index: int) -> dict[str, object] | None:
        """Return the content of a choice's first event, which precedes all output."""

    def empty(self, index: int) -> dict[str, object]:
        """Return a delta without content, for an event that only keeps the connection open."""

    def part(self, index: int, chunk: Chunk) -> dict[str, object] | None:
        """Return a delta of a choice, for one event; None if there is nothing to send."""

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

    def prompt(self, token_ids: Sequence[int], rows: LogProbs | None) -> dict[str, object]:
        """Return the fields about a prompt."""


class CompletionShape:
    """Output in the format of /v1/completions."""

    prefix, name, chunk_name = "cmpl-", "text_completion", "text_completion"
    request_id = ""
    is_prompt_shared = False

    def __init__(self, spell: Spell, details: Details, skipped_ids: Set[int] = frozenset()) -> None:
        """`skipped_ids` are the tokens that the text omits."""
        self.envelope: dict[str, object] = {}
        self.reasoning: dict[int, list[str]] = {}
        self.details = details
        self._spell = spell
        self._skipped_ids = skipped_ids
        self._offsets: dict[int, TextOffset] = {}

    def opening(self, index: int) -> dict[str, object] | None:
        """Return None: there is no content before the output."""
        return None

    def empty(self, index: int) -> dict[str, object]:
        return {"index": index, "text": "", "logprobs": None, "finish_reason": None}

    def part(self, index: int, chunk: Chunk) -> dict[str, object]:
        """Return text and log probabilities."""
        choice: dict[str, object] = {"index": index, "text": chunk.text}
        choice["logprobs"] = self._log_probs(index, chunk, chunk.extras) if chunk.extras else None
        if self.details.returns_ids:
            choice["token_ids"] = list(chunk.token_ids)
        return {**choice, **self.details.ending(chunk)}

    whole = part

    def read_again(self, index: int, text: str) -> None:
        """Do nothing: the text is not parsed."""

    def begin_at(self, index: int, num_characters: int, partial: bytes) -> None:
        """Set the offset at which a choice continues, unless it has already begun."""
        self._offsets.setdefault(index, TextOffset(num_characters, partial))

    def text_offset(self, index: int) -> tuple[int, bytes] | None:
        """Return the arguments of `begin_at` for the output that follows; None if there are no log probabilities."""
        offset = self._offsets.get(index)
        return None if offset is None else offset.state

    def prompt(self, token_ids: Sequence[int], rows: LogProbs | None) -> dict[str, object]:
        return self.details.prompt_fields(token_ids, rows, self._spell)

    def _log_probs(self, index: int, chunk: Chunk, extras: Extras) -> dict[str, object] | None:
        log_probs, prompt = extras.log_probs, extras.prompt_log_probs
        if self.details.num_top is None or not (log_probs or prompt):
            return None
        token_ids = list(chunk.token_ids)
        num_output = len(log_probs.token_log_probs) if log_probs else 0
        # `token_ids` includes an echoed prompt; its log probabilities, if requested, are in `prompt_log_probs`.
        num_prompt = len(token_ids) - num_output
        values, tops = self._rows(token_ids[num_prompt:], log_probs) if log_probs else ([], [])
        if num_prompt > 0:
            num_known = min(len(prompt.token_log_probs), num_prompt) if prompt else 0
            known, known_tops = (
                self._rows(token_ids[num_prompt - num_known : num_prompt], prompt) if prompt else ([], [])
            )
            missing = [None] * (num_prompt - num_known)
            values = [*missing, *known, *values]
            tops = [*missing, *known_tops, *tops]
        pieces = [b"" if token in self._skipped_ids else self._spell(token) for token in token_ids]
        offset = self._offsets.setdefault(index, TextOffset())
        return {
            "tokens": [self._name(token) for token in token_ids],
            "token_logprobs": values,
            "top_logprobs": tops,
            "text_offset": [offset.before(piece) for piece in pieces],
        }

    def _rows(
        self, token_ids: Sequence[int], rows: LogProbs
    ) -> tuple[list[float | None], list[dict[str, float] | None]]:
        """Return the log probability of each token, and for each token a mapping with the log probabilities of the most
        likely tokens and of the token itself, as in OpenAI's API. The last row of `rows` is that of the last token.
        """
        first = len(rows.token_log_probs) - len(token_ids)
        values = [_finite(value) for value in rows.token_log_probs[first:]]
        tops = [
            {
                self._name(token): value
                for token, value in [*_top(rows, first + i, self.details.num_top), (token_id, values[i])]
            }
            for i, token_id in enumerate(token_ids)
        ]
        return list(values), list(tops)

    def _name(self, token_id: int) -> str:
        return _id_name(token_id) if self.details.names_ids else _entry_name(self._spell(token_id))


class TextOffset:
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
    """Return a token's text, or for part of a character its bytes in OpenAI's notation, so that names are unique."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + piece.decode(errors="backslashreplace")


def _id_name(token_id: int) -> str:
    return f"token_id:{token_id}"


class ChatShape:
    """Output in the format of /v1/chat/completions."""

    prefix, name, chunk_name = "chatcmpl-", "chat.completion", "chat.completion.chunk"
    request_id = ""
    is_prompt_shared = True

    def __init__(
        self, spell: Spell, conversation: Conversation, details: Details, *, service_tier: str | None = None
    ) -> None:
        self.envelope: dict[str, object] = {"service_tier": service_tier} if service_tier else {}
        if service_tier == "auto":
            self.envelope = {"service_tier": "default"}
        self._spell = spell
        self._conversation = conversation
        self.details = details
        self.reasoning: dict[int, list[str]] = {}
        self._readers: dict[int, SequenceReader] = {}

    def opening(self, index: int) -> dict[str, object] | None:
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def empty(self, index: int) -> dict[str, object]:
        # The AI SDK counts only deltas with content as activity.
        return {"index": index, "delta": {"content": ""}, "logprobs": None, "finish_reason": None}

    def part(self, index: int, chunk: Chunk) -> dict[str, object] | None:
        """Return a delta of the message; None while the parser holds back the text."""
        events = self._read(index, chunk.text, is_final=chunk.is_sequence_final)
        content, reasoning, calls = _joined(events)
        delta: dict[str, object] = {}
        if reasoning:
            delta["reasoning_content"] = reasoning
        if content:
            delta["content"] = content
        if calls:
            delta["tool_calls"] = [{"index": number, **call} for number, call in calls.items()]
        beside = self._beside(index, chunk)
        if not (delta or chunk.is_sequence_final or beside["logprobs"] or beside.get("token_ids")):
            return None
        return {"index": index, "delta": delta, **beside}

    def whole(self, index: int, chunk: Chunk) -> dict[str, object]:
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

    def prompt(self, token_ids: Sequence[int], rows: LogProbs | None) -> dict[str, object]:
        return self.details.prompt_fields(token_ids, rows, self._spell)

    def _read(self, index: int, text: str, *, is_final: bool) -> list[Event]:
        if not self._conversation.reads_text:
            return [TextDelta(text)]
        reader = self._readers.get(index)
        if reader is None:
            reader = self._readers[index] = SequenceReader(self._conversation, self.request_id, index)
        events = reader.read(text, is_final=is_final)
        for event in events:
            if isinstance(event, ReasoningDelta):
                self.reasoning.setdefault(index, []).append(event.text)
        return events

    def _has_calls(self, index: int) -> bool:
        reader = self._readers.get(index)
        return reader is not None and reader.num_calls > 0

    def _beside(self, index: int, chunk: Chunk) -> dict[str, object]:
        fields = {"logprobs": self._log_probs(chunk), **self.details.ending(chunk)}
        if self.details.returns_ids:
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
        entries = token_entries(chunk.token_ids, log_probs, self._spell, self.details)
        return {"content": entries, "refusal": None}


def token_entries(
    token_ids: Sequence[int], log_probs: LogProbs, spell: Spell, details: Details
) -> list[dict[str, object]]:
    """Return the log probabilities of tokens in the format of chat completions and responses."""

    def entry(token_id: int, value: float) -> dict[str, object]:
        piece = spell(token_id)
        # OpenAI also uses this notation for a part of a character.
        token = _id_name(token_id) if details.names_ids else piece.decode(errors="backslashreplace")
        return {"token": token, "logprob": _finite(value), "bytes": list(piece)}

    return [
        {**entry(token, value), "top_logprobs": [entry(*pair) for pair in _top(log_probs, row, details.num_top)]}
        for row, (token, value) in enumerate(zip(token_ids, log_probs.token_log_probs, strict=False))
    ]


def usage_fields(usage: Usage) -> dict[str, object]:
    """Return OpenAI's `usage`."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def _top(log_probs: LogProbs, row: int, limit: int | None) -> list[tuple[int, float]]:
    """Return the most likely tokens of a row with their log probabilities; at most `limit`, where None means 0."""
    first = row * log_probs.top_k
    part = slice(first, first + min(log_probs.top_k, limit or 0))
    return list(zip(log_probs.top_token_ids[part], map(_finite, log_probs.top_log_probs[part]), strict=True))


def _finite(log_prob: float) -> float:
    return log_prob if log_prob > _LOWEST_LOG_PROB else _LOWEST_LOG_PROB


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
