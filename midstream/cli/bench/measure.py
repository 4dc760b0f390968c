"""Drives a running service with a workload and measures what its clients see.

Each request waits for a slot (concurrency) or for its arrival time (Poisson), opens a Generate stream on the next
router in round-robin order, and records the time and token count of each chunk.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

import grpc

from midstream.cli.bench.workloads import BenchRequest, Workload
from midstream.cli.credentials import Credentials
from midstream.errors import UnavailableError
from midstream.rpc.channel import open_channel
from midstream.rpc.errors import error_from_rpc
from protos import generation_pb2 as pb
from protos import loads_pb2, service_pb2_grpc

_CONNECT_TIMEOUT_S = 10.0


@dataclass(slots=True)
class RequestTimes:
    """Measurements of one request; times are in seconds from the start of the run.

    Attributes:
        arrivals: Time of each chunk with tokens, and the number of its tokens.
        error: Why the request failed; empty if it succeeded.
    """

    started: float
    num_prompt_tokens: int
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    error: str = ""

    @property
    def num_tokens(self) -> int:
        return sum(count for _, count in self.arrivals)


@dataclass(frozen=True, slots=True)
class RunResult:
    """One run of one workload."""

    workload: str
    counts_input: bool
    duration_s: float
    requests: tuple[RequestTimes, ...]


async def run_workload(
    addresses: Sequence[str],
    workload: Workload,
    *,
    request_rate: float | None = None,
    seed: int = 0,
    credentials: Credentials | None = None,
    on_tokens: Callable[[int], None] = lambda _: None,
) -> RunResult:
    """Send the workload, with its token ids mapped into the served model's vocabulary, and wait until it completes.

    Args:
        addresses: Routers, used in round-robin order.
        request_rate: Poisson arrivals per second; None sends as fast as the workload's concurrency allows.
        on_tokens: Called with the number of tokens of each chunk, for progress.

    Raises:
        UnavailableError: A router does not respond.
        MidstreamError: The router rejects the caller.
    """
    options = credentials or Credentials(tls=None, server_name="", token="")
    channels = [open_channel(address, **options) for address in addresses]
    try:
        for address, channel in zip(addresses, channels, strict=True):
            await _wait_until_connected(address, channel)
        stubs = [cast("service_pb2_grpc.MidstreamAsyncStub", service_pb2_grpc.MidstreamStub(it)) for it in channels]
        workload = workload.within(await _vocab_size(stubs[0]))
        arrival_times = _arrival_times(len(workload.requests), request_rate, seed)
        places = asyncio.Semaphore(len(workload.requests) if request_rate else workload.concurrency)
        begin = time.perf_counter()

        async def send(index: int, request: BenchRequest) -> RequestTimes:
            await asyncio.sleep(max(0.0, arrival_times[index] - (time.perf_counter() - begin)))
            async with places:
                return await _run_request(stubs[index % len(stubs)], request, begin, on_tokens)

        done = await asyncio.gather(*(send(index, request) for index, request in enumerate(workload.requests)))
        return RunResult(workload.name, workload.counts_input, time.perf_counter() - begin, tuple(done))
    finally:
        await asyncio.gather(*(channel.close() for channel in channels))


async def _wait_until_connected(address: str, channel: grpc.aio.Channel) -> None:
    try:
        async with asyncio.timeout(_CONNECT_TIMEOUT_S):
            await channel.channel_ready()
    except TimeoutError:
        raise UnavailableError(f"no router answers at {address}; `midstream up --detach` starts one") from None


async def _vocab_size(stub: service_pb2_grpc.MidstreamAsyncStub) -> int:
    try:
        return (await stub.GetModelInfo(loads_pb2.GetModelInfoRequest(), timeout=_CONNECT_TIMEOUT_S)).vocab_size
    except grpc.aio.AioRpcError as error:
        raise error_from_rpc(error) from None


def _arrival_times(count: int, request_rate: float | None, seed: int) -> list[float]:
    if request_rate is None:
        return [0.0] * count
    generator = random.Random(seed)
    times, now = [], 0.0
    for _ in range(count):
        times.append(now)
        now += generator.expovariate(request_rate)
    return times


async def _run_request(
    stub: service_pb2_grpc.MidstreamAsyncStub, request: BenchRequest, begin: float, on_tokens: Callable[[int], None]
) -> RequestTimes:
    message = pb.GenerateRequest(
        token_ids=pb.TokenIds(values=request.token_ids),
        max_tokens=request.max_tokens,
        sampling=pb.SamplingConfig(temperature=0.0),
        stopping=pb.StoppingConfig(ignore_eos=True),
    )
    times = RequestTimes(time.perf_counter() - begin, len(request.token_ids))
    try:
        async for chunk in stub.Generate(message):
            if chunk.token_ids:
                times.arrivals.append((time.perf_counter() - begin, len(chunk.token_ids)))
                on_tokens(len(chunk.token_ids))
            if chunk.HasField("error"):
                times.error = chunk.error.message
    except grpc.aio.AioRpcError as error:
        times.error = str(error_from_rpc(error))
    return times
