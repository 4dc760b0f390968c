"""No field of a request body is ignored silently."""

from __future__ import annotations

import json

import pytest

from midstream.errors import InvalidArgumentError
from router.protocols.anthropic.request import read_messages
from router.protocols.conversation import ChatModel
from router.protocols.fields import CHAT, COMPLETIONS, ignored_fields, ignored_header
from router.protocols.openai.body import Body
from router.protocols.openai.jobs import Vocabulary, chat_job, completion_job
from router.protocols.responses.request import read_response

VOCABULARY = Vocabulary(lambda token: bytes([97 + token]), ChatModel(template="{{ tools }}"))
USER = {"role": "user", "content": "Hi"}
FUNCTION = {"type": "function", "function": {"name": "f"}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": {"type": "object"}}}


@pytest.mark.parametrize(
    ("fields", "ignored"),
    [
        ({}, []),
        ({"temperature": 0.5, "seed": 1, "store": None, "metadata": {}, "logprobs": False}, []),
        ({"store": False, "metadata": {"a": "b"}, "service_tier": "auto"}, ["metadata"]),
        ({"response_format": SCHEMA}, ["response_format.json_schema.name"]),
        (
            {"messages": [USER, {"role": "assistant", "content": "a", "refusal": None, "annotations": [1]}, USER]},
            ["messages.annotations"],
        ),
        ({"stream_options": {"include_obfuscation": True}, "stream": True}, ["stream_options.include_obfuscation"]),
        ({"modalities": ["text"], "verbosity": "medium", "tools": [FUNCTION], "tool_choice": FUNCTION}, []),
    ],
)
def test_fields_that_clients_always_send_are_listed_as_ignored(fields: dict[str, object], ignored: list[str]) -> None:
    body = Body({"model": "m", "messages": [USER], **fields})
    chat_job(body, VOCABULARY)
    assert ignored_fields(body, CHAT) == ignored


@pytest.mark.parametrize(
    ("choice", "template", "ignored"),
    [("auto", "{{ messages }}", ["tools"]), ("auto", "{{ tools }}", []), ("required", "{{ messages }}", [])],
)
def test_tools_that_the_template_does_not_show_are_listed_as_ignored(
    choice: str, template: str, ignored: list[str]
) -> None:
    body = Body({"messages": [USER], "tools": [FUNCTION], "tool_choice": choice})
    job = chat_job(body, Vocabulary(VOCABULARY.spell, ChatModel(template=template)))
    assert job.ignored == ignored


def test_unknown_fields_of_messages_are_listed() -> None:
    """As LiteLLM, OpenRouter's clients and LangChain send them."""
    kept = {"cache_control": {"type": "ephemeral"}}
    parts = [{"type": "text", "text": "Hi", **kept, "index": 0, "citations": [{"type": "x"}]}]
    calls = [{"id": "c", "function": {"name": "f", "arguments": "{}"}, "extra_content": {"google": {"id": "x"}}}]
    turns = [
        {"role": "user", "content": parts, **kept},
        {"role": "assistant", "content": None, "tool_calls": calls, "reasoning_details": [{"type": "x"}], "id": ""},
        {"role": "tool", "content": "x", "tool_call_id": "c", "artifact": None},
    ]
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    body = Body({"messages": turns, "tools": [{**tool, **kept}]})
    job = chat_job(body, VOCABULARY)
    assert ignored_fields(body, CHAT) == [
        "messages.content.cache_control",
        "messages.content.citations",
        "messages.cache_control",
        "messages.tool_calls.extra_content",
        "messages.reasoning_details",
        "tools.cache_control",
    ]
    assert json.loads(job.requests[0].chat.tools_json) == [tool]
    item = {"role": "user", "content": [{"type": "input_text", "text": "Hi", **kept}], "extra": {"a": [{"b": {}}]}}
    assert read_response(Body({"input": [item]}), ChatModel()).ignored == ["input.content.cache_control", "input.extra"]
    said = {"role": "user", "content": [{"type": "text", "text": "Hi", "extra": {"type": "x"}}], "name": "Ann"}
    assert read_messages(Body({"messages": [said], "max_tokens": 5}), ChatModel()).ignored == [
        "messages.content.extra",
        "messages.name",
    ]


def test_names_of_unknown_fields_make_no_other_header() -> None:
    names = ["messages.a\r\nset-cookie: x", "messages.\ud800\u00e9", f"messages.{'n' * 1000}"]
    assert ignored_header(names)["x-midstream-ignored"] == ", ".join(
        ("messages.a%0D%0Aset-cookie%3A%20x", "messages.%3F%C3%A9", f"messages.{'n' * 119}")
    )
    listed = ignored_header([f"messages.{number}" for number in range(1000)])["x-midstream-ignored"]
    shown, _, others = listed.rpartition(", and ")
    assert others == f"{1000 - len(shown.split(', '))} others"
    assert len(listed) < 2100


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"temprature": 0.5}, "temprature"),
        ({"temprature": 0}, "temprature"),
        ({"stream_options": {"usage": True}, "stream": True}, "stream_options.usage"),
        ({"early_stopping": True, "use_beam_search": True}, "early_stopping"),
        (
            {"tools": [FUNCTION], "tool_choice": {**FUNCTION, "name": "f"}},
            "tool_choice.name",
        ),
        ({"best_of": 3}, "best_of"),  # a field of completions
        ({"tools": [{**FUNCTION, "name": "f"}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "function": {"name": "f", "schema": {}}}]}, "tools[0].function.schema"),
        ({"response_format": {**SCHEMA, "schemas": {}}}, "response_format.schemas"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}, "stricter": True}}},
            "response_format.json_schema.stricter",
        ),
    ],
)
def test_unknown_fields_are_rejected(fields: dict[str, object], path: str) -> None:
    body = Body({"messages": [USER], **fields})
    chat_job(body, VOCABULARY)
    with pytest.raises(InvalidArgumentError) as raised:
        ignored_fields(body, CHAT)
    assert raised.value.field == path


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"text": {"format": {"type": "text", "style": "terse"}}}, "text.format.style"),
        ({"text": {"format": {"type": "json_schema", "schema": {}, "json_schema": {}}}}, "text.format.json_schema"),
        ({"stream_options": {"include_usage": True}}, "stream_options.include_usage"),
        ({"tools": [{"type": "function", "name": "f", "function": {}}]}, "tools[0].function"),
    ],
)
def test_unknown_fields_of_responses_are_rejected(fields: dict[str, object], path: str) -> None:
    with pytest.raises(InvalidArgumentError) as raised:
        read_response(Body({"input": "Hi", **fields}), ChatModel())
    assert raised.value.field == path


