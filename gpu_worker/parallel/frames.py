"""Frames from rank 0 to the others: written once into shared memory for those on its host, sent to those elsewhere.

Each frame begins with a header on the follower's connection, which is what wakes it: where in the shared memory the
frame lies and how long it is, or that it follows on the connection itself. A follower answers a shared frame by one
byte when it has copied it, so that its place can be used again.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
from collections import deque

_HEADER = struct.Struct("<QQ")  # place in shared memory, or _INLINE; length
_INLINE = (1 << 64) - 1
_SHARED_BYTES = 16 << 20
_ACK = b"\1"


class FrameSender:
    """Sends frames to followers. One thread at a time."""

    def __init__(self, connections: list[socket.socket], num_bytes: int = _SHARED_BYTES) -> None:
        """Takes connections over which `FrameReceiver` waits; those to Unix sockets share memory.

        Args:
            connections: To the followers.
            num_bytes: Of shared memory; frames of more than half of it are sent inline.
        """
        self._remote = [one for one in connections if one.family != socket.AF_UNIX]
        self._local = {one: deque[int]() for one in connections if one.family == socket.AF_UNIX}
        self._size, self._end = num_bytes, 0
        self._memory: mmap.mmap | None = None
        if self._local:
            # Without a name, so that nothing is left behind by a process that is killed.
            handle = os.memfd_create("midstream-steps")
            os.ftruncate(handle, num_bytes)
            self._memory = mmap.mmap(handle, num_bytes)
            for one in self._local:
                socket.send_fds(one, [_HEADER.pack(num_bytes, 0)], [handle])
            os.close(handle)

    def send(self, frame: bytes) -> None:
        """Sends a frame to all followers.

        Raises:
            OSError: One of them is gone.
        """
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
        """Closes the connections."""
        for one in (*self._remote, *self._local):
            one.close()
        if self._memory is not None:
            self._memory.close()

    def _take(self, length: int) -> int:
        """A place for a frame, once no follower needs what is there. Starts are counted on and on; places repeat."""
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
            raise ConnectionResetError("a rank has closed its connection")
        for _ in acks:
            unread.popleft()


class FrameReceiver:
    """A follower's end."""

    def __init__(self, connection: socket.socket) -> None:
        """Waits for the shared memory where the connection is to a Unix socket.

        Raises:
            OSError: Rank 0 is gone.
        """
        self._connection = connection
        self._memory: mmap.mmap | None = None
        if connection.family == socket.AF_UNIX:
            data, handles, _, _ = socket.recv_fds(connection, _HEADER.size, 1)
            if len(data) != _HEADER.size or len(handles) != 1:
                raise ConnectionResetError("rank 0 has closed the connection")
            self._memory = mmap.mmap(handles[0], _HEADER.unpack(data)[0], prot=mmap.PROT_READ)
            os.close(handles[0])

    def receive(self) -> bytes:
        """The next frame.

        Raises:
            OSError: Rank 0 is gone.
        """
        place, length = _HEADER.unpack(read_exactly(self._connection, _HEADER.size))
        if place == _INLINE:
            return read_exactly(self._connection, length)
        assert self._memory is not None
        frame = self._memory[place : place + length]
        self._connection.sendall(_ACK)
        return frame

    def close(self) -> None:
        """Closes the connection."""
        self._connection.close()
        if self._memory is not None:
            self._memory.close()


def read_exactly(connection: socket.socket, num_bytes: int) -> bytes:
    """So many bytes.

    Raises:
        OSError: The connection ends before.
    """
    parts = bytearray(num_bytes)
    view, done = memoryview(parts), 0
    while done < num_bytes:
        count = connection.recv_into(view[done:])
        if not count:
            raise ConnectionResetError("the other rank has closed the connection")
        done += count
    return bytes(parts)
