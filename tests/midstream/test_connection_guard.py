"""No address can occupy all connections of a port."""

from __future__ import annotations

import contextlib
import os
import socket

from midstream.rpc.connection_guard import ConnectionGuard


def test_the_newest_connections_of_an_address_that_has_too_many_are_closed() -> None:
    with contextlib.ExitStack() as opened, socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        guard = ConnectionGuard(port, max_connections=8)

        def connect(address: str) -> socket.socket:
            client = socket.create_connection(("127.0.0.1", port), timeout=10, source_address=(address, 0))
            opened.enter_context(client)
            opened.enter_context(listener.accept()[0])
            return client

        def is_open(client: socket.socket) -> bool:
            client.setblocking(False)
            try:
                return bool(client.recv(1))
            except BlockingIOError:
                return True

        first = [connect("127.0.0.2") for _ in range(3)]
        others = [connect("127.0.0.1") for _ in range(4)]
        assert guard.look() == 0
        later = [connect("127.0.0.2") for _ in range(5)]
        num_files = len(os.listdir("/dev/fd"))  # noqa: PTH208
        assert guard.look() == 4
        assert len(os.listdir("/dev/fd")) == num_files  # noqa: PTH208
        assert all(map(is_open, first + others))
        assert sum(map(is_open, later)) == 1
