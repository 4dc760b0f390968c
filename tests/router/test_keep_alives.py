"""Streams of every API while their requests wait: official clients and raw sockets, with a scripted scheduler."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import anthropic
import openai
import pytest

from midstream.model.tokenizer import Tokenizer
from midstream.rpc.channel import open_channel
from protos import generation_pb2 as pb
from protos import kserve_pb2, kserve_pb2_grpc, openengine_pb2, openengine_pb2_grpc, service_pb2, service_pb2_grpc
from router.pipeline.keep_alives import KeepAlives, KeptStream
from tests.router.adapters.clients import client_of
from tests.router.client_streams import PROMPT, OpenClient, collect
from tests.router.conftest import Cluster, Part

INTERVAL_S = 0.05
CHAT: dict[str, object] = {"messages": [{"role": "user", "content": "hi"}], "request_id": "r"}
BODIES: dict[str, dict[str, object]] = {
    "/v1/chat/completions": {**CHAT, "stream_options": {"include_usage": True}},
    "/v1/completions": {"prompt": "hi", "request_id": "r"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": CHAT["messages"], "max_tokens": 9},
}
# What each API sends while a request waits; None matches any value.
WAITING: dict[str, dict[str, object]] = {
    "/v1/chat/completions": {
        "choices": [{"index": 0, "delta": {"content": ""}, "logprobs": None, "finish_reason": None}],
        "usage": None,
    },
    "/v1/completions": {"choices": [{"index": 0, "text": "", "logprobs": None, "finish_reason": None}]},
    "/v1/responses": {"type": "keepalive", "sequence_number": 1},
    "/v1/messages": {
        "type": "message_delta",
        "delta": {"stop_reason": None, "stop_sequence": None},
        "usage": {"output_tokens": 0},
    },
}


@pytest.fixture
async def router(cluster: Cluster) -> Part:
    return await cluster.add_router(await cluster.add_detokenizer(), keepalive_interval_s=INTERVAL_S)


Post = Callable[..., Awaitable[asyncio.StreamReader]]


@pytest.fixture
async def post() -> AsyncIterator[Post]:
    """Sends a streaming request over a connection of its own, and returns the reader of the response."""
    writers: list[asyncio.StreamWriter] = []

    async def send(part: Part, path: str, body: dict[str, object], headers: str = "") -> asyncio.StreamReader:
        assert part.http is not None
        reader, writer = await asyncio.open_connection("127.0.0.1", part.http.port)
        writers.append(writer)
        data = json.dumps({**body, "model": "smollm2", "stream": True}).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\nanthropic-version: 2023-06-01\r\n{headers}"
        writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        return reader

    yield send
    for writer in writers:
        writer.close()


async def events(reader: asyncio.StreamReader) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    """Yield the id and the data of each event."""
    event_id = ""
    while line := (await reader.readline()).decode():
        if line.startswith("id: "):
            event_id = line[4:].strip()
        elif line.startswith("data: {"):
            yield event_id, json.loads(line[6:])
        elif line.startswith("data: [DONE]"):
            return


@pytest.mark.parametrize("path", BODIES)
async def test_every_api_sends_its_own_form_until_there_is_output(
    cluster: Cluster, router: Part, post: Post, path: str, tokenizer: Tokenizer
) -> None:
    found = events(await post(router, path, BODIES[path]))
    kept: list[dict[str, Any]] = []
    opening: list[dict[str, Any]] = []
    async for _, event in found:
        is_kept = event | WAITING[path] == event
        (kept if is_kept else opening).append(event)
        if len(kept) == 3:
            break
    (request_id,) = cluster.scheduler.requests
    cluster.scheduler.emit(request_id, tokenizer.encode("Hello"))
    cluster.scheduler.end(request_id)
    rest = [event async for _, event in found]
    text = json.dumps([event for event in rest if event | WAITING[path] != event])
    assert "Hello" in text
    # The events besides those are the same as for a request that does not wait.
    numbers = [
        event["sequence_number"]
        for event in [*opening, *rest]
        if event.get("type") not in ("keepalive", None) and "sequence_number" in event
    ]
    assert numbers == list(range(len(numbers)))


async def test_the_id_of_an_event_without_output_is_where_to_resume(
    cluster: Cluster, router: Part, post: Post, tokenizer: Tokenizer
) -> None:
    reader = await post(router, "/v1/chat/completions", CHAT)
    found = events(reader)
    await anext(found)
    await cluster.scheduler.until(lambda: "r" in cluster.scheduler.requests)
    cluster.scheduler.emit("r", tokenizer.encode("Hello"))
    async for event_id, event in found:  # noqa: B007 (the last id is used)
        if event["choices"][0]["delta"]["content"] == "Hello":
            break
    shown = event_id
    event_id, event = await anext(found)
    assert (event_id, event["choices"][0]["delta"]) == (shown, {"content": ""})
    resumed = events(await post(router, "/v1/chat/completions", CHAT, f"Last-Event-ID: {event_id}\r\n"))
    cluster.scheduler.emit("r", tokenizer.encode(" world"))
    cluster.scheduler.end("r")
    texts = [event["choices"][0]["delta"].get("content", "") async for _, event in resumed]
    assert "".join(texts) == " world"


async def test_official_clients_ignore_them(cluster: Cluster, router: Part, tokenizer: Tokenizer) -> None:
    assert router.http is not None
    url = f"http://127.0.0.1:{router.http.port}"
    scheduler, hello = cluster.scheduler, tokenizer.encode("Hello")
    kinds: list[str] = []  # of the events of /v1/messages

    async def answer_late() -> None:
        await scheduler.until(lambda: len(scheduler.requests) == 3)
        await asyncio.sleep(4 * INTERVAL_S)
        await until(lambda: "message_delta" in kinds)
        for request_id in scheduler.requests:
            scheduler.emit(request_id, hello)
        await asyncio.sleep(4 * INTERVAL_S)
        await until(lambda: "content_block_delta" in kinds and kinds[-1] == "message_delta")
        for request_id in scheduler.requests:
            scheduler.end(request_id, pb.FINISH_REASON_STOP)

    async def chat(client: openai.AsyncOpenAI) -> str:
        messages: Any = CHAT["messages"]
        async with client.chat.completions.stream(model="smollm2", messages=messages) as stream:
            await stream.until_done()
            return str((await stream.get_final_completion()).choices[0].message.content)

    async def respond(client: openai.AsyncOpenAI) -> str:
        async with client.responses.stream(model="smollm2", input="hi") as stream:
            return str((await stream.get_final_response()).output_text)

    async def message(client: anthropic.AsyncAnthropic) -> str:
        turns: Any = CHAT["messages"]
        async with client.messages.stream(model="smollm2", max_tokens=9, messages=turns) as stream:
            async for event in stream:
                kinds.append(event.type)  # noqa: PERF401 (it is read while it grows)
            final = await stream.get_final_message()
        assert (final.stop_reason, final.usage.output_tokens, len(final.content)) == ("end_turn", len(hello), 1)
        return str(await stream.get_final_text())

    async with client_of(router) as one, anthropic.AsyncAnthropic(base_url=url, api_key="none") as other:
        *answers, _ = await asyncio.gather(chat(one), respond(one), message(other), answer_late())
    assert answers == ["Hello"] * 3


@pytest.mark.parametrize(
    ("path", "waiting", "error_type"),
    [
        ("/v1/chat/completions", ": keep-alive\n\n", "service_unavailable_error"),
        ("/v1/messages", 'event: ping\ndata: {"type":"ping"}\n\n', "overloaded_error"),
    ],
)
async def test_a_stream_begins_while_its_request_is_not_accepted_yet(
    cluster: Cluster, post: Post, path: str, waiting: str, error_type: str
) -> None:
    await cluster.scheduler.stop()
    router = await cluster.add_router(
        await cluster.add_detokenizer(), keepalive_interval_s=INTERVAL_S, unavailable_timeout_s=10 * INTERVAL_S
    )
    reader = await post(router, path, BODIES[path])
    assert b" 200 " in await reader.readline()
    answer = (await reader.read()).decode()
    assert answer.count(waiting) > 1
    error = json.loads("{" + answer.rpartition("data: {")[2].partition("\n")[0])["error"]
    assert error["type"] == error_type


async def test_native_streams_get_headers_and_messages_without_output(
    cluster: Cluster, router: Part, open_client: OpenClient, tokenizer: Tokenizer
) -> None:
    async with open_channel(router.address) as channel:
        stub: Any = service_pb2_grpc.MidstreamStub(channel)
        call = stub.Generate(pb.GenerateRequest(request_id="r", token_ids=pb.TokenIds(values=PROMPT)))
        async with asyncio.timeout(5):
            await call.initial_metadata()
        first = await call.read()
        assert first == pb.GenerateResponse(request_id="r", is_keep_alive=True)
        ids = tokenizer.encode("Hello")
        cluster.scheduler.emit("r", ids)
        while not (message := await call.read()).text:
            assert message.is_keep_alive
        assert await call.read() == pb.GenerateResponse(request_id="r", token_offset=len(ids), is_keep_alive=True)
        resumed = stub.Resume(service_pb2.ResumeRequest(request_id="r", from_token=len(ids)))
        assert await resumed.read() == pb.GenerateResponse(request_id="r", token_offset=len(ids), is_keep_alive=True)
    cluster.scheduler.end("r")
    result, chunks = await collect(open_client(router), request_id="r")
    assert (result.text, len(chunks)) == ("Hello", 1)


async def test_kserve_and_openengine_streams_get_empty_texts(cluster: Cluster, router: Part) -> None:
    async with open_channel(router.address) as channel:
        infer = kserve_pb2.ModelInferRequest(model_name="smollm2", id="7")
        infer.inputs.add(name="text_input", datatype="BYTES", shape=[1, 1]).contents.bytes_contents.append(b"hi")
        infer.inputs.add(name="max_tokens", datatype="INT32", shape=[1, 1]).contents.int_contents.append(9)
        kserve: Any = kserve_pb2_grpc.GRPCInferenceServiceStub(channel)
        call = kserve.ModelStreamInfer()
        await call.write(infer)
        for _ in range(2):
            answer = (await call.read()).infer_response
            texts = [
                data
                for output, data in zip(answer.outputs, answer.raw_output_contents, strict=True)
                if output.name == "text_output"
            ]
            assert (answer.id, texts) == ("7", [bytes(4)])  # an empty text, with its length before it
            assert not answer.parameters["triton_final_response"].bool_param
        call.cancel()
        request = openengine_pb2.GenerateRequest(request_id="o", model="smollm2", prompt="hi")
        engine: Any = openengine_pb2_grpc.InferenceStub(channel)
        running = engine.Generate(request)
        for _ in range(2):
            event = await running.read()
            assert event == openengine_pb2.GenerateResponse(
                request_id="o", token=openengine_pb2.TokenOutput(output_index=0)
            )
        running.cancel()


async def test_a_beat_waits_for_silence_and_for_no_message_that_is_being_written() -> None:
    keep_alives, sent, may_send = KeepAlives(0.04), [], asyncio.Event()

    async def beat() -> None:
        sent.append("beat")

    async def send(message: str) -> None:
        sent.append(message)
        await may_send.wait()

    with keep_alives.keep(beat) as stream:
        writing = asyncio.create_task(stream.write(send, "slow"))
        await until(lambda: stream.num_quiet_ticks == 0 and bool(sent))
        await asyncio.sleep(0.2)
        assert sent == ["slow"]
        may_send.set()
        await writing
        await until(lambda: len(sent) > 2)
        assert sent[:3] == ["slow", "beat", "beat"]
    await asyncio.sleep(0.1)
    assert len(sent) == 3


async def test_a_message_follows_the_beat_that_is_being_written() -> None:
    keep_alives, sent, may_send = KeepAlives(0.02), [], asyncio.Event()

    async def beat() -> None:
        sent.append("beat begins")
        await may_send.wait()
        sent.append("beat ends")

    async def send(message: str) -> None:
        sent.append(message)

    with keep_alives.keep(beat) as stream:
        await until(lambda: bool(sent))
        writing = asyncio.create_task(stream.write(send, "message"))
        await asyncio.sleep(0)
        may_send.set()
        await writing
    assert sent == ["beat begins", "beat ends", "message"]


async def test_one_timer_serves_all_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_alives, counts = KeepAlives(0.04), [0] * 100

    def keep(index: int) -> KeptStream:
        async def beat() -> None:
            counts[index] += 1

        return keep_alives.keep(beat)

    loop = asyncio.get_running_loop()
    call_later, timers = loop.call_later, []

    def counted(*arguments: Any) -> asyncio.TimerHandle:
        timers.append(call_later(*arguments))
        return timers[-1]

    monkeypatch.setattr(loop, "call_later", counted)
    streams = [keep(index) for index in range(len(counts))]
    for stream in streams:
        stream.__enter__()
    await until(lambda: min(counts) == 2)
    for stream in streams:
        stream.__exit__(None, None, None)
    own = [timer for timer in timers if "KeepAlives" in repr(timer)]
    assert len(own) < 50  # about 8, for 200 beats


async def until(condition: Any) -> None:
    async with asyncio.timeout(240):
        while not condition():  # noqa: ASYNC110 (nothing signals it)
            await asyncio.sleep(0.005)
