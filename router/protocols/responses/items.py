"""Converts the input items of a response, and the items of the responses it continues, to turns of a conversation."""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from midstream.errors import InvalidArgumentError, UnsupportedError
from protos import generation_pb2 as pb
from router.protocols.contents import add_image, add_text, check_detail, image_of_url
from router.protocols.openai.body import Body
from router.protocols.openai.endpoints import is_ascending, page_limit

Item = dict[str, object]

# How a custom tool, whose input is free text, is presented to a model that calls functions.
CUSTOM_SCHEMA: dict[str, object] = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}
_ROLES = ("user", "assistant", "system", "developer")
REFERENCE = "item_reference"
_MAX_LISTED, _LISTED = 100, 20  # items of a page
# The id of an item of a response contains the id of the response, without its prefix.
_ITEM_ID = re.compile(r"[a-z]+_(.+?)_(?:in_)?\d+")


def input_items(body: Body) -> list[Body]:
    """Return the input items of a body; a string is one user message. Raises InvalidArgumentError if the input is
    missing, or is neither text nor items.
    """
    value = body.get("input")
    if isinstance(value, str):
        part = {"type": "input_text", "text": value}
        return [Body({"type": "message", "role": "user", "content": [part]}, "input.")]
    if not isinstance(value, list):
        raise InvalidArgumentError("must be text or an array of items", field="input")
    return body.objects("input")


def references(body: Body) -> Iterator[tuple[int, str, str]]:
    """Yield the position, the id and the id's path of each input item that refers to an item of another response.
    Raises InvalidArgumentError if a reference is invalid, or if two refer to the same item.
    """
    known: set[str] = set()
    for index, item in enumerate(body.objects("input") if isinstance(body.fields.get("input"), list) else ()):
        if not _is_reference(item.fields):
            continue
        item_id, path = item.text("id"), item.path("id")
        if not item_id:
            raise InvalidArgumentError("must be set", field=path)
        if item_id in known:
            raise InvalidArgumentError(f"{item_id[:64]!r} was already referred to", field=path)
        for name in item.fields.keys() - {"type", "id"}:
            raise InvalidArgumentError("is not a field of a reference", field=item.path(name)[:128])
        known.add(item_id)
        yield index, item_id, path


def _is_reference(fields: Mapping[str, object]) -> bool:
    """Return whether an input item is a reference, whose type may be left out."""
    kind = fields.get("type")
    return kind == REFERENCE or (kind is None and fields.get("role") is None and fields.get("id") is not None)


def full_name(namespace: str, name: str) -> str:
    """Return the name under which the model sees a tool; `namespace` is empty if the tool has none."""
    return f"{namespace}__{name}" if namespace else name


def owner_of(item_id: str) -> str:
    """Return the id of the response that has an item, without its prefix; empty if no response has such an item."""
    found = _ITEM_ID.fullmatch(item_id)
    return found[1] if found is not None else ""


