"""Frames over real sockets: delivery, authentication, and slow or silent peers."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import socket
import struct
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from midstream.rpc import frames
from midstream.rpc.connection import Connection
from midstream.rpc.frames import FrameConnection, FrameServer, Pump
from midstream.security.tls import Tls
from protos import detokenizer_pb2 as pb
from protos.frames_pb2 import FramesOffer
from tests.faults.certificates import Authority

WAIT_S = 240.0
MAX_BYTES = 1 << 20


class Peer:
    """Collects received messages, and echoes them on request."""

    def __init__(self, connection: Connection | None = None, *, echoes: bool = False) -> None:
        self.connection = connection
        self.messages: list[pb.StreamBatch] = []
        self.error: Exception | None = None
        self.lost = asyncio.Event()
        self.came = asyncio.Event()
        self.on_resume: Callable[[], None] = lambda: None
        self._echoes = echoes

    message_class = pb.StreamBatch

    def take(self, message: pb.StreamBatch) -> None:
        self.messages.append(message)
        self.came.set()
        if self._echoes and self.connection is not None:
            self.connection.post(message)

    def resume(self) -> None:
        self.on_resume()

    def lose(self, error: Exception | None) -> None:
        assert not self.lost.is_set()
        self.error = error
        self.lost.set()

    async def until(self, count: int) -> list[pb.StreamBatch]:
        async with asyncio.timeout(WAIT_S):
            while len(self.messages) < count:
                self.came.clear()
                await self.came.wait()
        return self.messages


def batch(number: int, text: str = "") -> pb.StreamBatch:
    made = pb.StreamBatch()
    item = made.chunks.add(stream=number)
    item.response.text = text
    return made


@contextlib.asynccontextmanager
async def serving(tls: Tls | None = None) -> AsyncIterator[FrameServer]:
    server = FrameServer("127.0.0.1", 0, max_message_bytes=MAX_BYTES, tls=tls)
    await server.start()
    try:
        yield server
    finally:
        await server.close()


def without_unix(offer: FramesOffer) -> FramesOffer:
    return FramesOffer(port=offer.port, token=offer.token)


async def connect(
    offer: FramesOffer, peer: Peer, *, tls: Tls | None = None, keepalive_s: float = 10.0, timeout_s: float = 15.0
) -> FrameConnection:
    connection = await frames.connect(
        offer, "127.0.0.1:1", peer, max_message_bytes=MAX_BYTES, tls=tls, keepalive_s=keepalive_s, timeout_s=timeout_s
    )
    assert isinstance(connection, FrameConnection)
    return connection


@pytest.mark.parametrize("is_local", [True, False])
async def test_messages_arrive_complete_and_in_order(is_local: bool) -> None:
    async with serving() as server:
        offer = server.offer(lambda connection: Peer(connection, echoes=True))
        here = Peer()
        connection = await connect(offer if is_local else without_unix(offer), here)
        assert (connection.peer_uid() is not None) == is_local
        sent = [batch(number, "x" * (number % 7) * 4_000) for number in range(1, 40)]
        for message in sent:
            connection.post(message)
        assert await here.until(len(sent)) == sent
        connection.close()
        await asyncio.wait_for(here.lost.wait(), WAIT_S)
        assert here.error is None


@settings(max_examples=60)
@given(st.lists(st.binary(max_size=40), max_size=6), st.lists(st.integers(1, 12), min_size=1))
def test_frames_are_the_same_however_their_bytes_are_cut(bodies: list[bytes], cuts: list[int]) -> None:
    async def run() -> list[object]:
        peer = Peer()
        peer.message_class = Mock(FromString=bytes)
        connection = FrameConnection(MAX_BYTES, peer)
        connection.open(welcome=False)
        data = b"".join(struct.pack(">IB", len(body) + 1, frames.Kind.MESSAGE) + body for body in bodies)
        at = number = 0
        while at < len(data):
            size = cuts[number % len(cuts)]
            connection.data_received(data[at : at + size])
            at, number = at + size, number + 1
        connection.connection_lost(None)
        return list(peer.messages)

    assert asyncio.run(run()) == bodies


async def test_a_token_is_valid_for_one_connection() -> None:
    async with serving() as server:
        offer = server.offer(lambda _: Peer())
        await connect(offer, Peer())
        for wrong in (offer.token, b"", b"x" * 16):
            with pytest.raises(OSError, match="rejected"):
                await connect(FramesOffer(port=offer.port, unix_name=offer.unix_name, token=wrong), Peer())
        assert len(server.connections) == 1


async def test_a_token_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "_TOKEN_S", 0.0)
    async with serving() as server:
        with pytest.raises(OSError, match="rejected"):
            await connect(server.offer(lambda _: Peer()), Peer())


@pytest.mark.parametrize("seen_by", ["server", "client"])
@pytest.mark.parametrize(("uid", "is_local"), [(os.geteuid(), True), (0, True), (os.geteuid() + 1, False)])
async def test_processes_of_the_same_user_use_a_unix_socket_and_others_tcp(
    monkeypatch: pytest.MonkeyPatch, uid: int, *, is_local: bool, seen_by: str
) -> None:
    real, shown = FrameConnection.peer_uid, []

    async with serving() as server:

        def peer_uid(connection: FrameConnection) -> int | None:
            if real(connection) is None or (connection in server._unknown) != (seen_by == "server"):
                return real(connection)
            shown.append(uid)
            return uid

        monkeypatch.setattr(FrameConnection, "peer_uid", peer_uid)
        connection = await connect(server.offer(lambda _: Peer()), Peer())
        assert shown == [uid]
        assert (real(connection) is not None) == is_local
        assert len(server.connections) == 1


async def test_connections_without_a_valid_hello_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "_HELLO_S", 0.2)
    async with serving() as server:
        for data in (
            b"",  # an empty frame
            b"GET / HTTP/1.1\r\n\r\n",
            b"\xff" * 64,
            struct.pack(">IB", 1 << 30, frames.Kind.HELLO),
            struct.pack(">IB", 1, frames.Kind.MESSAGE),
            struct.pack(">IB", 0, frames.Kind.HELLO),
            struct.pack(">IB", 17, frames.Kind.WELCOME) + b"x" * 16,
        ):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(data)
            with contextlib.suppress(ConnectionResetError):
                assert await asyncio.wait_for(reader.read(), WAIT_S) == b"", data
            writer.close()
        assert not server.connections


async def test_a_welcome_does_not_open_a_connection_that_presented_no_token() -> None:
    async with serving() as server:
        connection, transport = server._connect(), Mock(asyncio.Transport)
        connection.connection_made(transport)
        connection.data_received(struct.pack(">IB", 1, frames.Kind.WELCOME))
        assert not connection.is_open
        transport.abort.assert_called_once()
        connection.connection_lost(None)


@pytest.mark.parametrize(
    "data",
    [
        struct.pack(">IB", MAX_BYTES + 2, frames.Kind.MESSAGE),
        struct.pack(">IB", 0, frames.Kind.MESSAGE),
        struct.pack(">IB", 1, 99),
        struct.pack(">IB", 1, frames.Kind.HELLO),
        struct.pack(">IB", 1, frames.Kind.WELCOME),
        struct.pack(">IB", 5, frames.Kind.MESSAGE) + b"\xff\xff\xff\xff",  # not a StreamBatch
    ],
)
async def test_garbage_ends_only_its_own_connection(data: bytes) -> None:
    async with serving() as server:
        good, bad = Peer(), Peer()
        first = await connect(server.offer(lambda connection: Peer(connection, echoes=True)), good)
        second = await connect(server.offer(lambda connection: Peer(connection, echoes=True)), bad)
        assert second._transport is not None
        second._transport.write(data)
        await asyncio.wait_for(bad.lost.wait(), WAIT_S)
        first.post(batch(1))
        await good.until(1)


async def test_a_peer_that_does_not_read_holds_back_batches_and_gets_all_of_them_later() -> None:
    async with serving() as server:
        here = Peer()
        sources: list[tuple[Connection, Pump]] = []
        left = iter(range(2000))

        def accept(connection: Connection) -> Peer:
            def collect() -> pb.StreamBatch | None:
                number = next(left, None)
                return batch(number, "x" * 2000) if number is not None else None

            peer = Peer()
            sources.append((connection, pump := Pump(connection, collect)))
            peer.on_resume = pump.run
            return peer

        connection = await connect(server.offer(accept), here)
        transport = connection._transport
        assert transport is not None
        transport.pause_reading()
        out, pump = sources[0]
        pump.wake()
        async with asyncio.timeout(WAIT_S):
            while out.is_writable:  # noqa: ASYNC110 (it becomes full in this process)
                await asyncio.sleep(0)
        assert isinstance(out, FrameConnection)
        assert out._transport is not None
        assert out._transport.get_write_buffer_size() < (256 << 10) + 4096
        assert next(left) < 1900
        transport.resume_reading()
        numbers = [message.chunks[0].stream for message in await here.until(1999)]
        assert numbers == sorted(numbers)


async def test_a_silent_peer_is_dropped_and_a_responsive_one_kept() -> None:
    async with serving() as server:
        living, silent, theirs = Peer(), Peer(), Peer()
        await connect(server.offer(lambda _: Peer()), living, keepalive_s=0.05, timeout_s=6)
        connection = await connect(server.offer(lambda _: theirs), silent, keepalive_s=0.05, timeout_s=6)
        assert connection._transport is not None
        connection._transport.pause_reading()  # so that the client receives nothing, as if it hung
        await asyncio.wait_for(silent.lost.wait(), WAIT_S)
        assert isinstance(silent.error, TimeoutError)
        await asyncio.wait_for(theirs.lost.wait(), WAIT_S)
        assert not living.lost.is_set()


class Clock:
    """A stand-in for an event loop with a settable time and a single timer."""

    def __init__(self) -> None:
        self.now = self.due = 0.0
        self.callback: Callable[[], None] = lambda: None

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, callback: Callable[[], None]) -> Mock:
        self.due, self.callback = when, callback
        return Mock()

    def call_later(self, delay: float, callback: Callable[[], None]) -> Mock:
        return self.call_at(self.now + delay, callback)


@pytest.mark.parametrize("last_heard", [0.0, 1.5, 9.9])
async def test_a_silent_peer_is_dropped_at_its_time_limit(last_heard: float) -> None:
    connection, clock = FrameConnection(MAX_BYTES, Peer(), keepalive_s=10, timeout_s=15), Clock()
    connection._loop = clock  # type: ignore[assignment]
    connection.connection_made(Mock())
    connection.open(welcome=False)
    clock.now = last_heard
    connection.data_received(struct.pack(">IB", 1, frames.Kind.PONG))
    while connection.is_open:
        clock.now = clock.due
        clock.callback()
    assert clock.now == pytest.approx(last_heard + 15)


async def test_a_server_that_closes_has_sent_everything() -> None:
    here = Peer()
    async with serving() as server:

        def accept(connection: Connection) -> Peer:
            def send() -> None:
                for _ in range(100):
                    connection.send(batch(1, "x" * 9000))

            asyncio.get_running_loop().call_soon(send)
            return Peer()

        await connect(server.offer(accept), here)
        await asyncio.sleep(0)
    assert len(await here.until(100)) == 100
    await asyncio.wait_for(here.lost.wait(), WAIT_S)


async def test_tls_requires_certificates_of_the_authority(tmp_path: Path) -> None:
    authority, stranger = Authority(tmp_path / "own"), Authority(tmp_path / "other")

    def shown(by: Authority, name: str, trusted: Authority) -> Tls:
        identity = by.issue(name)
        return Tls(identity.cert, identity.key, trusted.ca, require_client_cert=True)

    async with serving(shown(authority, "scheduler", authority)) as server:

        def offer() -> FramesOffer:
            return without_unix(server.offer(lambda connection: Peer(connection, echoes=True)))

        here = Peer()
        connection = await connect(offer(), here, tls=shown(authority, "detokenizer", authority))
        connection.post(batch(1, "text"))
        assert await here.until(1) == [batch(1, "text")]
        for wrong in (
            shown(stranger, "mallory", authority),  # not signed by the authority
            shown(authority, "detokenizer", stranger),  # trusts another authority
            Tls(ca=authority.ca),  # has no certificate
            None,
        ):
            with pytest.raises(OSError):  # noqa: PT011 (many kinds of it)
                await connect(offer(), Peer(), tls=wrong)
        assert len(server.connections) == 1


async def test_a_connection_that_is_accepted_while_its_server_closes_is_closed() -> None:
    """asyncio passes the transport of an accepted connection to its protocol only in a later iteration."""
    server = FrameServer("127.0.0.1", 0, max_message_bytes=1 << 20)
    await server.start()
    before = server._connect()
    await server.close()
    for connection in (before, server._connect()):
        transport = Mock(asyncio.Transport)
        connection.connection_made(transport)
        transport.abort.assert_called_once()
        connection.connection_lost(None)


async def test_a_connection_without_a_transport_is_closed_when_the_server_closes() -> None:
    server = FrameServer("127.0.0.1", 0, max_message_bytes=1024)
    await server.start()
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        await asyncio.sleep(0)
        await asyncio.sleep(0)  # the connection is accepted in this iteration, and gets its transport in the next one
        await server.close()
        gc.collect()  # a socket that was not closed causes a warning, which fails the test
        client.settimeout(WAIT_S)
        with contextlib.suppress(ConnectionResetError):
            assert client.recv(1) == b""
