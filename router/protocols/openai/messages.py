"""Converts chat messages to turns of the native request."""

from __future__ import annotations

import base64
import json
from typing import TypedDict

from midstream.errors import InvalidArgumentError, UnsupportedError
from protos import generation_pb2 as pb
from router.protocols.openai.body import Body


class _Content(TypedDict, total=False):
    content: str
    parts: list[pb.ContentPart]


def chat_messages(body: Body) -> list[pb.ChatMessage]:
    """Return the messages of a body.

    Raises:
        InvalidArgumentError: A message is invalid.
        UnsupportedError: A message has content other than text and images.
    """
    return [_message(message) for message in body.objects("messages")]


def _message(message: Body) -> pb.ChatMessage:
    turn = pb.ChatMessage(
        role=message.text("role") or "",
        **_content(message),
        tool_call_id=message.text("tool_call_id") or "",
        name=message.text("name") or "",
        reasoning_content=message.text("reasoning_content") or message.text("reasoning") or "",
    )
    calls = [_tool_call(call) for call in message.objects("tool_calls")]
    if calls:
        turn.tool_calls_json = json.dumps(calls)
    return turn


def _content(message: Body) -> _Content:
    if not isinstance(message.fields.get("content"), list):
        return {"content": message.text("content") or ""}
    parts = [_part(part) for part in message.objects("content")]
    if any(part.HasField("image") for part in parts):
        return {"parts": parts}
    return {"content": "\n".join(part.text for part in parts)}


def _part(part: Body) -> pb.ContentPart:
    kind = part.text("type")
    if kind == "image_url":
        return pb.ContentPart(image=pb.Image(data=_image(part)))
    if kind not in ("text", "refusal"):
        raise UnsupportedError("only text and image_url are supported", field=part.path("type"))
    return pb.ContentPart(text=part.text("text") or part.text("refusal") or "")


def _image(part: Body) -> bytes:
    """Return the contents of the image file in a data URL."""
    source = part.child("image_url")
    if source is None:
        raise InvalidArgumentError("must be an object with a url", field=part.path("image_url"))
    url, field = source.text("url") or "", source.path("url")
    if not url.startswith("data:"):
        raise UnsupportedError("must be a data: URL with the image in base64; URLs are not fetched", field=field)
    head, _, data = url.partition(",")
    if not head.endswith(";base64"):
        raise InvalidArgumentError("must be in base64: data:image/png;base64,...", field=field)
    try:
        return base64.b64decode(data, validate=True)
    except ValueError:
        raise InvalidArgumentError("is not valid base64", field=field) from None


def _tool_call(call: Body) -> dict[str, object]:
    """Parse a call's arguments: templates expect an object, but OpenAI's clients send JSON text."""
    function = call.child("function")
    if function is None:
        raise InvalidArgumentError("must be an object", field=call.path("function"))
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            raise InvalidArgumentError("is not JSON", field=function.path("arguments")) from None
    function_fields = {"name": function.text("name") or "", "arguments": arguments}
    return {"id": call.text("id") or "", "type": "function", "function": function_fields}
