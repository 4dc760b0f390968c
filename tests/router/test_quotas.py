"""Quotas per client over HTTP and gRPC, and isolation of files and batches between clients."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import urllib.request
from pathlib import Path
from typing import Any

import grpc.aio
import httpx2
import openai
import pytest

from midstream.chunk import Chunk
from midstream.client import AsyncClient, SamplingParams
from midstream.errors import ConfigError, DeadlineError, InvalidArgumentError, OverloadedError
from midstream.model.folder import ModelFolder
from midstream.model.tokenizer import Tokenizer
from midstream.rpc.channel import open_channel
from midstream.telemetry import Metrics
from midstream.text.incremental import DecoderFactory
from protos import generation_pb2 as pb
from protos import scheduler_pb2, service_pb2, service_pb2_grpc
from protos.status_pb2 import DetachedRequests
from router.authentication import Authenticator, Caller, Quota, TokenFile
from router.pipeline.prompt import PromptBuilder
from router.pipeline.quotas import Quotas
from tests.router.conftest import Cluster, Part

ALICE, BOB = "alice-has-a-long-token", "bob-has-a-long-token-too"


class Clock:
    """A clock in seconds that the test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def caller(**quota: int) -> Caller:
    return Caller("alice", is_authenticated=True, quota=Quota(**quota))


def test_requests_refill_over_a_minute() -> None:
    clock = Clock()
    quotas, alice = Quotas(Metrics(), clock), caller(requests_per_minute=2)
    for _ in range(2):
        quotas.admit(alice).release()
    with pytest.raises(OverloadedError, match="requests_per_minute") as refused:
        quotas.admit(alice)
    assert refused.value.retry_after_ms == 30_000  # two requests per minute are one request in 30 s
    assert quotas.headers(alice) == {
        "x-ratelimit-limit-requests": "2",
        "x-ratelimit-remaining-requests": "0",
        "x-ratelimit-reset-requests": "60.000s",
    }
    clock.now = 30
    quotas.admit(alice)


def test_tokens_are_counted_as_they_come_and_a_debt_is_paid_first() -> None:
    clock = Clock()
    quotas, alice = Quotas(Metrics(), clock), caller(tokens_per_minute=60)
    admission = quotas.admit(alice)
    admission.charge_prompt("a", 50)
    admission.charge_output("a", Chunk(0, 0, [1] * 29))
    with pytest.raises(OverloadedError, match="tokens_per_minute") as refused:
        quotas.admit(alice)
    # At one token per second, 20 s: 19 tokens to reach zero, and the one that a request needs to start.
    assert refused.value.retry_after_ms == 20_000
    clock.now = 20
    quotas.admit(alice)
    assert quotas.headers(alice)["x-ratelimit-remaining-tokens"] == "1"


def test_output_is_charged_once_however_often_it_is_resumed() -> None:
    quotas, alice = Quotas(Metrics(), Clock()), caller(tokens_per_minute=100)

    def remaining() -> str:
        return quotas.headers(alice)["x-ratelimit-remaining-tokens"]

    running = quotas.admit(alice)
    running.charge_prompt("a", 10)
    running.charge_output("a", Chunk(0, 0, [1] * 5))
    running.release()
    resumed = quotas.resume(alice)
    resumed.charge_output("a", Chunk(0, 3, [1] * 7))  # 5 of the 7 tokens are new
    resumed.charge_output("a", Chunk(1, 0, [1] * 4))
    quotas.resume(alice).charge_output("a", Chunk(0, 0, [1] * 10))
    resumed.release()
    assert remaining() == "76"
    quotas.resume(alice).charge_output("a", Chunk(2, 8, [1] * 2))
    quotas.resume(alice).charge_output("a", Chunk(2, 0, [1] * 8))  # tokens before the first one that was read
    assert remaining() == "66"
    quotas.admit(alice).charge_prompt("a", 1)  # another request with the same id
    quotas.resume(alice).charge_output("a", Chunk(0, 0, [1] * 10))
    assert remaining() == "55"


