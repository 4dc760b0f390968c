"""Carries the bytes of a connection within a gRPC call, for peers that can reach each other's gRPC ports only."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from protos import frames_pb2 as pb

_MAX_PIECE_BYTES = 64 << 10


class Call(Protocol):
    """Either side of a call of Frames.Tunnel."""

    def read(self) -> Awaitable[Any]:
        """Return the next piece, or another object at the end."""

    def write(self, piece: pb.FramesPiece) -> Awaitable[None]:
        """Send a piece, once there is room for it."""


class TunnelTransport(asyncio.Transport):
    """Passes bytes between a protocol and a call."""

    def __init__(self, call: Call, protocol: asyncio.Protocol) -> None:
        super().__init__()
        self._call = call
        self._protocol = protocol
        self._unsent = bytearray()
        self._max_unsent = _MAX_PIECE_BYTES
        self._is_full = self._is_closing = False
        self._changed = asyncio.Event()
        self._writing: asyncio.Task[None] | None = None
        protocol.connection_made(self)

    def start(self, on_end: Callable[[], object]) -> None:
        """Run in a task of its own, and call `on_end` afterwards."""
        self._running = asyncio.create_task(self.run(), name="tunnel")
        self._running.add_done_callback(lambda _: on_end())

    async def run(self) -> None:
        """Pass bytes until the transport is closed or the call ends; then tell the protocol.

        Raises:
            CancelledError: It was cancelled; the protocol is told as well.
        """
        error: Exception | None = None
        reading, writing = asyncio.create_task(self._read()), asyncio.create_task(self._write())
        self._writing = writing
        try:
            await asyncio.wait((reading, writing), return_when=asyncio.FIRST_COMPLETED)
            error = _error_of(reading) or _error_of(writing)
        finally:
            self._is_closing = True
            reading.cancel()
            writing.cancel()
            await asyncio.wait((reading, writing))
            self._protocol.connection_lost(error)

    async def _read(self) -> None:
        while isinstance(piece := await self._call.read(), pb.FramesPiece):
            self._protocol.data_received(piece.data)

    async def _write(self) -> None:
        """Send what is written, until the transport is closed and nothing is left."""
        while True:
            self._changed.clear()
            while self._unsent:
                piece = pb.FramesPiece(data=bytes(self._unsent[:_MAX_PIECE_BYTES]))
                await self._call.write(piece)
                del self._unsent[: len(piece.data)]
                if self._is_full and len(self._unsent) <= self._max_unsent // 4:
                    self._is_full = False
                    self._protocol.resume_writing()
            if self._is_closing:
                return
            await self._changed.wait()

    # asyncio.Transport

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._unsent += data
        self._changed.set()
        if not self._is_full and len(self._unsent) > self._max_unsent:
            self._is_full = True
            self._protocol.pause_writing()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._max_unsent = _MAX_PIECE_BYTES if high is None else high

    def get_write_buffer_size(self) -> int:
        return len(self._unsent)

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        self._is_closing = True
        self._changed.set()

    def abort(self) -> None:
        self._unsent.clear()
        self.close()
        if self._writing is not None:  # it may wait for room
            self._writing.cancel()


def _error_of(task: asyncio.Task[None]) -> Exception | None:
    error = task.exception() if task.done() and not task.cancelled() else None
    return error if isinstance(error, Exception) else None
