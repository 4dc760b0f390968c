"""Each message between components, and to and from clients, arrives 200 ms late."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Iterable
from functools import partial
from pathlib import Path

import pytest

from midstream.client import AsyncClient
from midstream.model.folder import open_model_folder
from tests.faults.processes import Streams, until
from tests.integration.named_processes import NamedProcesses
from tests.ports import free_ports

DELAY_S = 0.2
# Every component listens at the first address; others, and the client, connect to the second one, where proxies are.
LISTEN, DIAL = "127.0.0.1", "127.0.0.2"
PORTS = ("scheduler", "worker", "detokenizer", "router")
FRAMES_PORTS = ("scheduler frames", "detokenizer frames")
FIRSTS, NUM_TOKENS = [1000, 2000, 3000, 4000], 24


class Late(asyncio.Protocol):
    """One direction of a connection: passes on what it receives after a delay, and the end of the data as well."""

    def __init__(self, opened: set[asyncio.Transport]) -> None:
        self._received = deque[bytes]()
        self._opened = opened
        self.onward: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._opened.add(transport)

    def data_received(self, data: bytes) -> None:
        self._received.append(data)
        asyncio.get_running_loop().call_later(DELAY_S, self._pass_on)

    def _pass_on(self) -> None:
        data = self._received.popleft()
        if self.onward is not None:
            self.onward.write(data)

    def connection_lost(self, error: Exception | None) -> None:
        if self.onward is not None:
            asyncio.get_running_loop().call_later(DELAY_S, self.onward.close)


class Proxy(Late):
    """The side of the caller; it connects to the component when its caller connects."""

    def __init__(self, opened: set[asyncio.Transport], port: int) -> None:
        super().__init__(opened)
        self._port = port

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        assert isinstance(transport, asyncio.Transport)
        transport.pause_reading()
        self._connecting = asyncio.create_task(self._connect(transport))

    async def _connect(self, caller: asyncio.Transport) -> None:
        answers = Late(self._opened)
        answers.onward = caller
        try:
            self.onward, _ = await asyncio.get_running_loop().create_connection(lambda: answers, LISTEN, self._port)
        except OSError:
            caller.abort()
            return
        caller.resume_reading()


@contextlib.asynccontextmanager
async def proxies(ports: Iterable[int]) -> AsyncIterator[None]:
    """Run a proxy in front of each port."""
    loop = asyncio.get_running_loop()
    opened: set[asyncio.Transport] = set()
    servers = [await loop.create_server(partial(Proxy, opened, port), DIAL, port) for port in ports]
    yield
    for server in servers:
        server.close()
    for transport in opened:
        transport.abort()
    await asyncio.sleep(0)  # the transports close in this iteration of the loop


class DistantParts(NamedProcesses):
    """One process of each component, without Unix sockets, which would not be delayed."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._model = open_model_folder("smollm2")
        names = (*PORTS, *FRAMES_PORTS)
        self.ports = dict(zip(names, free_ports(len(names)), strict=True))

    def target(self, name: str) -> str:
        return f"{DIAL}:{self.ports[name]}"

    def start(self, *names: str) -> None:
        for name in names:
            self.launch(name, *self._command(name))

    def _command(self, name: str) -> list[str]:
        if name == "worker":
            model = ["--model-fingerprint", self._model.fingerprint, "--vocab-size", str(self._model.vocab_size)]
            return ["tests.fakes.worker", "--scheduler", f"tcp://{self.target('worker')}", *model]
        command = ["tests.fakes.distant", name, "--host", LISTEN, "--port", str(self.ports[name])]
        if name != "router":
            command += ["--frames-port", str(self.ports[f"{name} frames"])]
        if name == "scheduler":
            journal = str(self.folder / "journal")
            return [*command, "--worker-port", str(self.ports["worker"]), "--journal-path", journal]
        command += ["--schedulers", self.target("scheduler")]
        if name == "router":
            command += ["--detokenizers", self.target("detokenizer"), "--http-port", "0"]
        return command


@contextlib.asynccontextmanager
async def distant(folder: Path, *, blocks_frames: bool) -> AsyncIterator[DistantParts]:
    """Start all components and the proxies in front of them; with `blocks_frames`, not those of the frames ports."""
    parts = DistantParts(folder)
    async with proxies(parts.ports[name] for name in PORTS + FRAMES_PORTS * (not blocks_frames)):
        try:
            parts.start("scheduler", "detokenizer", "router", "worker")
            yield parts
        finally:
            parts.close()


@pytest.mark.parametrize("blocks_frames", [False, True])
async def test_nothing_is_lost_if_everything_arrives_late(tmp_path: Path, blocks_frames: bool) -> None:
    async with distant(tmp_path, blocks_frames=blocks_frames) as parts, AsyncClient(parts.target("router")) as client:

        async def is_whole() -> bool:
            info = await client.server_info()
            return bool(info.worker_groups and info.detokenizers)

        await until(is_whole)
        streams = Streams(client, FIRSTS, NUM_TOKENS)
        await streams.reach(NUM_TOKENS // 4)
        parts.end("scheduler")
        parts.start("scheduler")
        results = await streams.check()
    assert all(result.usage is not None and result.usage.completion_tokens == NUM_TOKENS for result in results)
