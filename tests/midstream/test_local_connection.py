"""Connections between parts of one process: the same delivery, back-pressure and ends as over sockets."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextvars import ContextVar, copy_context

import pytest

from midstream.rpc import frames
from midstream.rpc.connection import Connection
from midstream.rpc.frames import FrameConnection, FrameServer, Pump, local_servers
from midstream.rpc.local_connection import LocalConnection
from protos import detokenizer_pb2 as pb
from protos.frames_pb2 import FramesOffer

MAX_BYTES = 1 << 20
WAIT_S = 240
part: ContextVar[str] = ContextVar("part", default="")


class Peer:
    """Keeps what it is told, in order."""

    message_class = pb.StreamBatch

    def __init__(self) -> None:
        self.seen: list[object] = []
        self.parts: set[str] = set()
        self.lost = asyncio.Event()
        self.on_take: Callable[[pb.StreamBatch], None] = lambda _: None
        self.on_resume: Callable[[], None] = lambda: None

    def take(self, message: pb.StreamBatch) -> None:
        self.parts.add(part.get())
        self.seen.append(message)
        self.on_take(message)

    def resume(self) -> None:
        self.on_resume()

    def lose(self, error: Exception | None) -> None:
        self.parts.add(part.get())
        self.seen.append(error if error is None else str(error))
        self.lost.set()


def batch(number: int) -> pb.StreamBatch:
    return pb.StreamBatch(chunks=[pb.StreamChunk(stream=number)])


def numbers(seen: list[object]) -> list[int]:
    return [message.chunks[0].stream for message in seen if isinstance(message, pb.StreamBatch)]


@contextlib.asynccontextmanager
async def serving(local: list[FrameServer] | None) -> AsyncIterator[FrameServer]:
    token = local_servers.set(local)
    server = FrameServer("127.0.0.1", 0, max_message_bytes=MAX_BYTES)
    context = copy_context()
    context.run(part.set, "server")
    await asyncio.create_task(server.start(), context=context)
    try:
        yield server
    finally:
        await server.close()
        local_servers.reset(token)


async def connect(offer: FramesOffer, peer: Peer) -> Connection:
    return await frames.connect(offer, "127.0.0.1:1", peer, max_message_bytes=MAX_BYTES)


@contextlib.asynccontextmanager
async def connected() -> AsyncIterator[tuple[Connection, Peer, Connection, Peer]]:
    """Yield both ends of a local connection and their handlers, that of the server last."""
    here, there = Peer(), Peer()
    accepted: list[Connection] = []

    def accept(connection: Connection) -> Peer:
        accepted.append(connection)
        return there

    async with serving([]) as server:
        part.set("client")
        yield await connect(server.offer(accept), here), here, accepted[0], there


async def turns(count: int = 3) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_only_parts_of_one_process_connect_without_a_socket() -> None:
    async with serving([]) as server:
        assert isinstance(await connect(server.offer(lambda _: Peer()), Peer()), LocalConnection)
        assert len(server.connections) == 1
        token = local_servers.set([])  # another process
        assert isinstance(await connect(server.offer(lambda _: Peer()), Peer()), FrameConnection)
        local_servers.reset(token)
    async with serving(None) as server:
        assert isinstance(await connect(server.offer(lambda _: Peer()), Peer()), FrameConnection)


async def test_a_token_is_valid_for_one_connection() -> None:
    async with serving([]) as server:
        offer = server.offer(lambda _: Peer())
        await connect(offer, Peer())
        with pytest.raises(OSError, match="rejected"):
            await connect(offer, Peer())
        assert len(server.connections) == 1


async def test_messages_are_passed_as_they_are_in_a_later_iteration_and_in_the_part_of_their_reader() -> None:
    async with connected() as (out, here, back, there):
        sent = [batch(1), batch(2)]
        for message in sent:
            out.send(message)
        back.post(batch(3))
        assert not there.seen
        await turns()
        assert [one is other for one, other in zip(there.seen, sent, strict=True)] == [True, True]
        assert numbers(here.seen) == [3]
        assert (here.parts, there.parts) == ({"client"}, {"server"})


async def test_messages_that_were_sent_together_are_read_together() -> None:
    async with connected() as (out, _, back, there):
        back.on_read = lambda: there.seen.append("read")
        out.send(batch(1))
        out.send(batch(2))
        await turns()
        out.send(batch(3))
        await turns()
        assert [item for item in there.seen if item == "read"] == ["read", "read"]
        assert there.seen[2] == "read"


async def test_a_writer_waits_until_its_peer_has_read() -> None:
    async with connected() as (_, here, back, there):
        left = iter(range(1, 101))
        pump = Pump(back, lambda: None if (number := next(left, None)) is None else batch(number))
        there.on_resume = pump.run
        pump.run()
        assert not back.is_writable
        assert next(left) == 5  # four messages are unread
        assert not here.seen
        async with asyncio.timeout(WAIT_S):
            while len(here.seen) < 99:  # noqa: ASYNC110 (they arrive in this process)
                await asyncio.sleep(0)
        assert numbers(here.seen) == [*range(1, 5), *range(6, 101)]
        assert back.is_writable


async def test_a_connection_that_is_closed_delivers_what_was_sent_before() -> None:
    async with connected() as (out, here, back, there):
        out.send(batch(1))
        out.close()
        back.send(batch(2))  # the other end does not know yet
        out.send(batch(3))
        await turns()
        assert (numbers(there.seen), there.seen[1:]) == ([1], [None])
        assert here.seen == [None]
        assert not out.is_open
        assert not back.is_open
        back.fail(RuntimeError("late"))
        await turns()
        assert (len(there.seen), len(here.seen)) == (2, 1)


async def test_a_failure_is_told_to_the_end_that_failed_and_drops_what_is_unread() -> None:
    async with connected() as (out, here, back, there):
        out.send(batch(1))
        back.send(batch(2))
        out.fail(RuntimeError("broken"))
        await turns()
        assert (here.seen, there.seen) == (["broken"], [None])


async def test_an_error_of_a_handler_ends_only_its_own_connection() -> None:
    async with connected() as (out, here, _, there):

        def fail(message: pb.StreamBatch) -> None:
            raise ValueError("bad command")

        there.on_take = fail
        out.send(batch(1))
        out.send(batch(2))
        await turns()
        assert (numbers(there.seen), there.seen[1:]) == ([1], ["bad command"])
        assert here.seen == [None]


async def test_a_server_that_closes_has_sent_everything_and_accepts_no_more() -> None:
    async with connected() as (_, here, back, _there):
        for number in range(1, 4):
            back.send(batch(number))
        server = (local_servers.get() or [])[0]
        offer = server.offer(lambda _: Peer())
        await server.close()
        assert not server.connections
        assert numbers(here.seen) == [1, 2, 3]
        assert here.seen[3] is None
        with pytest.raises(ConnectionRefusedError):
            await connect(offer, Peer())
