from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, cast
from unittest.mock import AsyncMock

import grpc.aio
import pytest

from midstream.rpc import frames
from midstream.rpc.connection import Connection
from midstream.rpc.frame_link import FrameLink, LinkSettings
from midstream.rpc.frames import FrameConnection, FrameServer
from midstream.rpc.health import Progress
from midstream.rpc.serving import Server
from protos import detokenizer_pb2 as pb
from protos.detokenizer_pb2_grpc import DetokenizerServicer, DetokenizerStub, add_DetokenizerServicer_to_server
from protos.frames_pb2 import FramesOffer, FramesPiece, OpenFramesRequest
from protos.frames_pb2_grpc import FramesStub, add_FramesServicer_to_server

if TYPE_CHECKING:
    from protos.frames_pb2_grpc import FramesAsyncStub

MAX_BYTES = 1 << 20
WAIT_S = 240


class Link(FrameLink[pb.StreamCommand, pb.StreamBatch]):
    """Counts offers, and keeps what arrives; the port in offers is replaced by `blocked_port`, if it is set."""

    message_class = pb.StreamBatch

    def __init__(self, target: str, blocked_port: int = 0, silence_s: float = 0.0) -> None:
        super().__init__("service", target, LinkSettings(MAX_BYTES), "", silence_s)
        self.opened, self.lost = asyncio.Event(), asyncio.Event()
        self.came: asyncio.Queue[pb.StreamBatch] = asyncio.Queue()
        self.num_offers = 0
        self._blocked_port = blocked_port

    @property
    def connection(self) -> FrameConnection:
        assert isinstance(self._connection, FrameConnection)
        return self._connection

    async def _ask_for_frames(self, channel: grpc.aio.Channel) -> FramesOffer:
        stub: Any = DetokenizerStub(channel)
        offer: FramesOffer = await stub.OpenStream(OpenFramesRequest())
        self.num_offers += 1
        if self._blocked_port:
            return FramesOffer(port=self._blocked_port, token=offer.token)
        return offer

    def _take(self, batch: pb.StreamBatch) -> None:
        self.came.put_nowait(batch)

    def _greet(self) -> None:
        self.opened.set()
        self._send(attach(1))

    def _lose(self) -> None:
        self.opened.clear()
        self.lost.set()


def attach(stream: int, request_id: str = "") -> pb.StreamCommand:
    return pb.StreamCommand(attach=pb.StreamAttach(stream=stream, request_id=request_id))


class Echo(DetokenizerServicer):
    """Answers every command with a batch of the same size."""

    def __init__(self, server: FrameServer) -> None:
        self._server = server
        self.connections: list[FrameConnection] = []

    async def OpenStream(self, request: Any, context: Any) -> FramesOffer:  # noqa: N802
        return self._server.offer(self._accept)

    def _accept(self, connection: Connection) -> Echo:
        assert isinstance(connection, FrameConnection)
        self.connections.append(connection)
        return self

    message_class = pb.StreamCommand

    def take(self, command: pb.StreamCommand) -> None:
        chunk = pb.StreamChunk(stream=command.attach.stream)
        chunk.response.text = command.attach.request_id
        self.connections[-1].post(pb.StreamBatch(chunks=[chunk]))

    def resume(self) -> None:
        pass

    def lose(self, error: Exception | None) -> None:
        pass


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[tuple[Server, FrameServer, Echo]]:
    listener = FrameServer("127.0.0.1", 0, max_message_bytes=MAX_BYTES)
    server, echo = Server("midstream.v1.Detokenizer", "127.0.0.1", 0, Progress()), Echo(listener)
    add_DetokenizerServicer_to_server(echo, server.grpc)
    add_FramesServicer_to_server(listener, server.grpc)
    await listener.start()
    await server.start()
    yield server, listener, echo
    await listener.close()
    await server.stop()


@contextlib.asynccontextmanager
async def running(link: Link) -> AsyncIterator[None]:
    task = asyncio.create_task(link.run())
    yield
    task.cancel()
    await asyncio.wait({task})


@contextlib.contextmanager
def blocked_port() -> Any:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound, but not listening
        yield closed.getsockname()[1]


async def text_of(link: Link) -> tuple[int, str]:
    (chunk,) = (await asyncio.wait_for(link.came.get(), WAIT_S)).chunks
    return chunk.stream, chunk.response.text


async def test_a_link_that_is_cancelled_while_it_breaks_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    begins = asyncio.Event()

    async def connect(*_: object, **__: object) -> FrameConnection:
        begins.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise TimeoutError from None
        raise AssertionError

    monkeypatch.setattr(frames, "connect", connect)
    async with serving() as (server, _, _):
        task = asyncio.create_task(Link(f"127.0.0.1:{server.port}").run())
        await begins.wait()
        task.cancel()
        done, _ = await asyncio.wait({task}, timeout=WAIT_S)
        assert done
        assert task.cancelled()


