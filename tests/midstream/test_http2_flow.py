"""Flow control, fairness and limits of the gRPC server, frame by frame and without a socket."""

from __future__ import annotations

import asyncio
import gc
import gzip
import re
import socket
import struct
import tracemalloc
import zlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import hpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from midstream.rpc.http2 import GrpcServer, wire
from midstream.rpc.http2 import connection as connection_module
from midstream.rpc.http2.call import Call
from midstream.rpc.http2.connection import _auth_context
from midstream.rpc.http2.limits import Budget
from midstream.rpc.http2.wire import ErrorCode, Setting
from tests.midstream.http2_peer import HEADERS, Methods, Peer, framed, goaway_of, messages_of, turns

WINDOW = wire.DEFAULT_WINDOW


def serving(**limits: Any) -> tuple[GrpcServer, Methods]:
    server, methods = GrpcServer(**limits), Methods()
    methods.add_to(server)
    return server, methods


async def test_all_that_one_turn_of_the_loop_says_is_one_write() -> None:
    server, methods = serving()
    peer = Peer(server)
    streams = [peer.call(b"%d" % number, "Wait") for number in range(4)]
    await turns()
    peer.frames()
    methods.release.set()
    await turns()
    assert len(peer.transport.writes) == 1
    frames = peer.frames()
    assert [messages_of(frames, stream) for stream in streams] == [framed(b"%d" % number) for number in range(4)]
    assert [peer.headers(frame).get("grpc-status") for frame in frames if frame[0] == wire.HEADERS] == [None, "0"] * 4


async def test_calls_are_freed_at_their_end_without_the_collector() -> None:
    def calls() -> list[Call]:
        # isinstance() would call into other modules' proxies
        return [item for item in gc.get_objects() if issubclass(type(item), Call)]

    earlier = {id(call): call for call in calls()}  # those of other tests in this process

    def num_calls() -> int:
        return sum(id(call) not in earlier for call in calls())

    server, methods = serving()
    peer = Peer(server)
    methods.release.set()
    gc.disable()
    try:
        for name in ("Echo", "Repeat", "Wait"):
            peer.call(b"a", name)
        await turns()
        methods.release.clear()
        for name in ("Wait", "Hold"):
            peer.send(wire.RST_STREAM, 0, peer.call(b"a", name), struct.pack(">L", ErrorCode.CANCEL))
        stream = peer.call(b"a", "Wait")
        await turns()
        assert methods.started[-1] == b"a"
        assert num_calls() == 1
        peer.send(wire.RST_STREAM, 0, stream, struct.pack(">L", ErrorCode.CANCEL))
        await turns()
        assert num_calls() == 0
    finally:
        gc.enable()


async def test_the_bytes_of_a_call_are_freed_at_its_end() -> None:
    server, _ = serving()
    peer = Peer(server)
    part = struct.pack(">BL", 0, 1 << 20) + bytes(60_000)
    gc.disable()
    tracemalloc.start()
    try:
        for _ in range(32):
            stream = peer.begin("Hold")
            for at in range(0, len(part), wire.DEFAULT_FRAME):
                peer.send(wire.DATA, 0, stream, part[at : at + wire.DEFAULT_FRAME])
            await turns()
            peer.send(wire.RST_STREAM, 0, stream, struct.pack(">L", ErrorCode.CANCEL))
            await turns()
        held, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        gc.enable()
    assert most > len(part)
    assert held < 8 * len(part)


async def test_a_message_waits_for_the_windows_of_its_stream_and_connection() -> None:
    server, _ = serving()
    peer = Peer(server)
    peer.send(wire.SETTINGS, 0, 0, struct.pack(">HL", Setting.INITIAL_WINDOW_SIZE, 20_000))
    message = bytes(range(250)) * 240  # 60,000 bytes, plus 5 for the message's header
    stream = peer.call(message)
    await turns()
    frames = peer.frames()
    received = messages_of(frames, stream)
    assert len(received) == 20_000
    assert not [frame for frame in frames if frame[0] == wire.HEADERS and frame[1] & wire.END_STREAM]
    peer.send(wire.WINDOW_UPDATE, 0, stream, struct.pack(">L", 1 << 20))
    await turns()
    frames = peer.frames()
    assert received + messages_of(frames, stream) == framed(message)
    assert frames[-1][1] & wire.END_STREAM
    assert max(len(body) for kind, _, _, body in frames if kind == wire.DATA) == wire.DEFAULT_FRAME
    other = peer.call(bytes(10_000))
    await turns()
    assert len(messages_of(peer.frames(), other)) == WINDOW - 60_005
    peer.send(wire.WINDOW_UPDATE, 0, 0, struct.pack(">L", 1 << 20))
    await turns()
    assert len(messages_of(peer.frames(), other)) == 10_005 - (WINDOW - 60_005)


