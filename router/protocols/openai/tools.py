"""The tools that a chat request offers, and what it demands of them.

A call that is demanded (`required`, or one by name) is brought about by a grammar of the tools' parameters, with any
model. One that is left to the model (`auto`) is found where the model's format is known (tool_calls.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from midstream.errors import InvalidArgumentError, UnsupportedError
from protos import generation_pb2 as pb
from router.protocols.openai.body import Body
from router.protocols.openai.tool_calls import ArgumentsReader, BareReader, MakeReader, Reader


@dataclass(frozen=True, slots=True)
class Tools:
    """What a request says of tools.

    Attributes:
        tools_json: For the chat template; empty where there are none.
        guide: That makes the model call one, where that is demanded.
        reader: Makes a reader of one sequence; None where text is content.
        is_named: One tool is demanded by name.
    """

    tools_json: str = ""
    guide: pb.GuidedDecodingConfig | None = None
    reader: Callable[[], Reader] | None = None
    is_named: bool = False


def read_tools(body: Body, auto: MakeReader | None) -> Tools:
    """The tools of a body; `auto` reads calls as the model writes them.

    Raises:
        InvalidArgumentError: Tools or the choice are not what they should be.
        UnsupportedError: Tools that are not functions.
    """
    parameters = dict(_function(tool) for tool in body.objects("tools"))
    choice = _choice(body, parameters)
    if not parameters or choice == "none":
        return Tools()
    tools_json = json.dumps(body.get("tools"))
    if choice == "auto":
        return Tools(tools_json, reader=(lambda: auto(parameters)) if auto else None)
    if choice == "required":
        calls = [_call_schema(name, schema) for name, schema in parameters.items()]
        array: dict[str, object] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
        if body.flag("parallel_tool_calls") is False:
            array["maxItems"] = 1
        return Tools(tools_json, _guide(array), lambda: BareReader(parameters))
    name = choice.removeprefix("function ")
    return Tools(tools_json, _guide(parameters[name]), lambda: ArgumentsReader(name), is_named=True)


def _function(tool: Body) -> tuple[str, dict[str, object]]:
    if tool.text("type") != "function":
        raise UnsupportedError("only functions are supported", field=tool.path("type"))
    function = tool.child("function")
    name = function.text("name") if function is not None else None
    if function is None or not name:
        raise InvalidArgumentError("must be a function with a name", field=tool.path("function"))
    function.child("parameters")
    parameters = function.get("parameters")
    return name, parameters if isinstance(parameters, dict) and parameters else {"type": "object"}


def _choice(body: Body, parameters: dict[str, dict[str, object]]) -> str:
    """none, auto, required, or `function NAME`."""
    choice = body.get("tool_choice")
    if choice is None:
        return "auto"
    if isinstance(choice, str):
        if choice not in ("none", "auto", "required"):
            raise InvalidArgumentError("must be none, auto, required or a function", field="tool_choice")
    else:
        named = body.child("tool_choice")
        function = named.child("function") if named is not None else None
        if named is None or named.text("type") != "function" or function is None:
            raise UnsupportedError("only functions can be chosen", field="tool_choice")
        name = function.text("name") or ""
        if name not in parameters:
            raise InvalidArgumentError(f"{name[:64]!r} is not among the tools", field="tool_choice.function.name")
        choice = f"function {name}"
    if choice == "required" and not parameters:
        raise InvalidArgumentError("needs tools", field="tool_choice")
    return choice


def _call_schema(name: str, parameters: dict[str, object]) -> dict[str, object]:
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "parameters": parameters},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def _guide(schema: dict[str, object]) -> pb.GuidedDecodingConfig:
    return pb.GuidedDecodingConfig(guide_type=pb.GUIDE_TYPE_JSON_SCHEMA, guide=json.dumps(schema))