@dataclass(slots=True)
class Turns:
    """Turns of a conversation, built from consecutive items.

    Attributes:
        image_fields: For each image, the client's field that contains it.
    """

    has_developer: bool
    turns: list[pb.ChatMessage] = field(default_factory=list)
    image_fields: list[str] = field(default_factory=list)
    _calls: list[Item] = field(default_factory=list)
    _is_open: bool = False  # the last turn is the assistant's, and items may be added to it
    _has_output: dict[str, bool] = field(default_factory=dict)  # by the id of a call

    def expect(self, items: Iterable[Item]) -> None:
        """Accept outputs of the calls in earlier items, which are not added."""
        self._has_output |= {str(item["call_id"]): True for item in items if str(item["type"]).endswith("_call")}

    def add(self, items: Iterable[Body]) -> None:
        """Convert input items to chat messages and append them to the turns. Raises InvalidArgumentError if an item is
        invalid, or UnsupportedError if a kind of item or content is not supported.
        """
        for item in items:
            kind = item.text("type") or ("message" if item.has("role") else "")
            if kind == "message":
                self._message(item)
            elif kind == "reasoning":
                self._assistant().reasoning_content += _reasoning(item)
            elif kind == "function_call":
                self._call(item, item.text("arguments") or "")
            elif kind == "custom_tool_call":
                self._call(item, {"input": item.text("input") or ""})
            elif kind in ("function_call_output", "custom_tool_call_output"):
                self._close()
                self.turns.append(pb.ChatMessage(role="tool", tool_call_id=self._answer(item)))
                self._add_content(self.turns[-1], item, "output")
            else:
                reason = "only messages, reasoning, function and custom tool calls, and their outputs"
                raise UnsupportedError(f"{reason} are supported", field=item.path("type"))
        self._close()

    def check_calls(self) -> None:
        """Raise InvalidArgumentError if the last turn calls a tool, whose output must come first."""
        waiting = [call_id for call_id, is_known in self._has_output.items() if not is_known]
        if self.turns[-1].role == "assistant" and waiting:
            raise InvalidArgumentError(f"has no output for the call {waiting[0][:64]!r}", field="input")

    def instruct(self, text: str) -> None:
        """Add the instructions as the first turn."""
        if text:
            self.turns.append(pb.ChatMessage(role=self._role("developer"), content=text))

    def _role(self, role: str) -> str:
        return "system" if role == "developer" and not self.has_developer else role

    def _message(self, item: Body) -> None:
        role = item.choice("role", _ROLES)
        if role is None:
            raise InvalidArgumentError("must be set", field=item.path("role"))
        if role == "assistant":
            self._add_content(self._assistant(), item, "content")
        else:
            self._close()
            self.turns.append(pb.ChatMessage(role=self._role(role)))
            self._add_content(self.turns[-1], item, "content")

    def _add_content(self, turn: pb.ChatMessage, item: Body, name: str) -> None:
        value = item.get(name)
        if isinstance(value, str):
            add_text(turn, value)
            return
        if not isinstance(value, list):
            raise InvalidArgumentError("must be text or an array of parts", field=item.path(name))
        for part in item.objects(name):
            kind = part.text("type")
            if kind == "input_image":
                url = part.text("image_url")
                if url is None:
                    raise InvalidArgumentError("must be set", field=part.path("image_url"))
                add_image(turn, image_of_url(url, part.path("image_url")))
                self.image_fields.append(part.path("image_url"))
                check_detail(part)
            elif kind in ("input_text", "output_text", "text", "refusal"):
                text, refusal = part.text("text"), part.text("refusal")
                if text is None and refusal is None:
                    name = "refusal" if kind == "refusal" else "text"
                    raise InvalidArgumentError("must be set", field=part.path(name))
                add_text(turn, text or refusal or "")
            else:
                raise UnsupportedError("only text and input_image are supported", field=part.path("type"))

    def _assistant(self) -> pb.ChatMessage:
        """Return the current assistant turn, which collects consecutive reasoning, text and call items."""
        if not self._is_open:
            self.turns.append(pb.ChatMessage(role="assistant"))
            self._is_open = True
        return self.turns[-1]

    def _call(self, item: Body, arguments: object) -> None:
        name = item.text("name")
        if not name:
            raise InvalidArgumentError("must be set", field=item.path("name"))
        turn = self._assistant()
        function = {"name": full_name(item.text("namespace") or "", name), "arguments": arguments}
        call_id = _call_id(item)
        self._has_output[call_id] = False
        self._calls.append({"id": call_id, "type": "function", "function": function})
        turn.tool_calls_json = json.dumps(self._calls)

    def _answer(self, item: Body) -> str:
        """Return the id of the call that an item answers."""
        call_id = _call_id(item)
        if call_id not in self._has_output:
            raise InvalidArgumentError(
                f"there is no call {call_id[:64]!r} before this output", field=item.path("call_id")
            )
        self._has_output[call_id] = True
        return call_id

    def _close(self) -> None:
        self._is_open = False
        self._calls = []


def hide_reasoning(text: str) -> str:
    """Encode reasoning for clients that return it without its text. It is not encrypted, since clients get the text
    too.
    """
    return base64.b64encode(text.encode()).decode()


def _reasoning(item: Body) -> str:
    parts = [*item.objects("content"), *([] if item.has("content") else item.objects("summary"))]
    text = "\n".join(part.text("text") or "" for part in parts)
    hidden = item.text("encrypted_content")
    if text or not hidden:
        return text
    try:
        return base64.b64decode(hidden, validate=True).decode()
    except (binascii.Error, ValueError):
        raise InvalidArgumentError("was not issued by this service", field=item.path("encrypted_content")) from None


def _call_id(item: Body) -> str:
    call_id = item.text("call_id")
    if not call_id:
        raise InvalidArgumentError("must be set", field=item.path("call_id"))
    return call_id


def listed(item: Item, item_id: object) -> Item:
    """Return an item as it appears in lists: with a type, the given id, and its text as content parts."""
    kind = item.get("type") or "message"
    shown: Item = {**item, "type": kind, "id": item_id}
    if kind == "message" and isinstance(item.get("content"), str):
        part = "output_text" if item.get("role") == "assistant" else "input_text"
        shown["content"] = [{"type": part, "text": item["content"]}]
    return shown


def item_page(items: Sequence[Item], query: Mapping[str, str]) -> dict[str, object]:
    """Return the page of a list of items, oldest first, for which a query asks. Raises InvalidArgumentError if a
    parameter is invalid.
    """
    limit = page_limit(query, _LISTED, _MAX_LISTED)
    ordered = list(items) if is_ascending(query) else list(reversed(items))
    after = query.get("after")
    if after:
        ids = [item["id"] for item in ordered]
        if after not in ids:
            raise InvalidArgumentError("is not an item of this list", field="after")
        ordered = ordered[ids.index(after) + 1 :]
    page = ordered[:limit]
    ends = {"first_id": page[0]["id"] if page else None, "last_id": page[-1]["id"] if page else None}
    return {"object": "list", "data": page, **ends, "has_more": len(ordered) > limit}
