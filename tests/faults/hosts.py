"""Hosts whose links can be cut: network namespaces of this machine, or relays if namespaces are not allowed.

python -m tests.faults.hosts ADDRESS PORT SOCKET forwards connections to a Unix socket, so that its server appears to be
on the host where this program runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Awaitable, Sequence
from typing import Protocol

_NETWORK = "10.77.0"


def namespace_command() -> list[str]:
    """Return the command prefix that creates namespaces; empty if this machine does not allow them."""
    unshare = ["unshare", "--net", "--mount"] if os.geteuid() == 0 else ["unshare", "--user", "-r", "--net", "--mount"]
    attempt = [*unshare, sys.executable, "-m", "tests.faults.hosts", "try"]
    try:
        result = subprocess.run(attempt, capture_output=True, check=False, timeout=240)
    except OSError:
        return []
    return unshare if result.returncode == 0 else []


class Hosts(Protocol):
    """Named hosts, all of which can reach each other at first."""

    listen_address: str

    def command(self, host: str, *words: str) -> list[str]:
        """Return the command that runs `words` on a host."""

    async def dial(self, source: str, target: str, port: int) -> str:
        """Return the HOST:PORT at which `source` reaches a port of `target`; an empty source means this process."""

    def cut(self, first: str, second: str) -> None:
        """Drop all traffic between two hosts without notifying them."""

    def heal(self, first: str, second: str) -> None:
        """Restore the traffic."""


class Namespaces:
    """Hosts as network namespaces on a bridge; this process must have its own network and mount namespaces."""

    listen_address = "0.0.0.0"

    def __init__(self, names: Sequence[str]) -> None:
        self._addresses = {name: f"{_NETWORK}.{number}" for number, name in enumerate(names, 1)}
        _run("mount", "-t", "tmpfs", "tmpfs", "/run")
        _ip("link", "set", "lo", "up")
        _ip("link", "add", "bridge", "type", "bridge")
        _ip("address", "add", f"{_NETWORK}.254/24", "dev", "bridge")
        _ip("link", "set", "bridge", "up")
        for number, (name, address) in enumerate(self._addresses.items()):
            _ip("netns", "add", name)
            _ip("link", "add", f"host{number}", "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("link", "set", f"host{number}", "master", "bridge", "up")
            _ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _ip("-n", name, "link", "set", device, "up")

    def command(self, host: str, *words: str) -> list[str]:
        return ["nsenter", f"--net=/run/netns/{host}", *words]

    async def dial(self, source: str, target: str, port: int) -> str:
        return f"{self._addresses[target]}:{port}"

    def cut(self, first: str, second: str) -> None:
        for here, there in ((first, second), (second, first)):
            # This address belongs to no host, so packets to it are dropped silently. An unreachable route would notify
            # the sender.
            words = ("lladdr", "02:00:00:00:00:01", "dev", "eth0", "nud", "permanent")
            _ip("-n", here, "neigh", "replace", self._addresses[there], *words)

    def heal(self, first: str, second: str) -> None:
        for here, there in ((first, second), (second, first)):
            _ip("-n", here, "neigh", "delete", self._addresses[there], "dev", "eth0")


class Relays:
    """Simulated hosts on this machine. Each call of `dial` starts a relay, which stops forwarding while the link
    between its two hosts is cut.
    """

    listen_address = "127.0.0.1"

    def __init__(self) -> None:
        self._gates: dict[frozenset[str], asyncio.Event] = {}
        self._servers: list[asyncio.Server] = []
        self._relaying: set[asyncio.Task[None]] = set()

    def command(self, host: str, *words: str) -> list[str]:
        return list(words)

    async def dial(self, source: str, target: str, port: int) -> str:
        gate = self._gate(source, target)

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            relaying = asyncio.create_task(relay(reader, writer, asyncio.open_connection("127.0.0.1", port), gate))
            self._relaying.add(relaying)
            relaying.add_done_callback(self._relaying.discard)

        server = await asyncio.start_server(accept, "127.0.0.1", 0)
        self._servers.append(server)
        address: tuple[str, int] = server.sockets[0].getsockname()
        return f"{address[0]}:{address[1]}"

    def cut(self, first: str, second: str) -> None:
        self._gate(first, second).clear()

    def heal(self, first: str, second: str) -> None:
        self._gate(first, second).set()

    async def close(self) -> None:
        """Stop accepting connections, and wait until the existing connections end."""
        for server in self._servers:
            server.close()
        await asyncio.gather(*self._relaying)

    def _gate(self, first: str, second: str) -> asyncio.Event:
        pair = frozenset((first, second))
        if pair not in self._gates:
            self._gates[pair] = asyncio.Event()
            self._gates[pair].set()
        return self._gates[pair]


_Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def relay(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    opening: Awaitable[_Connection],
    gate: asyncio.Event,
) -> None:
    """Forward bytes in both directions while the gate is open."""
    try:
        await gate.wait()
        there = await opening
    except OSError:
        writer.close()
        return
    await asyncio.gather(_pump(reader, there[1], gate), _pump(there[0], writer, gate))


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, gate: asyncio.Event) -> None:
    with contextlib.suppress(OSError):
        try:
            while data := await reader.read(64 << 10):
                await gate.wait()
                writer.write(data)
                await writer.drain()
        finally:
            writer.close()  # also if the test ends first
        await writer.wait_closed()


async def serve_unix_socket(address: str, port: int, path: str) -> None:
    """Forward connections from a port to a Unix socket until the process is killed."""
    gate = asyncio.Event()
    gate.set()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await relay(reader, writer, asyncio.open_unix_connection(path), gate)

    async with await asyncio.start_server(accept, address, port) as server:
        await server.serve_forever()


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*words: str) -> None:
    result = subprocess.run(words, capture_output=True, text=True, check=False, timeout=240)
    if result.returncode:
        raise OSError(f"{' '.join(words)}: {result.stderr}")


def main() -> None:
    """Create two hosts to check whether this machine allows namespaces, or serve a Unix socket."""
    if sys.argv[1:] == ["try"]:
        hosts = Namespaces(["a", "b"])
        _run(*hosts.command("a", "true"))
        hosts.cut("a", "b")
    else:
        asyncio.run(serve_unix_socket(sys.argv[1], int(sys.argv[2]), sys.argv[3]))


if __name__ == "__main__":
    main()
