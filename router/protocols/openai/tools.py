"""Reads a chat request's tools and tool_choice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from midstream.errors import InvalidArgumentError, UnsupportedError
from router.parsers.machine import Schema
from router.protocols.conversation import Tools, tool_field
from router.protocols.openai.body import Body


def read_tools(body: Body) -> tuple[Tools, dict[str, str]]:
    """Return the tools of a body, and the client's names for the native fields that contain their schemas. Raises
    InvalidArgumentError if tools or tool_choice are invalid, or UnsupportedError if a tool is not a function.
    """
    schemas: dict[str, Schema] = {}
    definitions: dict[str, object] = {}
    paths: dict[str, str] = {}
    strict = set()
    for tool in body.objects("tools"):
        name, schema, is_strict = _function(tool)
        check_new_tool(name, schemas, tool.path("function.name"))
        schemas[name], definitions[name], paths[name] = schema, _shown(tool), tool.path("function.parameters")
        if is_strict:
            strict.add(name)
    is_parallel = body.flag("parallel_tool_calls") is not False
    tools = _chosen(body, Tools(schemas, definitions, strict=frozenset(strict), is_parallel=is_parallel))
    return tools, schema_names(tools, paths)


def check_new_tool(name: str, known: Mapping[str, object], field: str) -> None:
    """Raise InvalidArgumentError if an earlier tool has the same name."""
    if name in known:
        raise InvalidArgumentError(f"{name[:64]!r} is already the name of an earlier tool", field=field)


def schema_names(tools: Tools, paths: Mapping[str, str]) -> dict[str, str]:
    """Return the client's names for native fields that contain schemas; `paths` has the field of each tool's schema."""
    names = {tool_field(name): paths[name] for name in tools.schemas}
    if tools.choice == "named":
        return names | {"guided_decoding": paths[tools.named]}
    restricted = list(tools.schemas if tools.choice == "required" else tools.strict)
    return names | {"guided_decoding": paths[restricted[0]] if len(restricted) == 1 else "tools"}


def _chosen(body: Body, tools: Tools) -> Tools:
    """Return the tools after applying tool_choice."""
    value = body.fields.get("tool_choice")
    if isinstance(value, dict):
        return _chosen_functions(body, tools)
    body.get("tool_choice")  # marks it as read; fields of an object are read one by one, to find unknown ones
    if value not in (None, "none", "auto", "required"):
        raise InvalidArgumentError("must be none, auto, required or an object", field="tool_choice")
    if value == "required" and not tools.schemas:
        raise InvalidArgumentError("needs tools", field="tool_choice")
    if value == "none" or not tools.schemas:
        return Tools()
    return replace(tools, choice="required") if value == "required" else tools


def _chosen_functions(body: Body, tools: Tools) -> Tools:
    choice = body.child("tool_choice")
    kind = choice.text("type") if choice is not None else None
    if choice is None or kind not in ("function", "allowed_tools"):
        raise UnsupportedError("only function and allowed_tools are supported", field="tool_choice.type")
    if kind == "function":
        return tools.require(_function_name(choice), "tool_choice.function.name")
    allowed = choice.child("allowed_tools")
    if allowed is None:
        raise InvalidArgumentError("must be set", field="tool_choice.allowed_tools")
    mode = allowed.choice("mode", ("auto", "required")) or "auto"
    names = set()
    for tool in allowed.objects("tools"):
        if tool.text("type") != "function":
            raise UnsupportedError("only functions are supported", field=tool.path("type"))
        names.add(_function_name(tool))
    return tools.allow(names, "required" if mode == "required" else "auto", "tool_choice.allowed_tools.tools")


def _shown(tool: Body) -> dict[str, object]:
    """Return a tool as the template gets it, without what is not about the tool."""
    function = tool.fields["function"]
    assert isinstance(function, dict)
    if "cache_control" not in tool.fields and "cache_control" not in function:
        return tool.fields
    fields = {name: value for name, value in tool.fields.items() if name != "cache_control"}
    return {**fields, "function": {name: value for name, value in function.items() if name != "cache_control"}}


def _function_name(body: Body) -> str:
    function = body.child("function")
    return (function.text("name") or "") if function is not None else ""


def _function(tool: Body) -> tuple[str, Schema, bool]:
    if tool.text("type") != "function":
        raise UnsupportedError("only functions are supported", field=tool.path("type"))
    function = tool.child("function")
    name = function.text("name") if function is not None else None
    if function is None or not name:
        raise InvalidArgumentError("must be a function with a name", field=tool.path("function"))
    function.text("description")
    function.child("parameters")
    parameters = function.get("parameters")
    schema = parameters if isinstance(parameters, dict) and parameters else {"type": "object"}
    return name, schema, bool(function.flag("strict"))
