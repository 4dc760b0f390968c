"""Streams end, and can be resumed after their end, over real sockets."""

from __future__ import annotations

import asyncio
import logging

import grpc.aio
import pytest

from midstream import errors
from midstream.client import FinishReason
from midstream.model.tokenizer import Tokenizer
from midstream.rpc.channel import open_channel
from protos import generation_pb2 as pb
from protos import service_pb2, service_pb2_grpc
from router.pipeline import generation
from tests.router.client_streams import PROMPT, OpenClient, collect
from tests.router.conftest import Cluster


async def test_a_disconnect_aborts_at_once_unless_detached(
    cluster: Cluster, open_client: OpenClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="router.pipeline.metrics")
    router = await cluster.add_router(await cluster.add_detokenizer())
    client = open_client(router)
    for request_id, detached in (("kept", True), ("left", False)):
        stream = client.generate(token_ids=PROMPT, request_id=request_id, detached=detached)
        reading = asyncio.create_task(anext(stream))
        await cluster.scheduler.until(lambda request_id=request_id: request_id in cluster.scheduler.requests)
        cluster.scheduler.emit(request_id, [20])
        await reading
        stream.cancel()
    await cluster.scheduler.until(lambda: cluster.scheduler.aborts)
    assert cluster.scheduler.aborts == ["left"]
    await cluster.scheduler.until(lambda: not any(feed.attached for feed in cluster.scheduler.feeds))
    assert caplog.messages.count("a request ended: disconnected") == 2


async def test_a_client_that_reconnects_at_once_is_not_aborted(cluster: Cluster, open_client: OpenClient) -> None:
    client = open_client(await cluster.add_router(unavailable_timeout_s=60.0))
    streams = [client.generate(token_ids=PROMPT, request_id=request_id) for request_id in ("back", "back", "left")]
    reading = []
    for number, stream in enumerate(streams):
        reading.append(asyncio.create_task(anext(stream)))
        await cluster.scheduler.until(lambda number=number: len(cluster.scheduler.submits) > number)
        if stream is not streams[1]:
            stream.cancel()
    # The client left the first stream before the last, so a wrong abort of its request would have come first.
    await cluster.scheduler.until(lambda: cluster.scheduler.aborts)
    assert cluster.scheduler.aborts == ["left"]
    streams[1].cancel()
    await asyncio.gather(*reading, return_exceptions=True)


async def test_abort_from_elsewhere_ends_the_stream(cluster: Cluster, open_client: OpenClient) -> None:
    router = await cluster.add_router(await cluster.add_detokenizer())
    client = open_client(router)
    collecting = asyncio.create_task(collect(client, request_id="r"))
    await cluster.scheduler.until(lambda: "r" in cluster.scheduler.requests)
    assert await client.abort("r")
    result, _ = await collecting
    assert result.finish_reason is FinishReason.ABORT
    assert not await client.abort("r")


@pytest.mark.parametrize(
    "error",
    [
        errors.OverloadedError("the queue is full", retry_after_ms=70),
        errors.AlreadyExistsError("taken", field="request_id"),
    ],
)
async def test_a_rejection_is_returned_unchanged(
    cluster: Cluster, open_client: OpenClient, error: errors.MidstreamError
) -> None:
    router = await cluster.add_router(await cluster.add_detokenizer())
    cluster.scheduler.submit_errors = [error]
    with pytest.raises(type(error), match=error.message) as raised:
        await collect(open_client(router))
    assert raised.value.field == error.field
    assert getattr(raised.value, "retry_after_ms", 0) == getattr(error, "retry_after_ms", 0)


async def test_deadline_and_failure_end_the_call_with_their_status(cluster: Cluster, open_client: OpenClient) -> None:
    router = await cluster.add_router(await cluster.add_detokenizer())
    client = open_client(router)
    for request_id, reason, code, expected in (
        ("late", pb.FINISH_REASON_DEADLINE, 4, errors.DeadlineError),
        ("broken", pb.FINISH_REASON_ERROR, 13, errors.ExecutionError),
    ):
        stream = client.generate(token_ids=PROMPT, request_id=request_id)
        reading = asyncio.create_task(anext(stream))
        await cluster.scheduler.until(lambda request_id=request_id: request_id in cluster.scheduler.requests)
        cluster.scheduler.emit(request_id, [20])
        await reading
        cluster.scheduler.end(request_id, reason, error=pb.ErrorInfo(code=code, message="it is so"))
        final = await anext(stream)
        assert final.is_final
        with pytest.raises(expected):
            await anext(stream)


