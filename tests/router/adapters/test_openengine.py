"""A client generated from openengine's protos, with a router on a real socket and a scripted scheduler."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, cast

import grpc
import grpc.aio
import pytest

from midstream.errors import InvalidArgumentError, UnsupportedError
from midstream.model.tokenizer import Tokenizer
from protos import generation_pb2 as pb
from protos import openengine_pb2 as oe
from protos import openengine_pb2_grpc, stats_pb2
from router.protocols.openai.body import Body
from router.protocols.openai.structural_tags import structural_grammar
from router.protocols.openengine.request import _guide
from tests.router.conftest import Cluster, Part

if TYPE_CHECKING:
    from protos.openengine_pb2_grpc import ControlAsyncStub, InferenceAsyncStub

TEXT = "Every part may die 🫠 and the text goes on."


@pytest.fixture
async def channel(router: Part) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(router.address) as channel:
        yield channel


@pytest.fixture
def inference(channel: grpc.aio.Channel) -> InferenceAsyncStub:
    return cast("InferenceAsyncStub", openengine_pb2_grpc.InferenceStub(channel))


@pytest.fixture
def control(channel: grpc.aio.Channel) -> ControlAsyncStub:
    return cast("ControlAsyncStub", openengine_pb2_grpc.ControlStub(channel))


async def run(
    cluster: Cluster, inference: InferenceAsyncStub, request: oe.GenerateRequest, ids: list[int]
) -> list[oe.GenerateResponse]:
    """Return the events of a request for which the scheduler emits `ids`."""

    async def answer() -> None:
        await cluster.scheduler.until(lambda: request.request_id in cluster.scheduler.requests)
        cluster.scheduler.emit(request.request_id, ids)
        cluster.scheduler.end(request.request_id)

    async def read() -> list[oe.GenerateResponse]:
        call = inference.Generate(request, metadata=(("openengine-priority", "7"),), timeout=240)
        return [event async for event in call]

    events, _ = await asyncio.gather(read(), answer())
    return events


async def test_a_request_is_the_native_one_and_its_events_are_its_output(
    cluster: Cluster, inference: InferenceAsyncStub, tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode(TEXT)
    request = oe.GenerateRequest(
        request_id="r",
        model="smollm2",
        token_ids=oe.TokenIds(ids=[5, 6]),
        sampling=oe.SamplingParams(temperature=0.5, top_k=7, seed=9),
        stopping=oe.StoppingOptions(
            max_tokens=99,
            min_tokens=2,
            ignore_eos=True,
            conditions=[oe.StopCondition(stop_text="###"), oe.StopCondition(stop_token_id=3)],
        ),
        kv=oe.KvOptions(cache_salt="salt"),
    )
    *outputs, last = await run(cluster, inference, request, ids)
    assert "".join(event.token.text for event in outputs) == TEXT
    assert [info.token_id for event in outputs for info in event.token.tokens] == ids
    assert all(event.token.HasField("output_index") for event in outputs)
    assert last.finished.reason == oe.FINISH_REASON_LENGTH
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (2, len(ids))
    native = cluster.scheduler.requests["r"].request
    assert list(native.token_ids.values) == [5, 6]
    assert (native.sampling.temperature, native.sampling.top_k, native.sampling.seed) == (0.5, 7, 9)
    assert (native.max_tokens, native.sampling.min_tokens, native.stopping.ignore_eos) == (99, 2, True)
    assert (list(native.stopping.stop_words), list(native.stopping.stop_token_ids)) == (["###"], [3])
    assert (native.priority, native.cache_salt) == (7, "salt")


@pytest.mark.parametrize(
    ("request_", "code", "word"),
    [
        (oe.GenerateRequest(model="smollm2"), grpc.StatusCode.INVALID_ARGUMENT, "prompt"),
        (oe.GenerateRequest(model="other", prompt="x"), grpc.StatusCode.NOT_FOUND, "other"),
        (
            oe.GenerateRequest(prompt="x", sampling=oe.SamplingParams(temperature=-1)),
            grpc.StatusCode.INVALID_ARGUMENT,
            "temperature",
        ),
        (
            oe.GenerateRequest(prompt="x", sampling=oe.SamplingParams(top_k=-1)),
            grpc.StatusCode.INVALID_ARGUMENT,
            "top_k",
        ),
        (oe.GenerateRequest(prompt="x", media=[oe.MediaItem()]), grpc.StatusCode.UNIMPLEMENTED, "media"),
        (
            oe.GenerateRequest(prompt="x", kv=oe.KvOptions(bypass_prefix_cache=True)),
            grpc.StatusCode.UNIMPLEMENTED,
            "bypass",
        ),
        (
            oe.GenerateRequest(prompt="x", guided=oe.GuidedDecoding(structural_tag="{}")),
            grpc.StatusCode.INVALID_ARGUMENT,
            "structural_tag",
        ),
    ],
)
async def test_a_bad_request_is_refused_by_name(
    inference: InferenceAsyncStub, request_: oe.GenerateRequest, code: grpc.StatusCode, word: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        _ = [event async for event in inference.Generate(request_, timeout=240)]
    assert failure.value.code() is code
    assert word in (failure.value.details() or "")


async def test_a_request_that_fails_later_ends_with_an_error_event(
    cluster: Cluster, inference: InferenceAsyncStub
) -> None:
    call = inference.Generate(oe.GenerateRequest(request_id="r", prompt="Hi"), timeout=240)
    reading = asyncio.ensure_future(call.read())
    await cluster.scheduler.until(lambda: "r" in cluster.scheduler.requests)
    cluster.scheduler.end("r", reason=pb.FINISH_REASON_ERROR)
    event = await reading
    assert isinstance(event, oe.GenerateResponse)
    assert event.error.code == oe.ERROR_CODE_INTERNAL
    assert await call.code() is grpc.StatusCode.OK


async def test_disconnects_and_aborts_end_the_request(
    cluster: Cluster, inference: InferenceAsyncStub, control: ControlAsyncStub
) -> None:
    call = inference.Generate(oe.GenerateRequest(request_id="left", prompt="Hi"), timeout=240)
    reading = asyncio.ensure_future(call.read())
    await cluster.scheduler.until(lambda: "left" in cluster.scheduler.requests)
    call.cancel()
    await cluster.scheduler.until(lambda: "left" in cluster.scheduler.aborts)
    await asyncio.gather(reading, return_exceptions=True)
    answer = await control.Abort(oe.AbortRequest(request_id="unknown"), timeout=240)
    assert answer.status == oe.ABORT_STATUS_ALREADY_FINISHED
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await control.Abort(oe.AbortRequest(all_requests=oe.AllRequests()), timeout=240)
    assert failure.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_server_info_health_and_event_sources(control: ControlAsyncStub) -> None:
    server = await control.GetServerInfo(oe.GetServerInfoRequest(), timeout=240)
    assert (server.engine_name, list(server.supported_models)) == ("midstream", ["smollm2"])
    model = await control.GetModelInfo(oe.GetModelInfoRequest(model="smollm2"), timeout=240)
    assert model.max_context_length == 8192
    assert model.supports_text_input
    load = await control.GetLoad(oe.GetLoadRequest(), timeout=240)
    assert load.HasField("running_requests")
    health = await control.Health(oe.HealthRequest(), timeout=240)
    assert health.state == oe.HEALTH_STATE_READY
    sources = await control.GetKvEventSources(oe.GetKvEventSourcesRequest(), timeout=240)
    assert [source.transport for source in sources.sources] == ["grpc"]


@pytest.mark.parametrize("asked", [[], [1]])
async def test_kv_events_of_all_groups_are_sent_for_each_rank(
    cluster: Cluster, control: ControlAsyncStub, asked: list[int]
) -> None:
    stored = stats_pb2.KvBlocksStored(block_hashes=[5], tokens_per_block=16)
    cluster.scheduler.kv_events = [
        stats_pb2.KvEvent(sequence_number=1, cleared=stats_pb2.KvCacheCleared()),
        stats_pb2.KvEvent(sequence_number=2, group_id="b", stored=stored),
        stats_pb2.KvEvent(sequence_number=3, group_id="a", stored=stored),
        stats_pb2.KvEvent(sequence_number=4, cleared=stats_pb2.KvCacheCleared()),
    ]
    expected = [
        (number, rank)
        for number, rank in [(1, 1 if asked else 0), (2, 0), (3, 1), (4, 0), (4, 1)]
        if not asked or rank in asked
    ]
    call = control.SubscribeKvEvents(oe.SubscribeKvEventsRequest(data_parallel_ranks=asked), timeout=240)
    batches: list[oe.KvEventBatch] = []
    async for response in call:
        batches.append(response.batch)
        if len(batches) == len(expected):
            break
    assert [(batch.sequence_number, batch.data_parallel_rank) for batch in batches] == expected
    assert batches[-1].events[0].WhichOneof("event") == "all_blocks_cleared"
    call.cancel()


async def test_blocks_that_leave_the_pool_are_no_longer_on_the_gpu(cluster: Cluster, control: ControlAsyncStub) -> None:
    moved = stats_pb2.KvBlocksUpdated(block_hashes=[5], cache_level=1)
    raised = stats_pb2.KvBlocksUpdated(block_hashes=[5], priority=90)
    cluster.scheduler.kv_events = [
        stats_pb2.KvEvent(sequence_number=1, group_id="a", updated=raised),
        stats_pb2.KvEvent(sequence_number=2, group_id="a", updated=moved),
    ]
    call = control.SubscribeKvEvents(oe.SubscribeKvEventsRequest(), timeout=240)
    batches: list[oe.KvEventBatch] = []
    async for response in call:
        batches.append(response.batch)
        if len(batches) == 2:
            break
    first, second = batches
    assert (first.sequence_number, len(first.events)) == (1, 0)
    removed = second.events[0].block_removed
    assert [item.value for item in removed.block_hashes] == [(5).to_bytes(8, "little")]
    assert removed.medium == oe.STORAGE_MEDIUM_GPU
    call.cancel()


def test_choices_may_contain_any_characters() -> None:
    choices = ["é", "日本", 'a "b"', "a\nb\t\x01", "(.*)\\", "x"]
    config = _guide(oe.GuidedDecoding(choice=oe.ChoiceConstraint(choices=choices)), {})
    assert config.guide_type == pb.GUIDE_TYPE_REGEX
    assert all(re.fullmatch(config.guide, choice) for choice in choices)
    assert not any(re.fullmatch(config.guide, text) for text in ("", "a", 'xa "b"', "(b)\\"))


@pytest.mark.parametrize(
    "tag",
    [
        {"format": {"type": "tag", "begin": "<a>", "content": {"type": "any_text"}, "end": "</a>"}},
        {"structures": [{"begin": "<a>", "schema": {"type": "object"}, "end": "</a>"}], "triggers": ["<a"]},
    ],
)
def test_structural_tags_are_those_of_openai(tag: dict[str, object]) -> None:
    tokens = {"<a>": 7}
    config = _guide(oe.GuidedDecoding(structural_tag=json.dumps(tag)), tokens)
    assert config.guide_type == pb.GUIDE_TYPE_EBNF_GRAMMAR
    assert config.guide == structural_grammar(Body(tag), tokens)
    assert "<[7]>" in config.guide


def test_an_error_names_the_part_of_a_structural_tag() -> None:
    for text, field in (("{", ""), ('{"format": {"type": "other"}}', ".format.type")):
        with pytest.raises((InvalidArgumentError, UnsupportedError)) as raised:
            _guide(oe.GuidedDecoding(structural_tag=text), {})
        assert raised.value.field == f"guided.structural_tag{field}"
