"""A ZeroMQ ROUTER and its DEALERs without sockets, over the simulated network.

As with real ZeroMQ, a connection is restored automatically with a new identity, and messages in transit are lost. In
addition, this network may drop, duplicate and reorder individual messages.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import zmq

from tests.simulation.loop import Flag, Process
from tests.simulation.network import Network, Wire, running

_RECONNECT_S = 0.05
# The exception is shared, because each new one would ask the library for the text of its error number.
_AGAIN = zmq.Again()


@dataclass(frozen=True, slots=True)
class Frame:
    """One message."""

    data: bytes
    kind: str = "frame"

    def __str__(self) -> str:
        return f"{self.kind} {len(self.data)}"


class Link:
    """The connection of one DEALER to a ROUTER."""

    def __init__(self, network: Network, dealer: Dealer, router: Router, identity: bytes) -> None:
        self.network = network
        self.ends = (dealer.process, router.process)
        self.identity = identity
        self._dealer, self._router = dealer, router
        self.up = Wire(network, dealer.process, router.process, "zmq", self._at_router)
        self.down = Wire(network, router.process, dealer.process, "zmq", self._at_dealer)
        network.add(self)

    def send(self, wire: Wire, data: bytes) -> None:
        """Send a message, subject to the faults of the network."""
        weather, dice = self.network.weather, self.network.dice
        if weather.loss and dice.random() < weather.loss:
            self.network.note("zmq message lost")
            return
        times = 2 if weather.repeats and dice.random() < weather.repeats else 1
        for _ in range(times):
            if weather.overtakes and dice.random() < weather.overtakes:
                aside = Wire(self.network, wire.source, wire.target, "zmq overtakes", wire._receive)
                aside.send(Frame(data))
            else:
                wire.send(Frame(data))

    def _at_router(self, frame: Frame) -> None:
        if self._router.links.get(self.identity) is not self:
            return
        if frame.kind == "closed":
            self._router.forget(self.identity)
        else:
            self._router.receive([self.identity, frame.data])

    def _at_dealer(self, frame: Frame) -> None:
        if self._dealer.link is not self:
            return
        if frame.kind == "closed":
            self._dealer.lose()
        else:
            self._dealer.receive(frame.data)

    def break_(self) -> None:
        """Cut the connection; the dealer reconnects."""
        self.up.is_cut = self.down.is_cut = True
        self.network.remove(self)
        self._router.forget(self.identity)
        self._dealer.lose()

    def end_closed(self, end: Process) -> None:
        """Close the connection, as the operating system of a dead process does."""
        self.network.remove(self)
        if end is self.ends[0]:
            self.up.send_end(Frame(b"", "closed"))
        else:
            self.down.send_end(Frame(b"", "closed"))


_DISCONNECTED = [struct.pack("=hi", zmq.EVENT_DISCONNECTED, 0), b"address"]


class Monitor:
    """A stand-in for the monitor socket of a ROUTER or DEALER, which reports closed connections."""

    def __init__(self) -> None:
        self._inbox: deque[list[bytes]] = deque()
        self._readable = Flag()

    def receive(self, frames: list[bytes]) -> None:
        """Receive a message."""
        self._inbox.append(frames)
        self._readable.set()

    async def recv_multipart(self) -> list[bytes]:
        """Return the next message, like zmq.asyncio does."""
        while not self._inbox:
            await self._readable.wait()
        return self._inbox.popleft()

    def close(self) -> None:
        """Do nothing."""


class Router:
    """A stand-in for a ROUTER socket; messages are preceded by the identity of their sender."""

    def __init__(self, network: Network) -> None:
        self._inbox: deque[list[bytes]] = deque()
        self._on_readable: Callable[[], object] = lambda: None
        self.process = running()
        self.links: dict[bytes, Link] = {}
        self._target: Link | None = None
        self._network = network
        self._address = ""
        self._monitor: Monitor | None = None

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Return a function that accepts all options; security options have no effect here."""
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_: None

    def bind(self, address: str) -> None:
        """Accept connections from dealers."""
        self._address = address
        self._network.bind(address, self)

    def getsockopt_string(self, _: int) -> str:
        """Return the bound address."""
        return self._address

    def get_monitor_socket(self, _: int) -> Monitor:
        """Return a monitor of closed connections."""
        self._monitor = Monitor()
        return self._monitor

    def forget(self, identity: bytes) -> None:
        """Remove the closed connection of a dealer."""
        if self.links.pop(identity, None) is not None and self._monitor is not None:
            self._monitor.receive(_DISCONNECTED)

    def fileno(self) -> Any:
        """Return the socket itself, as the descriptor for the loop."""
        return self

    def getsockopt(self, _: int) -> int:
        """Return whether the socket is readable."""
        return zmq.POLLIN * bool(self._inbox)

    def watch(self, on_readable: Callable[[], object]) -> None:
        """Call back in the loop when messages arrive in an empty inbox, like an edge-triggered descriptor."""
        self._on_readable = on_readable

    def receive(self, frames: list[bytes]) -> None:
        """Receive a message."""
        self._inbox.append(frames)
        if len(self._inbox) == 1:
            self._on_readable()

    def recv_multipart(self, _: int = 0) -> list[bytes]:
        """Return the next message."""
        if not self._inbox:
            raise _AGAIN.with_traceback(None)
        return self._inbox.popleft()

    def send(self, frame: bytes, flags: int = 0) -> None:
        """Send a message to a dealer: first its identity, then the message."""
        if flags & zmq.SNDMORE:
            self._target = self.links.get(frame)
            if self._target is None:
                raise zmq.ZMQError(zmq.EHOSTUNREACH)
        elif self._target is not None:
            self._target.send(self._target.down, frame)

    def close(self) -> None:
        """Reject all connections."""
        if self._network.listeners.get(self._address) is self:
            del self._network.listeners[self._address]
        for link in list(self.links.values()):
            link.end_closed(self.process)
        self.links.clear()


