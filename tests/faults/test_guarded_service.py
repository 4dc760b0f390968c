"""Every lock at once, on real processes: who gets through each door, and that faults are survived behind them."""

from __future__ import annotations

import asyncio
import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from midstream.client import AsyncClient, Result, SamplingParams
from midstream.errors import InvalidArgumentError, NotFoundError, UnauthenticatedError, UnavailableError
from midstream.rpc.serving import open_channel
from midstream.security.tls import Tls
from protos import generation_pb2 as pb
from tests.faults.certificates import Authority
from tests.faults.guarded import ALICE, Guarded, running_guarded
from tests.faults.processes import until
from tests.router.test_grammar_check import BAD

NUM_TOKENS = 400
# Five processes that begin at once, one of which imports torch.
START_S = 120
SAMPLING = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, temperature=0.9, seed=4)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    with running_guarded(tmp_path_factory.mktemp("guarded")) as guarded:
        yield guarded


@pytest.fixture
async def guarded(shared: Guarded) -> Guarded:
    await until(shared.is_whole, START_S)
    return shared


async def ask(client: AsyncClient, request_id: str = "") -> Result:
    return await client.generate("The stream", sampling=SAMPLING, request_id=request_id, timeout_s=100).result()


async def test_a_token_or_a_certificate_lets_a_caller_in_and_each_has_its_own_requests(guarded: Guarded) -> None:
    async with guarded.alice() as alice, guarded.carol() as carol:
        results = await asyncio.gather(ask(alice, "the same"), ask(carol, "the same"))
        assert len(results[0].token_ids) == NUM_TOKENS
        assert results[0].text == results[1].text
        await ask(alice, "hers")
        with pytest.raises(NotFoundError):
            await carol.resume("hers", timeout_s=20).result()
        assert (await alice.resume("hers", timeout_s=20).result()).text == results[0].text


async def test_nobody_else_gets_through_any_door(guarded: Guarded, tmp_path_factory: pytest.TempPathFactory) -> None:
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
    # The parts behind the routers take nothing but certificates of the authority.
    for part in ("scheduler", "detokenizer"):
        for tls in (None, Tls(ca=ca), strange):
            async with open_channel(f"127.0.0.1:{guarded.ports[part]}", tls=tls) as channel:
                with pytest.raises(grpc.aio.AioRpcError) as raised:
                    await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=20)
                assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
    async with guarded.alice() as alice:
        assert len((await alice.server_info()).worker_groups) == 1


async def test_https_asks_for_the_token(guarded: Guarded) -> None:
    def complete(**headers: str) -> str:
        body = json.dumps({"prompt": "The stream", "max_tokens": 20, "temperature": 0.9, "seed": 4}).encode()
        url = f"https://127.0.0.1:{guarded.ports['http']}/v1/completions"
        request = urllib.request.Request(url, body, {"content-type": "application/json", **headers})
        context = ssl.create_default_context(cafile=guarded.authority.ca)
        with urllib.request.urlopen(request, timeout=60, context=context) as response:
            return str(json.load(response)["choices"][0]["text"])

    async with guarded.alice() as alice:
        whole = await ask(alice)
    assert whole.text.startswith(await asyncio.to_thread(complete, Authorization=f"Bearer {ALICE}"))
    with pytest.raises(urllib.error.HTTPError) as refused:
        await asyncio.to_thread(complete)
    assert refused.value.code == 401
    refused.value.close()


@pytest.mark.parametrize("kind", ["30,000 nestings in a grammar", "a million values"])
async def test_a_guide_that_abuses_is_refused_and_its_neighbour_goes_on(guarded: Guarded, kind: str) -> None:
    name, text = BAD[kind]
    guide = pb.GuidedDecodingConfig(guide_type=pb.GuideType.Value(f"GUIDE_TYPE_{name}"), guide=text)
    request = pb.GenerateRequest(prompt="The stream", guided_decoding=guide)
    async with guarded.alice() as alice:
        neighbour = asyncio.create_task(ask(alice))
        with pytest.raises(InvalidArgumentError) as raised:
            await alice.stream(request, timeout_s=60).result()
        assert raised.value.field == "guided_decoding.guide"
        assert len((await neighbour).token_ids) == NUM_TOKENS


async def test_parts_that_die_come_back_behind_their_locks(guarded: Guarded) -> None:
    async with guarded.alice() as alice:
        expected = await ask(alice)
        stream = alice.generate("The stream", sampling=SAMPLING, timeout_s=150)
        result = Result(stream.request_id)
        for name in ("scheduler", "worker", "detokenizer"):
            chunk = await anext(stream, None)
            if chunk is None:  # it was faster than the kills
                break
            result.add(chunk)
            await asyncio.to_thread(guarded.kill, name)
            guarded.start(name)
        async for chunk in stream:
            result.add(chunk)
    assert (result.token_ids, result.text) == (expected.token_ids, expected.text)
