"""Reads a chat request's tools and tool_choice."""

from __future__ import annotations

from midstream.errors import InvalidArgumentError, UnsupportedError
from router.parsers.machine import Schema
from router.protocols.conversation import Tools
from router.protocols.openai.body import Body


def read_tools(body: Body) -> Tools:
    """Return the tools of a body. Raises InvalidArgumentError if tools or tool_choice are invalid, or UnsupportedError
    if a tool is not a function.
    """
    schemas: dict[str, Schema] = {}
    strict = set()
    for tool in body.objects("tools"):
        name, schema, is_strict = _function(tool)
        schemas[name] = schema
        if is_strict:
            strict.add(name)
    is_parallel = body.flag("parallel_tool_calls") is not False
    choice = body.get("tool_choice")
    named = ""
    if isinstance(choice, dict):
        named = _named(body, schemas)
    elif choice not in (None, "none", "auto", "required"):
        raise InvalidArgumentError("must be none, auto, required or a function", field="tool_choice")
    if choice == "required" and not schemas:
        raise InvalidArgumentError("needs tools", field="tool_choice")
    if choice == "none" or not schemas:
        return Tools()
    return Tools(
        schemas,
        tuple(body.array("tools")),
        "named" if named else "required" if choice == "required" else "auto",
        named,
        frozenset(strict),
        is_parallel,
    )


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


def _named(body: Body, schemas: dict[str, Schema]) -> str:
    choice = body.child("tool_choice")
    function = choice.child("function") if choice is not None else None
    if choice is None or choice.text("type") != "function" or function is None:
        raise UnsupportedError("only functions can be chosen", field="tool_choice")
    name = function.text("name") or ""
    if name not in schemas:
        raise InvalidArgumentError(f"{name[:64]!r} is not among the tools", field="tool_choice.function.name")
    return name
