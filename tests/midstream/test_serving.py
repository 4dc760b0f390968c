"""The lifecycle of a gRPC server, on real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from midstream import errors
from midstream.rpc.channel import open_channel
from midstream.rpc.errors import FIELD_KEY, error_from_rpc
from midstream.rpc.health import Progress
from midstream.rpc.http2 import GrpcServer, Limits
from midstream.rpc.http2.wire import PREFACE
from midstream.rpc.serving import Server
from midstream.telemetry import HttpServer, JsonFormatter, Metrics, TextFormatter, current_request_id
from protos import loads_pb2, service_pb2_grpc
from protos import stats_pb2 as stats
from tests.faults.hosts import relay

NAME = "midstream.v1.Midstream"
# Longer than the delays between attempts to reconnect to a process that is gone.
LATENCY_S = 0.6
# The machine may stall for seconds.
WAIT_S = 240


class Raising(service_pb2_grpc.MidstreamServicer):
    """Unary and streaming calls that raise the given error, if there is one; a stream that waits for `release`."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.started = asyncio.Event()
        self.release = asyncio.Event()
        self.cleaned = asyncio.Event()

    async def Abort(self, request: Any, context: Any) -> loads_pb2.AbortResponse:  # noqa: N802
        if self.error:
            raise self.error
        return loads_pb2.AbortResponse(was_running=True)

    async def GetIterationStats(  # noqa: N802
        self, request: Any, context: Any
    ) -> AsyncIterator[stats.IterationStats]:
        try:
            yield stats.IterationStats(iter=1)
            if self.error:
                raise self.error
            self.started.set()
            await self.release.wait()
            yield stats.IterationStats(iter=2)
        finally:
            self.cleaned.set()


def raising(error: Exception | None = None) -> Raising:
    return Raising(error)  # type: ignore[abstract]  # the other calls stay unimplemented


async def serve(
    servicer: Raising, progress: Progress | None = None
) -> tuple[Server, service_pb2_grpc.MidstreamAsyncStub]:
    server = Server(NAME, "127.0.0.1", 0, progress or Progress())
    service_pb2_grpc.add_MidstreamServicer_to_server(servicer, server.grpc)
    await server.start()
    stub: Any = service_pb2_grpc.MidstreamStub(open_channel(f"127.0.0.1:{server.port}"))
    return server, stub


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.InvalidArgumentError("must be positive", field="max_tokens"), grpc.StatusCode.INVALID_ARGUMENT),
        (errors.OverloadedError("queue is full", retry_after_ms=250), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (errors.UnavailableError("no worker"), grpc.StatusCode.UNAVAILABLE),
    ],
)
async def test_a_midstream_error_becomes_its_status_and_comes_back_as_itself(
    error: errors.MidstreamError, code: grpc.StatusCode
) -> None:
    server, stub = await serve(raising(error))
    with pytest.raises(grpc.aio.AioRpcError) as unary:
        await stub.Abort(loads_pb2.AbortRequest())
    with pytest.raises(grpc.aio.AioRpcError) as streaming:
        _ = [item async for item in stub.GetIterationStats(stats.GetIterationStatsRequest())]
    await server.stop()
    for raised in (unary.value, streaming.value):
        assert raised.code() == code
        back = error_from_rpc(raised)
        assert type(back) is type(error)
        assert (back.message, back.field) == (error.message, error.field)
        assert getattr(back, "retry_after_ms", None) == getattr(error, "retry_after_ms", None)


async def test_a_slow_network_needs_no_more_than_one_connection() -> None:
    server, _ = await serve(raising())
    num_connections = 0

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_connections
        num_connections += 1
        await asyncio.sleep(LATENCY_S)
        gate = asyncio.Event()
        gate.set()
        await relay(reader, writer, asyncio.open_connection("127.0.0.1", server.port), gate)

    network = await asyncio.start_server(accept, "127.0.0.1", 0)
    async with open_channel(f"127.0.0.1:{network.sockets[0].getsockname()[1]}") as channel:
        stub: Any = service_pb2_grpc.MidstreamStub(channel)
        answer = await stub.Abort(loads_pb2.AbortRequest(), wait_for_ready=True, timeout=240)
    assert answer.was_running
    assert num_connections == 1
    network.close()
    await server.stop()


async def test_a_field_name_of_a_client_does_not_break_the_error() -> None:
    server, stub = await serve(raising(errors.InvalidArgumentError("no such input", field="é\n" * 30_000)))
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await stub.Abort(loads_pb2.AbortRequest())
    await server.stop()
    assert raised.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert error_from_rpc(raised.value).field == "?" * 256


