"""Converts the body of a /v1/messages call to a conversation."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from google.protobuf.message import Message

from midstream.errors import InvalidArgumentError, UnsupportedError
from protos import generation_pb2 as pb
from router.parsers.machine import Schema
from router.pipeline.prompt import PromptOptions, text_of
from router.pipeline.request_checks import MAX_NAME
from router.protocols.contents import add_image, add_text, image_names, image_of_base64
from router.protocols.conversation import EFFORTS, ChatModel, Conversation, Tools, drop_format
from router.protocols.fields import MESSAGES, MESSAGES_OPAQUE, MESSAGES_TYPES, check_fields
from router.protocols.openai.body import Body
from router.protocols.openai.errors import Names
from router.protocols.openai.tools import check_new_tool, schema_names
from router.protocols.receipts import wants_receipt

_TTLS_S = {"5m": 300, "1h": 3600}
_MAX_BREAKPOINTS = 4
_MIN_BUDGET = 1024
_EFFORT = "reasoning_effort"  # the template's variable


@dataclass(frozen=True, slots=True)
class Breakpoint:
    """The end of a prefix that the client wants cached.

    Attributes:
        num_turns: Number of turns of the conversation in the prefix, including the system turn; 0 if the prefix has
            only the tools.
        num_parts: Number of parts of the last of these turns that are in the prefix, if that turn has parts.
        num_characters: Number of characters of the last of these parts, or of the turn if it has no parts, that are in
            the prefix; None for all.
    """

    duration_s: int
    num_turns: int
    num_parts: int = 0
    num_characters: int | None = None

    def cut(self, turn: pb.ChatMessage) -> None:
        """Remove the content of the last turn that is not in the prefix."""
        if self.num_characters is None and not self.num_parts:
            return
        turn.content = turn.content[: self.num_characters]
        # Parts may have been added to the turn after the breakpoint.
        del turn.parts[max(self.num_parts, 1) :]
        if turn.parts and turn.parts[-1].HasField("text"):
            turn.parts[-1].text = turn.parts[-1].text[: self.num_characters]


@dataclass(slots=True)
class MessagesJob:
    """One request.

    Attributes:
        breakpoints: The cache breakpoints in order; at most four.
        ignored: Fields of the body that have no effect.
        names: The client's names for native fields, for errors.
    """

    conversation: Conversation
    model: str
    is_stream: bool
    shows_thinking: bool
    breakpoints: list[Breakpoint]
    ignored: list[str]
    names: Names

    def prefix_of(self, point: Breakpoint) -> pb.GenerateRequest | None:
        """Return a request whose prompt is the prefix that ends at `point`; None if that is the whole prompt."""
        chat = self.conversation.request.chat
        prefix = pb.GenerateRequest()
        assert isinstance(prefix.chat, Message)
        prefix.chat.CopyFrom(chat)
        del prefix.chat.messages[point.num_turns :]
        if point.num_turns:
            point.cut(prefix.chat.messages[-1])
        if prefix.chat == chat:
            return None
        # Templates require a user turn; its text must differ from any text that follows the prefix.
        prefix.chat.messages.add(role="user", content="\u0000")
        return prefix


@dataclass(slots=True)
class _Reading:
    """State while a body is read."""

    turns: list[pb.ChatMessage] = field(default_factory=list)
    breakpoints: list[Breakpoint] = field(default_factory=list)
    tool_names: dict[str, str] = field(default_factory=dict)
    image_fields: list[str] = field(default_factory=list)

    def add(self, turn: pb.ChatMessage, block: Body) -> None:
        """Append a block of text or an image to a turn."""
        if block.text("type") == "image":
            source = block.child("source")
            if source is None or source.text("type") != "base64":
                raise InvalidArgumentError("must be a base64 source", field=block.path("source"))
            path = source.path("data")
            add_image(turn, image_of_base64(source.text("data") or "", path))
            self.image_fields.append(path)
        else:
            add_text(turn, _text(block))

    def mark(self, block: Body, turn: pb.ChatMessage | None = None) -> None:
        """Record a breakpoint at the current position, which may be inside a turn, if the block has cache_control."""
        control = block.child("cache_control")
        if control is None:
            return
        if control.text("type") != "ephemeral":
            raise InvalidArgumentError("must be ephemeral", field=control.path("type"))
        ttl = control.choice("ttl", tuple(_TTLS_S)) or "5m"
        if len(self.breakpoints) == _MAX_BREAKPOINTS:
            raise InvalidArgumentError(
                f"must occur at most {_MAX_BREAKPOINTS} times in a request", field=block.path("cache_control")
            )
        point = Breakpoint(_TTLS_S[ttl], len(self.turns))
        if turn is not None:
            text = turn.parts[-1].text if turn.parts else turn.content
            point = replace(point, num_parts=len(turn.parts), num_characters=len(text))
        self.breakpoints.append(point)


def read_messages(body: Body, model: ChatModel, *, needs_limit: bool = True) -> MessagesJob:
    """Return the job for a body; /v1/messages/count_tokens does not require max_tokens. Raises InvalidArgumentError if
    a field is invalid, missing or unknown, or UnsupportedError if the body uses a feature that this service lacks.
    """
    ignored = check_fields(body, MESSAGES, MESSAGES_TYPES, MESSAGES_OPAQUE)
    max_tokens = body.integer("max_tokens", 1)
    if max_tokens is None and needs_limit:
        raise InvalidArgumentError("must be set", field="max_tokens")
    reading = _Reading()
    tools, schema_names = _tools(body, reading)
    if model.hides(tools):
        ignored.append("tools")
    if model.ignores_strict(tools):
        ignored.append("tools.strict")
    _conversation(body, reading)
    request = pb.GenerateRequest(
        request_id=body.text("request_id") or "",
        model=body.text("model") or "",
        streaming=bool(body.flag("stream")),
        client_id=_user(body),
        chat=pb.ChatInput(messages=reading.turns),
    )
    if wants_receipt(body):
        request.output.return_receipt = True
    if max_tokens is not None:
        request.max_tokens = max_tokens
    _sampling(body, request)
    is_thinking, is_shown = _thinking(body, max_tokens)
    variables, without_effect = _reasoning(body, model, is_thinking=is_thinking)
    ignored += without_effect
    if variables:
        request.chat.template_variables_json = json.dumps(variables)
    _output_format(body, request)
    ignored += drop_format(request, tools, "output_config.format")
    body.choice("service_tier", ("auto", "standard_only"))
    options = PromptOptions(continues_last=reading.turns[-1].role == "assistant")
    if options.continues_last:
        if is_thinking or tools.choice != "auto" or request.HasField("guided_decoding"):
            reason = "must end with a user turn, since thinking, a required call or a format begins a new answer"
            raise InvalidArgumentError(reason, field="messages")
        _check_prefill(reading.turns[-1])
    conversation = Conversation(request, tools, model, options=options)
    if request.HasField("guided_decoding"):
        schema_names["guided_decoding"] = "output_config.format"
    return MessagesJob(
        conversation,
        request.model,
        bool(body.flag("stream")),
        is_shown,
        reading.breakpoints,
        ignored,
        image_names(request, reading.image_fields) | schema_names | {"token_ids": "messages"},
    )


def _check_prefill(turn: pb.ChatMessage) -> None:
    """Check the assistant's text at the end of the conversation, which the answer continues."""
    if turn.tool_calls_json:
        raise InvalidArgumentError("must end with a tool_result for every tool_use of the last turn", field="messages")
    text = text_of(turn)
    if not text or text != text.rstrip():
        raise InvalidArgumentError(
            "the last assistant turn must have text without white space at its end", field="messages"
        )


