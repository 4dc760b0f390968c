"""Every API gives receipts at the end of responses to those who ask, and later by id."""

from __future__ import annotations

import asyncio
import base64
import json
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc.aio
import pytest
from google.protobuf.json_format import ParseDict

from midstream.client import AsyncClient, SamplingParams
from midstream.errors import NotFoundError
from midstream.model.tokenizer import Tokenizer
from midstream.receipts.evidence import Evidence
from protos import generation_pb2 as pb
from protos import receipts_pb2
from protos.service_pb2_grpc import MidstreamStub
from tests.router.adapters.test_kind_change import BODIES, TEXT, post
from tests.router.conftest import Cluster, Part

NUM_TOKENS = 4


@pytest.fixture
async def address(cluster: Cluster, router: Part, tokenizer: Tokenizer) -> AsyncIterator[str]:
    """Yield the HTTP address of a router whose every request is answered with TEXT."""
    answered: set[str] = set()
    ids = tokenizer.encode(TEXT)
    assert len(ids) == NUM_TOKENS

    async def answer() -> None:
        while True:
            await cluster.scheduler.until(lambda: set(cluster.scheduler.requests) - answered)
            for request_id in set(cluster.scheduler.requests) - answered:
                answered.add(request_id)
                cluster.scheduler.emit(request_id, ids[:2])
                cluster.scheduler.emit(request_id, ids[2:])
                cluster.scheduler.end(request_id)

    answering = asyncio.create_task(answer())
    assert router.http is not None
    yield f"http://127.0.0.1:{router.http.port}"
    answering.cancel()


def found_in(value: Any) -> list[dict[str, Any]]:
    """Return the values of the field, wherever it is."""
    if isinstance(value, list):
        return [item for part in value for item in found_in(part)]
    if not isinstance(value, dict):
        return []
    own = [value["receipt"]] if "receipt" in value else []
    return own + [item for part in value.values() for item in found_in(part)]


def lengths_of(receipt: receipts_pb2.Receipt) -> list[int]:
    return [sequence.num_tokens for sequence in receipts_pb2.ReceiptBody.FromString(receipt.body).sequences]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
async def test_http(cluster: Cluster, address: str, path: str, *, stream: bool) -> None:
    body = BODIES[path] | {"stream": stream, "model": "smollm2"}
    text = await asyncio.to_thread(post, address + path, body)
    assert "receipt" not in text
    assert cluster.scheduler.receipt_queries == []
    text = await asyncio.to_thread(post, address + path, body | {"return_receipt": True})
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")]
    (found,) = found_in([json.loads(line) for line in lines] if stream else json.loads(text))
    assert lengths_of(ParseDict(found, receipts_pb2.Receipt())) == [NUM_TOKENS]
    (query,) = cluster.scheduler.receipt_queries
    assert (list(query.num_tokens), query.include_request) == ([NUM_TOKENS], False)


async def test_grpc_and_a_resumed_stream(address: str, router: Part, open_client: Callable[..., AsyncClient]) -> None:
    client = open_client(router)
    stream = client.generate(token_ids=[1, 2, 3], request_id="a", sampling=SamplingParams(return_receipt=True))
    chunks = [chunk async for chunk in stream]
    assert [chunk.receipt is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].receipt is not None
    assert lengths_of(chunks[-1].receipt) == [NUM_TOKENS]
    assert chunks[-1].receipt_lengths == ()
    result = await client.resume("a", from_token=2).result()
    assert result.receipt == chunks[-1].receipt


async def test_a_receipt_by_id(address: str, router: Part, open_client: Callable[..., AsyncClient]) -> None:
    answer = json.loads(await asyncio.to_thread(post, f"{address}/v1/chat/completions", BODIES["/v1/chat/completions"]))

    def fetch(name: str) -> Any:
        with urllib.request.urlopen(f"{address}/v1/receipts/{name}", timeout=240) as response:
            return json.load(response)

    shown = await asyncio.to_thread(fetch, f"{answer['id']}?include_request=true")
    receipt = ParseDict(shown["receipt"], receipts_pb2.Receipt())
    request_id = answer["id"].removeprefix("chatcmpl-")
    assert receipts_pb2.ReceiptBody.FromString(receipt.body).request_id == request_id
    assert (shown["contents"]["request_id"], base64.b64decode(shown["request"])) == (request_id, b"canonical")
    assert "request" not in await asyncio.to_thread(fetch, request_id)
    with pytest.raises(urllib.error.HTTPError) as raised:
        await asyncio.to_thread(fetch, "unknown")
    assert raised.value.code == 404
    raised.value.close()

    client = open_client(router)
    assert await client.receipt(request_id) == Evidence(receipt)
    found = await client.receipt(request_id, include_request=True, include_outputs=True)
    assert found == Evidence(receipt, b"canonical", [[5, 6]])
    with pytest.raises(NotFoundError):
        await client.receipt("unknown")
    (key,) = await client.receipt_keys()
    assert (key.data, key.created_unix_s) == (bytes(range(32)), 5)
    assert await asyncio.to_thread(fetch, "keys") == {"keys": [key.to_jwk()]}


async def test_a_stream_ends_without_a_receipt_if_no_scheduler_gives_one(
    cluster: Cluster, address: str, router: Part, open_client: Callable[..., AsyncClient]
) -> None:
    cluster.scheduler.has_receipts = False
    cluster.runners[0].cells.unavailable_timeout_s = 0.2
    sampling = SamplingParams(return_receipt=True)
    result = await open_client(router).generate(token_ids=[1], sampling=sampling).result()
    assert (len(result.token_ids), result.receipt) == (NUM_TOKENS, None)


@pytest.mark.parametrize("field", ["receipt_nonce", "template_fingerprint"])
async def test_clients_do_not_set_what_the_service_decides(router: Part, field: str) -> None:
    request = pb.GenerateRequest(token_ids=pb.TokenIds(values=[1]))
    setattr(request, field, b"x" if field == "receipt_nonce" else "x")
    async with grpc.aio.insecure_channel(router.address) as channel:
        stub: Any = MidstreamStub(channel)
        with pytest.raises(grpc.aio.AioRpcError, match=f"{field}: must not be set by clients"):
            await stub.Generate(request).read()


@pytest.mark.parametrize(("has_chat", "has_template"), [(True, True), (False, False)])
async def test_the_template_is_named_if_it_was_used(
    cluster: Cluster, address: str, *, has_chat: bool, has_template: bool
) -> None:
    path = "/v1/chat/completions" if has_chat else "/v1/completions"
    await asyncio.to_thread(post, address + path, BODIES[path])
    (script,) = cluster.scheduler.requests.values()
    expected = cluster.folder.template_fingerprint if has_template else ""
    assert script.request.template_fingerprint == expected
