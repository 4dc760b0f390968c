"""A call that repeats the Idempotency-Key of an earlier call attaches to the request of that call."""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import Any, cast

import anthropic
import grpc
import grpc.aio
import openai
import pytest

from midstream.errors import AlreadyExistsError
from midstream.model.tokenizer import Tokenizer
from midstream.rpc.channel import open_channel
from protos import generation_pb2 as pb
from protos import kserve_pb2, kserve_pb2_grpc, openengine_pb2_grpc, service_pb2_grpc
from protos import openengine_pb2 as oe
from tests.router.adapters.test_responses import events_of, write
from tests.router.conftest import Cluster, Part

KEY = {"Idempotency-Key": "key 1"}
METADATA = (("idempotency-key", "key 1"),)


async def test_chat_completions(
    cluster: Cluster, client: openai.AsyncOpenAI, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time_ns()
    monkeypatch.setattr(time, "time_ns", itertools.count(now, 1_000_000_000).__next__)  # calls arrive a second apart

    def call(text: str = "Hi", **options: Any) -> Any:
        messages: Any = [{"role": "user", "content": text}]
        return client.chat.completions.create(model="smollm2", messages=messages, extra_headers=KEY, **options)

    first, second = asyncio.create_task(call()), asyncio.create_task(call())
    await write(cluster, tokenizer.encode("Well, so"))
    answers = [await first, await second, await call()]
    assert [answer.choices[0].message.content for answer in answers] == ["Well, so"] * 3
    (script,) = cluster.scheduler.requests.values()
    created = script.request.arrival_time_unix_ns // 1_000_000_000
    assert {(answer.id, answer.created) for answer in answers} == {(answers[0].id, created)}
    assert script.request.detached
    assert script.request.keep_s
    cluster.scheduler.submit_errors.append(AlreadyExistsError("another request has this id", field="request_id"))
    with pytest.raises(openai.BadRequestError, match="another request"):
        await call("Other")
    with pytest.raises(openai.BadRequestError, match="request_id"):
        await call(extra_body={"request_id": "mine"})


async def test_completions_of_several_prompts(
    cluster: Cluster, client: openai.AsyncOpenAI, tokenizer: Tokenizer
) -> None:
    def call() -> Any:
        return client.completions.create(model="smollm2", prompt=["a", "b"], extra_headers=KEY)

    first = asyncio.create_task(call())
    for number in range(2):
        await write(cluster, tokenizer.encode(f"Answer {number}"), number)
    assert (await first).to_dict() == (await call()).to_dict()
    assert len(cluster.scheduler.requests) == 2


async def test_responses(cluster: Cluster, client: openai.AsyncOpenAI, tokenizer: Tokenizer) -> None:
    def call(**options: Any) -> Any:
        return client.responses.create(model="smollm2", input="Hi", extra_headers=KEY, **options)

    first = asyncio.create_task(call(background=True))
    response_id = await write(cluster, tokenizer.encode("Well, so"))
    await first
    stream = await call(background=True)
    assert stream.id == response_id
    events = [event.to_dict() for event in [event async for event in await call(background=True, stream=True)]]
    assert events[-1]["response"] == (await client.responses.retrieve(response_id)).to_dict()
    assert events == await events_of(client, response_id)
    assert len(cluster.scheduler.requests) == 1


async def test_messages(cluster: Cluster, router: Part, tokenizer: Tokenizer) -> None:
    assert router.http is not None
    url = f"http://127.0.0.1:{router.http.port}"
    async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client:

        def call() -> Any:
            messages: Any = [{"role": "user", "content": "Hi"}]
            return client.messages.create(model="smollm2", max_tokens=9, messages=messages, extra_headers=KEY)

        first = asyncio.create_task(call())
        await write(cluster, tokenizer.encode("Well, so"))
        assert (await first).to_dict() == (await call()).to_dict()
        assert len(cluster.scheduler.requests) == 1


async def test_grpc_apis(cluster: Cluster, router: Part, tokenizer: Tokenizer) -> None:
    async with open_channel(router.address) as channel:
        native = cast("service_pb2_grpc.MidstreamAsyncStub", service_pb2_grpc.MidstreamStub(channel))
        engine = cast("openengine_pb2_grpc.InferenceAsyncStub", openengine_pb2_grpc.InferenceStub(channel))
        request = pb.GenerateRequest(prompt="Hi", streaming=False)
        engine_request = oe.GenerateRequest(prompt="Hi")
        for number, call in enumerate(
            (
                lambda: native.Generate(request, metadata=METADATA),
                lambda: engine.Generate(engine_request, metadata=METADATA),
            )
        ):

            async def read(call: Any = call) -> list[Any]:
                return [item async for item in call()]

            first = asyncio.create_task(read())
            await write(cluster, tokenizer.encode("Well, so"), number)
            assert len(await first)
            assert len(await read())
            assert len(cluster.scheduler.requests) == number + 1
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            async for _ in native.Generate(request, metadata=(("idempotency-key", "k" * 256),)):
                pass
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_kserve(cluster: Cluster, router: Part, tokenizer: Tokenizer) -> None:
    """In a stream, a request attaches to the one with its id and, among several with this id, in its place."""

    def request(text: str, request_id: str) -> kserve_pb2.ModelInferRequest:
        made = kserve_pb2.ModelInferRequest(model_name="ensemble", id=request_id)
        made.inputs.add(name="text_input", datatype="BYTES", shape=(1, 1)).contents.bytes_contents.append(text.encode())
        return made

    async with open_channel(router.address) as channel:
        stub = cast("kserve_pb2_grpc.GRPCInferenceServiceAsyncStub", kserve_pb2_grpc.GRPCInferenceServiceStub(channel))

        async def stream(*requests: kserve_pb2.ModelInferRequest) -> list[str]:
            answers = stub.ModelStreamInfer(iter(requests), metadata=METADATA)
            return [answer.error_message async for answer in answers]

        whole = stub.ModelInfer(request("Hi", "1"), metadata=METADATA)
        await write(cluster, tokenizer.encode("Well"))
        await whole
        await stub.ModelInfer(request("Hi", "2"), metadata=METADATA)
        assert len(cluster.scheduler.requests) == 1

        a, b, c = request("Hi", ""), request("Ho", ""), request("Ha", "mine")
        streams = asyncio.create_task(stream(a, b, c))
        for number in range(1, 4):
            await write(cluster, tokenizer.encode("Well"), number)
        assert set(await streams) == {""}
        assert set(await stream(c, a, b)) == {""}
        assert len(cluster.scheduler.requests) == 4
        cluster.scheduler.submit_errors.append(AlreadyExistsError("another request has this id", field="request_id"))
        assert [error for error in await stream(b) if error] == ["Idempotency-Key: was used with another request"]