class Context:
    """A stand-in for zmq.asyncio.Context."""

    def __init__(self, network: Network) -> None:
        self._network = network

    def socket(self, kind: int, **_: object) -> Any:
        """Return a scheduler's socket."""
        assert kind == zmq.ROUTER
        return Router(self._network)

    def term(self) -> None:
        """Do nothing."""


class LinkMonitor:
    """A stand-in for a worker's monitor socket, which is polled."""

    def __init__(self) -> None:
        self.events: deque[list[bytes]] = deque()

    def fileno(self) -> int:
        """Return a number that no file has."""
        return -1

    def recv_multipart(self, _: int = 0) -> list[bytes]:
        """Return the next event."""
        if not self.events:
            raise _AGAIN.with_traceback(None)
        return self.events.popleft()


class Dealer:
    """A stand-in for a worker's DEALER socket: an empty inbox raises `zmq.Again`."""

    def __init__(self, network: Network, address: str, on_readable: Callable[[], None]) -> None:
        self.process = running()
        self.link: Link | None = None
        self._network, self._address = network, address
        self._on_readable = on_readable
        self._inbox: deque[bytes] = deque()
        self.monitor = LinkMonitor()
        self._connect_later()

    def _connect_later(self) -> None:
        self._network.later(_RECONNECT_S * self._network.dice.uniform(0.2, 1.8), self._connect)

    def _connect(self) -> None:
        if self.process.is_dead or self.link is not None:
            return
        router: Router | None = self._network.listeners.get(self._address)
        if router is None or router.process.is_dead or self._network.is_parted(self.process, router.process):
            self._connect_later()
            return
        identity = self._network.dice.randbytes(5)
        self.link = router.links[identity] = Link(self._network, self, router, identity)
        self._network.note(f"{self.process!r} connects to {router.process!r}")

    def lose(self) -> None:
        """Handle the loss of the connection."""
        self.link = None
        self.monitor.events.append(_DISCONNECTED)
        self._on_readable()
        self._connect_later()

    def receive(self, data: bytes) -> None:
        """Receive a message."""
        self._inbox.append(data)
        self._on_readable()

    def send(self, data: bytes, _: int = 0) -> None:
        """Send a message."""
        if self.process.is_dead:
            return
        if self.link is None:
            raise zmq.Again
        self.link.send(self.link.up, data)

    def getsockopt(self, _: int) -> int:
        """Return whether the socket is readable."""
        return zmq.POLLIN * bool(self._inbox)

    def recv_multipart(self, _: int = 0) -> list[bytes]:
        """Return the next message."""
        if not self._inbox:
            raise _AGAIN.with_traceback(None)
        return [self._inbox.popleft()]


class Poller:
    """A stand-in for a poller; the simulated connection does its own waiting before it polls."""

    def __init__(self, monitor: LinkMonitor) -> None:
        self._monitor = monitor

    def poll(self, _: int) -> list[tuple[int, int]]:
        """Return immediately, with the monitor's descriptor if it has events."""
        return [(self._monitor.fileno(), int(zmq.POLLIN))] if self._monitor.events else []
