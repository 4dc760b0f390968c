"""Converts the body of a /v1/responses call to a conversation."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from midstream.errors import InvalidArgumentError, UnsupportedError
from protos import generation_pb2 as pb
from router.parsers.machine import Schema
from router.pipeline.request_checks import MAX_LOG_PROBS
from router.protocols.contents import image_names
from router.protocols.conversation import ChatModel, Conversation, Tools, drop_format, keep_prefix
from router.protocols.fields import RESPONSES, RESPONSES_OPAQUE, RESPONSES_TYPES, check_fields
from router.protocols.openai.body import Body
from router.protocols.openai.parameters import (
    effort_variables,
    fill_sampling,
    fill_stopping,
    json_object_guide,
    read_cache_retention_s,
    read_client_id,
    read_priority,
    schema_guide,
    template_variables,
)
from router.protocols.openai.tools import check_new_tool, schema_names
from router.protocols.receipts import wants_receipt
from router.protocols.responses.items import CUSTOM_SCHEMA, Item, Turns, full_name, input_items

_MAX_METADATA, _MAX_KEY, _MAX_VALUE = 16, 64, 512


# A tool that clients send by default and that is not offered to the model.
_LEFT_OUT = "web_search"
# Values of `include`; all but the first two have no effect here.
_LOG_PROBS = "message.output_text.logprobs"
_INCLUDABLE = (
    "reasoning.encrypted_content", _LOG_PROBS, "file_search_call.results", "web_search_call.results",
    "web_search_call.action.sources", "message.input_image.image_url", "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)  # fmt: skip


@dataclass(slots=True)
class ResponseJob:
    """One requested response.

    Attributes:
        echo: Fields of the response that repeat fields of the request.
        custom_tools: Names of tools whose input is free text.
        namespaces: For each tool of a namespace, by the name that the model sees, the namespace and its name there.
        is_stored: Whether the response can be retrieved and continued.
        is_background: Whether it continues when its client disconnects.
        shows_hidden: Whether reasoning items have `encrypted_content`.
        num_top_log_probs: Number of the most likely tokens to report with the log probability of each token of a
            message; None for no log probabilities.
        ignored: Fields of the body that have no effect.
        names: The client's names for native fields, for errors.
    """

    conversation: Conversation
    echo: dict[str, object]
    items: list[Item]
    custom_tools: frozenset[str]
    namespaces: Mapping[str, tuple[str, str]]
    is_stream: bool
    is_stored: bool
    is_background: bool
    shows_hidden: bool
    num_top_log_probs: int | None
    ignored: list[str]
    names: Mapping[str, str]


def previous_id(body: Body) -> str:
    """Return the id of the response that a body continues; empty if there is none."""
    return body.text("previous_response_id") or ""


def conversation_id_of(body: Body) -> str:
    """Return the id of the conversation to which a response belongs; empty if there is none. Raises
    InvalidArgumentError if the field is neither an id nor an object with one, or cannot be combined with others.
    """
    if body.fields.get("conversation") is None:
        return ""
    is_object = isinstance(body.fields["conversation"], dict)
    owner = body.child("conversation") if is_object else body
    assert owner is not None
    found = owner.text("id" if is_object else "conversation")
    if not found:
        raise InvalidArgumentError("must be an id, or an object with an id", field="conversation")
    if previous_id(body):
        raise InvalidArgumentError("must not be set together with previous_response_id", field="conversation")
    if body.flag("store") is False:
        raise InvalidArgumentError("needs store, since its items are stored", field="conversation")
    return found


def read_response(body: Body, model: ChatModel, context: Sequence[Item] = ()) -> ResponseJob:
    """Return the job for a body.

    Args:
        context: Input and output items of the responses that it continues.

    Raises:
        InvalidArgumentError: A field is invalid, missing or unknown.
        UnsupportedError: The body uses a feature that this service lacks.
    """
    ignored = check_fields(body, RESPONSES, RESPONSES_TYPES, RESPONSES_OPAQUE)
    conversation_id_of(body)  # checks the field
    is_stored, is_background = body.flag("store") is not False, bool(body.flag("background"))
    if is_background and not is_stored:
        raise InvalidArgumentError("needs store", field="background")
    items = input_items(body)
    turns = Turns(model.has_developer)
    turns.instruct(body.text("instructions") or "")
    turns.add([*(Body(item, "previous_response_id.") for item in context), *items])
    if not turns.turns:
        raise InvalidArgumentError("must not be empty", field="input")
    turns.check_calls()
    client_id, names = read_client_id(body)
    request = pb.GenerateRequest(
        model=body.text("model") or "",
        streaming=True,
        client_id=client_id,
        priority=read_priority(body),
        cache_salt=body.text("cache_salt") or "",
        detached=is_background,
        chat=pb.ChatInput(messages=turns.turns),
    )
    if wants_receipt(body):
        request.output.return_receipt = True
    max_tokens = body.integer("max_output_tokens", 1)
    if max_tokens is not None:
        request.max_tokens = max_tokens
    fill_sampling(body, request.sampling)
    fill_stopping(body, request.stopping)
    retention_s = read_cache_retention_s(body)
    if retention_s:
        keep_prefix(request, None, retention_s)
    _fill_template(body, request.chat, model)
    num_top = _num_top(body, request, ignored)
    ignored += _text_format(body, request)
    _refuse_values(body)
    offer = _Offer()
    tools, schema_names = _tools(body, offer)
    ignored += drop_format(request, tools, "text.format")
    names |= _names(request, turns, schema_names)
    if model.hides(tools):
        ignored.append("tools")
    if model.ignores_strict(replace(tools, strict=tools.strict - offer.custom)):
        ignored.append("tools.strict")
    return ResponseJob(
        Conversation(request, tools, model),
        echo_of(body),
        [item.fields for item in items],
        frozenset(offer.custom),
        offer.namespaces,
        bool(body.flag("stream")),
        is_stored,
        is_background,
        "reasoning.encrypted_content" in body.texts("include"),
        num_top,
        ignored,
        names,
    )


def _fill_template(body: Body, chat: pb.ChatInput, model: ChatModel) -> None:
    """Set the variables of the chat template."""
    reasoning = body.child("reasoning")
    variables = effort_variables(reasoning, "effort", model) if reasoning is not None else {}
    variables |= template_variables(body, chat)
    if variables:
        chat.template_variables_json = json.dumps(variables)


def _num_top(body: Body, request: pb.GenerateRequest, ignored: list[str]) -> int | None:
    """Return the number of likely tokens to report; None for no log probabilities, where `top_logprobs` is ignored."""
    num_top = body.integer("top_logprobs", 0, MAX_LOG_PROBS)
    if _LOG_PROBS in body.texts("include"):
        request.output.log_probs = num_top or 0
        return num_top or 0
    if num_top:
        ignored.append("top_logprobs")
    return None


def _names(request: pb.GenerateRequest, turns: Turns, schema_names: dict[str, str]) -> dict[str, str]:
    """Return the client's names for native fields; `schema_names` are those for the tools' schemas."""
    names = {"max_tokens": "max_output_tokens", **dict.fromkeys(("chat", "token_ids", "prompt_tuning.table"), "input")}
    own = {"guided_decoding": "text.format"} if request.HasField("guided_decoding") else {}
    return names | image_names(request, turns.image_fields) | schema_names | own


def _text_format(body: Body, request: pb.GenerateRequest) -> list[str]:
    """Set the guide for the format of the answer; return the fields of the format that have no effect."""
    text = body.child("text")
    output = text.child("format") if text is not None else None
    if output is None:
        return []
    kind, schema = output.choice("type", ("text", "json_object", "json_schema")), output.get("schema")
    if kind == "json_object":
        request.guided_decoding.CopyFrom(json_object_guide())
    if kind in ("text", "json_object"):
        return ["text.format.schema"] if schema else []
    if kind is None or not isinstance(schema, dict):
        raise InvalidArgumentError("must be a json_schema with a schema", field="text.format")
    request.guided_decoding.CopyFrom(schema_guide(schema, output.flag("strict")))
    return []


def _refuse_values(body: Body) -> None:
    """Reject invalid values of `include` and `metadata`."""
    for extra in body.texts("include"):
        if extra not in _INCLUDABLE:
            raise InvalidArgumentError(f"{extra[:64]!r} is not known; use {', '.join(_INCLUDABLE)}", field="include")
    check_metadata(body)


def check_metadata(body: Body) -> Mapping[str, object]:
    """Return the metadata of a body; empty if there are none. Raises InvalidArgumentError if they are invalid."""
    metadata = body.get("metadata")
    pairs = metadata.items() if isinstance(metadata, dict) else ()
    if metadata is not None and not isinstance(metadata, dict):
        raise InvalidArgumentError("must be an object", field="metadata")
    is_short = all(isinstance(value, str) and len(value) <= _MAX_VALUE and len(key) <= _MAX_KEY for key, value in pairs)
    if len(pairs) > _MAX_METADATA or not is_short:
        reason = (
            f"must have at most {_MAX_METADATA} pairs of strings, with keys of at most {_MAX_KEY} characters and "
            f"values of at most {_MAX_VALUE}"
        )
        raise InvalidArgumentError(reason, field="metadata")
    return metadata or {}


@dataclass(slots=True)
class _Offer:
    """The tools of a body, by the name that the model sees.

    Attributes:
        paths: The client's field of each tool's schema.
    """

    schemas: dict[str, Schema] = field(default_factory=dict)
    definitions: dict[str, object] = field(default_factory=dict)
    paths: dict[str, str] = field(default_factory=dict)
    strict: set[str] = field(default_factory=set)
    custom: set[str] = field(default_factory=set)
    namespaces: dict[str, tuple[str, str]] = field(default_factory=dict)

    def add_all(self, body: Body) -> None:
        """Add the tools of a body, and those of its namespaces."""
        for tool in body.objects("tools"):
            kind = tool.text("type")
            if kind == "namespace":
                self._add_namespace(tool)
            elif kind != _LEFT_OUT:
                self._add(tool)

    def known(self, name: str) -> str:
        """Return the name that the model sees for the client's name of a tool, which may lack the namespace."""
        found = [full for full, (_, own) in self.namespaces.items() if own == name]
        return found[0] if name not in self.schemas and len(found) == 1 else name

    def _add_namespace(self, body: Body) -> None:
        namespace, description = body.text("name"), body.text("description") or ""
        if not namespace:
            raise InvalidArgumentError("must be set", field=body.path("name"))
        for tool in body.objects("tools"):
            # The model reads the description of the namespace once, before that of its first tool.
            self._add(tool, namespace, description)
            description = ""

    def _add(self, tool: Body, namespace: str = "", preface: str = "") -> None:
        kind, own_name = tool.text("type"), tool.text("name")
        if kind not in ("function", "custom"):
            raise UnsupportedError("only function and custom are supported", field=tool.path("type"))
        if not own_name:
            raise InvalidArgumentError("must be set", field=tool.path("name"))
        name = full_name(namespace, own_name)
        check_new_tool(name, self.schemas, tool.path("name"))
        schema = tool.get("parameters") or {"type": "object"}
        if kind == "custom":
            schema = CUSTOM_SCHEMA
            self.custom.add(name)
        if not isinstance(schema, dict):
            raise InvalidArgumentError("must be an object", field=tool.path("parameters"))
        self.schemas[name], self.paths[name] = schema, tool.path("parameters")
        description = "\n\n".join(filter(None, (preface, tool.text("description"))))
        function = {"name": name, "description": description, "parameters": schema}
        self.definitions[name] = {"type": "function", "function": function}
        if tool.flag("strict") or kind == "custom":
            self.strict.add(name)
        if namespace:
            self.namespaces[name] = (namespace, own_name)


