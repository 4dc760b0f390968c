"""Every API reports that a request moved to another kind of workers, from the token on from which it did."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import pytest

from midstream.model.tokenizer import Tokenizer
from protos import kserve_pb2_grpc, openengine_pb2_grpc, weights_pb2
from protos import openengine_pb2 as oe
from tests.router.adapters.test_kserve import infer_request
from tests.router.conftest import Cluster, Part

TEXT = "one two three four"
CHANGED_AT = 2
WEIGHTS: list[dict[str, Any]] = [
    {"from_token": 0, "version": "default", "weights_root": "a"},
    {"from_token": CHANGED_AT, "version": "step-1", "weights_root": "b"},
    {"from_token": 1000, "version": "step-2", "weights_root": "c"},  # beyond the output
]


@pytest.fixture
async def address(cluster: Cluster, router: Part, tokenizer: Tokenizer) -> AsyncIterator[str]:
    """Yield the HTTP address of a router whose every request is answered with TEXT, in two pieces."""
    cluster.scheduler.kind_changed_at = (CHANGED_AT,)
    answered: set[str] = set()

    async def answer() -> None:
        while True:
            await cluster.scheduler.until(lambda: set(cluster.scheduler.requests) - answered)
            for request_id in set(cluster.scheduler.requests) - answered:
                answered.add(request_id)
                ids = tokenizer.encode(TEXT)
                cluster.scheduler.emit(request_id, ids[:CHANGED_AT])
                cluster.scheduler.emit(request_id, ids[CHANGED_AT:])
                parts = [weights_pb2.WeightsPart(**part) for part in WEIGHTS]
                cluster.scheduler.end(request_id, weights=parts)

    answering = asyncio.create_task(answer())
    assert router.http is not None
    yield f"http://127.0.0.1:{router.http.port}"
    answering.cancel()


CHAT = {"messages": [{"role": "user", "content": "count"}]}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "count"},
    "/v1/chat/completions": CHAT,
    "/v1/messages": CHAT | {"max_tokens": 16},
    "/v1/responses": {"input": "count"},
}


def found_in(value: Any, name: str = "kind_changed_at") -> list[object]:
    """Return the values of the field, wherever it is."""
    if isinstance(value, list):
        return [item for part in value for item in found_in(part, name)]
    if not isinstance(value, dict):
        return []
    own = [value[name]] if name in value else []
    return own + [item for part in value.values() for item in found_in(part, name)]


def post(url: str, body: dict[str, Any]) -> str:
    headers = {"Content-Type": "application/json", "anthropic-version": "2023-06-01"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=240) as response:
        content: bytes = response.read()
    return content.decode()


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
async def test_http(address: str, path: str, *, stream: bool) -> None:
    body = BODIES[path] | {"stream": stream, "model": "smollm2"}
    text = await asyncio.to_thread(post, address + path, body)
    if not stream:
        assert found_in(json.loads(text)) == [CHANGED_AT]
        assert found_in(json.loads(text), "weights") == [WEIGHTS[:2]]
        return
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")]
    events = [json.loads(line) for line in lines]
    assert set(found_in(events)) == {CHANGED_AT}
    assert WEIGHTS[:2] in found_in(events, "weights")


async def test_kserve(address: str, router: Part) -> None:
    async with grpc.aio.insecure_channel(router.address) as channel:
        stub: Any = kserve_pb2_grpc.GRPCInferenceServiceStub(channel)
        response = await stub.ModelInfer(infer_request(), timeout=240)
    assert response.parameters["kind_changed_at"].int64_param == CHANGED_AT


async def test_openengine(address: str, router: Part) -> None:
    request = oe.GenerateRequest(prompt="count")
    async with grpc.aio.insecure_channel(router.address) as channel:
        stub: Any = openengine_pb2_grpc.InferenceStub(channel)
        call = stub.Generate(request, timeout=240)
        assert [event async for event in call]
        metadata = dict(await call.trailing_metadata())
    assert metadata["midstream-kind-changed-at"] == str(CHANGED_AT)
