"""Converts chat messages to turns of the native request."""

from __future__ import annotations

import json

from midstream.errors import InvalidArgumentError, UnsupportedError
from protos import generation_pb2 as pb
from router.protocols.contents import add_image, add_text, check_detail, image_of_url
from router.protocols.openai.body import Body

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
# Fields that an assistant's message may have instead of content.
_INSTEAD = ("tool_calls", "reasoning_content", "reasoning", "refusal", "function_call", "audio")


def chat_messages(body: Body, template: str = "") -> tuple[list[pb.ChatMessage], list[str]]:
    """Return the messages of a body, and for each of their images the field that contains it.

    Args:
        template: The chat template; the roles that it names are accepted besides OpenAI's.

    Raises:
        InvalidArgumentError: A message is invalid.
        UnsupportedError: A message has content other than text and images.
    """
    image_fields: list[str] = []
    return [_message(message, template, image_fields) for message in body.objects("messages")], image_fields


def _message(message: Body, template: str, image_fields: list[str]) -> pb.ChatMessage:
    reasoning, older_name = message.text("reasoning_content"), message.text("reasoning")
    turn = pb.ChatMessage(
        role=_role(message, template),
        tool_call_id=message.text("tool_call_id") or "",
        name=message.text("name") or "",
        reasoning_content=reasoning or older_name or "",
    )
    _add_content(turn, message, image_fields)
    calls = [_tool_call(call) for call in message.objects("tool_calls")]
    if calls:
        turn.tool_calls_json = json.dumps(calls)
    return turn


def _role(message: Body, template: str) -> str:
    role = message.text("role")
    if not role:
        raise InvalidArgumentError("must be set", field=message.path("role"))
    if role not in _ROLES and not any(f"{quote}{role}{quote}" in template for quote in "'\""):
        raise InvalidArgumentError(f"{role[:64]!r} is not known; use {', '.join(_ROLES)}", field=message.path("role"))
    return role


def _add_content(turn: pb.ChatMessage, message: Body, image_fields: list[str]) -> None:
    if not isinstance(message.fields.get("content"), list):
        content = message.text("content")
        instead = _INSTEAD if turn.role == "assistant" else ()
        if content is None and turn.role != "function" and not any(map(message.fields.get, instead)):
            raise InvalidArgumentError("must be set", field=message.path("content"))
        turn.content = content or ""
        return
    for part in message.objects("content"):
        kind = part.text("type")
        if kind == "image_url":
            source = part.child("image_url")
            if source is None:
                raise InvalidArgumentError("must be an object with a url", field=part.path("image_url"))
            add_image(turn, image_of_url(source.text("url") or "", source.path("url")))
            image_fields.append(source.path("url"))
            check_detail(source)
        elif kind in ("text", "refusal"):
            text, refusal = part.text("text"), part.text("refusal")
            if text is None and refusal is None:
                raise InvalidArgumentError("must be set", field=part.path(kind))
            add_text(turn, text or refusal or "")
        else:
            raise UnsupportedError("only text and image_url are supported", field=part.path("type"))


def _tool_call(call: Body) -> dict[str, object]:
    function = call.child("function")
    if function is None:
        raise InvalidArgumentError("must be an object", field=call.path("function"))
    function_fields = {"name": function.text("name") or "", "arguments": function.get("arguments")}
    return {"id": call.text("id") or "", "type": "function", "function": function_fields}