@pytest.mark.parametrize("has_detokenizer", [True, False])
async def test_a_request_ends_at_its_deadline_even_if_other_components_hang(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, has_detokenizer: bool
) -> None:
    """The scripted scheduler ends no request by itself, and the gRPC call has no deadline."""
    monkeypatch.setattr(generation, "_LATE_S", 0.0)
    router = await cluster.add_router(*[await cluster.add_detokenizer()] * has_detokenizer)
    request = pb.GenerateRequest(token_ids=pb.TokenIds(values=PROMPT), timeout_ms=3000)
    async with open_channel(router.address) as channel, asyncio.timeout(240):
        stub: service_pb2_grpc.MidstreamAsyncStub = service_pb2_grpc.MidstreamStub(channel)  # type: ignore[assignment]
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            async for _ in stub.Generate(request):
                pass
    assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert len(cluster.scheduler.submits) == 1


async def test_resume_of_an_unknown_request_is_not_found(cluster: Cluster, open_client: OpenClient) -> None:
    router = await cluster.add_router(await cluster.add_detokenizer())
    with pytest.raises(errors.NotFoundError):
        await open_client(router).resume("nobody").result()


async def test_resume_reads_a_finished_request_from_any_offset(
    cluster: Cluster, open_client: OpenClient, tokenizer: Tokenizer
) -> None:
    router = await cluster.add_router(await cluster.add_detokenizer())
    client = open_client(router)
    ids = tokenizer.encode("naïve 🫠 text, END of it")
    cluster.scheduler.add("r", stopping=pb.StoppingConfig(stop_words=["END"]))
    cluster.scheduler.emit("r", ids)
    cluster.scheduler.end("r")
    whole = await client.resume("r").result()
    assert whole.text == "naïve 🫠 text, "
    for offset in range(len(whole.token_ids) + 1):
        rest = await client.resume("r", offset).result()
        assert rest.token_ids == whole.token_ids[offset:]
        assert whole.text.endswith(rest.text)
        assert rest.finish_reason is FinishReason.STOP
    with pytest.raises(errors.OutOfRangeError) as raised:
        await client.resume("r", len(whole.token_ids) + 1).result()
    assert raised.value.code == grpc.StatusCode.OUT_OF_RANGE.value[0]
    assert (
        str(raised.value)
        == f"from_token: is {len(whole.token_ids) + 1}, but the output has {len(whole.token_ids)} tokens"
    )


@pytest.mark.parametrize("num_tokens", [7, 5, 4])
async def test_an_offset_ahead_of_a_running_request_waits_for_it(
    cluster: Cluster, open_client: OpenClient, num_tokens: int
) -> None:
    client = open_client(await cluster.add_router(await cluster.add_detokenizer()))
    cluster.scheduler.add("r", output=pb.OutputConfig(detokenize=False))
    cluster.scheduler.emit("r", [10, 11, 12])
    reading = asyncio.create_task(client.resume("r", 5).result())
    await cluster.scheduler.until(lambda: any(feed.attached for feed in cluster.scheduler.feeds))
    assert not reading.done()
    cluster.scheduler.emit("r", list(range(13, 10 + num_tokens)))
    cluster.scheduler.end("r")
    if num_tokens < 5:
        with pytest.raises(errors.OutOfRangeError, match="from_token: is 5, but the output has 4 tokens"):
            await reading
    else:
        assert (await reading).token_ids == list(range(15, 10 + num_tokens))


@pytest.mark.parametrize(
    ("common", "offsets", "expected"),
    [
        (0, [2, 4], {0: [], 1: []}),
        (0, [2, 3], {0: [], 1: [23]}),
        (4, [], {0: [], 1: []}),  # the output of the first sequence has ended before
        (0, [3, 0], "from_token_by_sequence: is 3 for sequence 0, whose output has 2 tokens"),
        (0, [0, 5], "from_token_by_sequence: is 5 for sequence 1, whose output has 4 tokens"),
        (5, [], "from_token: is 5, but the output has 4 tokens"),
        (0, [0, 0, 0], "from_token_by_sequence: has 3 offsets, but the request has 2 sequences"),
    ],
)
async def test_each_sequence_has_its_own_end(
    cluster: Cluster, common: int, offsets: list[int], expected: dict[int, list[int]] | str
) -> None:
    router = await cluster.add_router(await cluster.add_detokenizer())
    sampling = pb.SamplingConfig(num_return_sequences=2)
    cluster.scheduler.add("r", sampling=sampling, output=pb.OutputConfig(detokenize=False))
    cluster.scheduler.emit("r", [10, 11], 0)
    cluster.scheduler.emit("r", [20, 21, 22, 23], 1)
    cluster.scheduler.end("r", sequences=(0, 1))
    request = service_pb2.ResumeRequest(request_id="r", from_token=common, from_token_by_sequence=offsets)
    tokens: dict[int, list[int]] = {0: [], 1: []}
    async with open_channel(router.address) as channel:
        call = service_pb2_grpc.MidstreamStub(channel).Resume(request, timeout=240)
        try:
            async for chunk in call:  # type: ignore[attr-defined]
                tokens[chunk.sequence_index] += chunk.token_ids
        except grpc.aio.AioRpcError as error:
            assert error.details() == expected  # noqa: PT017 (the other cases raise nothing)
            return
    assert tokens == expected
