"""All security features with real processes: who may call which port, and recovery from faults."""

from __future__ import annotations

import asyncio
import json
import ssl
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from midstream.client import AsyncClient, Result, SamplingParams
from midstream.errors import (
    InvalidArgumentError,
    NotFoundError,
    PermissionDeniedError,
    UnauthenticatedError,
    UnavailableError,
)
from midstream.rpc.channel import open_channel
from midstream.security.tls import Tls
from protos import generation_pb2 as pb
from protos import stats_pb2
from router.authentication import Caller
from tests.faults.certificates import Authority
from tests.faults.guarded import ALICE, BOB, ROOT, Guarded, running_guarded
from tests.faults.guarded_ports import fetch
from tests.faults.processes import until
from tests.router.test_grammar_check import BAD

NUM_TOKENS = 100
# Five processes start at once, and one of them imports torch.
START_S = 120
SAMPLING = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, temperature=0.9, seed=4)
# For streams that must still be running when an event occurs.
LONG = replace(SAMPLING, max_tokens=400)
ENDLESS = replace(SAMPLING, max_tokens=8000)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    with running_guarded(tmp_path_factory.mktemp("guarded")) as guarded:
        yield guarded


@pytest.fixture
async def guarded(shared: Guarded) -> Guarded:
    await until(shared.is_whole, START_S)
    return shared


async def ask(client: AsyncClient, request_id: str = "", sampling: SamplingParams = SAMPLING) -> Result:
    return await client.generate("The stream", sampling=sampling, request_id=request_id, timeout_s=100).result()


async def test_tokens_and_certificates_identify_callers_with_separate_requests(guarded: Guarded) -> None:
    async with guarded.alice() as alice, guarded.carol() as carol:
        results = await asyncio.gather(ask(alice, "the same"), ask(carol, "the same"))
        assert len(results[0].token_ids) == NUM_TOKENS
        assert results[0].text == results[1].text
        await ask(alice, "hers")
        with pytest.raises(NotFoundError):
            await carol.resume("hers", timeout_s=20).result()
        assert (await alice.resume("hers", timeout_s=20).result()).text == results[0].text


async def test_other_callers_are_rejected_by_every_api(
    guarded: Guarded, tmp_path_factory: pytest.TempPathFactory
) -> None:
    ca = guarded.authority.ca
    stranger = Authority(tmp_path_factory.mktemp("stranger"))
    mallory = stranger.issue("mallory")
    strange = Tls(mallory.cert, mallory.key, ca)
    for shown, token in ((Tls(ca=ca), ""), (Tls(ca=ca), ALICE[:-1] + "x"), (strange, "")):
        async with guarded.client(tls=shown, token=token) as client:
            with pytest.raises(UnauthenticatedError):
                await ask(client)
    for router, trusted in (("token", None), ("token", Tls(ca=stranger.ca)), ("certificate", Tls(ca=ca))):
        async with guarded.client(router, tls=trusted) as client:
            with pytest.raises(UnavailableError):
                await client.server_info()
    # The components behind the routers accept only certificates from the authority.
    for part in ("scheduler", "detokenizer"):
        for tls in (None, Tls(ca=ca), strange):
            async with open_channel(f"127.0.0.1:{guarded.ports[part]}", tls=tls) as channel:
                with pytest.raises(grpc.aio.AioRpcError) as raised:
                    await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=240)
                assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
    async with guarded.alice() as alice:
        assert len((await alice.server_info()).worker_groups) == 1


