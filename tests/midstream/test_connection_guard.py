"""No address can occupy all connections of a port."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from midstream.rpc.connection_guard import ConnectionGuard


def is_open(client: socket.socket) -> bool:
    client.setblocking(False)
    try:
        return bool(client.recv(1))
    except BlockingIOError:
        return True


def num_descriptors(sockets: list[socket.socket]) -> int:
    """Return how many descriptors of this process refer to `sockets`."""
    targets = {f"socket:[{os.fstat(own.fileno()).st_ino}]" for own in sockets}
    count = 0
    for path in Path("/dev/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # another thread closed it
            count += str(path.readlink()) in targets
    return count


def test_the_newest_connections_of_an_address_that_has_too_many_are_closed() -> None:
    with contextlib.ExitStack() as opened, socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        guard = ConnectionGuard(port, max_connections=8)
        accepted: list[socket.socket] = []

        def connect(address: str) -> socket.socket:
            client = socket.create_connection(("127.0.0.1", port), timeout=10, source_address=(address, 0))
            opened.enter_context(client)
            accepted.append(opened.enter_context(listener.accept()[0]))
            return client

        first = [connect("127.0.0.2") for _ in range(3)]
        others = [connect("127.0.0.1") for _ in range(4)]
        assert guard.look() == 0
        later = [connect("127.0.0.2") for _ in range(5)]
        assert guard.look() == 4
        assert num_descriptors(accepted) == len(accepted)
        assert all(map(is_open, first + others))
        assert sum(map(is_open, later)) == 1


def test_connections_from_before_there_were_too_many_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers of descriptors do not show the order of the connections, because the numbers of closed connections
    are reused.
    """
    with contextlib.ExitStack() as opened, socket.create_server(("127.0.0.1", 0)) as listener:
        accepted: list[socket.socket] = []

        def connect() -> socket.socket:
            client = opened.enter_context(socket.create_connection(listener.getsockname(), timeout=10))
            accepted.insert(0, opened.enter_context(listener.accept()[0]))
            return client

        folder = SimpleNamespace(iterdir=lambda: [Path(f"/dev/fd/{own.fileno()}") for own in accepted])
        monkeypatch.setattr("midstream.rpc.connection_guard._DESCRIPTORS", folder)
        guard = ConnectionGuard(listener.getsockname()[1], max_connections=8)
        first = [connect() for _ in range(3)]
        assert guard.look() == 0
        later = [connect() for _ in range(4)]
        assert guard.look() == 3
        assert all(map(is_open, first))
        assert sum(map(is_open, later)) == 1
