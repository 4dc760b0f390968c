"""Limits a server's connections from one address; gRPC's own limit applies to all clients together."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections import defaultdict
from pathlib import Path

logger = logging.getLogger(__name__)

_INTERVAL_S = 0.25
_DESCRIPTORS = Path("/dev/fd")


class ConnectionGuard:
    """Limits each address to half of the connections that a port of this process accepts; newer ones are closed."""

    def __init__(self, port: int, max_connections: int) -> None:
        """Guard `port`, whose server accepts `max_connections` in total."""
        self._port = port
        self._max_per_address = max(max_connections // 2, 1)
        # Peers at the last check, in the order in which they were first seen.
        self._known: dict[tuple[str, int], None] = {}

    async def run(self) -> None:
        """Check the connections regularly until cancelled."""
        while True:
            await asyncio.sleep(_INTERVAL_S)
            with contextlib.suppress(OSError):  # no file can be opened at the moment
                await asyncio.to_thread(self.look)

    def look(self) -> int:
        """Close the connections that exceed the limit; return their number."""
        descriptors = [int(path.name) for path in _DESCRIPTORS.iterdir()]
        # The connections are listed even if they are too few to exceed a limit, because their order is needed later.
        with contextlib.ExitStack() as opened:
            connections = self._connections(descriptors, opened)
            order = {peer: number for number, peer in enumerate(self._known)}
            peers = sorted(connections, key=lambda peer: order.get(peer, len(order)))
            self._known = dict.fromkeys(peers)
            by_address: defaultdict[str, list[tuple[str, int]]] = defaultdict(list)
            for peer in peers:
                by_address[peer[0]].append(peer)
            num_closed = 0
            for address, own in by_address.items():
                excess = own[self._max_per_address :]
                for peer in excess:
                    with contextlib.suppress(OSError):  # the connection was closed in the meantime
                        connections[peer].shutdown(socket.SHUT_RDWR)
                if excess:
                    logger.warning("closed %d connections from %s, which has too many", len(excess), address)
                num_closed += len(excess)
            return num_closed

    def _connections(
        self, descriptors: list[int], opened: contextlib.ExitStack
    ) -> dict[tuple[str, int], socket.socket]:
        """Return a duplicate socket of each connection, by peer, since descriptors may be closed and reused."""
        connections = {}
        for descriptor in descriptors:
            with (
                contextlib.suppress(OSError),
                contextlib.ExitStack() as own,
            ):  # it is closed, not a socket, or not connected
                number = os.dup(descriptor)
                own.callback(os.close, number)
                duplicate = socket.socket(fileno=number)
                own.pop_all()
                own.enter_context(duplicate)
                if duplicate.family in (socket.AF_INET, socket.AF_INET6) and duplicate.getsockname()[1] == self._port:
                    connections[duplicate.getpeername()[:2]] = duplicate
                    opened.push(own.pop_all())
        return connections
