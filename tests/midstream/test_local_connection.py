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


async def test_messages_are_passed_as_they_are_in_the_part_of_their_reader() -> None:
    async with connected() as (out, here, back, there):
        sent = [batch(1), batch(2)]
        out.send(sent[0])
        assert there.seen == sent[:1]
        out.post(sent[1])
        back.post(batch(3))
        assert (there.seen, here.seen) == (sent[:1], [])
        await turns()
        assert [one is other for one, other in zip(there.seen, sent, strict=True)] == [True, True]
        assert numbers(here.seen) == [3]
        assert (here.parts, there.parts) == ({"client"}, {"server"})


async def test_messages_that_were_posted_together_are_read_together_and_none_overtakes_another() -> None:
    async with connected() as (out, _, back, there):
        back.on_read = lambda: there.seen.append("read")
        out.post(batch(1))
        out.send(batch(2))
        assert not there.seen
        await turns()
        out.send(batch(3))
        assert numbers(there.seen) == [1, 2, 3]
        assert (there.seen[2], there.seen[4:]) == ("read", ["read"])


async def test_an_answer_that_is_sent_to_a_caller_is_handled_after_its_call() -> None:
    async with connected() as (out, here, back, there):
        there.on_take = back.send

        def take(message: pb.StreamBatch) -> None:
            here.seen.append("begin")
            if message.chunks[0].stream < 3:
                out.send(batch(message.chunks[0].stream + 1))
            here.seen.append("end")

        here.on_take = take
        out.send(batch(1))
        await turns(6)
        assert numbers(here.seen) == numbers(there.seen) == [1, 2, 3]
        assert [item for item in here.seen if isinstance(item, str)] == ["begin", "end"] * 3


async def test_a_writer_waits_until_its_peer_has_read() -> None:
    async with connected() as (_, here, back, there):
        left = iter(range(1, 101))
        pump = Pump(back, lambda: None if (number := next(left, None)) is None else batch(number))
        there.on_resume = pump.run
        back.post(batch(0))  # it has not been read, so neither is what is sent after it
        pump.run()
        assert not back.is_writable
        assert next(left) == 64  # as many messages are unread
        assert not here.seen
        async with asyncio.timeout(WAIT_S):
            while len(here.seen) < 100:  # noqa: ASYNC110 (they arrive in this process)
                await asyncio.sleep(0)
        assert numbers(here.seen) == [*range(64), *range(65, 101)]
        assert back.is_writable


async def test_a_connection_that_is_closed_delivers_what_was_sent_before() -> None:
    async with connected() as (out, here, back, there):
        out.post(batch(1))
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
        out.post(batch(1))
        back.post(batch(2))
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
            back.post(batch(number))
        server = (local_servers.get() or [])[0]
        offer = server.offer(lambda _: Peer())
        await server.close()
        assert not server.connections
        assert numbers(here.seen) == [1, 2, 3]
        assert here.seen[3] is None
        with pytest.raises(ConnectionRefusedError):
            await connect(offer, Peer())