async def test_calls_share_a_small_window_in_turn() -> None:
    server, methods = serving()
    peer = Peer(server)
    frame = wire.DEFAULT_FRAME
    one, two = peer.call(bytes(60_000), "Wait"), peer.call(bytes(60_000), "Wait")
    await turns()
    methods.release.set()
    await turns()
    assert len(messages_of(frames := peer.frames(), one)) == 60_005
    assert len(messages_of(frames, two)) == WINDOW - 60_005
    three = peer.call(bytes(60_000))
    await turns()
    peer.send(wire.WINDOW_UPDATE, 0, 0, struct.pack(">L", 4 * frame))
    await turns()
    frames = peer.frames()
    assert [number for kind, _, number, _ in frames if kind == wire.DATA] == [two, three, two, three]
    peer.send(wire.SETTINGS, 0, 0, struct.pack(">HL", Setting.INITIAL_WINDOW_SIZE, 0))
    peer.send(wire.WINDOW_UPDATE, 0, 0, struct.pack(">L", 1 << 20))
    await turns()
    assert not messages_of(peer.frames(), two)  # a smaller initial window also applies to open streams
    peer.send(wire.SETTINGS, 0, 0, struct.pack(">HL", Setting.INITIAL_WINDOW_SIZE, WINDOW))
    await turns()
    assert len(messages_of(peer.frames(), three)) == 60_005 - 2 * frame


async def test_updates_of_windows_serve_only_calls_that_can_send() -> None:
    server, _ = serving()
    peer = Peer(server)
    peer.send(wire.SETTINGS, 0, 0, struct.pack(">HL", Setting.INITIAL_WINDOW_SIZE, 0))
    streams = [peer.call(b"x" * 10) for _ in range(20)]
    await turns(40)
    peer.frames()
    assert not peer.connection._blocked  # each call's own window is exhausted
    update = wire.window_update(streams[3], 4)
    peer.connection.data_received(wire.window_update(0, 1) * 100 + update * 2)
    await turns()
    assert [frame[2:] for frame in peer.frames()] == [(streams[3], framed(b"x" * 10)[:8])]
    assert not peer.connection._blocked
    peer.send(wire.WINDOW_UPDATE, 0, streams[3], struct.pack(">L", 100))
    await turns()
    assert messages_of(peer.frames(), streams[3]) == framed(b"x" * 10)[8:]


async def test_many_updates_of_a_connection_are_one_turn() -> None:
    server, methods = serving()
    peer = Peer(server)
    streams = [peer.call(bytes(50_000), "Wait") for _ in range(5)]
    await turns()
    methods.release.set()
    await turns()
    peer.frames()
    assert len(peer.connection._blocked) == 4  # the connection's window is exhausted
    peer.connection.data_received(wire.window_update(0, 1) * 100)
    await turns()
    one = [frame for frame in peer.frames() if frame[0] == wire.DATA]
    peer.connection.data_received(wire.window_update(0, 1) * 100)
    await turns()
    two = [frame for frame in peer.frames() if frame[0] == wire.DATA]
    assert [len(frame[3]) for frame in one + two] == [100, 100]
    assert one[0][2] != two[0][2]  # the next in turn
    assert {one[0][2], two[0][2]} < set(streams)


@pytest.mark.parametrize("num_calls_before", [0, 1])
async def test_a_client_may_reduce_the_size_of_the_header_table(num_calls_before: int) -> None:
    server, _ = serving()
    peer = Peer(server)
    for number in range(num_calls_before + 1):
        if number == num_calls_before:
            peer.send(wire.SETTINGS, 0, 0, struct.pack(">HL", 1, 0))
            peer._decoder.max_allowed_table_size = 0  # rejects header blocks until the server reduces it
        peer.call(b"x")
        await turns()
        blocks = [peer.headers(frame) for frame in peer.frames() if frame[0] == wire.HEADERS]
        assert [block.get("grpc-status") for block in blocks] == [None, "0"]


