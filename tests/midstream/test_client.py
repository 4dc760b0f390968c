"""The client, with routers that fail in various ways, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import os
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest

from midstream.client import (
    AsyncClient,
    Client,
    Drafts,
    FinishReason,
    Guide,
    KvRetention,
    SamplingParams,
    TokenRange,
)
from midstream.errors import (
    AbortedError,
    DeadlineError,
    ExecutionError,
    InvalidArgumentError,
    NotFoundError,
    OverloadedError,
    UnavailableError,
)
from midstream.rpc.channel import open_channel
from midstream.rpc.health import Progress
from midstream.rpc.serving import Server
from protos import generation_pb2 as pb
from protos import loads_pb2, service_pb2, service_pb2_grpc, stats_pb2, status_pb2

LETTERS = "midstream"


def letters(start: int, end: int) -> pb.GenerateResponse:
    text = LETTERS[start:end]
    last = end == len(LETTERS)
    response = pb.GenerateResponse(
        token_offset=start, token_ids=text.encode(), text=text, is_final=last, is_sequence_final=last
    )
    if last:
        response.finish_reason = pb.FINISH_REASON_STOP
        response.usage.completion_tokens = len(LETTERS)
    return response


class Router(service_pb2_grpc.MidstreamServicer):
    """Streams a word, one letter per chunk. Each call takes the next entry of `breaks`, the number of letters after
    which its stream breaks.
    """

    def __init__(self, breaks: list[int]) -> None:
        self.breaks = breaks
        self.calls: list[tuple[str, int]] = []
        self.requests: list[pb.GenerateRequest] = []
        self.left = asyncio.Event()
        self.error: tuple[grpc.StatusCode, str] = (grpc.StatusCode.UNAVAILABLE, "lost")
        self.overlap = 0

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:  # noqa: N802
        self.requests.append(request)
        self.calls.append(("generate", 0))
        async for response in self._spell(0, context):
            yield response

    async def Resume(  # noqa: N802
        self, request: service_pb2.ResumeRequest, context: Any
    ) -> AsyncIterator[pb.GenerateResponse]:
        offset = request.from_token_by_sequence[0] if request.from_token_by_sequence else request.from_token
        self.calls.append(("resume", offset))
        async for response in self._spell(offset, context):
            yield response

    async def _spell(self, start: int, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        count = self.breaks.pop(0) if self.breaks else len(LETTERS)
        for offset in range(max(start - self.overlap, 0), min(start + count, len(LETTERS))):
            yield letters(offset, offset + 1)
        if start + count < len(LETTERS):
            await context.abort(*self.error)

    async def Abort(self, request: loads_pb2.AbortRequest, context: Any) -> loads_pb2.AbortResponse:  # noqa: N802
        return loads_pb2.AbortResponse(was_running=request.request_id == "running")

    async def GetModelInfo(self, request: Any, context: Any) -> loads_pb2.ModelInfo:  # noqa: N802
        if request.model not in ("", "m"):
            raise NotFoundError("no such model", field="model")
        return loads_pb2.ModelInfo(model="m", end_ids=[2], pad_id=0, features=["lora"])

    async def GetServerInfo(self, request: Any, context: Any) -> loads_pb2.ServerInfo:  # noqa: N802
        return loads_pb2.ServerInfo(
            worker_groups=[loads_pb2.WorkerGroupInfo(group_id="g", num_blocks=5)],
            detokenizers=[loads_pb2.DetokenizerInfo(detokenizer_id="d", num_attached_total=3)],
        )

    async def GetLoads(self, request: Any, context: Any) -> loads_pb2.GetLoadsResponse:  # noqa: N802
        return loads_pb2.GetLoadsResponse(cells=[loads_pb2.CellLoad(cell="c", num_queued_requests=4)])

    async def GetIterationStats(  # noqa: N802
        self, request: Any, context: Any
    ) -> AsyncIterator[stats_pb2.IterationStats]:
        yield stats_pb2.IterationStats(iter=3, iter_latency_ms=1.5)


@contextlib.asynccontextmanager
async def serving(*breaks: int, kind: Callable[[list[int]], Router] = Router) -> AsyncIterator[tuple[Router, str]]:
    router = kind(list(breaks))  # the other calls are not implemented
    server = Server("midstream.v1.Midstream", "127.0.0.1", 0, Progress())
    service_pb2_grpc.add_MidstreamServicer_to_server(router, server.grpc)
    await server.start()
    yield router, f"127.0.0.1:{server.port}"
    await server.stop()


async def test_a_broken_stream_resumes_at_its_offset() -> None:
    async with serving(0, 2, 0, 3) as (router, address), AsyncClient(address) as client:
        stream = client.generate("w", request_id="r")
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.text for chunk in chunks) == LETTERS
        assert [chunk.token_offset for chunk in chunks] == list(range(len(LETTERS)))
        # The first call failed before any output, so the request is submitted again with the same id.
        assert router.calls == [("generate", 0), ("generate", 0), ("resume", 2), ("resume", 2), ("resume", 5)]
        assert {request.request_id for request in router.requests} == {"r"}
        assert stream.num_resumes == 4


async def test_repeated_output_is_returned_once() -> None:
    async with serving(4) as (router, address), AsyncClient(address) as client:
        router.overlap = 3
        result = await client.generate("w").result()
    assert result.text == LETTERS
    assert bytes(result.token_ids) == LETTERS.encode()


async def test_another_router_takes_over() -> None:
    async with serving(3) as (first, one), serving(3) as (second, other), AsyncClient([one, other]) as client:
        result = await client.generate("w").result()
        assert result.text == LETTERS
        assert [call for call, _ in first.calls + second.calls].count("generate") == 1
        assert len(first.calls) >= 1
        assert len(second.calls) >= 1


async def test_a_dead_router_is_skipped() -> None:
    async with serving() as (_, address), AsyncClient(["127.0.0.1:1", address]) as client:
        for _ in range(2):
            assert await client.generate("w").text() == LETTERS
            assert (await client.model_info()).model == "m"


async def test_without_any_router_it_gives_up_in_time() -> None:
    async with AsyncClient("127.0.0.1:1", unavailable_timeout_s=0.1) as client:
        with pytest.raises(UnavailableError):
            await client.generate("w").result()
    async with AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(DeadlineError):
            await client.generate("w", timeout_s=0.2).result()


async def test_a_refusal_is_raised_and_not_tried_again() -> None:
    async with serving(0) as (router, address), AsyncClient(address) as client:
        router.error = (grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
        with pytest.raises(OverloadedError, match="full"):
            await client.generate("w").result()
        assert len(router.calls) == 1


async def test_a_status_internal_of_a_proxy_is_a_lost_router_but_the_services_own_is_an_error() -> None:
    async with serving(0, 2, 3) as (router, address), AsyncClient(address) as client:
        # nginx ends the call of a lost router with RST_STREAM, which gRPC reports like this, without metadata.
        router.error = (grpc.StatusCode.INTERNAL, "Received RST_STREAM with error code 2")
        stream = client.generate("w")
        assert await stream.text() == LETTERS
        assert router.calls == [("generate", 0), ("generate", 0), ("resume", 2), ("resume", 5)]
    async with serving(2, kind=Failing) as (router, address), AsyncClient(address) as client:
        with pytest.raises(ExecutionError, match="internal error"):
            await client.generate("w").result()
        assert len(router.calls) == 1


@pytest.mark.parametrize("code", ["UNAVAILABLE", "UNKNOWN", "INTERNAL", "CANCELLED"])
async def test_the_service_is_unavailable_if_every_call_is_broken_whatever_status_a_proxy_gives_it(code: str) -> None:
    async with serving(kind=Lost) as (router, address), AsyncClient(address, unavailable_timeout_s=0.1) as client:
        router.error = (grpc.StatusCode[code], "Stream removed (Data frame with END_STREAM flag received)")
        with pytest.raises(UnavailableError, match="Stream removed"):
            await client.generate("w").result()
        assert len(router.calls) > 1


@pytest.mark.parametrize("code", [code for code in grpc.StatusCode if code is not grpc.StatusCode.OK])
async def test_no_status_matters_after_the_final_chunk(code: grpc.StatusCode) -> None:
    async with serving(kind=BrokenAtEnd) as (router, address), AsyncClient(address) as client:
        router.error = (code, "the connection is gone")
        result = await client.generate("w").result()
        assert (result.text, len(router.calls)) == (LETTERS, 1)


async def test_messages_without_output_are_not_returned_but_show_that_the_router_lives() -> None:
    async with serving(kind=CutOff) as (router, address), AsyncClient(address, unavailable_timeout_s=0.3) as client:
        chunks = [chunk async for chunk in client.generate("w", request_id="r")]
    assert "".join(chunk.text for chunk in chunks) == LETTERS
    assert all(chunk.token_ids for chunk in chunks)
    # Each call was cut off after 0.2 s; without the messages, the client would have given up after the second.
    assert router.calls == [("generate", 0)] * 4


class Failing(Router):
    """A router with a defect."""

    async def _spell(self, start: int, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        yield letters(start, start + 1)
        raise ZeroDivisionError


class Lost(Router):
    """A router whose calls never get an answer."""

    async def _spell(self, start: int, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        await context.abort(*self.error)
        yield letters(0, 0)


class BrokenAtEnd(Router):
    """A router whose connection breaks between the final chunk and the status."""

    async def _spell(self, start: int, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        yield letters(start, len(LETTERS))
        await context.abort(*self.error)


class CutOff(Router):
    """A router whose first three calls only wait, until a proxy cuts them off."""

    async def _spell(self, start: int, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        if len(self.calls) > 3:
            async for letter in super()._spell(start, context):
                yield letter
            return
        for _ in range(4):
            yield pb.GenerateResponse(token_offset=start, is_keep_alive=True)
            await asyncio.sleep(0.05)
        await context.abort(grpc.StatusCode.INTERNAL, "Received RST_STREAM with error code 2")


class Silent(Router):
    """A router that sends one letter and then nothing more."""

    async def _spell(self, start: int, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        yield letters(0, 1)
        try:
            await asyncio.Event().wait()
        finally:
            self.left.set()


@pytest.mark.parametrize("how", ["cancel the stream", "cancel the task"])
async def test_closing_a_stream_ends_the_call(how: str) -> None:
    async with serving(kind=Silent) as (router, address), AsyncClient(address) as client:
        stream = client.generate("w")
        assert (await anext(stream)).text == "m"
        if how == "cancel the stream":
            stream.cancel()
        else:
            reading = asyncio.create_task(anext(stream))
            await asyncio.sleep(0)
            reading.cancel()
        await asyncio.wait_for(router.left.wait(), 240)


async def test_a_stream_can_be_cancelled_while_it_leaves_a_router_that_hangs() -> None:
    async with serving(kind=Silent) as (_, address), AsyncClient(address) as client:
        stream = client.generate("w")
        await anext(stream)
        reading = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
        stream._is_silent = True
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(reading, 240)


async def test_a_stream_that_is_dropped_ends_the_call() -> None:
    async with serving(kind=Silent) as (router, address):
        for addresses in ([address], [address, address]):
            async with AsyncClient(addresses) as client:
                async for _ in client.generate("w"):
                    break
                await asyncio.wait_for(router.left.wait(), 240)
                router.left.clear()


async def test_a_cancel_while_the_stream_reconnects_is_not_lost() -> None:
    async with AsyncClient("127.0.0.1:1", unavailable_timeout_s=300) as client:
        stream = client.generate("w")
        reading = asyncio.create_task(anext(stream))
        while not stream.num_resumes:  # noqa: ASYNC110 (a stream has no events)
            await asyncio.sleep(0)
        stream.cancel()
        with pytest.raises(AbortedError):
            await asyncio.wait_for(reading, 240)


async def test_a_stream_that_is_cancelled_before_it_is_read_sends_nothing() -> None:
    async with serving() as (router, address), AsyncClient(address) as client:
        stream = client.generate("w")
        stream.cancel()
        with pytest.raises(AbortedError):
            await stream.result()
        assert router.calls == []


class Waiting(Silent):
    """A router that responds to probes, which it counts."""

    num_probes = 0

    async def GetModelInfo(self, request: Any, context: Any) -> loads_pb2.ModelInfo:  # noqa: N802
        self.num_probes += 1
        return await super().GetModelInfo(request, context)


async def test_a_router_is_probed_once_per_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("midstream.client.stream._SILENCE_S", 0.1)
    async with serving(kind=Waiting) as (router, address), AsyncClient([address, address]) as client:
        stream = client.generate("w")
        await anext(stream)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(anext(stream), 0.35)
        assert isinstance(router, Waiting)
        assert 1 <= router.num_probes <= 3


class Status(Router):
    """A router that reports its status until the caller leaves."""

    async def GetStatus(self, request: Any, context: Any) -> AsyncIterator[status_pb2.SystemStatus]:  # noqa: N802
        yield status_pb2.SystemStatus()
        try:
            await asyncio.Event().wait()
        finally:
            self.left.set()


async def test_leaving_a_view_of_the_status_ends_the_call() -> None:
    async with serving(kind=Status) as (router, address), AsyncClient(address) as client:
        async for _ in client.status(follow=True):
            break
        await asyncio.wait_for(router.left.wait(), 240)


async def test_a_second_reader_of_a_stream_is_rejected() -> None:
    async with serving(kind=Silent) as (_, address), AsyncClient(address) as client:
        stream = client.generate("w")
        await anext(stream)
        reading = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
        with pytest.raises(InvalidArgumentError, match="stream: is being read"):
            await anext(stream)
        reading.cancel()


def test_a_client_may_be_created_outside_its_loop_but_belongs_to_one() -> None:
    client = AsyncClient("127.0.0.1:1")

    async def use() -> None:
        await client.model_info()

    with pytest.raises(UnavailableError):
        asyncio.run(use())
    with pytest.raises(InvalidArgumentError, match="another event loop"):
        asyncio.run(use())


@pytest.mark.parametrize("timeout_s", [math.inf, 1e12])
async def test_a_deadline_beyond_what_grpc_represents_is_none(timeout_s: float) -> None:
    async with serving() as (_, address), AsyncClient(address) as client:
        assert await client.generate("w", timeout_s=timeout_s).text() == LETTERS


async def test_empty_fields_of_a_turn_are_omitted() -> None:
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    turn = {"role": "assistant", "content": None, "tool_calls": calls}
    async with serving() as (router, address), AsyncClient(address) as client:
        await client.generate(messages=[turn]).result()
    assert router.requests[0].chat.messages[0].content == ""
    assert "arguments" in router.requests[0].chat.messages[0].tool_calls_json


async def test_an_offset_is_not_negative() -> None:
    async with AsyncClient() as client:
        with pytest.raises(InvalidArgumentError, match="from_token"):
            client.resume("r", -1)


async def test_no_proxy_is_used_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    async with serving() as (_, address), AsyncClient(address) as client, open_channel(address) as channel:
        assert await client.generate("w").text() == LETTERS
        await asyncio.wait_for(channel.channel_ready(), 240)


async def test_a_closed_client_says_so() -> None:
    async with serving(kind=Silent) as (_, address):
        client = AsyncClient(address)
        stream = client.generate("w")
        await anext(stream)
        reading = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
        await client.close()
        with pytest.raises(AbortedError):
            await reading
        for use in (client.generate("w").result, client.model_info):
            with pytest.raises(InvalidArgumentError, match="client: is closed"):
                await use()


async def test_all_arguments_reach_the_router() -> None:
    sampling = SamplingParams(
        max_tokens=5, temperature=0.0, seed=7, stop=("a", "b"), stop_token_ids=(3,), ignore_eos=True, log_probs=2,
        embedding_bias={4: -1.0}, allowed_token_ids=[4, 5], exclude_input_from_output=False, num_return_sequences=2,
    )  # fmt: skip
    turns: list[dict[str, object]] = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]},
        {"role": "tool", "content": "4", "tool_call_id": "1", "name": "f"},
    ]
    async with serving() as (router, address), AsyncClient(address) as client:
        await client.generate(
            messages=turns, tools=[{"name": "f"}], sampling=sampling, priority=3, detached=True
        ).result()
        request = router.requests[0]
    assert len(request.request_id) == 32
    assert (request.max_tokens, request.sampling.temperature, request.sampling.seed) == (5, 0.0, 7)
    assert request.sampling.HasField("temperature")
    assert not request.sampling.HasField("top_p")
    assert list(request.stopping.stop_words) == ["a", "b"]
    assert (list(request.stopping.stop_token_ids), request.stopping.ignore_eos) == ([3], True)
    assert (request.output.log_probs, request.output.exclude_input_from_output) == (2, False)
    assert dict(request.sampling.embedding_bias) == {4: -1.0}
    assert request.sampling.allowed_token_ids == [4, 5]
    assert (request.priority, request.detached, request.streaming) == (3, True, True)
    assert [(turn.role, turn.content) for turn in request.chat.messages] == [
        ("user", "hi"),
        ("assistant", ""),
        ("tool", "4"),
    ]
    assert request.chat.messages[1].tool_calls_json == '[{"name": "f"}]'
    assert (request.chat.messages[2].tool_call_id, request.chat.tools_json) == ("1", '[{"name": "f"}]')


async def test_every_feature_has_an_argument() -> None:
    table = np.ones((2, 3), np.float16)
    async with serving() as (router, address), AsyncClient(address) as client:
        await client.generate(
            "a",
            lora="l",
            guided=Guide(json_schema={"type": "object"}),
            logits_post_processor="p",
            prompt_tuning_table=table,
            kv_retention=KvRetention([TokenRange(2, 5, 80, 100)], decode_priority=3),
            speculative=Drafts("prompt_lookup", 5, 2),
        ).result()
        await client.generate(
            prompt_embeddings=table, guided=Guide(regex="a|b"), speculative=Drafts("draft_model")
        ).result()
        await client.generate(token_ids=[1], prompt_adapter="s").result()
    first, second, third = router.requests
    assert first.guided_decoding == pb.GuidedDecodingConfig(
        guide_type=pb.GUIDE_TYPE_JSON_SCHEMA, guide='{"type": "object"}'
    )
    assert (first.lora.name, first.logits_post_processor_name) == ("l", "p")
    tensor = pb.Tensor(dtype=pb.Tensor.DTYPE_FLOAT16, shape=[2, 3], data=table.tobytes())
    assert first.prompt_tuning.table == tensor == second.prompt_embeddings
    kept = pb.KvRetentionConfig.TokenRange(start=2, end=5, priority=80, duration_ms=100)
    assert first.kv_retention == pb.KvRetentionConfig(token_ranges=[kept], decode_priority=3)
    lookup = pb.SpeculativeConfig(method=pb.SpeculativeConfig.METHOD_PROMPT_LOOKUP)
    lookup.num_draft_tokens, lookup.max_ngram_size = 5, 2
    assert first.speculative == lookup
    assert second.guided_decoding == pb.GuidedDecodingConfig(guide_type=pb.GUIDE_TYPE_REGEX, guide="a|b")
    assert second.speculative.method == pb.SpeculativeConfig.METHOD_DRAFT_MODEL
    assert third.prompt_tuning.name == "s"


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({}, "prompt"),
        ({"prompt": "a", "prompt_embeddings": np.ones((1, 2), np.float32)}, "prompt_embeddings"),
        ({"prompt": "a", "guided": Guide()}, "guided"),
        ({"prompt": "a", "guided": Guide(regex="a", json=True)}, "guided"),
        ({"prompt": "a", "speculative": Drafts("guess")}, "speculative"),  # type: ignore[arg-type]
        ({"prompt": "a", "speculative": Drafts(num_draft_tokens=-1)}, "num_draft_tokens"),
        ({"prompt": "a", "kv_retention": KvRetention([TokenRange(-1)])}, "kv_retention"),
        ({"prompt": "a", "logits_post_processor": 3}, "logits_post_processor"),
        (
            {"prompt": "a", "prompt_adapter": "s", "prompt_tuning_table": np.ones((1, 2), np.float32)},
            "prompt_adapter",
        ),
        ({"prompt": "a", "token_ids": [1]}, "prompt"),
        ({"token_ids": [-1]}, "token_ids"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"prompt": "a", "tools": [{"type": "function"}]}, "tools"),
        ({"prompt": "a", "timeout_s": math.nan}, "timeout_s"),
        ({"prompt": "a", "timeout_s": "5"}, "timeout_s"),
        ({"prompt": "a", "sampling": SamplingParams(max_tokens=-1)}, "max_tokens"),
        ({"prompt": "a", "sampling": SamplingParams(seed=2**64)}, "seed"),
        ({"prompt": "a", "sampling": SamplingParams(top_k=1.5)}, "top_k"),  # type: ignore[arg-type]
    ],
)
async def test_the_client_rejects_arguments_that_do_not_fit_their_field(arguments: dict[str, Any], field: str) -> None:
    async with AsyncClient() as client:
        with pytest.raises(InvalidArgumentError) as raised:
            client.generate(**arguments)
        assert raised.value.field == field


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        (SamplingParams(max_tokens=-1), "max_tokens: must be an integer from 0 to 4294967295, not -1"),
        (SamplingParams(max_tokens=1 << 40), "max_tokens: must be an integer from 0 to 4294967295, not 1099511627776"),
        (SamplingParams(seed=-1), "seed: must be an integer from 0 to 18446744073709551615, not -1"),
        (SamplingParams(temperature="warm"), "temperature: must be a number, not 'warm'"),  # type: ignore[arg-type]
        (SamplingParams(stop=3), "stop: must be text, or a list of texts"),  # type: ignore[arg-type]
        (
            SamplingParams(stop_token_ids=[-1]),
            "stop_token_ids: must be a list of token ids, which are integers from 0",
        ),
    ],
)
async def test_what_does_not_fit_is_said_in_our_words(sampling: SamplingParams, message: str) -> None:
    async with AsyncClient() as client:
        with pytest.raises(InvalidArgumentError) as raised:
            client.generate("a", sampling=sampling)
        assert str(raised.value) == message


async def test_model_info_and_statistics() -> None:
    async with serving() as (_, address), AsyncClient(address) as client:
        info = await client.model_info()
        assert (info.end_ids, info.pad_id, info.features) == ((2,), 0, frozenset({"lora"}))
        with pytest.raises(NotFoundError) as raised:
            await client.model_info("other")
        assert raised.value.field == "model"
        server = await client.server_info()
        assert (server.worker_groups[0].num_blocks, server.detokenizers[0].num_attached_total) == (5, 3)
        assert (await client.loads())[0].num_queued_requests == 4
        stats = [item async for item in client.iteration_stats()]
        assert (stats[0]["iter"], stats[0]["iterLatencyMS"]) == ("3", 1.5)
        assert await client.abort("running")
        assert not await client.abort("ended")


async def test_the_synchronous_client_does_the_same() -> None:
    def use(address: str) -> None:
        with Client(address) as client:
            chunks = list(client.generate("w", sampling=SamplingParams(temperature=0.0)))
            assert "".join(chunk.text for chunk in chunks) == LETTERS
            assert chunks[-1].finish_reason is FinishReason.STOP
            assert client.generate(token_ids=[1]).text() == LETTERS
            assert client.resume("r", 3).result().text == LETTERS[3:]
            assert client.model_info().model == "m"
            assert client.iteration_stats()[0]["iter"] == "3"
            for _ in client.generate("w"):
                break
            with pytest.raises(NotFoundError):
                client.model_info("other")

    async with serving(3) as (_, address):
        await asyncio.to_thread(use, address)


async def test_garbage_collection_of_an_iteration_does_not_block_the_client() -> None:
    def use(address: str) -> None:
        with Client(address) as client:
            iteration = iter(client.generate("w"))
            next(iteration)
            cycle: list[object] = [iteration]
            cycle.append(cycle)
            del iteration, cycle
            # The garbage collector runs in whichever thread allocates; here, that is the client's own thread.
            client._loop.post(gc.collect)
            assert client.model_info().model == "m"

    async with serving(kind=Silent) as (router, address):
        await asyncio.wait_for(asyncio.to_thread(use, address), 240)
        await asyncio.wait_for(router.left.wait(), 240)


@pytest.mark.parametrize("kind", ["reading", "without a router"])
async def test_closing_the_synchronous_client_wakes_the_threads_that_wait(kind: str) -> None:
    async with serving(kind=Silent) as (_, address):
        client = await asyncio.to_thread(Client, address if kind == "reading" else "127.0.0.1:1")
        stream = client.generate("w")
        reading = asyncio.create_task(asyncio.to_thread(stream.result))
        while not (stream._stream._offsets or stream._stream.num_resumes):  # noqa: ASYNC110 (a stream has no events)
            await asyncio.sleep(0.01)
        await asyncio.to_thread(client.close)
        with pytest.raises(AbortedError):
            await asyncio.wait_for(reading, 240)


async def test_a_synchronous_client_may_be_closed_before_its_iterations_and_twice() -> None:
    def use(address: str) -> None:
        client = Client(address)
        iteration = iter(client.generate("w"))
        next(iteration)
        client.close()
        client.close()
        iteration.close()  # type: ignore[attr-defined]  # a generator
        with pytest.raises(InvalidArgumentError, match="client: is closed"):
            client.model_info()

    async with serving(kind=Silent) as (_, address):
        await asyncio.to_thread(use, address)


async def test_a_forked_process_gets_an_error_instead_of_waiting_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    def use(address: str) -> None:
        with Client(address) as client:
            with monkeypatch.context() as forked:
                forked.setattr(os, "getpid", lambda: 0)
                with pytest.raises(InvalidArgumentError, match="spawn"):
                    client.model_info()
                client.close()
            assert client.model_info().model == "m"

    async with serving() as (_, address):
        await asyncio.to_thread(use, address)


def test_an_invalid_address_leaves_no_thread() -> None:
    before = threading.active_count()
    with pytest.raises(InvalidArgumentError):
        Client("http://a")
    assert threading.active_count() == before


async def test_the_router_rejects_nan() -> None:
    async with serving() as (router, address), AsyncClient(address) as client:
        await client.generate("w", sampling=SamplingParams(temperature=math.nan)).result()
        assert math.isnan(router.requests[0].sampling.temperature)
