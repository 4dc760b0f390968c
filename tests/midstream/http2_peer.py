"""A client of the gRPC server that writes frames itself, without a socket, and methods to call."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any, cast

import grpc
import hpack
from grpc_health.v1 import health_pb2

from midstream.rpc.http2 import GrpcServer, wire
from midstream.rpc.http2.connection import Connection

Frame = tuple[int, int, int, bytes]

SERVICE = "test.Service"
HEADERS = (
    (":method", "POST"),
    (":scheme", "http"),
    (":path", f"/{SERVICE}/Echo"),
    (":authority", "x"),
    ("te", "trailers"),
    ("content-type", "application/grpc"),
)


class Methods:
    """Implementations of the methods; their messages are bytes.

    Attributes:
        started: First messages of the calls that have started, in order.
        canceled: First messages of the calls whose task was canceled.
        release: `Wait` returns when this is set.
    """

    def __init__(self) -> None:
        self.started: list[bytes] = []
        self.canceled: list[bytes] = []
        self.release = asyncio.Event()

    async def echo(self, request: bytes, context: Any) -> bytes:
        self.started.append(request)
        return request

    async def wait(self, request: bytes, context: Any) -> bytes:
        self.started.append(request)
        try:
            await self.release.wait()
        except asyncio.CancelledError:
            self.canceled.append(request)
            raise
        return request

    async def repeat(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        """Send the message ten times."""
        for _ in range(10):
            yield request

    async def hold(self, requests: AsyncIterator[bytes], context: Any) -> bytes:
        """Read the messages only after `release` is set; return their sizes."""
        self.started.append(b"")
        await self.release.wait()
        return b",".join([b"%d" % len(request) async for request in requests])

    def add_to(self, server: grpc.aio.Server) -> None:
        handlers: dict[str, Any] = {
            "Echo": grpc.unary_unary_rpc_method_handler(cast("Any", self.echo)),
            "Wait": grpc.unary_unary_rpc_method_handler(cast("Any", self.wait)),
            "Repeat": grpc.unary_stream_rpc_method_handler(cast("Any", self.repeat)),
            "Hold": grpc.stream_unary_rpc_method_handler(cast("Any", self.hold)),
            "Parse": grpc.stream_unary_rpc_method_handler(
                cast("Any", self.hold), request_deserializer=health_pb2.HealthCheckRequest.FromString
            ),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))


class Transport(asyncio.Transport):
    """Keeps what is written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.is_closed = self.is_aborted = False
        self.reads = True

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.writes.append(bytes(data))

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_closed = self.is_aborted = True

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        self.reads = True


class Peer:
    """One connection of a client.

    Attributes:
        transport: The server's transport.
        connection: The server's side.
    """

    def __init__(self, server: GrpcServer, *, greets: bool = True) -> None:
        self.transport = Transport()
        self.connection = Connection(server)
        self.connection.connection_made(self.transport)
        self._encoder, self._decoder = hpack.Encoder(), hpack.Decoder()
        self._num_streams = 0
        if greets:
            self.connection.data_received(wire.PREFACE + wire.settings([]))
            self.frames()

    def send(self, kind: int, flags: int, stream: int, body: bytes = b"") -> None:
        """Send a frame."""
        self.connection.data_received(wire.frame(kind, flags, stream, body))

    def begin(self, method: str = "Echo", *more: tuple[str, str], ends: bool = False) -> int:
        """Send the headers of a call; return its stream."""
        headers = [(name, f"/{SERVICE}/{method}" if name == ":path" else value) for name, value in HEADERS]
        return self.send_headers([*headers, *more], ends=ends)

    def send_headers(self, headers: Iterable[tuple[str, str]], *, ends: bool = False) -> int:
        """Open a new stream with a HEADERS frame; return the stream's number."""
        stream = 2 * self._num_streams + 1
        self._num_streams += 1
        block = self._encoder.encode(list(headers))
        self.send(wire.HEADERS, wire.END_HEADERS | (wire.END_STREAM if ends else 0), stream, block)
        return stream

    def say(self, stream: int, message: bytes, *, ends: bool = True, flag: int = 0) -> None:
        """Send a message in DATA frames."""
        data = struct.pack(">BL", flag, len(message)) + message
        for at in range(0, len(data), wire.DEFAULT_FRAME):
            part = data[at : at + wire.DEFAULT_FRAME]
            is_last = at + len(part) == len(data)
            self.send(wire.DATA, wire.END_STREAM if ends and is_last else 0, stream, part)

    def call(self, message: bytes, method: str = "Echo", *more: tuple[str, str]) -> int:
        """Make a call with one message; return its stream."""
        stream = self.begin(method, *more)
        self.say(stream, message)
        return stream

    def frames(self) -> list[Frame]:
        """Return the frames other than SETTINGS that the server has written since the previous call."""
        data, found, at = b"".join(self.transport.writes), list[Frame](), 0
        self.transport.writes.clear()
        while at < len(data):
            high, low, kind, flags, stream = wire.HEAD.unpack_from(data, at)
            stop = at + wire.HEAD_BYTES + (high << 8 | low)
            if kind != wire.SETTINGS:
                found.append((kind, flags, stream, data[at + wire.HEAD_BYTES : stop]))
            at = stop
        return found

    def headers(self, frame: Frame) -> dict[str, str]:
        """Return the headers in a HEADERS frame; they must be decoded in order."""
        assert frame[0] == wire.HEADERS
        return {str(name): str(value) for name, value in self._decoder.decode(frame[3])}


async def turns(count: int = 10) -> None:
    """Run `count` iterations of the event loop."""
    for _ in range(count):
        await asyncio.sleep(0)


def goaway_of(frames: Sequence[Frame]) -> tuple[int, int] | None:
    """Return the last stream and the error code of the last GOAWAY; None if there is none."""
    bodies = [body for kind, _, _, body in frames if kind == wire.GOAWAY]
    if not bodies:
        return None
    last, code = struct.unpack(">LL", bodies[-1][:8])
    return last, code


def messages_of(frames: Sequence[Frame], stream: int) -> bytes:
    """Return the contents of a stream's DATA frames."""
    return b"".join(body for kind, _, number, body in frames if kind == wire.DATA and number == stream)


def framed(message: bytes) -> bytes:
    """Return a message as it appears in DATA frames."""
    return struct.pack(">BL", 0, len(message)) + message