async def test_the_last_initial_window_of_a_frame_applies() -> None:
    server, _ = serving()
    peer = Peer(server)
    stream = peer.begin("Hold")
    peer.send(wire.WINDOW_UPDATE, 0, stream, struct.pack(">L", 10))
    # If the first of the sizes were applied, the window would be too large.
    sizes = [(Setting.INITIAL_WINDOW_SIZE, size) for size in (wire.MAX_WINDOW, 0, 1000)]
    peer.connection.data_received(wire.settings(sizes))
    assert peer.connection.calls[stream].window == 1010
    peer.connection.data_received(wire.settings([(Setting.INITIAL_WINDOW_SIZE, 1 << 31), *sizes]))
    await turns()
    assert (goaway_of(peer.frames()) or (0, 0))[1] == ErrorCode.FLOW_CONTROL_ERROR


async def test_a_write_waits_while_the_socket_is_full() -> None:
    server, _ = serving()
    peer = Peer(server)
    peer.connection.pause_writing()
    stream = peer.call(b"x", "Repeat")
    await turns(40)
    assert not messages_of(peer.frames(), stream)
    peer.connection.resume_writing()
    await turns(40)
    assert messages_of(peer.frames(), stream) == framed(b"x") * 10


@pytest.mark.parametrize("name", ["not POST", "an unknown method", "an invalid timeout"])
async def test_a_client_that_does_not_read_why_its_calls_fail_is_disconnected(name: str) -> None:
    server, _ = serving(max_concurrent_streams=100)
    peer = Peer(server)
    fields = STATUSES[name][0]
    headers = (dict(HEADERS) | dict(fields if fields[0][0] else [(":path", "/no.Such/Method")])).items()
    peer.connection.pause_writing()
    for _ in range(1100):
        peer.send_headers(headers, ends=True)
        await turns(2)
    await turns()
    frames = peer.frames()
    assert len([frame for frame in frames if frame[0] == wire.HEADERS]) == 1100
    assert goaway_of(frames) is None
    peer.send_headers(headers, ends=True)
    await turns()
    assert (goaway_of(peer.frames()) or (0, 0))[1] == ErrorCode.ENHANCE_YOUR_CALM
    assert peer.transport.is_closed


async def test_a_client_that_does_not_read_refusals_is_disconnected() -> None:
    server, _ = serving(max_concurrent_streams=1)
    peer = Peer(server)
    peer.begin("Hold")
    peer.connection.pause_writing()
    for _ in range(1001):
        peer.begin("Hold")
        await turns(2)
    assert not peer.transport.is_closed
    peer.begin("Hold")
    await turns()
    assert (goaway_of(peer.frames()) or (0, 0))[1] == ErrorCode.ENHANCE_YOUR_CALM
    assert peer.transport.is_closed


async def test_an_unread_call_holds_one_window_and_a_read_one_its_message() -> None:
    server, methods = serving(max_receive_bytes=1 << 20)
    peer = Peer(server)
    stream, data = peer.begin("Hold"), framed(bytes(200_000))
    peer.send(wire.DATA, 0, stream, data[:16_384])
    await turns()
    for at in range(16_384, 65_535, 16_384):
        peer.send(wire.DATA, 0, stream, data[at : min(at + 16_384, 65_535)])
    await turns()
    assert [frame for frame in peer.frames() if frame[0] == wire.WINDOW_UPDATE and frame[2] == stream] == []
    methods.release.set()
    at, room = 65_535, 0
    for _ in range(100):
        await turns()
        updates = [frame for frame in peer.frames() if frame[0] == wire.WINDOW_UPDATE and frame[2] == stream]
        room += sum(int.from_bytes(frame[3], "big") for frame in updates)
        size = min(room, 16_384, len(data) - at)
        if size:
            peer.send(wire.DATA, 0, stream, data[at : at + size])
            at, room = at + size, room - size
    assert at == len(data)
    peer.say(stream, b"abc")
    await turns()
    assert messages_of(peer.frames(), stream) == framed(b"200000,3")


async def test_data_beyond_the_window_resets_the_stream() -> None:
    server, _ = serving()
    peer = Peer(server)
    stream = peer.begin("Hold")
    for _ in range(5):
        peer.send(wire.DATA, 0, stream, bytes(16_384))
    await turns()
    code = struct.pack(">L", ErrorCode.FLOW_CONTROL_ERROR)
    assert (wire.RST_STREAM, 0, stream, code) in peer.frames()
    assert not peer.connection.calls


async def test_calls_start_in_turn_of_their_connections() -> None:
    server, methods = serving()
    busy, other = Peer(server), Peer(server)
    for number in range(100):
        busy.call(b"%d" % number)
    other.call(b"other")
    await turns(5)
    assert 0 < methods.started.index(b"other") < 8
    await turns(100)
    assert len(methods.started) == 101


