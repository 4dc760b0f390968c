"""Each field and each type that the installed SDKs of OpenAI and Anthropic can send is known: it is in the tables of
router/protocols/fields.py, or belongs to a type that is refused.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import typing_extensions
from anthropic.types import MessageCountTokensParams
from anthropic.types.beta.message_create_params import MessageCreateParamsStreaming as BetaMessage
from anthropic.types.message_create_params import MessageCreateParamsStreaming as Message
from openai.types import EmbeddingCreateParams
from openai.types.chat.completion_create_params import CompletionCreateParamsStreaming as Chat
from openai.types.completion_create_params import CompletionCreateParamsStreaming as Completion
from openai.types.responses.response_create_params import ResponseCreateParamsStreaming as Response

from midstream.errors import UnsupportedError
from router.protocols.fields import (
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    MESSAGES,
    MESSAGES_TYPES,
    RESPONSES,
    RESPONSES_TYPES,
    Table,
    Types,
)
from tests.router.adapters.test_fields import run_messages, run_response

# Objects that are passed on or compared as a whole.
WHOLE = frozenset(
    (
        "metadata", "tool_choice.tools", "context_management",
        "messages.content.content.cache_control", "tools.input_schema", "output_config.format.schema",
    )
)  # fmt: skip
HEADERS = {"betas"}


def members(hint: Any) -> Iterator[Any]:
    """Yield the possible types of a value, or of the items of a list."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        for part in typing.get_args(hint):
            yield from members(part)
    elif origin is typing.Annotated or origin in (typing_extensions.Required, typing_extensions.NotRequired):
        yield from members(typing.get_args(hint)[0])
    elif origin is not None and origin is not typing.Literal and not issubclass(origin, Mapping):
        for part in typing.get_args(hint):
            yield from members(part)
    else:
        yield hint


def kinds_of(shape: Any) -> set[str]:
    """Return the values of an object's `type`; empty if it has none."""
    hint = typing.get_type_hints(shape).get("type")
    found = (typing.get_args(part) for part in members(hint) if typing.get_origin(part) is typing.Literal)
    return {kind for kinds in found for kind in kinds}


def objects(
    shape: Any, supported: Types, path: str = "", seen: frozenset[Any] = frozenset()
) -> Iterator[tuple[str, Any, bool]]:
    """Yield all objects in a request: the path, the object, and whether its type is supported. The request itself has
    an empty path. Objects within unsupported objects are left out.
    """
    kinds = kinds_of(shape)
    is_supported = path not in supported or not kinds or bool(kinds & set(supported[path]))
    yield path, shape, is_supported
    for name, hint in typing.get_type_hints(shape).items() if is_supported else ():
        inner = f"{path}.{name}" if path else name
        for part in members(hint):
            if typing_extensions.is_typeddict(part) and inner not in WHOLE and part not in seen:
                yield from objects(part, supported, inner, seen | {part})


def unknown(shape: Any, table: Table, supported: Types) -> set[str]:
    """Return the fields that are neither in `table` nor within objects that are refused or ignored."""
    found = set()
    for path, item, is_supported in objects(shape, supported):
        parts = path.split(".") if path else []
        above = [".".join(parts[:size]) for size in range(1, len(parts) + 1)]
        if is_supported and all(table.get(name, ("refused", ""))[0] == "works" for name in above):
            found |= {".".join((*parts, name)) for name in typing.get_type_hints(item)}
    return found - table.keys() - HEADERS


@pytest.mark.parametrize(
    ("shape", "table", "supported"),
    [
        (Response, RESPONSES, RESPONSES_TYPES),
        (Message, MESSAGES, MESSAGES_TYPES),
        (BetaMessage, MESSAGES, MESSAGES_TYPES),
        (MessageCountTokensParams, MESSAGES, MESSAGES_TYPES),
        (EmbeddingCreateParams, EMBEDDINGS, {}),
    ],
)
def test_every_field_of_the_sdk_is_known(shape: Any, table: Table, supported: Types) -> None:
    assert unknown(shape, table, supported) == set()


@pytest.mark.parametrize(("shape", "table"), [(Chat, CHAT), (Completion, COMPLETIONS)])
def test_every_field_of_a_completion_is_known(shape: Any, table: Table) -> None:
    """Only top-level fields must be in the table; nested fields need no line there if they have an effect."""
    assert set(typing.get_type_hints(shape)) - table.keys() == set()


def responses_body(path: str, kind: str) -> dict[str, Any]:
    item = {"type": kind}
    if path == "tool_choice":
        return {"tools": [{"type": "function", "name": "x"}], "tool_choice": item}
    if path in ("input.content", "input.output"):
        outer = {"role": "user"} if path == "input.content" else {"type": "function_call_output", "call_id": "c"}
        return {"input": [{**outer, path.partition(".")[2]: [item]}]}
    return {path: [item]}


def messages_body(path: str, kind: str) -> dict[str, Any]:
    item: dict[str, Any] = {"type": kind}
    if path == "messages.content.content":
        item, path = {"type": "tool_result", "content": [item]}, "messages.content"
    if path == "messages.content":
        return {"messages": [{"role": "user", "content": [item]}]}
    return {path: [item]}


@pytest.mark.parametrize(
    ("shape", "supported", "paths", "body", "run"),
    [
        (
            Response,
            RESPONSES_TYPES,
            ("input", "input.content", "input.output", "tools", "tool_choice"),
            responses_body,
            run_response,
        ),
        (
            BetaMessage,
            MESSAGES_TYPES,
            ("messages.content", "messages.content.content", "tools"),
            messages_body,
            run_messages,
        ),
    ],
)
def test_every_type_of_the_sdk_is_supported_or_refused_by_name(
    shape: Any,
    supported: Types,
    paths: tuple[str, ...],
    body: Callable[[str, str], dict[str, Any]],
    run: Callable[[dict[str, Any]], str],
) -> None:
    found = {(path, kind) for path, item, _ in objects(shape, supported) if path in paths for kind in kinds_of(item)}
    refused = [(path, kind) for path, kind in found if kind not in supported[path]]
    assert len(refused) > 10
    for path, kind in refused:
        with pytest.raises(UnsupportedError, match=kind) as raised:
            run(body(path, kind))
        assert raised.value.field.endswith(".type")