def _tools(body: Body, offer: _Offer) -> tuple[Tools, dict[str, str]]:
    """Return the tools of a body, and the client's names for the native fields that contain their schemas."""
    offer.add_all(body)
    is_parallel = body.flag("parallel_tool_calls") is not False
    tools = Tools(offer.schemas, offer.definitions, strict=frozenset(offer.strict), is_parallel=is_parallel)
    tools = _chosen(body, tools, offer)
    return tools, schema_names(tools, offer.paths)


def _chosen(body: Body, tools: Tools, offer: _Offer) -> Tools:
    """Return the tools after applying tool_choice."""
    value = body.get("tool_choice")
    if value in (None, "auto"):
        return tools if tools.schemas else Tools()
    if value == "none":
        return Tools()
    if value == "required":
        if not tools.schemas:
            raise InvalidArgumentError("needs tools", field="tool_choice")
        return replace(tools, choice="required")
    choice = body.child("tool_choice") if isinstance(value, dict) else None
    if choice is None:
        raise InvalidArgumentError("must be none, auto, required or an object", field="tool_choice")
    kind = choice.text("type")
    if kind == "allowed_tools":
        mode = choice.choice("mode", ("auto", "required")) or "auto"
        allowed = {offer.known(tool.text("name") or "") for tool in choice.objects("tools")}
        return tools.allow(allowed, "required" if mode == "required" else "auto", "tool_choice.tools")
    if kind not in ("function", "custom"):
        raise UnsupportedError("only function, custom and allowed_tools are supported", field="tool_choice.type")
    return tools.require(offer.known(choice.text("name") or ""), "tool_choice.name")