def _sampling(body: Body, request: pb.GenerateRequest) -> None:
    for name in ("temperature", "top_p"):
        value = body.number(name)
        if value is not None:
            setattr(request.sampling, name, value)
    request.sampling.top_k = body.integer("top_k") or 0
    request.stopping.stop_words.extend(body.texts("stop_sequences"))


def _user(body: Body) -> str:
    metadata = body.child("metadata")
    user = (metadata.text("user_id") or "") if metadata is not None else ""
    # The user ids of Claude Code are longer than a client id may be.
    return user if len(user) <= MAX_NAME else hashlib.sha256(user.encode()).hexdigest()


def _thinking(body: Body, max_tokens: int | None) -> tuple[bool, bool]:
    """Return whether the model should reason, and whether the client gets the reasoning."""
    thinking = body.child("thinking")
    if thinking is None:
        return False, False
    kind = thinking.choice("type", ("enabled", "disabled", "adaptive", "between_tools"))
    if kind is None:
        raise InvalidArgumentError("must be set", field="thinking.type")
    budget = thinking.integer("budget_tokens")
    if kind == "enabled" and (budget or 0) < _MIN_BUDGET:
        raise InvalidArgumentError(f"must be at least {_MIN_BUDGET}", field="thinking.budget_tokens")
    if kind == "enabled" and max_tokens is not None and (budget or 0) >= max_tokens:
        raise InvalidArgumentError("must be less than max_tokens", field="thinking.budget_tokens")
    is_hidden = thinking.choice("display", ("summarized", "omitted")) == "omitted"
    return kind != "disabled", kind != "disabled" and not is_hidden