async def test_a_burst_of_calls_is_parsed_over_several_turns() -> None:
    server, methods = serving()
    peer = Peer(server)
    encoder, headers = hpack.Encoder(), list(HEADERS)
    data = b"".join(
        wire.frame(wire.HEADERS, wire.END_HEADERS, stream, encoder.encode(headers))
        + wire.frame(wire.DATA, wire.END_STREAM, stream, framed(b"%d" % stream))
        for stream in range(1, 401, 2)
    )
    peer.connection.data_received(data)
    assert len(peer.connection.calls) < 50
    assert not peer.transport.reads
    await turns(300)
    assert methods.started == [b"%d" % stream for stream in range(1, 401, 2)]
    assert peer.transport.reads


async def test_a_reset_cancels_the_method() -> None:
    server, methods = serving()
    peer = Peer(server)
    stream = peer.call(b"a", "Wait")
    await turns()
    peer.send(wire.RST_STREAM, 0, stream, struct.pack(">L", ErrorCode.CANCEL))
    await turns()
    assert methods.canceled == [b"a"]
    assert not [frame for frame in peer.frames() if frame[0] == wire.HEADERS]
    peer.call(b"b", "Wait")
    await turns()
    peer.connection.connection_lost(None)
    await turns()
    assert methods.canceled == [b"a", b"b"]


async def test_a_call_that_is_reset_before_it_starts_leaves_room_for_others() -> None:
    server, _ = serving(max_concurrent_streams=2)
    peer, encoder = Peer(server), hpack.Encoder()
    for stream in (1, 3, 5):
        headers = wire.frame(wire.HEADERS, wire.END_HEADERS, stream, encoder.encode(list(HEADERS)))
        peer.connection.data_received(headers + wire.rst_stream(stream, ErrorCode.CANCEL))
        await turns()
    assert peer.connection.num_running == 0
    assert not peer.frames()


async def test_more_calls_than_allowed_are_refused() -> None:
    server, _ = serving(max_concurrent_streams=2)
    peer = Peer(server)
    streams = [peer.call(b"x", "Wait") for _ in range(3)]
    await turns()
    refused = struct.pack(">L", ErrorCode.REFUSED_STREAM)
    assert [frame[2:] for frame in peer.frames() if frame[0] == wire.RST_STREAM] == [(streams[2], refused)]


async def test_stopping_lets_calls_end_and_refuses_those_made_after_the_client_knows() -> None:
    server, methods = serving()
    peer = Peer(server)
    running = peer.call(b"a", "Wait")
    await turns()
    peer.frames()
    stopping = server.stop(10)
    task = asyncio.create_task(stopping)
    await turns()
    frames = peer.frames()
    assert goaway_of(frames) == (wire.MAX_STREAM, ErrorCode.NO_ERROR)
    (ping,) = [body for kind, _, _, body in frames if kind == wire.PING]
    unaware = peer.call(b"b")
    await turns()
    assert messages_of(peer.frames(), unaware) == framed(b"b")
    peer.send(wire.PING, wire.ACK, 0, ping)
    await turns()
    assert goaway_of(peer.frames()) == (unaware, ErrorCode.NO_ERROR)
    late = peer.call(b"late")
    await turns()
    assert (wire.RST_STREAM, 0, late, struct.pack(">L", ErrorCode.REFUSED_STREAM)) in peer.frames()
    methods.release.set()
    await turns()
    frames = peer.frames()
    assert messages_of(frames, running) == framed(b"a")
    assert peer.transport.is_closed
    peer.connection.connection_lost(None)
    await task
    assert methods.started == [b"a", b"b"]


async def test_a_client_that_does_not_acknowledge_the_end_is_refused_calls_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection_module, "_GOAWAY_S", 0.01)
    server, _ = serving()
    peer = Peer(server)
    task = asyncio.create_task(server.stop(60))
    async with asyncio.timeout(240):
        while not peer.transport.is_closed:  # noqa: ASYNC110 (nothing signals it)
            await asyncio.sleep(0)
    assert goaway_of(peer.frames()) == (0, ErrorCode.NO_ERROR)
    peer.connection.connection_lost(None)
    await task


