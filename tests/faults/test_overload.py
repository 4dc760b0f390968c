"""Overload: too many requests, clients that do not read, and clients with too many streams."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, cast

import grpc
import grpc.aio
import pytest

from midstream.errors import OverloadedError
from midstream.rpc.channel import channel_options
from midstream.rpc.errors import error_from_rpc
from protos import generation_pb2 as pb
from protos import service_pb2_grpc
from router.pipeline.stream_limits import StreamLimits
from tests.faults.limited_service import MAX_BATCH_SIZE, MAX_QUEUE_SIZE, LimitedService, Reading, read, request

if TYPE_CHECKING:
    from protos.service_pb2_grpc import MidstreamAsyncStub as Stub

NUM_TOKENS = 200
# Maximum factor by which the median stream may be slower than the slowest stream without overload. The median is used
# because a stall of the machine slows some streams more.
PACE_FACTOR = 5


@dataclass(frozen=True)
class Refusal:
    error: OverloadedError
    after_s: float


async def attempt(stub: Stub, first: int) -> Reading | Refusal:
    start = time.monotonic()
    try:
        return await read(stub, first, NUM_TOKENS)
    except grpc.aio.AioRpcError as error:
        mapped = error_from_rpc(error)
        assert isinstance(mapped, OverloadedError), mapped
        return Refusal(mapped, time.monotonic() - start)


async def test_ten_times_overload_is_refused_at_once_and_the_admitted_keep_their_pace(limited: LimitedService) -> None:
    async with limited.parts.stub() as stub:
        full = await asyncio.gather(*(read(stub, 1000 * i, NUM_TOKENS) for i in range(1, MAX_BATCH_SIZE + 1)))
        count = 10 * (MAX_BATCH_SIZE + MAX_QUEUE_SIZE)
        results = await asyncio.gather(*(attempt(stub, 100 * i) for i in range(1, count + 1)))
        admitted = [result for result in results if isinstance(result, Reading)]
        refused = [result for result in results if isinstance(result, Refusal)]
        assert len(admitted) >= MAX_BATCH_SIZE + MAX_QUEUE_SIZE
        assert len(refused) >= count // 2
        assert all(result.error.retry_after_ms > 0 for result in refused)
        # The last admitted request waits for the two batches before it; a refusal waits for nothing.
        assert max(result.after_s for result in refused) < max(result.took_s for result in admitted)
        assert median(result.pace for result in admitted) < PACE_FACTOR * max(result.pace for result in full)
        await read(stub, 7, NUM_TOKENS)


async def test_slow_readers_use_bounded_memory_and_are_disconnected(limited: LimitedService) -> None:
    options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 4096)]
    address = f"127.0.0.1:{limited.parts.router_port}"
    long = request(5, 7500, prompt=range(1000, 1300))
    long.output.exclude_input_from_output = False
    async with (
        limited.parts.stub() as stub,
        grpc.aio.insecure_channel(address, options=[*channel_options(), *options]) as channel,
    ):
        slow_stub = cast("Stub", service_pb2_grpc.MidstreamStub(channel))
        alone = await asyncio.gather(*(read(stub, 1000 * i, NUM_TOKENS) for i in range(1, 5)))
        before = {name: limited.resident_bytes(name) for name in ("router", "detokenizer", "scheduler")}
        slow = [slow_stub.Generate(long, timeout=550) for _ in range(4)]
        for call in slow:
            await call.read()  # the request is running; from now on the client does not read
        beside: list[Reading] = []
        while await asyncio.to_thread(limited.metric, "num_requests_running"):
            beside += await asyncio.gather(*(read(stub, 1000 * i, NUM_TOKENS) for i in range(1, 5)))
        # A client first receives data that has already arrived, and then the status.
        for call in slow:
            assert await _end(call) is grpc.StatusCode.RESOURCE_EXHAUSTED
        grown = {name: limited.resident_bytes(name) - before[name] for name in before}
        assert max(grown.values()) < 64 << 20, grown
        assert median(item.pace for item in beside) < PACE_FACTOR * max(item.pace for item in alone)
        await until_idle(limited)


async def _end(call: grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]) -> grpc.StatusCode:
    with contextlib.suppress(grpc.aio.AioRpcError):
        while await call.read() is not grpc.aio.EOF:
            pass
    return await call.code()


async def until_idle(limited: LimitedService) -> None:
    async with asyncio.timeout(240):
        while await asyncio.to_thread(limited.metric, "num_requests_running"):  # noqa: ASYNC110 (a process)
            await asyncio.sleep(0.05)
        assert await asyncio.to_thread(limited.metric, "kv_cache_usage_perc") == 0


def test_streams_are_limited_per_client_and_per_router() -> None:
    limits = StreamLimits(max_streams=3, max_streams_per_client=2)
    releases = [limits.take("a"), limits.take("a")]
    with pytest.raises(OverloadedError, match="this client has reached its limit of 2"):
        limits.take("a")
    limits.take("b")
    with pytest.raises(OverloadedError, match="this router has reached its limit of 3") as raised:
        limits.take("c")
    assert raised.value.retry_after_ms > 0
    releases[0]()
    limits.take("c")
    releases[1]()
    limits.take("a")
    assert limits.num_open == 3
