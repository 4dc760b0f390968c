"""Components that hang while their connections remain open."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from midstream.client import AsyncClient, Result
from midstream.model.tokenizer import Tokenizer
from midstream.rpc.channel import open_channel
from tests.router.client_streams import PROMPT
from tests.router.conftest import Cluster


@contextlib.asynccontextmanager
async def relayed(address: str) -> AsyncIterator[tuple[str, asyncio.Event]]:
    """Run a relay to a component; yield its address, and a gate: while it is set, bytes pass in both directions."""
    gate, pumps, writers = asyncio.Event(), set[asyncio.Task[None]](), list[asyncio.StreamWriter]()
    gate.set()
    host, _, port = address.rpartition(":")

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(64 << 10):
                await gate.wait()
                writer.write(data)
        writer.close()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        pumps.add(asyncio.create_task(connect(reader, writer)))

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back, there = await asyncio.open_connection(host, int(port))
        writers.append(there)
        pumps.update(asyncio.create_task(work) for work in (pump(reader, there), pump(back, writer)))

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}", gate
    finally:
        # If the server is closed before an accepted socket has its transport, asyncio never closes the socket.
        for listener in server.sockets:
            asyncio.get_running_loop().remove_reader(listener)
        await asyncio.sleep(0)
        server.close()
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
        for writer in writers:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


async def test_a_peer_that_hangs_is_noticed_within_the_keepalives_time(cluster: Cluster) -> None:
    detokenizer = await cluster.add_detokenizer()
    async with relayed(detokenizer.address) as (address, gate), open_channel(address) as channel:
        call = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        await call.read()
        gate.clear()
        began = time.monotonic()
        async with asyncio.timeout(240):
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await call.read()
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
        # The next ping is sent within ten seconds and must be answered within five; the rest of the limit is a margin
        # in case the machine stalls.
        assert time.monotonic() - began < 40


# gRPC's own keepalive would take longer to detect the failure.
MOST_S = 14
TEXT = "What stood still goes on 🫠 elsewhere."


async def finish(cluster: Cluster, client: AsyncClient, stop_busy: Callable[[], None], tokenizer: Tokenizer) -> float:
    """Start a stream, suspend the component in its path, and emit the remaining tokens; return the seconds that this
    took.
    """
    ids, result = tokenizer.encode(TEXT), Result("r")
    stream = client.generate(token_ids=PROMPT, request_id="r")
    reading = asyncio.ensure_future(anext(stream))
    await cluster.scheduler.until(lambda: "r" in cluster.scheduler.requests)
    cluster.scheduler.emit("r", ids[:4])
    result.add(await reading)
    stop_busy()
    began = time.monotonic()
    cluster.scheduler.emit("r", ids[4:])
    cluster.scheduler.end("r")
    async for chunk in stream:
        result.add(chunk)
    assert (result.text, result.token_ids) == (TEXT, ids)
    return time.monotonic() - began


async def test_streams_of_a_suspended_detokenizer_continue_on_another(cluster: Cluster, tokenizer: Tokenizer) -> None:
    parts = [await cluster.add_detokenizer(name) for name in ("first", "second")]
    async with contextlib.AsyncExitStack() as stack:
        ways = [await stack.enter_async_context(relayed(part.address)) for part in parts]
        router = await cluster.add_router(*(SimpleNamespace(address=address) for address, _ in ways))  # type: ignore[arg-type]
        client = await stack.enter_async_context(AsyncClient(router.address))

        def stop_busy() -> None:
            (gate,) = [way[1] for part, way in zip(parts, ways, strict=True) if part.servicer.num_attached]  # type: ignore[attr-defined]
            gate.clear()

        assert await finish(cluster, client, stop_busy, tokenizer) < MOST_S


async def test_streams_of_a_suspended_router_continue_on_another(cluster: Cluster, tokenizer: Tokenizer) -> None:
    detokenizer = await cluster.add_detokenizer()
    parts = [await cluster.add_router(detokenizer) for _ in range(2)]
    async with contextlib.AsyncExitStack() as stack:
        ways = [await stack.enter_async_context(relayed(part.address)) for part in parts]
        client = await stack.enter_async_context(AsyncClient([address for address, _ in ways]))

        def stop_busy() -> None:
            links = [part.servicer.runner.pool.links[detokenizer.address] for part in parts]  # type: ignore[attr-defined]
            (gate,) = [way[1] for link, way in zip(links, ways, strict=True) if link.streams]
            gate.clear()

        assert await finish(cluster, client, stop_busy, tokenizer) < MOST_S
