"""Anthropic's official client, with a router on a real socket and a scripted scheduler."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import pytest
from starlette.datastructures import QueryParams

from midstream.chunk import Chunk, FinishReason, Usage
from midstream.errors import (
    DeadlineError,
    ExecutionError,
    InvalidArgumentError,
    MidstreamError,
    NotFoundError,
    OverloadedError,
    UnavailableError,
    UnsupportedError,
)
from midstream.model.folder import ModelFolder
from midstream.model.tokenizer import Tokenizer
from protos import generation_pb2 as pb
from router.parsers.events import CallArguments, CallBegin, CallEnd, ReasoningDelta, TextDelta
from router.parsers.formats import REASONING_FORMATS, TOOL_FORMATS, ModelFormat
from router.protocols.anthropic.errors import http_status
from router.protocols.anthropic.models import model_page
from router.protocols.anthropic.request import MessagesJob, read_messages
from router.protocols.anthropic.shapes import MessageWriter
from router.protocols.conversation import ChatModel
from router.protocols.openai.body import Body
from tests.router.conftest import Cluster, Part

TEXT = "Every part may die 🫠 and the text goes on: 日本語."
HI: list[Any] = [{"role": "user", "content": "Hi"}]
WEATHER: Any = {"name": "weather", "input_schema": {"type": "object", "properties": {}}}
TEXT_BLOCK = {"type": "text", "text": "x"}
PREFILLED = [*HI, {"role": "assistant", "content": "Yes, an"}]
ORPHAN = {"type": "tool_result", "tool_use_id": "t", "content": "x"}
CHAT = ChatModel(ModelFormat(TOOL_FORMATS["hermes"], REASONING_FORMATS["think"]))


@pytest.fixture
async def router(cluster: Cluster) -> Part:
    return await cluster.add_router(await cluster.add_detokenizer(), chat=CHAT)


@pytest.fixture
async def client(router: Part) -> AsyncIterator[anthropic.AsyncAnthropic]:
    assert router.http is not None
    url = f"http://127.0.0.1:{router.http.port}"
    async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client:
        yield client


async def answer(
    cluster: Cluster, request_id: str, ids: list[int], reason: pb.FinishReason.ValueType = pb.FINISH_REASON_STOP
) -> None:
    await cluster.scheduler.until(lambda: request_id in cluster.scheduler.requests)
    for token in ids:
        cluster.scheduler.emit(request_id, [token])
    cluster.scheduler.end(request_id, reason=reason)


def read(**fields: Any) -> MessagesJob:
    return read_messages(Body({"messages": HI, "max_tokens": 2000} | fields), CHAT)


async def test_a_message_is_the_text_of_its_tokens(
    cluster: Cluster, client: anthropic.AsyncAnthropic, tokenizer: Tokenizer
) -> None:
    call = client.messages.create(
        model="smollm2", max_tokens=99, messages=HI, system="Be brief.", stop_sequences=["END"],
        metadata={"user_id": "u"}, extra_body={"request_id": "r", "temperature": 0.5, "top_k": 7, "top_p": 0.875},
    )  # fmt: skip
    ids = tokenizer.encode(TEXT)
    message, _ = await asyncio.gather(call, answer(cluster, "r", ids, pb.FINISH_REASON_LENGTH))
    assert (message.content[0].type, message.content[0].to_dict()["text"]) == ("text", TEXT)
    assert (message.id, message.role, message.stop_reason) == ("msg_r", "assistant", "max_tokens")
    native = cluster.scheduler.requests["r"].request
    assert (native.max_tokens, native.sampling.top_k, native.sampling.top_p, native.client_id) == (99, 7, 0.875, "u")
    assert list(native.stopping.stop_words) == ["END"]
    prompt = tokenizer.decode(list(native.token_ids.values), skip_special_tokens=False)
    assert prompt.index("Be brief.") < prompt.index("Hi")


async def test_a_tool_runner_continues_without_a_thread(
    cluster: Cluster, client: anthropic.AsyncAnthropic, tokenizer: Tokenizer
) -> None:
    runner = client.beta.messages.tool_runner(
        model="smollm2", max_tokens=9, messages=HI, tools=[], extra_body={"request_id": "r"}
    )
    message, _ = await asyncio.gather(runner.until_done(), answer(cluster, "r", tokenizer.encode("yes")))
    assert message.content[0].to_dict()["text"] == "yes"


async def test_an_aborted_message_is_not_retried(cluster: Cluster, client: anthropic.AsyncAnthropic) -> None:
    retrying = client.with_options(max_retries=2)
    call = retrying.messages.create(model="smollm2", max_tokens=99, messages=HI, extra_body={"request_id": "r"})
    with pytest.raises(anthropic.APIStatusError) as raised:
        await asyncio.gather(call, answer(cluster, "r", [], pb.FINISH_REASON_ABORT))
    assert raised.value.status_code == 499
    assert list(cluster.scheduler.requests) == ["r"]


async def test_an_answer_continues_the_last_turn(
    cluster: Cluster, client: anthropic.AsyncAnthropic, tokenizer: Tokenizer
) -> None:
    messages: Any = PREFILLED
    counted = await client.messages.count_tokens(model="smollm2", messages=messages)
    call = client.messages.create(model="smollm2", max_tokens=9, messages=messages, extra_body={"request_id": "r"})
    message, _ = await asyncio.gather(call, answer(cluster, "r", tokenizer.encode("swer")))
    assert message.content[0].to_dict()["text"] == "swer"
    prompt = list(cluster.scheduler.requests["r"].request.token_ids.values)
    assert len(prompt) == counted.input_tokens
    assert tokenizer.decode(prompt, skip_special_tokens=False).endswith("<|im_start|>assistant\nYes, an")


async def test_another_method_is_an_error_of_this_api(router: Part) -> None:
    assert router.http is not None
    for path in ("messages", "messages/count_tokens"):
        url = f"http://127.0.0.1:{router.http.port}/v1/{path}"
        with pytest.raises(urllib.error.HTTPError) as raised:
            await asyncio.to_thread(urllib.request.urlopen, url, timeout=240)
        assert (raised.value.code, raised.value.headers["allow"]) == (405, "POST")
        error = json.load(raised.value)
        assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
        raised.value.close()


async def test_events_come_in_order(cluster: Cluster, client: anthropic.AsyncAnthropic, tokenizer: Tokenizer) -> None:
    text = '<think>Hm.</think>See: <tool_call>{"name": "weather", "arguments": {}}</tool_call>'
    stream = await client.messages.create(
        model="smollm2", max_tokens=2000, messages=HI, tools=[WEATHER], stream=True, extra_body={"request_id": "r"},
        thinking={"type": "enabled", "budget_tokens": 1024},
    )  # fmt: skip
    await answer(cluster, "r", tokenizer.encode(text))
    kinds = [event.type if event.type != "content_block_delta" else event.delta.type async for event in stream]
    once = [kind for i, kind in enumerate(kinds) if not i or kind != kinds[i - 1]]
    assert once == [
        "message_start",
        *("content_block_start", "thinking_delta", "signature_delta", "content_block_stop"),
        *("content_block_start", "text_delta", "content_block_stop"),
        *("content_block_start", "input_json_delta", "content_block_stop"),
        "message_delta",
        "message_stop",
    ]


async def test_reasoning_is_omitted_unless_requested(
    cluster: Cluster, client: anthropic.AsyncAnthropic, tokenizer: Tokenizer
) -> None:
    call = client.messages.create(model="smollm2", max_tokens=99, messages=HI, extra_body={"request_id": "r"})
    message, _ = await asyncio.gather(call, answer(cluster, "r", tokenizer.encode("<think>Hm.</think>Yes.")))
    assert [block.type for block in message.content] == ["text"]


async def test_tokens_are_counted(client: anthropic.AsyncAnthropic) -> None:
    counts = [
        await client.messages.count_tokens(model="smollm2", messages=HI, system="one" + " two" * size)
        for size in (1, 4)
    ]
    assert counts[1].input_tokens - counts[0].input_tokens == 3


async def test_every_error_has_its_status_and_shape(cluster: Cluster, client: anthropic.AsyncAnthropic) -> None:
    errors: list[tuple[MidstreamError, int, str]] = [
        (InvalidArgumentError("no", field="stopping.stop_words"), 400, "invalid_request_error"),
        (UnsupportedError("no"), 400, "invalid_request_error"),
        (NotFoundError("no"), 404, "not_found_error"),
        (OverloadedError("no", retry_after_ms=1500), 429, "rate_limit_error"),
        (ExecutionError("no"), 500, "api_error"),
    ]
    for error, status, kind in errors:
        cluster.scheduler.submit_errors.append(error)
        with pytest.raises(anthropic.APIStatusError) as raised:
            await client.messages.create(model="smollm2", max_tokens=9, messages=HI)
        assert raised.value.status_code == status
        body = raised.value.body
        assert isinstance(body, dict)
        assert (body["type"], body["error"]["type"]) == ("error", kind)
        if status == 429:
            assert raised.value.response.headers["retry-after"] == "2"
    # Clients get these errors only after the router's retries are exhausted.
    assert [http_status(error) for error in (DeadlineError("no"), UnavailableError("no"))] == [504, 529]
    with pytest.raises(anthropic.NotFoundError):
        await client.messages.create(model="other", max_tokens=9, messages=HI)


@pytest.mark.parametrize(
    ("fields", "native", "name"),
    [
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {}}}},
            "guided_decoding.guide",
            "output_config.format",
        ),
        (
            {"tools": [WEATHER, {**WEATHER, "name": "time"}], "tool_choice": {"type": "any"}},
            "guided_decoding.guide",
            "tools",
        ),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "weather"}},
            "guided_decoding.guide",
            r"tools\[0\].input_schema",
        ),
        ({"stop_sequences": ["x"]}, "stopping.stop_words", "stop_sequences"),
        ({"metadata": {"user_id": "u"}}, "client_id", "metadata.user_id"),
        ({}, "token_ids", "messages"),
    ],
)
async def test_an_error_names_the_field_of_the_client(
    cluster: Cluster, client: anthropic.AsyncAnthropic, fields: dict[str, Any], native: str, name: str
) -> None:
    cluster.scheduler.submit_errors.append(InvalidArgumentError("no", field=native))
    with pytest.raises(anthropic.BadRequestError, match=f"'{name}: no'"):
        await client.messages.create(model="smollm2", max_tokens=9, messages=HI, **fields)


async def test_a_count_lists_ignored_fields_as_well(client: anthropic.AsyncAnthropic) -> None:
    effort: Any = {"effort": "low"}
    counted = await client.messages.with_raw_response.count_tokens(model="", messages=HI, output_config=effort)
    assert counted.headers["x-midstream-ignored"] == "output_config.effort"


async def test_a_missing_endpoint_has_the_shape_of_anthropics_errors(client: anthropic.AsyncAnthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as refused:
        await client.messages.batches.list()
    body: Any = refused.value.body
    assert (body["type"], body["error"]["type"]) == ("error", "not_found_error")


async def test_models_are_listed_in_anthropics_format(client: anthropic.AsyncAnthropic, folder: ModelFolder) -> None:
    listed = await client.models.list()
    assert [(model.id, model.type, model.display_name) for model in listed.data] == [("smollm2", "model", "smollm2")]
    assert listed.data[0] == await client.models.retrieve("smollm2")
    assert listed.data[0].max_input_tokens == 8192
    assert int(listed.data[0].created_at.timestamp()) == int((folder.path / "config.json").stat().st_mtime)
    assert not listed.has_next_page()


async def test_an_invalid_schema_is_named_among_several_tools(client: anthropic.AsyncAnthropic) -> None:
    tools: Any = [{"name": name, "input_schema": {"type": "object", "x": {}}, "strict": True} for name in "ab"]
    tools[1]["input_schema"]["properties"] = {"city": {"type": "town"}}
    with pytest.raises(anthropic.BadRequestError, match=r"tools\[1\]\.input_schema: Invalid type: town"):
        await client.messages.create(
            model="smollm2",
            max_tokens=5,
            messages=[{"role": "user", "content": "Hi"}],
            tools=tools,
            tool_choice={"type": "any"},
        )


async def test_an_image_that_is_refused_is_named_by_its_own_field(client: anthropic.AsyncAnthropic) -> None:
    """The model reads no images; the check is that of the native request, whose fields have other names."""
    source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    messages: list[Any] = [{"role": "user", "content": [TEXT_BLOCK, {"type": "image", "source": source}]}]
    for call in (
        client.messages.create(model="", max_tokens=1, messages=messages),
        client.messages.count_tokens(model="", messages=messages),
    ):
        with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\].content\[1\].source.data: the model"):
            await call


def test_nothing_is_written_for_empty_text() -> None:
    writer = MessageWriter("r", "m", shows_thinking=True)
    assert writer.add([ReasoningDelta(""), TextDelta("")]) == []
    events = writer.add([CallBegin(0, "f", "c"), CallArguments(0, "{}"), CallArguments(0, ""), CallEnd(0)])
    assert [event["type"] for event in events] == [
        "content_block_start", "content_block_delta", "content_block_stop",
    ]  # fmt: skip


def test_half_of_a_surrogate_pair_in_arguments_is_replaced() -> None:
    writer = MessageWriter("r", "m", shows_thinking=True)
    writer.add([CallBegin(0, "weather", "c"), CallArguments(0, r'{"city": "\ud83d"}'), CallEnd(0)])
    assert writer.blocks[0]["input"] == {"city": "\ufffd"}


async def test_the_version_must_be_known(router: Part) -> None:
    assert router.http is not None
    for headers in ({}, {"anthropic-version": "1999-01-01"}):
        request = urllib.request.Request(
            f"http://127.0.0.1:{router.http.port}/v1/messages", json.dumps({"messages": HI}).encode(), headers
        )
        with pytest.raises(urllib.error.HTTPError) as raised:
            await asyncio.to_thread(urllib.request.urlopen, request, timeout=240)
        assert raised.value.code == 400
        assert "anthropic-version" in json.load(raised.value)["error"]["message"]
        raised.value.close()


async def test_a_disconnect_aborts_the_request(cluster: Cluster, client: anthropic.AsyncAnthropic) -> None:
    stream = await client.messages.create(
        model="smollm2", max_tokens=9, messages=HI, stream=True, extra_body={"request_id": "r"}
    )
    await stream.close()
    await cluster.scheduler.until(lambda: cluster.scheduler.aborts == ["r"])


async def test_an_error_ends_a_stream(cluster: Cluster, client: anthropic.AsyncAnthropic, tokenizer: Tokenizer) -> None:
    stream = await client.messages.create(
        model="smollm2", max_tokens=9, messages=HI, stream=True, extra_body={"request_id": "r"}
    )
    await answer(cluster, "r", tokenizer.encode("Hi"), pb.FINISH_REASON_DEADLINE)
    with pytest.raises(anthropic.APIStatusError, match="deadline"):
        _ = [event async for event in stream]


async def test_cache_breakpoints_set_the_retention(
    cluster: Cluster, client: anthropic.AsyncAnthropic, tokenizer: Tokenizer
) -> None:
    """A breakpoint in the system text keeps the tokens up to it; a breakpoint at the end keeps all tokens. The shorter
    duration does not replace the longer one.
    """
    hour_long = {"type": "ephemeral", "ttl": "1h"}
    system: list[Any] = [{"type": "text", "text": "Know this well.", "cache_control": hour_long}]
    said: list[Any] = [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}]
    call = client.messages.create(
        model="smollm2", max_tokens=9, system=system, extra_body={"request_id": "r"},
        messages=[{"role": "user", "content": said}],
    )  # fmt: skip
    message, _ = await asyncio.gather(call, answer(cluster, "r", tokenizer.encode("Yes")))
    native = cluster.scheduler.requests["r"].request
    five, hour = native.kv_retention.token_ranges  # where the ranges overlap, the last one applies
    kept = tokenizer.decode(list(native.token_ids.values[: hour.end]), skip_special_tokens=False)
    assert "Know this well." in kept
    assert "Hi" not in kept
    assert (hour.duration_ms, five.duration_ms, five.HasField("end")) == (3_600_000, 300_000, False)
    usage = message.usage
    assert (usage.input_tokens, usage.cache_creation_input_tokens) == (0, len(native.token_ids.values))


def test_blocks_become_turns() -> None:
    blocks = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Oslo"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "t1",
                    "content": [{"type": "text", "text": "sun"}],
                    "is_error": False,
                },
                {"type": "text", "text": "And?"},
            ],
        },
    ]
    turns = read(messages=blocks).conversation.request.chat.messages
    assert [(turn.role, [part.text for part in turn.parts]) for turn in turns] == [
        ("user", ["a", "b"]), ("assistant", ["I look."]), ("tool", ["sun"]), ("user", ["And?"]),
    ]  # fmt: skip
    assert turns[1].reasoning_content == "Hm."
    assert json.loads(turns[1].tool_calls_json)[0]["function"] == {"name": "weather", "arguments": {"city": "Oslo"}}
    assert (turns[2].tool_call_id, turns[2].name) == ("t1", "weather")


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [*HI, {"role": "assistant", "content": "x "}]}, "messages"),
        ({"messages": [*HI, {"role": "assistant", "content": []}]}, "messages"),
        ({"messages": PREFILLED, "tools": [WEATHER], "tool_choice": {"type": "any"}}, "messages"),
        ({"messages": PREFILLED, "thinking": {"type": "adaptive"}}, "messages"),
        ({"messages": [{"role": "user", "content": [ORPHAN]}]}, "messages[0].content[0].tool_use_id"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].source"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"unknown": 1}, "unknown"),
        ({"mcp_servers": [1]}, "mcp_servers"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
        ({"tools": [{"name": "x"}]}, "tools[0].input_schema"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name"),
        ({"thinking": {"type": "enabled", "budget_tokens": 3}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "thinking.budget_tokens"),
        ({"system": [{**TEXT_BLOCK, "cache_control": {"type": "x"}}]}, "system[0].cache_control.type"),
        ({"speed": "fast"}, "speed"),
        ({"system": [{**TEXT_BLOCK, "cache_control": {"type": "ephemeral"}}] * 5}, "system[4].cache_control"),
        ({"output_config": {"format": {"type": "x"}}}, "output_config.format"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {}, "strict": True}}},
            "output_config.format.strict",
        ),
        ({"cache_control": {"type": "ephemeral", "tll": "1h"}}, "cache_control.tll"),
        ({"cache_control": {"type": "ephemeral", "scope": "x"}}, "cache_control.scope"),
        ({"tools": [{**WEATHER, "cache_control": {"type": "ephemeral", "x": 1}}]}, "tools[0].cache_control.x"),
        ({"metadata": {"user": "u"}}, "metadata.user"),
        ({"thinking": {"type": "adaptive", "budget": 1}}, "thinking.budget"),
    ],
)  # fmt: skip
def test_an_invalid_field_is_named(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(MidstreamError) as raised:
        read(**fields)
    assert raised.value.field == field


def reading(format_: ModelFormat, template: str, **fields: Any) -> tuple[dict[str, Any], list[str]]:
    """Return the template variables and the ignored fields of a request to a model with this format and template."""
    job = read_messages(Body({"messages": HI, "max_tokens": 2000} | fields), ChatModel(format_, template))
    return json.loads(job.conversation.request.chat.template_variables_json or "{}"), job.ignored


THINKS = ModelFormat(reasoning=REASONING_FORMATS["think"])
SWITCH = "{% if enable_thinking is defined %}{% endif %}"
EFFORT = "{{ reasoning_effort }}"
ADAPTIVE = {"thinking": {"type": "adaptive"}}
DISABLED = {"thinking": {"type": "disabled"}}
HIGH = {"output_config": {"effort": "high"}}


@pytest.mark.parametrize(
    ("template", "fields", "variables"),
    [
        (EFFORT, {}, {"reasoning_effort": "low"}),
        (EFFORT, ADAPTIVE, {"reasoning_effort": "medium"}),
        (EFFORT, HIGH, {"reasoning_effort": "high"}),
        (EFFORT, ADAPTIVE | HIGH, {"reasoning_effort": "high"}),
        (SWITCH + EFFORT, HIGH, {"reasoning_effort": "high", "enable_thinking": False}),
        (SWITCH + EFFORT, DISABLED | HIGH, {"reasoning_effort": "high", "enable_thinking": False}),
        (SWITCH + EFFORT, ADAPTIVE | HIGH, {"reasoning_effort": "high", "enable_thinking": True}),
    ],
)
def test_an_effort_applies_with_and_without_thinking(
    template: str, fields: dict[str, Any], variables: dict[str, Any]
) -> None:
    assert reading(THINKS, template, **fields) == (variables, [])


@pytest.mark.parametrize(
    ("format_", "template", "fields", "ignored"),
    [
        (ModelFormat(), "", ADAPTIVE, ["thinking"]),
        (ModelFormat(), "", DISABLED, []),
        (ModelFormat(), "", HIGH, ["output_config.effort"]),
        (ModelFormat(), "", ADAPTIVE | HIGH, ["thinking", "output_config.effort"]),
        (THINKS, "", ADAPTIVE, []),
        (THINKS, "", DISABLED, ["thinking"]),
        (THINKS, SWITCH, ADAPTIVE | HIGH, ["output_config.effort"]),
        (THINKS, SWITCH, DISABLED, []),
        (ModelFormat(has_channels=True), EFFORT, ADAPTIVE | HIGH, []),
        (ModelFormat(has_channels=True), EFFORT, DISABLED, ["thinking"]),
    ],
)
def test_thinking_and_effort_are_reported_if_the_model_cannot_follow_them(
    format_: ModelFormat, template: str, fields: dict[str, Any], ignored: list[str]
) -> None:
    assert reading(format_, template, **fields)[1] == ignored


def test_a_message_at_the_end_of_the_context_is_not_one_at_max_tokens() -> None:
    """The context holds 10 tokens, and the prompt takes 6 of them."""
    for max_tokens, num_output, reason in (
        (5, 4, "model_context_window_exceeded"),
        (4, 4, "max_tokens"),
        (3, 3, "max_tokens"),
    ):
        writer = MessageWriter("r", "m", shows_thinking=False, max_tokens=max_tokens, context_length=10)
        chunk = Chunk(finish_reason=FinishReason.LENGTH, usage=Usage(6, num_output))
        assert writer.stop(chunk, ()) == (reason, None)


async def test_a_message_that_fills_the_context_says_so(
    cluster: Cluster, client: anthropic.AsyncAnthropic, tokenizer: Tokenizer
) -> None:
    call = client.messages.create(model="smollm2", max_tokens=9999, messages=HI, extra_body={"request_id": "r"})

    async def fill() -> None:
        await cluster.scheduler.until(lambda: "r" in cluster.scheduler.requests)
        left = cluster.folder.max_sequence_length - cluster.scheduler.requests["r"].num_prompt_tokens
        cluster.scheduler.emit("r", tokenizer.encode("Yes")[:1] * left)
        cluster.scheduler.end("r", reason=pb.FINISH_REASON_LENGTH)

    message, _ = await asyncio.gather(call, fill())
    assert message.stop_reason == "model_context_window_exceeded"


CARDS = [{"id": name, "created": 0, "max_model_len": 5} for name in "abcde"]


@pytest.mark.parametrize(
    ("query", "ids", "has_more"),
    [
        ("", "abcde", False),
        ("limit=2", "ab", True),
        ("limit=2&after_id=b", "cd", True),
        ("limit=2&after_id=c", "de", False),
        ("after_id=e", "", False),
        ("limit=2&before_id=d", "bc", True),
        ("limit=2&before_id=c", "ab", False),
        ("lifecycle=active,retired", "abcde", False),
        ("lifecycle=retired", "", False),
    ],
)
def test_pages_of_models(query: str, ids: str, has_more: bool) -> None:
    page = model_page(CARDS, QueryParams(query))
    assert [model["id"] for model in page["data"]] == list(ids)  # type: ignore[attr-defined]
    ends = (ids[0], ids[-1]) if ids else (None, None)
    assert (page["has_more"], page["first_id"], page["last_id"]) == (has_more, *ends)


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("limit=0", "limit"),
        ("limit=1001", "limit"),
        ("after_id=x", "after_id"),
        ("before_id=x", "before_id"),
        ("after_id=a&before_id=c", "before_id"),
        ("lifecycle=new", "lifecycle"),
    ],
)
def test_an_invalid_parameter_of_a_list_of_models_is_named(query: str, field: str) -> None:
    with pytest.raises(InvalidArgumentError) as raised:
        model_page(CARDS, QueryParams(query))
    assert raised.value.field == field


async def test_errors_of_models_have_the_shape_of_anthropics_errors(client: anthropic.AsyncAnthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        await client.models.retrieve("other")
    with pytest.raises(anthropic.BadRequestError, match=r"limit: must be in 1\.\.1000") as refused:
        await client.models.list(limit=0)
    for error, kind in ((missing.value, "not_found_error"), (refused.value, "invalid_request_error")):
        body: Any = error.body
        assert (body["type"], body["error"]["type"]) == ("error", kind)


def test_choices_of_tools() -> None:
    for kind, expected in (("auto", "auto"), ("any", "required"), ("tool", "named")):
        choice = {"type": kind, "disable_parallel_tool_use": True, **({"name": "weather"} if kind == "tool" else {})}
        tools = read(tools=[WEATHER], tool_choice=choice).conversation.tools
        assert (tools.choice, tools.is_parallel) == (expected, False)
    assert not read(tools=[WEATHER], tool_choice={"type": "none"}).conversation.tools.schemas


def test_a_format_has_no_effect_if_a_call_is_required() -> None:
    output = {"format": {"type": "json_schema", "schema": {"type": "object"}}}
    job = read(tools=[WEATHER], tool_choice={"type": "any"}, output_config=output)
    assert job.ignored == ["output_config.format"]
    assert not job.conversation.request.HasField("guided_decoding")
    assert job.names["guided_decoding"] == "tools[0].input_schema"


def test_an_empty_system_text_is_none() -> None:
    asked: list[dict[str, Any]] = [{"system": []}, {"system": ""}, {}]
    for fields in asked:
        turns = read(**fields).conversation.request.chat.messages
        assert [turn.role for turn in turns] == ["user"]
