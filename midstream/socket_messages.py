"""Messages between a process and its child process: a JSON header and bytes, each with its length as a prefix."""

from __future__ import annotations

import json
import socket
import struct

_LENGTHS = struct.Struct("<II")


def send(connection: socket.socket, header: object, data: bytes = b"") -> None:
    """Send a message. Raises OSError if the peer has closed the connection or does not read in time."""
    head = json.dumps(header).encode()
    connection.sendall(_LENGTHS.pack(len(head), len(data)) + head + data)


def receive(connection: socket.socket, max_bytes: int | None = None) -> tuple[object, bytes]:
    """Return the next message. Raises OSError if the peer has closed the connection or sent nothing in time, or the
    message is longer than `max_bytes`.
    """
    head, data = _LENGTHS.unpack(_read(connection, _LENGTHS.size))
    if max_bytes is not None and head + data > max_bytes:
        raise ConnectionError(f"the message has {head + data} bytes; must have at most {max_bytes}")
    return json.loads(_read(connection, head)), _read(connection, data)


def _read(connection: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = connection.recv(min(size - len(parts), 1 << 20))
        if not part:
            raise ConnectionError("the peer has closed the connection")
        parts += part
    return bytes(parts)