@pytest.mark.parametrize(
    ("fields", "ignored"),
    [
        (
            {"text": {"format": {"type": "json_schema", "name": "x", "strict": True, "schema": {"x_note": 1}}}},
            ["text.format.name"],
        ),
        ({"text": {"format": {"type": "json_object", "schema": {"type": "object"}}}}, ["text.format.schema"]),
        ({"text": {"format": {"type": "text"}}}, []),
        ({"stream_options": {"include_obfuscation": False}}, ["stream_options"]),
    ],
)
def test_fields_of_responses_without_effect_are_listed(fields: dict[str, object], ignored: list[str]) -> None:
    assert read_response(Body({"input": "Hi", **fields}), ChatModel()).ignored == ignored


def test_tools_of_responses_have_different_names() -> None:
    tool = {"type": "function", "name": "f"}
    with pytest.raises(InvalidArgumentError) as raised:
        read_response(Body({"input": "Hi", "tools": [tool, {**tool, "type": "custom"}]}), ChatModel())
    assert raised.value.field == "tools[1].name"


def test_completion_bodies_are_read_too() -> None:
    body = Body({"prompt": "a", "messages": [USER]})
    completion_job(body, VOCABULARY)
    with pytest.raises(InvalidArgumentError, match="messages"):
        ignored_fields(body, COMPLETIONS)
