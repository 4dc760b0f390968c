"""Health based on progress, served as grpc.health.v1: a process with a stalled loop is unhealthy."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import grpc.aio
from grpc.aio import ServicerContext
from grpc_health.v1 import health_pb2, health_pb2_grpc

HEALTH_SERVICE: str = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
_WATCH_INTERVAL_S = 0.25


class LoopProgress:
    """Heartbeat of one loop: the loop calls `touch` when it makes progress, and `idle` before it waits for work."""

    def __init__(self, name: str, timeout_s: float) -> None:
        self.name = name
        self._timeout_s = timeout_s
        self._since: float | None = None  # None while the loop is idle

    def touch(self) -> None:
        """Report progress; the loop must call this again, or `idle`, within the time limit."""
        self._since = time.monotonic()

    def idle(self) -> None:
        """Report that the loop is waiting for work."""
        self._since = None

    @property
    def is_stalled(self) -> bool:
        """Whether the loop has work but has made no progress within its time limit."""
        since = self._since
        return since is not None and time.monotonic() - since > self._timeout_s


class Progress:
    """Health of a process: it is serving unless a loop is stalled or a reason not to serve is set.

    Safe to read from any thread.
    """

    def __init__(self) -> None:
        self._loops: list[LoopProgress] = []
        self._reasons: set[str] = set()

    def loop(self, name: str, timeout_s: float = 5.0) -> LoopProgress:
        """Watch another loop, which is initially idle."""
        loop = LoopProgress(name, timeout_s)
        self._loops.append(loop)
        return loop

    def set_reason(self, reason: str, stands: bool) -> None:
        """Set or clear a reason not to serve, such as `draining` or `no worker`."""
        if stands:
            self._reasons.add(reason)
        else:
            self._reasons.discard(reason)

    def problems(self) -> list[str]:
        """Return the stalled loops and the reasons not to serve; empty while the process is serving."""
        return sorted(self._reasons) + self.stalled()

    def stalled(self) -> list[str]:
        """Return the stalled loops; empty while the process is alive, whether it is serving or not."""
        return [loop.name for loop in self._loops if loop.is_stalled]


def add_health(server: grpc.aio.Server, progress: Progress, service: str) -> None:
    """Serve grpc.health.v1 on `server`, for the whole process (empty name) and for `service`."""
    health_pb2_grpc.add_HealthServicer_to_server(_Health(progress, ("", service)), server)


def check_port(host: str, port: int) -> None:
    """Raise OSError if a port cannot be bound now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as found:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            found.bind((host, port))
        except OSError as error:
            raise OSError(f"cannot listen on {host}:{port}: {error}") from None


def _status(progress: Progress) -> int:
    serving = health_pb2.HealthCheckResponse.SERVING
    return int(health_pb2.HealthCheckResponse.NOT_SERVING if progress.problems() else serving)


class _Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Implements grpc.health.v1; the status is computed at each call."""

    def __init__(self, progress: Progress, names: Sequence[str]) -> None:
        self._progress = progress
        self._names = names
        self._status = _status(progress)
        self._changed = asyncio.Event()
        self._num_watchers = 0
        self._looking: asyncio.Task[None] | None = None

    async def Check(self, request: Any, context: ServicerContext[Any, Any]) -> Any:
        if request.service not in self._names:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service here")
        return health_pb2.HealthCheckResponse(status=_status(self._progress))

    async def Watch(self, request: Any, context: object) -> AsyncIterator[Any]:
        if request.service not in self._names:
            yield health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)
            await asyncio.Event().wait()
        self._num_watchers += 1
        try:
            if self._num_watchers == 1:
                self._status = _status(self._progress)
                self._looking = asyncio.create_task(self._look(), name="health-watch")
            last = -1
            while True:
                changed, status = self._changed, self._status
                if status != last:
                    yield health_pb2.HealthCheckResponse(status=status)
                    last = status
                else:
                    await changed.wait()
        finally:
            self._num_watchers -= 1
            if not self._num_watchers and self._looking is not None:
                self._looking.cancel()

    async def _look(self) -> None:
        """Poll once for all watchers, so that additional watchers cost nothing while the status does not change."""
        while True:
            await asyncio.sleep(_WATCH_INTERVAL_S)
            status = _status(self._progress)
            if status != self._status:
                self._status = status
                changed, self._changed = self._changed, asyncio.Event()
                changed.set()
