"""A gRPC client that begins requests without finishing them, which gRPC's own clients cannot do."""

from __future__ import annotations

import asyncio
import contextlib
import struct

_DATA, _HEADERS, _SETTINGS, _PING, _WINDOW_UPDATE = 0, 1, 4, 6, 8
_ACK = 0x1
_END_HEADERS = 0x4
_WINDOW = 65_535  # initial window of a stream, and of the connection
_FRAME = 16_384


class UnfinishedCalls:
    """Calls on one HTTP/2 connection, each with a message that lacks its last byte.

    Attributes:
        num_sent: Number of bytes that flow control let each call send, by stream.
        ended: Streams that the server has ended so far.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.num_sent: dict[int, int] = {}
        self.ended: set[int] = set()
        self._left: dict[int, int] = {}
        self._windows = {0: _WINDOW}
        self._initial_window = _WINDOW
        self._prefix = b""
        self._task = asyncio.create_task(self._read())

    @classmethod
    async def connect(cls, port: int) -> UnfinishedCalls:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(_SETTINGS, 0, 0, b""))
        return cls(reader, writer)

    def begin(self, method: str, num_bytes: int, token: str = "") -> None:
        """Call `method` and start to send a message of `num_bytes`."""
        stream = 2 * len(self.num_sent) + 1
        headers = [(":method", "POST"), (":scheme", "http"), (":path", method), (":authority", "x")]
        headers += [("te", "trailers"), ("content-type", "application/grpc")]
        headers += [("authorization", f"Bearer {token}")] if token else []
        block = b"".join(
            b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode() for name, value in headers
        )
        self._writer.write(_frame(_HEADERS, _END_HEADERS, stream, block))
        self.num_sent[stream], self._left[stream] = 0, 4 + num_bytes
        self._windows[stream] = self._initial_window
        self._prefix = struct.pack("!BI", 0, num_bytes)
        self._send_more()

    async def close(self) -> None:
        self._task.cancel()
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    def _send_more(self) -> None:
        open_streams = sorted(self.num_sent.keys() - self.ended)
        is_moving = True
        while is_moving:
            sent = [self._send_frame(stream) for stream in open_streams]  # one frame per stream in turn
            is_moving = any(sent)

    def _send_frame(self, stream: int) -> bool:
        size = min(self._left[stream], self._windows[0], self._windows[stream], _FRAME)
        begins = not self.num_sent[stream]
        if size < (len(self._prefix) if begins else 1):
            return False
        data = self._prefix + bytes(size - len(self._prefix)) if begins else bytes(size)
        self._writer.write(_frame(_DATA, 0, stream, data))
        self.num_sent[stream] += size
        for counts in ((self._left, stream), (self._windows, 0), (self._windows, stream)):
            counts[0][counts[1]] -= size
        return True

    async def _read(self) -> None:
        while True:
            head = await self._reader.readexactly(9)
            kind, flags, stream = head[3], head[4], int.from_bytes(head[5:], "big") & 0x7FFF_FFFF
            body = await self._reader.readexactly(int.from_bytes(head[:3], "big"))
            if kind == _SETTINGS and not flags & _ACK:
                self._writer.write(_frame(_SETTINGS, _ACK, 0, b""))
                for name, value in struct.iter_unpack("!HI", body):
                    if name == 4:
                        self._change_windows(value)
            elif kind == _PING and not flags & _ACK:
                self._writer.write(_frame(_PING, _ACK, 0, body))
            elif kind == _WINDOW_UPDATE:
                self._windows[stream] = self._windows.get(stream, 0) + int.from_bytes(body, "big")
            elif stream and (kind == 3 or (kind == _HEADERS and flags & 1)):
                self.ended.add(stream)
            self._send_more()

    def _change_windows(self, initial: int) -> None:
        for stream in self.num_sent:
            self._windows[stream] += initial - self._initial_window
        self._initial_window = initial


def _frame(kind: int, flags: int, stream: int, body: bytes) -> bytes:
    return len(body).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + body
