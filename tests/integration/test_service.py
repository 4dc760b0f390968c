"""The whole service, as real processes with the embedded model."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

import grpc
import pytest

from protos import generation_pb2 as pb
from protos import loads_pb2
from tests.integration.service import Service, chat, collect, eventually_idle, stub_of, tokens

if TYPE_CHECKING:
    from protos.service_pb2_grpc import MidstreamAsyncStub as Stub

CAPITAL = "What is the capital of France?"


async def test_either_router_serves_the_same_answer(service: Service) -> None:
    answers = []
    for address in service.routers():
        async with stub_of(address) as stub:
            answers.append(await collect(stub, chat(CAPITAL, max_tokens=24)))
    assert "Paris" in answers[0].text
    assert answers[0].text == answers[1].text
    assert answers[0].final.usage.completion_tokens == len(answers[0].token_ids)


async def test_streams_spread_over_detokenizers_and_workers(service: Service) -> None:
    before = await _placed(service)
    for address in service.routers():
        async with stub_of(address) as stub:
            prompts = [tokens([1000 + index] * 4, max_tokens=4) for index in range(24)]
            await asyncio.gather(*(collect(stub, prompt) for prompt in prompts))
    after = await _placed(service)
    assert len(after) == 4
    assert all(after[name] - before.get(name, 0) >= 4 for name in after), (before, after)


async def test_64_concurrent_streams_complete(stub: Stub) -> None:
    rng = random.Random(64)
    lengths = [(rng.randint(1, 40), rng.randint(1, 16)) for _ in range(64)]
    requests = [
        tokens([rng.randint(300, 48_999) for _ in range(prompt)], max_tokens=output) for prompt, output in lengths
    ]
    answers = await asyncio.gather(*(collect(stub, request) for request in requests))
    assert [len(answer.token_ids) for answer in answers] == [output for _, output in lengths]
    assert {answer.final.finish_reason for answer in answers} == {pb.FINISH_REASON_LENGTH}


async def test_the_output_does_not_depend_on_concurrent_requests(stub: Stub) -> None:
    alone = await collect(stub, chat("Name a river.", max_tokens=16))
    beside = [collect(stub, tokens([500 + index] * (8 * index + 1), max_tokens=16)) for index in range(8)]
    *_, together = await asyncio.gather(*beside, collect(stub, chat("Name a river.", max_tokens=16)))
    assert together.token_ids == alone.token_ids
    assert together.text == alone.text


async def test_the_seed_determines_the_output(stub: Stub) -> None:
    def request(seed: int) -> pb.GenerateRequest:
        return chat("Tell me a story.", max_tokens=24, sampling=pb.SamplingConfig(temperature=1, seed=seed))

    first, again, other = await asyncio.gather(*(collect(stub, request(seed)) for seed in (7, 7, 8)))
    assert first.token_ids == again.token_ids != other.token_ids


async def test_a_stop_word_ends_the_text_before_it(stub: Stub) -> None:
    full = await collect(stub, chat(CAPITAL, max_tokens=24))
    stop = "capital"
    assert stop in full.text
    cut = await collect(stub, chat(CAPITAL, max_tokens=24, stopping=pb.StoppingConfig(stop_words=[stop])))
    assert cut.text == full.text[: full.text.index(stop)]
    assert cut.final.finish_reason == pb.FINISH_REASON_STOP
    assert cut.final.matched_stop_word == stop


async def test_200_requests_that_finish_abort_or_expire_release_all_blocks(service: Service) -> None:
    rng = random.Random(200)
    first, second = service.routers()
    async with stub_of(first) as one, stub_of(second) as other:
        num_blocks = (await eventually_idle(one)).kv_cache_stats.max_num_blocks
        gate = asyncio.Semaphore(64)
        outcomes = await asyncio.gather(*(_run_somehow(rng, rng.choice((one, other)), gate) for _ in range(200)))
        stats = await eventually_idle(one)
    assert set(outcomes) == {"finished", "left", "expired"}
    assert (stats.num_active_requests, stats.num_queued_requests) == (0, 0)
    assert stats.kv_cache_stats.used_num_blocks == 0
    assert stats.kv_cache_stats.free_num_blocks == stats.kv_cache_stats.max_num_blocks == num_blocks
    assert stats.num_conservation_violations == 0


async def _run_somehow(rng: random.Random, stub: Stub, gate: asyncio.Semaphore) -> str:
    fate = rng.choice(("finish", "leave", "expire"))
    prompt = [rng.randint(300, 48_999) for _ in range(rng.randint(1, 40))]
    # Requests that are aborted or time out ask for more tokens than the service can generate before that.
    request = tokens(prompt, max_tokens=rng.randint(1, 12) if fate == "finish" else 4000)
    timeout, stay_s = (rng.uniform(0.01, 0.5), 60.0) if fate == "expire" else (60.0, rng.uniform(0.0, 0.5))
    async with gate:
        call = stub.Generate(request, timeout=timeout)
        try:
            async with asyncio.timeout(60.0 if fate == "finish" else stay_s):
                async for _ in call:
                    pass
        except TimeoutError:
            call.cancel()
            return "left"
        except grpc.aio.AioRpcError as error:
            return "expired" if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED else str(error)
    return "finished"


NAN = float("nan")
INVALID = {
    "prompt": pb.GenerateRequest(prompt=""),
    "input": pb.GenerateRequest(max_tokens=4),
    "max_tokens": chat("hi", max_tokens=0),
    "token_ids": tokens([49_152]),
    "sampling.temperature": chat("hi", sampling=pb.SamplingConfig(temperature=NAN)),
    "sampling.top_p": chat("hi", sampling=pb.SamplingConfig(top_p=-0.5)),
    "sampling.min_p": chat("hi", sampling=pb.SamplingConfig(min_p=1.5)),
    "sampling.repetition_penalty": chat("hi", sampling=pb.SamplingConfig(repetition_penalty=0)),
    "sampling.num_return_sequences": chat("hi", sampling=pb.SamplingConfig(num_return_sequences=100_000)),
    "stopping.stop_words": chat("hi", stopping=pb.StoppingConfig(stop_words=["x"] * 1000)),
    "stopping.stop_token_ids": chat("hi", stopping=pb.StoppingConfig(stop_token_ids=[1 << 31])),
    "request_id": chat("hi", request_id="x" * 129),
}


@pytest.mark.parametrize("field", INVALID)
async def test_a_bad_field_is_named(stub: Stub, field: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(stub, INVALID[field])
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert _field_of(caught.value) == field


async def test_an_over_long_prompt_is_refused(stub: Stub) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(stub, tokens([400] * 8192))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "8192" in str(caught.value.details())


async def test_an_unknown_model_is_not_found(stub: Stub) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(stub, chat("hi", model="another"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert _field_of(caught.value) == "model"


async def test_the_model_reports_its_properties(stub: Stub) -> None:
    info = await stub.GetModelInfo(loads_pb2.GetModelInfoRequest())
    assert (info.model, info.architecture, info.vocab_size) == ("smollm2", "llama", 49_152)
    assert (info.max_sequence_length, info.hidden_size, info.num_layers) == (8192, 576, 30)
    assert info.has_chat_template
    assert len(info.fingerprint) == 64


def _field_of(error: grpc.aio.AioRpcError) -> object:
    return dict(error.trailing_metadata() or ()).get("midstream-field")


async def _placed(service: Service) -> dict[str, int]:
    """Return the number of requests that each worker and detokenizer has received so far."""
    async with stub_of(service.routers()[0]) as stub:
        info = await stub.GetServerInfo(loads_pb2.GetServerInfoRequest())
    workers = {group.group_id: group.num_placed_requests for group in info.worker_groups}
    return workers | {item.detokenizer_id: item.num_attached_total for item in info.detokenizers}