def test_a_detached_request_counts_until_it_ends() -> None:
    clock = Clock()
    quotas, alice = Quotas(Metrics(), clock), caller(max_concurrent=2)

    def unread(*names: str) -> list[DetachedRequests]:
        return [DetachedRequests(client="alice", request_ids=[alice.scope(name) for name in names])]

    first, second = quotas.admit(alice, alice.scope("a")), quotas.admit(alice, alice.scope("b"))
    first.release(is_left=True)
    second.release()
    quotas.admit(alice, alice.scope("b")).release()
    again = quotas.admit(alice, alice.scope("a"))  # the same request, which is not counted twice
    third = quotas.admit(alice, alice.scope("b"))
    again.release(is_left=True)
    with pytest.raises(OverloadedError, match="max_concurrent"):
        quotas.admit(alice, alice.scope("c"))
    quotas.learn_detached([], 0.1)  # the scheduler may not know yet that the client has left
    with pytest.raises(OverloadedError, match="max_concurrent"):
        quotas.admit(alice, alice.scope("c"))
    quotas.learn_detached(unread("a"), 1.0)
    with pytest.raises(OverloadedError, match="max_concurrent"):
        quotas.admit(alice, alice.scope("c"))
    resumed = quotas.resume(alice, alice.scope("a"))
    quotas.learn_detached([], 2.0)
    with pytest.raises(OverloadedError, match="max_concurrent"):
        quotas.admit(alice, alice.scope("c"))
    third.release()
    quotas.admit(alice, alice.scope("c")).release()
    resumed.release()
    # Requests of unauthenticated clients may have any client id.
    quotas.learn_detached([DetachedRequests(client="alice", request_ids=["x", "y"])], 3.0)
    for name in "ab":
        quotas.admit(alice, alice.scope(name))
    with pytest.raises(OverloadedError, match="max_concurrent"):
        quotas.admit(alice)


async def test_a_client_that_leaves_its_detached_request_keeps_its_place(cluster: Cluster, tmp_path: Path) -> None:
    part = await router_with(cluster, tmp_path, "max_concurrent=1")

    def num_polls() -> int:
        return len(cluster.scheduler.status_requests)

    async with open_channel(part.address, token=ALICE) as channel:
        stub: Any = service_pb2_grpc.MidstreamStub(channel)

        def start(request_id: str) -> Any:
            tokens = pb.TokenIds(values=[1, 2])
            return stub.Generate(pb.GenerateRequest(request_id=request_id, token_ids=tokens, detached=True))

        call = start("a")
        await cluster.scheduler.until(lambda: bool(cluster.scheduler.requests))
        (request_id,) = cluster.scheduler.requests
        cluster.scheduler.status.detached.add(client="alice", request_ids=[request_id])
        call.cancel()
        known = num_polls()
        await cluster.scheduler.until(lambda: num_polls() >= known + 20)
        with pytest.raises(grpc.aio.AioRpcError, match="max_concurrent"):
            await start("b").read()
        again = start("a")
        cluster.scheduler.emit(request_id, [40])
        cluster.scheduler.end(request_id)
        assert (await again.read()).token_ids == [40]
        del cluster.scheduler.status.detached[:]
        known = num_polls()
        await cluster.scheduler.until(lambda: num_polls() >= known + 2)
        start("b")
        await cluster.scheduler.until(lambda: len(cluster.scheduler.requests) == 2)


async def test_output_that_is_read_by_resuming_a_detached_request_is_charged(cluster: Cluster, tmp_path: Path) -> None:
    part = await router_with(cluster, tmp_path, "tokens_per_minute=100")
    async with open_channel(part.address, token=ALICE) as channel:
        stub: Any = service_pb2_grpc.MidstreamStub(channel)
        call = stub.Generate(
            pb.GenerateRequest(request_id="a", token_ids=pb.TokenIds(values=[1, 2]), max_tokens=50, detached=True)
        )
        await cluster.scheduler.until(lambda: bool(cluster.scheduler.requests))
        call.cancel()
        (request_id,) = cluster.scheduler.requests
        cluster.scheduler.emit(request_id, [40] * 50)
        cluster.scheduler.end(request_id)
        num_read = 0
        async for message in stub.Resume(service_pb2.ResumeRequest(request_id="a")):
            num_read += len(message.token_ids)
    assert num_read == 50
    assert part.http is not None
    headers = {"authorization": f"Bearer {ALICE}"}
    url = f"http://127.0.0.1:{part.http.port}/v1/models"
    with await asyncio.to_thread(urllib.request.urlopen, urllib.request.Request(url, headers=headers)) as answer:
        # The remaining quota grows by 1.7 tokens per second.
        assert 48 <= int(answer.headers["x-ratelimit-remaining-tokens"]) < 90


def test_concurrent_requests_are_counted_until_they_end_and_a_changed_quota_holds_at_once() -> None:
    quotas = Quotas(Metrics())
    first = quotas.admit(caller(max_concurrent=1))
    with pytest.raises(OverloadedError, match="max_concurrent"):
        quotas.admit(caller(max_concurrent=1))
    quotas.admit(caller(max_concurrent=2))
    first.release()
    first.release()
    with pytest.raises(OverloadedError):
        quotas.admit(caller(max_concurrent=1))
    assert quotas.headers(Caller("address")) == {}


