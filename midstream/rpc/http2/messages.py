"""The request messages of a call.

A client may send as many bytes as the stream's initial window before anything reads them. More is only allowed while a
method waits for the message, so unread calls hold little memory.
"""

from __future__ import annotations

import asyncio
import struct
import zlib
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

import grpc
from google.protobuf.message import DecodeError

from midstream.rpc.http2.wire import DEFAULT_WINDOW

_HEAD = struct.Struct(">BL")
# Clients distinguish this from an overloaded service by gRPC's own wording, "larger than max".
_TOO_LARGE = "the message is larger than max"
_CREDIT_BYTES = DEFAULT_WINDOW // 2
# Formats for zlib: deflate data has a zlib header, gzip data a gzip header.
_WINDOW_BITS = {b"deflate": zlib.MAX_WBITS, b"gzip": zlib.MAX_WBITS | 16}


class Reader(Protocol):
    """The call whose messages are read."""

    def grant(self, num_bytes: int) -> None:
        """Let the client send more bytes."""

    def refuse(self, code: grpc.StatusCode, details: str) -> None:
        """End the call with a status, and cancel its task."""


class _Over:
    """Stands in for the call once it has ended: there is no flow control or rejection any more."""

    def grant(self, num_bytes: int) -> None:
        pass

    def refuse(self, code: grpc.StatusCode, details: str) -> None:
        pass


_OVER = _Over()


class Messages(AsyncIterator[Any]):
    """Assembles messages from the bytes of DATA frames."""

    __slots__ = ("_buffer", "_call", "_encoding", "_is_ended", "_max_bytes", "_num_owed", "_waiter", "deserialize")

    def __init__(self, call: Reader, max_bytes: int, encoding: bytes) -> None:
        self.deserialize: Callable[[bytes], Any] | None = None
        self._call: Reader = call
        self._max_bytes = max_bytes
        self._encoding = encoding
        self._buffer = bytearray()
        self._num_owed = 0  # bytes received for which the window has not been extended yet
        self._is_ended = False
        self._waiter: asyncio.Future[None] | None = None

    def feed(self, data: bytes, size: int) -> None:
        """Add bytes that were received; `size` is their number as flow control counts them."""
        self._buffer += data
        self._num_owed += size
        if self._waiter is not None:
            self._wake_or_grant()

    def end(self) -> None:
        """Record that the client sends nothing more."""
        self._is_ended = True
        self._wake()

    def drop(self) -> None:
        """Free the bytes of a call that has ended, and release the call, which holds this object."""
        self._buffer = bytearray()
        self._call = _OVER

    @property
    def is_next_complete(self) -> bool:
        """Whether the next message has arrived and can be read without waiting."""
        size = self._size()
        return size is not None and size <= self._max_bytes and len(self._buffer) >= _HEAD.size + size

    async def __anext__(self) -> Any:
        """Return the next message. Raises StopAsyncIteration if there is none."""
        while True:
            size = self._size()
            if size is not None and size > self._max_bytes:
                await self._refuse(
                    grpc.StatusCode.RESOURCE_EXHAUSTED, f"{_TOO_LARGE} ({size} bytes, the limit is {self._max_bytes})"
                )
            if size is not None and len(self._buffer) >= _HEAD.size + size:
                return await self._take(size)
            if self._is_ended:
                if self._buffer:
                    await self._refuse(grpc.StatusCode.INTERNAL, "the last message is incomplete")
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                self._grant()
                await self._waiter
            finally:
                self._waiter = None

    def _size(self) -> int | None:
        """Return the size of the next message; None if its head is incomplete."""
        return int(_HEAD.unpack_from(self._buffer)[1]) if len(self._buffer) >= _HEAD.size else None

    async def _take(self, size: int) -> Any:
        buffer, stop = self._buffer, _HEAD.size + size
        is_compressed, body = buffer[0], bytes(memoryview(buffer)[_HEAD.size : stop])
        del buffer[:stop]
        if not self._is_ended and self._num_owed - len(buffer) >= _CREDIT_BYTES:
            self._call.grant(self._num_owed - len(buffer))
            self._num_owed = len(buffer)
        if is_compressed:
            body = await self._decompress(is_compressed, body)
        if self.deserialize is not None:
            try:
                return self.deserialize(body)
            except DecodeError:
                await self._refuse(grpc.StatusCode.INVALID_ARGUMENT, "the request cannot be parsed")
        return body

    async def _decompress(self, flag: int, body: bytes) -> bytes:
        bits = _WINDOW_BITS.get(self._encoding)
        if flag != 1 or bits is None:
            await self._refuse(grpc.StatusCode.INTERNAL, "a message is compressed, but the call has no encoding")
        try:
            stream = zlib.decompressobj(bits or 0)
            data = stream.decompress(body, self._max_bytes + 1)
        except zlib.error:
            await self._refuse(grpc.StatusCode.INTERNAL, "a compressed message is damaged")
        if len(data) > self._max_bytes:
            await self._refuse(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{_TOO_LARGE} when decompressed (the limit is {self._max_bytes} bytes)",
            )
        if not stream.eof:
            await self._refuse(grpc.StatusCode.INTERNAL, "a compressed message is damaged")
        return data

    async def _refuse(self, code: grpc.StatusCode, details: str) -> None:
        self._call.refuse(code, details)
        await asyncio.get_running_loop().create_future()  # until the call's task is cancelled

    def _wake_or_grant(self) -> None:
        size = self._size()
        if size is not None and (len(self._buffer) >= _HEAD.size + size or size > self._max_bytes):
            self._wake()
        else:
            self._grant()

    def _grant(self) -> None:
        """Let the client send the rest of a message."""
        if self._num_owed >= _CREDIT_BYTES and not self._is_ended:
            self._call.grant(self._num_owed)
            self._num_owed = 0

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
