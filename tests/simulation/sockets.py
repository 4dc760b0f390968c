"""Connections and servers of the simulated event loop over the simulated network.

Frames between services use `create_server` of the event loop; the gRPC server uses listening sockets. A writer is told
to pause while `window` of its writes are unread at the other end.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from midstream.rpc.frames import _HEAD, _LENGTH_BYTES, Kind
from midstream.rpc.tunnel import TunnelTransport
from protos import scheduler_pb2
from tests.simulation.loop import Process
from tests.simulation.network import Network, Wire, running

_CLIENT_PORT = 1
_FIRST_FREE_PORT = 60_000
_RECONNECT_S = 0.1
_SPLIT_SHARE = 0.1

Make = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Item:
    """An item sent over a wire: open, data, read (the sender has read some data), eof (the sender writes no more) or
    closed.
    """

    kind: str
    data: bytes = b""
    count: int = 0

    def __str__(self) -> str:
        return f"{self.kind} {len(self.data)}" if self.data else self.kind


class End(asyncio.Transport):
    """One end of a connection: the transport of its process."""

    def __init__(self, network: Network, process: Process) -> None:
        super().__init__()
        self.process = process
        self.out: Wire | None = None
        self.pair: Pair | None = None
        self.protocol: Any = None
        self._network = network
        self._is_closed = False
        self._is_paused = False
        self._num_unread = 0  # sent, and not yet read at the other end
        self._num_taken = 0
        # What has arrived before the connection was accepted, or while its reader is paused.
        self._held: list[Item] = []
        self._is_reading = False

    def open(self, make: Make) -> None:
        """Open the connection."""
        self.protocol = make()
        self.protocol.connection_made(self)
        self.resume_reading()

    def pause_reading(self) -> None:
        """Hold back what arrives."""
        self._is_reading = False

    def resume_reading(self) -> None:
        """Pass on what was held back."""
        self._is_reading = True
        held, self._held = self._held, []
        for item in held:
            self.receive(item)

    def receive(self, item: Item) -> None:
        """Handle an arriving item in the context of the receiving process."""
        self._network.loop.call_soon(self._receive, item, context=self.process.context.copy())

    def _receive(self, item: Item) -> None:
        if self._is_closed:
            return
        if (not self._is_reading or self._held) and item.kind != "read":
            self._held.append(item)
        elif item.kind == "data":
            self._take(item.data)
        elif item.kind == "eof":
            if not self.protocol.eof_received():
                self.close()
        elif item.kind == "read":
            self._num_unread -= item.count
            if self._is_paused and self._num_unread < self._network.window:
                self._is_paused = False
                self.protocol.resume_writing()
        else:
            self._end(None if item.kind == "closed" else ConnectionResetError("the connection was reset"))

    def _take(self, data: bytes) -> None:
        self._num_taken += 1
        if 2 * self._num_taken >= self._network.window and self.out is not None:
            self.out.send(Item("read", count=self._num_taken))
            self._num_taken = 0
        place = len(data)
        if self._network.dice.random() < _SPLIT_SHARE:
            place = self._network.dice.randint(0, len(data))
        for piece in (data[:place], data[place:]):
            if piece and not self._is_closed:
                self.protocol.data_received(piece)

    def _end(self, error: Exception | None) -> None:
        if not self._is_closed:
            self._is_closed = True
            if self.protocol is not None:
                self.protocol.connection_lost(error)

    def write(self, data: Any) -> None:
        """Send bytes."""
        if self._is_closed or self.out is None:
            return
        pair = self.pair
        if pair is not None and pair.is_feed and self is pair.server:
            show(self._network, pair, data)
        self._num_unread += 1
        self.out.send(Item("data", bytes(data)))
        if not self._is_paused and self._num_unread >= self._network.window:
            self._is_paused = True
            self.protocol.pause_writing()

    def close(self) -> None:
        """Close the connection after everything that was sent before."""
        if not self._is_closed and self.out is not None and self.pair is not None:
            self.out.send(Item("closed"))
            self._network.remove(self.pair)
            self._network.loop.call_soon(self._end, None, context=self.process.context.copy())

    abort = close

    def write_eof(self) -> None:
        """Close this side of the connection only."""
        if not self._is_closed and self.out is not None:
            self.out.send(Item("eof"))

    def is_closing(self) -> bool:
        """Return whether the connection is closed."""
        return self._is_closed

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return the address of the other end; otherwise the default value."""
        if name == "peername" and self.pair is not None:
            return self.pair.ends[self is self.pair.client].name, _CLIENT_PORT
        return default

    def get_write_buffer_size(self) -> int:
        """Return 0, since all written data is in transit."""
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Ignore the limits, since the window of the network applies."""


class ShownTunnel(TunnelTransport):
    """A connection within a call."""

    def __init__(self, network: Network, call: Any, protocol: asyncio.Protocol) -> None:
        self._network = network
        # Only the side that serves the call knows its peer; a detokenizer may share the scheduler's process.
        self._is_feed = running().name == "scheduler" and "detokenizer" in getattr(call, "peer", str)()
        super().__init__(call, protocol)

    def write(self, data: Any) -> None:
        """Send bytes."""
        if self._is_feed:
            show(self._network, self, data)
        super().write(data)


def show(network: Network, connection: ShownTunnel | Pair, data: bytes) -> None:
    """Pass the messages that a scheduler sends on a feed to the checker. Each write contains whole frames."""
    at = 0
    while at < len(data):
        length, kind = _HEAD.unpack_from(data, at)
        if kind == Kind.MESSAGE:
            batch = scheduler_pb2.FeedBatch.FromString(bytes(data[at + _HEAD.size : at + _LENGTH_BYTES + length]))
            network.on_write(connection, batch)
        at += _LENGTH_BYTES + length


class Pair:
    """The two ends of a connection."""

    def __init__(self, network: Network, client: Process, listener: Listener | ListeningSocket) -> None:
        server = listener.process
        self.name = listener.name
        self.ends = (client, server)
        self.is_feed = self.name == "frames" and server.name == "scheduler" and client.name.startswith("detokenizer")
        self.client, self.server = End(network, client), End(network, server)
        self._network = network
        self._connected = listener.connected
        up = Wire(network, client, server, self.name, self._at_server)
        down = Wire(network, server, client, self.name, self.client.receive)
        self.client.out, self.server.out = up, down
        self.client.pair = self.server.pair = self
        self._wires = (up, down)
        network.add(self)
        up.send(Item("open"))

    def _at_server(self, item: Item) -> None:
        if item.kind == "open":
            self._network.loop.call_soon(self._connected, self.server, context=self.server.process.context.copy())
        else:
            self.server.receive(item)

    def break_(self) -> None:
        """Cut the connection."""
        for wire in self._wires:
            wire.is_cut = True
        self._network.remove(self)
        for end in (self.server, self.client):
            self._network.later(self._network.delay(), end.receive, Item("broken"))

    def end_closed(self, end: Process) -> None:
        """Close the connection, as the operating system of a dead process does."""
        self._network.remove(self)
        mine, other = self._wires if end is self.ends[0] else reversed(self._wires)
        other.is_cut = True
        mine.send_end(Item("closed"))


class Listener:
    """A server that the event loop has created."""

    name = "frames"

    def __init__(self, network: Network, address: tuple[str, int], make: Make) -> None:
        self.process = running()
        self.make = make
        self.sockets = [self]
        self._network = network
        self._address = address
        network.bind(f"{address[0]}:{address[1]}", self)

    def connected(self, end: End) -> None:
        """Open a connection."""
        end.open(self.make)

    def getsockname(self) -> tuple[str, int]:
        """Return the bound address."""
        return self._address

    def watch(self, _: object) -> None:
        """Do nothing: the network itself opens connections."""

    def close(self) -> None:
        """Stop listening."""
        key = f"{self._address[0]}:{self._address[1]}"
        if self._network.listeners.get(key) is self:
            del self._network.listeners[key]


class ListeningSocket:
    """A socket that listens, with the interface of `socket.socket`."""

    name = "http2"

    def __init__(self, network: Network) -> None:
        self.process = running()
        self._network = network
        self._address = ("", 0)
        self._backlog: deque[End] = deque()
        self._notify: Callable[[], object] = lambda: None

    def __enter__(self) -> ListeningSocket:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def bind(self, address: tuple[str, int]) -> None:
        """Set the address."""
        self._address = address

    def listen(self, _: int) -> None:
        """Let clients connect."""
        self._network.bind(f"{self._address[0]}:{self._address[1]}", self)

    def getsockname(self) -> tuple[str, int]:
        """Return the bound address."""
        return self._address

    def setsockopt(self, *_: object) -> None:
        """Ignore options."""

    setblocking = setsockopt

    def watch(self, notify: Callable[[], object]) -> None:
        """Call back as long as there are connections to accept."""
        self._notify = notify
        if self._backlog:
            notify()

    def connected(self, end: End) -> None:
        """Queue a connection."""
        self._backlog.append(end)
        self._notify()

    def accept(self) -> tuple[AcceptedSocket, tuple[str, int]]:
        """Return the oldest connection and its client's address."""
        if not self._backlog:
            raise BlockingIOError
        end = self._backlog.popleft()
        if self._backlog:
            self._notify()
        return AcceptedSocket(end), end.get_extra_info("peername")

    def close(self) -> None:
        """Stop listening, and reset the connections that were not accepted."""
        key = f"{self._address[0]}:{self._address[1]}"
        if self._network.listeners.get(key) is self:
            del self._network.listeners[key]
        while self._backlog:
            self._backlog.popleft().close()


