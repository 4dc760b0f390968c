"""Converts chat messages to turns of the native request."""

from __future__ import annotations

import json

from midstream.errors import InvalidArgumentError, UnsupportedError
from protos import generation_pb2 as pb
from router.protocols.contents import add_image, add_text, image_of_url
from router.protocols.openai.body import Body


def chat_messages(body: Body) -> list[pb.ChatMessage]:
    """Return the messages of a body. Raises InvalidArgumentError if a message is invalid, or UnsupportedError if a
    message has content other than text and images.
    """
    return [_message(message) for message in body.objects("messages")]


def _message(message: Body) -> pb.ChatMessage:
    reasoning, older_name = message.text("reasoning_content"), message.text("reasoning")
    turn = pb.ChatMessage(
        role=message.text("role") or "",
        tool_call_id=message.text("tool_call_id") or "",
        name=message.text("name") or "",
        reasoning_content=reasoning or older_name or "",
    )
    _add_content(turn, message)
    calls = [_tool_call(call) for call in message.objects("tool_calls")]
    if calls:
        turn.tool_calls_json = json.dumps(calls)
    return turn


def _add_content(turn: pb.ChatMessage, message: Body) -> None:
    if not isinstance(message.fields.get("content"), list):
        turn.content = message.text("content") or ""
        return
    for part in message.objects("content"):
        kind = part.text("type")
        if kind == "image_url":
            source = part.child("image_url")
            if source is None:
                raise InvalidArgumentError("must be an object with a url", field=part.path("image_url"))
            add_image(turn, image_of_url(source.text("url") or "", source.path("url")))
        elif kind in ("text", "refusal"):
            add_text(turn, part.text("text") or part.text("refusal") or "")
        else:
            raise UnsupportedError("only text and image_url are supported", field=part.path("type"))


def _tool_call(call: Body) -> dict[str, object]:
    """Parse a call's arguments: templates expect an object, but OpenAI's clients send JSON text."""
    function = call.child("function")
    if function is None:
        raise InvalidArgumentError("must be an object", field=call.path("function"))
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            raise InvalidArgumentError("is not JSON", field=function.path("arguments")) from None
    function_fields = {"name": function.text("name") or "", "arguments": arguments}
    return {"id": call.text("id") or "", "type": "function", "function": function_fields}
