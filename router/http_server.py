"""The router's HTTP port, served on its event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the gRPC server's to take; both drain together."""
        yield


class HttpPort:
    """An ASGI application on a port."""

    def __init__(self, app: ASGIApp, host: str, port: int) -> None:
        """Binds the port; 0 takes a free one, in `self.port`.

        Raises:
            OSError: It is taken.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family, backlog=2048)
        self.port: int = self._socket.getsockname()[1]
        config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", ws="none", log_level="warning")
        self._server = _Server(config)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins to answer."""
        self._task = asyncio.create_task(self._server.serve([self._socket]), name="http")

    async def stop(self, drain_timeout_s: float) -> None:
        """Takes nothing new, and gives what runs up to `drain_timeout_s`."""
        self._server.config.timeout_graceful_shutdown = max(int(drain_timeout_s), 0)
        self._server.should_exit = True
        if self._task is not None:
            await self._task
        self._socket.close()
