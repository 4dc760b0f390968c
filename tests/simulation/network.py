"""The network between simulated machines: it delays, partitions, cuts, and counts every message that arrives.

A `Wire` is one direction of a connection. Its messages arrive in order, as over TCP. During a partition they are held;
they arrive once it is healed, unless the connection is cut before.
"""

from __future__ import annotations

import asyncio
import contextvars
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from tests.simulation.loop import PROCESS, Process, VirtualLoop

# Both ends close a connection that receives no response for this long.
KEEPALIVE_S = 5.0
_OUTSIDE = contextvars.Context()


@dataclass(frozen=True, slots=True)
class Weather:
    """The behavior of the network.

    Attributes:
        delay_s: Typical delay of a message.
        slow_share: Share of messages that are delayed by up to `slow_s`.
        loss, repeats, overtakes: Shares of ZeroMQ messages that are lost, duplicated, or reordered.
    """

    delay_s: float = 0.001
    slow_share: float = 0.0
    slow_s: float = 0.2
    loss: float = 0.0
    repeats: float = 0.0
    overtakes: float = 0.0


class Connection(Protocol):
    """A breakable connection between two processes."""

    ends: tuple[Process, Process]

    def break_(self) -> None:
        """Cut the connection: notify both ends; messages in transit are lost."""

    def end_closed(self, end: Process) -> None:
        """Handle the death of the process at one end; the other end is notified after it has received everything that
        was sent before.
        """


class Network:
    """All connections of a simulation.

    Attributes:
        loop: The running event loop.
        weather: Current behavior of the network.
        window: Maximum number of a call's messages that are in transit or unread.
        blocks_frames: Whether the frames ports cannot be reached, so that frames run within calls.
        listeners: Listeners by address.
        connections: Open connections, oldest first.
        num_messages: Number of messages that have arrived.
        on_message: Called before each message arrives.
        on_write: Called with a call or connection, and each message that its server writes to it.
        trace: All events, one per line; None if tracing is off.
    """

    def __init__(self, loop: VirtualLoop, dice: random.Random, *, trace: bool = False) -> None:
        self.loop = loop
        self.dice = dice
        self.weather = Weather()
        self.window = 16
        self.blocks_frames = False
        self.tokenizers: dict[str, str] = {}  # of processes with another one than the usual, by name
        self.listeners: dict[str, Any] = {}
        self.connections: dict[Connection, None] = {}
        self.num_messages = 0
        self.on_message: Callable[[], None] = lambda: None
        self.on_write: Callable[[object, Any], None] = lambda _, __: None
        self.trace: list[str] | None = [] if trace else None
        self._parted: set[frozenset[str]] = set()
        self._held: dict[Wire, None] = {}

    def note(self, *words: object) -> None:
        """Append a line to the log of events."""
        if self.trace is not None:
            self.trace.append(" ".join((f"{self.loop.now:.6f}", *map(str, words))))

    def later(self, delay_s: float, callback: Callable[..., object], *arguments: Any) -> asyncio.TimerHandle:
        """Schedule a callback that belongs to no process."""
        return self.loop.call_later(delay_s, callback, *arguments, context=_OUTSIDE)

    def delay(self) -> float:
        """Return the delay of one message."""
        weather = self.weather
        if weather.slow_share and self.dice.random() < weather.slow_share:
            return self.dice.uniform(0, weather.slow_s)
        return weather.delay_s * (0.5 + self.dice.random())

    def arrive(self, *words: object) -> None:
        """Deliver a message."""
        self.num_messages += 1
        self.note(*words)
        self.on_message()

    def add(self, connection: Connection) -> None:
        """Register an open connection."""
        self.connections[connection] = None

    def remove(self, connection: Connection) -> None:
        """Remove a closed connection."""
        self.connections.pop(connection, None)

    def bind(self, address: str, listener: Any) -> None:
        """Listen on an address, replacing any previous listener."""
        process = running()
        self.listeners[address] = listener

        def unbind() -> None:
            if self.listeners.get(address) is listener:
                del self.listeners[address]

        process.on_death.append(unbind)

    def died(self, process: Process) -> None:
        """Close the connections of a dead process, as its operating system does."""
        for connection in [item for item in self.connections if process in item.ends]:
            connection.end_closed(process)

    def cut(self, matches: Callable[[Process, Process], bool]) -> int:
        """Break all connections that `matches` accepts; return their number."""
        broken = [item for item in self.connections if matches(*item.ends)]
        for connection in broken:
            connection.break_()
        return len(broken)

    def is_parted(self, one: Process, other: Process) -> bool:
        """Return whether two machines are partitioned from each other."""
        return frozenset((one.name, other.name)) in self._parted

    def part(self, one: str, other: str) -> None:
        """Block all traffic between two machines."""
        pair = frozenset((one, other))
        self._parted.add(pair)
        self.later(KEEPALIVE_S, self._give_up, pair)

    def heal(self) -> None:
        """Remove all partitions, and deliver held messages."""
        self._parted.clear()
        held, self._held = self._held, {}
        for wire in held:
            self.later(self.delay(), wire.release)

    def hold(self, wire: Wire) -> None:
        """Record that a wire holds messages until the network is healed."""
        self._held[wire] = None

    def _give_up(self, pair: frozenset[str]) -> None:
        if pair in self._parted:
            self.cut(lambda one, other: frozenset((one.name, other.name)) == pair)


class Wire:
    """One direction of a connection."""

    __slots__ = ("_held", "_last", "_name", "_network", "_receive", "is_cut", "source", "target")

    def __init__(
        self, network: Network, source: Process, target: Process, name: str, receive: Callable[[Any], None]
    ) -> None:
        self.source = source
        self.target = target
        self.is_cut = False
        self._network = network
        self._name = f"{source!r} {target!r} {name}"
        self._receive = receive
        self._last = 0.0
        self._held: list[Any] = []

    def send(self, item: Any) -> None:
        """Send a message; dead processes send no messages."""
        if self.source.is_dead or self.is_cut:
            return
        self._send(item)

    def send_end(self, item: Any) -> None:
        """Send the last message, even if the sending process is dead."""
        if not self.is_cut:
            self._send(item)

    def release(self) -> None:
        """Deliver held messages after the network is healed."""
        if self._network.is_parted(self.source, self.target):
            self._network.hold(self)
            return
        held, self._held = self._held, []
        for item in held:
            self._arrive(item)

    def _send(self, item: Any) -> None:
        network = self._network
        self._last = max(network.loop.now + network.delay(), self._last)
        network.loop.call_at(self._last, self._arrive, item, context=_OUTSIDE)

    def _arrive(self, item: Any) -> None:
        if self.is_cut:
            return
        if self._held or self._network.is_parted(self.source, self.target):
            self._held.append(item)
            self._network.hold(self)
            return
        self._network.arrive(self._name, item)
        self._receive(item)


def running() -> Process:
    """Return the process whose code is running."""
    process = PROCESS.get()
    assert process is not None, "code of the system runs outside of any process"
    return process