def test_tokens_of_a_client_with_different_quotas_do_not_refill_each_other() -> None:
    clock = Clock()
    quotas = Quotas(Metrics(), clock)
    tokens = [caller(requests_per_minute=2), caller(requests_per_minute=4), caller(tokens_per_minute=60)]
    quotas.admit(tokens[0])
    assert quotas.headers(tokens[1])["x-ratelimit-remaining-requests"] == "2"  # half remains
    quotas.admit(tokens[2]).charge_prompt("a", 90)
    for token in tokens[:2] * 10:
        with contextlib.suppress(OverloadedError):
            quotas.admit(token)
    for token in tokens:
        with pytest.raises(OverloadedError):
            quotas.admit(token)
    clock.now = 60
    for token in tokens:
        quotas.admit(token)


@pytest.mark.parametrize(
    "rest", ["tokens=1", "tokens_per_minute=0", "priority=101", "max_concurrent=1 max_concurrent=2", "priority"]
)
def test_a_wrong_quota_refuses_to_start(tmp_path: Path, rest: str) -> None:
    (tmp_path / "tokens").write_text(f"{ALICE} alice {rest}")
    with pytest.raises(ConfigError) as refused:
        TokenFile(str(tmp_path / "tokens"))
    assert ALICE not in str(refused.value)


async def router_with(cluster: Cluster, tmp_path: Path, alice: str) -> Part:
    digest = hashlib.sha256(ALICE.encode()).hexdigest()
    (tmp_path / "tokens").write_text(f"sha256:{digest} alice {alice}\n{BOB} bob generate,observe\n")
    known = Authenticator(tokens=TokenFile(str(tmp_path / "tokens")))
    return await cluster.add_router(await cluster.add_detokenizer(), authenticator=known)


def api(part: Part, token: str) -> openai.AsyncOpenAI:
    assert part.http is not None
    return openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{part.http.port}/v1", api_key=token, max_retries=0)


async def test_a_quota_covers_all_apis_and_responses_report_the_remainder(cluster: Cluster, tmp_path: Path) -> None:
    part = await router_with(cluster, tmp_path, "requests_per_minute=2 priority=-10")

    async def complete(token: str, number: int) -> Any:
        async def write() -> None:
            await cluster.scheduler.until(lambda: len(cluster.scheduler.requests) > number)
            request_id = list(cluster.scheduler.requests)[number]
            cluster.scheduler.emit(request_id, [100, 101])
            cluster.scheduler.end(request_id, reason=pb.FINISH_REASON_STOP)

        async with api(part, token) as client:
            call = client.completions.with_raw_response.create(model="", prompt="a", extra_body={"priority": -100})
            return (await asyncio.gather(call, write()))[0]

    answer = await complete(ALICE, 0)
    names = ("x-ratelimit-limit-requests", "x-ratelimit-remaining-requests")
    assert [answer.headers[name] for name in names] == ["2", "1"]
    await complete(ALICE, 1)
    async with api(part, ALICE) as client:
        with pytest.raises(openai.RateLimitError) as refused:
            await client.completions.create(model="", prompt="a")
        assert 1 <= int(refused.value.response.headers["retry-after"]) <= 30
        assert refused.value.response.headers["x-ratelimit-remaining-requests"] == "0"
    async with AsyncClient([part.address], token=ALICE) as native:
        with pytest.raises(OverloadedError) as exhausted:
            await native.generate(token_ids=[1], sampling=SamplingParams(max_tokens=1)).result()
        assert 1000 <= exhausted.value.retry_after_ms <= 30_000
    other = await complete(BOB, 2)
    assert part.http is not None
    url, headers = f"http://127.0.0.1:{part.http.port}/metrics", {"authorization": f"Bearer {ALICE}"}
    with await asyncio.to_thread(urllib.request.urlopen, urllib.request.Request(url, headers=headers)) as page:
        metrics = page.read().decode()
    assert "x-ratelimit-limit-requests" not in other.headers
    priorities = [script.request.priority for script in cluster.scheduler.requests.values()]
    assert priorities == [-10, -10, 100]  # alice's requests may set a lower priority, but not a higher one
    assert 'client_requests_total{client="alice"} 2.0' in metrics
    assert 'client_tokens_total{client="alice",kind="output"} 4.0' in metrics
    assert 'client_refused_requests_total{client="alice",quota="requests_per_minute"} 2.0' in metrics