async def test_a_clients_certificate_is_not_accepted_on_internal_ports(guarded: Guarded) -> None:
    carol = guarded.authority.issue("carol")
    spy = Tls(carol.cert, carol.key, guarded.authority.ca)

    async def silent() -> AsyncIterator[bytes]:
        # If a message is sent before the rejection arrives, the client reports INTERNAL.
        await asyncio.Event().wait()
        yield b""

    detokenizer = guarded.authority.issue("detokenizer-again", part="detokenizer")
    named = Tls(detokenizer.cert, detokenizer.key, guarded.authority.ca)
    for port, tls, calls in (
        ("scheduler", spy, ("Scheduler/Abort", "Scheduler/OpenTokenFeed", "Frames/Tunnel")),
        ("scheduler", named, ("Scheduler/Abort",)),  # this port allows a detokenizer only to read the token feed
        ("detokenizer", spy, ("Detokenizer/OpenStream", "Frames/Tunnel")),
        ("detokenizer", named, ("Detokenizer/OpenStream", "Frames/Tunnel")),
    ):
        async with open_channel(f"127.0.0.1:{guarded.ports[port]}", tls=tls) as opened:
            channel: Any = opened
            for name in calls:
                method = f"/midstream.v1.{name}"
                if name == "Frames/Tunnel":
                    call = channel.stream_stream(method)(silent(), timeout=240)
                else:
                    call = channel.unary_unary(method)(b"", timeout=240)
                assert await call.code() is grpc.StatusCode.PERMISSION_DENIED, (port, name)


async def test_a_client_learns_nothing_of_anothers_prompts(guarded: Guarded) -> None:
    prompt, tls = list(range(40, 140)), Tls(ca=guarded.authority.ca)

    async def cached(client: AsyncClient) -> int:
        result = await client.generate(token_ids=prompt, sampling=SamplingParams(max_tokens=2), timeout_s=60).result()
        assert result.usage is not None
        return result.usage.cached_tokens

    async with guarded.alice() as alice, guarded.client(tls=tls, token=BOB) as bob:
        assert await cached(alice) == 0
        assert await cached(alice) > 64
        assert await cached(bob) == 0
    events = "/midstream.v1.Midstream/SubscribeKvEvents"
    everything = stats_pb2.SubscribeKvEventsRequest(start_sequence_number=1).SerializeToString()
    for token, status in ((BOB, grpc.StatusCode.PERMISSION_DENIED), (ROOT, None)):
        async with open_channel(f"127.0.0.1:{guarded.ports['token']}", tls=tls, token=token) as opened:
            channel: Any = opened
            call = channel.unary_stream(events)(everything, timeout=240)
            if status is None:
                assert await call.read()
            else:
                assert await call.code() is status


async def test_only_an_admin_aborts_the_requests_of_others(guarded: Guarded) -> None:
    tls = Tls(ca=guarded.authority.ca)
    alice_inner = Caller("alice", is_authenticated=True).scope("long")
    async with (
        guarded.alice() as alice,
        guarded.client(tls=tls, token=BOB) as bob,
        guarded.client(tls=tls, token=ROOT) as root,
    ):
        stream = alice.generate("The stream", sampling=ENDLESS, request_id="long", timeout_s=100)
        await anext(stream)
        assert not await bob.abort("long")
        assert not await bob.abort(alice_inner)
        assert await root.abort(alice_inner)
        with pytest.raises(PermissionDeniedError):
            await bob.unload_lora("any")


async def test_https_requires_the_token(guarded: Guarded) -> None:
    def complete(**headers: str) -> str:
        body = json.dumps({"prompt": "The stream", "max_tokens": 20, "temperature": 0.9, "seed": 4}).encode()
        url = f"https://127.0.0.1:{guarded.ports['http']}/v1/completions"
        request = urllib.request.Request(url, body, {"content-type": "application/json", **headers})
        context = ssl.create_default_context(cafile=guarded.authority.ca)
        with urllib.request.urlopen(request, timeout=240, context=context) as response:
            return str(json.load(response)["choices"][0]["text"])

    async with guarded.alice() as alice:
        whole = await ask(alice)
    assert whole.text.startswith(await asyncio.to_thread(complete, Authorization=f"Bearer {ALICE}"))
    with pytest.raises(urllib.error.HTTPError) as refused:
        await asyncio.to_thread(complete)
    assert refused.value.code == 401
    refused.value.close()


