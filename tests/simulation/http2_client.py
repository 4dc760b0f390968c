"""A client of the gRPC server in place of grpc.aio: channels and calls, as HTTP/2 over the simulated network.

Header blocks are those of the package hpack. A call may receive a few bytes for each message in the network's `window`
until it is read, so messages are sent in several frames.
"""

from __future__ import annotations

import asyncio
import base64
import struct
from collections import deque
from collections.abc import Generator, Sequence
from typing import Any, cast
from urllib.parse import unquote

import grpc
import grpc.aio
import hpack

from midstream.rpc.http2 import wire
from tests.simulation.loop import Flag, VirtualLoop
from tests.simulation.network import Network

_CONNECT_TIMEOUT_S = 2.0
_RECONNECT_S = 0.1
_BYTES_PER_MESSAGE = 64
_HEAD = struct.Struct(">BL")
_HALF_CLOSE_SHARE = 0.3
_CODES = {code.value[0]: code for code in grpc.StatusCode}
_CODE_OF_RESET = {
    wire.ErrorCode.REFUSED_STREAM: grpc.StatusCode.UNAVAILABLE,
    wire.ErrorCode.CANCEL: grpc.StatusCode.CANCELLED,
    wire.ErrorCode.ENHANCE_YOUR_CALM: grpc.StatusCode.RESOURCE_EXHAUSTED,
}

_DECODED: dict[bytes, Sequence[tuple[str, str]]] = {}

Status = tuple[grpc.StatusCode, str, tuple[tuple[str, str | bytes], ...]]