async def test_a_quota_holds_over_two_routers(cluster: Cluster, tmp_path: Path) -> None:
    first, second = [await router_with(cluster, tmp_path, "max_concurrent=1") for _ in range(2)]

    def num_polls() -> int:
        return sum(request.router.router_id == "router-2" for request in cluster.scheduler.status_requests)

    async with AsyncClient([first.address], token=ALICE) as client, AsyncClient([second.address], token=ALICE) as other:
        reading = asyncio.create_task(client.generate(token_ids=[1]).result())
        await cluster.scheduler.until(lambda: bool(cluster.scheduler.requests))
        (request_id,) = cluster.scheduler.requests
        await cluster.scheduler.until(lambda: any(it.usage for it in cluster.scheduler.routers.values()))
        known = num_polls()
        # A router handles the answer to a poll before it sends the next poll.
        await cluster.scheduler.until(lambda: num_polls() >= known + 2)
        with pytest.raises(OverloadedError, match="max_concurrent"):
            await other.generate(token_ids=[1]).result()
        cluster.scheduler.emit(request_id, [100])
        cluster.scheduler.end(request_id)
        await reading


async def test_files_and_batches_are_their_owners(cluster: Cluster, tmp_path: Path) -> None:
    part = await router_with(cluster, tmp_path, "")
    async with api(part, ALICE) as alice, api(part, BOB) as bob:
        file = await alice.files.create(file=b'{"custom_id": 1}', purpose="batch")
        batch = await alice.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        for call in (
            bob.files.retrieve(file.id),
            bob.files.content(file.id),
            bob.files.delete(file.id),
            bob.batches.retrieve(batch.id),
            bob.batches.cancel(batch.id),
            bob.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"),
        ):
            with pytest.raises(openai.NotFoundError):
                await call
        assert not (await bob.files.list()).data
        assert not (await bob.batches.list()).data
        assert [item.id for item in (await alice.files.list()).data] == [file.id]


_IMAGE = "data:image/png;base64,AAAA"
_SOURCE = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
_CHAT = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": _IMAGE}}]}]}
_MESSAGES = {"max_tokens": 1, "messages": [{"role": "user", "content": [{"type": "image", "source": _SOURCE}]}]}
_INPUT = {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": _IMAGE}]}]}


class SlowEncoder:
    """Ends the encoding of an image, with an error, once `may_end` is set."""

    def __init__(self) -> None:
        self.num_begun = 0
        self.begun, self.may_end = asyncio.Event(), asyncio.Event()

    async def __call__(self, data: bytes) -> scheduler_pb2.EncodeImageResponse:
        self.num_begun += 1
        self.begun.set()
        await self.may_end.wait()
        raise InvalidArgumentError("is not an image", field="data")


async def test_images_are_encoded_only_within_a_quota(
    folder: ModelFolder, tokenizer: Tokenizer, decoders: DecoderFactory, tmp_path: Path
) -> None:
    """An image that is being encoded counts as a running request, regardless of the call that it belongs to."""
    config = folder.config | {"image_token_id": tokenizer.added_tokens["<file_sep>"]}
    cluster = Cluster(dataclasses.replace(folder, architecture="smolvlm", config=config), decoders)
    encoder = SlowEncoder()
    cluster.prompts = PromptBuilder(cluster.folder, 1, encoder)
    await cluster.start_scheduler()
    part = await router_with(cluster, tmp_path, "max_concurrent=1")
    assert part.http is not None
    headers = {"authorization": f"Bearer {ALICE}", "anthropic-version": "2023-06-01"}
    async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{part.http.port}", headers=headers) as client:
        for path, body in (
            ("/v1/messages", _MESSAGES),
            ("/v1/messages/count_tokens", _MESSAGES),
            ("/v1/responses", _INPUT),
            ("/v1/responses/input_tokens", _INPUT),
            ("/v1/chat/completions", _CHAT),
            ("/tokenize", _CHAT),
        ):
            waiting = asyncio.create_task(client.post(path, json={"model": "", **body}))
            await encoder.begun.wait()
            num_begun = encoder.num_begun
            assert (await client.post(path, json={"model": "", **body})).status_code == 429, path
            assert encoder.num_begun == num_begun, path
            encoder.may_end.set()
            assert (await waiting).status_code == 400
            for event in (encoder.begun, encoder.may_end):
                event.clear()
    cluster.prompts.close()
    await cluster.close()


async def test_the_deadline_covers_the_preparation_of_a_prompt(cluster: Cluster) -> None:
    front: Any = (await cluster.add_router()).servicer
    with pytest.raises(DeadlineError, match="prepared"):
        await front.start(pb.GenerateRequest(prompt="a"), 0.01, prepare=asyncio.Event().wait)
    request = pb.GenerateRequest(prompt="a", images=[pb.Image(data=b"x")], timeout_ms=10)
    with pytest.raises(DeadlineError, match="prepared"):
        await front.run_unstarted(request, asyncio.Event().wait)
    assert front._limits.num_open == 0