def echo_of(body: Body) -> dict[str, object]:
    """Return the response fields that repeat fields of the request."""
    text = body.get("text")
    reasoning = body.get("reasoning")
    tier = body.get("service_tier")
    conversation = body.get("conversation")
    return {
        "background": bool(body.get("background")),
        "instructions": body.get("instructions"),
        "conversation": {"id": conversation} if isinstance(conversation, str) else conversation,
        "max_output_tokens": body.get("max_output_tokens"),
        "max_tool_calls": body.get("max_tool_calls"),
        "metadata": body.get("metadata") or {},
        "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
        "previous_response_id": body.get("previous_response_id"),
        "prompt_cache_key": body.get("prompt_cache_key"),
        "prompt_cache_retention": body.get("prompt_cache_retention"),
        "reasoning": {"effort": None, "summary": None} | (reasoning if isinstance(reasoning, dict) else {}),
        "safety_identifier": body.get("safety_identifier"),
        "service_tier": tier if tier not in (None, "auto") else "default",
        "store": body.get("store") is not False,
        "temperature": body.get("temperature"),
        "text": {"format": {"type": "text"}} | (text if isinstance(text, dict) else {}),
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "top_logprobs": body.get("top_logprobs") or 0,
        "top_p": body.get("top_p"),
        "truncation": body.get("truncation") or "disabled",
        "user": body.get("user"),
    }