async def test_the_grpc_port_is_used_if_the_frames_port_is_blocked(caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as (server, _, _):
        with blocked_port() as port:
            link = Link(f"127.0.0.1:{server.port}", port)
            async with running(link):
                assert await text_of(link) == (1, "")
                assert link.num_offers == 3
                sent = [(number, chr(0x4E00 + number) * (number % 9) * 3_000) for number in range(2, 30)]
                for item in sent:
                    link._send(attach(*item))
                assert [await text_of(link) for _ in sent] == sent
                assert "using its gRPC port" in caplog.text
                # After the next break, the call is opened at once.
                caplog.clear()
                link.connection.fail(ConnectionResetError())
                assert await text_of(link) == (1, "")
                assert link.num_offers == 4
                assert "using its gRPC port" not in caplog.text


async def test_the_frames_port_is_used_again_once_it_can_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("midstream.rpc.frame_link._BLOCKED_S", 0.0)
    async with serving() as (server, _, echo):
        with blocked_port() as port:
            link = Link(f"127.0.0.1:{server.port}", port)
            async with running(link):
                assert await text_of(link) == (1, "")
                link._blocked_port = 0
                echo.connections[-1].fail(ConnectionResetError())
                assert await text_of(link) == (1, "")
                assert echo.connections[-1].peer_uid() is not None  # it is a Unix socket


@pytest.mark.parametrize("side", ["client", "server"])
async def test_the_end_of_a_connection_within_a_call_is_noticed_by_the_other_side(side: str) -> None:
    async with serving() as (server, listener, echo):
        with blocked_port() as port:
            link = Link(f"127.0.0.1:{server.port}", port)
            async with running(link):
                await text_of(link)
                link.lost.clear()
                first = echo.connections[-1]
                (link.connection if side == "client" else first).fail(ConnectionAbortedError())
                await asyncio.wait_for(link.lost.wait(), WAIT_S)
                await text_of(link)
                assert first not in listener.connections
                assert len(listener.connections) == 1


async def test_a_connection_within_a_call_ends_with_its_server_after_everything_was_sent() -> None:
    async with serving() as (server, listener, echo):
        with blocked_port() as port:
            link = Link(f"127.0.0.1:{server.port}", port)
            async with running(link):
                await text_of(link)
                texts = [(number, "x" * 50_000) for number in range(2, 12)]
                for number, text in texts:
                    echo.take(attach(number, text))
                await server.stop(drain=listener.close, drain_timeout_s=WAIT_S)
                assert [await text_of(link) for _ in texts] == texts


async def test_a_silent_peer_is_dropped_within_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving() as (server, _, echo):
        with blocked_port() as port:
            link = Link(f"127.0.0.1:{server.port}", port, silence_s=1.5)
            async with running(link):
                await text_of(link)
                link.lost.clear()
                # As if the process stood still: it reads nothing, although its sockets stay open.
                monkeypatch.setattr(echo.connections[-1], "data_received", lambda _: None)
                await asyncio.wait_for(link.lost.wait(), WAIT_S)


async def test_a_call_with_an_unknown_token_is_rejected() -> None:
    async with serving() as (server, _, echo), grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        with pytest.raises(OSError, match="rejected"):
            await frames.connect_within(channel, FramesOffer(token=bytes(16)), echo, max_message_bytes=MAX_BYTES)
        assert not echo.connections


@pytest.mark.parametrize("data", [b"\0" * 64, b"\xff" * 64, b"\0\0\0\1\3"])
async def test_garbage_within_a_call_ends_only_this_call(data: bytes) -> None:
    async with serving() as (server, listener, _), grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        link = Link(f"127.0.0.1:{server.port}")
        async with running(link):
            await text_of(link)
            call = cast("FramesAsyncStub", FramesStub(channel)).Tunnel()
            await call.write(FramesPiece(data=data))
            assert await asyncio.wait_for(call.read(), WAIT_S) is grpc.aio.EOF
            link._send(attach(2))
            assert await text_of(link) == (2, "")
            assert len(listener.connections) == 1


async def test_a_reader_that_stands_still_holds_back_what_is_written_within_a_call() -> None:
    async with serving() as (server, _, echo):
        with blocked_port() as port:
            link = Link(f"127.0.0.1:{server.port}", port)
            async with running(link):
                await text_of(link)
                out = echo.connections[-1]
                transport: Any = link.connection._transport
                reading, gate = transport._call.read, asyncio.Event()

                async def read() -> Any:
                    await gate.wait()
                    return await reading()

                transport._call.read = read
                num_sent = 0
                while out.is_writable:
                    num_sent += 1
                    echo.take(attach(num_sent, "x" * 20_000))
                    await asyncio.sleep(0)
                assert out._transport is not None
                assert out._transport.get_write_buffer_size() < 400 << 10
                gate.set()
                assert [(await text_of(link))[0] for _ in range(num_sent)] == [*range(1, num_sent + 1)]
                assert out.is_writable


async def test_a_link_is_not_noisy_while_its_peer_is_away(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="midstream.rpc.frame_link")
    link = Link("127.0.0.1:1")
    link._ask_for_frames = AsyncMock(side_effect=ConnectionRefusedError("the peer died"))  # type: ignore[method-assign]
    async with running(link):
        for _ in range(3):
            link.lost.clear()
            await asyncio.wait_for(link.lost.wait(), WAIT_S)
    assert not caplog.records