class Connection(asyncio.Protocol):
    """A connection to a server.

    Attributes:
        is_usable: Whether calls can be made.
    """

    def __init__(self, network: Network) -> None:
        self.is_usable = True
        self.window = _BYTES_PER_MESSAGE * network.window
        self._network = network
        self._transport: Any = None
        self._calls: dict[int, ClientCall] = {}
        self._room = wire.DEFAULT_WINDOW
        self._rooms: dict[int, int] = {}  # of calls that send several messages
        self._next_stream = 1
        self._encoder, self._decoder = hpack.Encoder(), hpack.Decoder()
        self._buffer = b""
        self._out: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._send(
            wire.PREFACE + wire.settings([(wire.Setting.INITIAL_WINDOW_SIZE, self.window)]),
            wire.window_update(0, wire.MAX_WINDOW - wire.DEFAULT_WINDOW),
        )

    def connection_lost(self, error: Exception | None) -> None:
        self.is_usable = False
        calls, self._calls = self._calls, {}
        self._rooms.clear()
        for call in calls.values():
            call.finish((grpc.StatusCode.UNAVAILABLE, "the connection was lost", ()))

    def begin(self, call: ClientCall, headers: Sequence[tuple[str, str]], body: bytes | None) -> int:
        """Begin a call with one message, or, if it is None, with several; return its stream."""
        stream, self._next_stream = self._next_stream, self._next_stream + 2
        self._calls[stream] = call
        block = self._encoder.encode(headers, huffman=False)  # which takes less time
        self._send(wire.header_frames(stream, block, wire.DEFAULT_FRAME, end_stream=False))
        if body is None:
            self._rooms[stream] = wire.DEFAULT_WINDOW
        else:
            data = _HEAD.pack(0, len(body)) + body
            self._room -= len(data)
            self._send(wire.frame(wire.DATA, wire.END_STREAM, stream, data))
        return stream

    def send_some(self, stream: int, data: bytes) -> int:
        """Send as much of `data` as a call has room for; return its length."""
        size = max(min(len(data), self._room, self._rooms.get(stream, 0), wire.DEFAULT_FRAME), 0)
        if size:
            self._room -= size
            self._rooms[stream] -= size
            self._send(wire.frame(wire.DATA, 0, stream, data[:size]))
        return size

    def grant(self, stream: int, size: int) -> None:
        """Let the server send more bytes of a call."""
        if stream in self._calls:
            self._send(wire.window_update(stream, size))

    def reset(self, stream: int) -> None:
        """Cancel a call."""
        if self._calls.pop(stream, None) is not None:
            self._rooms.pop(stream, None)
            self._send(wire.rst_stream(stream, wire.ErrorCode.CANCEL))
            self._close_if_unused()

    def close(self) -> None:
        """Close the connection, or only this side of it, to which the server responds."""
        self.is_usable = False
        if self._network.dice.random() < _HALF_CLOSE_SHARE:
            self._transport.write_eof()
        else:
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        data, at = self._buffer + data, 0
        while len(data) - at >= wire.HEAD_BYTES:
            high, low, kind, flags, stream = wire.HEAD.unpack_from(data, at)
            end = at + wire.HEAD_BYTES + (high << 8 | low)
            if end > len(data):
                break
            self._obey(kind, flags, stream, data[at + wire.HEAD_BYTES : end])
            at = end
        self._buffer = data[at:]

    def _obey(self, kind: int, flags: int, stream: int, body: bytes) -> None:
        call = self._calls.get(stream)
        if kind == wire.HEADERS:
            assert flags & wire.END_HEADERS
            self._read_headers(stream, self._decode(body), is_last=bool(flags & wire.END_STREAM))
        elif kind == wire.DATA:
            if call is not None:
                call.feed(body)
        elif kind == wire.SETTINGS and not flags & wire.ACK:
            self._send(wire.frame(wire.SETTINGS, wire.ACK, 0))
        elif kind == wire.PING and not flags & wire.ACK:
            self._send(wire.frame(wire.PING, wire.ACK, 0, body))
        elif kind == wire.RST_STREAM and call is not None:
            self._forget(stream)
            code = _CODE_OF_RESET.get(wire.ErrorCode(int.from_bytes(body, "big")), grpc.StatusCode.INTERNAL)
            call.finish((code, "the call was reset", ()))
        elif kind == wire.WINDOW_UPDATE:
            self._grow(stream, int.from_bytes(body, "big"))
        elif kind == wire.GOAWAY:
            self._leave(int.from_bytes(body[:4], "big"))

    def _read_headers(self, stream: int, headers: Sequence[tuple[str, str]], *, is_last: bool) -> None:
        call = self._calls.get(stream)
        if call is not None and is_last:
            self._forget(stream)
            call.finish(_status(headers))
        elif call is not None:
            call.note_headers()

    def _grow(self, stream: int, size: int) -> None:
        if not stream:
            self._room += size
        elif stream in self._rooms:
            self._rooms[stream] += size
        for number in self._rooms:
            self._calls[number].note_room()

    def _decode(self, block: bytes) -> Sequence[tuple[str, str]]:
        headers = _DECODED.get(block)
        if headers is None:
            headers = _DECODED[block] = self._decoder.decode(block)
            # The server indexes no headers, so blocks do not depend on each other.
            assert not self._decoder.header_table.dynamic_entries
        return headers

    def _leave(self, last_stream: int) -> None:
        """Make no more calls here; those after the last one that the server accepts have not begun."""
        self.is_usable = False
        for stream in [stream for stream in self._calls if stream > last_stream]:
            self._rooms.pop(stream, None)
            self._calls.pop(stream).finish((grpc.StatusCode.UNAVAILABLE, "the server goes away", ()))
        self._close_if_unused()

    def _forget(self, stream: int) -> None:
        del self._calls[stream]
        self._rooms.pop(stream, None)
        self._close_if_unused()

    def _close_if_unused(self) -> None:
        if not self.is_usable and not self._calls:
            self._transport.close()

    def _send(self, *frames: bytes) -> None:
        if not self._out:
            asyncio.get_running_loop().call_soon(self._flush)
        self._out += frames

    def _flush(self) -> None:
        out, self._out = self._out, []
        self._transport.write(b"".join(out))