def _reasoning(body: Body, model: ChatModel, *, is_thinking: bool) -> tuple[dict[str, object], list[str]]:
    """Return the template variables for `thinking` and the effort, and which of the two fields have no effect."""
    config = body.child("output_config")
    effort = config.choice("effort", EFFORTS[2:]) if config is not None else None
    variables = model.thinking_variables((effort or "medium") if is_thinking else "none")
    has_switch = bool(variables.keys() - {_EFFORT})
    if effort and _EFFORT in variables:
        # The effort applies to the whole answer, with and without thinking.
        variables[_EFFORT] = model.thinking_variables(effort)[_EFFORT]
    ignored = []
    reasons = model.format.reasons
    if body.has("thinking") and (not reasons and not variables if is_thinking else reasons and not has_switch):
        ignored.append("thinking")  # the model does not reason, or always does
    if effort and _EFFORT not in variables:
        ignored.append("output_config.effort")
    return variables, ignored


def _output_format(body: Body, request: pb.GenerateRequest) -> None:
    config = body.child("output_config")
    output = config.child("format") if config is not None else None
    if output is None:
        return
    schema = output.get("schema")
    if output.text("type") != "json_schema" or not isinstance(schema, dict):
        raise InvalidArgumentError("must be a json_schema with a schema", field="output_config.format")
    request.guided_decoding.guide_type = pb.GUIDE_TYPE_JSON_SCHEMA
    request.guided_decoding.guide = json.dumps(schema)


def _tools(body: Body, reading: _Reading) -> tuple[Tools, dict[str, str]]:
    """Return the tools of a body, and the client's names for the native fields that contain their schemas."""
    schemas: dict[str, Schema] = {}
    paths: dict[str, str] = {}
    definitions: dict[str, object] = {}
    strict = set()
    for tool in body.objects("tools"):
        if tool.text("type") not in (None, "custom"):
            raise UnsupportedError("only client tools are supported", field=tool.path("type"))
        name, schema = tool.text("name"), tool.get("input_schema")
        if not name:
            raise InvalidArgumentError("must be set", field=tool.path("name"))
        if not isinstance(schema, dict):
            raise InvalidArgumentError("must be an object", field=tool.path("input_schema"))
        check_new_tool(name, schemas, tool.path("name"))
        schemas[name], paths[name] = schema or {"type": "object"}, tool.path("input_schema")
        function = {"name": name, "description": tool.text("description") or "", "parameters": schema}
        definitions[name] = {"type": "function", "function": function}
        if tool.flag("strict"):
            strict.add(name)
        reading.mark(tool)
    tools = _chosen(body, Tools(schemas, definitions, strict=frozenset(strict)))
    return tools, schema_names(tools, paths)


