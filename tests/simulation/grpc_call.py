"""A simulation of grpc.aio without sockets: both ends of a call over the simulated network.

Messages are serialized by the real stubs and handlers. As with HTTP/2's flow control, a writer waits while more than
the network's `window` messages are unread at the other end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import grpc

from tests.simulation.loop import Flag, Process
from tests.simulation.network import Network, Wire

Metadata = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Item:
    """An item sent over a wire.

    Attributes:
        kind: start, message, read (the sender has read some messages), half_close, cancel, headers, status or broken.
        count: For `read`: number of messages that have been read.
    """

    kind: str
    data: bytes = b""
    count: int = 0
    code: grpc.StatusCode = grpc.StatusCode.OK
    details: str = ""
    trailing: Metadata = ()

    def __str__(self) -> str:
        size = f" {len(self.data)}" if self.data else ""
        return f"{self.kind}{size}{'' if self.code is grpc.StatusCode.OK else ' ' + self.code.name}"


class End:
    """One end of a call: the received messages, and the number of sent messages that are still unread."""

    def __init__(self) -> None:
        self.inbox: deque[bytes] = deque()
        self.changed = Flag()
        self.can_write = Flag()
        self.num_unread = 0  # sent, but not yet read at the other end
        self.has_eof = False
        self._num_taken = 0

    def take(self, back: Wire, window: int) -> bytes:
        """Return the next message. Reading is acknowledged each time half of the window has been read."""
        self._num_taken += 1
        if 2 * self._num_taken >= window:
            back.send(Item("read", count=self._num_taken))
            self._num_taken = 0
        return self.inbox.popleft()

    def note_read(self, count: int) -> None:
        """Record that the other end has read `count` messages."""
        self.num_unread -= count
        self.can_write.set()


class Call:
    """Both ends of a call, and the connection between them."""

    def __init__(self, network: Network, client: Process, server: Process, method: str) -> None:
        self.network = network
        self.ends = (client, server)
        self.method = method
        self.client, self.server = End(), End()
        self.on_client_end: Callable[[Item], None] = lambda _: None
        self.on_server_end: Callable[[], None] = lambda: None
        self.on_headers: Callable[[], None] = lambda: None
        name = method.rpartition("/")[2]
        self.up = Wire(network, client, server, name, self._at_server)
        self.down = Wire(network, server, client, name, self._at_client)
        network.add(self)

    def _at_server(self, item: Item) -> None:
        if item.kind == "message":
            self.server.inbox.append(item.data)
        elif item.kind == "read":
            self.server.note_read(item.count)
            return
        elif item.kind == "half_close":
            self.server.has_eof = True
        else:
            self.network.remove(self)
            self.on_server_end()
        self.server.changed.set()

    def _at_client(self, item: Item) -> None:
        if item.kind == "message":
            self.client.inbox.append(item.data)
            self.client.changed.set()
        elif item.kind == "read":
            self.client.note_read(item.count)
        elif item.kind == "headers":
            self.on_headers()
        else:
            self.network.remove(self)
            self.on_client_end(item)

    def break_(self) -> None:
        """Cut the connection."""
        self.up.is_cut = self.down.is_cut = True
        self.network.remove(self)
        self.network.later(self.network.delay(), self.on_server_end)
        self.network.later(self.network.delay(), self.on_client_end, broken("the connection was reset"))

    def end_closed(self, end: Process) -> None:
        """Close the connection, as the operating system of a dead process does."""
        self.network.remove(self)
        if end is self.ends[0]:
            self.down.is_cut = True
            self.up.send_end(Item("cancel"))
        else:
            self.up.is_cut = True
            self.down.send_end(broken("the connection was closed"))


def broken(details: str) -> Item:
    return Item("broken", code=grpc.StatusCode.UNAVAILABLE, details=details)
