"""The address behind a name changes: python -m tests.faults.name_scenarios --folder FOLDER --prefix dns:///

This is a separate program, since it replaces /etc/hosts; it must have a mount namespace of its own. It is started by
test_names.py.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from midstream.client import AsyncClient
from midstream.model.folder import open_model_folder
from tests.faults.processes import WAIT_S, Streams, until
from tests.integration.named_processes import NamedProcesses
from tests.ports import free_ports

OLD, NEW = "127.0.0.1", "127.0.0.2"
NAMES = ("scheduler", "detokenizer", "router")
FIRSTS = [1000 * number for number in range(1, 5)]
NUM_TOKENS = 100


class NamedParts(NamedProcesses):
    """One process of each component; they and the client know one another by name only."""

    def __init__(self, folder: Path, prefix: str) -> None:
        super().__init__(folder)
        self._prefix = prefix
        self._addresses = dict.fromkeys(NAMES, OLD)
        self._ports = dict(zip((*NAMES, "worker"), free_ports(len(NAMES) + 1), strict=True))
        self._model = open_model_folder("smollm2")
        for name, content in (("hosts", ""), ("resolv.conf", f"nameserver {OLD}\n")):  # no server listens there
            (folder / name).write_text(content, encoding="utf-8")
            subprocess.run(["mount", "--bind", str(folder / name), f"/etc/{name}"], check=True)
        self._publish()

    def _publish(self) -> None:
        lines = [f"{OLD} localhost", *(f"{address} {name}" for name, address in self._addresses.items())]
        # Not replaced by another file, since this file is mounted.
        Path("/etc/hosts").write_text("\n".join([*lines, ""]), encoding="utf-8")

    def target(self, name: str) -> str:
        return f"{self._prefix}{name}:{self._ports[name]}"

    def start(self, *names: str) -> None:
        """Start processes at the first address."""
        for name in names:
            self.launch(name, *self._command(name, OLD))

    def _command(self, name: str, address: str) -> list[str]:
        if name == "worker":
            model = ["--model-fingerprint", self._model.fingerprint, "--vocab-size", str(self._model.vocab_size)]
            scheduler = f"tcp://scheduler:{self._ports['worker']}"
            return ["tests.fakes.worker", "--scheduler", scheduler, "--step-ms", "10", *model]
        own = ["--host", address, "--port", str(self._ports[name])]
        if name == "scheduler":
            ports = ["--worker-port", str(self._ports["worker"])]
            return ["scheduler", *own, *ports, "--journal-path", str(self.folder / "journal")]
        links = ["--schedulers", self.target("scheduler")]
        if name == "router":
            links += ["--detokenizers", self.target("detokenizer"), "--http-port", "0"]
        return [name, *own, *links]

    async def move(self, name: str) -> None:
        """Kill a process, and start it at another address; until it listens there, its name has none."""
        self.end(name)
        del self._addresses[name]
        self._publish()
        self.launch(name, *self._command(name, NEW))
        await until(lambda: _listens(NEW, self._ports[name]))
        self._addresses[name] = NEW
        self._publish()


def _listens(address: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((address, port)):
        return True
    return False


@contextlib.contextmanager
def running(folder: Path, prefix: str) -> Iterator[NamedParts]:
    """Start all processes; kill them at the end."""
    parts = NamedParts(folder, prefix)
    try:
        parts.start(*NAMES, "worker")
        yield parts
    finally:
        parts.close()


async def move_each(parts: NamedParts) -> None:
    """Move the scheduler, the detokenizer and the router in the middle of streams."""
    async with AsyncClient(parts.target("router")) as client:

        async def is_whole() -> bool:
            info = await client.server_info()
            return bool(info.worker_groups and info.detokenizers)

        await until(is_whole)
        for name in NAMES:
            began = time.monotonic()
            streams = Streams(client, FIRSTS, NUM_TOKENS, timeout_s=WAIT_S)
            await streams.reach(NUM_TOKENS // 10)
            await parts.move(name)
            await streams.check()
            print(f"{name}: {time.monotonic() - began:.1f} s", flush=True)


def main() -> None:
    """Run the scenario; fail if anything is wrong."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True, help="For logs and the hosts file.")
    parser.add_argument("--prefix", default="", help="What precedes NAME:PORT in the settings.")
    arguments = parser.parse_args()
    with running(arguments.folder, arguments.prefix) as parts:
        asyncio.run(move_each(parts))


if __name__ == "__main__":
    main()
