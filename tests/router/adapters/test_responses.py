"""The Responses API, with OpenAI's official client and a scripted model."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from typing import Any, cast

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import ResponseInputTextParam

from midstream.errors import InvalidArgumentError, UnsupportedError
from midstream.model.tokenizer import Tokenizer
from protos import generation_pb2 as pb
from router.protocols.conversation import ChatModel
from router.protocols.openai.body import Body
from router.protocols.responses.pieces import Pieces
from router.protocols.responses.request import read_response
from router.protocols.responses.stored import read_stored
from tests.router.adapters.clients import client_of
from tests.router.adapters.test_tool_sessions import TRANSCRIPTS, router_of
from tests.router.conftest import Cluster
from tests.router.parsers.transcripts import SCHEMAS, model_format

TOOLS: list[Any] = [
    {"type": "function", "name": name, "description": "d", "parameters": schema, "strict": False}
    for name, schema in SCHEMAS.items()
]
TEXT = "Well, the sky is blue: 空は青い. And  so\non — isn't it?"


async def write(cluster: Cluster, ids: Sequence[int], number: int = 0, **fields: Any) -> str:
    """Make the model write the answer to request `number`, starting at 0; return the id of the request."""
    await cluster.scheduler.until(lambda: len(cluster.scheduler.requests) > number)
    request_id = list(cluster.scheduler.requests)[number]
    for token in ids:
        cluster.scheduler.emit(request_id, [token])
        await asyncio.sleep(0)
    fields.setdefault("reason", pb.FINISH_REASON_STOP)
    cluster.scheduler.end(request_id, **fields)
    return request_id


async def answered(cluster: Cluster, call: Any, ids: Sequence[int], number: int = 0, **fields: Any) -> Any:
    """Return the result of a call while the model writes `ids`."""
    return (await asyncio.gather(call, write(cluster, ids, number, **fields)))[0]


async def events_of(client: openai.AsyncOpenAI, response_id: str, after: int | None = None) -> list[dict[str, Any]]:
    options: dict[str, Any] = {} if after is None else {"starting_after": after}
    stream = await client.responses.retrieve(response_id, stream=True, **options)
    return [event.to_dict() async for event in stream]


@given(st.text(alphabet="ab1_ \n\t.,\"{}'é日本한\u3000😀\u0301", max_size=80), st.integers(0, 1 << 32))
def test_pieces_depend_only_on_the_text(text: str, seed: int) -> None:
    pieces, dice = Pieces(), random.Random(seed)
    whole = [*pieces.add(text), *pieces.finish()]
    assert "".join(whole) == text
    found: list[str] = []
    while text:
        count = dice.randint(1, 9)
        found += pieces.add(text[:count])
        text = text[count:]
    assert found + pieces.finish() == whole


def test_a_piece_is_a_word_or_a_character_with_the_space_before_it() -> None:
    pieces = Pieces()
    assert pieces.add('Hello, {"a": 日本 wor') == ["Hello", ",", " {", '"', "a", '"', ":", " 日", "本"]
    assert pieces.add("ld") == []
    assert pieces.finish() == [" world"]


async def test_text_is_created_streamed_retrieved_and_deleted(
    cluster: Cluster, client: openai.AsyncOpenAI, tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode(TEXT)

    async def streamed() -> list[Any]:
        stream = await client.responses.create(model="smollm2", input="Hi", stream=True, metadata={"a": "b"})
        return [event async for event in stream]

    events = await answered(cluster, streamed(), ids)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events if event.type != "response.output_text.delta"]
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == TEXT
    final = events[-1].response
    assert (final.output_text, final.status, final.metadata) == (TEXT, "completed", {"a": "b"})
    assert (final.usage.output_tokens, final.usage.total_tokens) == (len(ids), final.usage.input_tokens + len(ids))
    assert final.to_dict() == (await client.responses.retrieve(final.id)).to_dict()
    items = (await client.responses.input_items.list(final.id)).data
    assert [item.to_dict()["content"] for item in items] == [[ResponseInputTextParam(type="input_text", text="Hi")]]
    await client.responses.delete(final.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(final.id)


async def test_a_stream_resumed_after_any_event_is_identical_at_any_router(
    cluster: Cluster, client: openai.AsyncOpenAI, tokenizer: Tokenizer
) -> None:
    """The result does not depend on how the tokens arrive: one at a time at first, but all at once when the stream is
    read again.
    """
    created = await answered(cluster, client.responses.create(model="smollm2", input="Hi"), tokenizer.encode(TEXT))
    whole = await events_of(client, created.id)
    assert whole[-1]["response"] == created.to_dict()
    async with client_of(await cluster.add_router(await cluster.add_detokenizer("e"))) as other:
        for after in range(len(whole)):
            assert await events_of(other, created.id, after) == whole[after + 1 :]
        with pytest.raises(openai.BadRequestError) as raised:
            await events_of(other, created.id, len(whole))
    assert raised.value.param == "starting_after"


async def test_a_position_that_a_running_response_never_reaches_ends_its_stream_with_an_error(
    cluster: Cluster, client: openai.AsyncOpenAI, tokenizer: Tokenizer
) -> None:
    created = await client.responses.create(model="smollm2", input="Hi", background=True)
    stream = await client.responses.retrieve(created.id, stream=True, starting_after=50)
    (*_, last), _ = await asyncio.gather(read_all(stream), write(cluster, tokenizer.encode("Hi")))
    assert (last["type"], last["param"], last["sequence_number"]) == ("error", "starting_after", 50)


async def read_all(stream: openai.AsyncStream[Any]) -> list[dict[str, Any]]:
    try:
        return [event.to_dict() async for event in stream]
    except openai.APIError as error:
        return [cast("dict[str, Any]", error.body)]


async def test_a_stream_continues_after_the_last_event_of_its_dead_router(
    cluster: Cluster, tokenizer: Tokenizer
) -> None:
    detokenizer = await cluster.add_detokenizer()
    routers = [await cluster.add_router(detokenizer) for _ in range(2)]
    ids = tokenizer.encode(TEXT)
    async with client_of(routers[0]) as first, client_of(routers[1]) as second:
        stream = await first.responses.create(model="smollm2", input="Hi", stream=True)
        await cluster.scheduler.until(lambda: cluster.scheduler.requests)
        (request_id,) = cluster.scheduler.requests
        cluster.scheduler.emit(request_id, ids[:6])
        seen: list[dict[str, Any]] = []

        async def read() -> None:
            async for event in stream:
                seen.append(event.to_dict())
                if event.type == "response.output_text.delta" and len(seen) == 7:
                    await routers[0].kill()

        with pytest.raises(openai.APIError):
            await read()
        cluster.scheduler.emit(request_id, ids[6:])
        cluster.scheduler.end(request_id, reason=pb.FINISH_REASON_STOP)
        rest = await events_of(second, request_id, seen[-1]["sequence_number"])
        assert [*seen, *rest] == await events_of(second, request_id)
        assert rest[-1]["response"]["output"][0]["content"][0]["text"] == TEXT


# tests/router/parsers tests the differences between formats; this test runs one format of each kind.
@pytest.mark.parametrize("name", ["hermes", "openai", "qwen3_coder", "deepseek_v3"])
async def test_a_session_with_tools_continues_by_id(cluster: Cluster, tokenizer: Tokenizer, name: str) -> None:
    transcript = TRANSCRIPTS[name]
    async with client_of(await router_of(cluster, transcript)) as client:
        ids = tokenizer.encode(transcript.text)
        asked: dict[str, Any] = {"model": "smollm2", "tools": TOOLS}

        async def streamed() -> Any:
            async with client.responses.stream(input="Weather?", instructions="Be brief.", **asked) as stream:
                deltas = [event async for event in stream]
                text = "".join(event.delta for event in deltas if event.type == "response.reasoning_text.delta")
                assert text == transcript.reasoning
                return await stream.get_final_response()

        first = await answered(cluster, streamed(), ids)
        calls = [item for item in first.output if item.type == "function_call"]
        assert [(call.name, json.loads(call.arguments)) for call in calls] == transcript.calls
        assert first.output_text == transcript.content
        outputs: list[Any] = [
            {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"} for call in calls
        ]
        follow = client.responses.create(input=outputs, previous_response_id=first.id, **asked)
        last = await answered(cluster, follow, tokenizer.encode("It is sunny."), 1)
        assert last.previous_response_id == first.id
        # The conversation equals one whose input contains all items. The instructions are not among them, since they
        # apply to a single response.
        whole: list[Any] = [{"role": "user", "content": "Weather?"}, *(item.to_dict() for item in first.output)]
        again = client.responses.create(input=[*whole, *outputs], store=False, **asked)
        await answered(cluster, again, tokenizer.encode("Sun."), 2)
        requests = list(cluster.scheduler.requests.values())
        assert requests[1].request.token_ids == requests[2].request.token_ids
        assert not requests[2].request.attachment


async def test_a_reference_stands_for_an_item_of_a_stored_response(
    cluster: Cluster, client: openai.AsyncOpenAI, tokenizer: Tokenizer
) -> None:
    asked: Any = {"role": "user", "content": "Hi"}
    first = await answered(cluster, client.responses.create(model="smollm2", input=[asked]), tokenizer.encode(TEXT))
    (item,) = first.output
    listed = (await client.responses.input_items.list(first.id)).data[0]
    more: Any = {"role": "user", "content": "Go on"}
    # The type of a reference may be left out.
    inputs: list[Any] = [
        [asked, item.to_dict(), more],
        [asked, {"type": "item_reference", "id": item.id}, more],
        [{"id": listed.id}, {"id": item.id}, more],
    ]
    made = []
    for number, said in enumerate(inputs, 1):
        call = client.responses.create(model="smollm2", input=said)
        made.append(await answered(cluster, call, tokenizer.encode("On."), number))
    prompts = [script.request.token_ids for script in cluster.scheduler.requests.values()]
    assert prompts[1] == prompts[2] == prompts[3]
    counted = await client.responses.input_tokens.count(model="smollm2", input=inputs[1])
    assert counted.input_tokens == made[0].usage.input_tokens
    # The new response has a copy of the item.
    await client.responses.delete(first.id)
    items = [entry async for entry in client.responses.input_items.list(made[1].id, order="asc")]
    assert items[1].to_dict() == item.to_dict()
    follow = client.responses.create(model="smollm2", input="More", previous_response_id=made[1].id)
    assert (await answered(cluster, follow, tokenizer.encode("x."), 3)).output_text == "x."


GROUP: dict[str, Any] = {
    "type": "namespace",
    "name": "sky",
    "description": "About the sky.",
    "tools": [TOOLS[0], {"type": "custom", "name": "say", "description": "Speaks."}],
}


async def test_tools_of_a_namespace_are_called_by_their_own_names(cluster: Cluster, tokenizer: Tokenizer) -> None:
    asked: dict[str, Any] = {"model": "smollm2", "tools": [TOOLS[0], GROUP]}
    async with client_of(await router_of(cluster, TRANSCRIPTS["hermes"])) as client:
        written = "".join(
            f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>\n"
            for name, arguments in (("sky__weather", {"city": "Oslo"}), ("sky__say", {"input": "Hi"}), ("weather", {}))
        )
        create = client.responses.create(input="Weather?", **asked)
        response = await answered(cluster, create, tokenizer.encode(written))
        calls = [(item.type, getattr(item, "namespace", None), item.name) for item in response.output]
        assert calls == [
            ("function_call", "sky", "weather"),
            ("custom_tool_call", "sky", "say"),
            ("function_call", None, "weather"),
        ]
        events = await events_of(client, response.id)
        shown = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        assert [(item.get("namespace"), item["name"]) for item in shown] == [call[1:] for call in calls]
        # In the next prompt, the calls have the names that the model wrote.
        outputs: list[Any] = [
            {"type": item.type + "_output", "call_id": item.call_id, "output": "x"} for item in response.output
        ]
        items = [*(item.to_dict() for item in response.output), *outputs]
        job = read_response(Body({**asked, "input": items}), ChatModel())
        (turn, *_) = job.conversation.request.chat.messages
        names = [call["function"]["name"] for call in json.loads(turn.tool_calls_json)]
        assert names == ["sky__weather", "sky__say", "weather"]
        tools = json.loads(job.conversation.request.chat.tools_json)
        described = [(tool["function"]["name"], tool["function"]["description"]) for tool in tools]
        assert described == [("weather", "d"), ("sky__weather", "About the sky.\n\nd"), ("sky__say", "Speaks.")]


def test_a_tool_of_a_namespace_is_chosen_by_its_own_name() -> None:
    for tools, name, found in (
        ([GROUP], "weather", "sky__weather"),
        ([GROUP], "sky__weather", "sky__weather"),
        ([TOOLS[0], GROUP], "weather", "weather"),
    ):
        for choice in (
            {"type": "function", "name": name},
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": name}]},
        ):
            body = Body({"input": "Hi", "tools": tools, "tool_choice": choice})
            chosen = read_response(body, ChatModel()).conversation.tools
            assert ([chosen.named] if chosen.choice == "named" else list(chosen.schemas)) == [found]
    wrong: list[tuple[list[Any], str]] = [
        ([GROUP, {**GROUP, "name": "sea"}], "tool_choice.name"),
        ([GROUP, GROUP], "tools[1].tools[0].name"),
        ([{**GROUP, "name": ""}], "tools[0].name"),
        ([{**GROUP, "tools": [{"type": "function"}]}], "tools[0].tools[0].name"),
        ([{**GROUP, "tools": [{"type": "web_search"}]}], "tools[0].tools[0].type"),
        ([{**GROUP, "tools": [{**TOOLS[0], "parameters": [1]}]}], "tools[0].tools[0].parameters"),
        ([{**GROUP, "tools": [{**TOOLS[0], "colour": 1}]}], "tools[0].tools[0].colour"),
    ]
    for tools, path in wrong:
        body = Body({"input": "Hi", "tools": tools, "tool_choice": {"type": "function", "name": "weather"}})
        with pytest.raises((InvalidArgumentError, UnsupportedError)) as raised:
            read_response(body, ChatModel())
        assert raised.value.field == path


async def test_references_that_are_refused(cluster: Cluster, client: openai.AsyncOpenAI, tokenizer: Tokenizer) -> None:
    first = await answered(cluster, client.responses.create(model="smollm2", input="Hi"), tokenizer.encode(TEXT))
    own = first.id.removeprefix("resp_")
    running = await client.responses.create(model="smollm2", input="Hi", background=True)
    reference: Any = {"type": "item_reference", "id": first.output[0].id}
    refused: list[tuple[list[Any], int, str]] = [
        ([{"type": "item_reference"}], 400, "input[0].id"),
        ([reference, {"type": "item_reference", "id": "x"}], 404, "input[1].id"),
        ([{**reference, "id": f"msg_{own}_1"}], 404, "input[0].id"),
        ([{**reference, "id": f"rs_{own}_0"}], 404, "input[0].id"),
        ([{**reference, "id": f"msg_{running.id.removeprefix('resp_')}_0"}], 400, "input[0].id"),
        ([reference, reference], 400, "input[1].id"),
        ([{**reference, "status": "completed"}], 400, "input[0].status"),
    ]
    for said, status, param in refused:
        with pytest.raises(openai.APIStatusError) as raised:
            await client.responses.create(model="smollm2", input=said)
        assert (raised.value.status_code, getattr(raised.value, "param", None)) == (status, param)
    await client.responses.cancel(running.id)


def accept(cluster: Cluster, response_id: str, **fields: Any) -> None:
    """Simulate an earlier release that accepted these fields in the request of a response."""
    request = cluster.scheduler.requests[response_id].request
    attachment = json.loads(request.attachment)
    request.attachment = json.dumps({**attachment, "body": {**attachment["body"], **fields}}).encode()


@pytest.mark.parametrize(
    "fields",
    [
        {"include": ["x"]},
        {"conversation": {}},
        {"metadata": {"a": "x" * 600}},
        {"nothing": [{"a": {}}], "truncation": "auto", "text": {"verbosity": "low"}},
        {"input": [{"role": "user", "content": "Hi", "async": True, "x.y": 1}]},
    ],
)
async def test_a_response_is_read_and_continued_although_this_release_would_refuse_it(
    cluster: Cluster, client: openai.AsyncOpenAI, tokenizer: Tokenizer, fields: dict[str, Any]
) -> None:
    with pytest.raises(openai.BadRequestError):
        await client.responses.create(model="smollm2", input="Hi", extra_body=fields)
    created = await answered(cluster, client.responses.create(model="smollm2", input="Hi"), tokenizer.encode(TEXT))
    accept(cluster, created.id, **fields)
    stored = await client.responses.retrieve(created.id)
    assert (stored.id, stored.status, stored.output_text) == (created.id, "completed", TEXT)
    echoed = {name: value for name, value in fields.items() if name in ("metadata", "truncation")}
    assert {name: stored.to_dict()[name] for name in echoed} == echoed
    assert (await events_of(client, created.id))[-1]["type"] == "response.completed"
    assert len((await client.responses.input_items.list(created.id)).data) == 1
    follow = client.responses.create(model="smollm2", input="Go on", previous_response_id=created.id)
    assert (await answered(cluster, follow, tokenizer.encode("On."), 1)).output_text == "On."
    prompt = list(cluster.scheduler.requests.values())[1].request.token_ids.values
    said = tokenizer.decode(list(prompt), skip_special_tokens=False)
    assert said.index("Hi") < said.index(TEXT) < said.index("Go on")
    await client.responses.delete(created.id)


def test_what_is_refused_in_a_stored_body_is_left_out_of_its_job_alone() -> None:
    tool = {"type": "function", "name": "f", "parameters": {"type": "object"}}
    kept = {"type": "web_search", "external_web_access": True}
    fields: dict[str, Any] = {
        "input": [{"type": "item_reference", "id": "x"}],
        "tools": [{"type": "computer_use_preview"}, {**tool, "async": True}, kept],
        "include": ["reasoning.encrypted_content", "x"],
        "text": {"format": {"type": "json_object"}, "verbosity": "low"},
        "nothing" * 30: 1,
        "max_output_tokens": 7,
    }
    before = json.dumps(fields)
    job = read_stored(fields, ChatModel())
    assert list(job.conversation.tools.schemas) == ["f"]
    assert job.conversation.request.HasField("guided_decoding")
    assert (job.items, job.shows_hidden, job.is_stored) == (fields["input"], True, True)
    assert (job.echo["tools"], job.echo["text"], job.echo["max_output_tokens"]) == (fields["tools"], fields["text"], 7)
    assert json.dumps(fields) == before
    with pytest.raises(InvalidArgumentError, match="input"):
        read_stored({"include": ["x"]}, ChatModel())


async def test_background(cluster: Cluster, client: openai.AsyncOpenAI, tokenizer: Tokenizer) -> None:
    created = await client.responses.create(model="smollm2", input="Hi", background=True)
    assert (created.status, created.output) == ("queued", [])
    await cluster.scheduler.until(lambda: cluster.scheduler.requests)
    assert cluster.scheduler.requests[created.id].request.detached
    cluster.scheduler.emit(created.id, tokenizer.encode("Well"))
    assert (await client.responses.retrieve(created.id)).status == "in_progress"
    with pytest.raises(openai.BadRequestError, match="has not ended"):
        await client.responses.create(model="smollm2", input="Hi", previous_response_id=created.id)
    cancelled = await client.responses.cancel(created.id)
    assert (cancelled.status, cancelled.output_text) == ("cancelled", "Well")
    assert (await client.responses.cancel(created.id)).to_dict() == cancelled.to_dict()
    events = await events_of(client, created.id)
    assert [event["type"] for event in events[:3]] == [
        "response.created", "response.queued", "response.in_progress",
    ]  # fmt: skip
    assert events[-1]["response"] == cancelled.to_dict()
    with pytest.raises(openai.BadRequestError, match="store"):
        await client.responses.create(model="smollm2", input="Hi", background=True, store=False)


@pytest.mark.parametrize(
    ("reason", "status"), [(pb.FINISH_REASON_LENGTH, "incomplete"), (pb.FINISH_REASON_ERROR, "failed")]
)
async def test_ends(
    cluster: Cluster, client: openai.AsyncOpenAI, tokenizer: Tokenizer, reason: pb.FinishReason.ValueType, status: str
) -> None:
    create = client.responses.create(model="smollm2", input="Hi", max_output_tokens=3)
    error = pb.ErrorInfo(code=13, message="the worker broke") if status == "failed" else None
    response = await answered(cluster, create, tokenizer.encode("Well, so"), reason=reason, error=error)
    assert (response.status, response.output[0].status) == (status, "incomplete")
    if status == "failed":
        assert response.error is not None
        assert response.error.message == "the worker broke"
    else:
        assert response.incomplete_details.reason == "max_output_tokens"
    assert (await events_of(client, response.id))[-1]["type"] == f"response.{status}"


async def test_custom_tools_take_free_text(cluster: Cluster, tokenizer: Tokenizer) -> None:
    chat = ChatModel(model_format("hermes", "none"))
    router = await cluster.add_router(await cluster.add_detokenizer(), chat=chat)
    call = '<tool_call>\n{"name": "run", "arguments": {"input": "ls \\"x\\""}}\n</tool_call>'
    async with client_of(router) as client:
        create = client.responses.create(
            model="smollm2", input="List", tools=[{"type": "custom", "name": "run", "description": "a shell"}]
        )
        response = await answered(cluster, create, tokenizer.encode(call))
        (item,) = response.output
        assert (item.type, item.name, item.input) == ("custom_tool_call", "run", 'ls "x"')
        events = await events_of(client, response.id)
        assert [event["delta"] for event in events if event["type"].endswith("input.delta")] == ['ls "x"']
        outputs: list[Any] = [{"type": "custom_tool_call_output", "call_id": item.call_id, "output": "x"}]
        follow = client.responses.create(model="smollm2", input=outputs, previous_response_id=response.id)
        assert (await answered(cluster, follow, tokenizer.encode("x."), 1)).output_text == "x."


async def test_half_of_a_surrogate_pair_in_arguments_is_replaced(
    cluster: Cluster, client: openai.AsyncOpenAI, tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode(r'{"input": "a \ud83d"}')
    tools: Any = [{"type": "custom", "name": "run"}]
    create = client.responses.create(model="smollm2", input="x", tools=tools, tool_choice=tools[0])
    (item,) = (await answered(cluster, create, ids)).output
    assert item.input == "a \ufffd"
    arguments = r'{"city": "\ud83d"}'
    call: dict[str, Any] = {"type": "function_call", "call_id": "c", "name": "weather", "arguments": arguments}
    items: list[Any] = [call, {"type": "function_call_output", "call_id": "c", "output": "x"}]
    follow = client.responses.create(model="smollm2", input=items)
    assert (await answered(cluster, follow, tokenizer.encode("Hi"), 1)).output_text == "Hi"
    function: Any = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    messages: list[Any] = [
        {"role": "assistant", "tool_calls": [function]},
        {"role": "tool", "tool_call_id": "c", "content": "x"},
    ]
    chat = client.chat.completions.create(model="smollm2", messages=messages)
    assert (await answered(cluster, chat, tokenizer.encode("Hi"), 2)).choices[0].message.content == "Hi"


@pytest.mark.parametrize(
    ("tool", "text", "shown"),
    [
        ({"type": "function", "parameters": {}}, '{"a": "x', {"arguments": '{"a": "x'}),
        ({"type": "custom"}, '{"input": "ls', {"input": "ls"}),
        ({"type": "custom"}, '{"input": "a\\"b\\ud83e', {"input": 'a"b'}),
        ({"type": "custom"}, '{"input": "\\ud83ea', {"input": "\ufffda"}),
        ({"type": "custom"}, '{"inp', {"input": ""}),
    ],
)
async def test_a_call_that_is_cut_off_is_incomplete_and_can_be_answered(
    cluster: Cluster,
    client: openai.AsyncOpenAI,
    tokenizer: Tokenizer,
    tool: dict[str, Any],
    text: str,
    shown: dict[str, str],
) -> None:
    choice: Any = {"type": tool["type"], "name": "run"}
    tools: Any = [{**tool, "name": "run"}]
    create = client.responses.create(model="smollm2", input="List", tools=tools, tool_choice=choice)
    response = await answered(cluster, create, tokenizer.encode(text), reason=pb.FINISH_REASON_LENGTH)
    (item,) = response.output
    assert (response.status, item.status, item.to_dict() | shown) == ("incomplete", "incomplete", item.to_dict())
    events = await events_of(client, response.id)
    (done,) = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == item.to_dict()
    output: Any = {"type": f"{item.type}_output", "call_id": item.call_id, "output": "incomplete"}
    sent: list[Any] = [item.to_dict(), output]
    question = {"role": "user", "content": "?"}
    turns: list[dict[str, Any]] = [
        {"input": "Go on", "previous_response_id": response.id},
        {"input": [output], "previous_response_id": response.id},
        {"input": sent},
        {"input": [*sent, question]},
    ]
    for number, turn in enumerate(turns, start=1):
        follow = client.responses.create(model="smollm2", **turn)
        assert (await answered(cluster, follow, tokenizer.encode("x."), number)).output_text == "x."


async def test_structured_output_and_refusals(client: openai.AsyncOpenAI, cluster: Cluster) -> None:
    schema: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
    create = client.responses.create(
        model="smollm2",
        input="Hi",
        text={"format": {"type": "json_schema", "name": "x", "schema": schema}},
        store=False,
    )
    response = await answered(cluster, create, [])
    (script,) = cluster.scheduler.requests.values()
    assert json.loads(script.request.guided_decoding.guide) == schema
    assert not script.request.keep_s
    assert response.store is False
    refused: list[tuple[dict[str, Any], str]] = [
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"tools": [{"type": "computer_use_preview"}]}, "tools"),
        ({"extra_body": {"nothing": 1}}, "nothing"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"previous_response_id": "resp_x"}, "previous_response_id"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["reasoning"]}, "include"),
        ({"user": "x" * 1000}, "user"),
    ]
    for fields, param in refused:
        with pytest.raises((openai.BadRequestError, openai.NotFoundError)) as raised:
            await client.responses.create(**{"model": "smollm2", "input": "Hi", **fields})
        assert str(raised.value.param).startswith(param)
    counted = await client.responses.input_tokens.count(model="smollm2", input="Hi")
    assert counted.input_tokens > 1
    seen: Any = {"role": "user", "content": "Hi", "cache_control": {"type": "ephemeral"}}
    raw = await client.responses.input_tokens.with_raw_response.count(model="smollm2", input=[seen])
    assert raw.headers["x-midstream-ignored"] == "input.cache_control"
    assert raw.parse() == counted


async def test_a_json_object_is_no_array_and_an_image_is_named_by_its_own_field(
    client: openai.AsyncOpenAI, cluster: Cluster
) -> None:
    call = client.responses.create(model="", input="Hi", text={"format": {"type": "json_object"}})
    await answered(cluster, call, [1])
    (script,) = cluster.scheduler.requests.values()
    assert json.loads(script.request.guided_decoding.guide) == {"type": "object"}
    image: Any = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
    with pytest.raises(openai.BadRequestError) as refused:
        await client.responses.create(model="", input=[{"role": "user", "content": [image]}])
    assert refused.value.param == "input[0].content[0].image_url"


def test_an_input_may_end_with_the_assistant_unless_it_calls_a_tool() -> None:
    """In that case, the answer is another message of the assistant."""
    said = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
    turns = read_response(Body({"input": said}), ChatModel()).conversation.request.chat.messages
    assert [turn.role for turn in turns] == ["user", "assistant"]
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "d", "output": "x"}
    for items, field in (([], "input"), ([*said, call], "input"), ([call, output], "input[1].call_id")):
        with pytest.raises(InvalidArgumentError) as raised:
            read_response(Body({"input": items}), ChatModel())
        assert raised.value.field == field


def test_a_format_has_no_effect_if_a_call_is_required() -> None:
    fields: dict[str, Any] = {"input": "Hi", "tools": TOOLS[:1], "tool_choice": "required"}
    job = read_response(Body({**fields, "text": {"format": {"type": "json_object"}}}), ChatModel())
    assert job.ignored == ["text.format"]
    assert not job.conversation.request.HasField("guided_decoding")
    assert job.names["guided_decoding"] == "tools[0].parameters"


async def test_a_list_of_input_items_ends_although_two_have_the_same_id(
    cluster: Cluster, client: openai.AsyncOpenAI
) -> None:
    said: Any = {"id": "msg_a", "role": "user", "content": "Hi"}
    created = await answered(cluster, client.responses.create(model="smollm2", input=[said, said, said]), [30])
    for limit in (1, 2, 3):
        found = [item.id async for item in client.responses.input_items.list(created.id, limit=limit, order="asc")]
        own = created.id.removeprefix("resp_")
        assert found == ["msg_a", f"msg_{own}_in_1", f"msg_{own}_in_2"]