class AcceptedSocket:
    """A socket of a client that was accepted; `connect_accepted_socket` makes it a transport."""

    def __init__(self, end: End) -> None:
        self.end = end

    def setblocking(self, _: bool) -> None:
        """Ignore the mode."""

    def close(self) -> None:
        """Close the connection."""
        self.end.close()


class Sockets:
    """Creates servers and connections for the loop."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._ports = itertools.count(_FIRST_FREE_PORT)

    @property
    def module(self) -> Any:
        """Return what stands for the module `socket` in the gRPC server."""
        constants = {name: value for name, value in vars(socket).items() if name.isupper()}
        return SimpleNamespace(
            **constants,
            socket=lambda *_: ListeningSocket(self._network),
            getaddrinfo=lambda host, port, **_: [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (host, port))],
        )

    def listen(self, make: Make, host: str, port: int) -> Listener:
        """Listen on an address; port 0 picks a free port."""
        return Listener(self._network, (host, port or next(self._ports)), make)

    async def connect(self, make: Make, host: str, port: int) -> tuple[End, Any]:
        """Connect to an address; waits while the network blocks traffic."""
        network, process = self._network, running()
        await asyncio.sleep(2 * network.delay())
        while True:
            listener: Listener | ListeningSocket | None = network.listeners.get(f"{host}:{port}")
            if listener is None or process.is_dead:
                raise ConnectionRefusedError(f"no process listens on {host}:{port}")
            if network.blocks_frames and isinstance(listener, Listener):
                raise ConnectionRefusedError(f"the port {port} is blocked")
            if not network.is_parted(process, listener.process):
                break
            await asyncio.sleep(_RECONNECT_S)
        pair = Pair(network, process, listener)
        pair.client.open(make)
        return pair.client, pair.client.protocol
