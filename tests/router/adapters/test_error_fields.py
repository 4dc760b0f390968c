"""An error names the field that the client sent, even if several fields set the same native one."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from midstream.errors import InvalidArgumentError
from protos import generation_pb2 as pb
from tests.router.adapters.sse import post_stream
from tests.router.conftest import Cluster, Part

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
TEXT = {"type": "text", "text": "x"}
USER = {"role": "user", "content": "Hi"}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
JSON = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
LONG = "x" * 200  # exceeds the maximum length of a name


def tool(name: str, **fields: object) -> dict[str, object]:
    return {"type": "function", "function": {"name": name, "parameters": SCHEMA, **fields}}


TWO = {"tools": [tool("f"), tool("g")]}
NAMED = {"type": "function", "function": {"name": "g"}}


async def refusal(client: openai.AsyncOpenAI, path: str, fields: dict[str, Any]) -> openai.APIStatusError:
    given: dict[str, dict[str, Any]] = {"/completions": {"prompt": "Hi"}, "/chat/completions": {"messages": [USER]}}
    given |= {"/responses": {"input": "Hi"}, "/responses/input_tokens": {"input": "Hi"}}
    with pytest.raises(openai.APIStatusError) as raised:
        await client.post(path, cast_to=object, body={**given[path], **fields})
    return raised.value


@pytest.mark.parametrize(
    ("fields", "native", "param"),
    [
        ({"n": 2}, "sampling.num_return_sequences", "n"),
        ({"best_of": 3}, "sampling.num_return_sequences", "best_of"),
        ({"best_of": 3}, "output.log_probs", "best_of"),
        ({"best_of": 3, "logprobs": 1}, "output.log_probs", "logprobs"),
        ({"prompt_logprobs": 1}, "output.prompt_log_probs", "prompt_logprobs"),
        ({"echo": True, "logprobs": 1}, "output.prompt_log_probs", "logprobs"),
        ({"echo": True}, "output.exclude_input_from_output", "echo"),
        ({"response_format": JSON}, "guided_decoding.guide", "response_format"),
        ({"guided_json": SCHEMA}, "guided_decoding.guide", "guided_json"),
        ({"guided_regex": "a"}, "guided_decoding", "guided_regex"),
        ({"guided_choice": ["a"]}, "guided_decoding.guide", "guided_choice"),
        ({"structured_outputs": {"regex": "a"}}, "guided_decoding.guide", "structured_outputs.regex"),
        ({"stop": "x"}, "stopping.stop_words", "stop"),
        ({}, "token_ids", "prompt"),
    ],
)
async def test_completions(
    cluster: Cluster, client: openai.AsyncOpenAI, fields: dict[str, Any], native: str, param: str
) -> None:
    cluster.scheduler.submit_errors.append(InvalidArgumentError("no", field=native))
    assert (await refusal(client, "/completions", fields)).param == param


@pytest.mark.parametrize(
    ("fields", "native", "param"),
    [
        ({"max_tokens": 5}, "max_tokens", "max_tokens"),
        ({"max_completion_tokens": 5}, "max_tokens", "max_completion_tokens"),
        ({"guided_regex": "a"}, "guided_decoding.guide", "guided_regex"),
        ({**TWO, "tool_choice": NAMED}, "guided_decoding.guide", "tools[1].function.parameters"),
        ({**TWO, "tool_choice": "required"}, "guided_decoding.guide", "tools"),
        ({"tools": [tool("f")], "tool_choice": "required"}, "guided_decoding", "tools[0].function.parameters"),
        ({"prediction": {"type": "content", "content": "x"}}, "speculative.method", "prediction"),
        ({}, "token_ids", "messages"),
        ({}, "chat", "messages"),
        ({}, "chat.messages[0].content", "messages[0].content"),
    ],
)
async def test_chat_completions(
    cluster: Cluster, client: openai.AsyncOpenAI, fields: dict[str, Any], native: str, param: str
) -> None:
    cluster.scheduler.submit_errors.append(InvalidArgumentError("no", field=native))
    assert (await refusal(client, "/chat/completions", fields)).param == param


def flat(name: str, **fields: object) -> dict[str, object]:
    return {"type": "function", "name": name, "parameters": SCHEMA, **fields}


@pytest.mark.parametrize(
    ("fields", "native", "param"),
    [
        ({"max_output_tokens": 5}, "max_tokens", "max_output_tokens"),
        ({"text": {"format": {"type": "json_object"}}}, "guided_decoding.guide", "text.format"),
        ({"tools": [flat("f")], "tool_choice": "required"}, "guided_decoding.guide", "tools[0].parameters"),
        ({"tools": [flat("f"), flat("g")], "tool_choice": "required"}, "guided_decoding.guide", "tools"),
        ({"user": "u"}, "client_id", "user"),
        ({"safety_identifier": "u"}, "client_id", "safety_identifier"),
        ({}, "chat", "input"),
        ({}, "chat.messages[0].content", "input"),
        ({}, "token_ids", "input"),
        ({}, "sampling.temperature", "temperature"),
    ],
)
async def test_responses(
    cluster: Cluster, client: openai.AsyncOpenAI, fields: dict[str, Any], native: str, param: str
) -> None:
    cluster.scheduler.submit_errors.append(InvalidArgumentError("no", field=native))
    refused = await refusal(client, "/responses", fields)
    assert refused.param == param
    assert str(refused.request_id).startswith("resp_")


async def test_the_input_of_a_response_is_named(client: openai.AsyncOpenAI) -> None:
    long: list[dict[str, Any]] = [{"role": "user", "content": "word " * 20_000}]
    assert (await refusal(client, "/responses", {"input": long})).param == "input"
    image = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
    seen = [{"role": "user", "content": [{"type": "input_text", "text": "x"}] * 2 + [image]}]
    empty = [{"role": "user", "content": "x"}, {"role": "user", "content": [{"type": "input_text"}]}]
    assert (await refusal(client, "/responses", {"input": empty})).param == "input[1].content[0].text"
    for path in ("/responses", "/responses/input_tokens"):
        assert (await refusal(client, path, {"input": seen})).param == "input[0].content[2].image_url"


async def test_the_router_s_own_checks(client: openai.AsyncOpenAI) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"safety_identifier": LONG}, "safety_identifier"),
        ({"user": LONG, "safety_identifier": "x"}, "user"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_regex": "a", "guided_json": {}}, "guided_regex"),
        # The texts are joined in the native request, so the image is part 1 there, and part 2 in the client's message.
        (
            {"messages": [USER, {"role": "user", "content": [TEXT, TEXT, IMAGE]}]},
            "messages[1].content[2].image_url.url",
        ),
    ]
    for fields, param in wrong:
        assert (await refusal(client, "/chat/completions", fields)).param == param
    refused = await refusal(client, "/chat/completions", {**TWO, "tool_choice": "required", "guided_regex": "a"})
    assert (refused.param, "guided_regex" in refused.message) == ("tool_choice", True)


async def test_an_invalid_schema_is_named_among_several_tools(client: openai.AsyncOpenAI) -> None:
    odd = {"type": "object", "properties": {"city": {"type": "town"}}}
    three = [tool("f"), tool("a.b"), tool("g")]
    wrong = {"type": "function", "function": {"name": "a.b", "parameters": odd, "strict": True}}
    refused = await refusal(
        client, "/chat/completions", {"tools": [three[0], wrong, three[2]], "tool_choice": "required"}
    )
    assert (refused.param, "Invalid type: town" in refused.message) == ("tools[1].function.parameters", True)
    refused = await refusal(
        client,
        "/responses",
        {"tools": [flat("f"), {**flat("g"), "parameters": odd, "strict": True}], "tool_choice": "required"},
    )
    assert (refused.param, "Invalid type: town" in refused.message) == ("tools[1].parameters", True)


async def test_a_stream_that_fails(cluster: Cluster, router: Part) -> None:
    assert router.http is not None
    body = {"messages": [USER], "stream": True, "request_id": "r", "guided_json": SCHEMA}
    async with post_stream(router.http.port, "/v1/chat/completions", body) as stream:
        await cluster.scheduler.until(lambda: "r" in cluster.scheduler.requests)
        error = InvalidArgumentError("takes too much time", field="guided_decoding.guide").to_proto()
        cluster.scheduler.end("r", reason=pb.FINISH_REASON_ERROR, error=error)
        *_, last = [event async for event in stream.events()]
    assert last["error"]["param"] == "guided_json"


async def test_too_many_texts_are_named(client: openai.AsyncOpenAI) -> None:
    texts = ["x"] * 2049
    for path, fields, param in (
        ("/rerank", {"query": "x", "documents": texts}, "documents"),
        ("/score", {"text_1": "x", "text_2": texts}, "text_2"),
        ("/embeddings", {"input": texts}, "input"),
    ):
        with pytest.raises(openai.BadRequestError) as raised:
            await client.post(path, cast_to=object, body=fields)
        assert raised.value.param == param