async def test_a_connection_that_waits_to_be_accepted_when_the_server_stops_is_served() -> None:
    server, methods = serving()
    port = server.add_port("127.0.0.1", 0)
    await server.start()
    call = headers_frame(1) + wire.frame(wire.DATA, wire.END_STREAM, 1, framed(b"a"))
    with socket.create_connection(("127.0.0.1", port)) as client:
        stopping = asyncio.create_task(server.stop(60))  # before the event loop accepts the connection
        client.setblocking(False)
        await asyncio.sleep(0)
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", port)
        await asyncio.get_running_loop().sock_sendall(client, wire.PREFACE + wire.settings([]) + call)
        answer = b""
        async with asyncio.timeout(240):
            while framed(b"a") not in answer:
                read = await asyncio.get_running_loop().sock_recv(client, 4096)
                assert read
                answer += read
    await stopping
    assert methods.started == [b"a"]


async def test_stopping_ends_when_the_last_connection_is_lost_while_its_call_runs() -> None:
    server, methods = serving()
    peer = Peer(server)
    peer.call(b"a", "Wait")
    await turns()
    task = asyncio.create_task(server.stop(60))
    await turns()
    peer.connection.connection_lost(None)
    await turns()
    assert methods.canceled == [b"a"]
    assert task.done()


def headers_frame(stream: int, *headers: tuple[str, str], flags: int = wire.END_HEADERS) -> bytes:
    return wire.frame(wire.HEADERS, flags, stream, hpack.Encoder().encode(list(headers or HEADERS)))


