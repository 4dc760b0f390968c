"""Sends frames from rank 0 to the other ranks: through shared memory on the same host, and inline to other hosts.

Each frame starts with a header on the follower's connection, which wakes the follower: the offset of the frame in
shared memory and its length, or a marker that the frame follows on the connection itself. A follower acknowledges a
shared frame with one byte once it has copied it, so that its space can be reused.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
from collections import deque

_HEADER = struct.Struct("<QQ")  # offset in shared memory, or _INLINE; length
_INLINE = (1 << 64) - 1
_SHARED_BYTES = 16 << 20
_ACK = b"\1"


class FrameSender:
    """Sends frames to all followers. Not thread-safe."""

    def __init__(self, connections: list[socket.socket], num_bytes: int = _SHARED_BYTES) -> None:
        """Use connections whose other ends a `FrameReceiver` reads; Unix sockets also use shared memory."""
        self._remote = [one for one in connections if one.family != socket.AF_UNIX]
        self._local = {one: deque[int]() for one in connections if one.family == socket.AF_UNIX}
        self._size, self._end = num_bytes, 0
        self._memory: mmap.mmap | None = None
        if self._local:
            # The memory has no name, so that a killed process leaves nothing behind.
            handle = os.memfd_create("midstream-steps")
            os.ftruncate(handle, num_bytes)
            self._memory = mmap.mmap(handle, num_bytes)
            for one in self._local:
                socket.send_fds(one, [_HEADER.pack(num_bytes, 0)], [handle])
            os.close(handle)

    def send(self, frame: bytes) -> None:
        """Send a frame to all followers. Raises OSError if a follower has disconnected."""
        inline = _HEADER.pack(_INLINE, len(frame))
        for one in self._remote:
            one.sendall(inline)
            one.sendall(frame)
        if self._memory is None:
            return
        if len(frame) > self._size // 2:
            for one in self._local:
                one.sendall(inline)
                one.sendall(frame)
            return
        place = self._take(len(frame))
        self._memory[place : place + len(frame)] = frame
        header = _HEADER.pack(place, len(frame))
        for one in self._local:
            one.sendall(header)

    def close(self) -> None:
        """Close the connections and the shared memory."""
        for one in (*self._remote, *self._local):
            one.close()
        if self._memory is not None:
            self._memory.close()

    def _take(self, length: int) -> int:
        """Return the offset of space for a frame, once no follower needs its old contents. `_end` only grows; offsets
        are taken modulo the size of the memory.
        """
        start = self._end
        if start % self._size + length > self._size:
            start += self._size - start % self._size
        self._end = start + length
        for one, unread in self._local.items():
            self._collect(one, unread, wait=False)
            while unread and unread[0] < self._end - self._size:
                self._collect(one, unread, wait=True)
            unread.append(start)
        return start % self._size

    def _collect(self, one: socket.socket, unread: deque[int], *, wait: bool) -> None:
        try:
            acks = one.recv(4096, 0 if wait else socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        if not acks:
            raise ConnectionResetError("a rank closed its connection")
        for _ in acks:
            unread.popleft()


class FrameReceiver:
    """A follower's end of the connection."""

    def __init__(self, connection: socket.socket) -> None:
        """Receive the shared memory's descriptor if this is a Unix socket. Raises OSError if rank 0 disconnected."""
        self._connection = connection
        self._memory: mmap.mmap | None = None
        if connection.family == socket.AF_UNIX:
            data, handles, _, _ = socket.recv_fds(connection, _HEADER.size, 1)
            if len(data) != _HEADER.size or len(handles) != 1:
                raise ConnectionResetError("rank 0 closed the connection")
            self._memory = mmap.mmap(handles[0], _HEADER.unpack(data)[0], prot=mmap.PROT_READ)
            os.close(handles[0])

    def receive(self) -> bytes:
        """Return the next frame. Raises OSError if rank 0 has disconnected."""
        place, length = _HEADER.unpack(read_exactly(self._connection, _HEADER.size))
        if place == _INLINE:
            return read_exactly(self._connection, length)
        assert self._memory is not None
        frame = self._memory[place : place + length]
        self._connection.sendall(_ACK)
        return frame

    def close(self) -> None:
        """Close the connection and the shared memory."""
        self._connection.close()
        if self._memory is not None:
            self._memory.close()


def read_exactly(connection: socket.socket, num_bytes: int) -> bytes:
    """Read exactly `num_bytes` bytes. Raises OSError if the connection ends first."""
    parts = bytearray(num_bytes)
    view, done = memoryview(parts), 0
    while done < num_bytes:
        count = connection.recv_into(view[done:])
        if not count:
            raise ConnectionResetError("the other rank closed the connection")
        done += count
    return bytes(parts)
