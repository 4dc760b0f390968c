"""The official client against a router on a real socket, in front of a scripted scheduler."""

from __future__ import annotations

import asyncio
import json
import urllib.request

import openai
import pytest

from midstream.tokenizer import Tokenizer
from tests.router.conftest import Cluster, Part

TEXT = "Every part may die 🫠 and the text goes on: 日本語, naïve, done."


@pytest.fixture
async def router(cluster: Cluster) -> Part:
    return await cluster.add_router(await cluster.add_detokenizer())


def client_of(router: Part) -> openai.AsyncOpenAI:
    assert router.http is not None
    return openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{router.http.port}/v1", api_key="none", max_retries=0)


async def answer(cluster: Cluster, request_id: str, ids: list[int]) -> None:
    await cluster.scheduler.until(lambda: request_id in cluster.scheduler.requests)
    cluster.scheduler.emit(request_id, ids)
    cluster.scheduler.end(request_id)


async def test_a_completion_is_the_text_of_its_tokens(cluster: Cluster, router: Part, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT)
    async with client_of(router) as client:
        extra = {"request_id": "r", "priority": 3, "ignore_eos": True}
        call = client.completions.create(model="smollm2", prompt=[5, 6], max_tokens=99, extra_body=extra)
        completion, _ = await asyncio.gather(call, answer(cluster, "r", ids))
    assert completion.choices[0].text == TEXT
    assert completion.choices[0].finish_reason == "length"
    assert completion.usage is not None
    assert (completion.usage.prompt_tokens, completion.usage.completion_tokens) == (2, len(ids))
    native = cluster.scheduler.requests["r"].request
    assert (list(native.token_ids.values), native.max_tokens, native.priority) == ([5, 6], 99, -3)
    assert native.stopping.ignore_eos


async def test_a_chat_streams_and_ends_with_usage(cluster: Cluster, router: Part, tokenizer: Tokenizer) -> None:
    async with client_of(router) as client:
        stream = await asyncio.wait_for(
            client.chat.completions.create(
                model="smollm2", messages=[{"role": "user", "content": "Hi"}], stream=True,
                stream_options={"include_usage": True}, extra_body={"request_id": "r"},
            ), 10,
        )  # fmt: skip
        await answer(cluster, "r", tokenizer.encode(TEXT))
        chunks = [chunk async for chunk in stream]
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == TEXT
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(tokenizer.encode(TEXT))


async def test_a_client_that_leaves_aborts(cluster: Cluster, router: Part) -> None:
    async with client_of(router) as client:
        stream = await client.completions.create(
            model="smollm2", prompt="Hi", stream=True, extra_body={"request_id": "r"}
        )
        await stream.close()
        await cluster.scheduler.until(lambda: cluster.scheduler.aborts == ["r"])


async def test_another_router_takes_a_stream_up_at_the_last_event(
    cluster: Cluster, router: Part, tokenizer: Tokenizer
) -> None:
    assert router.http is not None
    cluster.scheduler.add("r")
    ids = tokenizer.encode(TEXT)
    await answer(cluster, "r", ids)
    lines = await asyncio.to_thread(post_sse, router.http.port, {"prompt": "Hi", "stream": True}, "r/4")
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert tokenizer.decode(ids[:4]) + "".join(event["choices"][0]["text"] for event in events) == TEXT
    assert lines[-1] == "data: [DONE]"


def post_sse(port: int, body: dict[str, object], last_event_id: str) -> list[str]:
    headers = {"Last-Event-ID": last_event_id}
    url = f"http://127.0.0.1:{port}/v1/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=10) as response:
        return [line for line in response.read().decode().splitlines() if line]


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"temperature": -1.0}, 400, "temperature"),
        ({"suffix": "x"}, 400, "suffix"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"logit_bias": {"x": 1}}, 400, "logit_bias"),
        ({"model": "other"}, 404, "model"),
        ({"seed": 1 << 70}, 400, "seed"),
    ],
)
async def test_a_wrong_field_is_named(router: Part, fields: dict[str, object], status: int, param: str) -> None:
    async with client_of(router) as client:
        with pytest.raises(openai.APIStatusError) as raised:
            await client.completions.create(model="smollm2", prompt="Hi", extra_body=fields)
    assert (raised.value.status_code, raised.value.param) == (status, param)