LONG = [("x", "y" * 4000)] * 20
CONNECTION_ERRORS: dict[str, tuple[Callable[[], bytes], ErrorCode]] = {
    "too large a frame": (lambda: wire.frame(wire.DATA, 0, 1, bytes(16_385)), ErrorCode.FRAME_SIZE_ERROR),
    "an even stream": (lambda: headers_frame(2), ErrorCode.PROTOCOL_ERROR),
    "data before headers": (lambda: wire.frame(wire.DATA, 0, 1, b"x"), ErrorCode.PROTOCOL_ERROR),
    "damaged headers": (
        lambda: wire.frame(wire.HEADERS, 4, 1, b"\xff\xff\xff\xff\xff\x0f"),
        ErrorCode.COMPRESSION_ERROR,
    ),
    "too much padding": (lambda: wire.frame(wire.HEADERS, 12, 1, b"\x09abc"), ErrorCode.PROTOCOL_ERROR),
    "a continuation alone": (lambda: wire.frame(wire.CONTINUATION, 4, 1, b""), ErrorCode.PROTOCOL_ERROR),
    "headers without their continuation": (
        lambda: headers_frame(1, flags=0) + wire.frame(wire.PING, 0, 0, bytes(8)),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "endless continuations": (
        lambda: headers_frame(1, flags=0) + wire.frame(wire.CONTINUATION, 0, 1, b"") * 20,
        ErrorCode.ENHANCE_YOUR_CALM,
    ),
    "continuations that are too large": (
        lambda: headers_frame(1, flags=0) + wire.frame(wire.CONTINUATION, 0, 1, bytes(1 << 14)) * 5,
        ErrorCode.ENHANCE_YOUR_CALM,
    ),
    "very large headers": (lambda: headers_frame(1, *HEADERS, *LONG), ErrorCode.ENHANCE_YOUR_CALM),
    "a shut window": (lambda: wire.frame(wire.WINDOW_UPDATE, 0, 0, bytes(4)), ErrorCode.PROTOCOL_ERROR),
    "a window too large": (lambda: wire.window_update(0, wire.MAX_WINDOW), ErrorCode.FLOW_CONTROL_ERROR),
    "an initial window too large": (
        lambda: wire.settings([(Setting.INITIAL_WINDOW_SIZE, 1 << 31)]),
        ErrorCode.FLOW_CONTROL_ERROR,
    ),
    "frames too small": (lambda: wire.settings([(Setting.MAX_FRAME_SIZE, 1)]), ErrorCode.PROTOCOL_ERROR),
    "too many settings": (
        lambda: wire.settings([(Setting.INITIAL_WINDOW_SIZE, 1)] * 33),
        ErrorCode.ENHANCE_YOUR_CALM,
    ),
    "half a setting": (lambda: wire.frame(wire.SETTINGS, 0, 0, b"abc"), ErrorCode.FRAME_SIZE_ERROR),
    "settings of a stream": (lambda: wire.frame(wire.SETTINGS, 0, 1), ErrorCode.PROTOCOL_ERROR),
    "a short ping": (lambda: wire.frame(wire.PING, 0, 0, b"abc"), ErrorCode.FRAME_SIZE_ERROR),
    "a push": (lambda: wire.frame(wire.PUSH_PROMISE, 4, 1, bytes(4)), ErrorCode.PROTOCOL_ERROR),
    "a reset of nothing": (lambda: wire.rst_stream(1, ErrorCode.CANCEL), ErrorCode.PROTOCOL_ERROR),
    "pings": (lambda: wire.frame(wire.PING, 0, 0, bytes(8)) * 4, ErrorCode.ENHANCE_YOUR_CALM),
    "priorities": (lambda: wire.frame(wire.PRIORITY, 0, 1, bytes(5)) * 12, ErrorCode.ENHANCE_YOUR_CALM),
    "settings again and again": (lambda: wire.settings([]) * 12, ErrorCode.ENHANCE_YOUR_CALM),
    "unknown frames": (lambda: wire.frame(99, 0, 0) * 12, ErrorCode.ENHANCE_YOUR_CALM),
    "empty data": (lambda: headers_frame(1) + wire.frame(wire.DATA, 0, 1) * 12, ErrorCode.ENHANCE_YOUR_CALM),
    "resets": (
        lambda: b"".join(
            headers_frame(stream) + wire.rst_stream(stream, ErrorCode.CANCEL) for stream in range(1, 25, 2)
        ),
        ErrorCode.ENHANCE_YOUR_CALM,
    ),
}


@pytest.mark.parametrize("name", CONNECTION_ERRORS)
async def test_an_error_of_the_connection_ends_it(name: str) -> None:
    server, _ = serving(max_idle_frames=10, idle_frames_per_s=0, max_resets=10, resets_per_s=0)
    peer = Peer(server)
    data, code = CONNECTION_ERRORS[name]
    peer.connection.data_received(data())
    await turns()
    found = goaway_of(peer.frames())
    assert found is not None
    assert found[1] == code
    assert peer.transport.is_closed
    assert not peer.connection.calls


async def test_the_preface_and_settings_come_first() -> None:
    for data in (b"\x16\x03\x01 of TLS", wire.PREFACE + wire.frame(wire.PING, 0, 0, bytes(8))):
        server, _ = serving()
        peer = Peer(server, greets=False)
        peer.connection.data_received(data)
        assert peer.transport.is_closed
    server, _ = serving(handshake_timeout_s=0)
    silent = Peer(server, greets=False)
    await turns()
    await asyncio.sleep(0.001)
    assert silent.transport.is_aborted


@pytest.mark.parametrize("line", [b"GET / HTTP/1.1\r\n", b"POST /v1/chat/completions HTTP/1.1\r\n", b"OPTIONS * "])
async def test_an_http1_client_is_told_that_the_port_is_for_grpc(line: bytes) -> None:
    server, _ = serving()
    peer = Peer(server, greets=False)
    peer.connection.data_received(line)
    assert peer.transport.is_closed
    head, _, body = b"".join(peer.transport.writes).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert int(re.findall(rb"Content-Length: (\d+)", head)[0]) == len(body)
    assert b"This port is for gRPC." in body
    assert b"--http-port" in body


async def test_settings_are_the_first_frame_even_if_the_server_is_stopping() -> None:
    server, _ = serving()
    peer = Peer(server, greets=False)
    peer.connection.go_away()
    await turns()
    assert wire.HEAD.unpack_from(b"".join(peer.transport.writes))[2] == wire.SETTINGS
    assert [kind for kind, *_ in peer.frames()] == [wire.WINDOW_UPDATE, wire.GOAWAY, wire.PING]


async def test_a_silent_client_is_pinged_and_then_left() -> None:
    server, _ = serving(keepalive_s=0.01, keepalive_timeout_s=1.0)
    peer = Peer(server)
    while not (pings := [frame for frame in peer.frames() if frame[0] == wire.PING]):  # noqa: ASYNC110 (the server's timer decides)
        await asyncio.sleep(0.001)
    assert not peer.transport.is_aborted
    peer.send(wire.PING, wire.ACK, 0, pings[0][3])
    while not peer.transport.is_aborted:  # noqa: ASYNC110 (the server's timer decides)
        await asyncio.sleep(0.001)


async def test_a_client_is_not_left_before_it_was_pinged() -> None:
    server, _ = serving(keepalive_s=10, keepalive_timeout_s=5)
    peer = Peer(server)
    peer.connection._heard_at -= 100  # as if the event loop had stalled
    peer.connection._look()
    await turns()
    assert [frame[0] for frame in peer.frames()] == [wire.PING]
    peer.connection._look()
    assert not peer.transport.is_aborted
    peer.connection._asked_at -= 5
    peer.connection._look()
    assert peer.transport.is_aborted


def test_a_directory_name_in_a_certificate_is_skipped() -> None:
    names = (("DirName", ((("commonName", "x"),),)), ("DNS", "a.example"))
    tls = SimpleNamespace(getpeercert=lambda: {"subjectAltName": names})
    found = _auth_context(cast("Any", tls))
    assert found["x509_subject_alternative_name"] == found["peer_dns"] == (b"a.example",)


MALFORMED = {
    "an uppercase name": [*HEADERS, ("Name", "x")],
    "no path": [item for item in HEADERS if item[0] != ":path"],
    "two paths": [HEADERS[2], *HEADERS],
    "a late pseudo-header": [*HEADERS[1:], HEADERS[0]],
    "an unknown pseudo-header": [(":x", "y"), *HEADERS],
    "a connection header": [*HEADERS, ("connection", "close")],
    "another te": [*HEADERS, ("te", "gzip")],
    "a line break": [*HEADERS, ("name", "x\ny")],
    "a carriage return": [*HEADERS, ("name", "x\r")],
    "a zero": [*HEADERS, ("authorization", "x\0y")],
}


@pytest.mark.parametrize("name", MALFORMED)
async def test_malformed_headers_reset_the_stream_alone(name: str) -> None:
    server, _ = serving()
    peer = Peer(server)
    stream = peer.send_headers(MALFORMED[name])
    await turns()
    assert peer.frames() == [(wire.RST_STREAM, 0, stream, struct.pack(">L", ErrorCode.PROTOCOL_ERROR))]
    other = peer.call(b"x")
    await turns()
    assert messages_of(peer.frames(), other) == framed(b"x")


STATUSES = {
    "an unknown method": ([("", "")], {"grpc-status": "12"}),
    "not gRPC": ([("content-type", "text/html")], {":status": "415"}),
    "not POST": ([(":method", "GET")], {":status": "405"}),
    "an unknown encoding": ([("grpc-encoding", "snappy")], {"grpc-status": "12"}),
    "an invalid timeout": ([("grpc-timeout", "1x")], {"grpc-status": "13"}),
    "invalid metadata": ([("a-bin", "***")], {"grpc-status": "13"}),
    "much metadata": ([("a", "b" * 20_000)], {"grpc-status": "8"}),
    "no time": ([("grpc-timeout", "0m")], {"grpc-status": "4"}),
}


@pytest.mark.parametrize("name", STATUSES)
async def test_a_call_that_cannot_be_made_gets_only_a_status(name: str) -> None:
    server, methods = serving()
    peer = Peer(server)
    changes, expected = STATUSES[name]
    fields = dict(HEADERS) | {":path": "/no.Such/Method"} if changes[0][0] == "" else dict(HEADERS) | dict(changes)
    stream = peer.send_headers(fields.items())
    await turns()
    frames = [frame for frame in peer.frames() if frame[2] == stream]
    assert [frame[0] for frame in frames] == [wire.HEADERS, wire.RST_STREAM]
    assert frames[0][1] & wire.END_STREAM
    assert expected.items() <= peer.headers(frames[0]).items()
    assert methods.started == []


async def test_compressed_messages_are_read_within_the_limit() -> None:
    server, methods = serving(max_receive_bytes=10_000)
    peer = Peer(server)
    text = b"a" * 9000
    for encoding, data in (("gzip", gzip.compress(text)), ("deflate", zlib.compress(text))):
        stream = peer.begin("Echo", ("grpc-encoding", encoding))
        peer.say(stream, data, flag=1)
        await turns()
        assert messages_of(peer.frames(), stream) == framed(text)
    bomb = peer.begin("Echo", ("grpc-encoding", "gzip"))
    peer.say(bomb, gzip.compress(bytes(1 << 20)), flag=1)
    large, damaged, identity = peer.begin(), peer.begin("Echo", ("grpc-encoding", "gzip")), peer.begin()
    peer.send(wire.DATA, 0, large, struct.pack(">BL", 0, 10_001))
    peer.say(damaged, b"abc", flag=1)
    peer.say(identity, b"abc", flag=1)
    await turns(20)
    statuses = {frame[2]: peer.headers(frame).get("grpc-status") for frame in peer.frames() if frame[0] == wire.HEADERS}
    assert statuses == {bomb: "8", large: "8", damaged: "13", identity: "13"}
    assert len(methods.started) == 2


async def test_a_malformed_message_is_refused_without_a_log_record(caplog: pytest.LogCaptureFixture) -> None:
    server, methods = serving()
    methods.release.set()
    peer = Peer(server)
    stream = peer.call(b"\xff", "Parse")
    await turns()
    (frame,) = [frame for frame in peer.frames() if frame[0] == wire.HEADERS and frame[2] == stream]
    headers = peer.headers(frame)
    assert (headers["grpc-status"], headers["grpc-message"]) == ("3", "the request cannot be parsed")
    assert not caplog.records


def test_a_budget_allows_a_burst_and_then_a_rate() -> None:
    budget = Budget(3, 2.0)
    assert [budget.spend(10.0) for _ in range(4)] == [True, True, True, False]
    assert [budget.spend(11.0) for _ in range(2)] == [True, False]
    assert [budget.spend(20.0) for _ in range(4)] == [True, True, True, False]


@settings(max_examples=30)
@given(cuts=st.lists(st.integers(1, 700), max_size=12))
async def test_bytes_may_be_split_anywhere(cuts: list[int]) -> None:
    server, _ = serving()
    peer = Peer(server, greets=False)
    encoder = hpack.Encoder()
    data = wire.PREFACE + wire.settings([(Setting.INITIAL_WINDOW_SIZE, 1 << 20)])
    for stream in (1, 3, 5):
        block = encoder.encode(list(HEADERS))
        data += wire.frame(wire.HEADERS, 0, stream, block[:2]) + wire.frame(wire.CONTINUATION, 4, stream, block[2:])
        data += wire.frame(wire.DATA, wire.PADDED, stream, b"\x03" + framed(b"abc")[:4] + bytes(3))
        data += wire.frame(wire.DATA, wire.END_STREAM, stream, framed(b"abc")[4:])
    at = 0
    for size in [*cuts, len(data)]:
        peer.connection.data_received(data[at : at + size])
        at += size
        await turns(1)
    await turns()
    frames = peer.frames()
    assert [messages_of(frames, stream) for stream in (1, 3, 5)] == [framed(b"abc")] * 3
    assert goaway_of(frames) is None


async def test_neither_large_blocks_nor_refused_heads_are_kept() -> None:
    server, _ = serving()
    peer = Peer(server)
    for number, more in enumerate(([("a", "b" * 3000)], [("grpc-timeout", "1x")], [("a", "b" * 20_000)])):
        block = wire.header_block((name.encode(), value.encode()) for name, value in [*HEADERS, *more])
        stream = 2 * number + 1
        peer.connection.data_received(wire.header_frames(stream, block, wire.DEFAULT_FRAME, end_stream=True))
    assert [len(block) < 2048 for block in peer.connection._known_blocks] == [True]
    assert [(b"a", b"b" * 3000) in headers for headers in peer.connection._known_heads] == [True]


_KINDS = st.integers(0, 10)
_FRAMES = st.lists(
    st.tuples(_KINDS, st.integers(0, 255), st.integers(0, 9), st.binary(max_size=40)), min_size=1, max_size=12
)


@settings(max_examples=100)
@given(frames=_FRAMES)
async def test_no_frames_make_the_server_fail(frames: list[tuple[int, int, int, bytes]]) -> None:
    server, _ = serving()
    peer = Peer(server)
    peer.call(b"x", "Wait")
    written = []
    for kind, flags, stream, body in frames:
        peer.send(kind, flags, stream, body)
        await turns(1)
        written += peer.frames()
    peer.connection.connection_lost(None)
    await turns()
    assert (goaway_of(written) or (0, 0))[1] != ErrorCode.INTERNAL_ERROR
    assert not server.connections


@settings(max_examples=30)
@given(
    lists=st.lists(
        st.lists(st.sampled_from([("a", "1"), ("b", "2" * 50), ("c", "3" * 3000), ("d", "4" * 5000)]), max_size=3),
        max_size=8,
    )
)
async def test_known_header_blocks_mean_the_same(lists: list[list[tuple[str, str]]]) -> None:
    server, _ = serving()
    peer, encoder = Peer(server), hpack.Encoder()
    for headers in lists:
        block = encoder.encode(headers, huffman=False)
        expected = tuple((name.encode(), value.encode()) for name, value in headers)
        assert peer.connection._decode(block) == expected
        again = encoder.encode(headers, huffman=False)
        assert peer.connection._decode(again) == expected