def _status(headers: Sequence[tuple[str, str]]) -> Status:
    values = dict(headers)
    trailing = tuple(
        (name, base64.b64decode(value + "=" * (-len(value) % 4)) if name.endswith("-bin") else value)
        for name, value in headers
        if not name.startswith((":", "grpc-")) and name != "content-type"
    )
    return _CODES[int(values["grpc-status"])], unquote(values.get("grpc-message", "")), trailing


class ClientCall:
    """A call, with one request unless it is a StreamCall; await it if the response is a single message."""

    def __init__(
        self, channel: Channel, method: str, codecs: tuple[Any, Any], request: Any, options: dict[str, Any]
    ) -> None:
        self._channel, self._method = channel, method
        self._serialize, self._deserialize = codecs
        self._loop = asyncio.get_running_loop()
        self._connection: Connection | None = None
        self._stream = 0
        self._inbox: deque[bytes] = deque()
        self._buffer = bytearray()
        self._num_owed = 0
        self._changed = Flag()
        self._has_headers = self._is_cancelled = False
        self._status: Status | None = None
        timeout = options.get("timeout")
        self._deadline = None if timeout is None else self._loop.time() + timeout
        self._timer = None if timeout is None else self._loop.call_later(max(timeout, 0), self._expire)
        self._metadata = tuple(options.get("metadata") or ())
        self._starting = self._loop.create_task(self._start(request, bool(options.get("wait_for_ready"))))

    async def _start(self, request: Any, waits: bool) -> None:
        while (connection := await self._channel.connection()) is None:
            if not waits:
                self.finish((grpc.StatusCode.UNAVAILABLE, "failed to connect", ()))
                return
            await asyncio.sleep(_RECONNECT_S)
        if self._status is not None:
            return
        headers = [
            (":method", "POST"),
            (":scheme", "http"),
            (":path", self._method),
            (":authority", self._channel.address),
            ("te", "trailers"),
            ("content-type", "application/grpc"),
            *((key, value) for key, value in self._metadata),
        ]
        if self._deadline is not None:
            headers.append(("grpc-timeout", f"{max(int((self._deadline - self._loop.time()) * 1e3), 1)}m"))
        self._connection = connection
        self._stream = connection.begin(self, headers, None if request is None else self._serialize(request))
        self.note_room()

    def note_room(self) -> None:
        """Handle room for messages that wait to be sent."""

    def note_headers(self) -> None:
        """Record that the response has begun."""
        self._has_headers = True
        self._changed.set()

    def feed(self, data: bytes) -> None:
        """Add bytes of messages."""
        self._buffer += data
        self._num_owed += len(data)
        while len(self._buffer) >= _HEAD.size:
            size = _HEAD.size + _HEAD.unpack_from(self._buffer)[1]
            if len(self._buffer) < size:
                break
            self._inbox.append(bytes(self._buffer[_HEAD.size : size]))
            del self._buffer[:size]
        self._grant()
        self._changed.set()

    def _grant(self) -> None:
        """Let the server send more, unless there are messages to read."""
        connection = self._connection
        if connection is not None and not self._inbox and 2 * self._num_owed >= connection.window:
            connection.grant(self._stream, self._num_owed)
            self._num_owed = 0

    def finish(self, status: Status) -> None:
        """End the call with a status, unless it has ended."""
        if self._status is None:
            self._status = status
            if self._timer is not None:
                self._timer.cancel()
        self._changed.set()
        self.note_room()

    def _expire(self) -> None:
        if self._status is None:
            self._reset()
            self.finish((grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded", ()))

    def _reset(self) -> None:
        self._starting.cancel()
        if self._connection is not None:
            self._connection.reset(self._stream)

    def cancel(self) -> bool:
        """Cancel the call from the client side."""
        if self._status is not None:
            return False
        self._is_cancelled = True
        self._reset()
        self.finish((grpc.StatusCode.CANCELLED, "Locally cancelled by application!", ()))
        return True

    def done(self) -> bool:
        """Return whether the call has ended."""
        return self._status is not None

    def __await__(self) -> Generator[Any, None, Any]:
        return self._response().__await__()

    async def _response(self) -> Any:
        response = await self.read()
        while self._status is None:
            await self._wait()
        self._raise_for_status()
        return response

    async def read(self) -> Any:
        """Return the next message; EOF after the last message of a successful call."""
        while not self._inbox:
            if self._status is not None:
                self._raise_for_status()
                return grpc.aio.EOF
            await self._wait()
        message = self._inbox.popleft()
        self._grant()
        return self._deserialize(message)

    async def wait_for_connection(self) -> None:
        """Wait until the server has sent its headers."""
        while not self._has_headers and self._status is None:
            await self._wait()
        if self._status is not None:
            self._raise_for_status()

    async def _wait(self) -> None:
        try:
            await self._changed.wait()
        except asyncio.CancelledError:
            self.cancel()
            raise

    def _raise_for_status(self) -> None:
        if self._is_cancelled:
            raise asyncio.CancelledError
        assert self._status is not None
        code, details, trailing = self._status
        if code is not grpc.StatusCode.OK:
            raise grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailing), details=details)


