"""The components as processes on this machine, with a fake worker; each can be killed and restarted."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, cast

import grpc
import grpc.aio

from midstream.model.folder import open_model_folder
from midstream.rpc.channel import open_channel
from protos import loads_pb2, service_pb2_grpc
from tests.integration.named_processes import NamedProcesses
from tests.ports import free_ports

if TYPE_CHECKING:
    from protos.service_pb2_grpc import MidstreamAsyncStub as Stub

START_TIMEOUT_S = 400


class Parts(NamedProcesses):
    """Running processes by name: scheduler, worker, detokenizer, router.

    Attributes:
        flags: Additional flags of the scheduler.
        hold: File; while it exists, the worker soon pauses, so that no stream ends.
    """

    def __init__(self, folder: Path, *flags: str, step_ms: float = 10) -> None:
        super().__init__(folder)
        self.flags = flags
        self.hold = folder / "hold"
        scheduler, worker, detokenizer, self.router_port = free_ports(4)
        self.scheduler_port = scheduler
        self.worker_address = f"tcp://127.0.0.1:{worker}"
        model = open_model_folder("smollm2")
        self._commands = {
            "worker": f"tests.fakes.worker --scheduler tcp://127.0.0.1:{worker} --step-ms {step_ms} "
            f"--model-fingerprint {model.fingerprint} --vocab-size {model.vocab_size}",
            "detokenizer": f"detokenizer --port {detokenizer} --schedulers 127.0.0.1:{scheduler}",
            "router": f"router --port {self.router_port} --http-port 0 --schedulers 127.0.0.1:{scheduler} "
            f"--detokenizers 127.0.0.1:{detokenizer}",
            "scheduler": f"scheduler --port {scheduler} --worker-port {worker}",
        }

    def start(self, name: str) -> subprocess.Popen[bytes]:
        """Start or restart a process."""
        flags = {
            "scheduler": ("--journal-path", str(self.folder / "journal"), *self.flags),
            "worker": ("--hold", str(self.hold)),
        }
        return self.launch(name, *self._commands[name].split(), *flags.get(name, ()))

    def kill(self, name: str) -> None:
        """Send SIGKILL to a process."""
        self.end(name)

    def wait_for_log(self, name: str, text: str) -> None:
        """Wait until a process has logged `text`."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while text not in self.log(name):
            assert time.monotonic() < deadline, self.log(name)
            time.sleep(0.02)

    def _check_running(self) -> None:
        for name, process in self.processes.items():
            assert process.poll() is None, f"{name} exited with status {process.returncode}:\n{self.log(name)}"

    @contextlib.asynccontextmanager
    async def stub(self) -> AsyncIterator[Stub]:
        """Return a stub of the router once it sees a worker and a detokenizer."""
        async with open_channel(f"127.0.0.1:{self.router_port}") as channel:
            stub = cast("Stub", service_pb2_grpc.MidstreamStub(channel))
            async with asyncio.timeout(START_TIMEOUT_S):
                while not await _is_complete(stub):
                    self._check_running()
                    await asyncio.sleep(0.05)
            yield stub


async def _is_complete(stub: Stub) -> bool:
    try:
        info = await stub.GetServerInfo(loads_pb2.GetServerInfoRequest(), timeout=10)
    except grpc.aio.AioRpcError:
        return False
    return bool(info.worker_groups and info.detokenizers)


@contextlib.contextmanager
def running(parts: Parts, *names: str) -> Iterator[Parts]:
    """Start all processes, or only the named ones; kill the remaining ones on exit."""
    try:
        for name in names or ("scheduler", "worker", "detokenizer", "router"):
            parts.start(name)
        yield parts
    finally:
        parts.close()