@pytest.mark.parametrize(("character", "num_bytes"), [("a", 1), ("%", 3), ("é", 6), ("東", 9), ("😈", 12)])
async def test_a_long_error_is_cut_to_what_clients_accept(character: str, num_bytes: int) -> None:
    server, stub = await serve(raising(errors.InvalidArgumentError(character * 5000, field="x")))
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await stub.Abort(loads_pb2.AbortRequest())
    await server.stop()
    assert raised.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert raised.value.details() == "x: " + character * ((4096 - len("x: ")) // num_bytes)


async def test_an_unexpected_error_is_internal_and_reveals_nothing(caplog: pytest.LogCaptureFixture) -> None:
    server, stub = await serve(raising(ValueError("secret path /etc/x")))
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await stub.Abort(loads_pb2.AbortRequest())
    await server.stop()
    assert raised.value.code() == grpc.StatusCode.INTERNAL
    assert "secret" not in str(raised.value.details())
    assert "secret path" in caplog.text


async def test_a_caller_that_disconnects_ends_the_generator_at_once() -> None:
    servicer = raising()
    server, stub = await serve(servicer)
    call = stub.GetIterationStats(stats.GetIterationStatsRequest())
    await servicer.started.wait()
    call.cancel()
    await asyncio.wait_for(servicer.cleaned.wait(), WAIT_S)
    await server.stop()


async def check(port: int, service: str = "") -> int:
    async with open_channel(f"127.0.0.1:{port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        response = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=WAIT_S)
        return int(response.status)


async def test_health_follows_progress_and_reasons() -> None:
    progress = Progress()
    server, _ = await serve(raising(), progress)
    serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
    assert await check(server.port) == await check(server.port, NAME) == serving
    with pytest.raises(grpc.aio.AioRpcError, match="no such service"):
        await check(server.port, "another.Service")

    loop = progress.loop("scheduler loop", timeout_s=0.0)
    assert await check(server.port) == serving  # idle
    loop.touch()
    time.sleep(0.001)  # noqa: ASYNC251 (the clock must move on)
    assert progress.problems() == ["scheduler loop"]
    assert await check(server.port) == not_serving
    loop.idle()
    assert await check(server.port) == serving
    progress.set_reason("no worker", stands=True)
    assert await check(server.port) == not_serving
    progress.set_reason("no worker", stands=False)
    assert await check(server.port) == serving
    await server.stop()


async def test_health_watch_reports_each_change() -> None:
    progress = Progress()
    server, _ = await serve(raising(), progress)
    async with open_channel(f"127.0.0.1:{server.port}") as channel:
        call = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await call.read()).status == health_pb2.HealthCheckResponse.SERVING
        progress.set_reason("draining", stands=True)
        assert (await call.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
    await server.stop()


async def test_sigterm_lets_streams_finish_and_rejects_new_requests() -> None:
    servicer = raising()
    server, stub = await serve(servicer)
    call = stub.GetIterationStats(stats.GetIterationStatsRequest())
    await servicer.started.wait()
    running = asyncio.create_task(server.run_until_signal(drain_timeout_s=60))
    await asyncio.sleep(0)
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(server.draining.wait(), WAIT_S)
    await asyncio.sleep(0)
    another: Any = service_pb2_grpc.MidstreamStub(open_channel(f"127.0.0.1:{server.port}"))
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await another.Abort(loads_pb2.AbortRequest(), timeout=WAIT_S)
    assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
    servicer.release.set()
    assert [item.iter async for item in call] == [1, 2]
    await asyncio.wait_for(running, WAIT_S)


async def test_another_port_stops_at_the_same_time() -> None:
    servicer = raising()
    server, stub = await serve(servicer)
    call = stub.GetIterationStats(stats.GetIterationStatsRequest())
    await servicer.started.wait()
    left: asyncio.Queue[float] = asyncio.Queue()
    running = asyncio.create_task(server.run_until_signal(drain_timeout_s=60, stop_other_port=left.put))
    await asyncio.sleep(0)
    os.kill(os.getpid(), signal.SIGTERM)
    assert await asyncio.wait_for(left.get(), WAIT_S) == 60
    assert not running.done(), "the stream still runs"
    servicer.release.set()
    assert [item.iter async for item in call] == [1, 2]
    await asyncio.wait_for(running, WAIT_S)


async def test_calls_are_served_for_a_while_after_sigterm() -> None:
    progress = Progress()
    server, _ = await serve(raising(), progress)
    running = asyncio.create_task(server.run_until_signal(drain_timeout_s=2 * WAIT_S, drain_delay_s=2 * WAIT_S))
    await asyncio.sleep(0)
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(server.leaving.wait(), WAIT_S)
    assert await check(server.port) == health_pb2.HealthCheckResponse.NOT_SERVING
    async with open_channel(f"127.0.0.1:{server.port}") as channel:
        stub: Any = service_pb2_grpc.MidstreamStub(channel)
        assert (await stub.Abort(loads_pb2.AbortRequest(), timeout=WAIT_S)).was_running
    assert not server.draining.is_set()
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(running, WAIT_S)
    assert server.draining.is_set()


@pytest.mark.parametrize("numbers", [[signal.SIGINT], [signal.SIGTERM, signal.SIGTERM]])
async def test_ctrl_c_and_a_second_signal_end_without_delay(numbers: list[signal.Signals]) -> None:
    server, _ = await serve(raising())
    running = asyncio.create_task(server.run_until_signal(drain_timeout_s=2 * WAIT_S, drain_delay_s=2 * WAIT_S))
    await asyncio.sleep(0)
    for number in numbers:
        os.kill(os.getpid(), number)
        await asyncio.wait_for(server.leaving.wait(), WAIT_S)
    await asyncio.wait_for(running, WAIT_S)


async def test_the_delay_is_part_of_the_drain_time() -> None:
    server, _ = await serve(raising())
    left: list[float] = []

    async def stop_other_port(seconds: float) -> None:
        left.append(seconds)

    running = asyncio.create_task(
        server.run_until_signal(drain_timeout_s=0.2, drain_delay_s=60, stop_other_port=stop_other_port)
    )
    await asyncio.sleep(0)
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(running, WAIT_S)
    assert left == [0]


async def test_a_second_signal_ends_the_draining_of_a_service() -> None:
    server = Server("midstream.v1.Scheduler", "127.0.0.1", 0, Progress())
    await server.start()
    begins, ended = asyncio.Event(), list[str]()

    async def drain() -> None:
        begins.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("cancelled")

    running = asyncio.create_task(server.run_until_signal(drain=drain, drain_timeout_s=2 * WAIT_S))
    await asyncio.sleep(0)
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(begins.wait(), WAIT_S)
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(running, WAIT_S)
    assert ended == ["cancelled"]


async def test_a_second_signal_also_ends_the_draining_of_another_port() -> None:
    server, _ = await serve(raising())
    left: list[float] = []
    begun, ended = asyncio.Event(), asyncio.Event()

    async def then(seconds: float) -> None:
        left.append(seconds)
        begun.set()
        if seconds == 0:
            ended.set()
        await ended.wait()

    running = asyncio.create_task(server.run_until_signal(drain_timeout_s=60, stop_other_port=then))
    await asyncio.sleep(0)
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(begun.wait(), WAIT_S)
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(running, WAIT_S)
    assert 0 < left[0] <= 60
    assert left[1:] == [0]


async def test_a_stream_longer_than_the_drain_is_cut() -> None:
    servicer = raising()
    server, stub = await serve(servicer)
    call = stub.GetIterationStats(stats.GetIterationStatsRequest())
    await servicer.started.wait()
    await server.stop(drain_timeout_s=0.05)
    with pytest.raises((grpc.aio.AioRpcError, asyncio.CancelledError)):
        _ = [item async for item in call]
    assert servicer.cleaned.is_set()


async def test_a_taken_port_is_an_error() -> None:
    server = Server(NAME, "127.0.0.1", 0, Progress())
    with pytest.raises(OSError, match="cannot listen"):
        Server(NAME, "127.0.0.1", server.port, Progress())
    await server.stop()


async def test_connections_are_limited_in_total_and_for_an_address() -> None:
    for limits in (Limits(max_connections=2), Limits(max_connections_per_address=2)):
        server = GrpcServer(limits=limits)
        port = server.add_port("127.0.0.1", 0)
        await server.start()
        streams = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        (kept, keeper), (_, left), (refused, _) = streams
        keeper.write(PREFACE)
        assert await kept.readexactly(9)
        assert await refused.read() == b""
        left.close()
        async with asyncio.timeout(WAIT_S):
            while True:  # until the server has detected the disconnect
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                streams.append((reader, writer))
                writer.write(PREFACE)
                with contextlib.suppress(asyncio.IncompleteReadError, ConnectionResetError):
                    await reader.readexactly(9)
                    break
        for _, writer in streams:
            writer.close()
        await server.stop(0)


async def test_a_connection_accepted_while_the_server_stops_is_closed() -> None:
    server = GrpcServer()
    port = server.add_port("127.0.0.1", 0)
    await server.start()
    with socket.create_connection(("127.0.0.1", port)) as client:
        await asyncio.sleep(0)
        await asyncio.sleep(0)  # the connection has been accepted, but its task has not begun
        await server.stop(0)
        client.settimeout(WAIT_S)
        assert await asyncio.to_thread(client.recv, 1) == b""


def get(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=WAIT_S) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_metrics_and_health_over_http() -> None:
    metrics = Metrics("m")
    progress = Progress()
    metrics.histogram("e2e_request_latency_seconds", "Latency.").observe(2.0)
    metrics.gauge("num_requests_running", "Running requests.").set(3)
    metrics.counter("request_success", "Finished requests.", ("finished_reason",)).labels("stop").inc()
    metrics.gauge("num_attached_streams", "Streams.").set(5)
    server = HttpServer("127.0.0.1", 0, metrics, progress.problems)
    server.start()
    try:
        status, text = get(server.port, "/metrics")
        assert status == 200
        lines = text.splitlines()
        named = 'vllm:num_requests_running{model_name="m"} 3.0'
        assert {"midstream:num_requests_running 3.0", named} <= set(lines)
        assert 'vllm:request_success_total{finished_reason="stop",model_name="m"} 1.0' in lines
        assert 'midstream:request_success_total{finished_reason="stop"} 1.0' in lines
        assert 'vllm:e2e_request_latency_seconds_bucket{le="60.0",model_name="m"} 1.0' in lines
        assert 'vllm:e2e_request_latency_seconds_count{model_name="m"} 1.0' in lines
        assert "midstream:num_attached_streams 5.0" in lines
        assert not any(line.startswith("vllm:num_attached_streams") for line in lines)
        assert get(server.port, "/health") == (200, '{"status": "SERVING", "stalled": []}')
        progress.set_reason("draining", stands=True)
        assert get(server.port, "/health") == (503, '{"status": "NOT_SERVING", "stalled": ["draining"]}')
        assert get(server.port, "/other")[0] == 404
    finally:
        server.stop()


def test_a_histogram_counts_each_time_once() -> None:
    metrics = Metrics()
    times = metrics.histogram("request_seconds", "Times.")
    for seconds in (0.0005, 0.001, 0.0011, 0.7, 61.0):
        times.observe(seconds)
    lines = metrics.render().decode().splitlines()
    name = "midstream:request_seconds"
    counts = {"0.001": 2, "0.0025": 3, "0.5": 3, "1.0": 4, "60.0": 4, "+Inf": 5}
    assert {f'{name}_bucket{{le="{bound}"}} {float(count)}' for bound, count in counts.items()} <= set(lines)
    assert f"{name}_count 5.0" in lines
    assert f"{name}_sum {0.0005 + 0.001 + 0.0011 + 0.7 + 61.0}" in lines


def test_a_log_line_is_json_with_the_request_id() -> None:
    record = logging.getLogger("x").makeRecord("x", logging.INFO, "f", 1, "took %d ms", (5,), None, extra={"cell": "a"})
    token = current_request_id.set("r-1")
    line = json.loads(JsonFormatter("router").format(record))
    current_request_id.reset(token)
    assert line.pop("time").endswith("Z")
    assert line == {
        "level": "info", "service": "router", "logger": "x", "message": "took 5 ms", "request_id": "r-1", "cell": "a",
    }  # fmt: skip
    assert FIELD_KEY == "midstream-field"


async def test_a_burst_of_calls_is_answered_in_full() -> None:
    server = Server("midstream.v1.Midstream", "127.0.0.1", 0, Progress())
    await server.start()
    async with open_channel(f"127.0.0.1:{server.port}") as channel:
        await channel.channel_ready()
        stub = health_pb2_grpc.HealthStub(channel)
        calls = [stub.Check(health_pb2.HealthCheckRequest()) for _ in range(2500)]
        time.sleep(0.5)  # noqa: ASYNC251 (the event loop is busy while they arrive)
        codes = [await call.code() for call in calls]
    assert codes == [grpc.StatusCode.OK] * len(codes)
    await server.stop()


def test_idle_connections_of_one_address_leave_room_for_others() -> None:
    server = HttpServer("127.0.0.1", 0, Metrics(), Progress().problems)
    server.start()
    with contextlib.ExitStack() as opened:
        for _ in range(200):
            idle = socket.create_connection(("127.0.0.1", server.port), source_address=("127.0.0.2", 0))
            opened.enter_context(idle)
        for _ in range(40):  # more connections than one address may have open at once
            assert get(server.port, "/health")[0] == 200
    server.stop()


def test_a_text_log_line_stays_one_line() -> None:
    record = logging.LogRecord("x", logging.WARNING, "", 0, "an error: %s", ("a\n\x1b[2Jb é",), None)
    token = current_request_id.set("id]\n12:00:00 ERROR")
    try:
        line = TextFormatter("router").format(record)
    finally:
        current_request_id.reset(token)
    assert line.endswith(r"WARNING router an error: a\n\x1b[2Jb é [id]\n12:00:00 ERROR]")