class StreamCall(ClientCall):
    """A call that sends several messages."""

    def __init__(self, channel: Channel, method: str, codecs: tuple[Any, Any], options: dict[str, Any]) -> None:
        self._has_room = Flag()
        super().__init__(channel, method, codecs, None, options)

    def note_room(self) -> None:
        self._has_room.set()

    async def write(self, message: Any) -> None:
        """Send a message; wait while there is no room for it."""
        body = self._serialize(message)
        data = _HEAD.pack(0, len(body)) + body
        while data:
            if self._status is not None:
                raise asyncio.InvalidStateError("RPC already finished.")
            num_sent = 0 if self._connection is None else self._connection.send_some(self._stream, data)
            if not num_sent:
                await self._has_room.wait()
            data = data[num_sent:]


class Channel:
    """Opens calls on behalf of the process that created it, over one connection at a time."""

    def __init__(self, network: Network, target: str) -> None:
        self.address = target.removeprefix("dns:///")
        self._network = network
        self._connection: Connection | None = None
        self._connecting: asyncio.Task[Connection | None] | None = None
        self._calls: list[ClientCall] = []

    async def __aenter__(self) -> Channel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        """Cancel all open calls."""
        for call in self._calls:
            call.cancel()
        if self._connecting is not None:
            self._connecting.cancel()
        if self._connection is not None and self._connection.is_usable:
            self._connection.close()

    async def connection(self) -> Connection | None:
        """Return the connection, after connecting if necessary; None if that fails."""
        while self._connection is None or not self._connection.is_usable:
            if self._connecting is None:
                self._connecting = asyncio.get_running_loop().create_task(self._connect())
            if await asyncio.shield(self._connecting) is None:
                return None
        return self._connection

    async def _connect(self) -> Connection | None:
        loop = cast("VirtualLoop", asyncio.get_running_loop())
        host, _, port = self.address.rpartition(":")
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                _, self._connection = await loop.create_connection(lambda: Connection(self._network), host, int(port))
        except (OSError, TimeoutError):
            return None
        finally:
            self._connecting = None
        return self._connection

    def unary_stream(self, method: str, request_serializer: Any, response_deserializer: Any, **_: Any) -> Any:
        """Return a function that makes a call."""

        def call(request: Any, **options: Any) -> ClientCall:
            result = ClientCall(self, method, (request_serializer, response_deserializer), request, options)
            self._calls = [item for item in self._calls if not item.done()]
            self._calls.append(result)
            return result

        return call

    def stream_stream(self, method: str, request_serializer: Any, response_deserializer: Any, **_: Any) -> Any:
        """Return a function that makes a call with several messages."""

        def call(**options: Any) -> StreamCall:
            result = StreamCall(self, method, (request_serializer, response_deserializer), options)
            self._calls = [item for item in self._calls if not item.done()]
            self._calls.append(result)
            return result

        return call

    unary_unary = unary_stream
    stream_unary = stream_stream  # nothing calls such methods