def _chosen(body: Body, tools: Tools) -> Tools:
    """Return the tools after applying tool_choice."""
    choice = body.child("tool_choice")
    if choice is None:
        return tools
    kind = choice.choice("type", ("auto", "any", "tool", "none"))
    if kind is None or (kind in ("any", "tool") and not tools.schemas):
        raise InvalidArgumentError("must have a type, and requires tools", field="tool_choice")
    if kind == "none":
        return Tools()
    tools = replace(tools, is_parallel=not choice.flag("disable_parallel_tool_use"))
    if kind == "tool":
        return tools.require(choice.text("name") or "", "tool_choice.name")
    return replace(tools, choice="required" if kind == "any" else "auto")


def _conversation(body: Body, reading: _Reading) -> None:
    """Add the system text and all messages; a breakpoint set by the body itself is after the last message."""
    _system(body, reading)
    for message in body.objects("messages"):
        _message(message, reading)
    if not any(turn.role == "user" for turn in reading.turns):
        raise InvalidArgumentError("must have a user message with content", field="messages")
    reading.mark(body)


def _system(body: Body, reading: _Reading) -> None:
    value = body.get("system")
    if isinstance(value, str) or value is None:
        if value:
            reading.turns.append(pb.ChatMessage(role="system", content=value))
        return
    blocks = body.objects("system")
    if not blocks:  # as if it were not set, so that the template's own system text remains
        return
    turn = pb.ChatMessage(role="system")
    reading.turns.append(turn)
    for block in blocks:
        add_text(turn, _text(block))
        reading.mark(block, turn)


def _message(message: Body, reading: _Reading) -> None:
    role = message.choice("role", ("user", "assistant", "system"))
    if role is None:
        raise InvalidArgumentError("must be set", field=message.path("role"))
    content = message.get("content")
    if isinstance(content, str):
        reading.turns.append(pb.ChatMessage(role=role, content=content))
    elif content is None:
        raise InvalidArgumentError("must be set", field=message.path("content"))
    elif role == "assistant":
        _assistant_blocks(message, reading)
    else:
        _blocks(role, message, reading)


def _blocks(role: str, message: Body, reading: _Reading) -> None:
    """Add text and tool results; each result becomes a separate turn."""
    turn: pb.ChatMessage | None = None
    for block in message.objects("content"):
        if block.text("type") == "tool_result":
            call_id = block.text("tool_use_id") or ""
            if call_id not in reading.tool_names:
                raise InvalidArgumentError(
                    f"{call_id[:64]!r} is not the id of a tool_use block in an earlier assistant turn",
                    field=block.path("tool_use_id"),
                )
            turn = None
            result = pb.ChatMessage(role="tool", tool_call_id=call_id, name=reading.tool_names[call_id])
            if isinstance(block.get("content"), str):
                result.content = block.text("content") or ""
            else:
                for part in block.objects("content"):
                    reading.add(result, part)
            block.flag("is_error")
            reading.turns.append(result)
            reading.mark(block, result)
            continue
        if turn is None:
            turn = pb.ChatMessage(role=role)
            reading.turns.append(turn)
        reading.add(turn, block)
        reading.mark(block, turn)


def _assistant_blocks(message: Body, reading: _Reading) -> None:
    turn = pb.ChatMessage(role="assistant")
    reading.turns.append(turn)
    calls: list[Mapping[str, object]] = []
    for block in message.objects("content"):
        kind = block.text("type")
        if kind == "thinking":
            turn.reasoning_content += block.text("thinking") or ""
        elif kind == "tool_use":
            call_id, name = block.text("id") or "", block.text("name") or ""
            if not isinstance(block.get("input"), dict):
                raise InvalidArgumentError("must be an object", field=block.path("input"))
            reading.tool_names[call_id] = name
            function = {"name": name, "arguments": block.get("input")}
            calls.append({"id": call_id, "type": "function", "function": function})
        elif kind != "redacted_thinking":
            add_text(turn, _text(block))
        reading.mark(block)
    if calls:
        turn.tool_calls_json = json.dumps(calls)


def _text(block: Body) -> str:
    if block.text("type") != "text":
        raise UnsupportedError(
            "only text, image, tool_use, tool_result and thinking are supported", field=block.path("type")
        )
    text = block.text("text")
    if text is None:
        raise InvalidArgumentError("must be set", field=block.path("text"))
    return text