@pytest.mark.parametrize("kind", ["30,000 nestings in a grammar", "half a million values"])
async def test_an_abusive_guide_is_rejected_and_its_neighbour_continues(guarded: Guarded, kind: str) -> None:
    name, text = BAD[kind]
    guide = pb.GuidedDecodingConfig(guide_type=pb.GuideType.Value(f"GUIDE_TYPE_{name}"), guide=text)
    request = pb.GenerateRequest(prompt="The stream", guided_decoding=guide)
    async with guarded.alice() as alice:
        neighbour = asyncio.create_task(ask(alice))
        with pytest.raises(InvalidArgumentError) as raised:
            await alice.stream(request, timeout_s=60).result()
        assert raised.value.field == "guided_decoding.guide"
        assert len((await neighbour).token_ids) == NUM_TOKENS


async def test_restarted_components_authenticate_again(guarded: Guarded) -> None:
    async with guarded.alice() as alice:
        expected = await ask(alice, sampling=LONG)
        stream = alice.generate("The stream", sampling=LONG, timeout_s=150)
        result = Result(stream.request_id)
        for name in ("scheduler", "worker", "detokenizer"):
            chunk = await anext(stream, None)
            if chunk is None:  # finished before the kills
                break
            result.add(chunk)
            await asyncio.to_thread(guarded.kill, name)
            guarded.start(name)
        async for chunk in stream:
            result.add(chunk)
    assert (result.token_ids, result.text) == (expected.token_ids, expected.text)


async def test_logs_and_metrics_hold_no_contents_and_no_credentials(guarded: Guarded) -> None:
    """All processes log at level debug. The calls use each API, and each header that may contain a token."""
    secret = "tell nobody of zygomorphic petunias"
    async with guarded.alice() as alice, guarded.carol() as carol:
        result = await alice.generate(secret, sampling=SAMPLING, request_id="quiet", timeout_s=100).result()
        await carol.generate(secret, sampling=SAMPLING, timeout_s=100).result()
        with pytest.raises(InvalidArgumentError):
            await alice.generate(secret, sampling=SamplingParams(max_tokens=-1)).result()
    context = ssl.create_default_context(cafile=guarded.authority.ca)
    base = f"https://127.0.0.1:{guarded.ports['http']}"
    messages = {"model": "m", "max_tokens": 20, "messages": [{"role": "user", "content": secret}]}
    bodies = {
        "/v1/completions": {"prompt": secret, "max_tokens": 20},
        "/v1/completions?wrong": {"prompt": secret, "max_tokens": -1},
        "/v1/chat/completions": messages,
        "/v1/responses": {"input": secret, "max_output_tokens": 20},
        "/v1/messages": messages,
    }
    for header in ({"Authorization": f"Bearer {ALICE}"}, {"x-api-key": ALICE}, {"x-api-key": f"{ALICE}-mistyped"}):
        for path, body in bodies.items():
            await asyncio.to_thread(post, base + path, body, context, header)
    async with guarded.client(tls=Tls(ca=guarded.authority.ca), token=f"{ALICE}-mistyped") as client:
        with pytest.raises(UnauthenticatedError):
            await client.server_info()
    status, metrics = await asyncio.to_thread(fetch, f"{base}/metrics", context, Authorization=f"Bearer {ALICE}")
    assert status == 200
    logs = {name: guarded.log(name) for name in ("scheduler", "worker", "detokenizer", "token", "certificate")}
    assert all('"level": "debug"' in logs[name] for name in ("scheduler", "token", "certificate"))
    ids = ", ".join(map(str, result.token_ids[:4]))
    for hidden in ("zygomorphic", result.text[:40], ids, ALICE, ROOT):
        assert [name for name, text in {**logs, "metrics": metrics}.items() if hidden in text] == []


def post(url: str, body: object, context: ssl.SSLContext, headers: dict[str, str]) -> None:
    """Send a request, which may be refused."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json", **headers})
    try:
        urllib.request.urlopen(request, timeout=240, context=context).close()
    except urllib.error.HTTPError as error:
        error.close()
