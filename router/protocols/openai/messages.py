"""Converts chat messages to turns of the native request."""

from __future__ import annotations

import json

from midstream.errors import InvalidArgumentError, UnsupportedError
from protos import generation_pb2 as pb
from router.protocols.openai.body import Body


def chat_messages(body: Body) -> list[pb.ChatMessage]:
    """Return the messages of a body.

    Raises:
        InvalidArgumentError: A message is invalid.
        UnsupportedError: A message has content that is not text.
    """
    return [_message(message) for message in body.objects("messages")]


def _message(message: Body) -> pb.ChatMessage:
    turn = pb.ChatMessage(
        role=message.text("role") or "",
        content=_content(message),
        tool_call_id=message.text("tool_call_id") or "",
        name=message.text("name") or "",
        reasoning_content=message.text("reasoning_content") or message.text("reasoning") or "",
    )
    calls = [_tool_call(call) for call in message.objects("tool_calls")]
    if calls:
        turn.tool_calls_json = json.dumps(calls)
    return turn


def _content(message: Body) -> str:
    if not isinstance(message.fields.get("content"), list):
        return message.text("content") or ""
    texts = []
    for part in message.objects("content"):
        if part.text("type") not in ("text", "refusal"):
            raise UnsupportedError("only text is supported", field=part.path("type"))
        texts.append(part.text("text") or part.text("refusal") or "")
    return "\n".join(texts)


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
