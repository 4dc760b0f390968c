"""A scripted gRPC server whose method is the name of the scenario: `/scripted.Streams/SCENARIO`.

Clients connect through a relay, so that a scenario can cut the connection.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import grpc
import grpc.aio

from benchmarks.clients.server import TEXT, Break, Scenario, Status, Wait

CODES = {429: grpc.StatusCode.RESOURCE_EXHAUSTED, 503: grpc.StatusCode.UNAVAILABLE}


class GrpcServer(grpc.GenericRpcHandler):  # type: ignore[misc,unused-ignore]
    """Serves scenarios; each has its own relay, since clients may share a connection otherwise.

    Attributes:
        scenarios: What to answer, by name.
    """

    def __init__(self) -> None:
        self.scenarios: dict[str, Scenario] = {}
        self._cuts: dict[str, asyncio.Event] = {}
        self._relays: list[asyncio.Server] = []
        self._connections: list[asyncio.Task[None]] = []
        self._ending = asyncio.Event()
        self._port = 0

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[GrpcServer]:
        """Serve until the end of the block."""
        server = grpc.aio.server()
        server.add_generic_rpc_handlers([self])
        self._port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            yield self
        finally:
            for relay in self._relays:
                relay.close()
            self._ending.set()
            await asyncio.gather(*self._connections)
            await server.stop(None)

    async def url(self, name: str) -> str:
        """Return the address of a scenario's relay."""
        cut = self._cuts[name] = asyncio.Event()

        async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            upper_reader, upper_writer = await asyncio.open_connection("127.0.0.1", self._port)
            works = [
                asyncio.create_task(work)
                for work in (_copy(reader, upper_writer), _copy(upper_reader, writer), cut.wait(), self._ending.wait())
            ]
            await asyncio.wait(works, return_when=asyncio.FIRST_COMPLETED)
            cut.clear()
            for work in works:
                work.cancel()
            await asyncio.gather(*works, return_exceptions=True)
            for end in (writer, upper_writer):
                end.transport.abort()
                with contextlib.suppress(ConnectionError):
                    await end.wait_closed()

        def start(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self._connections.append(asyncio.create_task(relay(reader, writer)))

        server = await asyncio.start_server(start, "127.0.0.1", 0)
        self._relays.append(server)
        return f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes]:
        """Return the handler of any method."""
        name = details.method.rpartition("/")[2]

        # gRPC recognizes an asynchronous generator function, but not a lambda that returns one.
        async def answer(_: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> AsyncIterator[bytes]:
            async for text in self._answer(name, context):
                yield text

        return grpc.unary_stream_rpc_method_handler(answer)

    async def _answer(self, name: str, context: grpc.aio.ServicerContext[bytes, bytes]) -> AsyncIterator[bytes]:
        scenario = self.scenarios[name]
        match scenario.next_answer():
            case Status(code, retry_after):
                trailing = (("grpc-retry-pushback-ms", str(int(retry_after) * 1000)),) if retry_after else ()
                await context.abort(CODES[code], "busy", trailing)
            case Break(has_begun):
                if has_begun:
                    yield TEXT[0].encode()
                    await asyncio.sleep(0.5)  # the relay must have forwarded it
                self._cuts[name].set()
                await asyncio.sleep(1)
            case Wait(_, wait_s, _):
                await asyncio.sleep(wait_s)
                for text in TEXT:
                    yield text.encode()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
