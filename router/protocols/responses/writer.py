"""The events of a response, and the response object that they build.

Both depend only on the request and the model's text, so every router writes the same events with the same numbers. A
stream is therefore resumed by writing it again without the events that its reader already has.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Literal

from midstream.chunk import Chunk, FinishReason
from router.parsers.events import CallArguments, CallBegin, CallEnd, Event, ReasoningDelta, TextDelta
from router.parsers.machine import parse_json
from router.protocols.own_fields import own_fields_of
from router.protocols.responses.items import Item, hide_reasoning
from router.protocols.responses.log_probs import TokenLogProbs
from router.protocols.responses.pieces import Pieces

Fields = dict[str, object]
Status = Literal["queued", "in_progress", "completed", "incomplete", "cancelled", "failed"]
# For each item type, the type of its delta events, and the name of the text in them.
_DELTAS = {
    "message": ("response.output_text", "text"),
    "reasoning": ("response.reasoning_text", "text"),
    "function_call": ("response.function_call_arguments", "arguments"),
    "custom_tool_call": ("response.custom_tool_call_input", "input"),
}
_INPUT = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc"}


class ResponseWriter:
    """Writes one response."""

    def __init__(
        self,
        response_id: str,
        head: Mapping[str, object],
        *,
        is_background: bool = False,
        custom_tools: frozenset[str] = frozenset(),
        namespaces: Mapping[str, tuple[str, str]] | None = None,
        shows_hidden: bool = False,
        log_probs: TokenLogProbs | None = None,
    ) -> None:
        """Begin a response.

        Args:
            head: Constant fields of the response.
            is_background: Whether the response was queued first.
            custom_tools: Names of tools whose input is free text.
            namespaces: For each tool of a namespace, by the name that the model sees, the namespace and its name there.
            shows_hidden: Whether reasoning items have `encrypted_content`.
            log_probs: Log probabilities to report with the text of messages.
        """
        self.items: list[Item] = []
        self.reasoning = ""
        self._id = response_id
        self._head = head
        self._is_background = is_background
        self._custom_tools = custom_tools
        self._namespaces = namespaces or {}
        self._shows_hidden = shows_hidden
        self._pieces = Pieces()
        self._log_probs = log_probs
        # Positions in the model's text of characters that are not in a delta yet; empty without log probabilities.
        self._positions: deque[int] = deque()
        self._entries: list[Fields] = []  # log probabilities of the open item
        self._text = ""  # text of the open item
        self._is_open = False
        self._next_number = 0

    def begin(self) -> list[Fields]:
        """Return the events that precede all output."""
        first: Status = "queued" if self._is_background else "in_progress"
        events = [self._event("response.created", response=self.response(first))]
        if self._is_background:
            events.append(self._event("response.queued", response=self.response("queued")))
        return [*events, self._event("response.in_progress", response=self.response("in_progress"))]

    def add(self, chunk: Chunk, parsed: Iterable[Event]) -> list[Fields]:
        """Return the events for a chunk, given what was parsed of its text and of text that was held back before."""
        if self._log_probs is not None:
            self._log_probs.add(chunk)
        events: list[Fields] = []
        for event in parsed:
            if isinstance(event, TextDelta) and event.text:
                events += self._open("message", {"role": "assistant", "content": []})
                if self._log_probs is not None:
                    self._positions.extend(range(event.start, event.start + len(event.text)))
                events += self._more(event.text)
            elif isinstance(event, ReasoningDelta) and event.text:
                self.reasoning += event.text
                events += self._open("reasoning", {"summary": [], "content": []})
                events += self._more(event.text)
            elif isinstance(event, CallBegin):
                events += self._close()
                is_custom = event.name in self._custom_tools
                call: Item = {"call_id": event.call_id, "name": event.name}
                if event.name in self._namespaces:
                    call["namespace"], call["name"] = self._namespaces[event.name]
                kind, text = ("custom_tool_call", "input") if is_custom else ("function_call", "arguments")
                events += self._open(kind, {**call, text: ""})
            elif isinstance(event, CallArguments):
                events += self._more(event.text)
            elif isinstance(event, CallEnd):
                events += self._close()
        return events

    def end(self, chunk: Chunk, usage: Fields) -> list[Fields]:
        """Return the events that follow all output; `chunk` is the last chunk."""
        is_whole = chunk.finish_reason is FinishReason.STOP
        events = self._close("completed" if is_whole else "incomplete")
        status = status_of(chunk)
        # OpenAI's API has no event for a cancelled response; its status shows it.
        kind = "incomplete" if status == "cancelled" else status
        response = self.response(status, usage=usage, **_ending(chunk, status))
        return [*events, self._event(f"response.{kind}", response=response)]

    def response(self, status: Status, **fields: object) -> Fields:
        """Return the response object in its current state."""
        return {
            "id": self._id,
            "object": "response",
            **self._head,
            "status": status,
            "output": [dict(item) for item in self.items],
            "error": None,
            "incomplete_details": None,
            "usage": None,
            **fields,
        }

    def _event(self, kind: str, **fields: object) -> Fields:
        event = {"type": kind, "sequence_number": self._next_number, **fields}
        self._next_number += 1
        return event

    def _part(self, text: str) -> Fields:
        if self.items[-1]["type"] == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(self._entries)}

    def _open(self, kind: str, fields: Item) -> list[Fields]:
        """Open an output item of `kind`, unless the open item is already of that kind."""
        if self._is_open and self.items[-1]["type"] == kind:
            return []
        events = self._close()
        item_id = f"{_PREFIXES[kind]}_{self._id.removeprefix('resp_')}_{len(self.items)}"
        self.items.append({"id": item_id, "type": kind, "status": "in_progress", **fields})
        self._is_open, self._text, self._entries = True, "", []
        index = len(self.items) - 1
        events.append(self._event("response.output_item.added", output_index=index, item=dict(self.items[-1])))
        if kind in ("message", "reasoning"):
            events.append(self._item_event("response.content_part.added", content_index=0, part=self._part("")))
        return events

    def _item_event(self, kind: str, **fields: object) -> Fields:
        return self._event(kind, item_id=self.items[-1]["id"], output_index=len(self.items) - 1, **fields)

    def _more(self, text: str) -> list[Fields]:
        self._text += text
        if self.items[-1]["type"] == "custom_tool_call":
            return []  # the input is a string in the JSON of the arguments, which must be complete to be parsed
        return [self._delta(piece) for piece in self._pieces.add(text)]

    def _delta(self, text: str) -> Fields:
        kind = str(self.items[-1]["type"])
        fields: Fields = {"content_index": 0} if kind in ("message", "reasoning") else {}
        if kind == "message":
            fields["logprobs"] = self._take_log_probs(text)
        return self._item_event(f"{_DELTAS[kind][0]}.delta", delta=text, **fields)

    def _take_log_probs(self, delta: str) -> list[Fields]:
        """Return the log probabilities for the next delta of a message."""
        if self._log_probs is None:
            return []
        found = self._log_probs.take(self._positions.popleft() for _ in delta)
        self._entries += found
        return found

    def _close(self, status: str = "completed") -> list[Fields]:
        """Close the open output item."""
        if not self._is_open:
            return []
        item = self.items[-1]
        kind = str(item["type"])
        events = [self._delta(piece) for piece in self._pieces.finish()]
        prefix, name = _DELTAS[kind]
        if kind == "custom_tool_call":
            self._text = _custom_input(self._text)
            events.append(self._delta(self._text))
        if kind in ("message", "reasoning"):
            part = self._part(self._text)
            fields: Fields = {"logprobs": list(self._entries)} if kind == "message" else {}
            events.append(self._item_event(f"{prefix}.done", content_index=0, text=self._text, **fields))
            events.append(self._item_event("response.content_part.done", content_index=0, part=part))
            item["content"] = [part]
            if kind == "reasoning" and self._shows_hidden:
                item["encrypted_content"] = hide_reasoning(self._text)
        else:
            item[name] = self._text
            fields = {"name": item["name"]} if kind == "function_call" else {}
            events.append(self._item_event(f"{prefix}.done", **{name: self._text}, **fields))
        item["status"] = status
        events.append(self._event("response.output_item.done", output_index=len(self.items) - 1, item=dict(item)))
        self._is_open = False
        return events


def status_of(chunk: Chunk) -> Status:
    """Return the status of a response whose last chunk is `chunk`."""
    if chunk.finish_reason is FinishReason.STOP:
        return "completed"
    if chunk.finish_reason is FinishReason.LENGTH:
        return "incomplete"
    return "cancelled" if chunk.finish_reason is FinishReason.ABORT else "failed"


def _ending(chunk: Chunk, status: Status) -> Fields:
    change = own_fields_of(chunk)
    if status == "incomplete":
        return {"incomplete_details": {"reason": "max_output_tokens"}, **change}
    if status == "failed":
        is_late = chunk.finish_reason is FinishReason.DEADLINE
        message = "the deadline passed" if is_late else chunk.error.message if chunk.error else "the request failed"
        return {"error": {"code": "server_error", "message": message}, **change}
    return change


def _custom_input(arguments: str) -> str:
    """Return the text in the arguments of a custom tool's call, which may be cut off; if they have no text, return the
    arguments unchanged.
    """
    try:
        value = parse_json(arguments)
    except ValueError:
        return _cut_off_input(arguments)
    found = value.get("input") if isinstance(value, dict) else None
    return found if isinstance(found, str) else arguments


def _cut_off_input(arguments: str) -> str:
    text = arguments[begin.end() :] if (begin := _INPUT.match(arguments)) else ""
    # The end may be in the middle of an escaped character, which consists of up to two escape sequences of six
    # characters.
    for end in range(len(text), max(len(text) - 12, -1), -1):
        try:
            last = str(json.loads(f'"{text[:end]}"'))[-1:]
            if not "\ud800" <= last < "\udc00":
                return str(parse_json(f'"{text[:end]}"'))
        except ValueError:
            continue
    return ""
